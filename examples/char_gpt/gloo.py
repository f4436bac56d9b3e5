"""The model of model.h in Python, with torch's DistributedDataParallel on Gloo: what a step takes there.

    torchrun --nproc-per-node 2 examples/char_gpt/gloo.py --text book.txt --steps 40
"""

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

WIDTH, HEADS, LAYERS, CONTEXT = 128, 4, 5, 64


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.mix = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self, vocabulary):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocabulary)

    def forward(self, text):
        return self.head(self.norm(self.blocks(self.tokens(text) + self.places.weight)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--backend", default="gloo")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group(arguments.backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    text = arguments.text.read_bytes()
    number = {character: i for i, character in enumerate(sorted(set(text)))}
    tokens = torch.tensor([number[character] for character in text])
    torch.manual_seed(1)
    net = DistributedDataParallel(Gpt(len(number)), gradient_as_bucket_view=True)
    adam = torch.optim.AdamW(net.parameters(), lr=1e-3)
    times = [time.perf_counter()]
    for _ in range(arguments.steps):
        begins = torch.randint(len(text) - CONTEXT - 1, (arguments.batch // size,)).tolist()
        batch = torch.stack([tokens[begin:begin + CONTEXT + 1] for begin in begins])
        adam.zero_grad()
        loss = cross_entropy(net(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        adam.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)  # as in main.cpp: what would be printed
        times.append(time.perf_counter())
    if rank == 0:
        late = times[len(times) // 2:]  # the first half warms up, as in main.cpp
        steps = sorted(end - begin for begin, end in zip(late, late[1:]))
        print(f"  {1e3 * steps[len(steps) // 2]:.1f} ms a step")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
