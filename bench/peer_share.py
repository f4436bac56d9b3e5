"""The cases of bench_share.cpp with torch.multiprocessing.Queue: a line of JSON."""

import json
import sys
import time
from statistics import median

import torch
import torch.multiprocessing as mp

SMALL, LARGE = 256, 25_000_000


def echo(inbox, outbox):
    torch.set_num_threads(1)
    while (message := inbox.get()) is not None:
        outbox.put(message)


def main():
    torch.set_num_threads(1)
    mp.set_sharing_strategy(sys.argv[1])
    context = mp.get_context("spawn")
    there, back = context.Queue(), context.Queue()
    child = context.Process(target=echo, args=(there, back), daemon=True)
    child.start()

    def once(message):
        start = time.perf_counter()
        there.put(message)
        back.get()
        return 1e6 * (time.perf_counter() - start)

    def case(make, echoes, asleep=False):
        times = []
        for _ in range(echoes):
            message = make()
            if asleep:
                time.sleep(0.003)
            times.append(once(message))
        return round(median(times), 3)

    def first(floats, times):
        found = []
        for _ in range(times):
            tensor = torch.ones(floats)
            start = time.perf_counter()
            tensor.share_memory_()
            found.append(1e6 * (time.perf_counter() - start))
        return round(median(found), 3)

    small, large = torch.ones(SMALL).share_memory_(), torch.ones(LARGE).share_memory_()
    for _ in range(50):
        once(small)
    print(json.dumps({
        "shared_1k": case(lambda: small, 300), "shared_100m": case(lambda: large, 300),
        "shared_1k_asleep": case(lambda: small, 200, True),
        "shared_100m_asleep": case(lambda: large, 200, True),
        "fresh_100m": case(lambda: torch.ones(LARGE), 9),
        "many_1k": case(lambda: [torch.ones(SMALL) for _ in range(1000)], 3),
        "first_100m": first(LARGE, 5), "first_1g": first(250_000_000, 3), "first_2g": first(500_000_000, 1),
    }))
    there.put(None)
    child.join(10)


if __name__ == "__main__":
    main()
