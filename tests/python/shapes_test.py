"""Ranks compare the shapes of their tensors, not only how many elements they have."""

import os
from unittest import TestCase, main

import torch
import torch.distributed as dist

import convoy
import ranks

SIZE = 2


def tensor(*sizes):
    return torch.ones(*sizes)


def at_root(sizes):
    return [tensor(*sizes), tensor(*sizes)] if ranks.rank() == 0 else None


# {operation: call(sizes)}: rank 0 calls it with [2, 3], rank 1 with [3, 2].
OPERATIONS = {
    "all_reduce": lambda s: dist.all_reduce(tensor(*s)),
    "all_reduce async": lambda s: dist.all_reduce(tensor(*s), async_op=True).wait(),
    "all_reduce strided": lambda s: dist.all_reduce(tensor(*s[::-1]).t()),
    "all_reduce large": lambda s: dist.all_reduce(tensor(100 * s[0], 100 * s[1])),
    "all_reduce_coalesced": lambda s: dist.all_reduce_coalesced([tensor(*s), tensor(1)]),
    "broadcast": lambda s: dist.broadcast(tensor(*s), 0),
    "reduce": lambda s: dist.reduce(tensor(*s), 0),
    "all_gather": lambda s: dist.all_gather([tensor(*s), tensor(*s)], tensor(*s)),
    "all_gather_into_tensor": lambda s: dist.all_gather_into_tensor(tensor(12), tensor(*s)),
    "gather": lambda s: dist.gather(tensor(*s), at_root(s), 0),
    "scatter": lambda s: dist.scatter(tensor(*s), at_root(s), 0),
    "reduce_scatter": lambda s: dist.reduce_scatter(tensor(*s), [tensor(*s), tensor(*s)]),
    "reduce_scatter_tensor": lambda s: dist.reduce_scatter_tensor(tensor(3), tensor(*s)),
    "all_to_all": lambda s: dist.all_to_all([tensor(*s), tensor(*s)], [tensor(*s), tensor(*s)]),
}


def disagree():
    """{operation: the error}, and whether the group went on."""
    mine = [2, 3] if dist.get_rank() == 0 else [3, 2]
    seen = {}
    for name, call in OPERATIONS.items():
        try:
            call(mine)
            seen[name] = "no error"
        except convoy.Error as error:
            seen[name] = str(error)
        x = torch.ones(1)
        dist.all_reduce(x)
        assert x == 2, x
    return seen


def what_is_not_compared():
    """Sizes that are each rank's own affair."""
    rank = dist.get_rank()
    out = tensor(2, 3) if rank == 0 else tensor(6)  # stacked, or one after the other
    dist.all_gather_into_tensor(out, tensor(3))
    dist.all_to_all_single(tensor(6), tensor(2, 3) if rank == 0 else tensor(6))
    rows = [1, 2] if rank == 0 else [2, 1]
    dist.all_to_all_single(tensor(3, 2), tensor(3, 2), [1, 2] if rank == 0 else [2, 1], rows)
    # Lists of which each rank has its own sizes.
    lists = [tensor(2, 3), tensor(5)]
    dist.all_gather(lists, tensor(*([2, 3] if rank == 0 else [5])))
    if rank == 0:
        dist.send(tensor(2, 3), 1)
    else:
        dist.recv(tensor(6), 0)
    return True


def scalar_and_one():
    texts = []
    for sizes in ([[], [1]], [[3], [3, 1]], [[0], [0, 4]]):
        try:
            dist.all_reduce(torch.ones(sizes[dist.get_rank()]))
            texts.append("no error")
        except convoy.Error as error:
            texts.append(str(error))
    return texts


class ShapesTest(TestCase):
    def test_equal_counts_of_other_shapes_are_an_error(self):
        for rank, seen in enumerate(ranks.run(disagree, SIZE)):
            for name, text in seen.items():
                with self.subTest(operation=name, rank=rank):
                    self.assertIn("ranks disagree", text)
                    for word in ("rank 0", "rank 1", "no data was touched", "compare_shapes"):
                        self.assertIn(word, text)
                    first, second = ("[200, 300]", "[300, 200]") if "large" in name else ("[2, 3]", "[3, 2]")
                    self.assertIn(first, text)
                    self.assertIn(second, text)

    def test_number_of_dimensions(self):
        for texts in ranks.run(scalar_and_one, SIZE):
            for text, both in zip(texts, (("[]", "[1]"), ("[3]", "[3, 1]"), ("[0]", "[0, 4]"))):
                for shape in both:
                    self.assertIn(f"shape {shape}", text)

    def test_what_is_each_ranks_own(self):
        self.assertEqual(ranks.run(what_is_not_compared, SIZE), [True] * SIZE)

    def test_environment_variable(self):
        self.assertEqual(ranks.run(with_environment, SIZE, "0"), [True] * SIZE)

    def test_group_option(self):
        self.assertEqual(ranks.run(by_option, SIZE), [True] * SIZE)

    def test_one_setting_for_all_ranks(self):
        for text in ranks.run(other_setting, SIZE):
            self.assertIn("compare_shapes (CONVOY_COMPARE_SHAPES) must be the same on all ranks", text)


def with_environment(value):
    # Of the rank's own process, for the groups to come.
    os.environ["CONVOY_COMPARE_SHAPES"] = value
    group = dist.new_group(backend="convoy")
    x = tensor(*([2, 3] if dist.get_rank() == 0 else [3, 2]))
    dist.all_reduce(x, group=group)
    return bool((x == 2).all())


def by_option():
    group = dist.new_group(backend="convoy", pg_options=convoy.Options(compare_shapes=False))
    x = tensor(*([2, 3] if dist.get_rank() == 0 else [3, 2]))
    dist.all_reduce(x, group=group)
    lists = [tensor(*([3, 2] if dist.get_rank() == 0 else [2, 3])) for _ in range(2)]
    dist.all_gather(lists, tensor(*([2, 3] if dist.get_rank() == 0 else [3, 2])), group=group)
    return bool((x == 2).all())


def other_setting():
    options = convoy.Options(compare_shapes=dist.get_rank() == 0)
    group = dist.new_group(backend="convoy", pg_options=options)
    try:
        dist.all_reduce(tensor(2, 3), group=group)
    except convoy.Error as error:
        return str(error)
    return "no error"


if __name__ == "__main__":
    main()
