#!/usr/bin/env python3
"""Queues between processes beside torch.multiprocessing.Queue and DataLoader.

Microseconds an item: the cases are those of bench_queue.cpp. The sides take turns, round by round.
Records go into build/bench/queue.json. Run it through `make bench-share`, on a machine that does
nothing else.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

import sides

BYTES = {"queue_1k": 1024, "queue_1k_copy": 1024, "queue_1m": 1 << 20}
RANKS = {"queue_1k": 4, "queue_1k_copy": 4, "queue_1m": 3}
# The peer's time, at least, as a multiple of ours.
BARS = {"queue_1k": 50, "queue_1m": 20}


def commands():
    python = sides.ROOT / os.environ.get("CONVOY_VENV", ".venv") / "bin" / "python"
    peer = sides.ROOT / "bench" / "peer_queue.py"
    return {("convoy", ""): [sides.BIN / "bench_queue"],
            ("convoy", "python"): [python, peer, "convoy"],
            ("torch", "file_descriptor"): [python, peer, "file_descriptor"],
            ("torch", "file_system"): [python, peer, "file_system"]}


def environment():
    package = sides.BIN.parent / "python"
    return sides.common_environment() | {"PYTHONPATH": str(package)}


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=sides.ROOT / "build" / "bench" / "queue.json")
    options = parser.parse_args()
    times = {}
    for _ in range(options.rounds):
        for side, command in commands().items():
            done = subprocess.run(command, env=environment(), timeout=300, text=True,
                                  stdout=subprocess.PIPE)
            if done.returncode:
                raise sides.SideFailed(f"{side} ended with {done.returncode}")
            for case, us in json.loads(done.stdout).items():
                times.setdefault((case, side), []).append(us)
    records = make_records(times)
    sides.write_records(records, options.json)
    return 1 if show(records) else 0


def make_records(times):
    """Ours is C++; the Python package beside it is a setting of ours."""
    records = []
    for (case, (side, setting)), found in times.items():
        if (side, setting) == ("convoy", ""):
            continue
        ours, theirs = median(times[case, ("convoy", "")]), median(found)
        peer = "torch.multiprocessing" if case == "queue_1k" else "DataLoader"
        records.append({"bench": "queue", "op": "queue", "dtype": "f32", "path": case,
                        "ranks": RANKS[case], "bytes": BYTES[case], "ours_us": round(ours, 3),
                        "peer": peer if side == "torch" else "convoy", "peer_us": round(theirs, 3),
                        "ratio": round(theirs / ours, 3), "setting": setting})
    copied = median(times["queue_1k_copy", ("convoy", "")])
    shared = median(times["queue_1k", ("convoy", "")])
    records.append({"bench": "queue", "op": "queue", "dtype": "f32", "path": "queue_1k_copy",
                    "ranks": 4, "bytes": 1024, "ours_us": round(copied, 3), "peer": "convoy",
                    "peer_us": round(shared, 3), "ratio": round(shared / copied, 3),
                    "setting": "shared"})
    return records


def show(records):
    """Prints everything; how many bars were missed."""
    for r in records:
        print(f"{r['path']:14} {r['ours_us']:9.2f} us   {r['peer']} {r['setting']} "
              f"{r['peer_us']:.1f} us {r['ratio']:.1f} x")
    print("\nBars:")
    missed = 0
    for case, least in BARS.items():
        ratio, peer = min((r["ratio"], r["peer"]) for r in records
                          if r["path"] == case and r["peer"] != "convoy")
        missed += ratio < least
        print(f"  {'met   ' if ratio >= least else 'MISSED'} {case}: {peer} takes {ratio:.1f} x our "
              f"time (bar {least})")
    return missed


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (sides.SideFailed, subprocess.SubprocessError) as error:
        sys.exit(f"bench: {error}")
