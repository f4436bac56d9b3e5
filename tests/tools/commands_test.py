"""Runs what README.md and the guide tell people to type: every line of their `sh` blocks, and the gallery's commands.

    python tests/tools/commands_test.py BUILD VENV [PAGE...]

Lines are run as they are printed, one shell for each page, with two exceptions: `git clone` (this is the clone), and
lines with a word that the reader has to replace (JOB, ADDRESS). `make demo` trains for some seconds only. Programs run
in a folder of their own, which has examples/, build/ and .venv/. A comment that begins with "[0] " is output that must come.
"""
import os
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 1800
PLACEHOLDER = re.compile(r"\b(ADDRESS|JOB|PID|DIR)\b(?!=)")
PACKAGES = re.compile(r"accelerate_train|trainer\.py")  # need packages that bootstrap does not install


def blocks(text):
    return [found[1] for found in re.finditer(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)]


def commands(page):
    """(line, output that must come) of a page."""
    text = page.read_text()
    lines = [line for block in blocks(text) for line in block.splitlines()]
    if page.name == "examples.md":
        lines += [command for row in text.splitlines() if row.startswith("| [")
                  for command in re.findall(r"`([^`]+)` \|$", row)]
    for line in lines:
        command, _, comment = line.partition("  #")
        command = command.strip()
        if command and not command.startswith(("git clone", "#")) and not PLACEHOLDER.search(command):
            yield command, comment.strip() if comment.strip().startswith("[0] ") else ""


def script(page):
    out = ["set -e"]
    for command, _ in commands(page):
        if PACKAGES.search(command):
            continue
        out.append(f"echo {quoted('$ ' + command)}")
        if command.startswith("make"):
            command = f"(cd {quoted(str(ROOT))} && {command})"
        out.append(command)
    return "\n".join(out) + "\n"


def quoted(text):
    return "'" + text.replace("'", "'\\''") + "'"


class CommandsTest(unittest.TestCase):
    build = ROOT / "build" / "release"
    venv = ROOT / ".venv"
    pages = [ROOT / "README.md", *sorted((ROOT / "docs" / "guide").glob("*.md"))]

    def environment(self, home):
        # As a user's shell: nothing of ours, not even that this is a test.
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "CONVOY_", "CTEST", "MAKE", "OMPI"))}
        return kept | {"HOME": str(home), "BOOTSTRAP": "off", "DEMO_SECONDS": "10", "OMP_NUM_THREADS": "1",
                       "CCACHE_DIR": os.environ.get("CCACHE_DIR", str(Path.home() / ".cache" / "ccache")),
                       # As root, and with more ranks than cores.
                       "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
                       "OMPI_MCA_rmaps_base_oversubscribe": "1"}

    def run_page(self, page, home):
        folder = home / page.stem
        folder.mkdir()
        (folder / "examples").symlink_to(ROOT / "examples")
        (folder / "build").mkdir()
        (folder / "build" / "release").symlink_to(self.build)
        (folder / ".venv").symlink_to(self.venv)
        text = page.read_text()
        if found := re.search(r"^```cmake\n(cmake_minimum_required.*?)^```", text, re.MULTILINE | re.DOTALL):
            # The reader's own project: the page's list file and its program.
            (folder / "CMakeLists.txt").write_text(found[1])
            (folder / "train.cpp").write_text((ROOT / "examples" / "train.cpp").read_text())
        before = "" if page.name == "README.md" or page.name.startswith("getting_started") else (
            f"export PATH={quoted(str(self.build / 'bin'))}:$PATH\n. .venv/bin/activate\n")
        done = subprocess.run(["bash", "-c", before + script(page)], cwd=folder, env=self.environment(home),
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT)
        self.assertEqual(done.returncode, 0, f"{page.name}: the last of these failed:\n{done.stdout[-6000:]}")
        for command, output in commands(page):
            self.assertIn(output, done.stdout, f"{page.name}: {command}")

    def test_commands_work_as_printed(self):
        # `make python` puts the package into .venv: it goes again, if it was not there before.
        python = self.venv / "bin" / "python"
        had = subprocess.run([python, "-m", "pip", "show", "-q", "torch-convoy"], capture_output=True).returncode == 0
        with tempfile.TemporaryDirectory(prefix="convoy-docs.") as home:
            try:
                for page in self.pages:
                    with self.subTest(page=page.name):
                        self.run_page(page, Path(home))
            finally:
                if not had:
                    subprocess.run([python, "-m", "pip", "uninstall", "-q", "-y", "torch-convoy"], capture_output=True)

    def test_commands_are_found(self):
        found = dict(commands(ROOT / "README.md"))
        self.assertEqual(found["convoy run -n 4 average"], "[0] average of 4 ranks: 2.5")
        self.assertIn("make demo", found)
        self.assertIn("work_queue", dict(commands(ROOT / "docs" / "guide" / "examples.md")))


if __name__ == "__main__":
    if len(sys.argv) > 2:
        CommandsTest.build, CommandsTest.venv = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()
        if sys.argv[3:]:
            CommandsTest.pages = [Path(page).resolve() for page in sys.argv[3:]]
    unittest.main(argv=sys.argv[:1])
