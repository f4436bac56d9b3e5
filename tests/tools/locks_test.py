"""No loop runs over a guarded value without its lock.

In `for (auto& x : state_.lock()->list)` the lock is a temporary, which C++20 destroys before the loop begins.
"""
import re
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LOOP = re.compile(r"\bfor \([^;()]*[^:]:\s[^;{]*?\.lock\(\)(?:->|\))")


class LocksTest(unittest.TestCase):
    def test_the_pattern(self):
        for bad in ("for (auto& x : state_.lock()->list) {", "for (const auto& [a, b] : impl->map.lock()->all) f();",
                    "for (auto& x : *users.lock()) {"):
            self.assertTrue(LOOP.search(bad), bad)
        for good in ("for (auto& x : *state) {", "for (std::mutex& each : mutexes_) each.lock();"):
            self.assertFalse(LOOP.search(good), good)

    def test_no_loop_over_a_temporary_lock(self):
        for folder in ("src", "python/src", "include"):
            for file in (ROOT / folder).rglob("*"):
                if file.suffix in (".h", ".cpp", ".inc"):
                    for line, text in enumerate(file.read_text().splitlines(), 1):
                        code = text.split("//")[0]
                        self.assertFalse(LOOP.search(code), f"{file.relative_to(ROOT)}:{line}: take the lock in a line of its own")


if __name__ == "__main__":
    unittest.main()
