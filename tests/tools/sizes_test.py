"""Classes stay small, and so do public headers; libtorch's layout is known to one file."""
import re
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MEMBERS = 25  # of a class
LINES = 250  # of a public header
OFFSETOF = "src/ddp/graph.cpp"

CLASS = re.compile(r"(?<!enum )\b(?:class|struct)\s+(?:(?:alignas\s*\([^)]*\)|\[\[[^]]*\]\]|[A-Z][A-Z_]+)\s+)*"
                   r"([\w:]+)\s*(?:<[^;{}]*>)?\s*(?:final\s*)?(?::(?!:)[^;{}]*)?\{")
NOT_DATA = re.compile(r"(?:static|using|typedef|friend|template|extern)\b")
FORWARD = re.compile(r"(?:class|struct|union|enum(?: class)?)\s+\w+(?:\s*:\s*[\w.]+)?$")
PAIRS = {"(": ")", "[": "]", "{": "}"}


def code_of(text):
    """Without comments, texts and the preprocessor's lines."""
    text = re.sub(r'R"([^(\s]*)\(.*?\)\1"', '""', text, flags=re.DOTALL)
    text = re.sub(r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\'|//[^\n]*|/\*.*?\*/',
                  lambda found: " " if found[0][0] == "/" else "0", text, flags=re.DOTALL)
    return re.sub(r"^[ \t]*#(?:.*\\\n)*.*$", "", text, flags=re.MULTILINE)


def end_of(code, begin):
    """Behind the bracket that closes the one at `begin`."""
    depth = 0
    for at in range(begin, len(code)):
        depth += (code[at] in "([{") - (code[at] in ")]}")
        if depth == 0:
            return at + 1
    raise ValueError("a bracket is not closed: " + code[begin:begin + 80])


def outline(body):
    """A class as if nothing stood in brackets and templates had no arguments."""
    body = re.sub(r"\boperator\s*(?:\(\)|[^\s\w(]+)", "operator_", body.replace("::", "."))
    body = re.sub(r"\(\s*\*\s*(\w+)\s*\)\s*\(", r" \1 = (", body)  # a pointer to a function is data
    body = re.sub(r"\balignas\s*\([^()]*\)|\b(?:public|private|protected)\s*:", " ", body).replace("->", ".")
    text, at = "", 0
    while at < len(body):
        pair = PAIRS.get(body[at])
        text += body[at] + pair if pair else body[at]
        at = end_of(body, at) if pair else at + 1
    before = None
    while text != before:
        before, text = text, re.sub(r"<[^<>;]*>", "", text)
    return text.replace("[]", " ")


def declarations(body):
    """Those at the top; what a function does is left out."""
    begin = 0
    text = outline(body)
    for found in re.finditer(r";|\{\}(?!\s*[;,{])", text):
        part = text[begin:found.end()]
        if found[0] == ";" or "(" in part.split("=")[0]:
            yield part.rstrip(";").strip(" \n;")
            begin = found.end()


def members(body):
    """Names of a class's own data."""
    names = []
    for declaration in declarations(body):
        if not declaration or NOT_DATA.match(declaration) or FORWARD.match(declaration):
            continue
        if inner := re.match(r"(?:class|struct|union|enum)\b([^{(=]*)\{\}(.*)", declaration, re.DOTALL):
            if inner[1].strip() and not inner[2].strip():
                continue  # a type, and nothing of that type
            declaration = inner[2].strip() or "unnamed"
        if "(" in declaration.split("=")[0]:
            continue  # a function
        for part in declaration.split(","):
            words = re.split(r"[=:{]", part)[0].split()
            names.append(words[-1] if words else part)
    return names


def classes(text):
    """(name, names of its data), nested and local ones too."""
    code = code_of(text)
    for found in CLASS.finditer(code):
        yield found[1], members(code[found.end():end_of(code, found.end() - 1) - 1])


def files(*folders):
    for folder in folders:
        yield from (path for path in sorted((ROOT / folder).rglob("*")) if path.suffix in (".h", ".cpp", ".inc"))


class SizesTest(unittest.TestCase):
    def test_members_are_counted(self):
        for text, names in {
            "struct A { int a; std::map<int, std::vector<int>> b, c = {}; };": ["a", "b", "c"],
            "class A final : public B<int(int)> { public: A(); ~A() = default; private: int a_ = f(1); };": ["a_"],
            "struct A { A() : a(1), b{2} {} int a; int b{3}; void f() const { int no; } int d; };": ["a", "b", "d"],
            "struct A { std::function<void(int)> f = [](int x) { g(x); }; void (*p)(int) = nullptr; };": ["f", "p"],
            "struct A { bool operator<(const A& o) const; A& operator=(A&&) { return *this; } int a; };": ["a"],
            "struct A { static constexpr int kNo = 1; using B = int; friend class C; struct D; enum E { x }; };": [],
            "struct A { // int no;\n alignas(64) std::atomic<int> a[4]; unsigned b : 3; /* int no; */ };": ["a", "b"],
            "struct A { union { int a; float b; }; struct { int c; } d; template <class T> void f(T t) {} };":
                ["unnamed", "d"],
            "class A::Impl { std::size_t most = std::size_t{1} << 20; char c = ';'; std::string s = \"};\"; };":
                ["most", "c", "s"],
        }.items():
            with self.subTest(text=text):
                self.assertEqual(next(classes(text))[1], names)
        self.assertEqual(dict(classes("class A { struct B { int b; }; B b_; }; enum class C { x };")),
                         {"A": ["b_"], "B": ["b"]})

    def test_one_member_too_many_is_seen(self):
        data = "".join(f"int m{i}_;\n" for i in range(MEMBERS + 1))
        self.assertEqual([len(names) for _, names in classes("class A {\n" + data + "void f() {}\n};")], [MEMBERS + 1])

    def test_classes_are_small(self):
        sizes = {}
        for path in files("src", "include/convoy", "python/src"):
            for name, names in classes(path.read_text()):
                with self.subTest(file=str(path.relative_to(ROOT)), name=name):
                    self.assertLessEqual(len(names), MEMBERS, " ".join(names))
                sizes[name] = len(names)
        # Those that are the largest are seen.
        self.assertGreater(sizes["Reducer::Impl"], 15)
        self.assertGreater(sizes["ShardedOptimizerBase::Impl"], 15)
        self.assertGreater(sizes["DdpOptions"], 10)
        self.assertGreater(sizes["Agent"], 15)
        self.assertGreater(sizes["Party"], 15)
        self.assertGreater(sizes["ShmEndpoint"], 15)

    def test_public_headers_are_short(self):
        headers = list(files("include/convoy"))
        self.assertGreater(len(headers), 40)
        for path in headers:
            with self.subTest(file=str(path.relative_to(ROOT))):
                self.assertLessEqual(len(path.read_text().splitlines()), LINES)

    def test_one_file_knows_the_layout_of_libtorch(self):
        known = [str(path.relative_to(ROOT)) for path in files("src", "include", "python/src")
                 if "offsetof" in re.findall(r"\w+(?=\s*\()", code_of(path.read_text()))]
        self.assertEqual(known, [OFFSETOF])


if __name__ == "__main__":
    unittest.main()
