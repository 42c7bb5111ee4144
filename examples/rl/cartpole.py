"""Poles on carts, a policy that balances them, what a rollout worker makes of both, and what is learned from it."""

import torch
from torch import Tensor, nn

POLES, TICKS = 8, 100  # of a fragment


class CartPoles:
    """Poles on carts with the constants of Gymnasium's CartPole-v1: state [poles, 4], action [poles] of 0 and 1."""

    def __init__(self, chance: torch.Generator) -> None:
        self.chance, self.state = chance, torch.zeros(POLES, 4)
        self.begin(torch.ones(POLES, dtype=torch.bool))

    def begin(self, which: Tensor) -> None:
        fresh = torch.rand(POLES, 4, generator=self.chance) * 0.1 - 0.05
        self.state = torch.where(which[:, None], fresh, self.state)

    def step(self, action: Tensor) -> Tensor:
        """Which poles fell in this tick, or left the track; they begin anew."""
        _, speed, angle, turn = self.state.unbind(1)
        push = (action * 20.0 - 10.0 + 0.05 * turn**2 * angle.sin()) / 1.1
        turning = (9.8 * angle.sin() - angle.cos() * push) / (0.5 * (4 / 3 - 0.1 * angle.cos() ** 2 / 1.1))
        change = torch.stack([speed, push - 0.05 * turning * angle.cos() / 1.1, turn, turning], 1)
        self.state = self.state + 0.02 * change
        fell = (self.state[:, 0].abs() > 2.4) | (self.state[:, 2].abs() > 0.2095)
        self.begin(fell)
        return fell


class Policy(nn.Module):
    """State [n, 4] to logits [n, 2] and value [n]."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
        self.critic = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        return self.actor(state), self.critic(state).squeeze(-1)


@torch.no_grad()
def rollout(policy: Policy, fragment: int) -> dict[str, Tensor]:
    """The TICKS ticks of a fragment, with the advantage of each action: tensors [TICKS · POLES, …]. It depends on its
    arguments alone."""
    chance = torch.Generator().manual_seed(fragment)
    poles, kept, fallen = CartPoles(chance), [], []
    for _ in range(TICKS):
        state = poles.state
        logits, value = policy(state)
        action = torch.multinomial(logits.softmax(-1), 1, generator=chance)[:, 0]
        kept.append((state, action, logits.log_softmax(-1).gather(1, action[:, None])[:, 0], value))
        fallen.append(poles.step(action).float())
    state, action, chances, values = (torch.stack(column) for column in zip(*kept, strict=True))
    after, sum_, advantages = policy(poles.state)[1], torch.zeros(POLES), torch.zeros_like(values)
    for tick in reversed(range(TICKS)):  # generalised advantage estimation; each tick without a fall is worth 1
        goes_on = 1 - fallen[tick]
        sum_ = goes_on - values[tick] + 0.99 * goes_on * (after + 0.95 * sum_)
        advantages[tick], after = sum_, values[tick]
    found = {"state": state, "action": action, "chances": chances, "advantages": advantages}
    found |= {"returns": advantages + values, "fallen": torch.stack(fallen)}
    return {name: tensor.flatten(0, 1) for name, tensor in found.items()}


def loss_of(policy: Policy, taken: dict[str, Tensor]) -> Tensor:
    """PPO's for a minibatch: clipped gains, the values' error, and a little for entropy."""
    logits, value = policy(taken["state"])
    chances = logits.log_softmax(-1)
    ratio = (chances.gather(1, taken["action"][:, None])[:, 0] - taken["chances"]).exp()
    gain = (taken["advantages"] - taken["advantages"].mean()) / (taken["advantages"].std() + 1e-8)
    surrogate = torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
    entropy = -(chances.exp() * chances).sum(-1).mean()
    return 0.5 * (value - taken["returns"]).square().mean() - surrogate - 0.01 * entropy
