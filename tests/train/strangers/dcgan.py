"""In the style of pytorch/examples dcgan: two networks, two optimizers, fixed noise, a label that is filled again."""

import torch
from torch import nn, optim

import everstep

nz, real_label, fake_label = 4, 1.0, 0.0
with everstep.start(URL, every_steps=EVERY) as run:
    netG = nn.Sequential(nn.Linear(nz, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6), nn.Tanh())
    netD = nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1), nn.Sigmoid())
    criterion = nn.BCELoss()
    fixed_noise = torch.randn(8, nz)
    noise_rng = torch.Generator().manual_seed(4)
    buffer = torch.empty(8)
    optimizerD = optim.Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
    optimizerG = optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))
    track(run, netG=netG, netD=netD, optimizerD=optimizerD, optimizerG=optimizerG)
    G_losses, D_losses, img_list = [], [], []
    for step in run.steps(run.loader(torch.utils.data.TensorDataset(torch.randn(64, 6)), global_batch=8), until=9):
        with step as batch:
            netD.zero_grad()
            real = batch.data[0]
            label = torch.full((8,), real_label)
            output = netD(real).view(-1)
            errD_real = criterion(output, label)
            batch.scale(errD_real).backward()
            noise = torch.randn(8, nz, generator=noise_rng if "generator" in CASE else None)
            fake = netG(noise)
            label.fill_(fake_label)
            errD_fake = criterion(netD(fake.detach()).view(-1), label)
            batch.scale(errD_fake).backward()
            optimizerD.step()
            netG.zero_grad()
            buffer.fill_(real_label)
            errG = criterion(netD(fake).view(-1), buffer)
            batch.scale(errG).backward()
            optimizerG.step()
            G_losses.append(errG.item())
            D_losses.append((errD_real + errD_fake).item())
        if step.number % 4 == 0:
            with torch.no_grad():
                img_list.append(netG(fixed_noise).detach().cpu())
