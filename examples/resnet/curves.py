"""Curves for TensorBoard: the class of docs/how-to-trackers.md, once for training and once for evaluation."""

from torch.utils.tensorboard import SummaryWriter


class TensorBoard:
    """TensorBoard's scalars, written by rank 0. A new writer hides what was logged from its first step on."""

    def __init__(self, run, folder):
        self.run, self.folder, self.writer, self.last, self.newest = run, folder, None, 0, None

    def __call__(self, step, **values):
        if step.completed:
            self.write(**values)

    def write(self, **values):
        values = {name: float(value) for name, value in values.items()}
        if self.run.rank != 0:
            self.writer, self.newest = None, (self.run.step, values)
            return
        if self.writer is None:
            # The rank 0 before this one may have died before it logged its last step.
            missed = [self.newest] if self.newest and self.newest[0] < self.run.step else []
            first = missed[0][0] if missed else self.run.step
            self.writer, self.last = SummaryWriter(self.folder, purge_step=first), first - 1
            for at, known in missed:
                self._add(at, known)
        self._add(self.run.step, values)

    def _add(self, step, values):
        if step <= self.last:
            return  # this process went back to a commit, and takes steps again that it has logged
        self.last = step
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()  # a killed process loses what it has not written


def curves(run, folder):
    """Two functions: one logs a step of training, one an evaluation. Both do nothing without a folder."""
    if not folder:
        return (lambda step, **values: None), (lambda **values: None)
    return TensorBoard(run, f"{folder}/training"), TensorBoard(run, f"{folder}/evaluation").write
