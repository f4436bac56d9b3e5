#!/usr/bin/env python3
"""Queues between processes beside torch.multiprocessing.Queue and DataLoader.

Microseconds an item: the cases are those of bench_queue.cpp. The sides take turns, round by round.
Records go into build/bench/queue.json. Run it through `make bench-share`, on a machine that does
nothing else.
"""

import sides

BYTES = {"queue_1k": 1024, "queue_1k_copy": 1024, "queue_1m": 1 << 20}
RANKS = {"queue_1k": 4, "queue_1k_copy": 4, "queue_1m": 3}
# The peer's time, at least, as a multiple of ours.
BARS = {"queue_1k": 50, "queue_1m": 20}


def commands():
    peer = [sides.venv_python(), sides.ROOT / "bench" / "peer_queue.py"]
    return {("convoy", ""): [sides.BIN / "bench_queue"],
            ("convoy", "python"): [*peer, "convoy"],
            ("torch", "file_descriptor"): [*peer, "file_descriptor"],
            ("torch", "file_system"): [*peer, "file_system"]}


def main():
    options = sides.options(__doc__, "queue")
    times = sides.take_turns(commands(), options.rounds, {"PYTHONPATH": str(sides.BIN.parent / "python")})
    records = make_records(times)
    sides.write_records(records, options.json)
    return 1 if show(records) else 0


def make_records(times):
    """Ours is C++; the Python package beside it is a setting of ours."""
    def record(case, peer, theirs, setting):
        return sides.record("queue", "queue", times[case, ("convoy", "")], peer, theirs, path=case,
                            ranks=RANKS[case], size=BYTES[case], setting=setting)

    records = []
    for (case, (side, setting)), theirs in times.items():
        if (side, setting) == ("convoy", ""):
            continue
        peer = "torch.multiprocessing" if case == "queue_1k" else "DataLoader"
        records.append(record(case, peer if side == "torch" else "convoy", theirs, setting))
    records.append(record("queue_1k_copy", "convoy", times["queue_1k", ("convoy", "")], "shared"))
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
        missed += sides.bar(ratio >= least, f"{case}: {peer} takes {ratio:.1f} x our time (target {least})")
    return missed


if __name__ == "__main__":
    sides.exit_with(main)
