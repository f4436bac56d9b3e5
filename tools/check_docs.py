#!/usr/bin/env python3
"""Checks what can be checked of the docs without reading them: `make lint` and the test tools.docs run it.

    tools/check_docs.py          prints what is wrong; exit code 1 if anything is

Rules:
  links     lead to files, and anchors to headings
  lines     of prose have at most 120 characters (rows of tables and code cannot be wrapped)
  headings  have an empty line above them
  guide     a page has at most 800 words and a program that runs:
                <!-- program: examples/train.cpp -->   above a block of code,
            whose lines are lines of that file, in its order; comments do not count
  words     of our own do not stand in what users read
  index     docs/README.md lists every page, docs/reference/headers.md every public header,
            docs/guide/examples.md every example
"""
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINE = 120
GUIDE_WORDS = 800
# What we call something, and what users call it.
OUR_WORDS = {"bar": "target", "bars": "targets", "letter": "message", "letters": "messages", "knock": "wake-up",
             "doorbell": "wake-up", "moods": "noise", "riddle": "puzzle"}
ALLOWED = {  # "letters, digits and _": these letters are letters
    "docs/reference/rpc.md": {"letters"}, "docs/reference/launcher.md": {"letters", "bars"},
    "docs/reference/rref.md": {"letters"}, "docs/reference/store.md": {"letters"}, "docs/reference/glossary.md": set(OUR_WORDS),
}
PROGRAM = re.compile(r"<!-- program: (\S+) -->\n+```\w*\n(.*?)```", re.DOTALL)


def without_code(text):
    """The same lines, those of fenced blocks empty."""
    lines, fenced = [], False
    for line in text.split("\n"):
        fence = line.lstrip().startswith("```")
        lines.append("" if fenced or fence else line)
        fenced ^= fence
    return lines


def anchors_of(text):
    """As GitHub makes them of headings."""
    found = set()
    for line in without_code(text):
        if heading := re.match(r"#+ (.*)", line):
            words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading[1]).lower()
            found.add(re.sub(r"[^\w\- ]", "", words).strip().replace(" ", "-"))
    return found


def links_of(text):
    return re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", "\n".join(without_code(text))))


def check_links(page, text):
    for link in links_of(text):
        path, _, anchor = link.partition("#")
        if "://" in path or path.startswith("mailto:"):
            continue
        target = (page.parent / path).resolve() if path else page
        if not target.exists():
            yield f"link {link}: there is no such file"
        elif anchor and target.suffix == ".md" and anchor not in anchors_of(target.read_text()):
            yield f"link {link}: there is no such heading"


def check_lines(text):
    for number, line in enumerate(without_code(text), 1):
        if len(line) > LINE and not line.startswith("|") and not re.match(r"\s*!?\[[^]]*\]\(\S+\)$", line):
            yield f"line {number} has {len(line)} characters, of {LINE}: wrap it"


def check_headings(text):
    above = ""
    for number, line in enumerate(without_code(text), 1):
        if re.match(r"#+ ", line) and above.strip():
            yield f"line {number}: a heading needs an empty line above it"
        above = line


def check_words(name, text):
    for number, line in enumerate(without_code(text), 1):
        for word in re.findall(r"[A-Za-z]+", re.sub(r"`[^`]*`", "", line)):
            if word.lower() in OUR_WORDS and word.lower() not in ALLOWED.get(name, ()):
                yield f"line {number}: '{word}' is a word of ours; write '{OUR_WORDS[word.lower()]}'"


def lines_of_program(text, suffix):
    """Without comments and spaces."""
    if suffix == ".py":
        text = re.sub(r'^""".*?"""', "", text, flags=re.DOTALL)
        text = re.sub(r"(^|\s)#(?!!).*", "", text, flags=re.MULTILINE)
    else:
        text = re.sub(r"(^|\s)//.*", "", text, flags=re.MULTILINE)
    return [squeezed for line in text.splitlines() if (squeezed := " ".join(line.split()))]


def check_program(name, code, root=ROOT):
    path = root / name
    if not path.exists():
        yield f"program {name}: there is no such file"
        return
    rest = iter(lines_of_program(path.read_text(), path.suffix))
    for line in lines_of_program(code, path.suffix):
        if line != "..." and line not in rest:  # searches on from the line found before
            yield f"program {name} has no line '{line}' (after those before it)"
            return


def check_guide(text):
    words = len(text.split())
    if words > GUIDE_WORDS:
        yield f"{words} words; a page of the guide has at most {GUIDE_WORDS}"
    programs = PROGRAM.findall(text)
    if not programs:
        yield "no program: <!-- program: examples/NAME --> above a block of code"
    for name, code in programs:
        yield from check_program(name, code)


def check_lists():
    docs = ROOT / "docs"
    lists = {
        docs / "README.md": [page for part in ("guide", "reference", "internals") for page in (docs / part).glob("*.md")],
        docs / "reference" / "headers.md": [*(ROOT / "include" / "convoy").glob("*.h")],
        docs / "guide" / "examples.md": [*(ROOT / "examples").glob("*.cpp"), *(ROOT / "examples" / "python").glob("*.py")],
    }
    for index, files in lists.items():
        listed = {(index.parent / link.partition("#")[0]).resolve() for link in links_of(index.read_text())}
        for file in sorted(files):
            if file.resolve() not in listed:
                yield f"{index.relative_to(ROOT)}: does not list {file.relative_to(ROOT)}"


def problems():
    for page in sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]):
        name, text = str(page.relative_to(ROOT)), page.read_text()
        found = [*check_links(page, text), *check_lines(text), *check_headings(text)]
        if name.startswith(("docs/guide/", "docs/reference/")) or name in ("README.md", "docs/README.md"):
            found += check_words(name, text)
        if name.startswith("docs/guide/"):
            found += check_guide(text)
        yield from (f"{name}: {problem}" for problem in found)
    yield from check_lists()


if __name__ == "__main__":
    wrong = list(problems())
    print("\n".join(wrong), end="\n" if wrong else "")
    sys.exit(bool(wrong))
