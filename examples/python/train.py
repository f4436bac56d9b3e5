"""Stock DistributedDataParallel; the backend is the only line that differs from a program for Gloo.

    convoy run -n 2 python examples/python/train.py
    torchrun --nproc-per-node 2 examples/python/train.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main():
    dist.init_process_group("convoy")
    rank, size = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    net = DistributedDataParallel(nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1)))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    torch.manual_seed(1 + rank)  # every rank has data of its own
    x = torch.randn(256, 8)
    y = x.sum(dim=1, keepdim=True).sin()
    for step in range(60):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(net(x), y)
        loss.backward()
        optimizer.step()
        if step % 20 == 19:
            mean = loss.detach().clone()
            dist.all_reduce(mean, dist.ReduceOp.AVG)
            if rank == 0:
                print(f"step {step + 1}: loss {mean.item():.4f} on {size} ranks")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
