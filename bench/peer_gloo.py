"""A backend of torch.distributed as a side of a benchmark; one process a rank.

Gloo for bench/coll.py; for bench/python.py both it and convoy (BENCH_BACKEND), which also measures
steps of stock DDP.
"""

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from models import MODELS

OPS = ("all_reduce", "broadcast", "barrier", "reduce_scatter", "all_gather", "all_to_all",
       "ping_pong")
FILLED = 64 << 10  # as in side.cpp
TYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


class Collective:
    def __init__(self, case):
        self.op, dtype, _, size, seconds = case.split()
        self.bytes, self.seconds = int(size), float(seconds)
        dtype = TYPES[dtype]
        ranks = dist.get_world_size()
        self.buffer = torch.zeros(max(1, self.bytes // dtype.itemsize), dtype=dtype)
        self.output = torch.zeros_like(self.buffer) if self.op == "all_to_all" else None
        self.part = self.buffer[: self.buffer.numel() // ranks].clone()

    def call(self):
        if self.op == "all_reduce":
            dist.all_reduce(self.buffer)
        elif self.op == "broadcast":
            dist.broadcast(self.buffer, 0)
        elif self.op == "reduce_scatter":
            dist.reduce_scatter_single(self.part, self.buffer)
        elif self.op == "all_gather":
            dist.all_gather_single(self.buffer, self.part)
        elif self.op == "all_to_all":
            dist.all_to_all_single(self.output, self.buffer)
        elif self.op == "ping_pong":
            if dist.get_rank() == 0:
                dist.send(self.buffer, 1)
                dist.recv(self.buffer, 1)
            elif dist.get_rank() == 1:
                dist.recv(self.buffer, 0)
                dist.send(self.buffer, 0)
        else:
            dist.barrier()

    def time_calls(self, calls):
        """Microseconds a call, on the slowest rank."""
        elapsed = 0
        if self.bytes < FILLED:
            dist.barrier()
            start = time.perf_counter_ns()
            for _ in range(calls):
                self.call()
            elapsed = time.perf_counter_ns() - start
        else:
            for _ in range(calls):
                (self.part if self.op == "all_gather" else self.buffer).fill_(1)
                dist.barrier()
                start = time.perf_counter_ns()
                self.call()
                elapsed += time.perf_counter_ns() - start
        slowest = torch.tensor([elapsed / calls / 1e3], dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return slowest.item()

    def measure(self):
        once = min(self.time_calls(1), self.time_calls(2))
        return self.time_calls(int(min(max(self.seconds * 1e6 / once, 1), 200000)))


class Step:
    """A training step of stock DDP; "dtype" of the case is the model."""

    models = {}  # built once

    def __init__(self, case):
        _, name, _, _, seconds = case.split()
        self.seconds = float(seconds)
        if name not in self.models:
            torch.manual_seed(0)
            net, data = MODELS[name.replace("_", "-")]()
            net = nn.parallel.DistributedDataParallel(net)
            self.models[name] = net, data, torch.optim.SGD(net.parameters(), lr=1e-4)
        self.net, self.data, self.optimizer = self.models[name]

    def measure(self):
        times = []
        end = time.monotonic() + self.seconds
        more = torch.ones(1)
        while more.item():
            dist.barrier()
            start = time.perf_counter_ns()
            self.optimizer.zero_grad()
            self.net(self.data).square().mean().backward()
            self.optimizer.step()
            slowest = torch.tensor([(time.perf_counter_ns() - start) / 1e3], dtype=torch.float64)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            times.append(slowest.item())
            more = torch.tensor([float(len(times) < 3 or time.monotonic() < end)])
            dist.broadcast(more, 0)
        return sorted(times[1:])[(len(times) - 1) // 2]


def main():
    torch.set_num_threads(1)
    side = Path(os.environ["BENCH_SIDE"])
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(str(side / "store"), size)
    dist.init_process_group(os.environ.get("BENCH_BACKEND", "gloo"), store=store, rank=rank, world_size=size,
                            timeout=timedelta(seconds=120))
    with open(side / str(rank)) as cases:
        answers = open(side / "answers", "w") if rank == 0 else None
        for case in cases:
            op = case.split()[0]
            side = Step if op == "ddp" else Collective if op in OPS else None
            answer = {"": side(case).measure()} if side else {}
            if answers:
                print(json.dumps(answer), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
