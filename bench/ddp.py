#!/usr/bin/env python3
"""Our DistributedDataParallel beside Python's on Gloo, in turns, into build/bench/ddp.json.

- step: SGD steps of four models, one thread a rank, both sides started in the same way. A step
  takes as long as its slowest rank; the median counts. `gloo-best` is the fastest of Gloo's modes
  (default, gradient_as_bucket_view, static_graph, both); `no_sync` is our model without reduction:
  the bound.
- memory: the peak over time of the sum of PSS over ranks, divided by ranks, from the moment before
  the model is made, in a run of its own that is not timed. For `gloo-best` the least of its modes.
- cost: what find_unused_parameters, wrapping at world size 1, and the fp16 and bf16 hooks add to a
  step, and what the optimizer in backward takes from it: two models in one process that take turns;
  the median of the ratios of pairs.
- zero: AdamW with our sharded optimizer beside the same fused AdamW on every rank without any
  reduction, both with the step allocator, and beside torch's ZeroRedundancyOptimizer on Gloo.
- rounded: means of a bucket that are rounded to 16 bits on the way, beside plain ones, in turns.
- allocator: steps of the bare model in one process, with libtorch's allocator (also with huge
  pages, THP_MEM_ALLOC_ENABLE=1) and with ours.
- observe: what our own measuring takes of a step, as time inside of our code.
- before: with --before only, and then alone: steps of every model, and sharded AdamW, with the build of
  another commit, in turns with this one: did a change cost something?

Run it through `make bench-ddp`, on a machine that does nothing else. It needs 16 GB of memory.
"""

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from statistics import median

import sides

# Most of Gloo's best time that a step may take on an idle 2-core machine.
STEP_BARS = {"mlp-100m": 0.8, "gpt-10m": 1.0, "gpt-52m": 0.9, "resnet-50": 1.0}
GLOO_MODES = ["default", "view", "static", "view+static"]
# (model, ranks, mode, beside, most of a ratio)
COSTS = [
    ("gpt-52m", 2, "find_unused_parameters", "ddp", 1.03),
    ("gpt-10m", 1, "ddp", "bare", 1.02),
    ("mlp-100m", 2, "fp16", "ddp", 1.05),
    ("mlp-100m", 2, "bf16", "ddp", 1.05),
    ("mlp-100m", 2, "sgd_in_backward", "ddp", 1.0),
    ("mlp-100m", 2, "adamw_in_backward", "adamw", 1.0),
]
ZERO = ("mlp-100m", 2)
# Most of another's step that one with the sharded AdamW takes; None: only told.
ZERO_BARS = {
    "adamw_alone": 1.0,        # no reduction, and our fused AdamW: the bound of a replicated optimizer
    "adamw_alone_part": None,  # no reduction, and a rank's part of that update
    "zero": 1 / 1.5,           # ZeroRedundancyOptimizer on Gloo
}
# Most of stock libtorch's time, and of its time with huge pages, that a step takes with our allocator.
ALLOCATOR_BARS = {"mlp-100m": (0.6, 0.95)}
ALLOCATORS = {"stock": {"THP_MEM_ALLOC_ENABLE": "0"}, "huge-pages": {"THP_MEM_ALLOC_ENABLE": "1"},
              "ours": {"THP_MEM_ALLOC_ENABLE": "0", "CONVOY_ALLOCATOR": "1"}}
OBSERVED = ("gpt-10m", 2, 0.01)  # model, ranks, most of a step
# What --before compares: (model, library, its mode, what the case says), and the most that this build may take of it.
COMPARED = [*((model, "convoy", "default", "ddp") for model in STEP_BARS), ("mlp-100m", "adamw", "ours", "adamw_sharded")]
COMPARED_BAR = 1.02
ROUNDED_BYTES = [1 << 20, 25 << 20, 100 << 20]
ROUNDED_BAR = 1.05
SAMPLE_SECONDS = 0.01


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few steps: only to see that it works")
    parser.add_argument("--rounds", type=int, help="turns of every side; 8")
    parser.add_argument("--steps", type=int, help="of one turn; 5")
    parser.add_argument("--pairs", type=int, help="of steps, for costs; 40")
    parser.add_argument("--models", default=",".join(STEP_BARS), help="%(default)s")
    parser.add_argument("--parts", default="step,memory,cost,zero,rounded,allocator,observe",
                        help="%(default)s")
    parser.add_argument("--launch", nargs="+", choices=["early", "late"], default=[],
                        help="when our buckets go, instead of the default; both: beside each other")
    parser.add_argument("--before", type=Path, metavar="BUILD", help="build folder of another commit to compare with")
    parser.add_argument("--pin", action="store_true", help="ranks to cores of their own, all sides")
    parser.add_argument("--json", type=Path, default=sides.ROOT / "build" / "bench" / "ddp.json")
    options = parser.parse_args()
    options.rounds = options.rounds or (2 if options.quick else 8)
    options.steps = options.steps or (2 if options.quick else 5)
    options.pairs = options.pairs or (6 if options.quick else 40)
    options.ranks = 2
    options.parts = options.parts.split(",")
    models = options.models.split(",")

    signal.signal(signal.SIGTERM, lambda *_: sys.exit("bench: ended"))  # and the sides with it
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; ratios are peer's time / ours")
    start = time.monotonic()
    bench = Bench(options)
    if options.before:
        for case in COMPARED:
            if case[0] in models:
                bench.compare(*case)
        return bench.finish(options.json.with_name("ddp_before.json"), start)
    for model in models:
        if {"step", "memory"} & set(options.parts):
            bench.model(model)
    if "cost" in options.parts:
        for cost in COSTS:
            if cost[0] in models:
                bench.cost(*cost)
    if "zero" in options.parts and ZERO[0] in models:
        bench.zero(*ZERO)
    if "allocator" in options.parts:
        for model in models:
            bench.allocator(model)
    if "observe" in options.parts and OBSERVED[0] in models:
        bench.observe(*OBSERVED)
    if "rounded" in options.parts:
        bench.rounded()
    return bench.finish(options.json, start)


class Bench:
    def __init__(self, options):
        self.options = options
        self.records, self.bars = [], []

    def start(self, name, mode, ranks, command, environment, launcher=sides.BIN / "convoy"):
        """Both sides under our launcher: the same variables, the same placement."""
        pin = ["--pin"] if self.options.pin else []
        run = [launcher, "run", "-n", str(ranks), "--no-prefix", *pin]
        return sides.Side(name, mode, ranks, [[*run, *command]],
                          {"MKL_NUM_THREADS": "1"} | environment)

    def ours(self, mode, ranks):
        """`mode`: default, or when buckets go."""
        environment = {} if mode == "default" else {"CONVOY_DDP_LAUNCH": mode}
        return self.start("convoy", mode, ranks, [sides.BIN / "bench_ddp"], environment)

    def before(self, mode, ranks):
        """`mode`: whose allocator, or default."""
        binaries = self.options.before / "bin"
        return self.start("before", mode, ranks, [binaries / "bench_ddp"], ALLOCATORS.get(mode, {}), binaries / "convoy")

    def compare(self, model, library, mode, case):
        """This build beside another: the median of the ratios of neighbouring steps."""
        times = {}
        self.times(model, [(library, mode, case), ("before", mode, case)], self.options.ranks, times)
        ours, theirs = times[library, mode, case], times["before", mode, case]
        ratio = median(a / b for a, b in zip(ours, theirs))
        self.record(model, case, "before", self.options.ranks, median(ours), median(theirs), cost=round(ratio - 1, 4))
        self.bar(ratio, COMPARED_BAR, f"{model} {case}: step, of the other build's")

    def gloo(self, mode, ranks):
        python = sides.ROOT / os.environ.get("CONVOY_VENV", ".venv") / "bin" / "python"
        return self.start("gloo", mode, ranks, [python, sides.ROOT / "bench" / "peer_ddp.py"],
                          {"GLOO_SOCKET_IFNAME": "lo", "BENCH_MODE": mode})

    def ways(self):
        """(library, its mode, what the case says)"""
        ours = self.options.launch or ["default"]
        return [*(("convoy", mode, "ddp") for mode in ours), ("convoy", ours[0], "no_sync"),
                *(("gloo", mode, "ddp") for mode in GLOO_MODES)]

    def starter(self, library):
        return {"convoy": self.ours, "gloo": self.gloo, "bare": self.bare, "adamw": self.adamw,
                "before": self.before}[library]

    def model(self, model):
        times = self.times(model, self.ways(), self.options.ranks) if "step" in self.options.parts else {}
        memory = self.memory(model) if "memory" in self.options.parts else {}
        modes = self.options.launch or ["default"]
        gloo = [("gloo", mode, "ddp") for mode in GLOO_MODES]
        best = min(gloo, key=times.get) if times else None
        least = min(gloo, key=memory.get) if memory else None
        peers = [("gloo-default", gloo[0], gloo[0]), ("gloo-best", best, least)]
        peers.append(("no_sync", ("convoy", modes[0], "no_sync"), ("convoy", modes[0], "no_sync")))
        for mode in modes:
            ours = "convoy", mode, "ddp"
            us, mb = times.get(ours), memory.get(ours)
            for peer, way, lean in peers:
                self.record(model, mode, peer, self.options.ranks, us, times.get(way), mb,
                            memory.get(lean), way[1] if way and way[0] == "gloo" else "")
            if us:
                self.bar(us / times[best], STEP_BARS[model],
                         f"{model} {mode}: step, of Gloo's best ({best[1]})")
            if mb:
                self.bar(mb / memory[least], 1,
                         f"{model} {mode}: memory, of Gloo's least ({least[1]})")

    def bare(self, mode, ranks):
        """`mode`: whose allocator."""
        return self.start("bare", mode, ranks, [sides.BIN / "bench_ddp"], ALLOCATORS[mode])

    def allocator(self, model):
        times = self.times(model, [("bare", mode, "bare") for mode in ALLOCATORS], 1)
        us = times["bare", "ours", "bare"]
        for peer, most in zip(["stock", "huge-pages"], ALLOCATOR_BARS.get(model, (1, 1))):
            their_us = times["bare", peer, "bare"]
            self.record(model, "allocator", peer, 1, us, their_us)
            self.bar(us / their_us, most, f"{model}: step with our allocator, of {peer}")

    def times(self, model, ways, ranks, all_times=None):
        """{way: median us}. Ranks of all sides stay up and sleep while others run. `all_times` gets each step's."""
        options, losses = self.options, {}
        times = {} if all_times is None else all_times
        times.update((way, []) for way in ways)
        running = {}
        try:
            for library, mode, _ in ways:
                if (library, mode) not in running:
                    running[library, mode] = self.starter(library)(mode, ranks)
            for turn in range(options.rounds):
                for way in ways[turn % len(ways):] + ways[:turn % len(ways)]:
                    answer = running[way[:2]].run(("step", model, way[2], options.steps))
                    times[way] += answer["us"]
                    losses[way[:2]] = answer["loss"]
        finally:
            for side in running.values():
                side.close()
        if max(losses.values()) - min(losses.values()) > 1e-4 * max(losses.values()):
            raise sides.SideFailed(f"{model} is not the same on all sides: first losses {losses}")
        for way, us in times.items():
            spread = sorted(us)
            low, high = (spread[i] / 1e3 for i in (len(us) // 10, -1 - len(us) // 10))
            show(model, way, f"{median(us) / 1e3:8.1f} ms a step  [{low:.1f} - {high:.1f}]")
        return {way: median(us) for way, us in times.items()}

    def memory(self, model):
        """{way: MB a rank}. Each side alone, so that it shares nothing with another."""
        memory = {}
        for way in self.ways():
            memory[way] = self.peak(model, way)
        return memory

    def peak(self, model, way):
        side = self.starter(way[0])(way[1], self.options.ranks)
        try:
            peak = Peak(side.run(("pids",)).values())
            with peak:
                side.run(("step", model, way[2], 3))
        finally:
            side.close()
        megabytes = peak.bytes / side.ranks / 1e6
        show(model, way, f"{megabytes:8.1f} MB a rank")
        return megabytes

    def cost(self, model, ranks, mode, beside, most):
        launch = (self.options.launch or ["default"])[0]
        side = self.ours(launch, ranks)
        try:
            times = side.run(("pairs", model, beside, mode, self.options.pairs), limit=1200)
        finally:
            side.close()
        ratio = median(b / a for a, b in zip(times[beside], times[mode]))
        us, their_us = median(times[mode]), median(times[beside])
        print(f"{model:9} {mode} {us / 1e3:.1f} ms, {beside} {their_us / 1e3:.1f} ms, "
              f"{ratio - 1:+.2%}", flush=True)
        self.record(model, mode, beside, ranks, us, their_us, cost=round(ratio - 1, 4),
                    pairs=self.options.pairs)
        self.bar(ratio, most, f"{model}, {ranks} ranks: {mode} beside {beside}")

    def adamw(self, mode, ranks):
        """`mode`: a name; the allocator is always ours."""
        return self.start("adamw", mode, ranks, [sides.BIN / "bench_ddp"], ALLOCATORS["ours"])

    def zero(self, model, ranks):
        way = {mode: ("adamw", mode, mode) for mode in ["adamw_sharded", *ZERO_BARS] if mode != "zero"}
        way["zero"] = "gloo", "zero", "ddp"
        times = self.times(model, list(way.values()), ranks)
        us = times[way["adamw_sharded"]]
        for peer, most in ZERO_BARS.items():
            self.record(model, "adamw_sharded", peer, ranks, us, times[way[peer]])
            if most is not None:
                self.bar(us / times[way[peer]], most, f"{model}, {ranks} ranks: adamw_sharded, of {peer}")

    def observe(self, model, ranks, most):
        side = self.ours((self.options.launch or ["default"])[0], ranks)
        try:
            answer = side.run(("observe", model, self.options.pairs), limit=1200)
        finally:
            side.close()
        step, own = median(answer["us"]), median(answer["observing_us"])
        print(f"{model:9} observing {own:.1f} us of a step of {step / 1e3:.1f} ms, {own / step:.3%}",
              flush=True)
        self.record(model, "observing", "step", ranks, own, step, cost=round(own / step, 6))
        self.bar(own / step, most, f"{model}, {ranks} ranks: observing, of a step")

    def rounded(self):
        side = self.ours("default", self.options.ranks)
        try:
            for size in ROUNDED_BYTES:
                times = side.run(("rounded", size, self.options.pairs))
                for kind in ["f16", "bf16"]:
                    ratio = median(b / a for a, b in zip(times["plain"], times[kind]))
                    us, plain = median(times[kind]), median(times["plain"])
                    print(f"{size >> 20} MB rounded to {kind}: {us:.0f} us, plain {plain:.0f} us, "
                          f"{ratio - 1:+.2%}", flush=True)
                    self.record("-", f"rounded to {kind}", "plain", side.ranks, us, plain,
                                bytes=size, cost=round(ratio - 1, 4))
                    self.bar(ratio, ROUNDED_BAR, f"{size >> 20} MB rounded to {kind} beside plain")
        finally:
            side.close()

    def record(self, model, mode, peer, ranks, us=None, their_us=None, mb=None, their_mb=None,
               setting="", **more):
        self.records.append({
            "bench": "ddp", "model": model, "mode": mode, "peer": peer, "ranks": ranks,
            "ours_us": us and round(us, 1), "peer_us": their_us and round(their_us, 1),
            "ratio": us and round(their_us / us, 3),
            "ours_pss_mb": mb and round(mb, 1), "peer_pss_mb": their_mb and round(their_mb, 1),
            "setting": setting, **more})

    def bar(self, value, most, text):
        self.bars.append((value <= most, f"{text}: {value:.3f} x (target {most})"))

    def finish(self, file, start):
        """Writes and tells; 1 if a bar was missed."""
        sides.write_records(self.records, file)
        print("\nBars:")
        for met, text in self.bars:
            sides.bar(met, text)
        print(f"\n{len(self.records)} records in {file}, {time.monotonic() - start:.0f} s")
        return 0 if all(met for met, _ in self.bars) else 1


def show(model, way, text):
    print(f"{model:9} {way[0]:6} {way[1]:11} {way[2]:7} {text}", flush=True)


class Peak:
    """The most that processes use together while it is entered."""

    def __init__(self, pids):
        self.files = [f"/proc/{pid}/smaps_rollup" for pid in pids]
        self.bytes = 0
        self.done = threading.Event()
        self.thread = threading.Thread(target=self.watch)

    def __enter__(self):
        self.thread.start()

    def __exit__(self, *_):
        self.done.set()
        self.thread.join()

    def watch(self):
        while not self.done.wait(SAMPLE_SECONDS):
            self.bytes = max(self.bytes, sum(pss(file) for file in self.files))


def pss(file):
    with open(file) as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (sides.SideFailed, subprocess.SubprocessError) as error:
        sys.exit(f"bench: {error}")
