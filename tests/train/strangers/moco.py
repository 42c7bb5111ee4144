"""In the style of MoCo: a key encoder by momentum, and a queue, as a buffer of the model or beside it."""

import copy

import torch
from torch import nn
from torch.nn import functional as F

import everstep


class MoCo(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.encoder_q, self.encoder_k = base, copy.deepcopy(base).requires_grad_(False)
        if CASE != "plain queue":
            self.register_buffer("queue", F.normalize(torch.randn(4, 32), dim=0), persistent=CASE != "not persistent")
        else:
            self.queue = F.normalize(torch.randn(4, 32), dim=0)
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def _dequeue_and_enqueue(self, keys):
        ptr = int(self.queue_ptr)
        self.queue[:, ptr : ptr + keys.shape[0]] = keys.T
        self.queue_ptr[0] = (ptr + keys.shape[0]) % 32

    def forward(self, im_q, im_k):
        q = F.normalize(self.encoder_q(im_q), dim=1)
        with torch.no_grad():
            for param_q, param_k in zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True):
                param_k.data = param_k.data * 0.9 + param_q.data * 0.1
            k = F.normalize(self.encoder_k(im_k), dim=1)
        l_pos = torch.einsum("nc,nc->n", [q, k]).unsqueeze(-1)
        l_neg = torch.einsum("nc,ck->nk", [q, self.queue.clone().detach()])
        self._dequeue_and_enqueue(k)
        return torch.cat([l_pos, l_neg], dim=1) / 0.07


def main():
    with everstep.start(URL, every_steps=EVERY) as run:
        model = MoCo(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)))
        optimizer = torch.optim.SGD(model.encoder_q.parameters(), 0.03, momentum=0.9)
        track(run, model=model, optimizer=optimizer)
        for step in run.steps(run.loader(torch.utils.data.TensorDataset(torch.randn(64, 6)), global_batch=8), until=9):
            with step as batch:
                output = model(batch.data[0], batch.data[0] + 0.1)
                loss = F.cross_entropy(output, torch.zeros(len(output), dtype=torch.long))
                optimizer.zero_grad()
                batch.scale(loss).backward()
                optimizer.step()


main()
