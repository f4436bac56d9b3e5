"""The docs say what is there: links lead somewhere, programs are those that are compiled."""
import importlib.util
import os
import re
import subprocess
import tempfile
import unittest
from importlib.machinery import SourceFileLoader
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def tool(name):
    loader = SourceFileLoader(name.removesuffix(".py"), str(ROOT / "tools" / name))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
    loader.exec_module(module)
    return module


check_docs, docs_site = tool("check_docs.py"), tool("docs_site")
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def names_of_tests(text, tests):
    """Suite.Case, where the suite is one of those of `tests`, or has the name of one."""
    suites = {name.partition(".")[0] for name in tests}
    found = re.findall(r"\b([A-Z]\w+)\.([A-Z]\w+)\b", text)
    return {f"{suite}.{case}" for suite, case in found if suite in suites or suite.endswith("Test")}


class DocsTest(unittest.TestCase):
    def test_nothing_is_wrong(self):
        self.assertEqual(list(check_docs.problems()), [])

    def test_what_is_wrong_is_found(self):
        page = ROOT / "docs" / "guide" / "rpc.md"
        for checked, wanted in (
            (check_docs.check_links(page, "[a](no_such_page.md)"), ["link no_such_page.md: there is no such file"]),
            (check_docs.check_links(page, "[a](faq.md#nowhere)"), ["link faq.md#nowhere: there is no such heading"]),
            (check_docs.check_links(page, "[a](faq.md#which-torch)\n```\n[b](x.md)\n```\n`[c](y.md)`"), []),
            (check_docs.check_lines("x" * 121), ["line 1 has 121 characters, of 120: wrap it"]),
            (check_docs.check_lines("| " + "x" * 121 + "\n```\n| " + "x" * 119 + "\n```"),
             ["line 3 has 121 characters, of 120: wrap it"]),
            (check_docs.check_headings("# A\n\ntext\n## B"), ["line 4: a heading needs an empty line above it"]),
            (check_docs.check_headings("# A\n\n## B\n\n```\nx\n# a comment\n```"), []),
            (check_docs.check_words("The bar is 1, `bar` and progress bars are not", check_docs.NOT_HERE),
             ["line 1: 'bar' is a word of ours; write 'target'"]),
            (check_docs.check_words("letters, digits\nTwo letters", {"letters": "messages"}),
             ["line 2: 'letters' is a word of ours; write 'messages'"]),
            (check_docs.check_guide("word " * 801), ["801 words; a page of the guide has at most 800",
                                                     "no program: <!-- program: examples/NAME --> above a block of code"]),
            (check_docs.check_program("examples/no.cpp", ""), ["program examples/no.cpp: there is no such file"]),
            (check_docs.check_program("examples/average.cpp", "int main() {\n...\n}  // why"), []),
            (check_docs.check_program("examples/average.cpp", "}\nint main() {"),
             ["program examples/average.cpp has no line 'int main() {' (after those before it)"]),
            (check_docs.check_program("examples/average.cpp", "int main() {\n..."),
             ["program examples/average.cpp: the block does not close what it opens; show the end, "
              "or write '...' and '}'"]),
        ):
            self.assertEqual(list(checked), wanted)

    def test_words_of_the_internals(self):
        words = check_docs.internal_words((ROOT / check_docs.GLOSSARY).read_text())
        self.assertEqual(words, {"letter": "message", "letters": "messages", "knock": "wake-up", "knocks": "wake-ups",
                                 "doorbell": "wake-up", "doorbells": "wake-ups"})

    def test_the_site_can_be_made(self):
        """Its pages and the API reference, without what renders them."""
        with tempfile.TemporaryDirectory() as folder:
            docs_site.OUT, docs_site.SOURCE = Path(folder) / "docs", Path(folder) / "docs" / "src"
            headers = docs_site.stage()
            self.assertIn("guide/rpc.md", docs_site.navigation(headers))
            page = (docs_site.SOURCE / "api" / "queue.md").read_text()
            self.assertIn("| `capacity` | `std::size_t` | `1024` |", page)
            self.assertIn("## Barrier", page)
            rules = (docs_site.SOURCE / "api" / "optimizer_rules.md").read_text()
            self.assertIn("| `dampening` | `double` | `0` |", rules)  # the second of one declaration
            self.assertNotIn("private:", page)

    def test_the_readme_shows_the_example(self):
        shown = re.search(r"```cpp\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
        program = (ROOT / "examples" / "average.cpp").read_text()
        self.assertEqual(shown, program[program.index("#include"):])

    def test_pictures_are_what_their_texts_say(self):
        done = subprocess.run([ROOT / "tools" / "pictures", "--check"], capture_output=True, text=True, check=False)
        self.assertEqual((done.returncode, done.stdout), (0, ""))

    @unittest.skipUnless(os.environ.get("CONVOY_COMMAND"), "needs the command (ctest sets it)")
    def test_the_command_line_is_in_the_reference(self):
        page = (ROOT / "docs" / "reference" / "launcher.md").read_text()
        for command in ("run", "record", "doctor"):
            done = subprocess.run([os.environ["CONVOY_COMMAND"], "help", command], capture_output=True, text=True, check=True)
            options = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", done.stdout))
            self.assertIn("--help", options)
            for option in sorted(options):
                with self.subTest(command=command, option=option):
                    self.assertIn(option, page)

    def test_targets_of_make_exist(self):
        targets = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))
        self.assertIn("test", targets)
        for page in PAGES:
            # At the beginning of a line of code or of an inline piece of code.
            text = page.read_text()
            code = "\n".join(re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
            for words in re.findall(r"^make((?: [a-z-]+)+)", code, re.MULTILINE) + re.findall(r"`make((?: [a-z-]+)+)", text):
                for word in words.split():
                    with self.subTest(page=page.name, word=word):
                        self.assertIn(word, targets)

    def test_the_list_of_targets_is_complete(self):
        makefile = (ROOT / "Makefile").read_text()
        listed = re.search(r"^targets := ((?:.*\\\n)*.*)", makefile, re.MULTILINE)[1]
        explained = re.findall(r"^([a-z-]+):.*## ", makefile, re.MULTILINE)
        self.assertEqual(sorted(listed.replace("\\", "").split()), sorted(explained))

    def test_tests_that_are_named_exist(self):
        defined = re.compile(r"^(?:TYPED_)?TEST(?:_[FP])?\((\w+),\s*(\w+)\)", re.MULTILINE)
        tests = {".".join(names) for file in (ROOT / "tests").rglob("*.cpp") for names in defined.findall(file.read_text())}
        named = {page: names_of_tests(page.read_text(), tests) for page in PAGES}
        self.assertGreater(len(named[ROOT / "docs" / "reference" / "reliability.md"]), 50)
        for page, names in named.items():
            self.assertEqual(sorted(names - tests), [], page.name)

    def test_names_of_tests_are_found(self):
        tests = {"QueueTest.Puts", "Options.Words"}
        for text, names in {
            "`QueueTest.Puts`, `QueueTest.Gone`, `ReduceOp.AVG`": {"QueueTest.Puts", "QueueTest.Gone"},
            "`Options.Gone`": {"Options.Gone"},
            "`build/release/bin/ddp_test --gtest_filter=DdpTest.Gone`": {"DdpTest.Gone"},
            "`Ranks/DdpTest.Gone/2`, `docs_test.py`, QueueTest.Puts.": {"DdpTest.Gone", "QueueTest.Puts"},
        }.items():
            with self.subTest(text=text):
                self.assertEqual(names_of_tests(text, tests), names)


if __name__ == "__main__":
    unittest.main()
