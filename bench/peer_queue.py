"""The cases of bench_queue.cpp in Python: a line of JSON, in microseconds an item.

    peer_queue.py file_descriptor|file_system     torch.multiprocessing.Queue, and DataLoader
    peer_queue.py convoy                          convoy.Queue
"""

import json
import sys
import time

import torch
import torch.multiprocessing as mp

SMALL, LARGE = 256, 262_144


def produce(queue, ready, go, end, items, floats):
    torch.set_num_threads(1)
    ready.release()
    go.wait()
    for _ in range(items):
        queue.put(torch.ones(floats))
    queue.put(None)
    end.wait()  # what torch shares goes with its process


def consume(queue, ready, go, done):
    torch.set_num_threads(1)
    ready.release()
    go.wait()
    total = 0.0
    while (tensor := queue.get()) is not None:
        total += tensor[0].item()
    done.put(total)


def crowd(context, queue, items):
    """Two producers, two consumers."""
    ready, done = context.Semaphore(0), context.SimpleQueue()
    go, end = context.Event(), context.Event()
    children = [context.Process(target=produce, args=(queue, ready, go, end, items, SMALL), daemon=True)
                for _ in range(2)]
    children += [context.Process(target=consume, args=(queue, ready, go, done), daemon=True)
                 for _ in range(2)]
    for child in children:
        child.start()
    for _ in children:
        ready.acquire()
    start = time.perf_counter()
    go.set()
    received = sum(done.get() for _ in range(2))
    us = 1e6 * (time.perf_counter() - start) / (2 * items)
    assert received == 2 * items
    end.set()
    for child in children:
        child.join()
    return us


class Batches(torch.utils.data.IterableDataset):
    def __init__(self, count):
        self.count = count

    def __iter__(self):
        for _ in range(self.count):
            yield torch.ones(LARGE)


def loader(context, count):
    """Batches of two workers, made as they are: nothing to collate."""
    found = torch.utils.data.DataLoader(Batches(count), batch_size=None, num_workers=2,
                                        multiprocessing_context=context)
    batches = iter(found)
    for _ in range(10):
        next(batches)
    start = time.perf_counter()
    total = sum(batch[0].item() for batch in batches)
    return 1e6 * (time.perf_counter() - start) / total


def main():
    torch.set_num_threads(1)
    context = mp.get_context("spawn")
    if sys.argv[1] == "convoy":
        import convoy
        found = {"queue_1k": crowd(context, convoy.Queue(256), 5000)}
    else:
        mp.set_sharing_strategy(sys.argv[1])
        found = {"queue_1k": crowd(context, context.Queue(256), 1000),
                 "queue_1m": loader(context, 300)}
    print(json.dumps({name: round(us, 3) for name, us in found.items()}))


if __name__ == "__main__":
    main()
