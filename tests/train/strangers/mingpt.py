"""In the style of minGPT: a Trainer object holds everything, tied weights, two parameter groups, clipping."""

import math
from collections import defaultdict

import torch
from torch import nn
from torch.nn import functional as F

import everstep


class CausalSelfAttention(nn.Module):
    def __init__(self, width, block):
        super().__init__()
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)
        self.register_buffer("bias", torch.tril(torch.ones(block, block)).view(1, 1, block, block))

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = (t.view(B, T, 2, C // 2).transpose(1, 2) for t in self.c_attn(x).split(C, dim=2))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = F.softmax(att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf")), dim=-1)
        return self.c_proj((att @ v).transpose(1, 2).contiguous().view(B, T, C))


class GPT(nn.Module):
    def __init__(self, vocab=16, width=8, block=8):
        super().__init__()
        self.transformer = nn.ModuleDict({
            "wte": nn.Embedding(vocab, width), "h": nn.ModuleList([CausalSelfAttention(width, block) for _ in range(2)]),
            "ln_f": nn.LayerNorm(width),
        })  # fmt: skip
        self.lm_head = nn.Linear(width, vocab, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def configure_optimizers(self):
        decay = [p for p in self.parameters() if p.dim() >= 2]
        rest = [p for p in self.parameters() if p.dim() < 2]
        return torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}])

    def forward(self, idx, targets):
        x = self.transformer.wte(idx)
        for block in self.transformer.h:
            x = x + block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


class Trainer:
    def __init__(self, model, dataset):
        self.model, self.train_dataset, self.optimizer = model, dataset, None
        self.callbacks = defaultdict(list)
        self.iter_num, self.iter_time = 0, 0.0

    def add_callback(self, onevent, callback):
        self.callbacks[onevent].append(callback)

    def run(self, run):
        model = self.model
        self.optimizer = model.configure_optimizers()
        track(run, model=model, optimizer=self.optimizer)
        for step in run.steps(run.loader(self.train_dataset, global_batch=4), until=9):
            with step as batch:
                x, y = batch.data
                logits, self.loss = model(x, y)
                model.zero_grad(set_to_none=True)
                batch.scale(self.loss).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                self.optimizer.step()
            for callback in self.callbacks["on_batch_end"]:
                callback(self)
            self.iter_num += 1


with everstep.start(URL, every_steps=EVERY) as run:
    text = torch.randint(16, (64, 9))
    trainer = Trainer(GPT(), torch.utils.data.TensorDataset(text[:, :-1].contiguous(), text[:, 1:].contiguous()))
    trainer.add_callback("on_batch_end", lambda t: t.loss.item())
    trainer.run(run)
