"""docs/reference/environment.md has every environment variable of the code, and no other."""
import re
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "environment.md"

# Texts that look like variables and are none.
NOT_VARIABLES = {"BF16_COMPRESS", "FP16_COMPRESS", "POST_FORWARD", "MPI_THREAD_SINGLE", "MPI_THREAD_FUNNELED",
                 "MPI_THREAD_SERIALIZED", "MPI_THREAD_MULTIPLE"}
NAMES_OF_MESSAGES = re.compile(r"""\{"(\w+)", MessageType::\1\}""")  # of PyTorch's RPC
# With an underscore; "OMPI_MCA_ess_base_jobid" is one, too. At the end of an underscore something follows at run time.
NAME = re.compile(r"""["']([A-Z][A-Z0-9]*_(?:[A-Z0-9_]*|MCA_[a-z_]+))=?["']""")
# Of any form, where the environment is asked.
ASKED = re.compile(r"""(?:\bgetenv\(|\b(?:number_in|number_from|from_environment)\(|\benviron(?:\.(?:get|setdefault)\(|\[))"""
                   r"""\s*["'](\w+)["']|["'](\w+)["'] in os\.environ""")
# In tests and benchmarks other texts look like variables, too: only where they are asked for, and ours.
OURS = re.compile(r"""["']((?:CONVOY|BENCH)_[A-Z_]+)(?=[="'])""")
FOR_TESTS = "\n## For tests and benchmarks\n"  # the page's last part
# What one test sets to see it arrive, and what torch and ccache read.
NOT_FOR_TESTS = {"CONVOY_SAMPLE", "CONVOY_SPAWN_SAMPLE", "CONVOY_SPAWN_TEST", "CONVOY_STOP_EARLY", "STARTED_WORKER",
                 "CONVOY_TEST_FOREIGN_FILE", "TEST_FILE", "HOME", "CCACHE_DIR", "GLOO_SOCKET_IFNAME",
                 "TP_SOCKET_IFNAME", "TORCH_DIST_INIT_BARRIER", "INIT_METHOD"}
SHELL = re.compile(r"\$\{?(CONVOY_[A-Z_]+)")


def without_comments(text):
    """Without C++'s: // outside of a string."""
    return re.sub(r'("(?:\\.|[^"\\\n])*")|//.*', lambda found: found[1] or "", text)


def asked_in(text):
    return {name for pair in ASKED.findall(text) for name in pair if name}


def names_in_source(text):
    """Of C++ and Python."""
    text = without_comments(text)
    return (set(NAME.findall(text)) | asked_in(text)) - NOT_VARIABLES - set(NAMES_OF_MESSAGES.findall(text))


def names_in_test(text):
    text = without_comments(text)
    return (set(OURS.findall(text)) | asked_in(text)) - NOT_FOR_TESTS


def sources(*folders):
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".cpp", ".h", ".py", ".in") and path.is_file():
                yield path


def in_code():
    """Name -> a file that has it."""
    found = {}
    for path in sources("src", "include", "python"):
        for name in names_in_source(path.read_text()):
            found.setdefault(name, str(path.relative_to(ROOT)))
    for path in sorted((ROOT / "tools").iterdir()):
        if path.is_file():
            for name in SHELL.findall(path.read_text()):
                found.setdefault(name, str(path.relative_to(ROOT)))
    return found


def in_tests():
    """Name -> a test or benchmark that has it."""
    found = {}
    for path in sources("tests", "bench"):
        if path != Path(__file__).resolve():
            for name in names_in_test(path.read_text()):
                found.setdefault(name, str(path.relative_to(ROOT)))
    return found


def in_page(text):
    """Names in the rows of tables: of the first column, or of the second where the first has none."""
    found = set()
    for line in text.splitlines():
        cells = line.split("|")
        if line.startswith("| ") and len(cells) > 3:
            column = cells[1] if "`" in cells[1] else cells[2]
            found |= set(re.findall(r"`([A-Z][A-Za-z0-9_]+)`", column))
    return found


class EnvironmentTest(unittest.TestCase):
    def test_page_and_code_have_the_same_variables(self):
        code, page = in_code(), in_page(PAGE.read_text().partition(FOR_TESTS)[0])
        self.assertIn("CONVOY_LOG", code)
        self.assertIn("CONVOY_LOG", page)
        prefixes = tuple(name for name in code if name.endswith("_"))
        for name, path in sorted(code.items()):
            with self.subTest(variable=name):
                there = name in page or (name in prefixes and any(row.startswith(name) for row in page))
                self.assertTrue(there, f"{path} has {name}: add it to {PAGE.relative_to(ROOT)}, or to NOT_VARIABLES")
        for name in sorted(page):
            with self.subTest(variable=name):
                self.assertTrue(name in code or name.startswith(prefixes),
                                f"{PAGE.relative_to(ROOT)} has {name}, which nothing reads or sets")

    def test_page_and_tests_have_the_same_variables(self):
        before, _, behind = PAGE.read_text().partition(FOR_TESTS)
        known, page, tests = in_page(before), in_page(behind), in_tests()
        self.assertIn("CONVOY_SEEDS", page)
        for name, path in sorted(tests.items()):
            with self.subTest(variable=name):
                self.assertTrue(name in known or name in page,
                                f"{path} has {name}: add it to {PAGE.relative_to(ROOT)}, or to NOT_FOR_TESTS")
        for name in sorted(page):
            with self.subTest(variable=name):
                self.assertIn(name, tests, f"{PAGE.relative_to(ROOT)} has {name}, which no test or benchmark has")
                self.assertNotIn(name, known)

    def test_variables_are_found(self):
        for text, names in {
            'std::getenv("NEW");': {"NEW"},
            'std::getenv(\n  "CONVOY_NEW")': {"CONVOY_NEW"},
            'constexpr const char* kFdVariable = "CONVOY_NEW_FD";': {"CONVOY_NEW_FD"},
            'reader.number("SLURM_NEW")': {"SLURM_NEW"},
            'os.environ.get("NEW", 1), os.environ["OTHER"], "THIRD" in os.environ': {"NEW", "OTHER", "THIRD"},
            '  // std::getenv("CONVOY_OLD")\n  x();  // "CONVOY_OLD"': set(),
            'fail("CONVOY_ISA is unknown"); names = {"MPI_THREAD_SINGLE", "SIGKILL"};': set(),
        }.items():
            with self.subTest(text=text):
                self.assertEqual(names_in_source(text), names)
        for text, names in {
            '{.environment = {"CONVOY_NEW=1"}}, concat("CONVOY_SEEDS=", seed)': {"CONVOY_NEW", "CONVOY_SEEDS"},
            'number_from("SOAK_NEW", 15); is_set("SOME_TEXT"); os.environ.setdefault("NEW", "1")': {"SOAK_NEW", "NEW"},
            'HasSubstr("CONVOY_DEBUG is"), std::getenv("HOME")  // "CONVOY_OLD"': set(),
        }.items():
            with self.subTest(text=text):
                self.assertEqual(names_in_test(text), names)
        self.assertEqual(in_page("| `A_B`, `C_D` | 1 | `OTHER_VALUE` |\n| Open MPI | `E_F` |\n|---|---|\ntext `G_H`"),
                         {"A_B", "C_D", "E_F"})


if __name__ == "__main__":
    unittest.main()
