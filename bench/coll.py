#!/usr/bin/env python3
"""Times our collectives beside their peers, in turns, and writes build/bench/coll.json.

Peers: Gloo through torch.distributed, Open MPI and oneCCL (their defaults, and settings that are
better somewhere), our own backend "mpi" over Open MPI, and the hand-written limit of bench/limit. A
peer that is not installed is left out, and that is said. Run it through `make bench-coll` or `make
bench-quick`, on a machine that does nothing else: with other work beside it only large differences
mean something.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import sides

KB, MB = 1 << 10, 1 << 20
# The default (cma), and the one other way of copying within a host, which is better at many sizes.
# Its algorithms were not searched for better ones.
MPI_SETTINGS = {
    "default": [],
    "copy in copy out": ["--mca", "btl_vader_single_copy_mechanism", "none"],
}
# Over Intel MPI, with the best of the few algorithms that were tried (for bf16 from 64 KB to 4 MB
# the default is better); its default; and over libfabric.
ONECCL_SETTINGS = {
    "tuned": {"CCL_ALLREDUCE": "direct:0-131072;nreduce:131073-max", "CCL_REDUCE_SCATTER": "naive"},
    "default": {},
    "ofi": {"CCL_ATL_TRANSPORT": "ofi"},
}
LARGE = [MB, 4 * MB, 25 * MB, 100 * MB]
# (operation, type, path, ranks, sizes, peer, least ratio): what we promise on an idle 2-core machine.
BARS = [
    ("all_reduce", "f32", "group", 2, [25 * MB, 100 * MB], "limit", 0.9),
    ("all_reduce", "f32", "group", 2, [64 * KB, MB], "openmpi", 1.3),
    ("all_reduce", "f32", "private", 2, [25 * MB, 100 * MB], "limit", 0.8),
    ("all_reduce", "f32", "private", 2, [25 * MB, 100 * MB], "openmpi", 2),
    ("all_reduce", "f32", "private", 2, [25 * MB, 100 * MB], "gloo", 5),
    ("all_reduce", "f32", "private", 2, [64 * KB, MB], "openmpi", 1),
    ("all_reduce", "f32", "private", 2, [8], "openmpi", 1),
    ("barrier", "f32", "private", 2, [0], "openmpi", 1),
    ("all_reduce", "bf16", "private", 2, [25 * MB, 100 * MB], "openmpi", 2),
    ("reduce_scatter", "f32", "group", 2, LARGE, "limit", 0.8),
    ("reduce_scatter", "f32", "private", 2, LARGE, "limit", 0.8),
    *((op, "f32", path, 2, LARGE, "openmpi", least)
      for op in ["all_gather", "broadcast", "all_to_all"]
      for path, least in [("private", 1), ("group", 1.5)]),
    ("ping_pong", "f32", "private", 2, [8, 100 * MB], "openmpi", 1),
    ("all_reduce", "f32", "private", 4, None, "openmpi", 1),
    ("all_reduce", "f32", "private", 4, None, "gloo", 1),
    ("all_reduce", "f32", "group", 4, None, "openmpi", 1),
    ("all_reduce", "f32", "group", 4, None, "gloo", 1),
]


def cases(quick):
    """(ranks, op, dtype, paths, bytes)"""
    sizes = [8, 64 * KB, MB, 25 * MB, 100 * MB]
    if not quick:
        sizes = [8, 256, 4 * KB, 64 * KB, 256 * KB, MB, 4 * MB, 25 * MB, 100 * MB, 256 * MB]
    both = ["group", "private"]
    for ranks in [2, 4]:
        yield from ((ranks, "all_reduce", "f32", both, size) for size in sizes)
        yield ranks, "barrier", "f32", ["private"], 0
        if ranks == 2 or not quick:
            large = [25 * MB, 100 * MB] if quick else sizes[3:]
            yield from ((ranks, "all_reduce", "bf16", both, size) for size in large)
            pings = [8, 100 * MB] if quick else sizes
            yield from ((ranks, "ping_pong", "f32", both, size) for size in pings if ranks == 2)
            for op in ["reduce_scatter", "all_gather", "broadcast", "all_to_all"]:
                some = [MB, 100 * MB] if quick else sizes[3:]
                yield from ((ranks, op, "f32", both, size) for size in some)


def start_sides(ranks, wanted, most_bytes, quick):
    found = [sides.convoy(ranks)]
    found += [sides.convoy(ranks, setting) for setting in wanted if "=" in setting]
    # With more ranks than cores it spins in vain, and takes a tenth of the quick run.
    if "limit" in wanted and not (quick and ranks > sides.cores()):
        found.append(sides.limit(ranks, most_bytes))
    if "openmpi" in wanted:
        if shutil.which("mpirun") and (sides.BIN / "bench_mpi").exists():
            found += [sides.open_mpi(ranks, *setting) for setting in MPI_SETTINGS.items()]
        else:
            print("openmpi: not installed; left out")
    if "mpi" in wanted:
        if shutil.which("mpirun") and (sides.BIN / ".." / "lib" / "libconvoy_mpi.so").exists():
            found.append(sides.convoy_mpi(ranks))
        else:
            print("mpi: not built; left out")
    if "gloo" in wanted:
        found.append(sides.gloo(ranks))
    if "oneccl" in wanted:  # last, because it waits
        found += start_oneccl(ranks, quick)
    return found


def start_oneccl(ranks, quick):
    if not (sides.BIN / "bench_oneccl").exists() or not sides.one_ccl_folder().exists():
        print("oneccl: not installed; left out")
        return []
    # With more ranks than cores nreduce collapses, and ofi was no better than the default.
    settings = ["default"] if ranks > sides.cores() else ["tuned"] if quick else ONECCL_SETTINGS
    found = []
    for setting in settings:
        side = sides.one_ccl(ranks, setting, ONECCL_SETTINGS[setting])
        try:  # it is installed by itself, so it must not stop the others where it does not run
            side.run(("barrier", "f32", "private", 0, 0.001), limit=60)
            found.append(side)
        except sides.SideFailed as error:
            print(f"oneccl: left out, because {error}")
            side.close()
    return found


def show(results, case, ranks, peers):
    op, dtype, path, size, _ = case
    ours = results.best(case, ranks, "convoy")
    if ours is None:
        return
    text = f"{op:14} {dtype:5} {path:8} n={ranks} {human(size):>7} {ours[0]:11.2f} us"
    for peer in peers:
        best = results.best(case, ranks, f"convoy {peer}" if "=" in peer else peer)
        if best:
            text += f"   {peer} {best[0] / ours[0]:6.2f} x"
            text += f" [{best[1]}]" if best[1] else ""
    near = results.barrier_ns(case, ranks)
    print(text + (f"   cores {near[0]}-{near[1]} ns apart" if near else ""), flush=True)


def human(size):
    for unit, name in [(MB, "MB"), (KB, "KB")]:
        if size >= unit and size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} B"


def show_bars(records):
    print("\nBars (peer's time / ours; against a peer's best setting):")
    for op, dtype, path, ranks, sizes, peer, least in BARS:
        found = {}
        for r in records:
            if (r["op"], r["dtype"], r["path"], r["ranks"], r["peer"]) != (op, dtype, path, ranks, peer):
                continue
            if sizes is None or r["bytes"] in sizes:
                found[r["bytes"]] = min(found.get(r["bytes"], float("inf")), r["ratio"])
        for size, ratio in sorted(found.items()):
            verdict = "met   " if ratio >= least else "MISSED"
            print(f"  {verdict} {op} {dtype} {path} n={ranks} {human(size):>7}: "
                  f"{ratio:.2f} x {peer} (target {least})")


def show_overhead(records):
    """What backend "mpi" adds to Open MPI in the same setting."""
    times = {}
    for r in records:
        if r["peer"] == "mpi" or (r["peer"], r["setting"]) == ("openmpi", "default"):
            times.setdefault((r["op"], r["dtype"], r["path"], r["ranks"], r["bytes"]), {})[r["peer"]] = r["peer_us"]
    print("\nBackend mpi beside Open MPI itself (target: 2 us more, up to 4 KB):")
    for (op, dtype, path, ranks, size), us in times.items():
        if len(us) == 2 and path == "private" and size <= 4 * KB:
            more = us["mpi"] - us["openmpi"]
            print(f"  {'met   ' if more <= 2 else 'MISSED'} {op} {dtype} n={ranks} {human(size):>7}: "
                  f"{us['openmpi']:.2f} us, over us {us['mpi']:.2f} us")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer sizes, less than two minutes")
    parser.add_argument("--rounds", type=int, help="times that every side measures every case")
    parser.add_argument("--seconds", type=float, default=0.03, help="of one measurement, about")
    parser.add_argument("--peers", default="limit,openmpi,oneccl,mpi,gloo",
                        help="also NAME=value: ourselves, with this variable set")
    parser.add_argument("--ops", help="only these operations")
    parser.add_argument("--ranks", help="only these numbers of ranks")
    parser.add_argument("--sizes", help="only these sizes, in bytes")
    parser.add_argument("--dtypes", help="only these types")
    parser.add_argument("--json", default=sides.ROOT / "build" / "bench" / "coll.json", type=Path)
    options = parser.parse_args()
    rounds = options.rounds or (3 if options.quick else 9)

    def wanted(value, choice):
        return choice is None or str(value) in choice.split(",")

    todo = [c for c in cases(options.quick)
            if wanted(c[0], options.ranks) and wanted(c[1], options.ops)
            and wanted(c[2], options.dtypes) and wanted(c[4], options.sizes)]
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; ratios are peer's time / ours, "
          f"above 1 we are faster")
    results = sides.Results()
    start = time.monotonic()
    for ranks in sorted({c[0] for c in todo}):
        peers = options.peers.split(",")
        running = start_sides(ranks, peers, max(c[4] for c in todo), options.quick)
        try:
            for _, op, dtype, paths, size in (c for c in todo if c[0] == ranks):
                cases_here = [(op, dtype, path, size, options.seconds) for path in paths]
                results.run(running, cases_here, rounds)
                for case in cases_here:
                    show(results, case, ranks, peers)
        finally:
            for side in running:
                side.close()
    records = results.records("coll")
    sides.write_records(records, options.json)
    show_bars(records)
    show_overhead(records)
    print(f"\n{len(records)} records in {options.json}, {time.monotonic() - start:.0f} s")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (sides.SideFailed, subprocess.SubprocessError) as error:
        sys.exit(f"bench: {error}")
