"""In the style of pytorch/examples word_language_model: the hidden state is carried, and the update is by hand."""

import torch
from torch import nn

import everstep


def repackage_hidden(h):
    return h.detach() if isinstance(h, torch.Tensor) else tuple(repackage_hidden(v) for v in h)


class RNNModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.rnn, self.decoder = nn.Embedding(16, 8), nn.LSTM(8, 8), nn.Linear(8, 16)

    def forward(self, x, hidden):
        output, hidden = self.rnn(self.encoder(x), hidden)
        return self.decoder(output).view(-1, 16), hidden


def train(run):
    hidden = (torch.zeros(1, 4, 8), torch.zeros(1, 4, 8))
    total_loss, lr = 0.0, 0.1
    for step in run.steps(until=9):
        with step:
            data, targets = torch.randint(16, (5, 4)), torch.randint(16, (20,))
            model.zero_grad()
            if CASE != "carried":
                hidden = (torch.zeros(1, 4, 8), torch.zeros(1, 4, 8))
            output, hidden = model(data, repackage_hidden(hidden))
            loss = nn.functional.cross_entropy(output, targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            for p in model.parameters():
                p.data.add_(p.grad, alpha=-lr)
            total_loss += loss.item()


with everstep.start(URL, every_steps=EVERY) as run:
    model = RNNModel()
    track(run, model=model)
    train(run)
