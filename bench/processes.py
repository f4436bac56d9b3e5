#!/usr/bin/env python3
"""Publishing weights beside memcpy, and spawning processes beside torch.multiprocessing.spawn.

The sides take turns. Records go into build/bench/processes.json. Run it through `make bench-share`,
on a machine that does nothing else.
"""

import sides

# Most of memcpy's time that publishing may take; least of ours that torch's spawn takes.
PUBLISH_BAR, SPAWN_BAR = 1.5, 5


def main():
    options = sides.options(__doc__, "processes")
    program = sides.BIN / "bench_processes"
    commands = {"publish": [program, "publish"], "ours": [program, "spawn"],
                "torch": [sides.venv_python(), sides.ROOT / "bench" / "peer_spawn.py"]}
    times = sides.take_turns(commands, options.rounds)
    records = [
        sides.record("processes", "publish", times["publish_100m", "publish"], "memcpy",
                     times["memcpy_100m", "publish"], ranks=1, size=10**8),
        sides.record("processes", "spawn", times["spawn_8", "ours"], "torch.multiprocessing",
                     times["spawn_8", "torch"], ranks=8, size=0)]
    sides.write_records(records, options.json)
    for r in records:
        print(f"{r['op']:10} {r['ours_us']:12.0f} us   {r['peer']} {r['peer_us']:.0f} us")
    slower, faster = 1 / records[0]["ratio"], records[1]["ratio"]
    print("\nBars:")
    missed = sides.bar(slower <= PUBLISH_BAR,
                       f"publish of 100 MB takes {slower:.2f} x memcpy's time (target {PUBLISH_BAR})")
    missed += sides.bar(faster >= SPAWN_BAR, f"spawn of 8: torch.multiprocessing.spawn takes {faster:.1f} x "
                        f"our time (target {SPAWN_BAR})")
    return 1 if missed else 0


if __name__ == "__main__":
    sides.exit_with(main)
