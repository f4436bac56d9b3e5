"""Python's DistributedDataParallel, or ours in Python, as a side of bench/ddp.py and exposed.py; one
process a rank.

Cases and answers are those of bench_ddp.cpp; BENCH_MODE is one of MODES, BENCH_BACKEND that of
torch.distributed (gloo). The models are those of models.h: the same layers, made in the same order,
so that the same seed gives the same first loss.
"""

import contextlib
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from models import MODELS

# Arguments of torch's class; of ours where there are none to be compared.
MODES = {
    "default": {},
    "view": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "view+static": {"gradient_as_bucket_view": True, "static_graph": True},
    "zero": {"gradient_as_bucket_view": True},  # AdamW, sharded
    "adamw": {"gradient_as_bucket_view": True},
    "convoy": {},
    "convoy-sharded": {},  # AdamW
}
MODE = os.environ["BENCH_MODE"]
BACKEND = os.environ.get("BENCH_BACKEND", "gloo")
if BACKEND == "convoy":
    import convoy


def make_optimizer(net):
    if MODE == "zero":
        return ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True,
                                       lr=1e-4)
    if MODE == "adamw":
        return torch.optim.AdamW(net.parameters(), lr=1e-4)
    if MODE == "convoy-sharded":
        return convoy.ShardedOptimizer(net, torch.optim.AdamW, lr=1e-4)
    return torch.optim.SGD(net.parameters(), lr=1e-4)


class Trainer:
    def __init__(self, model):
        torch.manual_seed(0)
        net, self.data = MODELS[model]()
        wrapper = convoy if MODE.startswith("convoy") else nn.parallel
        self.net = wrapper.DistributedDataParallel(net, **MODES[MODE])
        self.optimizer = make_optimizer(self.net)
        self.first_loss = None
        for _ in range(2):  # lays out buckets
            self.step()

    def step(self, syncs=True):
        """Microseconds on the slowest rank."""
        dist.barrier()
        start = time.perf_counter_ns()
        self.optimizer.zero_grad()
        with contextlib.nullcontext() if syncs else self.net.no_sync():
            loss = self.net(self.data).square().mean()
            loss.backward()
        self.optimizer.step()
        if self.first_loss is None:
            self.first_loss = loss.item()
        del loss
        slowest = torch.tensor([(time.perf_counter_ns() - start) / 1e3], dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return slowest.item()


class Ranks:
    def __init__(self):
        self.trainer = None

    def answer(self, op, *words):
        if op == "pids":
            pids = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
            dist.all_gather(pids, torch.tensor([os.getpid()]))
            return {str(rank): pid.item() for rank, pid in enumerate(pids)}
        if op == "pairs":
            return self.pairs(*words)
        model, way, count = words
        syncs = way != "no_sync"
        self.trainer = self.trainer or Trainer(model)
        self.trainer.step(syncs)  # warms up
        times = [self.trainer.step(syncs) for _ in range(int(count))]
        return {"us": times, "loss": self.trainer.first_loss}

    def pairs(self, model, *words):
        """Two models whose steps take turns."""
        *ways, count = words
        trainers = [Trainer(model) for _ in ways]
        times = {way: [] for way in ways}

        def step(i):
            return trainers[i].step(ways[i] != "no_sync")

        for i in (0, 1, 1, 0, 0, 1):
            step(i)
        for turn in range(int(count)):
            for i in (turn % 2, 1 - turn % 2):  # each inherits the other's caches
                times[ways[i]].append(step(i))
        return times


def main():
    torch.set_num_threads(1)
    folder = Path(os.environ["BENCH_SIDE"])
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group(BACKEND, store=store, rank=rank, world_size=size,
                            timeout=timedelta(seconds=300))
    ranks = Ranks()
    with open(folder / str(rank)) as cases:
        answers = open(folder / "answers", "w") if rank == 0 else None
        for case in cases:
            answer = ranks.answer(*case.split())
            if answers:
                print(json.dumps(answer), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
