"""Python's DistributedDataParallel on Gloo as a side of bench/ddp.py; one process a rank.

Cases and answers are those of bench_ddp.cpp; BENCH_MODE is one of MODES. The models are those of
models.h: the same layers, made in the same order, so that the same seed gives the same first loss.
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

MODES = {
    "default": {},
    "view": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "view+static": {"gradient_as_bucket_view": True, "static_graph": True},
}


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        parts = self.qkv(self.first(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


class Bottleneck(nn.Module):
    """Of ResNet-50: 1x1, 3x3, 1x1, and a shortcut past them."""

    def __init__(self, channels, width, stride):
        super().__init__()
        self.conv1, self.bn1 = conv(channels, width, 1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = conv(width, width, 3, stride), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = conv(width, 4 * width, 1), nn.BatchNorm2d(4 * width)
        self.shortcut = None
        if channels != 4 * width or stride != 1:
            self.shortcut = nn.Sequential(conv(channels, 4 * width, 1, stride),
                                          nn.BatchNorm2d(4 * width))

    def forward(self, x):
        y = torch.relu(self.bn1(self.conv1(x)))
        y = torch.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return torch.relu(y + (self.shortcut(x) if self.shortcut else x))


def conv(channels, width, kernel, stride=1):
    return nn.Conv2d(channels, width, kernel, stride, kernel // 2, bias=False)


def mlp_100m():
    net = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(4096, 4096), nn.ReLU())))
    return net, torch.randn(8, 4096)


def gpt(vocabulary, width, layers, heads):
    layers = [nn.Embedding(vocabulary, width), *(Block(width, heads) for _ in range(layers))]
    net = nn.Sequential(*layers, nn.LayerNorm(width), nn.Linear(width, vocabulary))
    return net, torch.randint(vocabulary, (2, 128))


def resnet_50():
    layers = [conv(3, 64, 7, 2), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for width, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for i in range(blocks):
            layers.append(Bottleneck(channels, width, stride if i == 0 else 1))
            channels = 4 * width
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))
    return net, torch.randn(4, 3, 224, 224)


MODELS = {
    "mlp-100m": mlp_100m,
    "gpt-10m": lambda: gpt(65, 384, 6, 6),
    "gpt-52m": lambda: gpt(2048, 640, 10, 10),
    "resnet-50": resnet_50,
}


class Trainer:
    def __init__(self, model):
        torch.manual_seed(0)
        net, self.data = MODELS[model]()
        self.net = nn.parallel.DistributedDataParallel(net, **MODES[os.environ["BENCH_MODE"]])
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=1e-4)
        self.first_loss = None
        for _ in range(2):  # lays out buckets
            self.step()

    def step(self):
        """Microseconds on the slowest rank."""
        dist.barrier()
        start = time.perf_counter_ns()
        self.optimizer.zero_grad()
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
        model, _, count = words
        self.trainer = self.trainer or Trainer(model)
        self.trainer.step()  # warms up
        times = [self.trainer.step() for _ in range(int(count))]
        return {"us": times, "loss": self.trainer.first_loss}


def main():
    torch.set_num_threads(1)
    folder = Path(os.environ["BENCH_SIDE"])
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size,
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
