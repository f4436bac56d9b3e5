#!/usr/bin/env python3
"""Publishing weights beside memcpy, and spawning processes beside torch.multiprocessing.spawn.

The sides take turns. Records go into build/bench/processes.json. Run it through `make bench-share`,
on a machine that does nothing else.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

import sides

# Most of memcpy's time that publishing may take; least of ours that torch's spawn takes.
PUBLISH_BAR, SPAWN_BAR = 1.5, 5


def run(command):
    done = subprocess.run(command, env=sides.common_environment(), timeout=300, text=True,
                          stdout=subprocess.PIPE)
    if done.returncode:
        raise sides.SideFailed(f"{command} ended with {done.returncode}")
    return json.loads(done.stdout)


def record(op, size, ranks, ours, peer, theirs):
    return {"bench": "processes", "op": op, "dtype": "f32", "path": "", "ranks": ranks, "bytes": size,
            "ours_us": round(ours, 3), "peer": peer, "peer_us": round(theirs, 3),
            "ratio": round(theirs / ours, 3), "setting": ""}


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=sides.ROOT / "build" / "bench" / "processes.json")
    options = parser.parse_args()
    python = sides.ROOT / os.environ.get("CONVOY_VENV", ".venv") / "bin" / "python"
    program = sides.BIN / "bench_processes"
    publish, copy, ours, torchs = [], [], [], []
    for _ in range(options.rounds):
        times = run([program, "publish"])
        publish.append(times["publish_100m"])
        copy.append(times["memcpy_100m"])
        ours.append(run([program, "spawn"])["spawn_8"])
        torchs.append(run([python, sides.ROOT / "bench" / "peer_spawn.py"])["spawn_8"])
    records = [record("publish", 10**8, 1, median(publish), "memcpy", median(copy)),
               record("spawn", 0, 8, median(ours), "torch.multiprocessing", median(torchs))]
    sides.write_records(records, options.json)
    for r in records:
        print(f"{r['op']:10} {r['ours_us']:12.0f} us   {r['peer']} {r['peer_us']:.0f} us")
    slower, faster = 1 / records[0]["ratio"], records[1]["ratio"]
    print("\nBars:")
    print(f"  {'met   ' if slower <= PUBLISH_BAR else 'MISSED'} publish of 100 MB takes {slower:.2f} x "
          f"memcpy's time (bar {PUBLISH_BAR})")
    print(f"  {'met   ' if faster >= SPAWN_BAR else 'MISSED'} spawn of 8: torch.multiprocessing.spawn takes "
          f"{faster:.1f} x our time (bar {SPAWN_BAR})")
    return 1 if slower > PUBLISH_BAR or faster < SPAWN_BAR else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (sides.SideFailed, subprocess.SubprocessError) as error:
        sys.exit(f"bench: {error}")
