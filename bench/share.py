#!/usr/bin/env python3
"""Tensors between two processes beside torch.multiprocessing.Queue and raw descriptor passing.

Echoes: a tensor goes to another process and comes back; and the first share of large private tensors. The sides take turns, round by round; the
cases are those of bench_share.cpp. Records go into build/bench/share.json, one for each case and
peer. Run it through `make bench-share`, on a machine that does nothing else.
"""

import os
import time

import sides

BYTES = {"shared_1k": 1024, "shared_1k_asleep": 1024, "shared_100m": 10**8, "shared_100m_asleep": 10**8,
         "fresh_100m": 10**8, "many_1k": 1000 * 1024, "first_100m": 10**8, "first_1g": 10**9, "first_2g": 2 * 10**9}
# Most of torch's time that an echo may take, and most microseconds.
RATIO_BARS = {"shared_1k_asleep": 8, "shared_100m_asleep": 8, "fresh_100m": 5, "many_1k": 400,
              "first_100m": 1.25, "first_1g": 1.25, "first_2g": 1.25}
TIME_BARS = {"shared_1k": 10, "shared_100m": 10}


def commands():
    peer = [sides.venv_python(), sides.ROOT / "bench" / "peer_share.py"]
    return {("convoy", ""): [sides.BIN / "bench_share", "convoy"],
            ("torch.multiprocessing", "file_descriptor"): [*peer, "file_descriptor"],
            ("torch.multiprocessing", "file_system"): [*peer, "file_system"],
            ("limit", ""): [sides.BIN / "bench_share", "limit"]}


def main():
    options = sides.options(__doc__, "share")
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; ratios are peer's time / ours")
    start = time.monotonic()
    times = sides.take_turns(commands(), options.rounds)
    records = [sides.record("share", "echo", times[case, ("convoy", "")], peer, theirs, path=case, ranks=2,
                            size=BYTES[case], setting=setting)
               for (case, (peer, setting)), theirs in times.items() if peer != "convoy"]
    sides.write_records(records, options.json)
    missed = show(records)
    print(f"\n{len(records)} records in {options.json}, {time.monotonic() - start:.0f} s")
    return 1 if missed else 0


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
        missed += sides.bar(ratio >= least,
                            f"{case}: torch.multiprocessing takes {ratio:.1f} x our time (target {least})")
    for case, most in TIME_BARS.items():
        ours = next(r["ours_us"] for r in records if r["path"] == case)
        missed += sides.bar(ours <= most, f"{case}, both busy: {ours:.1f} us (target {most})")
    return missed


if __name__ == "__main__":
    sides.exit_with(main)
