"""In the style of CleanRL's PPO: storage that is filled again in each update, a carried environment."""

import numpy as np
import torch
from torch import nn
from torch.distributions.normal import Normal

import everstep


class Env:
    def reset(self):
        return np.zeros((2, 3), dtype=np.float32)

    def step(self, action):
        return np.tanh(action.sum(1, keepdims=True) + np.ones((2, 3), dtype=np.float32)), -np.abs(action).sum(1)


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        self.actor_mean = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
        self.actor_logstd = nn.Parameter(torch.zeros(1, 2))

    def get_action_and_value(self, x, action=None):
        probs = Normal(self.actor_mean(x), self.actor_logstd.exp())
        action = probs.sample() if action is None else action
        return action, probs.log_prob(action).sum(1), self.critic(x)


with everstep.start(URL, every_steps=EVERY) as run:
    envs, agent, num_steps = Env(), Agent(), 4
    optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-4, eps=1e-5)
    obs = torch.zeros(num_steps, 2, 3)
    actions, logprobs = torch.zeros(num_steps, 2, 2), torch.zeros(num_steps, 2)
    rewards, values = torch.zeros(num_steps, 2), torch.zeros(num_steps, 2)
    game = {"next_obs": torch.tensor(envs.reset())}
    next_obs = game["next_obs"]
    track(run, agent=agent, optimizer=optimizer, **({} if "carried" in CASE else {"game": game}))
    if CASE == "carried and said":
        run.untracked("next_obs")
    for update in run.steps(until=9):
        with update:
            if "carried" not in CASE:
                next_obs = game["next_obs"]
            for t in range(num_steps):
                obs[t] = next_obs
                with torch.no_grad():
                    action, logprob, value = agent.get_action_and_value(next_obs)
                    values[t] = value.flatten()
                actions[t], logprobs[t] = action, logprob
                next_obs, reward = envs.step(action.numpy())
                rewards[t] = torch.tensor(reward)
                next_obs = torch.tensor(next_obs)
            game["next_obs"] = next_obs
            returns = rewards.flip(0).cumsum(0).flip(0)
            b_obs, b_actions = obs.reshape(-1, 3), actions.reshape(-1, 2)
            b_logprobs, b_advantages = logprobs.reshape(-1), (returns - values).reshape(-1)
            _, newlogprob, newvalue = agent.get_action_and_value(b_obs, b_actions)
            ratio = (newlogprob - b_logprobs).exp()
            loss = -(b_advantages * ratio).mean() + 0.5 * (newvalue.view(-1) - returns.reshape(-1)).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()
