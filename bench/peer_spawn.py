"""The case spawn_8 of bench_processes.cpp with torch.multiprocessing.spawn: a line of JSON."""

import json
import time

import torch.multiprocessing as mp


def greet(index, queue):
    queue.put(index)


def main():
    start = time.perf_counter()
    queue = mp.get_context("spawn").SimpleQueue()
    processes = mp.spawn(greet, (queue,), nprocs=8, join=False)
    for _ in range(8):
        queue.get()
    microseconds = 1e6 * (time.perf_counter() - start)
    while not processes.join():
        pass
    print(json.dumps({"spawn_8": round(microseconds, 3)}))


if __name__ == "__main__":
    main()
