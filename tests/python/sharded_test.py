"""convoy.ShardedOptimizer beside torch's optimizers, schedulers and ZeroRedundancyOptimizer's place in a loop."""

import io
from unittest import TestCase

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import convoy
import ranks

CLASSES = [
    (torch.optim.SGD, dict(lr=0.05, momentum=0.9, nesterov=True)),
    (torch.optim.Adam, dict(lr=0.003, weight_decay=0.1, amsgrad=True)),
    (torch.optim.AdamW, dict(lr=0.003, betas=(0.8, 0.99))),
    (torch.optim.Adagrad, dict(lr=0.003, initial_accumulator_value=0.1)),
    (torch.optim.RMSprop, dict(lr=0.003, eps=1e-3, momentum=0.5, centered=True)),
    (torch.optim.Adadelta, dict(lr=0.1, rho=0.95, weight_decay=0.01)),
    (torch.optim.Adamax, dict(lr=0.003, betas=(0.8, 0.99))),
    (torch.optim.Rprop, dict(lr=0.003, etas=(0.4, 1.3), step_sizes=(1e-5, 1))),
    (torch.optim.SGD, dict(lr=0.05, momentum=0.9, maximize=True)),
    (torch.optim.AdamW, dict(lr=0.003, maximize=True)),
    (torch.optim.Adadelta, dict(lr=0.1, maximize=True)),
    (torch.optim.Adamax, dict(lr=0.003, maximize=True)),
    (torch.optim.Rprop, dict(lr=0.003, maximize=True)),
]


def make():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 300), nn.Tanh(), nn.Linear(300, 200), nn.Tanh(), nn.Linear(200, 2))


def batch(step, rank=None):
    rank = dist.get_rank() if rank is None else rank
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def same(left, right, **tolerance):
    for a, b in zip(left.parameters(), right.parameters()):
        torch.testing.assert_close(a, b, **(tolerance or dict(rtol=1e-5, atol=1e-6)))


def trains_alike():
    for kind, arguments in CLASSES:
        for in_backward in [False, True]:
            ours, plain = make(), make()
            model = convoy.DistributedDataParallel(ours)
            optimizer = convoy.ShardedOptimizer(model, kind, in_backward=in_backward, **arguments)
            twin = convoy.DistributedDataParallel(plain)
            reference = kind(plain.parameters(), **arguments)
            schedules = [torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in [optimizer, reference]]
            for step in range(5):
                model(batch(step)).square().mean().backward()
                if not in_backward:
                    optimizer.step()
                assert all(each.grad is None for each in ours.parameters())
                reference.zero_grad()
                twin(batch(step)).square().mean().backward()
                reference.step()
                same(ours, plain)
                for schedule in schedules:
                    schedule.step()
            assert optimizer.stats()["steps"] == 5
            # State has the plain optimizer's form and values, whole on every rank. Parameters that differ in their
            # last bits have gradients that differ by more.
            state, expected = optimizer.state_dict()["state"], reference.state_dict()["state"]
            assert state.keys() == expected.keys()
            for number, each in expected.items():
                for name in [name for name, value in each.items() if torch.is_tensor(value)]:
                    torch.testing.assert_close(state[number][name], each[name], rtol=1e-4, atol=1e-5)


def checkpoints():
    """Into a plain optimizer and back."""
    ours = make()
    model = convoy.DistributedDataParallel(ours)
    optimizer = convoy.ShardedOptimizer(model, torch.optim.AdamW, lr=0.01)
    for step in range(3):
        model(batch(step, 0)).square().mean().backward()
        optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    plain = make()
    plain.load_state_dict(ours.state_dict())
    reference = torch.optim.AdamW(plain.parameters(), lr=1)
    reference.load_state_dict(torch.load(file))
    again = make()
    again.load_state_dict(ours.state_dict())
    other = convoy.DistributedDataParallel(again)
    loaded = convoy.ShardedOptimizer(other, torch.optim.AdamW, lr=1)
    loaded.load_state_dict(reference.state_dict())
    assert loaded.param_groups[0]["lr"] == 0.01
    for step in range(3, 6):
        for net, stepper in [(model, optimizer), (other, loaded), (plain, reference)]:
            stepper.zero_grad()
            net(batch(step, 0)).square().mean().backward()
            stepper.step()
        same(ours, again, rtol=0, atol=0)
        same(ours, plain)


def groups_and_errors():
    ours = make()
    model = convoy.DistributedDataParallel(ours)
    every = list(ours.parameters())
    optimizer = convoy.ShardedOptimizer(
        model, torch.optim.SGD, params=[{"params": every[:2]}, {"params": every[2:], "lr": 0}], lr=0.1,
        max_norm=0.01)
    before = [each.detach().clone() for each in every]
    model(batch(0)).sum().backward()
    loss = optimizer.step(lambda: torch.tensor(3.0))
    assert loss == 3 and optimizer.stats()["norm"] > 0.01
    assert not torch.equal(every[0], before[0]) and torch.equal(every[2], before[2])
    for kind, arguments, text in [(torch.optim.LBFGS, {}, "LBFGS"), (torch.optim.Adam, dict(capturable=True), "capturable")]:
        try:
            convoy.ShardedOptimizer(model, kind, **arguments)
        except convoy.Error as error:
            assert text in str(error), error
        else:
            raise AssertionError(text)
    optimizer.param_groups[0]["lr"] = 0.1 + 0.1 * dist.get_rank()
    model(batch(0)).sum().backward()
    try:
        optimizer.step()
    except convoy.Error as error:
        assert "other options" in str(error), error
    else:
        raise AssertionError("ranks differ")


def refused():
    """What keeps one rank from a step is told to all of them, at once; then the step works."""
    ours, plain = make(), make()
    model = convoy.DistributedDataParallel(ours)
    optimizer = convoy.ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
    model(batch(0, 0)).sum().backward()
    mine = dist.get_rank() == 1
    weight = ours[0].weight
    kept = weight.data

    def freed():  # as is done by those who put parameters away between steps
        weight.data = kept.clone()
        weight.data.untyped_storage().resize_(0)

    def restored():
        weight.data = kept

    group = optimizer.param_groups[0]
    for spoil, repair, text in [
            (lambda: group.update(lr="fast"), lambda: group.update(lr=0.1), "fast"),
            (lambda: group.update(differentiable=True), lambda: group.update(differentiable=False), "differentiable"),
            (lambda: group.pop("momentum"), lambda: group.update(momentum=0), "momentum"),
            (freed, restored, "0.weight")]:
        if mine:
            spoil()
        try:
            optimizer.step()
        except Exception as error:
            assert (text if mine else "rank 1 has refused") in str(error), error
        else:
            raise AssertionError(text)
        if mine:
            repair()
    optimizer.step()
    plain(batch(0, 0)).sum().backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    same(ours, plain)


def writes(path):
    model = convoy.DistributedDataParallel(make())
    optimizer = convoy.ShardedOptimizer(model, torch.optim.AdamW, lr=torch.tensor(0.01))
    for step in range(3):
        model(batch(step, 0)).square().mean().backward()
        optimizer.step()
    # torch's own functions for checkpoints must not disturb it.
    named = get_optimizer_state_dict(model, optimizer)
    assert named["state"]["0.weight"]["step"] == 3 and optimizer.stats()["steps"] == 3
    state = optimizer.state_dict()
    if dist.get_rank() == 0:
        torch.save((model.module.state_dict(), state, named), path)


def reads(path):
    """With another number of ranks."""
    weights, state, named = torch.load(path)
    plain = make()
    plain.load_state_dict(weights)
    reference = torch.optim.AdamW(plain.parameters())
    reference.load_state_dict(state)
    for which in range(2):
        ours = make()
        ours.load_state_dict(weights)
        model = convoy.DistributedDataParallel(ours)
        optimizer = convoy.ShardedOptimizer(model, torch.optim.AdamW, lr=torch.tensor(1.0))
        if which:
            set_optimizer_state_dict(model, optimizer, named)
        else:
            optimizer.load_state_dict(state)
        model(batch(3, 0)).square().mean().backward()
        optimizer.step()
        if not which:
            plain(batch(3, 0)).square().mean().backward()
            reference.step()
        same(ours, plain)
    try:
        optimizer.add_param_group({"params": [torch.zeros(1)]})
    except convoy.Error as error:
        assert "later" in str(error), error
    else:
        raise AssertionError("parameters are divided already")


class Sharded(TestCase):
    def test_trains_as_torchs_do(self):
        for backend in ["convoy", "gloo"]:
            with self.subTest(backend):
                ranks.run(trains_alike, 2, backend=backend)

    def test_checkpoints(self):
        ranks.run(checkpoints, 2)

    def test_groups_and_errors(self):
        ranks.run(groups_and_errors, 2)

    def test_one_rank_refuses(self):
        ranks.run(refused, 2)

    def test_other_numbers_of_ranks(self):
        with ranks.folder() as folder:
            ranks.run(writes, 3, f"{folder}/state")
            ranks.run(reads, 2, f"{folder}/state")

    def test_alone(self):
        ranks.run(checkpoints, 1)


if __name__ == "__main__":
    ranks.main()
