"""Brings the members of a new round to one state if each holds a shard of it (HSDP).

A step changes every shard, and a changed shard cannot be changed back. So all members vote before the first optimizer
of a step. A member that has heard all votes makes the step. A member that loses a peer while it waits for votes asks
the members of the next round whether any of them made the step, and does the same. If all members have an undo copy of
their shard from the beginning of the step, they vote when the step's block has ended: collectives after the optimizer
can fail, and until the vote each member can go back.

Invariants: a member that has voted neither makes nor repeats the step before it knows what the others do. The shards
that are trained on have one version (`shard_transfer_plan`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import xxhash

from everstep.checkpoint.state.capture import apply, capture
from everstep.checkpoint.state.sharding import is_sharded
from everstep.recovery.digests import content, state_digests
from everstep.recovery.errors import LoopError
from everstep.recovery.group.members import Members
from everstep.recovery.sharding import fsdp, tensor_parallel
from everstep.recovery.sharding.fsdp import is_offloaded
from everstep.recovery.sharding.mesh import RecoverableMesh
from everstep.recovery.state.gradients import Update
from everstep.recovery.transfer import shard_transfer_plan
from everstep.recovery.transfer.agreement import NoState
from everstep.recovery.transfer.broadcast import TransferFailed, local_bytes
from everstep.recovery.transfer.shard_transfer_plan import NEW, MemberShard, ShardTransferPlan
from everstep.recovery.validity import Validity

# --- shard transfers
# Sends shards between members, from memory to memory: only what a receiver needs, and from one sender only. As in
# `broadcast`, the state is taken apart as for a checkpoint, nothing is pickled, and each tensor has a checksum. All
# senders send at once, in blocks, each to its receivers. Invariant: a receiver's state does not change before all of
# the new one has arrived and was checked.

BLOCK: Final = 16 * 2**20  # bytes to one receiver at a time


@dataclass(frozen=True, slots=True)
class ReceivedShard:
    """The data that has arrived from `sender`."""

    sender: int
    values: Mapping[str, Any]
    described: Sequence[Any]
    body: torch.Tensor

    @property
    def size(self) -> int:
        return self.body.numel()


def exchange(
    state: Mapping[str, Any], transfers: Sequence[tuple[int, int]], device_mesh: Any, members: Members
) -> ReceivedShard | None:
    """Send and receive according to `transfers`, (receiver, sender). Returns what this rank received. Collective.
    Raises `PeerLost`, `TransferFailed`."""
    mine = [receiver for receiver, sender in transfers if sender == members.rank]
    sender = next((g for receiver, g in transfers if receiver == members.rank), None)
    head, body = _pack(state, device_mesh, members.rank) if mine else (b"", _Body([]))
    sizes = members.gather((len(head), body.size))
    heading = _deliver(_Body([memoryview(head)]), mine, sender, [h for h, _ in sizes], members)
    content = _deliver(body, mine, sender, [b for _, b in sizes], members)
    if sender is None:
        return None
    described = json.loads(bytes(heading.numpy()))
    received = ReceivedShard(sender, described["values"], described["tensors"], content)
    _check(received)
    return received


def unpack(state: Mapping[str, Any], received: ReceivedShard, device_mesh: Any, rank: int) -> None:
    """Load the received data into `state`, whose shard has the sender's number."""
    tensors: dict[str, torch.Tensor] = {}
    device = "cpu" if is_offloaded(state) else device_mesh.device_type  # the accelerator may lack the room
    at = 0
    for name, kind, local, whole, _ in received.described:
        dtype = getattr(torch, kind)
        size = dtype.itemsize * torch.Size(local).numel()
        # The bytes are copied, because a view needs an address that is aligned for its type.
        tensor = torch.empty(local, dtype=dtype)
        if size:
            tensor.view(-1).view(torch.uint8).copy_(received.body[at : at + size])
        tensors[name] = tensor if whole is None else _sharded(tensor.to(device), whole, device_mesh)
        at += size
    apply(state, {"state": received.values}, tensors, rank)


def _pack(state: Mapping[str, Any], device_mesh: Any, rank: int) -> tuple[bytes, _Body]:
    captured = capture(state, rank)
    listed, buffers = [], []
    for name, tensor in captured.tensors.items():
        data = local_bytes(tensor)
        here = tensor.detach()
        whole = None
        if is_sharded(tensor):
            if tensor.device_mesh != device_mesh:  # type: ignore[attr-defined]
                raise TransferFailed(f"{name} is not sharded over the mesh of run.mesh()")
            whole = [list(here.shape), list(here.stride()), [_spell(name, p) for p in here.placements]]  # type: ignore[attr-defined]
            here = here.to_local()  # type: ignore[attr-defined]
        kind = str(here.dtype).removeprefix("torch.")
        listed.append((name, kind, list(here.shape), whole, xxhash.xxh3_64_hexdigest(data)))
        buffers.append(memoryview(data))
    return json.dumps({"values": captured.values, "tensors": listed}).encode(), _Body(buffers)


def _spell(name: str, placement: Any) -> int | None:
    """The axis that is sharded; None for a replicated tensor."""
    if placement.is_replicate():
        return None
    if type(placement).__name__ != "Shard":
        raise TransferFailed(f"{name}: placement {placement} cannot be sent: it does not shard by axis")
    axis: int = placement.dim
    return axis


def _sharded(local: torch.Tensor, whole: Any, device_mesh: Any) -> torch.Tensor:
    from torch.distributed.tensor import DTensor, Replicate, Shard  # noqa: PLC0415  costs seconds

    shape, stride, axes = whole
    placements = [Replicate() if axis is None else Shard(axis) for axis in axes]
    tensor: torch.Tensor = DTensor.from_local(
        local, device_mesh, placements,
        run_check=False, shape=torch.Size(shape), stride=tuple(stride),
    )  # fmt: skip
    return tensor


def _check(received: ReceivedShard) -> None:
    at = 0
    for name, kind, local, _, checksum in received.described:
        size = getattr(torch, kind).itemsize * torch.Size(local).numel()
        if xxhash.xxh3_64_hexdigest(_view(received.body[at : at + size])) != checksum:
            raise TransferFailed(f"{name}: what arrived from rank {received.sender} fails its checksum")
        at += size
    if at != received.size:
        raise TransferFailed(f"{received.size} bytes arrived from rank {received.sender}, {at} were described")


class _Body:
    """Several buffers as one sequence of bytes."""

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self._buffers = buffers
        self.size = sum(b.nbytes for b in buffers)
        self._number = self._into = 0

    def next_bytes(self, most: int) -> torch.Tensor:
        """The next bytes, at most `most` of them."""
        data = torch.empty(min(most, self.size), dtype=torch.uint8)
        self.size -= data.numel()
        target, at = memoryview(_view(data)), 0
        while at < len(target):
            buffer = self._buffers[self._number]
            part = buffer[self._into : self._into + len(target) - at]
            target[at : at + part.nbytes] = part
            at, self._into = at + part.nbytes, self._into + part.nbytes
            if self._into == buffer.nbytes:
                self._number, self._into = self._number + 1, 0
        return data


def _view(data: torch.Tensor) -> Any:
    return data.numpy()


def _deliver(
    body: _Body, receivers: Sequence[int], sender: int | None, sizes: Sequence[int], members: Members
) -> torch.Tensor:
    """Send `body` to each of `receivers`. Return what `sender` sent here. `sizes`: the sizes of all ranks' bodies."""
    arrived = torch.empty(sizes[sender] if sender is not None else 0, dtype=torch.uint8)
    for at in range(0, max(sizes), BLOCK):
        block = body.next_bytes(BLOCK)
        out_sizes, in_sizes = [0] * members.world_size, [0] * members.world_size
        for receiver in receivers:
            out_sizes[receiver] = block.numel()
        if sender is not None:
            in_sizes[sender] = max(0, min(BLOCK, sizes[sender] - at))
        incoming = arrived[at : at + sum(in_sizes)]
        outgoing = block.repeat(len(receivers)) if len(receivers) != 1 else block
        members.group.alltoall_base(incoming, outgoing, in_sizes, out_sizes).wait()
    return arrived


# --- sharded

log = logging.getLogger("everstep.train")


class ShardedState:
    """This process's shard. `mesh` says which one it should have, `holds` which one it has."""

    def __init__(self, mesh: RecoverableMesh, members: Members) -> None:
        self.mesh = mesh
        self._members = members
        self.holds = mesh.shard
        self._made = (0, NEW)  # the last step that was made, and in which round
        self._undoes = False  # whether all members copy their shards in this world
        self._voted: tuple[int, int] | None = None  # completed steps at the last vote, and its round
        self._spoiled = False  # whether memory holds parts of an interrupted restore
        self._state: Mapping[str, Any] = {}
        self._objects = fsdp.ShardedObjects({})

    def track(self, state: Mapping[str, Any]) -> None:
        """Set the objects that make up the training state."""
        self._state = state
        self._objects = fsdp.ShardedObjects(state, self.mesh.over)

    def may_undo(self) -> bool:
        """Whether this member may copy its shard when a step begins: either all members do, or none."""
        return self._undoes

    def roll_back(self) -> None:
        """Clean up after the present step failed."""
        self._objects.reset()

    def vote(self, step: int, round_: int, can_undo: bool, update: Update) -> None:
        """Vote that step number `step` can be made, and wait until all members of the round have voted. Raises
        `PeerLost`: then only `decided` tells whether the step is made. `can_undo`: this member can copy its shard when
        a step begins; if all can, they do so, and vote when a step has ended. Raises `LoopError` on all members if some
        of them make the `update` of their optimizers and others have left it out."""
        self._voted = (step, round_)
        votes = self._members.gather((int(not can_undo), int(update)))
        self._undoes = not any(cannot for cannot, _ in votes)
        updates = [Update(update_) for _, update_ in votes]
        if Update.MADE in updates and Update.LEFT_OUT in updates:
            raise LoopError(
                _left_out(step, [rank for rank, update_ in enumerate(updates) if update_ is Update.LEFT_OUT])
            )
        self._made = (step + 1, round_)

    def arrived(self) -> None:
        """Wait for the gradients of the present step, so that a step that was voted for can be made. Raises
        `PeerLost`."""
        self._objects.arrived()

    def may_make(self, step: int) -> bool:
        """Whether this member knows already that step number `step` is to be made."""
        return self._made[0] == step + 1

    def decided(self) -> bool:
        """Whether the step that this member voted for is to be made. Collective, in the next round."""
        assert self._voted is not None
        step, round_ = self._voted
        mine = MemberShard(step, round_, Validity.VOTED, self.holds, 0)
        if not shard_transfer_plan.was_made(mine, self._gather(mine)):
            return False
        self._made = (step + 1, round_)
        return True

    def synchronize(
        self, step: int, validity: Validity, round_: int, start: Callable[[], int | None]
    ) -> tuple[int, str]:
        """Bring all members to one version. Returns the completed steps, and a text that says what was done.
        Collective. Raises `PeerLost`, and `NoState` if there is no whole state in memory or storage."""
        self._undoes = False
        # A new state has a digest too, because scripts may have drawn different random numbers.
        shards = self._gather(self._member(step, validity, *state_digests(self._state)))
        plan = shard_transfer_plan.plan_transfers(shards, self.mesh.shards)
        if plan is None:
            return self._from_storage(shards, round_, start), "no state was whole in memory"
        if plan.diverged:
            log.error(
                "ranks %s hold other parameters than their counterparts after the same step %d; they take theirs",
                plan.diverged, plan.step,
            )  # fmt: skip
        received = exchange(self._state, plan.transfers, self.mesh.over, self._members)
        self._fill(received)
        if shard_transfer_plan.fresh(shards):
            self._check_alike()
        self._made = (plan.step, plan.made)
        done = plan.step
        if shard_transfer_plan.fresh(shards):
            done = start() or 0
            self._made = (done, round_)
        return done, _words(plan, received, self.holds)

    def _check_alike(self) -> None:
        """Check that parameters that are not sharded are the same on all ranks. Raises `LoopError`."""
        if self.mesh.over is self.mesh.device_mesh:
            return  # FSDP2 shards all of them
        whole = dict(tensor_parallel.whole_here(self._state))
        mine = xxhash.xxh3_64_intdigest(b"".join(content(t).to_bytes(8, "little") for t in whole.values())) >> 1
        if len({digest for (digest,) in self._members.gather((mine,))}) > 1:
            raise LoopError(
                f"the ranks of a replica begin with other values of {next(iter(whole))} or another parameter that "
                'mesh["tensor"] does not cut, and would train apart: seed all processes alike before the model is '
                "built, `torch.manual_seed(0)`, as tensor parallelism asks of every script"
            )

    def answer_undecided(self, step: int, validity: Validity) -> None:
        """Tell members that voted for a step whether it was made, until none of them asks. Collective, and the first
        collective of a round: those members begin with `decided`."""
        mine = self._member(step, validity)
        while shard_transfer_plan.undecided(self._gather(mine)):
            pass  # it has its answer now, ends its step, and asks again

    def _member(self, step: int, validity: Validity, digest: int = 0, parameters: int = 0) -> MemberShard:
        made = self._made[1] if self._made[0] == step else NEW
        return MemberShard(step, made, Validity.TORN if self._spoiled else validity, self.holds, digest, parameters)

    def _gather(self, mine: MemberShard) -> list[MemberShard]:
        gathered = self._members.gather(
            (mine.step, mine.made, int(mine.validity), mine.shard, mine.digest, mine.parameters)
        )
        return [
            MemberShard(step, made, Validity(validity), shard, digest, parameters)
            for step, made, validity, shard, digest, parameters in gathered
        ]

    def _from_storage(self, shards: list[MemberShard], round_: int, start: Callable[[], int | None]) -> int:
        gone = shard_transfer_plan.missing(shards, self.mesh.shards)
        log.error("no state is whole among %d members (missing shards: %s): the last commit is what there is",
                  len(shards), ", ".join(map(str, gone)) or "none, but of other versions or parameters")  # fmt: skip
        self._spoiled = True  # this holds for a new state too: a shard may be replaced by now
        self._fill(None)
        step = start()
        if step is None:
            raise NoState(
                f"shards {gone} of {self.mesh.shards} are lost, and there is no commit: give everstep.start() a "
                "checkpoint URL, or start all processes at once so that each builds the shard of its own rank"
            )
        self._spoiled = False
        self._made = (step, round_)
        return step

    def _fill(self, received: ReceivedShard | None) -> None:
        """Hold the shard that the mesh assigns."""
        if self.holds != self.mesh.shard:
            self._objects.hold(self.mesh.shard)
        self.holds = self.mesh.shard
        if received is not None:
            unpack(self._state, received, self.mesh.over, self._members.rank)


def _left_out(step: int, ranks: list[int]) -> str:
    who = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    return (
        f"in step {step} {who} left the optimizer's step out, and the other ranks make theirs: the parts of a replica "
        "would be of other steps. If a gradient scaler has found infinities in one part of the model, write `mesh = "
        "run.mesh(model=N)` and `ShardedGradScaler(run.device.type, process_group=mesh.get_group('model'))`, from "
        "torch.distributed.fsdp.sharded_grad_scaler, in place of GradScaler(…). What the script itself decides it "
        "decides on all ranks alike: reduce a flag in the step, and skip it everywhere or nowhere"
    )


def _words(plan: ShardTransferPlan, received: ReceivedShard | None, shard: int) -> str:
    if received is not None:
        return f"shard {shard} from rank {received.sender}, {received.size} bytes"
    return f"shards went to ranks {[receiver for receiver, _ in plan.transfers]}" if plan.transfers else ""
