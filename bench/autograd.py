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
MOST_SMART = 1.1  # times FAST, for a request and its reply
MOST_LINEAGE = 1.03  # times a forward pass without lineages
MOST_STEP = 1 / 8  # of PyTorch's time, over four owners
LEAST_GAIN = 1.2  # of a step in backward over one behind it, for small parameters


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
    rounds = options.rounds or (1 if options.quick else 3)
    times = sides.take_turns(commands, rounds)
    times |= sides.take_turns({"convoy": [sides.BIN / "bench_optim", *quick],
                               "torch": [sides.venv_python(), sides.ROOT / "bench" / "peer_optim.py", *quick]}, rounds)
    for case in dict.fromkeys(case for case, _ in times):
        print(f"{case:14} " + "   ".join(f"{side} {us:.1f} us" for (each, side), us in times.items() if each == case))

    def ours(case):
        return times[case, "convoy"]

    def overhead(side):
        return times["mlp", side] - times["mlp_local", side]

    def record(path, us, peer, theirs, ranks=2):
        return sides.record("autograd", "backward", us, peer, theirs, path=path, ranks=ranks, size=36)

    records = [record("example", ours("example"), "torch", times["example", "torch"]),
               record("mlp", ours("mlp"), "torch", times["mlp", "torch"]),
               record("mlp_overhead", overhead("convoy"), "torch", overhead("torch")),
               record("example", ours("example"), "our FAST", ours("example_fast")),
               record("chain_4", ours("chain"), "our FAST", ours("chain_fast")),
               record("lineage", ours("mlp_forward"), "without", ours("mlp_forward_plain")),
               record("calls_10000", ours("calls_10000"), "calls_10", ours("calls_10")),
               record("step_4_owners", ours("step"), "torch", times["step", "torch"], ranks=5),
               record("backward_and_step", ours("together"), "torch", times["apart", "torch"], ranks=5),
               record("step_in_backward", ours("together"), "apart", ours("apart"), ranks=5)]
    sides.write_records(records, file)
    print("\nBars:")
    example = ours("example") / times["example", "torch"]
    added = overhead("convoy") / overhead("torch")
    unused = ours("calls_10000") / ours("calls_10")
    missed = sides.bar(example <= MOST_EXAMPLE, f"the example: {example:.3f} of PyTorch's time (target {MOST_EXAMPLE:.3f})")
    missed += sides.bar(added <= MOST_OVERHEAD,
                        f"a network on two workers, over one process: {added:.3f} of PyTorch's (target {MOST_OVERHEAD:.2f})")
    missed += sides.bar(unused <= MOST_UNUSED, f"10 calls of 10,000: {unused:.2f} of 10 of 10 (target {MOST_UNUSED})")
    step, gain = ours("step") / times["step", "torch"], ours("apart") / ours("together")
    missed += sides.bar(step <= MOST_STEP, f"a step over four owners: {step:.3f} of PyTorch's time (target {MOST_STEP:.3f})")
    missed += sides.bar(gain >= LEAST_GAIN, f"a step in backward: {gain:.2f} x faster than behind it (target {LEAST_GAIN})")
    print(f"  with one owner: {ours('apart_1') / ours('together_1'):.2f} x")
    smart = ours("example") / ours("example_fast")
    missed += sides.bar(smart <= MOST_SMART, f"SMART, a request and its reply: {smart:.3f} of our FAST (target {MOST_SMART})")
    more = ours("chain") - ours("chain_fast")
    missed += sides.bar(more <= ours("call"), f"SMART, a chain of four workers: {more:+.1f} us over our FAST "
                                              f"(target: a small round trip, {ours('call'):.1f} us)")
    lineage = ours("mlp_forward") / ours("mlp_forward_plain")
    missed += sides.bar(lineage <= MOST_LINEAGE, f"a forward pass with lineages: {lineage:.3f} of one without "
                                                 f"(target {MOST_LINEAGE})")
    print(f"\n{len(records)} records in {file}, {time.monotonic() - start:.0f} s")
    return 1 if missed else 0


if __name__ == "__main__":
    sides.exit_with(main)
