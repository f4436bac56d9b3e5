"""Sharing in a forked child: every object works as documented there, or is refused; the parent's are the parent's."""

import gc
import os
import queue as queues
import traceback
import unittest

import torch

import convoy
import ranks

LIMIT = 60
SIZES = (8, 1 << 20)


def wait_for_word(_, tensor):
    convoy.parent_channel().receive(LIMIT)
    tensor.add_(1)


class ForkTest(unittest.TestCase):
    def setUp(self):
        torch.set_num_threads(1)

    def in_child(self, function):
        """As DataLoader's workers: forked, and ended by os._exit."""
        pid = os.fork()
        if pid == 0:
            try:
                function()
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        _, status = os.waitpid(pid, 0)
        self.assertEqual(status, 0)

    def refused(self, kind, function, *arguments, **named):
        with self.assertRaises(convoy.Error) as caught:
            function(*arguments, **named)
        self.assertEqual(caught.exception.kind, kind)

    def tearDown(self):
        gc.collect()
        usage = convoy.share_usage()
        self.assertEqual((usage["blocks"], usage["foreign"]), (0, 0), usage)

    def test_channel(self):
        for size in SIZES:
            a, b = convoy.channel()
            a.send(torch.full((size,), 1.0))
            b.receive(LIMIT)
            a.send([torch.full((size,), 2.0)])

            def child():
                self.refused("unsupported", a.send, torch.zeros(size))
                self.refused("unsupported", a.send, [1])
                self.refused("unsupported", b.receive, 1)
                self.refused("unsupported", b.poll)
                a.close()
                b.close()
                c, d = convoy.channel()
                c.send(torch.full((size,), 3.0))
                self.assertEqual(d.receive(LIMIT)[size - 1].item(), 3)

            self.in_child(child)
            self.assertEqual(b.receive(LIMIT)[0][size - 1].item(), 2)
            self.assertEqual(b.poll(), (False, None))
            b.send("still open")
            self.assertEqual(a.receive(LIMIT), "still open")
            del a, b

    def test_tensors(self):
        for size in SIZES:
            tensor = convoy.share_memory_(torch.full((size,), 1.0))

            def child():
                self.assertTrue(convoy.is_shared(tensor))
                tensor.fill_(2)
                own = convoy.share_memory_(torch.full((size,), 3.0))
                self.assertEqual(own.sum().item(), 3 * size)
                convoy.trim()
                self.assertIs(tensor.share_memory_(), tensor)

            self.in_child(child)
            other = convoy.share_memory_(torch.full((size,), 4.0))
            self.assertEqual(tensor.sum().item(), 2 * size)
            del tensor, other

    def test_queue_and_event(self):
        for size in SIZES:
            queue, event = convoy.Queue(8), convoy.Event()
            queue.put(torch.full((size,), 1.0))

            def child():
                self.assertEqual(queue.get(timeout=LIMIT).sum().item(), size)
                queue.put([torch.full((size,), 2.0)], timeout=LIMIT)
                self.assertEqual(queue.put_many([3, 4]), 2)
                event.set()

            self.in_child(child)
            self.assertTrue(event.wait(LIMIT))
            self.assertEqual(queue.get(timeout=LIMIT)[0].sum().item(), 2 * size)
            self.assertEqual(queue.get_many(8, LIMIT), [3, 4])
            self.assertRaises(queues.Empty, queue.get_nowait)
            self.assertEqual(queue.lost()[0], 0)
            del queue, event

    def test_published(self):
        for size in SIZES:
            weights = convoy.Published({"w": torch.full((size,), 1.0)})
            snapshot = weights.read()

            def child():
                self.refused("unsupported", lambda: snapshot["w"])
                self.assertEqual(weights.read()["w"].sum().item(), size)
                self.refused("invalid argument", weights.publish, {"w": torch.zeros(size)})

            self.in_child(child)
            for i in range(2, 8):
                weights.publish({"w": torch.full((size,), float(i))})
            self.assertEqual(snapshot["w"].sum().item(), size)
            del weights, snapshot

    def test_slots(self):
        for size in SIZES:
            slots = convoy.Slots(2, {"x": ((size,), torch.float32)})
            held = slots.fill(LIMIT)
            held["x"].fill_(1)

            def child():
                mine = slots.fill(LIMIT)
                mine["x"].fill_(2)
                mine.commit()
                self.refused("invalid argument", held.commit)

            self.in_child(child)
            self.assertEqual(slots.next(LIMIT)["x"].sum().item(), 2 * size)
            held.commit()
            self.assertEqual(slots.next(LIMIT)["x"].sum().item(), size)
            del held, slots

    def test_processes(self):
        for size in SIZES:
            tensor = convoy.share_memory_(torch.zeros(size))
            processes = convoy.spawn(wait_for_word, (tensor,), nprocs=1, join=False)

            def child():
                self.refused("unsupported", processes.join, 1)
                self.refused("unsupported", processes.terminate)
                self.refused("unsupported", processes.restart_failed)
                self.refused("unsupported", processes.channel, 0)

            self.in_child(child)
            processes.channel(0).send(1)
            self.assertTrue(processes.join(LIMIT))
            self.assertEqual(tensor.sum().item(), size)
            del tensor, processes


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    ranks.main()
