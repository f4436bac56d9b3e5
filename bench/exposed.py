#!/usr/bin/env python3
"""What communication adds to a step, from C++ and from Python, into build/bench/exposed.json.

- exposed: SGD steps with and without reduction (no_sync), of each side itself, in turns; what is
  more is exposed communication. Sides: our C++ with libtorch's allocator and with ours, our class in
  Python with our allocator, Python's class on Gloo (two modes of which the better counts), and
  Python's class on our backend.
- paired: the same, of two models in one process whose steps take turns: the median of what a step
  takes more than the one without reduction beside it. For models whose steps are long beside their
  communication, where the other way measures the machine's moods.
- near: our steps beside no_sync in the same process, in pairs, from C++ and from Python, with
  libtorch's allocator and with ours.
- memory: the peak of the summed PSS over ranks, divided by ranks, of steps with AdamW: our sharded
  one in C++ and in Python, with libtorch's allocator and with ours, beside Python's
  gradient_as_bucket_view with torch's AdamW on Gloo.

Part of `make bench-ddp`; on a machine that does nothing else, with 16 GB of memory.
"""

import argparse
import os
import sys
import time
from pathlib import Path
from statistics import median

import ddp
import sides

# Models whose exposed communication is compared, and those whose step must be near no_sync.
EXPOSED = ["mlp-100m", "gpt-52m"]
PAIRED = "gpt-52m"
NEAR = ["gpt-52m", "gpt-10m", "resnet-50"]
EXPOSED_BARS = {"gloo": 1 / 4, "stock": 1 / 2}
NEAR_BAR = 1.03
MEMORY_MODEL = "mlp-100m"
MEMORY_BARS = {"plain": 0.75, "ours": 0.75, "python-plain": 0.85, "python": 0.85}
GLOO_MODES = ["view", "view+static"]


class Exposed(ddp.Bench):
    def peer(self, name, mode, ranks, backend, environment=None):
        python = [sides.venv_python(), sides.ROOT / "bench" / "peer_ddp.py"]
        return self.start(name, mode, ranks, python,
                          {"GLOO_SOCKET_IFNAME": "lo", "BENCH_MODE": mode, "BENCH_BACKEND": backend,
                           "PYTHONPATH": str(sides.BIN.parent / "python")} | (environment or {}))

    def starter(self, library):
        ours = {"CONVOY_ALLOCATOR": "1"}
        return {
            "plain": lambda mode, ranks: self.ours("default", ranks),
            "ours": lambda mode, ranks: self.start("ours", mode, ranks, [sides.BIN / "bench_ddp"], ours),
            "python": lambda mode, ranks: self.peer("python", mode, ranks, "convoy", ours),
            "python-plain": lambda mode, ranks: self.peer("python", mode, ranks, "convoy"),
            "stock": lambda mode, ranks: self.peer("stock", mode, ranks, "convoy"),
            "gloo": lambda mode, ranks: self.peer("gloo", mode, ranks, "gloo"),
        }[library]

    def exposed(self, model):
        kinds = [("plain", "default"), ("ours", "allocator"), ("python", "convoy"), ("stock", "view"),
                 *(("gloo", mode) for mode in GLOO_MODES)]
        times = self.times(model, [(*kind, way) for kind in kinds for way in ["ddp", "no_sync"]],
                           self.options.ranks)
        step = {kind: times[*kind, "ddp"] for kind in kinds}
        alone = {kind: times[*kind, "no_sync"] for kind in kinds}
        best = min((kind for kind in kinds if kind[0] == "gloo"), key=step.get)
        for kind in kinds[:3]:
            more = step[kind] - alone[kind]
            for peer in [best, kinds[3]]:
                theirs = step[peer] - alone[peer]
                self.record(model, " ".join(kind), peer[0], self.options.ranks, step[kind], step[peer],
                            setting=peer[1], exposed_us=round(more, 1), peer_exposed_us=round(theirs, 1))
                print(f"{model:9} {' '.join(kind)}: exposed {more / 1e3:.1f} ms; {' '.join(peer)} "
                      f"{theirs / 1e3:.1f} ms", flush=True)
                if kind[0] != "plain":
                    self.bar(more / theirs, EXPOSED_BARS[peer[0]],
                             f"{model} {kind[0]}: exposed, of {' '.join(peer)}")

    def pairs(self, model, library, mode):
        """Microseconds of steps with and without reduction, in turns in one process."""
        side = self.starter(library)(mode, self.options.ranks)
        try:
            times = side.run(("pairs", model, "no_sync", "ddp", self.options.pairs), limit=1200)
        finally:
            side.close()
        return times["ddp"], times["no_sync"]

    def paired(self, model):
        more, step = {}, {}
        for kind in [("ours", "default"), ("python", "convoy"), ("stock", "view"), ("gloo", "view")]:
            with_it, alone = self.pairs(model, *kind)
            step[kind[0]] = median(with_it)
            more[kind[0]] = median(a - b for a, b in zip(with_it, alone))
            print(f"{model:9} {kind[0]:12} {step[kind[0]] / 1e3:.1f} ms, of it exposed "
                  f"{more[kind[0]] / 1e3:.1f} ms", flush=True)
        for own in ["ours", "python"]:
            for peer, most in EXPOSED_BARS.items():
                self.record(model, f"{own} paired", peer, self.options.ranks, step[own], step[peer], setting="view",
                            exposed_us=round(more[own], 1), peer_exposed_us=round(more[peer], 1))
                self.bar(more[own] / more[peer], most, f"{model} {own}: exposed in pairs, of {peer} view")

    def near(self, model):
        """A few hundredths: two models in one process, whose steps take turns."""
        for library, mode in [("plain", "default"), ("ours", "default"), ("python-plain", "convoy"),
                              ("python", "convoy")]:
            times = self.pairs(model, library, mode)
            ratio = median(a / b for a, b in zip(*times))
            us, alone = map(median, times)
            print(f"{model:9} {library:12} {us / 1e3:.1f} ms, no_sync {alone / 1e3:.1f} ms, {ratio - 1:+.2%}",
                  flush=True)
            self.record(model, library, "no_sync", self.options.ranks, us, alone, cost=round(ratio - 1, 4))
            self.bar(ratio, NEAR_BAR, f"{model} {library}: step, of no_sync")

    def adamw_memory(self, model):
        ways = {"plain": ("plain", "default", "adamw_sharded"), "ours": ("ours", "allocator", "adamw_sharded"),
                "python-plain": ("python-plain", "convoy-sharded", "ddp"),
                "python": ("python", "convoy-sharded", "ddp"), "gloo": ("gloo", "adamw", "ddp")}
        memory = {name: self.peak(model, way) for name, way in ways.items()}
        for name, most in MEMORY_BARS.items():
            self.record(model, f"adamw {name}", "gloo", self.options.ranks, mb=memory[name],
                        their_mb=memory["gloo"], setting="view")
            self.bar(memory[name] / memory["gloo"], most, f"{model} {name}: memory with AdamW, of gloo view")


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8, help="turns of every side; %(default)s")
    parser.add_argument("--steps", type=int, default=5, help="of one turn; %(default)s")
    parser.add_argument("--models", default=",".join(dict.fromkeys(EXPOSED + NEAR)), help="%(default)s")
    parser.add_argument("--pairs", type=int, default=20, help="of steps; %(default)s")
    parser.add_argument("--parts", default="exposed,paired,near,memory", help="%(default)s")
    parser.add_argument("--json", type=Path, default=sides.ROOT / "build" / "bench" / "exposed.json")
    options = parser.parse_args()
    options.ranks, options.launch, options.pin = 2, [], False
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    start = time.monotonic()
    bench = Exposed(options)
    if "exposed" in options.parts.split(","):
        for model in options.models.split(","):
            if model in EXPOSED:
                bench.exposed(model)
    if "paired" in options.parts.split(","):
        for model in options.models.split(","):
            if model == PAIRED:
                bench.paired(model)
    if "near" in options.parts.split(","):
        for model in options.models.split(","):
            if model in NEAR:
                bench.near(model)
    if "memory" in options.parts.split(","):
        bench.adamw_memory(MEMORY_MODEL)
    return bench.finish(options.json, start)


if __name__ == "__main__":
    sides.exit_with(main)
