#!/usr/bin/env python3
"""Backward passes across workers beside torch.distributed.autograd.

The sides take turns, round by round. Records go into build/bench/autograd.json. Run it through `make bench-autograd`, on a
machine that does nothing else.
"""

import argparse
import os
import time
from pathlib import Path

import sides

MOST_EXAMPLE = 1 / 8  # of PyTorch's time
MOST_OVERHEAD = 1 / 4  # of what PyTorch adds to a network in one process
MOST_UNUSED = 1.2  # times the backward of a context that has nothing else


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    file = options.json or sides.ROOT / "build" / "bench" / ("autograd_quick.json" if options.quick else "autograd.json")
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; ratios are our time / the peer's")
    start = time.monotonic()
    quick = ["quick"] if options.quick else []
    commands = {"convoy": [sides.BIN / "bench_autograd", *quick],
                "torch": [sides.venv_python(), sides.ROOT / "bench" / "peer_autograd.py", *quick]}
    times = sides.take_turns(commands, options.rounds or (1 if options.quick else 3))
    for case in dict.fromkeys(case for case, _ in times):
        print(f"{case:14} " + "   ".join(f"{side} {us:.1f} us" for (each, side), us in times.items() if each == case))

    def ours(case):
        return times[case, "convoy"]

    def overhead(side):
        return times["mlp", side] - times["mlp_local", side]

    def record(path, us, peer, theirs):
        return sides.record("autograd", "backward", us, peer, theirs, path=path, ranks=2, size=36)

    records = [record("example", ours("example"), "torch", times["example", "torch"]),
               record("mlp", ours("mlp"), "torch", times["mlp", "torch"]),
               record("mlp_overhead", overhead("convoy"), "torch", overhead("torch")),
               record("example", ours("example"), "our FAST", ours("example_fast")),
               record("calls_10000", ours("calls_10000"), "calls_10", ours("calls_10"))]
    sides.write_records(records, file)
    print("\nBars:")
    example = ours("example") / times["example", "torch"]
    added = overhead("convoy") / overhead("torch")
    unused = ours("calls_10000") / ours("calls_10")
    missed = sides.bar(example <= MOST_EXAMPLE, f"the example: {example:.3f} of PyTorch's time (bar {MOST_EXAMPLE:.3f})")
    missed += sides.bar(added <= MOST_OVERHEAD,
                        f"a network on two workers, over one process: {added:.3f} of PyTorch's (bar {MOST_OVERHEAD:.2f})")
    missed += sides.bar(unused <= MOST_UNUSED, f"10 calls of 10,000: {unused:.2f} of 10 of 10 (bar {MOST_UNUSED})")
    print(f"  SMART is {ours('example') / ours('example_fast'):.2f} of our FAST")
    print(f"\n{len(records)} records in {file}, {time.monotonic() - start:.0f} s")
    return 1 if missed else 0


if __name__ == "__main__":
    sides.exit_with(main)
