"""Hugging Face's accelerate: make the group first, and it takes that one.

    convoy run -n 2 python examples/python/accelerate_train.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("convoy")  # before the Accelerator, which on the CPU would make one with gloo

from accelerate import Accelerator


def main():
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    data = torch.randn(512, 8)
    loader = DataLoader(TensorDataset(data, data.sum(1, keepdim=True)), batch_size=16)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    model, optimizer, loader = accelerator.prepare(model, torch.optim.Adam(model.parameters(), 0.01), loader)
    for _ in range(4):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
    mean = accelerator.reduce(loss.detach(), "mean").item()
    accelerator.print(f"loss {mean:.3f} on {accelerator.num_processes} ranks over {dist.get_backend()}")
    accelerator.end_training()  # ends the group, too


if __name__ == "__main__":
    main()
