"""Layers that are frozen at first and trained later, by a second optimizer or a new group; inner optimizers."""

import torch
from torch import nn

import everstep

with everstep.start(URL, every_steps=EVERY) as run:
    backbone, head, probe = nn.Linear(6, 8).requires_grad_(False), nn.Linear(8, 2), nn.Linear(8, 2)
    optimizer = torch.optim.Adam(head.parameters())
    probe_optimizer = torch.optim.SGD(probe.parameters(), lr=0.1)
    second = None
    if "second tracked" in CASE:
        second = torch.optim.Adam(backbone.parameters())
    track(run, backbone=backbone, head=head, optimizer=optimizer, **({"second": second} if second else {}))
    if "probe" in CASE and "said" in CASE:
        run.untracked("probe", "probe_optimizer")
    for step in run.steps(until=9):
        with step:
            if step.number == 3 and CASE != "frozen":
                backbone.requires_grad_(True)
                if CASE == "second":
                    second = torch.optim.Adam(backbone.parameters())
                elif CASE == "group":
                    optimizer.add_param_group({"params": backbone.parameters()})
            x = torch.randn(8, 6)
            if CASE == "attack":
                delta = torch.zeros_like(x, requires_grad=True)
                attack = torch.optim.SGD([delta], lr=0.1)
                for _ in range(2):
                    attack.zero_grad()
                    (-head(backbone(x + delta)).pow(2).mean()).backward()
                    attack.step()
                x = x + delta.detach()
            features = backbone(x)
            loss = head(features).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if second is not None and step.number >= 3:
                second.step()
                second.zero_grad()
            if "probe" in CASE:
                probe_optimizer.zero_grad()
                probe(features.detach()).pow(2).mean().backward()
                probe_optimizer.step()
