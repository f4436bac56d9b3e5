#!/usr/bin/env python3
"""Runs PyTorch's own RPC tests on the backend CONVOY (rpc_run.py) and says what passed.

The exit code is 0 if all passed but those of rpc_misses.txt, which has the reason for each. With --smart those of
distributed autograd run again, with convoy.rpc.use_smart_backward(); rpc_smart_misses.txt has what does not pass then.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Tests of distributed autograd.
SMART = ("ConvoyDistAutogradTest.", "ConvoyJitDistAutogradTest.", "ConvoyDistOptimizerTest.", "ConvoyDdp",
         "ConvoyFaultyAgentDistAutogradTest.")


def read_misses(name):
    """Test -> why it does not pass."""
    lines = [line for line in (HERE / name).read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split(": ", 1) for line in lines)


def part_of(text):
    part, _, parts = text.partition("/")
    if not 1 <= int(part) <= int(parts):
        raise ValueError
    return int(part) - 1, int(parts)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--build", type=Path, default=HERE.parents[1] / "build" / "release")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--backend", default="CONVOY", help="TENSORPIPE: the peer itself")
    parser.add_argument("--list", type=Path, help="file of test names (default: all)")
    parser.add_argument("--smart", action="store_true", help="tests of autograd, with use_smart_backward()")
    parser.add_argument("--part", type=part_of, default=(0, 1), metavar="I/N", help="only the I-th of N parts")
    parser.add_argument("--jobs", type=int, default=2, help="so many tests at a time")
    options = parser.parse_args()
    environment = os.environ | {"BACKEND": options.backend, "OMP_NUM_THREADS": "1",
                                "PYTHONPATH": str((options.build / "python").resolve())}
    if options.list:
        tests = options.list.read_text().split()
    else:
        tests = subprocess.run([options.python, HERE / "rpc_run.py", "--list"], env=environment, check=True,
                               capture_output=True, text=True).stdout.split()
    if options.smart:
        environment["SMART"] = "1"
        tests = [test for test in tests if test.startswith(SMART)]
    tests = tests[options.part[0]::options.part[1]]
    logs = options.build / "pytorch"
    logs.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    jobs = max(1, min(options.jobs, len(tests)))
    print(f"{len(tests)} tests with {options.backend}; what they say is in {logs}/rpc_*.log", flush=True)
    found = {"ran": 0, "failed": [], "skipped": []}
    with tempfile.TemporaryDirectory(prefix="convoy-suite.") as folder:
        running = []
        for job in range(jobs):
            results, log = Path(folder, str(job)), logs / f"rpc_{options.backend}_{job}.log"
            with log.open("w") as file:
                running.append((results, log, subprocess.Popen(
                    [options.python, HERE / "rpc_run.py", "-v", *tests[job::jobs]],
                    env=environment | {"RESULTS": str(results)}, stdin=subprocess.DEVNULL, stdout=file,
                    stderr=subprocess.STDOUT)))
        for results, log, process in running:
            process.wait()
            if not results.exists():
                sys.exit("rpc_suite: it ended without a result:\n" + log.read_text()[-4000:])
            for key, value in json.loads(results.read_text()).items():
                found[key] += value
    bad = sorted({*found["failed"], *found["skipped"]})
    print(f"{len(tests) - len(bad)} of {len(tests)} passed in {time.monotonic() - start:.0f} s")
    name = "rpc_smart_misses.txt" if options.smart else "rpc_misses.txt"
    misses = read_misses(name) if options.backend == "CONVOY" else {}
    for name in bad:
        print(f"  {'skipped' if name in found['skipped'] else 'failed'}: {name}"
              + (f" ({misses[name]})" if name in misses else ""))
    return 1 if set(bad) - set(misses) or found["ran"] != len(tests) else 0


if __name__ == "__main__":
    sys.exit(main())
