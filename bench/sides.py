"""Runs the sides of a benchmark: programs that stay up and take turns, case by case.

A side's ranks sleep in a read until a case comes, so they do not disturb each other. Each has its
own folder of pipes: <rank> for cases to that rank, `answers` for rank 0's results.
"""

import argparse
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
BIN = ROOT / "build" / "release" / "bin"


class SideFailed(Exception):
    pass


class Side:
    """One library in one setting, on `ranks` ranks."""

    def __init__(self, name, setting, ranks, commands, environment=None):
        """`commands`: what starts the ranks (one program that starts all of them, or one each)."""
        self.name, self.setting, self.ranks = name, setting, ranks
        self.folder = tempfile.TemporaryDirectory(prefix="convoy-bench.")
        folder = Path(self.folder.name)
        names = [str(rank) for rank in range(ranks)] + ["answers"]
        for pipe in names:
            os.mkfifo(folder / pipe)
        # Both ends, so that opening waits for nobody. When this process goes, ranks see the end.
        pipes = [os.open(folder / pipe, os.O_RDWR | os.O_CLOEXEC) for pipe in names]
        self.cases, self.answers = pipes[:-1], pipes[-1]
        self.buffer = b""
        self.log = open(folder / "log", "w+")
        self.processes = []
        for rank, command in enumerate(commands):
            env = common_environment() | {"BENCH_SIDE": str(folder)} | (environment or {})
            if len(commands) > 1:
                env |= {"RANK": str(rank), "WORLD_SIZE": str(ranks)}
            self.processes.append(subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log,
                start_new_session=True))

    def run(self, case, limit=300):
        """{variant: microseconds}; empty if the side cannot do it."""
        line = " ".join(str(word) for word in case) + "\n"
        for pipe in self.cases:
            os.write(pipe, line.encode())
        waited = 0
        while b"\n" not in self.buffer:
            if select.select([self.answers], [], [], 1)[0]:
                self.buffer += os.read(self.answers, 65536)
                continue
            waited += 1
            ended = [p.returncode for p in self.processes if p.poll() is not None]
            if ended or waited > limit:
                self.log.seek(0)
                why = f"ended with {ended}" if ended else f"no answer after {limit} s"
                raise SideFailed(f"{self} {why} in case '{line.strip()}':\n{self.log.read()[-4000:]}")
        answer, self.buffer = self.buffer.split(b"\n", 1)
        return json.loads(answer)

    def close(self):
        for pipe in [*self.cases, self.answers]:
            os.close(pipe)
        for process in self.processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self.log.close()
        self.folder.cleanup()

    def __str__(self):
        return f"{self.name} ({self.setting})" if self.setting else self.name


def common_environment():
    """The same for all sides."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMIX_"))}
    return env | {"OMP_NUM_THREADS": "1", "THP_MEM_ALLOC_ENABLE": "1"}


def cores():
    return len(os.sched_getaffinity(0))


def convoy(ranks, setting="", program="bench_coll"):
    """`setting`: "NAME=value" of a variable, to compare ourselves with it in the same run."""
    pin = ["--pin"] if ranks <= cores() else []
    command = [BIN / "convoy", "run", "-n", str(ranks), "--no-prefix", *pin, BIN / program]
    environment = dict([setting.split("=", 1)]) if setting else {}
    return Side(f"convoy {setting}" if setting else "convoy", "", ranks, [command], environment)


def limit(ranks, most_bytes):
    return Side("limit", "", ranks, [[BIN / "bench_limit", str(ranks), str(most_bytes)]])


def open_mpi(ranks, setting="", arguments=()):
    return mpirun("openmpi", setting, ranks, arguments, [BIN / "bench_mpi"])


def convoy_mpi(ranks):
    """Our backend "mpi": Open MPI in its default setting, through us."""
    return mpirun("mpi", "", ranks, (), [BIN / "bench_coll", "mpi"])


def mpirun(name, setting, ranks, arguments, program):
    command = ["mpirun", "-n", str(ranks), *arguments]
    if ranks > cores():
        command.append("--oversubscribe")
    if os.geteuid() == 0:
        command.append("--allow-run-as-root")
    return Side(name, setting, ranks, [[*command, *program]],
                {"OMPI_MCA_btl_base_warn_component_unused": "0"})


def one_ccl(ranks, setting, environment):
    """Over Intel MPI, which pins ranks itself; with CCL_ATL_TRANSPORT=ofi without a launcher, over
    libfabric's shared memory. Either way the caller does the work: a worker thread would fight with
    it for its core."""
    folder = one_ccl_folder()
    environment = {"CCL_WORKER_OFFLOAD": "0", "CCL_KVS_IFACE": "lo", "FI_PROVIDER_PATH": str(folder / "lib"),
                   "I_MPI_ROOT": str(folder), "I_MPI_FABRICS": "shm"} | environment
    if ranks > cores():
        environment |= {"CCL_YIELD": "sched_yield"}
    program = [BIN / "bench_oneccl"]
    if environment.get("CCL_ATL_TRANSPORT") != "ofi":
        commands = [[folder / "bin" / "mpiexec.hydra", "-n", str(ranks), *program]]
    else:
        environment |= {"CCL_PROCESS_LAUNCHER": "none", "CCL_ATL_SHM": "1", "FI_PROVIDER": "tcp"}
        pins = [["taskset", "-c", str(core)] for core in sorted(os.sched_getaffinity(0))]
        commands = [[*(pins[rank] if ranks <= cores() else []), "env", f"CCL_LOCAL_RANK={rank}",
                     f"CCL_LOCAL_SIZE={ranks}", *program] for rank in range(ranks)]
    return Side("oneccl", setting, ranks, commands, environment)


def one_ccl_folder():
    """Where tools/bootstrap puts oneCCL."""
    return venv() / "oneccl"


def gloo(ranks):
    return torch_distributed("gloo", ranks)


def torch_distributed(backend, ranks):
    """A backend of torch.distributed; convoy's is that of the build tree."""
    return Side(backend, "", ranks, [[venv_python(), ROOT / "bench" / "peer_gloo.py"]] * ranks,
                {"GLOO_SOCKET_IFNAME": "lo", "BENCH_BACKEND": backend,
                 "PYTHONPATH": str(BIN.parent / "python")})


def venv():
    return ROOT / os.environ.get("CONVOY_VENV", ".venv")


def venv_python():
    return venv() / "bin" / "python"


# For programs that measure all their cases at one go and print {case: microseconds}.

def options(text, name):
    """--rounds and --json of such a benchmark."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "bench" / f"{name}.json")
    return parser.parse_args()


def run_once(command, environment=None):
    done = subprocess.run(command, env=common_environment() | (environment or {}), timeout=300, text=True,
                          stdout=subprocess.PIPE)
    if done.returncode:
        raise SideFailed(f"{' '.join(str(word) for word in command)} ended with {done.returncode}")
    return json.loads(done.stdout)


def take_turns(commands, rounds, environment=None):
    """`commands`: side -> command. Median microseconds by (case, side)."""
    times = {}
    for _ in range(rounds):
        for side, command in commands.items():
            for case, us in run_once(command, environment).items():
                times.setdefault((case, side), []).append(us)
    return {key: median(found) for key, found in times.items()}


def record(bench, op, ours, peer, theirs, *, path="", ranks, size, setting=""):
    return {"bench": bench, "op": op, "dtype": "f32", "path": path, "ranks": ranks, "bytes": size,
            "ours_us": round(ours, 3), "peer": peer, "peer_us": round(theirs, 3),
            "ratio": round(theirs / ours, 3), "setting": setting}


def bar(met, text):
    """Prints it; 1 if it was missed."""
    print(f"  {'met   ' if met else 'MISSED'} {text}")
    return 0 if met else 1


def exit_with(main):
    try:
        sys.exit(main())
    except (SideFailed, subprocess.SubprocessError) as error:
        sys.exit(f"bench: {error}")


class Results:
    """Times of all sides, round by round."""

    def __init__(self):
        self.times = {}  # (case without seconds, ranks) -> {(side, setting, variant): [us]}
        self.barriers = {}  # the same -> [us] of a spinning barrier beside it

    def run(self, sides, cases, rounds):
        """`cases`: (op, dtype, path, bytes, seconds), alike but for the path. The sides take turns;
        every round begins with another one, because each inherits the caches of the one before.
        Peers know only private memory: one time of theirs counts for all paths."""
        for turn in range(rounds):
            self.probe(sides, cases)
            for side in sides[turn % len(sides):] + sides[:turn % len(sides)]:
                if side.name in ("openmpi", "oneccl", "mpi", "gloo"):
                    self.add(side, cases, side.run(cases[0]))
                else:
                    for case in cases:
                        self.add(side, [case], side.run(case))

    def probe(self, sides, cases):
        """How far apart the cores are right now: a virtual machine's are moved while it runs."""
        for side in sides:
            if side.name != "limit":
                continue
            us = min(side.run(("barrier", "f32", "private", 0, 0.001)).values())
            for case in cases:
                self.barriers.setdefault((case[:4], side.ranks), []).append(us)

    def barrier_ns(self, case, ranks):
        """Least and most of the probes; None without the limit."""
        found = self.barriers.get((case[:4], ranks))
        return [round(1e3 * min(found)), round(1e3 * max(found))] if found else None

    def add(self, side, cases, answer):
        for case in cases:
            times = self.times.setdefault((case[:4], side.ranks), {})
            for variant, us in answer.items():
                times.setdefault((side.name, side.setting, variant), []).append(us)

    def best(self, case, ranks, name):
        """(median us, setting or variant) of a side's best way; None if it was not measured."""
        found = [(median(us), f"{setting} {variant}".strip())
                 for (side, setting, variant), us in self.times.get((case[:4], ranks), {}).items()
                 if side == name]
        return min(found, default=None)

    def records(self, bench):
        """One for each peer and setting, ratio = peer / ours. Of a peer's variants the best."""
        records = []
        for ((op, dtype, path, size), ranks), times in self.times.items():
            ours = [median(us) for (side, _, _), us in times.items() if side == "convoy"]
            if not ours:
                continue
            peers = {}
            for (side, setting, variant), us in times.items():
                if side != "convoy":
                    key = (side, setting)
                    peers[key] = min(peers.get(key, (float("inf"), "")), (median(us), variant))
            for (peer, setting), (us, variant) in peers.items():
                records.append({
                    "bench": bench, "op": op, "dtype": dtype, "path": path, "ranks": ranks,
                    "bytes": size, "ours_us": round(min(ours), 3), "peer": peer,
                    "peer_us": round(us, 3), "ratio": round(us / min(ours), 3),
                    "setting": setting or variant,
                    "barrier_ns": self.barrier_ns((op, dtype, path, size), ranks)})
        return records


def write_records(records, file):
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "w") as out:
        out.write("[\n" + ",\n".join("  " + json.dumps(r) for r in records) + "\n]\n")
