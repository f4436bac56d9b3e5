"""Names of tests are the same in every run, and say what they test. ctest runs all of them.

test_names_test.py <build folder>: of all test programs that are built there.
"""
import fnmatch
import json
import re
import subprocess
import sys
import tempfile
import unittest
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "release"

# What GoogleTest prints of a value that it cannot print, and of a pointer.
UNPRINTABLE = re.compile(r"\d+-byte object|\b0x[0-9a-fA-F]{5,}|\bpointing to\b")


def listed(program):
    """Suite.Test/Name and, behind a #, the parameter: lines as --gtest_list_tests has them."""
    done = subprocess.run([program, "--gtest_list_tests"], capture_output=True, text=True, check=True, timeout=60)
    suite = ""
    for line in done.stdout.splitlines():
        if line.startswith(" "):
            yield suite + line.strip()
        elif re.match(r"[\w/]+\.", line):
            suite = line.split()[0]


def faults(tests):
    """Of lines of listed(): those that are not stable, or are numbers where there is a name."""
    for line in tests:
        name, _, parameter = line.partition("#")
        if UNPRINTABLE.search(line):
            yield f"{line}: give the parameter a PrintTo"
        elif re.search(r"/\d+\s*$", name) and parameter:
            yield f"{line}: give INSTANTIATE_TEST_SUITE_P a function that names its values"


def filters_of_ctest():
    """Program -> what ctest runs of it: patterns of --gtest_filter."""
    # From a folder of its own: ctest moves the log of the folder in which it begins, which a running one writes.
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "CTestTestfile.cmake").write_text(f'subdirs("{BUILD}")\n')
        done = subprocess.run(["ctest", "--test-dir", folder, "--show-only=json-v1"], capture_output=True, text=True,
                              check=True, timeout=120)
    found = {}
    for test in json.loads(done.stdout)["tests"]:
        program, *arguments = test.get("command") or [""]
        chosen = [argument.partition("=")[2] for argument in arguments if argument.startswith("--gtest_filter=")]
        found.setdefault(Path(program).name, []).extend(chosen or ["*"])
    return found


def left_out(tests, patterns):
    """Of lines of listed(): those that no pattern of GoogleTest's matches."""
    kinds = {pattern for pattern in patterns if "*" in pattern or "?" in pattern}
    for line in tests:
        name = line.partition("#")[0].strip()
        if name not in patterns and not any(fnmatch.fnmatchcase(name, kind) for kind in kinds):
            yield name


class TestNamesTest(unittest.TestCase):
    def test_programs_list_readable_names(self):
        programs = sorted(BUILD.glob("bin/*_test"))
        self.assertTrue(programs, f"there are no test programs in {BUILD}/bin")
        known = filters_of_ctest()
        with ThreadPoolExecutor(2) as pool:
            for program, tests in zip(programs, pool.map(lambda path: list(listed(path)), programs)):
                with self.subTest(program=program.name):
                    self.assertTrue(tests)
                    self.assertEqual(list(faults(tests)), [])
                    self.assertEqual(list(left_out(tests, set(known.get(program.name, ())))), [])

    def test_tests_that_ctest_does_not_run_are_found(self):
        tests = ["Suite.One", "Modes/Suite.Two/Threads  # GetParam() = threads"]
        self.assertEqual(list(left_out(tests, {"Suite.*", "Modes/Suite.*"})), [])
        self.assertEqual(list(left_out(tests, {"Suite.*"})), ["Modes/Suite.Two/Threads"])
        self.assertEqual(list(left_out(tests, {"Modes/Suite.Two/Threads"})), ["Suite.One"])
        self.assertEqual(list(left_out(tests, set())), ["Suite.One", "Modes/Suite.Two/Threads"])

    def test_faults_are_found(self):
        for line in ("All/Kernels.Sum/avx2  # GetParam() = (40-byte object <28-C0 1A-DD>, f32)",
                     'Stores/FromC10d.All/Hash  # GetParam() = 0x55d0c0ffee00 pointing to "Hash"',
                     "Seeds/TableModel.Agrees/0  # GetParam() = 1"):
            self.assertEqual(len(list(faults([line]))), 1, line)
        for line in ("Plain.Test", "Modes/GroupTest.Sum/Threads  # GetParam() = threads",
                     "Sizes/KillTest.IsTold/Bytes8  # GetParam() = 8"):
            self.assertEqual(list(faults([line])), [], line)


if __name__ == "__main__":
    if len(sys.argv) > 1 and not sys.argv[1].startswith("-"):
        BUILD = Path(sys.argv.pop(1)).resolve()
    unittest.main()
