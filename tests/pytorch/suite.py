#!/usr/bin/env python3
"""Runs tests of PyTorch's own suite on our backend (run.py) and says what passed.

The exit code is 0 if all passed but those that no plug-in can pass.
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
# Torch's class compares the name of the plug-in with "custom"; ours tells the name.
IMPOSSIBLE = {"torch": {"test_ddp_logging_data_cpu"}, "convoy": set()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--build", type=Path, default=HERE.parents[1] / "build" / "release")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--backend", default="convoy", help="gloo: the peer itself")
    parser.add_argument("--world", type=int, default=4)
    parser.add_argument("--list", type=Path, help="file of test names (default: that of the world)")
    parser.add_argument("--ddp", default="torch", choices=["torch", "convoy"],
                        help="whose DistributedDataParallel")
    options = parser.parse_args()
    tests = (options.list or HERE / f"cpu_tests_w{options.world}.txt").read_text().split()
    log = options.build / "pytorch" / f"{options.backend}_w{options.world}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="convoy-suite.") as folder:
        os.mkdir(Path(folder, "barrier"))
        results = Path(folder, "results")
        environment = os.environ | {
            "BACKEND": options.backend, "DDP": options.ddp, "WORLD_SIZE": str(options.world), "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str((options.build / "python").resolve()), "TEMP_DIR": folder,
            "INIT_METHOD": f"file://{folder}/init", "RESULTS": str(results)}
        print(f"{len(tests)} tests on {options.world} ranks; what they say is in {log}", flush=True)
        with log.open("w") as file:
            subprocess.run([options.python, HERE / "run.py", "-v", *tests], env=environment,
                           stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT)
        if not results.exists():
            sys.exit("suite: it ended without a result:\n" + log.read_text()[-4000:])
        found = json.loads(results.read_text())
    # Torch counts a test that a rank skipped as passed, unless unittest knows of it.
    bad = sorted({*found["failed"], *found["skipped"]})
    print(f"{len(tests) - len(bad)} of {len(tests)} passed in {time.monotonic() - start:.0f} s")
    impossible = IMPOSSIBLE[options.ddp]
    for name in bad:
        why = "skipped" if name in found["skipped"] else "failed"
        print(f"  {why}: {name}" + (" (no plug-in passes it)" if name in impossible else ""))
    unexpected = set(bad) - impossible if options.backend == "convoy" else bad
    return 1 if unexpected or found["ran"] != len(tests) else 0


if __name__ == "__main__":
    sys.exit(main())
