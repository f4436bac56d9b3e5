"""Actors fill trajectories, a learner trains on them and publishes its weights; one of the actors is
killed, and started again.

    python examples/python/actors.py                     actors and learner in Python
    actors python3 examples/python/actors.py             the learner of examples/actors.cpp
"""

import os
import signal
import sys

import torch
from torch import nn

import convoy

ACTORS, STEPS, UPDATES = 2, 64, 400


class Policy(nn.Module):
    """Of two numbers, which is the larger?"""

    def __init__(self):
        super().__init__()
        self.hidden, self.output = nn.Linear(2, 16), nn.Linear(16, 2)

    def forward(self, states):
        return self.output(self.hidden(states).tanh())


@torch.no_grad()
def act(index, slots, weights):
    """In each actor's process, until the learner closes the slots."""
    policy = Policy()
    while slot := slots.fill(timeout=60):
        version = weights.load_into(policy)  # the newest, whole
        states = torch.rand(STEPS, 2)
        actions = policy(states).softmax(1).multinomial(1).squeeze(1)
        slot["states"].copy_(states)
        slot["actions"].copy_(actions)
        slot["rewards"].copy_(actions == states.argmax(1))
        slot["version"].fill_(version)
        slot.commit()


def loss_of(policy, slot):
    chosen = policy(slot["states"]).log_softmax(1).gather(1, slot["actions"].unsqueeze(1)).squeeze(1)
    return -(chosen * (slot["rewards"] - 0.5)).mean()


def learn():
    policy = Policy()
    adam = torch.optim.Adam(policy.parameters(), 0.01)
    weights = convoy.Published(policy, buffers=ACTORS + 2)
    slots = convoy.Slots(2 * ACTORS, {"states": ((STEPS, 2), torch.float32), "actions": ((STEPS,), torch.int64),
                                      "rewards": ((STEPS,), torch.float32), "version": ((), torch.int64)})
    actors = convoy.spawn(act, (slots, weights), nprocs=ACTORS, join=False)
    reward = 0.5
    for update in range(1, UPDATES + 1):
        slot = slots.next(timeout=60)
        adam.zero_grad()
        loss_of(policy, slot).backward()
        adam.step()
        reward += 0.05 * (slot["rewards"].mean().item() - reward)
        weights.publish(policy)
        if update == UPDATES // 4:
            os.kill(actors.pids()[1], signal.SIGKILL)
        for failure in actors.restart_failed():
            print(f"update {update}: {failure}; started again", flush=True)
    slots.close()
    actors.join(60)
    print(f"{UPDATES} updates from {ACTORS} actors, reward {reward:.2f}")
    return 0 if reward > 0.8 else 1


if __name__ == "__main__":
    if started := convoy.start():  # by a program in C++
        number, (their_slots, their_weights) = started
        act(number, convoy.Slots.open(their_slots), convoy.Published.open(their_weights))
    else:
        sys.exit(learn())
