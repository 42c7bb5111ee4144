"""In the style of nanoGPT: all at module level, a scaler, accumulation, batches from memory, a rate that is computed."""

import contextlib
import math

import numpy as np
import torch

import everstep

learning_rate, gradient_accumulation_steps, block_size, batch_size = 1e-3, 2, 8, 4
train_data = np.arange(1000, dtype=np.uint16) % 16


def get_batch(split):
    ix = torch.randint(len(train_data) - block_size, (batch_size,))
    x = torch.stack([torch.from_numpy(train_data[i : i + block_size].astype(np.int64)) for i in ix])
    y = torch.stack([torch.from_numpy(train_data[i + 1 : i + 1 + block_size].astype(np.int64)) for i in ix])
    return x, y


def get_lr(it):
    return 0.5 * (1.0 + math.cos(math.pi * it / 100)) * learning_rate


with everstep.start(URL, every_steps=EVERY) as run:
    model = torch.nn.Sequential(torch.nn.Embedding(16, 8), torch.nn.Linear(8, 16))
    scaler = torch.amp.GradScaler("cpu", enabled="scaler" in CASE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))
    track(run, model=model, optimizer=optimizer, **({"scaler": scaler} if "scaler" in CASE else {}))
    ctx = torch.autocast("cpu", torch.bfloat16) if "scaler" in CASE else contextlib.nullcontext()
    iter_num, best_val_loss, running_mfu = 0, 1e9, -1.0
    if "prefetch" in CASE:
        X, Y = get_batch("train")
    for step in run.steps(until=9):
        with step:
            for param_group in optimizer.param_groups:
                param_group["lr"] = get_lr(step.number)
            for micro_step in range(gradient_accumulation_steps):
                if "prefetch" not in CASE:
                    X, Y = get_batch("train")
                with ctx:
                    logits = model(X)
                    loss = torch.nn.functional.cross_entropy(logits.view(-1, 16), Y.view(-1))
                    loss = loss / gradient_accumulation_steps
                if "prefetch" in CASE:
                    X, Y = get_batch("train")
                scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
        running_mfu = loss.item() if running_mfu == -1.0 else 0.9 * running_mfu + 0.1 * loss.item()
        iter_num += 1
