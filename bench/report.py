#!/usr/bin/env python3
"""Makes build/bench/report.html out of the records that the benchmarks left in build/bench: one file, no network.

`--chart FILE` also writes the README's chart. Run the benchmarks first: `make bench-report` only draws.
"""

import argparse
import json
import platform
import re
import shutil
import subprocess
import sys
import time
from html import escape
from pathlib import Path

import plots
import sides

FOLDER = sides.ROOT / "build" / "bench"
# What each file of records shows, and what makes it.
SECTIONS = [
    ("coll", "Collectives", "bench-coll", "One operation, from the call to its end. `limit` is what this machine "
     "could do at best: the same traffic without a library."),
    ("python", "torch.distributed from Python", "bench-python", "The same program on Gloo and on Convoy."),
    ("ddp", "DistributedDataParallel: a step", "bench-ddp", "Forward, backward and reduction of a model."),
    ("exposed", "What communication adds to a step", "bench-ddp", "A step in which nothing is reduced, and what its "
     "reduction adds. `no_sync` is such a step of the same side."),
    ("rpc", "RPC", "bench-rpc", "Calls of a function in another process, with tensors. Circles are limits: "
     "`endpoint` is a round trip of the layer below, `local` what libtorch needs for the tensors and the function, "
     "`floor` both; `memcpy` and `two cores` are copies of the same bytes; `alone` is the same call with nothing "
     "beside it."),
    ("autograd", "Gradients across processes", "bench-autograd", "A backward pass, and steps of an optimizer, over "
     "several workers. `apart` is backward and then the step, `calls_10` a context of 10 calls, `without` the same "
     "without recording."),
    ("pipeline", "Models in stages", "bench-autograd", "One step of a pipeline of three workers. `ideal` is what its "
     "schedule takes if messages cost nothing."),
    ("endpoint", "Messages between processes", "bench-endpoint", "What RPC stands on."),
    ("share", "Tensors between processes", "bench-share", "A tensor to another process and back."),
    ("queue", "Queues", "bench-share", "A tensor through a queue."),
    ("processes", "Processes", "bench-share", "Starting processes; publishing weights."),
    ("faults", "How soon a death is told", "bench-faults", "From SIGKILL of one of four ranks to the error at the "
     "others."),
]
CASES = {
    "call": "small call", "call_asleep": "small call, both asleep", "outstanding_64": "64 concurrent calls, per call",
    "echo_1mb": "1 MB echo", "echo_16mb": "16 MB echo", "echo_100mb": "100 MB echo",
    "call_single": "small call, one thread", "call_beside_1gb": "small call beside 1 GB",
    "round_trip": "empty round trip", "round_trip_asleep": "empty round trip, both asleep",
    "large_lent": "100 MB, read where it is", "large_placed": "100 MB, placed",
    "rref_life": "a reference, from creation to its end", "to_here": "to_here", "module_forward": "forward of a module",
    "example": "backward of one call", "mlp": "forward and backward of an MLP",
    "mlp_overhead": "the same, without its computing", "chain_4": "backward along four workers",
    "lineage": "forward pass that is recorded", "calls_10000": "backward of 10 of 10,000 calls",
    "step_4_owners": "step, parameters of four workers", "backward_and_step": "backward and step, four workers",
    "step_in_backward": "step inside of backward", "timer_gpipe": "GPipe, stages that only wait",
    "real_gpipe": "GPipe, a model", "timer_1f1b": "1F1B, stages that only wait", "real_1f1b": "1F1B, a model",
}
# What the sides of calls are called in the record when they are ours, in other languages and APIs.
OWN = {"convoy python": "convoy.rpc", "convoy torch": "torch RPC"}
CHART_NEEDS = {"coll": "bench-coll", "ddp": "bench-ddp", "rpc": "bench-rpc"}


COLUMNS = ("op", "model", "mode", "path", "what", "dtype", "ranks", "bytes", "ours_us", "peer", "peer_us", "ratio",
           "median_ms", "p99_ms", "longest_ms", "setting")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the records are")
    parser.add_argument("--html", type=Path, help="the report; report.html in that folder")
    parser.add_argument("--chart", type=Path, help="the README's chart, as SVG")
    options = parser.parse_args()
    found = {name: load(options.folder / f"{name}.json") for name, *_ in SECTIONS}
    if not any(found.values()):
        sys.exit(f"bench: no records in {options.folder}: run `make bench-coll`, `make bench-rpc`, ... first")
    page = options.html or options.folder / "report.html"
    page.write_text(report(found, options.folder), encoding="utf-8")
    print(f"{sum(len(records) for records in found.values())} records drawn in {page}")
    missing = [f"`make {target}`" for name, target in CHART_NEEDS.items() if not found[name]]
    if options.chart and missing:
        print(f"the chart stays as it is: it also needs {', '.join(missing)}")
    elif options.chart:
        options.chart.parent.mkdir(parents=True, exist_ok=True)
        options.chart.write_text(chart(found), encoding="utf-8")
        print(f"chart in {options.chart}")


def load(file):
    return json.loads(file.read_text()) if file.exists() else []


def times(records):
    """side -> time, for records that are alike but for their peer. Of a peer's settings the best."""
    found = {}
    for record in records:
        if not record.get("ours_us") or not record.get("peer_us"):
            continue
        found[plots.OURS] = record["ours_us"]
        peer = record["peer"]
        if peer != plots.OURS:
            found[peer] = min(found.get(peer, record["peer_us"]), record["peer_us"])
    return found


def grouped(records, *keys):
    """values of `keys` -> records, in the order in which they come."""
    found = {}
    for record in records:
        found.setdefault(tuple(record.get(key) for key in keys), []).append(record)
    return found


def over_sizes(records, what):
    """Two plots for each operation, type and number of ranks with at least three sizes: time and bandwidth."""
    drawn = []
    for (op, dtype, ranks), alike in grouped(records, "op", "dtype", "ranks").items():
        best = {}  # side -> size -> time: of our ways (private, shared memory) the best
        for (size,), same in grouped(alike, "bytes").items():
            for side, us in times(same).items() if size else ():
                best.setdefault(side, {})
                best[side][size] = min(us, best[side].get(size, us))
        if len(best.get(plots.OURS, ())) < 3:
            continue
        title = f"{what}{op}, {dtype}, {ranks} ranks"
        drawn.append(plots.lines(title, {side: list(found.items()) for side, found in best.items()}))
        drawn.append(plots.lines(
            f"{title}: bandwidth", {side: [(size, size / us * 1e6) for size, us in found.items()]
                                    for side, found in best.items()},
            y_text=plots.rate_text, y_label="bytes per second"))
    return drawn


def one_line_each(title, rows):
    rows = [(what, found) for what, found in rows if len(found) > 1]
    return [plots.dots(title, rows)] if rows else []


def by_case(name, title, records):
    rows = []
    for (op, path), alike in grouped(records, "op", "path").items():
        words = CASES.get(path, path if op in OWN else f"{op} {path}").strip().replace("_", " ")
        rows.append((f"{words}, {OWN[op]}" if op in OWN else words, times(alike)))
    return one_line_each(title, rows)


def plots_of(name, title, records):
    if name == "coll":
        return over_sizes(records, "")
    if name == "python":
        steps = [r for r in records if r["op"] == "ddp"]
        rows = [(dtype, times(alike)) for (dtype,), alike in grouped(steps, "dtype").items()]
        calls = [r for r in records if r["op"] != "ddp"]
        return over_sizes(calls, "Python, ") + one_line_each("Python, DDP step", rows)
    if name == "ddp":
        rows = [(f"{model}, {mode}", times(alike))
                for (model, mode), alike in grouped(records, "model", "mode").items()]
        return one_line_each(title, rows)
    if name == "exposed":
        return [plots.stacked(f"{model}: a step", ["computing", "communication adds"], list(bars.items()))
                for model, bars in breakdowns(records).items()]
    if name == "faults":
        rows = [(r["what"], {"median": r["median_ms"] * 1e3, "99 of 100": r["p99_ms"] * 1e3,
                             "longest": r["longest_ms"] * 1e3}) for r in records]
        return one_line_each(title, rows)
    return by_case(name, title, records)


def breakdowns(records):
    """Model -> side -> (computing, what communication adds)."""
    found = {}
    for record in records:
        if "exposed_us" not in record:
            continue
        bars = found.setdefault(record["model"], {})
        own, peer = f"Convoy, {record['mode']}", f"{record['peer']}, {record['setting']}"
        bars[own] = (record["ours_us"] - record["exposed_us"], record["exposed_us"])
        bars[peer] = (record["peer_us"] - record["peer_exposed_us"], record["peer_exposed_us"])
    return found


def chart(found):
    """All-reduce, a step, a call: ours and the peers' in one picture."""
    rows = []
    for size, words in ((8, "all-reduce, 8 B"), (100 << 20, "all-reduce, 100 MB")):
        alike = [r for r in found["coll"]
                 if (r["op"], r["dtype"], r["ranks"], r["bytes"]) == ("all_reduce", "f32", 2, size)]
        rows.append((words, rivals(times(alike))))
    steps = [r for r in found["ddp"] if r["model"] == "mlp-100m" and r["peer"] == "gloo-best"]
    if steps:  # ours in its default mode, beside the peer's best one
        rows.append(("DDP step, 100 M parameters", {plots.OURS: steps[0]["ours_us"], "gloo": steps[0]["peer_us"]}))
    for path in ("call", "outstanding_64", "echo_100mb"):
        alike = [r for r in found["rpc"] if (r["op"], r["path"]) == ("call", path)]
        rows.append((f"RPC: {CASES[path]}", rivals(times(alike))))
    rows = [(what, sides_of) for what, sides_of in rows if len(sides_of) > 1]
    return plots.dots("Two processes of one host: time in comparison", rows)


def rivals(found):
    """Without floors, and without our own other ways."""
    own = {"mpi", *OWN}
    return {side: us for side, us in found.items() if side not in plots.LIMITS and side not in own}


def report(found, folder):
    body = []
    for name, title, target, words in SECTIONS:
        made = plots_of(name, title, found[name]) if found[name] else []
        when = f", measured {measured(folder / f'{name}.json')}" if made else ": not measured"
        body.append(f"<h2 id='{name}'>{escape(title)}</h2><p>{marked(words)}</p>")
        body.append(f"<p class='how'><code>make {target}</code>{when}</p>")
        body.extend(f"<figure>{svg}</figure>" for svg in made)
        if made:
            body.append(table(found[name]))
    contents = "".join(f"<li><a href='#{name}'>{escape(title)}</a></li>"
                       for name, title, *_ in SECTIONS if found[name])
    return PAGE.format(machine=machine(), contents=contents, body="\n".join(body))


def measured(file):
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(file.stat().st_mtime))


def marked(words):
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", escape(words))


def table(records):
    names = [name for name in COLUMNS if any(r.get(name) not in (None, "") for r in records)]
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    rows = "".join("<tr>" + "".join(f"<td>{escape(str(r.get(name, '') if r.get(name) is not None else ''))}</td>"
                                    for name in names) + "</tr>" for r in records)
    return f"<details><summary>all {len(records)} figures</summary><table><tr>{head}</tr>{rows}</table></details>"


def machine():
    cpu = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())
    torch = subprocess.run([sides.venv_python(), "-c", "import torch; print(torch.__version__)"], text=True,
                           stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False).stdout.strip()
    version = subprocess.run(["git", "-C", sides.ROOT, "describe", "--always", "--dirty"], text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False).stdout.strip()
    facts = {"processor": f"{cpu.group(1) if cpu else platform.machine()}, {sides.cores()} cores",
             "system": f"Linux {platform.release()}", "torch": torch or "not found", "Convoy": version or "?",
             **versions_of_peers()}
    return "".join(f"<tr><th>{escape(what)}</th><td>{escape(is_what)}</td></tr>" for what, is_what in facts.items())


def versions_of_peers():
    """Of Debian's packages; Gloo and TensorPipe are part of torch."""
    packages = {"Open MPI": "openmpi-bin", "ZeroMQ": "libzmq3-dev", "gRPC": "libgrpc++-dev"}
    found = {}
    for peer, package in packages.items():
        told = subprocess.run(["dpkg-query", "-W", "-f", "${Version}", package], text=True, stdout=subprocess.PIPE,
                              stderr=subprocess.DEVNULL, check=False) if shutil.which("dpkg-query") else None
        if told and told.returncode == 0:
            found[peer] = told.stdout
    return found


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Convoy: benchmarks</title>
<meta name="viewport" content="width=device-width">
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 1320px; margin: 2rem auto; padding: 0 1rem; color: #222; }}
figure {{ display: inline-block; margin: 0.5rem; border: 1px solid #ddd; border-radius: 6px; vertical-align: top; }}
figure svg {{ display: block; max-width: 100%; height: auto; }}
table {{ border-collapse: collapse; font-size: 0.85rem; }}
th, td {{ text-align: left; padding: 0.15rem 0.8rem 0.15rem 0; }}
.how {{ color: #555; }} code {{ background: #f3f3f3; padding: 0 0.2rem; }}
summary {{ cursor: pointer; margin: 0.5rem; }}
</style></head><body>
<h1>Convoy and its peers</h1>
<p>In each benchmark Convoy and its peers take turns on the same machine, within minutes. Times are medians. Axes are
logarithmic: the same distance is the same factor. Point at a dot to read its value.</p>
<table>{machine}</table>
<ul>{contents}</ul>
{body}
</body></html>
"""

if __name__ == "__main__":
    main()
