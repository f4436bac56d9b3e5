#!/usr/bin/env python3
"""Tensors between two processes beside torch.multiprocessing.Queue and raw descriptor passing.

Echoes: a tensor goes to another process and comes back. The sides take turns, round by round; the
cases are those of bench_share.cpp. Records go into build/bench/share.json, one for each case and
peer. Run it through `make bench-share`, on a machine that does nothing else.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import sides

BYTES = {"shared_1k": 1024, "shared_1k_asleep": 1024, "shared_100m": 10**8, "shared_100m_asleep": 10**8,
         "fresh_100m": 10**8, "many_1k": 1000 * 1024}
# Most of torch's time that an echo may take, and most microseconds.
RATIO_BARS = {"shared_1k_asleep": 8, "shared_100m_asleep": 8, "fresh_100m": 5, "many_1k": 400}
TIME_BARS = {"shared_1k": 10, "shared_100m": 10}


def commands():
    python = sides.ROOT / os.environ.get("CONVOY_VENV", ".venv") / "bin" / "python"
    peer = sides.ROOT / "bench" / "peer_share.py"
    return {("convoy", ""): [sides.BIN / "bench_share", "convoy"],
            ("torch.multiprocessing", "file_descriptor"): [python, peer, "file_descriptor"],
            ("torch.multiprocessing", "file_system"): [python, peer, "file_system"],
            ("limit", ""): [sides.BIN / "bench_share", "limit"]}


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=sides.ROOT / "build" / "bench" / "share.json")
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; ratios are peer's time / ours")
    start = time.monotonic()
    times = {}
    for _ in range(options.rounds):
        for side, command in commands().items():
            done = subprocess.run(command, env=sides.common_environment(), timeout=300, text=True,
                                  stdout=subprocess.PIPE)
            if done.returncode:
                raise sides.SideFailed(f"{side} ended with {done.returncode}")
            for case, us in json.loads(done.stdout).items():
                times.setdefault((case, side), []).append(us)
    records = make_records(times)
    sides.write_records(records, options.json)
    missed = show(records)
    print(f"\n{len(records)} records in {options.json}, {time.monotonic() - start:.0f} s")
    return 1 if missed else 0


def make_records(times):
    records = []
    for (case, (peer, setting)), found in times.items():
        if peer == "convoy":
            continue
        ours, theirs = median(times[case, ("convoy", "")]), median(found)
        records.append({"bench": "share", "op": "echo", "dtype": "f32", "path": case, "ranks": 2,
                        "bytes": BYTES[case], "ours_us": round(ours, 3), "peer": peer,
                        "peer_us": round(theirs, 3), "ratio": round(theirs / ours, 3),
                        "setting": setting})
    return records


def show(records):
    """Prints everything; how many bars were missed."""
    for case in BYTES:
        found = [r for r in records if r["path"] == case]
        text = f"{case:20} {found[0]['ours_us']:12.2f} us"
        for r in found:
            name = f"{r['peer']} {r['setting']}".strip()
            text += f"   {name} {r['peer_us']:.1f} us {r['ratio']:.2f} x"
        print(text)
    print("\nBars:")
    missed = 0
    for case, least in RATIO_BARS.items():
        ratio = min(r["ratio"] for r in records
                    if r["path"] == case and r["peer"] == "torch.multiprocessing")
        missed += ratio < least
        print(f"  {'met   ' if ratio >= least else 'MISSED'} {case}: torch.multiprocessing takes "
              f"{ratio:.1f} x our time (bar {least})")
    for case, most in TIME_BARS.items():
        ours = next(r["ours_us"] for r in records if r["path"] == case)
        missed += ours > most
        print(f"  {'met   ' if ours <= most else 'MISSED'} {case}, both busy: {ours:.1f} us (bar {most})")
    return missed


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (sides.SideFailed, subprocess.SubprocessError) as error:
        sys.exit(f"bench: {error}")
