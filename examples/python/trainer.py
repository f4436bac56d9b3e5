"""Hugging Face's Trainer: make the group first, and it takes that one.

    convoy run -n 2 python examples/python/trainer.py
"""

import tempfile

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("convoy")  # before TrainingArguments, which on the CPU accepts gloo and mpi by name

from transformers import Trainer, TrainingArguments


class Net(nn.Module):
    """As Trainer wants it: the loss is the first thing that forward returns."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x, labels):
        out = self.layers(x)
        return nn.functional.mse_loss(out, labels), out


def main():
    torch.manual_seed(0)
    data = torch.randn(256, 8)
    samples = [{"x": x, "labels": x.sum().view(1)} for x in data]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(folder, use_cpu=True, num_train_epochs=4, per_device_train_batch_size=8,
                                      learning_rate=0.01, report_to=[], save_strategy="no", disable_tqdm=True,
                                      logging_strategy="no")
        result = Trainer(Net(), arguments, train_dataset=samples).train()
    if dist.get_rank() == 0:
        print(f"loss {result.training_loss:.3f} on {arguments.world_size} ranks over {dist.get_backend()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
