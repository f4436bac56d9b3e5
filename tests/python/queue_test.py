"""Queues and events: as torch.multiprocessing's, between threads and processes."""

import gc
import os
import queue
import signal
import threading
import unittest
from pathlib import Path

import torch
import torch.multiprocessing as mp

import convoy
import ranks

LIMIT = 60


def expect_nothing_held(case):
    gc.collect()
    usage = convoy.share_usage()
    case.assertEqual((usage["blocks"], usage["foreign"]), (0, 0), usage)


def refuse():
    raise ValueError("cannot be rebuilt")


class Bad:
    def __reduce__(self):
        return refuse, ()


interrupts = []


def interrupt():
    if interrupts:
        raise interrupts.pop()
    return "whole"


class Interrupted:
    def __reduce__(self):
        return interrupt, ()


def take_two(q, back):
    back.put(sum(q.get(timeout=LIMIT)["tensor"].sum().item() for _ in range(2)))


def meet_and_die(barrier, lock, locked):
    barrier.wait(LIMIT)
    lock.acquire()
    locked.set()
    convoy.Event().wait(LIMIT)  # until it is killed


class QueueTest(unittest.TestCase):
    def tearDown(self):
        expect_nothing_held(self)

    def test_objects(self):
        q = convoy.Queue()
        for value in (None, True, 7, 2**70, 1.5, "text", b"bytes", (1, "two", None), (), [1, 2], {"key": [1, {2}]}):
            q.put(value)
            got = q.get()
            self.assertEqual(got, value)
            self.assertIs(type(got), type(value))
        tensor = torch.zeros(2, 3)
        q.put({"row": tensor[0], "all": tensor})
        got = q.get()
        got["row"].fill_(5)
        self.assertEqual(tensor.sum().item(), 15)
        self.assertEqual(got["all"].data_ptr(), tensor.data_ptr())
        parameter = torch.nn.Parameter(torch.ones(3))
        q.put([parameter, "x" * 100_000])
        got, text = q.get()
        self.assertIs(type(got), torch.nn.Parameter)
        self.assertEqual(len(text), 100_000)
        with self.assertRaisesRegex(convoy.Error, "detach"):  # here, not in a thread
            q.put(torch.ones(2, requires_grad=True) * 2)

    def test_limits(self):
        q = convoy.Queue(2)
        with self.assertRaises(queue.Empty):
            q.get(timeout=0.01)
        with self.assertRaises(queue.Empty):
            q.get_nowait()
        self.assertTrue(q.empty())
        q.put(1)
        q.put_nowait(torch.ones(2))
        self.assertTrue(q.full())
        self.assertEqual(q.qsize(), 2)
        with self.assertRaises(queue.Full):
            q.put(3, timeout=0.01)
        with self.assertRaises(queue.Full):
            q.put_nowait(3)
        self.assertEqual(q.get(), 1)
        self.assertEqual(q.put_many([5, 6, 7], timeout=0.01), 1)
        self.assertEqual([v if isinstance(v, int) else v.tolist() for v in q.get_many(10)], [[1, 1], 5])
        self.assertEqual(q.get_many(10, timeout=0.01), [])
        q.close()
        q.join_thread()
        for call in (lambda: q.put(1), lambda: q.put_many([1])):
            with self.assertRaisesRegex(ValueError, "closed"):
                call()
        self.assertTrue(q.empty())
        self.assertEqual(q.lost()[0], 0)

    def test_one_bad_message(self):
        """One that cannot be rebuilt, or put, costs no other."""
        q = convoy.Queue()
        self.assertEqual(q.put_many([1, Bad(), torch.ones(2), 3]), 4)
        self.assertEqual(q.get_many(10), [1])
        self.assertEqual(q.qsize(), 3)
        with self.assertRaisesRegex(ValueError, "cannot be rebuilt"):
            q.get_many(10)
        self.assertEqual(q.get().tolist(), [1, 1])
        self.assertEqual(q.get_many(10, timeout=LIMIT), [3])
        self.assertTrue(q.empty())
        q.put(Bad())
        with self.assertRaisesRegex(ValueError, "cannot be rebuilt"):
            q.get()
        self.assertEqual(q.put_many([1, torch.ones(2, requires_grad=True) * 2, 3]), 1)
        with self.assertRaisesRegex(convoy.Error, "detach"):
            q.put_many([torch.ones(2, requires_grad=True) * 2, 3])
        self.assertEqual(q.get(), 1)

    def test_interrupts_lose_nothing(self):
        """What no message is guilty of is raised at once, and nothing is taken."""
        q = convoy.Queue()
        for kind in (KeyboardInterrupt, SystemExit):
            q.put_many([1, Interrupted(), 3])
            interrupts.append(kind())
            with self.assertRaises(kind):
                q.get_many(10)
            self.assertEqual(q.qsize(), 3)
            self.assertEqual(q.get_many(10), [1, "whole", 3])
            q.put(Interrupted())
            interrupts.append(kind())
            with self.assertRaises(kind):
                q.get()
            self.assertEqual(q.get(), "whole")
        self.assertTrue(q.empty())

    def test_shutdown(self):
        q = convoy.Queue()
        q.put("last")
        q.shutdown()
        self.assertEqual(q.get(), "last")
        for call in (q.get, lambda: q.put(1)):
            with self.assertRaises(convoy.Error) as caught:
                call()
            self.assertEqual(caught.exception.kind, "peer lost")

    def test_threads(self):
        q, back = convoy.Queue(4), convoy.Queue()

        def work():
            while (value := q.get()) is not None:
                back.put(value[0].item())

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for i in range(100):
            q.put(torch.full((3,), i))
        for _ in threads:
            q.put(None)
        for thread in threads:
            thread.join()
        self.assertEqual(sorted(back.get() for _ in range(100)), list(range(100)))

    def test_signals_end_waits(self):
        class Ended(Exception):
            pass

        def end(*_):
            raise Ended

        before = signal.signal(signal.SIGALRM, end)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with self.assertRaises(Ended):
            convoy.Queue().get()
        signal.signal(signal.SIGALRM, before)


def fill(inbox, outbox):
    while (tensor := inbox.get(timeout=LIMIT)) is not None:
        tensor.fill_(4)
        outbox.put("filled")


def produce(q):
    q.put({"own": torch.full((1000,), 2.0), "pid": os.getpid()})


def take_later(q, go, back):
    go.wait(LIMIT)
    back.put(q.get(timeout=LIMIT).sum().item())


def hold(q, event):
    q.put(torch.ones(3))
    event.set()
    signal.pause()


def serve(end):
    job = end.receive(LIMIT)
    job["event"].set()
    job["queue"].put(job["tensor"] + 1)


def take_by_name(name):
    convoy.Queue.open(name, LIMIT).put("found")


class ProcessTest(unittest.TestCase):
    def tearDown(self):
        expect_nothing_held(self)

    def test_as_argument(self):
        """test_fd_sharing of PyTorch, with fork and spawn."""
        for method in ("fork", "spawn"):
            context = mp.get_context(method)
            there, back = convoy.Queue(3), convoy.Queue(3)
            child = context.Process(target=fill, args=(there, back))
            child.start()
            for _ in range(10):
                tensor = torch.zeros(5, 5)
                there.put(tensor[:, 1])
                self.assertEqual(back.get(timeout=LIMIT), "filled")
                self.assertEqual(tensor.sum().item(), 20)
            there.put(None)
            child.join(LIMIT)
            self.assertEqual(child.exitcode, 0)

    def test_producer_has_ended(self):
        for method in ("fork", "spawn"):
            q = convoy.Queue()
            child = mp.get_context(method).Process(target=produce, args=(q,))
            child.start()
            child.join(LIMIT)
            self.assertEqual(child.exitcode, 0)
            got = q.get(timeout=LIMIT)
            self.assertEqual((got["own"].sum().item(), got["pid"]), (2000, child.pid))
            del got

    def test_let_go_before_the_other_has_it(self):
        """What is in a queue stays there for a process that has not used it yet."""
        for method in ("fork", "spawn"):
            q, go, back = convoy.Queue(), convoy.Event(), convoy.Queue()
            q.put(torch.full((1000,), 2.0))
            child = mp.get_context(method).Process(target=take_later, args=(q, go, back))
            child.start()
            del q
            gc.collect()
            go.set()
            self.assertEqual(back.get(timeout=LIMIT), 2000)
            child.join(LIMIT)

    def test_follows_the_sharing_strategy(self):
        """Files outlive neither the queue nor the process that put them, but all that this one does with them."""
        folder = Path(os.environ["CONVOY_SHARE_FOLDER"])
        convoy.set_sharing_strategy("file")
        try:
            q, back = convoy.Queue(), convoy.Queue()
            for value in (1.0, 2.0):
                q.put({"tensor": torch.full((1000,), value)})  # nobody but the queue has it
            self.assertEqual(len(list(folder.rglob("t-*"))), 2)
            child = mp.get_context("spawn").Process(target=take_two, args=(q, back))
            child.start()
            self.assertEqual(back.get(timeout=LIMIT), 3000)
            child.join(LIMIT)
            convoy.share_usage()  # lets go of what was taken
            self.assertEqual(list(folder.rglob("t-*")), [])
            q.put(torch.ones(5))
            same = q.get()
            self.assertEqual(same.sum().item(), 5)
            del same
        finally:
            convoy.set_sharing_strategy("descriptor")

    def test_copies_small_tensors_by_default_sizes(self):
        q = convoy.Queue(copy_below=1024)
        tensor = torch.arange(256.0)
        q.put(tensor)
        got = q.get()
        self.assertTrue(torch.equal(got, tensor))
        self.assertFalse(convoy.is_shared(got) or convoy.is_shared(tensor))

    def test_a_barrier_and_a_lock(self):
        barrier, lock = convoy.Barrier(2), convoy.Lock()
        locked = convoy.Event()
        child = mp.get_context("spawn").Process(target=meet_and_die, args=(barrier, lock, locked))
        child.start()
        self.assertEqual(barrier.parties, 2)
        self.assertIn(barrier.wait(LIMIT), (0, 1))
        self.assertTrue(locked.wait(LIMIT))
        self.assertFalse(lock.acquire(block=False))
        child.kill()
        child.join(LIMIT)
        with lock:
            self.assertTrue(lock.recovered)
        self.assertTrue(lock.acquire(timeout=1))
        self.assertFalse(lock.recovered)
        lock.release()
        with self.assertRaises(convoy.Error) as caught:
            barrier.wait(LIMIT)
        self.assertEqual(caught.exception.kind, "peer lost")
        barrier.reset()
        with self.assertRaises(convoy.Error) as caught:
            barrier.wait(0.01)
        self.assertEqual((caught.exception.kind, barrier.n_waiting), ("timeout", 0))

    def test_killed_process(self):
        q, event = convoy.Queue(2), convoy.Event()
        child = mp.get_context("fork").Process(target=hold, args=(q, event))
        child.start()
        self.assertTrue(event.wait(LIMIT))
        child.kill()
        child.join(LIMIT)
        self.assertEqual(q.get(timeout=LIMIT).tolist(), [1, 1, 1])
        self.assertEqual(q.lost()[0], 0)

    def test_over_channel(self):
        mine, theirs = convoy.channel()
        child = mp.get_context("spawn").Process(target=serve, args=(theirs,))
        child.start()
        theirs.close()
        q, event = convoy.Queue(), convoy.Event()
        mine.send({"queue": q, "event": event, "tensor": torch.ones(2)})
        self.assertEqual(q.get(timeout=LIMIT).tolist(), [2, 2])
        self.assertTrue(event.wait(LIMIT))
        event.clear()
        self.assertFalse(event.wait(0.001))
        child.join(LIMIT)
        a, b = convoy.channel()
        a.send((q, 3))
        same, three = b.receive()
        self.assertEqual((same, three), (q, 3))
        self.assertIs(type(same), convoy.Queue)

    def test_by_name(self):
        q = convoy.Queue()
        q.offer("queue-test")
        child = mp.get_context("fork").Process(target=take_by_name, args=("queue-test",))
        child.start()
        self.assertEqual(q.get(timeout=LIMIT), "found")
        child.join(LIMIT)
        with self.assertRaises(convoy.Error) as caught:
            convoy.Event.open("queue-test", 1)
        self.assertEqual(caught.exception.kind, "invalid argument")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    ranks.main()
