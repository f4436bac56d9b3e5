"""Memory that torch shares, and memory that convoy shares: neither moves the other's.

Hogwild: processes that train the same weights without locks. It works only as long as all of them
have the same memory, whoever passed it to them.
"""

import gc
import os
import unittest

import torch
import torch.multiprocessing as mp

import convoy
import ranks

LIMIT = 60
# Of the ways that share no memory with their parent this is the quick one: ranks.py has torch preloaded.
FRESH = mp.get_context("forkserver")


def expect_nothing_held(case):
    gc.collect()
    convoy.trim()
    usage = convoy.share_usage()
    case.assertEqual((usage["blocks"], usage["foreign"]), (0, 0), usage)


def follow(parameters, inbox, outbox):
    """Adds what comes to the first parameter, and tells what it sees."""
    while True:
        command = inbox.get(timeout=LIMIT)
        if command is None:
            return
        parameters[0].data.add_(command)
        outbox.put(parameters[0].data.view(-1)[0].item())


class Follower:
    """A process that got the parameters through torch.multiprocessing."""

    def __init__(self, parameters):
        self.inbox, self.outbox = FRESH.Queue(), FRESH.Queue()
        self.process = FRESH.Process(target=follow, args=(parameters, self.inbox, self.outbox))
        self.process.start()

    def add(self, number):
        self.inbox.put(number)
        return self.outbox.get(timeout=LIMIT)

    def end(self):
        self.inbox.put(None)
        self.process.join(LIMIT)
        return self.process.exitcode


def add_one(_, queue, tensors):
    for tensor in tensors:
        tensor.data.add_(1)
    queue.put("done")


class TorchSharedTest(unittest.TestCase):
    """Memory that torch shared first."""

    def setUp(self):
        self.model = torch.nn.Linear(4, 4)
        self.model.share_memory()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(0)
        self.parameters = list(self.model.parameters())
        self.places = [p.data_ptr() for p in self.parameters]
        self.follower = Follower(self.parameters)
        self.assertEqual(self.follower.add(1), 1)

    def tearDown(self):
        # The process that torch started sees what is written here, and the other way round.
        self.assertEqual([p.data_ptr() for p in self.parameters], self.places)
        before = self.parameters[0].data.view(-1)[0].item()
        self.assertEqual(self.follower.add(41), before + 41)
        self.assertEqual(self.parameters[0].data.view(-1)[0].item(), before + 41)
        self.assertEqual(self.follower.end(), 0)
        expect_nothing_held(self)

    def test_share_memory(self):
        for parameter in self.parameters:
            convoy.share_memory_(parameter)
            self.assertTrue(parameter.is_shared())

    def test_channel(self):
        a, b = convoy.channel()
        for _ in range(3):
            a.send(self.parameters)
            got = b.receive()
            self.assertEqual([t.data_ptr() for t in got], self.places)
        del got

    def test_queue(self):
        for below in (0, 4096):
            queue = convoy.Queue(4, item_bytes=8192, copy_below=below)
            queue.put(self.parameters)
            got = queue.get(timeout=LIMIT)
            got[0].data.fill_(5)
            self.assertEqual(self.parameters[0].data.view(-1)[0].item(), 5)
            del got, queue

    def test_spawn(self):
        queue = convoy.Queue(4)
        processes = convoy.spawn(add_one, (queue, self.parameters), nprocs=2, join=False)
        processes.join(LIMIT)
        self.assertEqual(self.parameters[0].data.view(-1)[0].item(), 3)
        self.assertEqual([queue.get(timeout=LIMIT) for _ in range(2)], ["done"] * 2)
        del queue, processes

    def test_many_leave_nothing(self):
        a, b = convoy.channel()
        descriptors = len(os.listdir("/proc/self/fd"))
        for i in range(300):
            tensor = torch.full((100,), float(i)).share_memory_()
            a.send(tensor)
            del tensor
            self.assertEqual(b.receive()[99].item(), i)
        gc.collect()
        self.assertLess(len(os.listdir("/proc/self/fd")), descriptors + 20)


class FileSystemTest(unittest.TestCase):
    """The same for torch's strategy of named files."""

    def test_channel(self):
        before = mp.get_sharing_strategy()
        mp.set_sharing_strategy("file_system")
        try:
            tensor = torch.zeros(1000).share_memory_()
            queue = convoy.Queue(4)
            place = tensor.data_ptr()
            processes = convoy.spawn(add_one, (queue, [tensor]), nprocs=1, join=False)
            processes.join(LIMIT)
            self.assertEqual((tensor.data_ptr(), tensor[999].item()), (place, 1))
            del tensor, queue, processes
        finally:
            mp.set_sharing_strategy(before)
        expect_nothing_held(self)


class OthersTest(unittest.TestCase):
    def test_memory_that_cannot_be_passed_on(self):
        import mmap
        shared = mmap.mmap(-1, 4096)  # anonymous, for forked children
        tensor = torch.frombuffer(shared, dtype=torch.float32)
        a, _ = convoy.channel()
        with self.assertRaises(convoy.Error) as caught:
            a.send(tensor)
        self.assertEqual(caught.exception.kind, "unsupported")
        self.assertIn("clone()", str(caught.exception))
        a.send(tensor.clone())
        del tensor
        a.close()
        del a, _
        expect_nothing_held(self)

    def test_shared_memory_of_multiprocessing(self):
        from multiprocessing import shared_memory
        memory = shared_memory.SharedMemory(create=True, size=4096)
        try:
            tensor = torch.frombuffer(memory.buf, dtype=torch.float32)
            queue = convoy.Queue(4)
            processes = convoy.spawn(add_one, (queue, [tensor]), nprocs=1, join=False)
            processes.join(LIMIT)
            self.assertEqual(tensor[1023].item(), 1)
            self.assertEqual(memory.buf.cast("f")[1023], 1)
            del tensor, queue, processes
            expect_nothing_held(self)
        finally:
            gc.collect()
            memory.close()
            memory.unlink()


class OurSharedTest(unittest.TestCase):
    """Memory that convoy shared first: torch does not move it."""

    def setUp(self):
        self.queue = convoy.Queue(16)
        self.tensor = torch.zeros(100)
        convoy.share_memory_(self.tensor)
        self.place = self.tensor.data_ptr()
        a, b = convoy.channel()
        a.send(self.tensor)
        self.other = b.receive()

    def tearDown(self):
        self.assertEqual(self.tensor.data_ptr(), self.place)
        self.tensor.fill_(9)
        self.assertEqual(self.other.sum().item(), 900)
        del self.tensor, self.other, self.queue
        expect_nothing_held(self)

    def test_share_memory(self):
        self.assertIs(self.tensor.share_memory_(), self.tensor)
        self.assertTrue(self.tensor.is_shared())
        self.assertTrue(self.tensor.untyped_storage().is_shared())

    def test_module(self):
        model = torch.nn.Linear(10, 10)
        for parameter in model.parameters():
            convoy.share_memory_(parameter)
        places = [p.data_ptr() for p in model.parameters()]
        model.share_memory()
        self.assertEqual([p.data_ptr() for p in model.parameters()], places)

    def test_stock_queue(self):
        follower = Follower([self.tensor])
        self.assertEqual(follower.add(41), 41)
        self.assertEqual(self.other[0].item(), 41)
        self.assertEqual(follower.end(), 0)

    def test_storage_in_stock_queue(self):
        queue = FRESH.Queue()
        queue.put([self.tensor, self.tensor.untyped_storage()])
        tensor, storage = queue.get(timeout=LIMIT)
        self.assertEqual(tensor.untyped_storage().data_ptr(), storage.data_ptr())
        del tensor, storage

    def test_torch_says_no_where_it_would_move(self):
        for share in ("_share_fd_cpu_", "_share_filename_cpu_"):
            with self.assertRaises(convoy.Error) as caught:
                getattr(self.tensor.untyped_storage(), share)()
            self.assertEqual(caught.exception.kind, "unsupported")


def poke(receive, answer):
    """Writes through the storage that came beside a tensor."""
    while True:
        value = receive()
        if value is None:
            return
        tensor, storage, part, typed = value
        storage[0] = 1
        typed[1] = 8
        seen = tensor.view(torch.uint8)[0].item(), tensor[1].item(), len(storage), type(storage).__name__
        part.fill_(3)
        answer((*seen, storage.data_ptr() == tensor.untyped_storage().data_ptr()))
        del value, tensor, storage, part, typed


def poke_by_channel(end):
    poke(lambda: end.receive(LIMIT), end.send)


def poke_by_queue(inbox, outbox):
    poke(lambda: inbox.get(timeout=LIMIT), outbox.put)


class OneStorageTest(unittest.TestCase):
    """One storage is one storage, whatever wraps it."""

    def tearDown(self):
        expect_nothing_held(self)

    def check(self, process, send, receive):
        process.start()
        for make in (lambda: torch.zeros(100), lambda: convoy.share_memory_(torch.zeros(100)),
                     lambda: torch.zeros(100).share_memory_()):
            tensor = make()
            storage = tensor.untyped_storage()
            send([tensor, storage, tensor[50:], tensor.storage()])
            self.assertEqual(receive(), (1, 8, 400, "UntypedStorage", True))
            # What the other process wrote, by whichever of them.
            self.assertEqual((storage[0], tensor.view(torch.uint8)[0].item()), (1, 1))
            self.assertEqual((tensor[1].item(), tensor[99].item()), (8, 3))
            self.assertEqual(tensor.untyped_storage().data_ptr(), storage.data_ptr())
            del tensor, storage
        send(None)
        process.join(LIMIT)
        self.assertEqual(process.exitcode, 0)

    def test_channel(self):
        here, there = convoy.channel()
        process = FRESH.Process(target=poke_by_channel, args=(there,))
        self.check(process, here.send, lambda: here.receive(LIMIT))
        there.close()

    def test_queue(self):
        inbox, outbox = convoy.Queue(4), convoy.Queue(4)
        process = FRESH.Process(target=poke_by_queue, args=(inbox, outbox))
        self.check(process, inbox.put, lambda: outbox.get(timeout=LIMIT))


class NoMemoryTest(unittest.TestCase):
    """What has no memory is refused by the sender, before anything is moved."""

    def tearDown(self):
        expect_nothing_held(self)

    def refuse(self, tensor, kind):
        a, b = convoy.channel()
        queue = convoy.Queue(4)
        for share in (a.send, queue.put, convoy.share_memory_, convoy._C.tensor_to_bytes):
            with self.assertRaises(convoy.Error) as caught:
                share(tensor)
            self.assertEqual(caught.exception.kind, kind, share)
        with self.assertRaises(convoy.Error) as caught:
            a.send([tensor] * 5)
        self.assertEqual(caught.exception.kind, kind)
        self.assertEqual(b.poll(), (False, None))

    def test_zero_tensor(self):
        self.refuse(torch._efficientzerotensor((3,)), "unsupported")

    def test_functional_tensor(self):
        self.refuse(torch._to_functional_tensor(torch.ones(3)), "unsupported")

    def test_freed_storage(self):
        tensor = torch.ones(3)
        tensor.untyped_storage().resize_(0)
        self.refuse(tensor, "invalid argument")

    def test_publish(self):
        published = convoy.Published({"a": torch.ones(3)})
        freed = torch.ones(3)
        freed.untyped_storage().resize_(0)
        with self.assertRaises(convoy.Error):
            published.publish({"a": freed})
        published.publish({"a": torch._efficientzerotensor((3,))})
        self.assertEqual(published.read()["a"].sum().item(), 0)
        del published


class TwiceTest(unittest.TestCase):
    def test_bytes_are_turned_once(self):
        for strategy in ("descriptor", "file"):
            before = convoy.get_sharing_strategy()
            convoy.set_sharing_strategy(strategy)
            tensor = torch.ones(1000)
            first, second = convoy._C.tensor_to_bytes(tensor), convoy._C.tensor_to_bytes(tensor)
            convoy.set_sharing_strategy(before)
            got = convoy._C.tensor_from_bytes(first)
            for _ in range(3):
                with self.assertRaises(convoy.Error) as caught:
                    convoy._C.tensor_from_bytes(first)
                self.assertEqual(caught.exception.kind, "peer lost")
            del tensor, got  # only the second handle holds the memory now
            gc.collect()
            other = [convoy.share_memory_(torch.zeros(1000)) for _ in range(20)]
            self.assertEqual(convoy._C.tensor_from_bytes(second).sum().item(), 1000)
            del other
            expect_nothing_held(self)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    ranks.main()
