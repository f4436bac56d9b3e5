"""spawn, Published and Slots in Python: the scenarios of PyTorch's test_multiprocessing_spawn.py, and with C++."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import unittest

import torch
import torch.multiprocessing as mp

import convoy
import ranks

LIMIT = 60


def expect_nothing_held(case):
    gc.collect()
    deadline = time.monotonic() + LIMIT
    while True:  # killed processes let go of it a little later
        usage = convoy.share_usage()
        if (usage["blocks"], usage["foreign"]) == (0, 0):
            return
        if time.monotonic() > deadline:
            case.fail(usage)


def fail_one(index, failing):
    if index == failing:
        raise ValueError(f"legitimate exception from process {index}")
    signal.pause()


def end_one(index, how):
    if index == 0:
        os.kill(os.getpid(), signal.SIGABRT) if how == "signal" else sys.exit(123)
    signal.pause()


def wait_for_word(index, tensor):
    tensor[index] = index + 1
    convoy.parent_channel().receive(LIMIT)


class SpawnTest(unittest.TestCase):
    def tearDown(self):
        expect_nothing_held(self)

    def test_success_non_blocking(self):
        tensor = torch.zeros(2)
        processes = convoy.spawn(wait_for_word, (tensor,), nprocs=2, join=False)
        self.assertFalse(processes.join(timeout=0))
        self.assertEqual(len(set(processes.pids())), 2)
        for index in range(2):
            processes.channel(index).send("go")
        self.assertTrue(processes.join(timeout=LIMIT))
        self.assertTrue(processes.join(timeout=0))
        self.assertEqual(tensor.tolist(), [1, 2])
        del processes

    def test_exception_single(self):
        with self.assertRaisesRegex(mp.ProcessRaisedException, "legitimate exception from process 1") as caught:
            convoy.spawn(fail_one, (1,), nprocs=2)
        self.assertIn("Traceback", str(caught.exception))
        self.assertEqual(caught.exception.error_index, 1)

    def test_terminate_signal(self):
        with self.assertRaisesRegex(mp.ProcessExitedException, "process 0 terminated with signal SIGABRT") as caught:
            convoy.spawn(end_one, ("signal",), nprocs=1)
        self.assertEqual(caught.exception.signal_name, "SIGABRT")

    def test_terminate_exit(self):
        with self.assertRaisesRegex(mp.ProcessExitedException, "process 0 terminated with exit code 123") as caught:
            convoy.spawn(end_one, ("exit",), nprocs=1)
        self.assertEqual(caught.exception.exit_code, 123)


def fill(weights, slots):
    slot = slots.fill(LIMIT)
    snapshot = weights.read()
    slot["x"].fill_(snapshot["weight"].sum())
    slot["version"].fill_(snapshot.version)
    slot.commit()


class ObjectsTest(unittest.TestCase):
    def tearDown(self):
        expect_nothing_held(self)

    def test_published(self):
        model, other = torch.nn.BatchNorm1d(3), torch.nn.BatchNorm1d(3)
        weights = convoy.Published(model)
        before = weights.read()
        with torch.no_grad():
            model.weight.fill_(5)
        self.assertEqual(weights.publish(model), 2)
        self.assertEqual((before.version, weights.version, weights.behind(before)), (1, 2, 1))
        self.assertEqual(before["weight"].tolist(), [1, 1, 1])
        self.assertEqual(set(before), {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"})
        self.assertGreaterEqual(before.age, 0)
        self.assertEqual(weights.load_into(other), 2)
        self.assertEqual(other.weight.tolist(), [5, 5, 5])
        self.assertEqual(weights.read_newer(1)["weight"].tolist(), [5, 5, 5])
        with self.assertRaises(convoy.Error) as caught:
            weights.read_newer(2, timeout=0.01)
        self.assertEqual(caught.exception.kind, "timeout")
        with self.assertRaisesRegex(convoy.Error, "'weight' is"):
            weights.publish(torch.nn.BatchNorm1d(4))
        with self.assertRaises(KeyError):
            before["nothing"]

    def test_slots(self):
        slots = convoy.Slots(2, {"x": ((2, 3), torch.float32), "n": ((), torch.int64)})
        slot = slots.fill(LIMIT)
        slot["x"].fill_(2)
        slot["n"].fill_(7)
        slot.commit()
        with self.assertRaises(convoy.Error):
            slot["x"]
        got = slots.next(LIMIT)
        self.assertEqual((got["x"].sum().item(), got["n"].item(), got.number), (12, 7, 1))
        got.release()
        self.assertEqual(slots.counts()["free"], 2)
        with self.assertRaises(convoy.Error):
            slots.next(0.01)
        threading.Thread(target=slots.close).start()
        self.assertIsNone(slots.next(LIMIT))
        self.assertIsNone(slots.fill(LIMIT))

    def test_with_multiprocessing_and_channels(self):
        weights = convoy.Published({"weight": torch.ones(4)})
        slots = convoy.Slots(2, {"x": ((), torch.float32), "version": ((), torch.int64)})
        process = mp.get_context("spawn").Process(target=fill, args=(weights, slots))
        process.start()
        slot = slots.next(LIMIT)
        self.assertEqual((slot["x"].item(), slot["version"].item()), (4, 1))
        process.join(LIMIT)
        self.assertEqual(process.exitcode, 0)
        a, b = convoy.channel()
        a.send({"weights": weights})
        same = b.receive()["weights"]
        weights.publish({"weight": torch.zeros(4)})
        self.assertEqual(same.version, 2)


class Example:
    def run_example(self, *command):
        done = subprocess.run(command, capture_output=True, text=True, timeout=2 * LIMIT)
        self.assertEqual(done.returncode, 0, done.stderr + done.stdout)
        self.assertIn("(SIGKILL); started again", done.stdout)
        self.assertIn("400 updates", done.stdout)


class ExampleTest(Example, unittest.TestCase):
    def test_cpp(self):
        self.run_example(ranks.BUILD / "bin" / "actors")

    def test_python_actors_of_a_cpp_learner(self):
        self.run_example(ranks.BUILD / "bin" / "actors", sys.executable,
                         ranks.ROOT / "examples" / "python" / "actors.py")


if __name__ == "__main__":
    unittest.main()
