"""tools/check_layers.py finds what it is there for, and nothing else."""
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "check_layers.py"
sys.path.insert(0, str(TOOL.parent))
import check_layers  # noqa: E402


class CheckLayersTest(unittest.TestCase):
    def tree(self, files):
        """A small project on disk from {path: text}; CMake lists that are not given name all."""
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        listed = {}
        for path in files:
            top, _, name = path.partition("/")
            if path.endswith(".cpp"):
                listed.setdefault(top, []).append(name)
            elif top == "include":
                listed.setdefault("src", []).append(name)
        lists = {f"{top}/CMakeLists.txt": "\n".join(names) for top, names in listed.items()}
        for path, text in {**lists, **files}.items():
            full = Path(folder.name, path)
            full.parent.mkdir(parents=True, exist_ok=True)
            full.write_text(text)
        return Path(folder.name)

    def problems(self, files):
        return check_layers.Checker(self.tree(files)).run()

    def assert_clean(self, files):
        self.assertEqual(self.problems(files), [])

    def assert_finds(self, files, *words):
        problems = self.problems(files)
        self.assertEqual(len(problems), 1, problems)
        for word in words:
            self.assertIn(word, problems[0])

    def includes(self, layer, target):
        return {f"src/{layer}/a.cpp": f"#include {target}\n"}

    def test_this_project_is_clean(self):
        self.assertEqual(check_layers.Checker(ROOT).run(), [])

    def test_downward_includes_are_fine(self):
        for layer, below in check_layers.MAY_INCLUDE.items():
            for other in [layer, *below]:
                with self.subTest(layer=layer, other=other):
                    self.assert_clean(self.includes(layer, f'"{other}/x.h"'))

    def test_every_other_include_is_found(self):
        for layer, below in check_layers.MAY_INCLUDE.items():
            for other in check_layers.MAY_INCLUDE:
                if other != layer and other not in below:
                    with self.subTest(layer=layer, other=other):
                        self.assert_finds(self.includes(layer, f'"{other}/x.h"'),
                                          f"layer {layer} includes {other}/x.h")

    def test_the_rules_that_the_style_names(self):
        # Written out, so that a slip in the table above cannot confirm itself.
        forbidden = [("base", "os"), ("store", "transport"), ("transport", "store"), ("group", "share"),
                     ("share", "group"), ("ddp", "rpc"), ("rpc", "ddp"), ("ddp", "autograd"),
                     ("rpc", "autograd"), ("autograd", "optim"), ("coll", "tensor"),
                     ("launch", "transport"), ("launch", "coll"), ("launch", "group"), ("base", "launch")]
        for layer, other in forbidden:
            with self.subTest(layer=layer, other=other):
                self.assert_finds(self.includes(layer, f'"{other}/x.h"'), other)
        allowed = [("os", "base"), ("coll", "transport"), ("tensor", "coll"), ("rpc", "group"),
                   ("rpc", "share"), ("autograd", "rpc"), ("optim", "autograd"), ("launch", "store")]
        for layer, other in allowed:
            with self.subTest(layer=layer, other=other):
                self.assert_clean(self.includes(layer, f'"{other}/x.h"'))

    def test_public_headers_count_as_their_layer(self):
        self.assert_clean(self.includes("os", '"convoy/error.h"'))
        self.assert_clean(self.includes("launch", '"convoy/store.h"'))
        self.assert_finds(self.includes("base", '"convoy/store.h"'), "convoy/store.h", "of layer store")
        self.assert_finds(self.includes("ddp", '"convoy/rpc.h"'), "of layer rpc")
        self.assert_finds(self.includes("group", "<convoy/convoy.h>"), "of layer all")

    def test_torch_below_the_line(self):
        for header in ["torch/torch.h", "ATen/core/Tensor.h", "c10/util/Exception.h", "fmt/format.h"]:
            for layer in ["base", "coll", "launch"]:
                with self.subTest(layer=layer, header=header):
                    self.assert_finds(self.includes(layer, f"<{header}>"), "torch-free", header)
            self.assert_clean(self.includes("tensor", f"<{header}>"))

    def test_line_number_and_unusual_spelling(self):
        self.assert_finds({"src/base/a.cpp": '\n\n  #  include   "os/x.h"\n'}, "src/base/a.cpp:3:")
        self.assert_clean({"src/base/a.cpp": '// #include "os/x.h"\n'})

    def test_include_that_names_no_layer(self):
        self.assert_finds(self.includes("base", '"x.h"'), "names no layer")
        self.assert_finds(self.includes("base", '"../os/x.h"'), "names no layer")
        self.assert_clean(self.includes("base", "<sys/socket.h>"))
        self.assert_clean({**self.includes("base", '"base/config.h"'), "src/base/config.h.in": ""})

    def test_unknown_layer_and_public_header(self):
        self.assert_finds({"src/misc/a.cpp": ""}, "src/misc", "unknown layer")
        self.assert_finds({"src/base/a.cpp": "", "include/convoy/new.h": ""}, "unknown public header")

    def test_public_header_rules(self):
        source = {"src/base/a.cpp": ""}
        self.assert_finds({**source, "include/convoy/error.h": '#include "base/x.h"\n'}, "not installed")
        self.assert_finds({**source, "include/convoy/error.h": '#include "convoy/store.h"\n'}, "layer base")
        self.assert_finds({**source, "include/convoy/store.h": "#include <torch/torch.h>\n"}, "torch-free")
        self.assert_clean({**source, "include/convoy/convoy.h": '#include "convoy/group.h"\n'})

    def test_examples_and_python_use_public_headers_only(self):
        source = {"src/base/a.cpp": ""}
        self.assert_finds({**source, "examples/e.cpp": '#include "os/x.h"\n'}, "examples uses public")
        self.assert_finds({**source, "python/p.cpp": '#include "os/x.h"\n'}, "python uses public")
        self.assert_clean({**source, "examples/e.cpp": "#include <convoy/convoy.h>\n"})

    def test_files_in_no_list(self):
        lists = {"src/CMakeLists.txt": "add_subdirectory(base) # base/b.cpp",
                 "src/base/CMakeLists.txt": "convoy_layer(base convoy_core a.cpp)"}
        self.assert_clean({**lists, "src/base/a.cpp": ""})
        self.assert_finds({**lists, "src/base/b.cpp": ""}, "src/base/b.cpp", "not compiled")
        self.assert_finds({**lists, "src/base/aa.cpp": ""}, "src/base/aa.cpp")
        self.assert_finds({**lists, "tests/base/t.cpp": "", "tests/CMakeLists.txt": ""}, "tests/base/t.cpp")
        self.assert_finds({**lists, "include/convoy/error.h": ""}, "not installed")

    def test_lists_in_a_loop(self):
        loop = "foreach(name a\n  b)\n  convoy_test(t_${name} SOURCES ${name}_test.cpp)\nendforeach()\n"
        tree = {"src/base/x.cpp": "", "tests/CMakeLists.txt": "", "tests/os/CMakeLists.txt": loop,
                "tests/os/b_test.cpp": ""}
        self.assert_clean(tree)
        self.assert_finds({**tree, "tests/os/c_test.cpp": ""}, "tests/os/c_test.cpp")

    def test_exit_code_and_output(self):
        bad = self.tree(self.includes("base", '"os/x.h"'))
        run = subprocess.run([sys.executable, TOOL, "--root", bad], capture_output=True, text=True)
        self.assertEqual(run.returncode, 1)
        self.assertIn("src/base/a.cpp:1:", run.stdout)
        self.assertIn("1 violation", run.stderr)
        run = subprocess.run([sys.executable, TOOL, "--root", "/nowhere"], capture_output=True, text=True)
        self.assertEqual(run.returncode, 2)
        self.assertIn("/nowhere", run.stderr)


if __name__ == "__main__":
    unittest.main()
