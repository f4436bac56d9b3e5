"""PyTorch's tutorial of a batch-updating parameter server on torch.distributed.rpc, with only the backend changed.

    convoy run -n 3 python examples/python/torch_rpc_ps.py

(or under torchrun; BACKEND=TENSORPIPE runs it on torch's own transport.)
"""

import os
import threading

import torch
import torch.distributed.rpc as rpc

import convoy  # noqa: F401: BackendType.CONVOY

STEPS = 20


class BatchUpdateParameterServer:
    """Waits for the gradients of all trainers, makes one step, and answers all of them with the new model."""

    def __init__(self, trainers: int) -> None:
        torch.manual_seed(1)
        self.model = torch.nn.Linear(8, 1)
        self.lock = threading.Lock()
        self.future_model: torch.futures.Future = torch.futures.Future()
        self.trainers, self.arrived = trainers, 0
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def get_model(self) -> torch.nn.Module:
        return self.model

    @staticmethod
    @rpc.functions.async_execution
    def update_and_fetch_model(server_rref, gradients):
        self = server_rref.local_value()
        with self.lock:
            for parameter, gradient in zip(self.model.parameters(), gradients):
                parameter.grad += gradient / self.trainers
            self.arrived += 1
            future = self.future_model
            if self.arrived == self.trainers:
                self.arrived = 0
                self.optimizer.step()
                for parameter in self.model.parameters():
                    parameter.grad = torch.zeros_like(parameter)
                future.set_result(self.model)
                self.future_model = torch.futures.Future()
        return future


def run_trainer(server_rref, seed: int) -> float:
    generator = torch.Generator().manual_seed(seed)
    model = server_rref.rpc_sync().get_model()
    loss = torch.tensor(0.0)
    for _ in range(STEPS):
        x = torch.randn(32, 8, generator=generator)
        model.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        loss.backward()
        model = rpc.rpc_sync(server_rref.owner(), BatchUpdateParameterServer.update_and_fetch_model,
                             args=(server_rref, [parameter.grad for parameter in model.parameters()]))
    return loss.item()


def main() -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    backend = rpc.BackendType[os.environ.get("BACKEND", "CONVOY")]
    rpc.init_rpc(f"trainer{rank}" if rank else "server", backend=backend, rank=rank, world_size=size)
    if rank == 0:
        server = rpc.RRef(BatchUpdateParameterServer(size - 1))
        futures = [rpc.rpc_async(f"trainer{i}", run_trainer, args=(server, i)) for i in range(1, size)]
        for i, loss in enumerate(torch.futures.wait_all(futures), 1):
            print(f"trainer{i}: loss {loss:.4f}")
    rpc.shutdown()


if __name__ == "__main__":
    main()
