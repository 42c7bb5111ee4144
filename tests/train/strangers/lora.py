"""In the style of peft: a frozen base, adapters beside its layers, and only the adapters are tracked."""

import torch
from torch import nn

import everstep


class LoraLinear(nn.Module):
    def __init__(self, base, r=2):
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.Linear(base.in_features, r, bias=False)
        self.lora_B = nn.Linear(r, base.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x):
        return self.base_layer(x) + self.lora_B(self.lora_A(x)) * 2.0


with everstep.start(URL, every_steps=EVERY) as run:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    for name, child in list(model.named_children()):
        if isinstance(child, nn.Linear):
            setattr(model, name, LoraLinear(child))
    adapters = nn.ParameterDict({n.replace(".", "_"): p for n, p in model.named_parameters() if "lora_" in n})
    if "frozen moves" in CASE:
        model[0].base_layer.bias.requires_grad_(True)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    track(run, adapters=adapters, optimizer=optimizer)
    for step in run.steps(until=9):
        with step:
            loss = model(torch.randn(8, 6)).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
