"""The examples run."""

import subprocess
import sys
from importlib.util import find_spec
from unittest import TestCase, main, skipUnless

import ranks


class ExamplesTest(TestCase):
    def run_on_two_ranks(self, name, *words):
        done = subprocess.run([ranks.COMMAND, "run", "-n", "2", sys.executable,
                               ranks.ROOT / "examples" / "python" / name],
                              capture_output=True, text=True, timeout=ranks.LIMIT)
        self.assertEqual(done.returncode, 0, done.stderr + done.stdout)
        for word in words:
            self.assertIn(word, done.stdout)

    def test_train(self):
        self.run_on_two_ranks("train.py", "step 60: loss", "on 2 ranks")

    def test_train_under_torchrun(self):
        done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d",
                               "--rdzv-endpoint", "127.0.0.1:0", ranks.ROOT / "examples" / "python" / "train.py"],
                              capture_output=True, text=True, timeout=ranks.LIMIT)
        self.assertEqual(done.returncode, 0, done.stderr + done.stdout)
        self.assertIn("step 60: loss", done.stdout)

    def test_mismatch(self):
        self.run_on_two_ranks("mismatch.py", "ranks disagree", "rank 0 continues: 2 ranks", "rank 1 continues: 2 ranks")

    def test_check(self):
        self.run_on_two_ranks("check.py", ", 2 rank(s)")

    def test_parameter_servers(self):
        self.run_on_two_ranks("rpc_ps.py", "worker1: loss", "the weights, as a gradient: [")
        self.run_on_two_ranks("torch_rpc_ps.py", "trainer1: loss")

    # Packages that bootstrap does not install: pip install accelerate transformers.
    @skipUnless(find_spec("accelerate"), "there is no accelerate")
    def test_accelerate(self):
        self.run_on_two_ranks("accelerate_train.py", "on 2 ranks over convoy")

    @skipUnless(find_spec("accelerate") and find_spec("transformers"), "there is no transformers")
    def test_trainer(self):
        self.run_on_two_ranks("trainer.py", "on 2 ranks over convoy")

    def test_groups(self):
        self.run_on_two_ranks("groups.py", "sum of 2 ranks: 1; of the first half: 0")


if __name__ == "__main__":
    main()
