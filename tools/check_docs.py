#!/usr/bin/env python3
"""Checks what can be checked of the docs without reading them: `make lint` and the test tools.docs run it.

    tools/check_docs.py          prints what is wrong; exit code 1 if anything is

Rules:
  links     lead to files, and anchors to headings
  lines     have at most 120 characters, in blocks of code too (rows of tables cannot be wrapped)
  headings  have an empty line above them
  guide     a page has at most 800 words and a program that runs:
                <!-- program: examples/train.cpp -->   above a block of code,
            whose lines are lines of that file, in its order; comments do not count. C++ closes what it opens
  words     of NOT_HERE stand on no page, those of the glossary's second table only in docs/internals
  index     docs/README.md lists every page, docs/reference/headers.md every public header,
            docs/guide/examples.md every example
"""
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINE = 120
GUIDE_WORDS = 800
GLOSSARY = "docs/reference/glossary.md"
INTERNAL = "## Words of the internals"  # its second table
# What we called something, and what others call it.
NOT_HERE = {"bar": "target", "bars": "targets", "moods": "noise", "riddle": "puzzle", "riddles": "puzzles"}
# Here a letter is a letter, and a bar a bar.
PHRASES = re.compile(r"letters, digits|progress bars")
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
    for number, (line, prose) in enumerate(zip(text.split("\n"), without_code(text)), 1):
        row = prose.startswith("|") or re.match(r"\s*!?\[[^]]*\]\(\S+\)$", prose)
        if len(line) > LINE and not row:
            yield f"line {number} has {len(line)} characters, of {LINE}: wrap it"


def check_headings(text):
    above = ""
    for number, line in enumerate(without_code(text), 1):
        if re.match(r"#+ ", line) and above.strip():
            yield f"line {number}: a heading needs an empty line above it"
        above = line


def internal_words(glossary):
    """Of its second table: the words, and what users read in their place."""
    words = {}
    for names, instead in re.findall(r"^\| \*\*(.+)\*\* \|.*\| (.+) \|$", glossary.partition(INTERNAL)[2], re.MULTILINE):
        for name in names.split(", "):
            words |= {name: instead, f"{name}s": f"{instead}s"}
    return words


def check_words(text, words):
    for number, line in enumerate(without_code(text), 1):
        for word in re.findall(r"[A-Za-z]+", PHRASES.sub("", re.sub(r"`[^`]*`", "", line))):
            if word.lower() in words:
                yield f"line {number}: '{word}' is a word of ours; write '{words[word.lower()]}'"


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
    if path.suffix == ".cpp":
        plain = re.sub(r"//.*|\"(\\.|[^\"\\])*\"", "", code)
        if plain.count("{") != plain.count("}"):
            yield f"program {name}: the block does not close what it opens; show the end, or write '...' and '}}'"


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
    internal = internal_words((ROOT / GLOSSARY).read_text())
    for page in sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]):
        name, text = str(page.relative_to(ROOT)), page.read_text()
        found = [*check_links(page, text), *check_lines(text), *check_headings(text), *check_words(text, NOT_HERE)]
        if not name.startswith("docs/internals/"):
            found += check_words(text.partition(INTERNAL)[0] if name == GLOSSARY else text, internal)
        if name.startswith("docs/guide/"):
            found += check_guide(text)
        yield from (f"{name}: {problem}" for problem in found)
    yield from check_lists()


if __name__ == "__main__":
    wrong = list(problems())
    print("\n".join(wrong), end="\n" if wrong else "")
    sys.exit(bool(wrong))
