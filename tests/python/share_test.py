"""Channels and reductions: Python with Python, and Python with C++."""

import gc
import os
import subprocess
import tempfile
import threading
import unittest

import torch
import torch.multiprocessing as mp
from torch.nn.parameter import Parameter
from torch.utils.data import DataLoader, Dataset

import convoy
import ranks

PEER = ranks.BUILD / "bin" / "python_share_peer"
LIMIT = 60


def expect_nothing_held(case):
    gc.collect()
    usage = convoy.share_usage()
    case.assertEqual((usage["blocks"], usage["foreign"]), (0, 0), usage)


class Pair:
    def __init__(self, number):
        self.number = number
        self.tensor = torch.full((3,), float(number))


class ChannelTest(unittest.TestCase):
    def tearDown(self):
        expect_nothing_held(self)

    def test_objects(self):
        a, b = convoy.channel()
        shared = torch.ones(2, 3)
        for value in (None, True, 7, 2**70, 1.5, "text", b"bytes", (1, "two", None), (), [1, 2], (1,),
                      {"key": [1, {2}]}):
            a.send(value)
            got = b.receive()
            self.assertEqual(got, value)
            self.assertIs(type(got), type(value))
        a.send({"row": shared[0], "all": shared, "n": 3})
        got = b.receive()
        got["row"].fill_(5)
        self.assertEqual(shared.sum().item(), 18)
        self.assertEqual(got["all"].data_ptr(), shared.data_ptr())
        a.send((shared, 4))
        tensor, number = b.receive()
        self.assertEqual((tensor.data_ptr(), number), (shared.data_ptr(), 4))
        self.assertEqual(b.poll(), (False, None))
        a.send(3)
        self.assertEqual(b.poll(), (True, 3))

    def test_parameters_and_bits(self):
        a, b = convoy.channel()
        for value in (Parameter(torch.ones(3)), Parameter(torch.arange(3), requires_grad=False)):
            a.send([value])
            got, = b.receive()
            self.assertIs(type(got), Parameter)
            self.assertEqual(got.requires_grad, value.requires_grad)
            self.assertEqual(got.data_ptr(), value.data_ptr())
        z = torch.tensor([1 + 2j])
        a.send(z.conj())
        self.assertEqual(b.receive().item(), 1 - 2j)
        jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
        a.send([jagged])
        got, = b.receive()
        self.assertEqual([t.tolist() for t in got.unbind()], [[1, 1], [1, 1, 1]])
        with self.assertRaisesRegex(convoy.Error, "detach"):
            a.send(torch.ones(2, requires_grad=True) * 2)

    def test_errors(self):
        a, b = convoy.channel()
        with self.assertRaises(convoy.Error) as caught:
            b.receive(timeout=0.01)
        self.assertEqual(caught.exception.kind, "timeout")
        a.send("last")
        a.close()
        self.assertEqual(b.receive(), "last")
        with self.assertRaises(convoy.Error) as caught:
            b.receive()
        self.assertEqual(caught.exception.kind, "peer lost")

    def test_with_cpp(self):
        with tempfile.TemporaryDirectory() as folder:
            listener = convoy.listen(folder + "/socket")
            peer = subprocess.Popen([PEER, listener.path])
            channel = listener.accept(LIMIT)
            for strategy in ("descriptor", "file"):
                convoy.set_sharing_strategy(strategy)
                tensor = torch.zeros(4)
                channel.send((tensor, 5))
                same, text, total, theirs = channel.receive(LIMIT)
                self.assertEqual((text, total), ("added", 20.0))
                self.assertEqual(tensor.sum().item(), 20)
                self.assertEqual(same.data_ptr(), tensor.data_ptr())
                self.assertEqual(theirs.tolist(), [0, 1, 2])
            convoy.set_sharing_strategy("descriptor")
            # What only Python understands goes through C++ and comes back.
            channel.send(Pair(3))
            back = channel.receive(LIMIT)
            self.assertEqual((back.number, back.tensor.tolist()), (3, [3, 3, 3]))
            channel.send(())
            self.assertEqual(peer.wait(LIMIT), 0)
            del same, theirs, back, tensor


def fill(inbox, outbox):
    while (tensor := inbox.get()) is not None:
        tensor.fill_(4)
        outbox.put("filled")


def serve(end):
    tensor = end.receive(LIMIT)
    tensor.add_(1)
    end.send("added")


class Numbers(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, i):
        return torch.full((100,), float(i)), i


class ReductionTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        convoy.install_reductions()

    def test_queue(self):
        for method in ("fork", "spawn"):
            context = mp.get_context(method)
            there, back = context.SimpleQueue(), context.SimpleQueue()
            child = context.Process(target=fill, args=(there, back))
            child.start()
            for _ in range(10):
                tensor = torch.zeros(5, 5)
                there.put(tensor[:, 1])
                self.assertEqual(back.get(), "filled")
                self.assertEqual(tensor.sum().item(), 20)
                self.assertTrue(convoy.is_shared(tensor))
            there.put(None)
            child.join(LIMIT)
            self.assertEqual(child.exitcode, 0)

    def test_kinds(self):
        queue = mp.get_context("spawn").SimpleQueue()
        z = torch.tensor([1 + 2j])
        for value in (z.conj(), z.conj().imag, torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr(),
                      torch.empty(0, 3), torch.ones(4).untyped_storage(), Parameter(torch.arange(3), False)):
            queue.put(value)
            got = queue.get()
            self.assertIs(type(got), type(value))
            if isinstance(value, torch.Tensor):
                self.assertTrue(torch.equal(got.to_dense(), value.to_dense()))
            else:
                self.assertEqual(bytes(got), bytes(value))
        learned = torch.eye(3).to_sparse().requires_grad_()
        queue.put(learned)
        self.assertTrue(queue.get().requires_grad)  # torch's own loses it
        torch_shared = torch.ones(3).share_memory_()
        queue.put(torch_shared)
        queue.get().fill_(2)
        self.assertEqual(torch_shared.sum().item(), 6)  # not moved
        self.assertFalse(convoy.is_shared(torch_shared))

    def test_data_loader(self):
        for method in ("fork", "spawn"):
            loader = DataLoader(Numbers(), batch_size=8, num_workers=2, multiprocessing_context=method,
                                worker_init_fn=install)
            seen = []
            for numbers, index in loader:
                self.assertTrue(convoy.is_shared(numbers))
                self.assertTrue(torch.equal(numbers[:, 99], index.float()))
                seen += index.tolist()
            self.assertEqual(seen, list(range(40)))

    def test_channel_as_argument(self):
        mine, theirs = convoy.channel()
        child = mp.get_context("spawn").Process(target=serve, args=(theirs,))
        child.start()
        theirs.close()
        tensor = torch.zeros(3)
        mine.send(tensor)
        self.assertEqual(mine.receive(LIMIT), "added")
        self.assertEqual(tensor.tolist(), [1, 1, 1])
        with self.assertRaises(convoy.Error) as caught:
            mine.receive(LIMIT)
        self.assertEqual(caught.exception.kind, "peer lost")
        child.join(LIMIT)

    def test_threads(self):
        a, b = convoy.channel()

        def echo():
            for _ in range(200):
                b.send(b.receive(LIMIT))

        thread = threading.Thread(target=echo)
        thread.start()
        for i in range(200):
            a.send(torch.full((10,), i))
            self.assertEqual(a.receive(LIMIT)[9].item(), i)
        thread.join()


def install(_):
    convoy.install_reductions()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    ranks.main()
