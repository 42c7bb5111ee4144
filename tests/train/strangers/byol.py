"""In the style of lucidrains' byol-pytorch: a learner that holds an online network and a target that follows it."""

import copy

import torch
from torch import nn
from torch.nn import functional as F

import everstep


class EMA:
    def __init__(self, beta):
        self.beta = beta

    def update_average(self, old, new):
        return old * self.beta + (1 - self.beta) * new


class Learner:
    def __init__(self, net):
        self.online_encoder = net
        self.online_predictor = nn.Linear(4, 4)
        self.target_encoder = copy.deepcopy(net).requires_grad_(False)
        self.target_ema_updater = EMA(0.9)

    def update_moving_average(self):
        for current, ma in zip(self.online_encoder.parameters(), self.target_encoder.parameters(), strict=True):
            ma.data = self.target_ema_updater.update_average(ma.data, current.data)

    def __call__(self, x):
        one, two = x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x)
        with torch.no_grad():
            target = self.target_encoder(two).detach()
        return 2 - 2 * F.cosine_similarity(self.online_predictor(self.online_encoder(one)), target).mean()


with everstep.start(URL, every_steps=EVERY) as run:
    learner = Learner(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)))
    opt = torch.optim.Adam([*learner.online_encoder.parameters(), *learner.online_predictor.parameters()], lr=3e-4)
    track(
        run, online=learner.online_encoder, predictor=learner.online_predictor, target=learner.target_encoder, opt=opt
    )
    for step in run.steps(run.loader(torch.utils.data.TensorDataset(torch.randn(64, 6)), global_batch=8), until=9):
        with step as batch:
            loss = learner(batch.data[0])
            opt.zero_grad()
            batch.scale(loss).backward()
            opt.step()
            learner.update_moving_average()
