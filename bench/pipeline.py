#!/usr/bin/env python3
"""Pipelines beside the ideal schedule and torch.distributed.pipelining on Gloo.

The sides take turns, round by round. Records go into build/bench/pipeline.json. Run it through `make bench-autograd`,
on a machine that does nothing else.
"""

import argparse
import os
import time
from pathlib import Path

import sides

IDEAL_US = (8 + 3 - 1) * 15_000  # of bench_pipeline.cpp's timers
LEAST_OF_IDEAL = 0.9
MOST_REAL = 1.0  # of PyTorch's time


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    file = options.json or sides.ROOT / "build" / "bench" / ("pipeline_quick.json" if options.quick else "pipeline.json")
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; ratios are our time / the peer's")
    start = time.monotonic()
    quick = ["quick"] if options.quick else []
    commands = {"convoy": [sides.BIN / "bench_pipeline", *quick],
                "torch": [sides.venv_python(), sides.ROOT / "bench" / "peer_pipeline.py", *quick]}
    times = sides.take_turns(commands, options.rounds or (1 if options.quick else 3))
    for case in dict.fromkeys(case for case, _ in times):
        print(f"{case:14} " + "   ".join(f"{side} {us:.1f} us" for (each, side), us in times.items() if each == case))

    def ours(case):
        return times[case, "convoy"]

    def record(path, us, peer, theirs):
        return sides.record("pipeline", "step", us, peer, theirs, path=path, ranks=3, size=512 * 1024 * 4)

    records, missed = [], 0
    print("\nBars:")
    for schedule in ("gpipe", "1f1b"):
        timer, real, theirs = ours(f"timer_{schedule}"), ours(f"real_{schedule}"), times[f"real_{schedule}", "torch"]
        records += [record(f"timer_{schedule}", timer, "ideal", IDEAL_US),
                    record(f"real_{schedule}", real, "torch", theirs)]
        missed += sides.bar(IDEAL_US / timer >= LEAST_OF_IDEAL,
                            f"{schedule}, stages that wait on a timer: {IDEAL_US / timer:.3f} of the ideal (target {LEAST_OF_IDEAL})")
        missed += sides.bar(real / theirs <= MOST_REAL,
                            f"{schedule}, real stages: {real / theirs:.3f} of PyTorch's time (target {MOST_REAL})")
    sides.write_records(records, file)
    print(f"\n{len(records)} records in {file}, {time.monotonic() - start:.0f} s")
    return 1 if missed else 0


if __name__ == "__main__":
    sides.exit_with(main)
