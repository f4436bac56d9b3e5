"""Ranks that disagree get an error that names both sides, and go on.

    convoy run -n 2 python examples/python/mismatch.py
"""

import torch
import torch.distributed as dist


def main():
    dist.init_process_group("convoy")
    rank = dist.get_rank()
    try:
        # A mistake: every rank sums up a tensor of another size.
        dist.all_reduce(torch.ones(10 + rank))
    except RuntimeError as error:
        print(error)
    # The group is still good: no data was touched.
    total = torch.ones(1)
    dist.all_reduce(total)
    print(f"rank {rank} continues: {total.item():.0f} ranks")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
