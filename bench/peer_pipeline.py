"""The real stages of bench_pipeline.cpp with torch.distributed.pipelining on Gloo, three processes: a line of JSON.

    peer_pipeline.py [quick]
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from statistics import median

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

STAGES, MICRO_BATCHES, WIDTH, BATCH = 3, 8, 1024, 512


def measure(rank, schedule_type, quick):
    net = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH))
    stage = PipelineStage(net, rank, STAGES, torch.device("cpu"))
    schedule = schedule_type(stage, MICRO_BATCHES, loss_fn=torch.nn.functional.mse_loss)
    x, target = torch.rand(BATCH, WIDTH), torch.rand(BATCH, WIDTH)

    def step():
        if rank == 0:
            schedule.step(x)
        elif rank == STAGES - 1:
            schedule.step(target=target, losses=[])
        else:
            schedule.step()

    step()
    times = []
    for _ in range(5 if quick else 20):
        dist.barrier()
        start = time.perf_counter()
        step()  # the first stage is the last to be done
        times.append(1e6 * (time.perf_counter() - start))
    return round(median(times), 3)


def main():
    folder = os.environ.get("BENCH_PIPELINE_FOLDER")
    rank = int(os.environ.get("BENCH_PIPELINE_RANK", "0"))
    made = None if folder else tempfile.TemporaryDirectory(prefix="convoy-bench.")
    folder = folder or made.name
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    children = []
    if rank == 0:
        for other in range(1, STAGES):
            more = {"BENCH_PIPELINE_FOLDER": folder, "BENCH_PIPELINE_RANK": str(other)}
            children.append(subprocess.Popen([sys.executable, *sys.argv], env=os.environ | more))
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=STAGES)
    quick = "quick" in sys.argv
    times = {"real_gpipe": measure(rank, ScheduleGPipe, quick), "real_1f1b": measure(rank, Schedule1F1B, quick)}
    if rank == 0:
        print(json.dumps(times))
    dist.barrier()
    for child in children:
        child.wait(60)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
    sys.stdout.flush()
    os._exit(0)
