#!/usr/bin/env python3
"""Times torch.distributed on our backend beside Gloo, in turns, and writes build/bench/python.json.

Also beside our own collectives called from C++ (`coll`): the difference is what a call from Python
costs. Run it through `make bench-python`, on a machine that does nothing else.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import sides

KB, MB = 1 << 10, 1 << 20
# (operation, type or model, bytes, peer, least ratio): what we promise on an idle 2-core machine.
BARS = [
    ("all_reduce", "f32", 8, "gloo", 50),
    ("all_reduce", "f32", 25 * MB, "gloo", 5),
    ("all_reduce", "f32", 100 * MB, "gloo", 5),
    ("ddp", "mlp_100m", 0, "gloo", 1),
    ("ddp", "gpt_10m", 0, "gloo", 1),
]
CALL_COST_US = 10


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="times that every side measures a case")
    parser.add_argument("--seconds", type=float, default=0.1, help="of one measurement, about")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--ops", default="all_reduce,barrier,ddp")
    parser.add_argument("--json", default=sides.ROOT / "build" / "bench" / "python.json", type=Path)
    options = parser.parse_args()
    ops = options.ops.split(",")
    cases = [("all_reduce", "f32", size) for size in (8, 4 * KB, 64 * KB, MB, 25 * MB, 100 * MB)]
    cases += [("barrier", "f32", 0), ("ddp", "mlp_100m", 0), ("ddp", "gpt_10m", 0)]

    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; ratios are peer's time / ours")
    ours = sides.torch_distributed("convoy", options.ranks)
    coll = sides.convoy(options.ranks)
    coll.name = "coll"
    running = [ours, sides.gloo(options.ranks), coll]
    results = sides.Results()
    start = time.monotonic()
    try:
        for op, kind, size in (c for c in cases if c[0] in ops):
            seconds = 3.0 if op == "ddp" else options.seconds
            case = (op, kind, "private", size, seconds)
            results.run([s for s in running if s is not coll or op != "ddp"], [case], options.rounds)
            show(results, case, options.ranks)
    finally:
        for side in running:
            side.close()
    records = results.records("python")
    sides.write_records(records, options.json)
    show_bars(records)
    print(f"\n{len(records)} records in {options.json}, {time.monotonic() - start:.0f} s")
    return 0


def show(results, case, ranks):
    ours = results.best(case, ranks, "convoy")[0]
    text = f"{case[0]:11} {case[1]:9} {case[3]:>10} B {ours:12.2f} us"
    for peer in ("gloo", "coll"):
        best = results.best(case, ranks, peer)
        if best:
            text += f"   {peer} {best[0]:12.2f} us {best[0] / ours:7.2f} x"
    print(text, flush=True)


def show_bars(records):
    print("\nBars:")
    for op, kind, size, peer, least in BARS:
        for r in records:
            if (r["op"], r["dtype"], r["bytes"], r["peer"]) == (op, kind, size, peer):
                verdict = "met   " if r["ratio"] >= least else "MISSED"
                print(f"  {verdict} {op} {kind} {size} B: {r['ratio']:.2f} x {peer} (target {least})")
    for r in records:
        if r["peer"] == "coll" and r["op"] == "all_reduce" and r["bytes"] == 8:
            cost = r["ours_us"] - r["peer_us"]
            verdict = "met   " if cost <= CALL_COST_US else "MISSED"
            print(f"  {verdict} a call from Python costs {cost:.1f} us more (target {CALL_COST_US})")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (sides.SideFailed, subprocess.SubprocessError) as error:
        sys.exit(f"bench: {error}")
