"""The example with actors and learner in Python. Takes long: four interpreters that import torch."""

import sys
import unittest

import processes_test
import ranks


class ActorsTest(processes_test.Example, unittest.TestCase):
    def test_python(self):
        self.run_example(sys.executable, ranks.ROOT / "examples" / "python" / "actors.py")


if __name__ == "__main__":
    unittest.main()
