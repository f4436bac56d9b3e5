"""Tells what is installed, and whether ranks can talk to each other.

    python examples/python/check.py
    convoy run -n 2 python examples/python/check.py
"""

import os

import convoy
import torch
import torch.distributed as dist


def main():
    launched = "RANK" in os.environ
    dist.init_process_group("convoy", "env://" if launched else "convoy://")
    total = torch.ones(1)
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        print(f"convoy {convoy.__version__}, torch {torch.__version__}, {total.item():.0f} rank(s)")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
