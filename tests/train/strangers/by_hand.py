"""Tensors of the script's own: an average as a list, a memory bank, a running mean, parameters without a module."""

import torch

import everstep


def main():
    with everstep.start(URL, every_steps=EVERY) as run:
        w1 = torch.randn(4, 8, requires_grad=True)
        w2 = torch.randn(8, 3, requires_grad=True)
        params = [w1, w2]
        ema = [p.detach().clone() for p in params]
        memory_bank = torch.nn.functional.normalize(torch.randn(64, 3), dim=1)
        running_mean = torch.zeros(3)
        seen = torch.zeros(64, dtype=torch.int64)
        loss_sum = torch.zeros(())
        masks = {"upper": torch.triu(torch.ones(3, 3))}
        velocity = {}
        track(run, w1=w1, w2=w2, ema=ema, memory_bank=memory_bank, running_mean=running_mean, velocity=velocity)
        for step in run.steps(until=17):
            with step:
                idx = torch.randperm(64)[:8]
                feat = torch.tanh(torch.randn(8, 4) @ w1) @ w2
                old = memory_bank[idx]
                centred = (feat - running_mean) @ masks["upper"]
                loss = (centred * old).sum() + feat.pow(2).mean()
                grads = torch.autograd.grad(loss, params)
                with torch.no_grad():
                    for i, (p, g) in enumerate(zip(params, grads, strict=True)):
                        velocity[i] = 0.9 * velocity[i] + g if i in velocity else g
                        p -= 0.01 * velocity[i]
                    torch._foreach_lerp_(ema, params, 0.1)
                    memory_bank[idx] = feat.detach()
                    running_mean.lerp_(feat.mean(0), 0.1)
                    seen[idx] += 1
                    loss_sum += loss.detach()


main()
