"""A parameter server: one worker has the layers, the others train on them, with gradients across workers.

    convoy run -n 3 python examples/python/rpc_ps.py

No pickle: functions are registered, and arguments are checked against their type hints.
"""

import torch

import convoy.rpc
from convoy.rpc import RRef


class Server:
    """The weights, and SGD on them. Trainers call it at the same time."""

    def __init__(self, inputs: int, outputs: int, lr: float) -> None:
        torch.manual_seed(1)
        self.layer = torch.nn.Linear(inputs, outputs)
        self.lr = lr
        self.steps = 0

    @convoy.rpc.function
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)

    @convoy.rpc.function
    def weights(self) -> list[torch.Tensor]:
        return [parameter.detach() for parameter in self.layer.parameters()]

    @convoy.rpc.function
    def apply(self, gradients: list[torch.Tensor]) -> int:
        with torch.no_grad():
            for parameter, gradient in zip(self.layer.parameters(), gradients):
                parameter -= self.lr * gradient
        self.steps += 1
        return self.steps


@convoy.rpc.function
def make_server(inputs: int, outputs: int, lr: float) -> Server:
    return Server(inputs, outputs, lr)


@convoy.rpc.function
def train(server: RRef[Server], steps: int, seed: int) -> float:
    """Runs on a trainer; the server is elsewhere."""
    generator = torch.Generator().manual_seed(seed)
    loss = torch.tensor(0.0)
    for _ in range(steps):
        x = torch.randn(32, 8, generator=generator)
        target = x.sum(1, keepdim=True)
        weight, bias = (tensor.requires_grad_() for tensor in server.rpc_sync("Server::weights"))
        loss = torch.nn.functional.mse_loss(torch.nn.functional.linear(x, weight, bias), target)
        loss.backward()
        server.rpc_sync("Server::apply", [weight.grad, bias.grad])
    return loss.item()


def main() -> None:
    with convoy.rpc.Session() as rpc:  # worker0, worker1, ... of `convoy run`
        workers = rpc.workers()
        if rpc.worker().rank == 0:
            server = rpc.remote("worker0", make_server, 8, 1, 0.05)
            losses = [rpc.rpc_async(name, train, server, 40, rank) for name, rank in workers[1:]]
            for (name, _), loss in zip(workers[1:], losses):
                print(f"{name}: loss {loss.wait():.4f}")
            # Gradients may also flow through the calls themselves.
            with rpc.context() as context:
                x = torch.ones(1, 8, requires_grad=True)
                context.backward(server.rpc_sync("Server::forward", x).sum())
                print("the weights, as a gradient:", [round(value, 1) for value in context.gradients()[x][0].tolist()])


if __name__ == "__main__":
    main()
