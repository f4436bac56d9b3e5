"""torch.distributed on the backend convoy: what programs use, with the values that they expect."""

import copy
import os
import signal
import threading
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from unittest import TestCase

import convoy
import ranks

CPU = torch.device("cpu")


def expect(actual, expected):
    torch.testing.assert_close(actual, expected)


def total(size, start=1.0):
    """The sum over ranks of start + rank."""
    return size * start + size * (size - 1) / 2


def collectives():
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.full((5,), rank + 1.0)
    dist.all_reduce(x)
    expect(x, torch.full((5,), total(size)))
    work = dist.all_reduce(torch.ones(3), async_op=True)
    value = work.get_future().then(lambda future: future.value()[0] * 2).wait()
    expect(value, torch.full((3,), 2.0 * size))

    parts = [torch.empty(2) for _ in range(size)]
    dist.all_gather(parts, torch.full((2,), float(rank)))
    expect(torch.stack(parts)[:, 0], torch.arange(float(size)))
    whole = torch.empty(size * 2)
    dist.all_gather_single(whole, torch.full((2,), float(rank)))
    expect(whole, torch.arange(float(size)).repeat_interleave(2))
    part = torch.empty(3)
    dist.reduce_scatter_single(part, torch.arange(float(size * 3)))
    expect(part, size * torch.arange(rank * 3.0, rank * 3.0 + 3))
    swapped = torch.empty(size)
    dist.all_to_all_single(swapped, torch.full((size,), float(rank)))
    expect(swapped, torch.arange(float(size)))
    dist.barrier()

    answer = [None] * size
    dist.all_gather_object(answer, {"rank": rank, "text": "x" * rank})
    assert answer == [{"rank": r, "text": "x" * r} for r in range(size)], answer
    objects = [f"from {rank}", 7] if rank == 1 else [None, None]
    dist.broadcast_object_list(objects, src=1)
    assert objects == ["from 1", 7], objects
    mine = [None]
    dist.scatter_object_list(mine, [f"for {r}" for r in range(size)] if rank == 0 else None, src=0)
    assert mine == [f"for {rank}"], mine


def messages():
    rank, size = dist.get_rank(), dist.get_world_size()
    after, before = (rank + 1) % size, (rank - 1) % size
    got, large = torch.empty(4), torch.empty(300_000)
    works = dist.batch_isend_irecv([
        dist.P2POp(dist.irecv, large, before),
        dist.P2POp(dist.isend, torch.full((4,), float(rank)), after, tag=1),
        dist.P2POp(dist.irecv, got, before, tag=1),
        dist.P2POp(dist.isend, torch.full((300_000,), rank + 0.5), after),
    ])
    for work in works:
        work.wait()
    expect(got, torch.full((4,), float(before)))
    expect(large, torch.full((300_000,), before + 0.5))
    if rank == 0:
        dist.send(torch.arange(3), 1)
    elif rank == 1:
        x = torch.empty(3, dtype=torch.int64)
        assert dist.recv(x) == 0  # from anyone
        expect(x, torch.arange(3))


def groups():
    rank, size = dist.get_rank(), dist.get_world_size()
    pairs = [dist.new_group([first, first + 1]) for first in range(0, size, 2)]
    mine = pairs[rank // 2]
    x = torch.tensor([float(rank)])
    dist.all_reduce(x, group=mine)
    expect(x, torch.tensor([float(2 * (rank // 2 * 2) + 1)]))

    world = dist.group.WORLD
    half = world.split_group([0, 1], timeout=timedelta(seconds=20), group_name="half")
    assert (half is not None) == (rank < 2)
    if half:
        x = torch.ones(2)
        half.allreduce([x]).wait()
        expect(x, torch.full((2,), 2.0))
        assert type(half._get_backend(CPU)) is convoy.ConvoyBackend
        half.shutdown()
    for wrong in ([0, 99], [0, 0], [-1]):
        try:
            world.split_group(wrong, timeout=timedelta(seconds=20))
        except (convoy.Error, RuntimeError, ValueError):
            continue
        raise AssertionError(f"split_group({wrong}) was accepted")

    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("rows", "columns"))
    x = torch.tensor([float(rank)])
    dist.all_reduce(x, group=mesh["columns"].get_group())
    first = rank // (size // 2) * (size // 2)
    expect(x, torch.tensor([float(sum(range(first, first + size // 2)))]))


def functions():
    rank, size = dist.get_rank(), dist.get_world_size()
    world = dist.group.WORLD
    expect(functional.all_reduce(torch.ones(2), "sum", world).clone(), torch.full((2,), float(size)))
    expect(functional.all_gather_single(torch.tensor([float(rank)]), 0, world).clone(),
           torch.arange(float(size)))
    expect(functional.reduce_scatter_single(torch.arange(float(size)), "avg", 0, world).clone(),
           torch.tensor([float(rank)]))
    results = functional.all_reduce_coalesced([torch.ones(1), torch.ones(2)], "max", world)
    expect([r.clone() for r in results], [torch.ones(1), torch.ones(2)])
    with dist._coalescing_manager(device=CPU, async_ops=True) as manager:
        several = [torch.full((n,), 1.0) for n in (1, 10, 1000)]
        for x in several:
            dist.all_reduce(x)
    manager.wait()
    for x in several:
        expect(x, torch.full_like(x, size))


def model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 4))


def batches(size):
    torch.manual_seed(1)
    return torch.randn(3, size, 8, 16)


def train(net, data):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for batch in data:
        optimizer.zero_grad()
        net(batch).pow(2).mean().backward()
        optimizer.step()
    return net


def alone(size):
    """The same training on one process, with the batches of all ranks."""
    return train(model(), batches(size).flatten(1, 2))


def data_parallel():
    rank, size = dist.get_rank(), dist.get_world_size()
    expected = list(alone(size).parameters())
    for view in (False, True):
        net = DistributedDataParallel(model(rank), gradient_as_bucket_view=view, bucket_cap_mb=0.001)
        train(net, batches(size)[:, rank])
        if view:  # the models of ranks began differently: rank 0's counts
            expect(list(net.module.parameters()), expected)
    sharded = model()
    for layer in sharded:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(sharded)
    train(sharded, batches(size)[:, rank])
    expect([p.full_tensor() for p in sharded.parameters()], expected)


def tensor_parallel():
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    net, data = model(), batches(1)[0, 0]
    expected = net(data)
    expected.sum().backward()
    parallel = parallelize_module(copy.deepcopy(net), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    result = parallel(data)
    expect(result, expected)
    result.sum().backward()
    expect(parallel[0].weight.grad.full_tensor(), net[0].weight.grad)

    x = torch.arange(24.0).view(6, 4)
    sharded = distribute_tensor(x, mesh, [Shard(0)])
    expect(sharded.redistribute(mesh, [Shard(1)]).full_tensor(), x)
    expect(sharded.redistribute(mesh, [Replicate()]).to_local(), x)
    flags = DTensor.from_local(torch.tensor([rank == 1]), mesh, [Shard(0)])
    assert bool(flags.any().full_tensor()) and not bool(flags.all().full_tensor())


def whole_use():
    collectives()
    messages()
    groups()
    functions()
    data_parallel()
    tensor_parallel()
    backend = dist.group.WORLD._get_backend(CPU)
    assert dist.get_backend() == "convoy" and type(backend) is convoy.ConvoyBackend
    assert backend.options._timeout == timedelta(seconds=ranks.LIMIT / 2), backend.options._timeout
    expect(backend.allocate_tensor(3, dtype=torch.float32, device=CPU).shape, torch.Size([3]))


def with_options(rendezvous):
    dist.init_process_group("cpu:convoy", rendezvous, rank=ranks.rank(), world_size=2,
                            pg_options=convoy.Options(threads=2, read_private=False))
    options = dist.group.WORLD._get_backend(CPU).options
    assert (options.threads, options.read_private) == (2, False)
    x = torch.ones(100_000)
    dist.all_reduce(x)
    expect(x, torch.full((100_000,), 2.0))


def wrapped(rendezvous):
    """TORCH_DISTRIBUTED_DEBUG=DETAIL puts a wrapper of torch's around the backend."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    dist.init_process_group("convoy", rendezvous, rank=ranks.rank(), world_size=2)
    collectives()


def again(path):
    """Groups of the same name, one after the other, in one store."""
    store = dist.FileStore(path, 2)
    for turn in range(3):
        dist.init_process_group("convoy", store=store, rank=ranks.rank(), world_size=2)
        dist.new_group([turn % 2])
        x = torch.ones(2)
        dist.all_reduce(x, group=dist.new_group([0, 1]))
        expect(x, torch.full((2,), 2.0))
        dist.destroy_process_group()


def dies_before_a_group():
    """Of a rank that ends before it comes to a group of some of the ranks, the default group knows."""
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if dist.get_rank() == 2:
        return ""
    try:
        dist.new_group([0, 1], timeout=timedelta(seconds=300))  # longer than the test may take
    except convoy.Error as error:
        return str(error)
    return "nothing was raised"


def objects_of_dist2(path):
    rank = ranks.rank()
    store = dist.FileStore(path, 2)
    made = {"store": store, "rank": rank, "world_size": 2, "timeout": timedelta(seconds=20)}
    first, second = convoy.new_group(**made), convoy.new_group("gloo", **made)
    third = convoy.new_group("convoy", **made, name="third", threads=2)
    for group in (first, second, third):
        x = torch.ones(3)
        group.allreduce(x).wait()
        expect(x, torch.full((3,), 2.0))
    try:
        convoy.current_group()
    except convoy.Error as error:
        assert error.kind == "invalid argument"
    else:
        raise AssertionError("there is no current group")
    with convoy.process_group(first):
        assert convoy.current_group() is first
        try:
            with convoy.process_group(third):
                assert convoy.current_group() is third
                raise KeyError
        except KeyError:
            assert convoy.current_group() is first
        seen = []
        thread = threading.Thread(target=lambda: seen.append(dist._dist2.current_process_group()))
        thread.start()
        thread.join(20)
        assert seen == [None], "the current group is the thread's"
    for wrong, error in ((lambda: convoy.new_group("nobody", **made), ValueError),
                         (lambda: convoy.new_group(**made, no_such_option=1), TypeError),
                         (lambda: convoy.Options(2), TypeError),
                         (lambda: convoy.Options(threads="two"), TypeError),
                         (lambda: convoy.new_group(**made, device="meta"), convoy.Error)):
        try:
            wrong()
        except error as caught:
            if error is TypeError:  # says what there is
                assert "threads (int), read_private (bool), compare_shapes (bool)" in str(caught), caught
            continue
        raise AssertionError(f"no {error}")


def no_time_for_a_barrier():
    """As Gloo says it, also if the other rank has left meanwhile."""
    if dist.get_rank() == 0:
        try:
            dist.group.WORLD.monitored_barrier(timedelta(0))
        except convoy.Error as error:
            return error.kind, "Rank 0 timed out in monitoredBarrier" in str(error)
    else:
        dist.destroy_process_group()


def forms_of_futures():
    """What the future of an operation with several lists holds."""
    rank, size = dist.get_rank(), dist.get_world_size()
    world = dist.group.WORLD._get_backend(CPU)
    forms = []
    inputs = [torch.full((2,), 10.0 * rank + i) for i in range(2)]
    outputs = [[torch.empty(2) for _ in range(2 * size)] for _ in inputs]
    forms.append(world.allgather(outputs, inputs).get_future().wait())
    outputs = [[torch.empty(2) for _ in inputs] for _ in range(size)]
    forms.append(world.allgather_coalesced(outputs, inputs).get_future().wait())
    parts = [torch.empty(2) for _ in range(size)]
    forms.append(world.allgather([parts], [inputs[0]]).get_future().wait())
    return torch.utils._pytree.tree_map(lambda tensor: tensor.tolist(), forms)


def shared_windows():
    rank, size = dist.get_rank(), dist.get_world_size()
    window = convoy.window(convoy.allocate(4).fill_(rank))
    assert (window.rank(), window.size()) == (rank, size)
    after, before = (rank + 1) % size, (rank - 1) % size
    window.put(after, torch.full((2,), 10.0 + rank), 1)
    window.signal(after)
    window.wait_signal(before, 60)
    expect(window.at(rank), torch.tensor([rank, 10.0 + before, 10.0 + before, rank]))
    window.fence()
    expect(window.at(after)[0].item(), float(after))
    try:
        convoy.window(torch.ones(4))
    except convoy.Error as error:
        assert error.kind == "invalid argument", error
    else:
        raise AssertionError("private memory was accepted")
    done = [entry["profiling_name"] for entry in convoy.flight_record()["entries"]]
    assert "gloo:barrier" in done, done


class UseTest(TestCase):
    def test_windows_and_the_flight_record(self):
        ranks.run(shared_windows, 2)

    def test_futures_have_the_form_of_gloos(self):
        ours = ranks.run(forms_of_futures, 2)
        self.assertEqual(ours, ranks.run(forms_of_futures, 2, backend="gloo"))

    def test_a_monitored_barrier_of_no_time(self):
        self.assertEqual(ranks.run(no_time_for_a_barrier, 2)[0], ("timeout", True))

    def test_everything_on_four_ranks(self):
        ranks.run(whole_use, 4)

    def test_the_debug_wrapper(self):
        with ranks.folder() as path:
            ranks.run(wrapped, 2, f"file://{path}/store", backend=None)

    def test_options_and_device_names(self):
        with ranks.folder() as path:
            ranks.run(with_options, 2, f"file://{path}/store", backend=None)

    def test_a_death_before_a_group(self):
        text, dead, _ = ranks.run_all(dies_before_a_group, 3)
        self.assertIsInstance(dead, ranks.Died)
        self.assertIn("rank 1 (pid ", text)
        self.assertIn("SIGKILL", text)

    def test_a_store_serves_again(self):
        with ranks.folder() as path:
            ranks.run(again, 2, f"{path}/store", backend=None)

    def test_groups_as_objects(self):
        with ranks.folder() as path:
            ranks.run(objects_of_dist2, 2, f"{path}/store", backend=None)


if __name__ == "__main__":
    ranks.main()
