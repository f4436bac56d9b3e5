"""convoy.DistributedDataParallel beside torch's own on the same backend: the same numbers."""

import copy
import dataclasses
import io
from unittest import TestCase

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as Torchs
from torch.utils.checkpoint import checkpoint

import convoy
import ranks


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)
        self.second, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, other=False):
        x = self.norm(self.first(x)).relu()
        return self.other(x) if other else self.second(x)


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.first, self.second, self.reentrant = nn.Linear(6, 6), nn.Linear(6, 6), reentrant

    def forward(self, x):
        return checkpoint(self.second, self.first(x), use_reentrant=self.reentrant)


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    extra: dict
    count: int


class Structured(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x):
        return Output(self.a(x), {"more": [self.b(x), "text"]}, 7)


def batch(step=0):
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))


def pair(make, **arguments):
    torch.manual_seed(1 + dist.get_rank())  # ranks begin with rank 0's parameters
    module = make()
    return convoy.DistributedDataParallel(copy.deepcopy(module), **arguments), Torchs(module, **arguments)


def expect_same(ours, theirs):
    for (name, mine), (_, other) in zip(ours.named_parameters(), theirs.named_parameters()):
        assert (mine.grad is None) == (other.grad is None), name
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad, other.grad, msg=lambda text: f"{name}: {text}")
    for (name, mine), (_, other) in zip(ours.named_buffers(), theirs.named_buffers()):
        torch.testing.assert_close(mine, other, msg=lambda text: f"{name}: {text}")


def steps(make, loss=lambda model, x: model(x).square().mean(), count=3, hook=None, **arguments):
    models = pair(make, **arguments)
    if hook:
        for model in models:
            model.register_comm_hook(None, hook)
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
    for step in range(count):
        for model, optimizer in zip(models, optimizers):
            optimizer.zero_grad()
            loss(model, batch(step)).backward()
        expect_same(*models)
        for optimizer in optimizers:
            optimizer.step()


def trains_alike():
    for view in [False, True]:
        steps(lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)),
              gradient_as_bucket_view=view)
        steps(Net, find_unused_parameters=True, gradient_as_bucket_view=view)
        steps(Net, static_graph=True, gradient_as_bucket_view=view)
    steps(lambda: nn.Linear(6, 2), bucket_cap_mb=1e-6)
    steps(lambda: nn.Embedding(10, 4, sparse=False), lambda model, x: model(x.argmax(1)).square().mean())


def accumulates():
    models = pair(lambda: nn.Linear(6, 2))
    for model in models:
        with model.no_sync():
            model(batch(0)).square().mean().backward()
            assert not model.require_backward_grad_sync
        model(batch(1)).square().mean().backward()
    expect_same(*models)
    ours = models[0]
    ours.zero_grad()
    with ours.no_sync():
        ours(batch(0)).square().mean().backward()
    ours.sync_gradients()
    models[1].zero_grad()
    models[1](batch(0)).square().mean().backward()
    expect_same(*models)


def hooks():
    for hook in [default_hooks.allreduce_hook, default_hooks.fp16_compress_hook]:
        steps(lambda: nn.Linear(6, 2), hook=hook)
    seen = []

    def mine(state, bucket):
        assert bucket.gradients()[0].data_ptr() == bucket.buffer().data_ptr()
        assert len(bucket.indices()) == len(bucket.parameters())
        seen.append((state, bucket.index(), bucket.is_last()))
        dist.all_reduce(bucket.buffer())
        return bucket.buffer()

    model = convoy.DistributedDataParallel(nn.Linear(6, 2))
    model.register_comm_hook("state", mine)
    model(batch()).sum().backward()
    assert seen == [("state", 0, True)], seen

    def broken(state, bucket):
        if dist.get_rank() == 1:
            raise ValueError("no way")
        return default_hooks.allreduce_hook(None, bucket)

    model = convoy.DistributedDataParallel(nn.Linear(6, 2))
    model.register_comm_hook(None, broken)
    # The group is not the hook's own, so that the others find out by what rank 1 does instead.
    expect_error("no way" if dist.get_rank() == 1 else "rank 1",
                 lambda: model(batch()).sum().backward())


def expect_error(text, function):
    try:
        function()
    except (RuntimeError, ValueError) as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"no error with '{text}'")


def errors():
    """On every rank, with names; and the next step works."""
    model = convoy.DistributedDataParallel(Net())
    expect_error("other.weight", lambda: model(batch()).sum().backward())

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            if dist.get_rank() == 1 and Fails.armed:
                raise ValueError("this rank cannot")
            return gradient

    model = convoy.DistributedDataParallel(nn.Linear(6, 2))
    x = batch().requires_grad_()
    Fails.armed = True
    expect_error("this rank cannot", lambda: model(Fails.apply(x)).sum().backward())
    Fails.armed = False
    model.zero_grad()
    model(Fails.apply(x)).sum().backward()
    expect_error("weight", lambda: convoy.DistributedDataParallel(nn.Linear(6, 2 + dist.get_rank())))
    expect_error("device_ids", lambda: convoy.DistributedDataParallel(nn.Linear(6, 2), device_ids=[0]))
    expect_error("no parameter or buffer 'nobody'", lambda: convoy.DistributedDataParallel(
        nn.Linear(6, 2), delay_all_reduce_named_params=["nobody"]))


def checkpoints():
    steps(lambda: Checkpointed(False))
    steps(lambda: Checkpointed(True), static_graph=True)


def structures():
    steps(Structured, lambda model, x: (lambda out: (out.logits.sum() + out.extra["more"][0].sum()))(model(x)))
    model = convoy.DistributedDataParallel(Structured())
    out = model(batch())
    assert out.count == 7 and out.extra["more"][1] == "text", out
    with torch.no_grad():
        assert model(batch()).logits.grad_fn is None


def copies():
    module = Net()
    names = ["other.weight", "other.bias", "norm.running_mean"]
    convoy.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)
    module.norm.running_mean += dist.get_rank()
    model = convoy.DistributedDataParallel(module)
    assert module.norm.running_mean[0] == dist.get_rank()
    model(batch()).sum().backward()
    assert list(model.state_dict()) == [f"module.{name}" for name in module.state_dict()]
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for again in [torch.load(file, weights_only=False), copy.deepcopy(model)]:
        again.zero_grad()
        again(batch()).sum().backward()
        torch.testing.assert_close(again.module.first.weight.grad, module.first.weight.grad)


class Ddp(TestCase):
    def test_trains_as_torchs_does(self):
        for backend in ["convoy", "gloo"]:
            with self.subTest(backend):
                ranks.run(trains_alike, 2, backend=backend)

    def test_accumulates(self):
        ranks.run(accumulates, 2)

    def test_hooks(self):
        ranks.run(hooks, 2)

    def test_errors_are_on_all_ranks(self):
        ranks.run(errors, 2)

    def test_checkpoints(self):
        ranks.run(checkpoints, 2)

    def test_structured_outputs(self):
        ranks.run(structures, 2)

    def test_copies_and_ignored_names(self):
        ranks.run(copies, 2)

    def test_a_rank_alone(self):
        ranks.run(accumulates, 1)


if __name__ == "__main__":
    ranks.main()
