#!/usr/bin/env python3
"""What process groups cost, into build/bench/group.json.

- overhead: ProcessGroup::all_reduce beside the same call of the collectives below it, in turns on
  the same ranks; the median of the differences. Bar: 1 us.
- start: from the moment when the last of 8 ranks enters main to the first all-reduce that all have
  finished. Bar: 100 ms.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

import sides

OVERHEAD_BAR_US = 1.0
START_BAR_MS = 100.0


def run(ranks, what):
    """The lines that rank 0 printed, as lists of words."""
    command = [sides.BIN / "convoy", "run", "-n", str(ranks), "--no-prefix",
               sides.BIN / "bench_group", what]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=300,
                          stdout=subprocess.PIPE, text=True, check=True)
    return [line.split() for line in done.stdout.splitlines() if line.startswith(what)]


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, default=sides.ROOT / "build" / "bench" / "group.json")
    options = parser.parse_args()

    records, met = [], True
    print("all_reduce, us: process group, collectives below, difference (median of turns)")
    for ranks in (1, 2):
        rounds = [run(ranks, "overhead") for _ in range(options.rounds)]
        for lines in zip(*rounds):
            size = int(lines[0][1])
            group, below, more = (median(float(line[i]) for line in lines) for i in (2, 3, 4))
            good = more <= OVERHEAD_BAR_US
            met &= good
            records.append({"bench": "group", "op": "all_reduce", "dtype": "f32", "path": "group",
                            "ranks": ranks, "bytes": size, "ours_us": group, "peer": "coll",
                            "peer_us": below, "ratio": below / group, "more_us": more,
                            "bar_us": OVERHEAD_BAR_US})
            print(f"  {ranks} ranks {size:6} B {group:8.3f} {below:8.3f} {more:+8.3f}  "
                  f"(target {OVERHEAD_BAR_US:g}: {'met' if good else 'MISSED'})")
    print("from the last rank's main to the first finished all-reduce, ms")
    for ranks in (2, 8):
        results = [run(ranks, "start")[0] for _ in range(options.rounds)]
        meet, whole = (median(float(line[i]) for line in results) for i in (2, 3))
        good = whole <= START_BAR_MS
        met &= good
        records.append({"bench": "group", "op": "start", "dtype": "f32", "path": "private",
                        "ranks": ranks, "bytes": 4096, "ours_us": whole * 1e3, "peer": "bar",
                        "peer_us": START_BAR_MS * 1e3, "ratio": START_BAR_MS / whole,
                        "init_us": meet * 1e3})
        print(f"  {ranks} ranks: init {meet:.1f}, first all-reduce {whole:.1f}  "
              f"(target {START_BAR_MS:g}: {'met' if good else 'MISSED'})")
    sides.write_records(records, options.json)
    print(f"{len(records)} records in {options.json}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
