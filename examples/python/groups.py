"""Groups as objects, in no registry: convoy.new_group, and a current group for each thread.

    convoy run -n 4 python examples/python/groups.py
"""

from datetime import timedelta

import torch

import convoy


def total(x):
    """A function that works on whatever group is current."""
    convoy.current_group().allreduce(x).wait()
    return x


def main():
    world = convoy.new_group("convoy", timedelta(seconds=30))
    rank, size = world.rank(), world.size()
    half = world.split_group(list(range(size // 2)) or [0], group_name="half")
    with convoy.process_group(world):
        everyone = total(torch.tensor([float(rank)]))
        if half:
            with convoy.process_group(half):
                some = total(torch.tensor([float(rank)]))
    if rank == 0:
        print(f"sum of {size} ranks: {everyone.item():.0f}; of the first half: {some.item():.0f}")


if __name__ == "__main__":
    main()
