"""convoy.DistributedDataParallel beside torch's own on the same backend: the same numbers."""

import copy
import dataclasses
import inspect
import io
import os
import pickle
import signal
from unittest import TestCase

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook as power_sgd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as Torchs, distributed as torchs
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


class Strange(nn.Linear):
    """Its output cannot be taken apart."""

    def __init__(self):
        super().__init__(6, 2)

    def forward(self, x):
        self.output = Refuses(super().forward(x), {}, 0)
        return self.output


@dataclasses.dataclass
class Refuses(Output):
    def __copy__(self):
        raise ValueError("no members")


def batch(step=0, rank=None):
    rank = dist.get_rank() if rank is None else rank
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(100 * step + rank))


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
    # They wait in their callbacks for more operations of the group.
    for hook in [power_sgd.powerSGD_hook, default_hooks.fp16_compress_wrapper(power_sgd.powerSGD_hook)]:
        models = pair(lambda: nn.Linear(6, 40))
        for model in models:
            model.register_comm_hook(power_sgd.PowerSGDState(None, 1, 2), hook)
        for _ in range(4):
            for model in models:
                model.zero_grad()
                model(batch()).square().mean().backward()
            expect_same(*models)
    # Ours, of rank 1, so that its approximation is exact.
    models = pair(lambda: nn.Linear(6, 40, bias=False))
    models[0].reducer.register_power_sgd(matrix_approximation_rank=1, start_iter=2, min_compression_rate=2,
                                         use_error_feedback=True, warm_start=True, epsilon=0, random_seed=0)
    for _ in range(4):
        for model in models:
            model.zero_grad()
            (model(torch.ones(1, 6)) * (1 + dist.get_rank())).sum().backward()
        expect_same(*models)
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


def hooks_in_order(kind):
    """Hooks whose callbacks communicate, over many buckets: ranks must issue in the same order."""
    all = []
    # batched_powerSGD_hook of torch 2.13 gives this function matrices that it does not take.
    takes_batches = power_sgd._orthogonalize
    power_sgd._orthogonalize = lambda given, *more: takes_batches(given.view(-1, *given.shape[-2:]), *more)
    for hook in [power_sgd.powerSGD_hook, power_sgd.batched_powerSGD_hook,
                 default_hooks.fp16_compress_wrapper(power_sgd.powerSGD_hook)]:
        torch.manual_seed(3)
        module = nn.Sequential(nn.Linear(6, 24), *[nn.Sequential(nn.Linear(24, 24), nn.Tanh()) for _ in range(12)])
        model = kind(module, bucket_cap_mb=1e-4)
        model.register_comm_hook(power_sgd.PowerSGDState(None, 1, 2), hook)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(8):
            optimizer.zero_grad()
            model(batch(step)).square().mean().backward()
            optimizer.step()
        all += [each.detach().clone() for each in module.parameters()]
    return torch.cat([each.flatten() for each in all]).tolist()


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


class Throws(nn.Module):
    """A model with buffers whose forward may throw."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)

    def forward(self, x, throws=False):
        x = self.norm(self.first(x))
        if throws:
            raise ValueError("boom")
        return self.second(x.relu())


def goes_on(fault, hook):
    """One rank does not come to a backward: all raise for that batch, and training goes on without it."""
    rank, culprit, bad = dist.get_rank(), 1, 2
    torch.manual_seed(3)
    module = Throws()
    start = copy.deepcopy(module)
    model = convoy.DistributedDataParallel(module)
    if hook:
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    texts = []
    for step in range(5):
        fails = rank == culprit and step == bad
        optimizer.zero_grad()
        text = ""
        try:
            y = model(batch(step), throws=fails and fault == "forward")
            if fails and fault == "loss":
                raise ValueError("boom")
            y.square().mean().backward()
            optimizer.step()
        except (ValueError, RuntimeError) as error:
            text = str(error)
        texts.append(text)
    assert [bool(text) for text in texts] == [step == bad for step in range(5)], texts
    if rank == culprit:
        assert texts[bad] == "boom", texts
    else:
        assert f"rank {culprit}: " in texts[bad] and "\n" not in texts[bad], texts
        expected = "forward 3 threw: ValueError: boom" if fault == "forward" else "left out"
        assert expected in texts[bad], texts
    # As if nobody had had that batch.
    alone = torch.optim.SGD(start.parameters(), 0.1)
    size = dist.get_world_size()
    for step in range(5):
        if step == bad:
            continue
        alone.zero_grad()
        for other in range(size):
            (start(batch(step, other)).square().mean() / size).backward()
        alone.step()
    for ours, theirs in zip(module.parameters(), start.parameters()):
        torch.testing.assert_close(ours, theirs)


def go_on():
    for fault in ["forward", "loss"]:
        for hook in [False, True]:
            goes_on(fault, hook)


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


def copies_alone():
    """One rank copies, writes and reads; all go on. Who trains a copy makes its reducer, all ranks together."""
    torch.manual_seed(1)
    half = torch.bfloat16
    model = convoy.DistributedDataParallel(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)))
    low = convoy.DistributedDataParallel(nn.Linear(6, 2), mixed_precision=convoy.MixedPrecision(half))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def train(model):
        for step in range(2):
            model.zero_grad()
            model(batch(step)).square().mean().backward()
            optimizer.step()

    def expect_equal(model):
        for each in [*model.parameters(), *(each.grad for each in model.parameters())]:
            all = [torch.empty_like(each) for _ in range(dist.get_world_size())]
            dist.all_gather(all, each.detach())
            assert all[0].equal(all[-1])

    train(model)
    if dist.get_rank() == 0:
        kept = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.deepcopy(low)]
        for each in kept:
            each.eval()
            with torch.no_grad():
                assert each(batch()).dtype == (half if each is kept[2] else torch.float)
            each._check_reducer_finalized()
            assert each.require_backward_grad_sync and list(each.state_dict())
            again = copy.deepcopy(each)
            again.load_state_dict(each.state_dict())
        assert kept[0].module[0].weight.equal(model.module[0].weight)
        assert all(each._core is None for each in kept)  # nothing that other models have to wait for
    train(model)
    expect_equal(model)
    twin, other, third = copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.deepcopy(low)
    twin.register_comm_hook(None, default_hooks.allreduce_hook)
    for each in [twin, other]:
        train(each)
        expect_equal(each)
        torch.testing.assert_close(each.module[0].weight.grad, twin.module[0].weight.grad)
    third(batch()).sum().backward()
    assert third.module.weight.dtype == torch.float
    expect_equal(third)
    sharded = convoy.ShardedOptimizer(third, torch.optim.SGD, lr=0.1, in_backward=True)
    fourth = pickle.loads(pickle.dumps(third))
    for _ in range(2):
        third(batch()).sum().backward()
        assert third.module.weight.grad is None
    assert sharded.stats()["steps"] == 2
    fourth(batch()).sum().backward()
    assert fourth.module.weight.grad is not None
    # Without a core it joins those who have one, or others like it.
    fifth = copy.deepcopy(model)
    fifth.update_process_group(dist.new_group([0, 1]))
    train(fifth)
    expect_equal(fifth)
    fifth._remove_autograd_hooks()
    assert list(fifth.state_dict())
    expect_error("hooks were removed", lambda: fifth.reducer)


def mixed_precision():
    half, full = torch.bfloat16, torch.float32
    reference = Net().to(half).requires_grad_()
    for given in [convoy.MixedPrecision(param_dtype=half, reduce_dtype=full, buffer_dtype=half),
                  torchs._MixedPrecision(param_dtype=half, reduce_dtype=full, buffer_dtype=half)]:
        module = Net()
        model = convoy.DistributedDataParallel(module, mixed_precision=given, find_unused_parameters=True)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        reference.load_state_dict(module.state_dict())
        assert module.norm.running_mean.dtype == half and module.norm.num_batches_tracked.dtype == torch.long
        for step in range(2):
            # What both ranks compute, in this process.
            reference.load_state_dict(module.state_dict())
            reference.zero_grad()
            size = dist.get_world_size()
            for rank in range(size):
                x = torch.randn(5, 6, generator=torch.Generator().manual_seed(100 * step + rank)).to(half)
                (reference(x).square().mean() / size).backward()
            optimizer.zero_grad()
            output = model(batch(step))
            assert output.dtype == half and module.first.weight.dtype == half
            output.square().mean().backward()
            assert module.first.weight.dtype == full and module.first.weight.grad.dtype == full
            torch.testing.assert_close(module.first.weight.grad, reference.first.weight.grad.to(full),
                                       rtol=0.1, atol=0.02)
            optimizer.step()
        # Whatever happens, parameters are themselves again.
        model(batch())
        assert model.state_dict()["module.first.weight"].dtype == full
        with torch.no_grad():
            assert model(batch()).dtype == half
        assert module.first.weight.dtype == full
        expect_error("shapes", lambda: model(batch()[:, :3]))
        assert module.first.weight.dtype == full
        # Also if it is not forward that fails.
        for place in [torchs._BufferCommHookLocation.PRE_FORWARD, torchs._BufferCommHookLocation.POST_FORWARD]:
            model = convoy.DistributedDataParallel(module, mixed_precision=given, find_unused_parameters=True)

            def fails(state, buffers):
                raise ValueError("no buffers today")

            model._register_buffer_comm_hook(None, fails, place)
            expect_error("no buffers today", lambda: model(batch()))
            assert module.first.weight.dtype == full
        expect_error("no members", lambda: convoy.DistributedDataParallel(Strange(), mixed_precision=given)(batch()))
    expect_error("keep_low_precision_grads", lambda: convoy.DistributedDataParallel(
        nn.Linear(6, 2), mixed_precision=fsdp.MixedPrecision(half, keep_low_precision_grads=True)))
    expect_error("not a floating-point type", lambda: convoy.DistributedDataParallel(
        nn.Linear(6, 2), mixed_precision=convoy.MixedPrecision(torch.int32)))


def other_groups():
    """Rank 2 joins ranks 0 and 1, and leaves them again."""
    rank = dist.get_rank()
    pair_of, alone = dist.new_group([0, 1]), dist.new_group([2])
    torch.manual_seed(rank)
    module = nn.Sequential(nn.Linear(6, 40), nn.BatchNorm1d(40), nn.Linear(40, 2))
    model = convoy.DistributedDataParallel(module, process_group=alone if rank == 2 else pair_of)
    optimizer = convoy.ShardedOptimizer(model, torch.optim.AdamW, lr=0.01)

    def train(first):
        for step in range(first, first + 3):
            model(batch(step)).square().mean().backward()
            optimizer.step()

    def expect_equal(group, size, tensors):
        for each in [*tensors, *optimizer.state_dict()["state"][0].values()]:
            all = [torch.empty_like(each) for _ in range(size)]
            dist.all_gather(all, each.detach(), group=group)
            assert all[0].equal(all[-1])

    if rank != 2:
        train(0)
        weight = module[0].weight.detach().clone()
    model.update_process_group(dist.group.WORLD)
    if rank != 2:
        assert module[0].weight.equal(weight)
    expect_equal(dist.group.WORLD, 3, model.state_dict().values())
    train(3)
    expect_equal(dist.group.WORLD, 3, model.parameters())
    assert module[1].num_batches_tracked == 6
    model._update_process_group(pair_of)
    if rank != 2:
        assert model.process_group is pair_of
        train(6)
        expect_equal(pair_of, 2, model.parameters())
        expect_error("default group", lambda: pickle.dumps(model))
        assert copy.deepcopy(model.module)[0].weight.equal(module[0].weight)


def dies():
    """Rank 1 is killed; the others go on, with its part of the optimizer's state."""
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(6, 300), nn.Tanh(), nn.Linear(300, 2))
    model = convoy.DistributedDataParallel(module)
    optimizer = convoy.ShardedOptimizer(model, torch.optim.AdamW, lr=0.01)
    group = dist.group.WORLD
    step = 0
    while step < 6:
        if step == 3 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            model(batch(step)).square().mean().backward()
            optimizer.step()
            step += 1
        except RuntimeError as error:
            assert step == 3 and "rank 1" in str(error), error
            group = convoy.shrink_group(group)
            model.update_process_group(group)
    assert group.size() == 2 and group.rank() == dist.get_rank() // 2
    state = optimizer.state_dict()["state"]
    assert len(state) == 4 and all(each["step"] == 6 for each in state.values())
    return [each.tolist() for each in module.parameters()]


def names():
    """What torch's class can be asked for."""
    ours, theirs = convoy.DistributedDataParallel, Torchs
    assert list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters)
    # For GPUs; all else that is missing is torch's own machinery.
    missing = {name for name in {*dir(theirs)} - {*dir(ours)} if not name.startswith("_")}
    assert missing == {"scatter", "gather", "to_kwargs"}, missing
    model = ours(Net(), static_graph=True, broadcast_buffers=False)
    assert isinstance(model, theirs) and not model.broadcast_buffers and model.static_graph
    for arguments, text in [(dict(output_device=0), "output_device"), (dict(dim=1), "dim"),
                            (dict(param_to_hook_all_reduce=nn.Parameter()), "param_to_hook"),
                            (dict(device_mesh=init_device_mesh("cpu", (2, 1))), "1D")]:
        try:
            ours(Net(), **arguments)
        except ValueError as error:
            assert text in str(error), error
        else:
            raise AssertionError(text)
    expect_error("SyncBatchNorm", lambda: ours(nn.SyncBatchNorm(3)))
    # Attributes that programs set.
    model = ours(nn.Linear(6, 2), device_mesh=init_device_mesh("cpu", (2,)))
    model.require_backward_grad_sync = False
    model(batch(dist.get_rank())).sum().backward()
    assert not model.require_backward_grad_sync and not model.will_sync_module_buffers()
    model.require_backward_grad_sync = True
    model._set_ddp_runtime_logging_sample_rate(1)
    model(batch(0)).sum().backward()
    model._check_reducer_finalized()
    data = model._get_ddp_logging_data()
    assert data["iteration"] == 0 and data["module_name"] == "Linear" and data["bucket_sizes"] == "56", data
    expect_error("before training loop starts", model._set_static_graph)
    assert "before training loop starts" in model._get_ddp_logging_data()["error"]
    # Buffers that broadcast_buffers=False leaves alone from the start.
    module = nn.BatchNorm1d(6)
    module.running_mean += dist.get_rank()
    ours(module, broadcast_buffers=False)
    assert module.running_mean[0] == dist.get_rank()
    ours(module, forward_sync_buffers=False)
    assert module.running_mean[0] == 0
    # Replaced buffers are found.
    module.running_mean = torch.full((6,), 10.0 + dist.get_rank())
    model = ours(module, init_sync=False)
    model._sync_buffers()
    assert module.running_mean[0] == 10
    module.running_mean = torch.full((6,), 20.0 + dist.get_rank())
    model(batch())
    assert 17 < module.running_mean[0] < 19, module.running_mean
    # The module can be wrapped again.
    module = nn.Linear(6, 2)
    first = ours(module)
    first._remove_autograd_hooks()
    first(batch(0)).sum().backward()
    module.zero_grad()
    ours(module)(batch(0)).sum().backward()


def optimizers_in_backward():
    built_in = dist.BuiltinCommHookType
    for hook in [built_in.ALLREDUCE, built_in.FP16_COMPRESS, "BF16_COMPRESS"]:
        models = pair(lambda: nn.Linear(6, 2))
        models[0]._register_builtin_comm_hook(hook)
        for model in models:
            model(batch()).square().mean().backward()
        torch.testing.assert_close(models[0].module.weight.grad, models[1].module.weight.grad,
                                   rtol=0.02, atol=0.01)

    def wrapped(make_it):
        torch.manual_seed(1)
        module = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))
        plain = convoy.DistributedDataParallel(copy.deepcopy(module))
        reference = torch.optim.AdamW(plain.parameters(), lr=0.01)
        model = make_it(module)
        for step in range(3):
            model(batch(step)).square().mean().backward()
            reference.zero_grad()
            plain(batch(step)).square().mean().backward()
            reference.step()
        for mine, other in zip(model.parameters(), plain.parameters()):
            torch.testing.assert_close(mine, other)
        return model

    def applied(module):
        _apply_optimizer_in_backward(torch.optim.AdamW, module.parameters(), dict(lr=0.01))
        return convoy.DistributedDataParallel(module)

    def fused(module):
        model = convoy.DistributedDataParallel(module)
        model._register_fused_optim(torch.optim.AdamW, lr=0.01)
        model.register_forward_pre_hook(lambda model, _: model.zero_grad())
        return model

    model = wrapped(applied)
    assert all(each.grad is None for each in model.parameters())
    wrapped(fused)


def tensor_parallel():
    """Over one dimension of a mesh, whose other one splits the parameters."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    results = []
    for kind in [convoy.DistributedDataParallel, Torchs]:
        torch.manual_seed(3)
        module = parallelize_module(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)), mesh["tensor"],
                                    {"0": ColwiseParallel(), "2": RowwiseParallel()})
        model = kind(module, device_mesh=mesh["data"])
        parameters = list(model.parameters())  # torch hides them after forward
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(mesh["data"].get_local_rank()))
        model(x).square().mean().backward()
        results.append([each.grad for each in parameters])
    assert len(results[0]) == 4 and results[0][0].shape == (4, 6)
    torch.testing.assert_close(*results)


def several(*functions):
    for function in functions:
        function()


def changed_modules():
    """Parameters that come after wrapping would be trained by each rank for itself."""
    rank = dist.get_rank()
    for options in [{}, {"find_unused_parameters": True}]:
        module = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))
        model = convoy.DistributedDataParallel(module, **options)
        model(batch()).sum().backward()

        def text():
            try:
                model(batch()).sum().backward()
            except convoy.Error as error:
                return str(error)
            raise AssertionError("nothing was raised")

        module.append(nn.Linear(2, 2))
        assert "added 2.weight, 2.bias" in text() and f"rank {rank} of 2" in text(), text()
        assert "find_unused_parameters" not in text(), text()
        with torch.no_grad():
            assert model(batch()).shape[1] == 2
        module.pop(2)
        model(batch()).sum().backward()
        first = module[1].weight
        module[1].weight = nn.Parameter(first.detach().clone())
        assert "replaced 1.weight)" in text() and "find_unused_parameters" not in text(), text()
        module[1].weight = first
        model(batch()).sum().backward()
        module[0] = nn.Linear(6, 4)
        assert "replaced 0.weight, 0.bias" in text(), text()
        module.register_parameter("late", nn.Parameter(torch.ones(1)))
        assert "added late" in text(), text()
        again = convoy.DistributedDataParallel(module, find_unused_parameters=True)
        module.zero_grad()
        again(batch()).sum().backward()
        mean = module[0].weight.grad.clone()
        dist.all_reduce(mean)
        torch.testing.assert_close(mean / 2, module[0].weight.grad)

    class LateImpl(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.late = nn.Linear(6, 2), None

        def forward(self, x):
            self.late = self.late or nn.Linear(2, 2)
            return self.late(self.first(x))

    model = convoy.DistributedDataParallel(LateImpl(), find_unused_parameters=True)
    expect_error("added late.weight, late.bias", lambda: model(batch()))


class Ddp(TestCase):
    def test_trains_as_torchs_does(self):
        for backend in ["convoy", "gloo"]:
            with self.subTest(backend):
                ranks.run(trains_alike, 2, backend=backend)

    def test_accumulates(self):
        ranks.run(accumulates, 2)

    def test_hooks(self):
        ranks.run(hooks, 2)

    def test_hooks_that_communicate_in_callbacks(self):
        ours = ranks.run(hooks_in_order, 2, convoy.DistributedDataParallel)
        self.assertEqual(ours[0], ours[1])
        theirs = ranks.run(hooks_in_order, 2, convoy.DistributedDataParallel, backend="gloo")
        torch.testing.assert_close(torch.tensor(ours[0]), torch.tensor(theirs[0]), rtol=1e-4, atol=1e-5)

    def test_errors_are_on_all_ranks(self):
        ranks.run(errors, 2)

    def test_exceptions_on_one_rank(self):
        ranks.run(go_on, 3)

    def test_checkpoints(self):
        ranks.run(checkpoints, 2)

    def test_structured_outputs(self):
        ranks.run(structures, 2)

    def test_copies_and_ignored_names(self):
        ranks.run(several, 2, copies, copies_alone)

    def test_names_and_optimizers(self):
        ranks.run(several, 2, mixed_precision, names, optimizers_in_backward)

    def test_changed_modules(self):
        ranks.run(changed_modules, 2)

    def test_a_death(self):
        first, dead, last = ranks.run_all(dies, 3)
        self.assertIsInstance(dead, ranks.Died)
        self.assertIsInstance(first, list, first)
        self.assertEqual(first, last)

    def test_tensor_parallel(self):
        ranks.run(tensor_parallel, 4)

    def test_other_groups(self):
        ranks.run(other_groups, 3)

    def test_a_rank_alone(self):
        ranks.run(accumulates, 1)


if __name__ == "__main__":
    ranks.main()
