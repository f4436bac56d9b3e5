#!/usr/bin/env python3
"""What torch.nn.parallel.DistributedDataParallel on Gloo computes, for parity_test.cpp.

    python_oracle.py FOLDER

Trains small models from parameters and on data that a formula gives, with 2, 3 and 4 ranks, in
every mode. Rank 0 writes FOLDER/values, the tensors after each step as floats one after the other,
and FOLDER/index, a line for each: name and number of elements (-1: there is none). Ranks are forks
of this process, which has imported all that they need: that takes longer than the rest.
"""

import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch._dynamo  # noqa: F401  DDP and optimizers would import it, in every rank
import torch.distributed as dist
from torch import nn
from torch.nn import functional

STEPS = 3
WORLDS = (2, 3, 4)
CAP_MB = 0.001  # several buckets
MODES = {
    "default": {},
    "gradient_as_bucket_view": {"gradient_as_bucket_view": True},
    "find_unused_parameters": {"find_unused_parameters": True},
    "static_graph": {"static_graph": True},
}


def wave(count, phase, scale=1.0):
    """As in parity_test.cpp."""
    x = torch.arange(count, dtype=torch.float64)
    return x.mul(0.7).add(phase).sin().mul(scale).float()


def tokens(count, limit, phase):
    return torch.arange(count).mul(7).add(phase).remainder(limit)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 16)
        self.last = nn.Linear(16, 4)

    def forward(self, phase):
        x = wave(5 * 8, phase).view(5, 8)
        return self.last(torch.relu(self.second(torch.relu(self.first(x)))))


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.last = nn.Conv2d(8, 6, 3, stride=2), nn.Linear(6, 4)
        self.to(memory_format=torch.channels_last)

    def forward(self, phase):
        x = wave(4 * 3 * 9 * 9, phase).view(4, 3, 9, 9).to(memory_format=torch.channels_last)
        x = self.second(torch.relu(self.norm(self.first(x))))
        return self.last(x.mean((2, 3)))


class GptBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        self.norm1, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, phase):
        x = self.embedding(tokens(2 * 6, 11, phase).view(2, 6))
        q, k, v = self.qkv(self.norm1(x)).view(2, 6, 3, 4, 4).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(2, 6, 16))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Bag(nn.Module):
    """Each rank sees other rows, and some rows twice."""

    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(23, 6, mode="sum", sparse=True)
        self.last = nn.Linear(6, 3)

    def forward(self, phase):
        return self.last(self.bag(tokens(12, 23, phase).remainder(17), torch.tensor([0, 5, 9])))


MODELS = {"mlp": Mlp, "conv": ConvNet, "gpt": GptBlock, "bag": Bag}


class Output:
    def __init__(self, folder):
        self.index, self.values = open(folder / "index", "w"), open(folder / "values", "wb")

    def write(self, name, tensor):
        print(name, -1 if tensor is None else tensor.numel(), file=self.index)
        if tensor is not None:
            dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
            self.values.write(dense.float().contiguous().numpy().tobytes())


def train(group, name, mode, output):
    net = MODELS[name]()
    if mode == "find_unused_parameters":
        net.idle = nn.Linear(3, 2)
    with torch.no_grad():
        for i, parameter in enumerate(net.parameters()):
            parameter.copy_(wave(parameter.numel(), i + 1, 0.2).view(parameter.shape))
    model = nn.parallel.DistributedDataParallel(net, process_group=group, bucket_cap_mb=CAP_MB,
                                                **MODES[mode])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(10 * step + dist.get_rank()).square().sum().backward()
        optimizer.step()
        if not output:
            continue
        prefix = f"{group.size()}/{name}/{mode}/{step}"
        for key, parameter in net.named_parameters():
            output.write(f"{prefix}/parameter/{key}", parameter)
            output.write(f"{prefix}/gradient/{key}", parameter.grad)
        for key, buffer in net.named_buffers():
            output.write(f"{prefix}/buffer/{key}", buffer)


def run(rank, folder):
    torch.set_num_threads(1)
    ranks = max(WORLDS)
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks,
                            timeout=timedelta(seconds=60))
    output = Output(folder) if rank == 0 else None
    for world in WORLDS:
        group = dist.new_group(list(range(world)))
        if rank >= world:
            continue
        for name in MODELS:
            for mode in MODES:
                train(group, name, mode, output)
    dist.barrier()
    dist.destroy_process_group()


def main():
    folder = Path(sys.argv[1])
    children = []
    for rank in range(1, max(WORLDS)):
        child = os.fork()
        if child == 0:
            try:
                run(rank, folder)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        children.append(child)
    run(0, folder)
    return max(os.waitpid(child, 0)[1] != 0 for child in children)


if __name__ == "__main__":
    sys.exit(main())
