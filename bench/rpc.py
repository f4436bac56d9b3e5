#!/usr/bin/env python3
"""Calls with tensors beside PyTorch's RPC (TensorPipe), gRPC, Ray and Monarch, and beside what the machine allows.

The sides take turns, round by round; the cases are those of calls.h. Records go into build/bench/rpc.json, one for
each case and peer. A peer that is not installed is left out, and that is said. Run it through `make bench-rpc`, on a
machine that does nothing else.
"""

import argparse
import os
import time
from pathlib import Path

import sides

BYTES = {"echo_1mb": 10**6, "echo_16mb": 16 * 10**6, "echo_100mb": 100 * 10**6}
# (case, peer): most of the peer's time that ours may take.
MOST = {("call", "endpoint"): 2, ("call_asleep", "tensorpipe"): 1 / 4, ("outstanding_64", "tensorpipe"): 1 / 20,
        ("outstanding_64", "grpc"): 1 / 5}
MOST |= {(case, "memcpy"): 1.3 for case in BYTES} | {(case, "tensorpipe"): 0.7 for case in BYTES}
# Python: (case, our side, peer): most of the peer's time. What was measured beside TensorPipe is PyTorch's API on both.
MOST_PYTHON = {("sync_add", "convoy torch", "tensorpipe python"): 1 / 3,
               ("echo_100mb", "convoy torch", "tensorpipe python"): 0.7,
               ("threads_16", "convoy torch", "tensorpipe python"): 1 / 4,
               ("sync_add", "convoy python", "convoy torch"): 1 / 2, ("call", "convoy python", "ray"): 1 / 5,
               ("call", "convoy python", "monarch"): 1 / 5}
# References: (case, side): most of another case's time, of our own side or of a peer's.
MOST_RREF = {("rref_life", "tensorpipe rref"): ("rref_life", 1 / 10), ("to_here", "convoy rref"): ("number", 1.2),
             ("module_forward", "convoy rref"): ("plain_forward", 1.1)}
MOST_RREF_BYTES = 500  # of a live one, without its value, on each side
MOST_BESIDE = 2  # times the median of small calls alone
# What bench_endpoint calls its cases: limits of ours.
LETTERS = {"round_trip": "call", "round_trip_asleep": "call_asleep"}


def python_side(name, environment=()):
    return ["env", *environment, sides.venv_python(), sides.ROOT / "bench" / "peer_rpc.py", name]


def commands(quick):
    """Side -> command."""
    found = {"convoy": [sides.BIN / "bench_rpc", "convoy"], "convoy rref": [sides.BIN / "bench_rref"],
             "memcpy": [sides.BIN / "bench_rpc", "memcpy"], "two cores": [sides.BIN / "bench_rpc", "cores"],
             "local": [sides.BIN / "bench_rpc", "local"],
             "endpoint": [sides.BIN / "bench_endpoint", "small"], "tensorpipe": [sides.BIN / "bench_rpc_torch"],
             "grpc": [sides.BIN / "bench_rpc_grpc"]}
    if not quick:
        found["tensorpipe python"] = python_side("torch")
        package = [f"PYTHONPATH={sides.ROOT / 'build' / 'release' / 'python'}"]
        found["convoy torch"] = python_side("torch_convoy", package)
        found["convoy python"] = python_side("convoy", package)
        found["tensorpipe rref"] = python_side("torch_rref")
        for name in ("ray", "monarch"):
            # Where tools/bootstrap puts them.
            folder = sides.venv() / name
            found[name] = python_side(name, [f"PYTHONPATH={folder}"]) if (folder / "packages").exists() else [folder]
    for side in [side for side, command in found.items() if not Path(command[0]).exists() and command[0] != "env"]:
        print(f"left out, not installed: {side} (tools/bootstrap peers)")
        del found[side]
    return {side: [*command, *(["quick"] if quick else [])] for side, command in found.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--quick", action="store_true", help="one round, C++ only, without the 1 GB")
    parser.add_argument("--sides", help="only these, by comma")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    file = options.json or sides.ROOT / "build" / "bench" / ("rpc_quick.json" if options.quick else "rpc.json")
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; ratios are our time / the peer's")
    start = time.monotonic()
    found = commands(options.quick)
    if options.sides:
        found = {side: command for side, command in found.items() if side in options.sides.split(",")}
    times = sides.take_turns(found, options.rounds or (1 if options.quick else 3))
    times = {(LETTERS.get(case, case), side): us for (case, side), us in times.items()}
    ours = {case: us for (case, side), us in times.items() if side == "convoy"}
    records = [sides.record("rpc", "call", ours[case], side, us, path=case, ranks=2, size=BYTES.get(case, 8))
               for (case, side), us in times.items() if side != "convoy" and case in ours]
    if "call_beside_1gb" in ours:
        records.append(sides.record("rpc", "call", ours["call_beside_1gb"], "alone", ours["call_single"],
                                    path="call_beside_1gb", ranks=2, size=8))
    records += [sides.record("rpc", "rref", times[case, "convoy rref"], side, times[other, side], path=case, ranks=3,
                             size=8)
                for (case, side), (other, _) in MOST_RREF.items()
                if (case, "convoy rref") in times and (other, side) in times]
    records += [sides.record("rpc", side, times[case, side], peer, times[case, peer], path=case, ranks=2,
                             size=BYTES.get(case, 8))
                for case, side, peer in MOST_PYTHON if (case, side) in times and (case, peer) in times]
    floor = floor_of(times)
    if floor and "call" in ours:
        records.append(sides.record("rpc", "call", ours["call"], "floor", floor, path="call", ranks=2, size=8))
    sides.write_records(records, file)
    missed = show(times, ours, records)
    if floor and "call" in ours:
        print(f"  (call: the endpoint's round trip and libtorch's part, three tensors and a + b, take {floor:.2f} us; "
              f"ours is {ours['call'] / floor:.2f} of that)")
    print(f"\n{len(records)} records in {file}, {time.monotonic() - start:.0f} s")
    return 1 if missed else 0


def floor_of(times):
    """What a small call takes without anything of RPC: the round trip, and what libtorch needs for three tensors and
    the function."""
    parts = [times.get(("call", "endpoint")), times.get(("call_tensors", "local"))]
    return sum(parts) if all(parts) else None


def show(times, ours, records):
    """Prints everything; how many bars were missed."""
    for case in dict.fromkeys(case for case, _ in times):
        print(f"{case:16} " + "   ".join(f"{side} {us:.2f} us" for (each, side), us in times.items() if each == case))
    print("\nBars:")
    missed = 0
    for (case, peer), most in MOST.items():
        ratios = [1 / r["ratio"] for r in records if r["path"] == case and r["peer"] == peer]
        if not ratios:
            print(f"  not measured: {case} beside {peer}")
            continue
        missed += sides.bar(ratios[0] <= most, f"{case}: {ratios[0]:.3f} of {peer}'s time (target {most:.3f})")
    for (case, peer), (other, most) in MOST_RREF.items():
        ratios = [1 / r["ratio"] for r in records if r["path"] == case and r["peer"] == peer]
        if ratios:
            missed += sides.bar(ratios[0] <= most, f"{case}: {ratios[0]:.3f} of {peer}'s {other} (target {most:.3f})")
    for (case, side, peer), most in MOST_PYTHON.items():
        if (case, side) not in times or (case, peer) not in times:
            print(f"  not measured: {case} of {side} beside {peer}")
            continue
        ratio = times[case, side] / times[case, peer]
        missed += sides.bar(ratio <= most, f"{case}: {side} {ratio:.3f} of {peer}'s time (target {most:.3f})")
    for case in ("rref_bytes", "rref_bytes_owner"):
        if (case, "convoy rref") in times:
            found = times[case, "convoy rref"]
            missed += sides.bar(found <= MOST_RREF_BYTES, f"{case}: {found:.0f} (target {MOST_RREF_BYTES})")
    if "call_beside_1gb" in ours:
        ratio = ours["call_beside_1gb"] / ours["call_single"]
        missed += sides.bar(ratio < MOST_BESIDE, f"small calls beside 1 GB: {ratio:.2f} of those alone (target {MOST_BESIDE})")
    return missed


if __name__ == "__main__":
    sides.exit_with(main)
