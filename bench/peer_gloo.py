"""Gloo's side of bench/coll.py, through torch.distributed; one process a rank."""

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

OPS = ("all_reduce", "broadcast", "barrier", "reduce_scatter", "all_gather", "all_to_all",
       "ping_pong")
FILLED = 64 << 10  # as in side.cpp
TYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


class Gloo:
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
            dist.reduce_scatter_tensor(self.part, self.buffer)
        elif self.op == "all_gather":
            dist.all_gather_into_tensor(self.buffer, self.part)
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


def main():
    torch.set_num_threads(1)
    side = Path(os.environ["BENCH_SIDE"])
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(str(side / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size,
                            timeout=timedelta(seconds=120))
    with open(side / str(rank)) as cases:
        answers = open(side / "answers", "w") if rank == 0 else None
        for case in cases:
            known = case.split()[0] in OPS
            answer = {"": Gloo(case).measure()} if known else {}
            if answers:
                print(json.dumps(answer), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
