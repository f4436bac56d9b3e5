#!/usr/bin/env python3
"""Letters between processes beside ZeroMQ, Open MPI, a Unix socket, and what the machine allows.

The sides take turns, round by round; the cases are those of letters.h. Records go into
build/bench/endpoint.json, one for each case and peer. Run it through `make bench-endpoint`, on a
machine that does nothing else.
"""

import os
import time

import sides

BYTES = {"round_trip": 8, "round_trip_asleep": 8, "outstanding_64": 8, "large_lent": 10**8, "large_placed": 10**8}
# (case, peer): most of the peer's time that ours may take.
MOST = {("round_trip", "ring"): 1.5, ("round_trip_asleep", "futex"): 1.2, ("outstanding_64", "zmq"): 1 / 5,
        ("outstanding_64", "openmpi"): 1 / 2, ("large_lent", "memcpy"): 1.1, ("large_placed", "memcpy"): 1.2}
MOST_STAR = {"star_megabytes": 40, "star_idle_ms": 10}


def commands():
    found = {side: [sides.BIN / "bench_endpoint", side] for side in ("convoy", "ring", "futex", "memcpy", "unix")}
    if (sides.BIN / "bench_zmq").exists():
        found["zmq"] = [sides.BIN / "bench_zmq"]
    if (sides.BIN / "bench_letters_mpi").exists():
        root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        found["openmpi"] = ["mpirun", "-n", "2", *root, sides.BIN / "bench_letters_mpi"]
    return found


def main():
    options = sides.options(__doc__, "endpoint")
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; ratios are our time / the peer's")
    start = time.monotonic()
    times = sides.take_turns(commands(), options.rounds)
    ours = {case: us for (case, side), us in times.items() if side == "convoy"}
    records = []
    for (case, side), theirs in times.items():
        if side != "convoy":
            records += [sides.record("endpoint", "letter", ours[mine], side, theirs, path=mine, ranks=2,
                                     size=BYTES[mine])
                        for mine in ours if mine == case or mine.startswith(case + "_l") or mine.startswith(case + "_p")]
    star = sides.run_once([sides.BIN / "bench_endpoint", "star"])
    records.append({"bench": "endpoint", "op": "star", "ranks": 64} | star)
    sides.write_records(records, options.json)
    missed = show(ours, records, star)
    print(f"\n{len(records)} records in {options.json}, {time.monotonic() - start:.0f} s")
    return 1 if missed else 0


def show(ours, records, star):
    """Prints everything; how many bars were missed."""
    for case, us in ours.items():
        text = f"{case:20} {us:12.2f} us"
        for r in records:
            if r.get("path") == case:
                text += f"   {r['peer']} {r['peer_us']:.2f} us"
        print(text)
    print("star of 64: " + ", ".join(f"{name} {value}" for name, value in star.items()))
    print("\nBars:")
    missed = 0
    for (case, peer), most in MOST.items():
        ratios = [1 / r["ratio"] for r in records if r.get("path") == case and r["peer"] == peer]
        if not ratios:
            print(f"  not measured: {case} beside {peer}")
            continue
        missed += sides.bar(ratios[0] <= most, f"{case}: {ratios[0]:.2f} of {peer}'s time (target {most:.2f})")
    for name, most in MOST_STAR.items():
        missed += sides.bar(star[name] <= most, f"{name}: {star[name]} (target {most})")
    return missed


if __name__ == "__main__":
    sides.exit_with(main)
