"""The cases of bench_optim.cpp with torch.distributed.optim.DistributedOptimizer, five processes: a line of JSON.

    peer_optim.py [quick]
"""

import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from statistics import median

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch.distributed.optim import DistributedOptimizer

OWNERS = 4


def make_weight():
    return torch.rand(3, 3, requires_grad=True)


def times(weight, x):
    return weight.local_value().mm(x)


def repeat(seconds, once):
    taken, start = [], time.perf_counter()
    while len(taken) < 5 or time.perf_counter() - start < seconds:
        taken.append(1e6 * once())
    return round(median(taken), 3)


def measure(quick):
    seconds = 0.3 if quick else 1.0
    result = {}
    for owners, suffix in ((OWNERS, ""), (1, "_1")):
        weights = [rpc.remote(f"worker{owner}", make_weight) for owner in range(1, owners + 1)]
        optimizer = DistributedOptimizer(torch.optim.SGD, weights, lr=1e-6)
        x = torch.rand(3, 3)

        def loss(weights=weights, x=x):
            parts = [rpc.rpc_async(weight.owner(), times, (weight, x)) for weight in weights]
            return sum(part.wait().sum() for part in parts)

        with dist_autograd.context() as context:
            dist_autograd.backward(context, [loss()])

            def step(optimizer=optimizer, context=context):
                begin = time.perf_counter()
                optimizer.step(context)
                return time.perf_counter() - begin

            result["step" + suffix] = repeat(seconds, step)

        def apart(optimizer=optimizer, loss=loss):
            with dist_autograd.context() as context:
                made = loss()
                begin = time.perf_counter()
                dist_autograd.backward(context, [made])
                optimizer.step(context)
                return time.perf_counter() - begin

        result["apart" + suffix] = repeat(seconds, apart)
    print(json.dumps(result))


def main():
    folder = os.environ.get("BENCH_OPTIM_FOLDER")
    rank = int(os.environ.get("BENCH_OPTIM_RANK", "0"))
    made = None if folder else tempfile.TemporaryDirectory(prefix="convoy-bench.")
    folder = folder or made.name
    os.environ["TP_SOCKET_IFNAME"] = os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    children = []
    if rank == 0:
        for owner in range(1, OWNERS + 1):
            environment = os.environ | {"BENCH_OPTIM_FOLDER": folder, "BENCH_OPTIM_RANK": str(owner)}
            children.append(subprocess.Popen([sys.executable, *sys.argv], env=environment))
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/store", rpc_timeout=300)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=OWNERS + 1, rpc_backend_options=options)
    if rank == 0:
        measure("quick" in sys.argv)
    rpc.shutdown()
    for child in children:
        child.wait(60)


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # TorchScript is deprecated
    torch.set_num_threads(1)
    main()
    sys.stdout.flush()
    os._exit(0)
