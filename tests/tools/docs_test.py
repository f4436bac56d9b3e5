"""The docs say what is there: links lead somewhere, programs are those that are compiled."""
import re
import subprocess
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


class DocsTest(unittest.TestCase):
    def test_links_lead_somewhere(self):
        for page in PAGES:
            for link in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
                if "://" not in link:
                    with self.subTest(page=page.name, link=link):
                        self.assertTrue((page.parent / link).exists())

    def test_the_readme_shows_the_example(self):
        shown = re.search(r"```cpp\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
        self.assertEqual(shown, (ROOT / "examples" / "average.cpp").read_text())

    def test_getting_started_shows_the_examples(self):
        shown = re.search(r"```cpp\n(.*?)```", (ROOT / "docs" / "getting_started.md").read_text(), re.DOTALL)[1]
        program = (ROOT / "examples" / "train.cpp").read_text()
        self.assertEqual(shown.split(), re.sub(r"(^| )//.*", "", program, flags=re.MULTILINE).split())
        page = (ROOT / "docs" / "getting_started_python.md").read_text()
        program = {line.strip() for line in (ROOT / "examples" / "python" / "train.py").read_text().splitlines()}
        for line in re.search(r"```python\n(.*?)```", page, re.DOTALL)[1].splitlines():
            self.assertIn(line.strip(), program)

    def test_the_index_knows_every_page(self):
        listed = set(re.findall(r"\]\(([^)#\s]+)", (ROOT / "docs" / "README.md").read_text()))
        for page in (ROOT / "docs").glob("*.md"):
            if page.name != "README.md":
                self.assertIn(page.name, listed)

    def test_pictures_are_what_their_texts_say(self):
        done = subprocess.run([ROOT / "tools" / "pictures", "--check"], capture_output=True, text=True, check=False)
        self.assertEqual((done.returncode, done.stdout), (0, ""))

    def test_targets_of_make_exist(self):
        targets = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))
        self.assertIn("test", targets)
        for page in PAGES:
            # At the beginning of a line of code or of an inline piece of code.
            for words in re.findall(r"(?:^|`)make((?: [a-z-]+)+)", page.read_text(), re.MULTILINE):
                for word in words.split():
                    with self.subTest(page=page.name, word=word):
                        self.assertIn(word, targets)

    def test_the_list_of_targets_is_complete(self):
        makefile = (ROOT / "Makefile").read_text()
        listed = re.search(r"^targets := ((?:.*\\\n)*.*)", makefile, re.MULTILINE)[1]
        explained = re.findall(r"^([a-z-]+):.*## ", makefile, re.MULTILINE)
        self.assertEqual(sorted(listed.replace("\\", "").split()), sorted(explained))

    def test_tests_that_are_named_exist(self):
        defined = re.compile(r"^TEST(?:_[FP])?\((\w+),\s*(\w+)\)", re.MULTILINE)
        tests = {".".join(names) for file in (ROOT / "tests").rglob("*.cpp") for names in defined.findall(file.read_text())}
        named = set(re.findall(r"`([A-Z]\w+\.[A-Z]\w+)`", (ROOT / "docs" / "reliability.md").read_text()))
        self.assertGreater(len(named), 50)
        self.assertEqual(sorted(named - tests), [])


if __name__ == "__main__":
    unittest.main()
