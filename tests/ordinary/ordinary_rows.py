"""The table: what must hold for each script of `scripts/`.

A row that does not hold yet names the owner of its mend, and what happens today; its test is then expected to fail, and
fails when it no longer does: take the mark away with the mend.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

SCRIPTS = Path(__file__).parent / "scripts"
# Whether bits are compared, or numbers to six digits. With three ranks DDP's buckets after a recovery may be others,
# and sum in another order: to be True when they are part of the state.
EXACT = False


@dataclass(frozen=True)
class Row:
    """`script` ends as undisturbed with rank 1 killed at each of `kills` ("STEP:POINT", see `ordinary_driver.POINTS`);
    or, where `refused` is a regular expression, it is refused before that, with a text that has it. With `or_same` it
    may do either.

    `owner` of a row that does not hold, and what happens `today`; `torchrun_owner` if it does not under torchrun.
    """

    script: str
    kills: tuple[str, ...] = ("5:backward",)
    refused: str = ""
    or_same: bool = False
    late: bool = False  # what is wrong cannot show before a peer was lost, and is refused then
    owner: str = ""
    today: str = ""
    torchrun: bool = True
    torchrun_owner: str = ""
    apart: str = ""  # a regular expression for names of what each rank has for itself, and has again after the kill
    lines: Mapping[str, int] = field(default_factory=dict)  # of files that the script writes
    exact: bool = True

    @property
    def path(self) -> Path:
        return SCRIPTS / f"{self.script}.py"


ROWS = (
    Row("documented", kills=("5:begin", "5:backward", "5:gradients", "5:optimizer", "5:tail", "5:between")),
    # --- what is not tracked
    Row("untracked_optimizer", refused=r"optimizer.*track\(", owner="census", today="replicas differ after a kill"),
    Row("nothing_tracked", refused=r"(model|optimizer).*track\(", owner="census", today="replicas differ after a kill"),
    Row("ema_untracked", refused=r"average.*track\(", owner="census", today="the newcomer's average is another"),
    # --- what moves before the optimizer, or behind a collective that follows it
    Row("schedule_first", owner="judge", today="the rate is another after a step was repeated"),
    Row("schedule_in_tail", kills=("5:optimizer",)),
    Row("counter_object_first", refused="seen", or_same=True, owner="judge", today="counts a step's samples twice"),
    Row("ema_first", refused="average", or_same=True, owner="judge", today="averages a step's weights twice"),
    Row("ema_in_tail", kills=("5:optimizer",), refused="average", or_same=True, owner="judge", today="lacks a step"),
    Row("ema_by_data", kills=("5:backward", "5:optimizer")),
    Row("rate_by_hand"),
    Row("rate_decayed_by_hand", refused="lr", or_same=True, owner="judge", today="decays twice for a repeated step"),
    Row(
        "rate_by_own_counter",
        refused="lr",
        late=True,
        owner="judge",
        today="the newcomer counts from 0, and its rate is another",
    ),
    Row("decay_by_hand", kills=("5:backward", "5:gradients", "5:optimizer")),
    Row("decay_first", refused="model", or_same=True, owner="judge", today="decays twice for a repeated step"),
    # --- more than one pass or one optimizer in a step
    Row("lbfgs", kills=("5:backward2", "5:optimizer"), owner="judge", today="a half-moved state is judged whole"),
    Row("sam", kills=("5:backward2",), owner="judge", today="the weights stay where the climb has brought them"),
    Row("gan", kills=("5:backward2", "5:optimizer", "5:optimizer2")),
    Row(
        "gan_alternating",
        kills=("5:backward2", "5:optimizer2"),
        owner="judge",
        today="a half-moved state is judged whole",
    ),
    Row("gan_every_other_step", kills=("4:backward", "5:optimizer")),
    Row("ppo", kills=("5:backward2", "5:optimizer"), owner="judge", today="a half-moved state is judged whole"),
    Row("caught_exception", kills=("5:backward", "5:optimizer"), owner="judge", today="a lost step is counted"),
    Row("accumulated_over_steps", refused="micro_batch=", owner="judge", today="gradients are lost"),
    # --- loaders
    Row(
        "distributed_sampler", refused=r"DataLoader.*run\.loader", or_same=True, owner="loaders", today="AttributeError"
    ),
    Row(
        "distributed_sampler_iterated",
        refused=r"DistributedSampler.*run\.loader",
        or_same=True,
        owner="loaders",
        today="all ranks train on the same samples",
    ),
    Row(
        "plain_dataloader",
        refused=r"DataLoader.*run\.loader",
        or_same=True,
        owner="loaders",
        today="AttributeError",
        torchrun_owner="loaders",
    ),
    Row(
        "plain_dataloader_tuple",
        refused=r"DataLoader.*run\.loader",
        or_same=True,
        owner="loaders",
        today="AttributeError",
        torchrun_owner="loaders",
    ),
    Row(
        "two_loaders",
        refused="loader",
        or_same=True,
        owner="loaders",
        today="the second loader's epoch ends",
        torchrun_owner="loaders",
    ),
    Row(
        "iterable_dataset",
        refused="(IterableDataset|Stream|rank)",
        or_same=True,
        owner="loaders",
        today="all ranks train on the same samples",
    ),
    # --- groups and collectives
    Row("ddp_own_group", refused="new_group|process_group", or_same=True, owner="scope", today="never averaged"),
    Row("metrics_group", refused="new_group|metrics", or_same=True, owner="scope", today="sums of one"),
    Row("half_groups", refused="new_group", or_same=True, owner="scope", today="torch's raw error"),
    Row(
        "rank0_before_steps",
        lines={"downloads.txt": 1},
        refused=r"run\.rank.*run\.once",
        or_same=True,
        owner="scope",
        today="true on every rank",
    ),
    Row("environ_rank", lines={"log.txt": 12}),
    Row(
        "environ_rank_once", lines={"log.txt": 12}, refused="RANK", or_same=True, owner="scope", today="two are rank 0"
    ),
    Row(
        "init_process_group_first",
        refused=r"init_process_group.*everstep\.start",
        or_same=True,
        owner="scope",
        today="torch's raw error",
    ),
    Row(
        "evaluation_between_steps",
        kills=("5:between",),
        refused=r"evaluate\(",
        or_same=True,
        owner="scope",
        today="a lost peer ends the survivor",
    ),
    Row("compiled_ddp", owner="scope", today="cannot take one step"),
    Row("powersgd", refused="PowerSGD", or_same=True, owner="scope", today="SIGABRT"),
    Row("growing_buffer", refused="means", or_same=True, owner="scope", today="all survivors exit 1"),
    Row("replaced_buffer", apart="mean$"),
    Row("send_recv", refused=r"(send|recv|isend|irecv)", or_same=True, owner="scope", today="misleading text"),
    Row("monitored_barrier", refused="monitored_barrier", or_same=True, owner="scope", today="misleading text"),
    # --- randomness
    Row("shared_generator", refused="drops|generator", or_same=True, owner="random", today="newcomer draws others"),
    Row("dropout", owner="random", today="newcomer draws other masks"),
)
