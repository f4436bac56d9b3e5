"""Ranks with different numbers of inputs: convoy.Join, model.join() and torch's own Join."""

import copy
from unittest import TestCase

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join as TorchsJoin, Joinable, JoinHook
from torch.distributed.optim import ZeroRedundancyOptimizer

import convoy
import ranks

RATE = 0.1


def make():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def batch(step, rank):
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def inputs_of(rank):
    return 2 + 2 * rank


def loss_of(model, x):
    return model(x).square().mean()


def expected(size, divide_by_initial=True, every=1):
    """All ranks in one process; reduced in every so many steps, with what was added before."""
    module = make()
    for step in range(0, inputs_of(size - 1), every):
        live = [rank for rank in range(size) if step < inputs_of(rank)]
        module.zero_grad()
        for rank in live:
            for each in range(step, step + every):
                (loss_of(module, batch(each, rank)) / (size if divide_by_initial else len(live))).backward()
        with torch.no_grad():
            for each in module.parameters():
                each -= RATE * each.grad
    return module


def train(join, model, optimizer, every=1):
    with join:
        for step in range(inputs_of(dist.get_rank())):
            if (step + 1) % every:
                with model.no_sync():
                    loss_of(model, batch(step, dist.get_rank())).backward()
                continue
            loss_of(model, batch(step, dist.get_rank())).backward()
            optimizer.step()
            optimizer.zero_grad()


def wrap(module=None, **arguments):
    model = convoy.DistributedDataParallel(module or make(), **arguments)
    return model, torch.optim.SGD(model.parameters(), RATE)


def same(model, module):
    for mine, other in zip(model.parameters(), module.parameters()):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def join_of(which, model, **arguments):
    """Ours or torch's."""
    return TorchsJoin([model], **arguments) if which else model.join(**arguments)


def uneven():
    for which in range(2):
        for divide in [True, False]:
            model, optimizer = wrap()
            train(join_of(which, model, divide_by_initial_world_size=divide), model, optimizer)
            same(model, expected(dist.get_world_size(), divide))
            # It is over, and nothing is left behind: a step of all ranks.
            loss_of(model, batch(0, 0)).backward()
            plain = copy.deepcopy(model.module)
            plain.zero_grad()
            loss_of(plain, batch(0, 0)).backward()
            torch.testing.assert_close(model.module[0].weight.grad, plain[0].weight.grad)
        model, optimizer = wrap(find_unused_parameters=True)
        train(join_of(which, model), model, optimizer, every=2)
        same(model, expected(dist.get_world_size(), every=2))


def with_buffers():
    for which in range(2):
        model, optimizer = wrap(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)))
        train(join_of(which, model), model, optimizer)
        for each in [*model.parameters(), *model.buffers()]:
            all = [torch.empty_like(each) for _ in range(dist.get_world_size())]
            dist.all_gather(all, each.detach())
            assert all[0].equal(all[-1])
        assert model.module[1].num_batches_tracked == inputs_of(dist.get_world_size() - 1)


def sharded():
    for which in range(2):
        for in_backward in [False, True]:
            model = convoy.DistributedDataParallel(make())
            optimizer = convoy.ShardedOptimizer(model, torch.optim.SGD, lr=RATE, in_backward=in_backward)
            join = (convoy.Join if which == 0 else TorchsJoin)([model, optimizer])
            with join:
                for step in range(inputs_of(dist.get_rank())):
                    loss_of(model, batch(step, dist.get_rank())).backward()
                    if not in_backward:
                        optimizer.step()
            same(model, expected(dist.get_world_size()))


class Counter(Joinable):
    """Of a user's own: counts the steps of all ranks."""

    def __init__(self):
        super().__init__()
        self.total = 0

    def count(self, mine=1):
        value = torch.tensor([mine])
        dist.all_reduce(value)
        self.total += int(value)

    def join_hook(self, **_):
        counter = self

        class Hook(JoinHook):
            def main_hook(self):
                counter.count(0)

        return Hook()

    join_device = torch.device("cpu")
    join_process_group = property(lambda self: dist.group.WORLD)


def with_others():
    """In torch's Join, beside joinables that are not convoy's."""
    model = convoy.DistributedDataParallel(make())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=RATE)
    counter = Counter()
    with TorchsJoin([model, counter, optimizer]):
        for step in range(inputs_of(dist.get_rank())):
            loss_of(model, batch(step, dist.get_rank())).backward()
            counter.count()
            optimizer.step()
            optimizer.zero_grad()
    assert counter.total == sum(inputs_of(rank) for rank in range(dist.get_world_size()))
    same(model, expected(dist.get_world_size()))
    try:
        convoy.Join([model, counter])
    except ValueError as error:
        assert "Counter" in str(error), error
    else:
        raise AssertionError("not convoy's")


def ends_early():
    fewest = inputs_of(0)
    for which in range(2):
        model, optimizer = wrap()
        join = join_of(which, model, throw_on_early_termination=True)
        done = 0
        try:
            with join:
                for step in range(inputs_of(dist.get_rank())):
                    loss_of(model, batch(step, dist.get_rank())).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    done += 1
        except RuntimeError as error:
            assert "inputs" in str(error), error
        else:
            raise AssertionError("all ranks must throw")
        assert done == fewest, done


def an_exception():
    model, optimizer = wrap()
    try:
        with model.join():
            for step in range(inputs_of(1)):
                if dist.get_rank() == 1 and step == 1:
                    raise ValueError("no more of this")
                loss_of(model, batch(step, dist.get_rank())).backward()
    except (ValueError, RuntimeError) as error:
        assert "no more of this" in str(error), error
    else:
        raise AssertionError("rank 1 has thrown")
    model.zero_grad()
    loss_of(model, batch(0, 0)).backward()  # goes on
    plain = make()
    with model.join(enable=False), TorchsJoin([model], enable=False):
        loss_of(model, batch(0, 0)).backward()
    loss_of(plain, batch(0, 0)).backward()
    torch.testing.assert_close(model.module[0].weight.grad, 2 * plain[0].weight.grad)
    assert isinstance(copy.deepcopy(model), nn.parallel.DistributedDataParallel)


def an_exception_in_torchs():
    """Of which torch's Join tells its joinables nothing."""
    model, _ = wrap()
    try:
        with TorchsJoin([model]):
            loss_of(model, batch(0, dist.get_rank())).backward()
            raise ValueError("no more of this")
    except ValueError:
        pass
    model.update_process_group(dist.new_group([0, 1]))
    loss_of(model, batch(0, 0)).backward()
    plain = make()
    loss_of(plain, batch(0, 0)).backward()
    torch.testing.assert_close(model.module[0].weight.grad, plain[0].weight.grad)


def a_copy():
    """Makes its reducer where all ranks are: a rank may have no inputs at all."""
    for which in range(2):
        model, _ = wrap()
        twin = copy.deepcopy(model)
        optimizer = torch.optim.SGD(twin.parameters(), RATE)
        with join_of(which, twin):
            for _ in range(2 * dist.get_rank()):
                loss_of(twin, batch(0, 0)).backward()
                optimizer.step()
                optimizer.zero_grad()
        for each in twin.parameters():
            all = [torch.empty_like(each) for _ in range(dist.get_world_size())]
            dist.all_gather(all, each.detach())
            assert all[0].equal(all[-1])
        assert not twin.module[0].weight.equal(model.module[0].weight)


class JoinTest(TestCase):
    def test_uneven_inputs(self):
        ranks.run(uneven, 3)

    def test_other_backend(self):
        ranks.run(uneven, 2, backend="gloo")

    def test_buffers_and_others(self):
        ranks.run(all_of, 2, [with_buffers, sharded, with_others, ends_early, an_exception,
                            an_exception_in_torchs, a_copy])


def all_of(functions):
    for function in functions:
        function()


if __name__ == "__main__":
    ranks.main()
