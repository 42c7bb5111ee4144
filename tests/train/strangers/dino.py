"""In the style of DINO: a loss that is a module with a centre, bound anew in each step, and a teacher that follows."""

import torch
from torch import nn
from torch.nn import functional as F

import everstep


class DINOLoss(nn.Module):
    def __init__(self, out_dim):
        super().__init__()
        self.register_buffer("center", torch.zeros(1, out_dim))

    def forward(self, student_output, teacher_output):
        teacher_out = F.softmax((teacher_output - self.center) / 0.04, dim=-1).detach()
        loss = torch.sum(-teacher_out * F.log_softmax(student_output / 0.1, dim=-1), dim=-1).mean()
        self.update_center(teacher_output)
        return loss

    @torch.no_grad()
    def update_center(self, teacher_output):
        self.center = self.center * 0.9 + teacher_output.mean(0, keepdim=True) * 0.1


with everstep.start(URL, every_steps=EVERY) as run:
    student, teacher = nn.Linear(6, 5), nn.Linear(6, 5)
    teacher.load_state_dict(student.state_dict())
    for p in teacher.parameters():
        p.requires_grad = False
    dino_loss = DINOLoss(5)
    optimizer = torch.optim.AdamW(student.parameters())
    track(run, student=student, teacher=teacher, optimizer=optimizer, dino_loss=dino_loss)
    for step in run.steps(run.loader(torch.utils.data.TensorDataset(torch.randn(64, 6)), global_batch=8), until=9):
        with step as batch:
            images = batch.data[0]
            loss = dino_loss(student(images + 0.1), teacher(images))
            optimizer.zero_grad()
            batch.scale(loss).backward()
            optimizer.step()
            with torch.no_grad():
                for param_q, param_k in zip(student.parameters(), teacher.parameters(), strict=True):
                    param_k.data.mul_(0.9).add_((1 - 0.9) * param_q.detach().data)
