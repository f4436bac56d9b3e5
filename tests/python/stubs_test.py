"""The type stubs of the C++ module name what it has, and nothing else."""

import ast
import inspect
import unittest
from pathlib import Path

from convoy import _C

STUBS = Path(__file__).parents[2] / "python" / "convoy" / "_C.pyi"


def declared(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    """Names of a module's or class's body."""
    found: dict[str, ast.stmt] = {}
    for each in body:
        if isinstance(each, (ast.ClassDef, ast.FunctionDef)):
            found[each.name] = each
        elif isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            found[each.target.id] = each
    return found


def public(names: list[str] | dict[str, object]) -> set[str]:
    return {name for name in names if not name.startswith("_")}


class StubsTest(unittest.TestCase):
    def setUp(self) -> None:
        self.stubs = declared(ast.parse(STUBS.read_text()).body)

    def test_names_of_the_module(self) -> None:
        self.assertEqual(public(self.stubs), public(vars(_C)))

    def test_names_of_classes(self) -> None:
        for name, stub in self.stubs.items():
            if not isinstance(stub, ast.ClassDef):
                continue
            with self.subTest(name):
                made = getattr(_C, name)
                self.assertTrue(inspect.isclass(made))
                self.assertEqual(public(declared(stub.body)), public(vars(made)))


if __name__ == "__main__":
    unittest.main()
