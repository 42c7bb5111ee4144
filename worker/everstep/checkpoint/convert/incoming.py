"""Makes a commit of the files of another library: the beginning of a new log, which a run goes on from.

Invariants: the target is empty, or has a whole checkpoint; everything that can be refused is refused before the first
byte is written; only one tensor after the other is in memory.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import xxhash

from everstep.checkpoint.convert.source import MODEL, Source
from everstep.checkpoint.convert.source_files import open_source
from everstep.checkpoint.errors import CheckpointError, FormatError
from everstep.checkpoint.format.boxes import whole
from everstep.checkpoint.format.chunks import chunk_bytes_for
from everstep.checkpoint.format.layout import save_id, shard_name
from everstep.checkpoint.format.manifest import NONE, CommitRecord, Entry, Piece, Shard, decode_record, encode_record
from everstep.checkpoint.format.steps import whole_step
from everstep.checkpoint.log.commitlog import CommitLog, now
from everstep.checkpoint.log.opening import text_of
from everstep.checkpoint.save.shard import Plan, plan_shard
from everstep.checkpoint.state.alike import to_bytes
from everstep.checkpoint.state.tree import DTYPES
from everstep.storage import ObjectStore, RetryingStore, open_store, probe


def import_checkpoint(
    source: str | os.PathLike[str],
    url: str | os.PathLike[str] | None = None,
    *,
    step: int = 0,
    key: str = MODEL,
    stateful: Iterable[str] = (),
    storage_options: Mapping[str, Any] | None = None,
    store: ObjectStore | None = None,
) -> CommitRecord:
    """Make a commit of `step` of what another library has written, below `url` (or in `store`), where nothing is yet.

    - `source`: a folder of `torch.distributed.checkpoint`; a file of `torch.save`; a safetensors file; a folder of
      Hugging Face, or its index file.
    - `key`: of the state that a model's tensors become, where the files say none.
    - `stateful`: keys of objects that have `state_dict` and `load_state_dict`, beside optimizers and schedulers.

    Raises `CheckpointError` naming the file, the tensor or the target that will not do, and `StorageError`.
    """
    if (url is None) == (store is None):
        raise CheckpointError("give the URL of the checkpoint to make, or store=")
    try:
        step = whole_step(step)
    except ValueError as e:
        raise CheckpointError(str(e)) from e
    opened = open_source(Path(source), key, stateful)
    target = store
    if target is None:
        target = RetryingStore(open_store(text_of(url) or "", storage_options))
        probe(target)
    return bring(opened, target, step, uuid.uuid4().hex, now())


def bring(source: Source, target: ObjectStore, step: int, writer: str, at: str) -> CommitRecord:
    """Write `source` to an empty store as the commit of `step`; the record. `writer` is 32 new hex digits, `at` the
    time as RFC 3339.

    Raises `CheckpointError` if the target has a log already or the state is too large to describe, `FormatError` if a
    tensor turns out to be another than was said, and `StorageError`. What it leaves then does not hinder another one.
    """
    log = CommitLog(target)
    log.unbegun()
    forms = {name: torch.empty(form.shape, dtype=form.dtype, device="meta") for name, form in source.tensors.items()}
    plan = plan_shard(forms)
    identifier = save_id(0, writer, 1)
    entries = tuple(_entry(name, forms[name], plan) for name in sorted(forms))
    drafted = Shard(shard_name(identifier, 0), 0, 1, ("0" * 32,))
    draft = CommitRecord(
        1, writer, 0, "", step, identifier, 1, at, 0, NONE, (drafted,) if forms else (), entries,
        {"state": dict(source.bodies)},
    )  # fmt: skip
    encode_record(draft)  # a state that no record can describe is refused now
    shards = (_write(source, target, drafted.path, plan),) if forms else ()
    record = replace(draft, shards=shards)
    decode_record(encode_record(record), 1, f"{target.url}: the record to be written")
    return log.begin(writer, record)


def _entry(name: str, form: torch.Tensor, plan: Plan) -> Entry:
    box = whole(tuple(form.shape))
    return Entry(name, DTYPES[form.dtype], box.shape, (Piece(0, name, box.offset, box.shape, *plan.spans[name]),))


@dataclass(slots=True)
class _Sums:
    """Computes the checksum of each chunk of `size` bytes, from data of any length."""

    size: int
    done: list[str]
    left: int
    running: xxhash.xxh3_128

    def add(self, data: memoryview) -> None:
        while len(data):
            part = data[: self.left]
            self.running.update(part)
            self.left -= len(part)
            data = data[len(part) :]
            if not self.left:
                self.done.append(self.running.hexdigest())
                self.running, self.left = xxhash.xxh3_128(), self.size

    def finish(self) -> tuple[str, ...]:
        if self.left < self.size or not self.done:
            self.done.append(self.running.hexdigest())
        return tuple(self.done)


def _write(source: Source, target: ObjectStore, path: str, plan: Plan) -> Shard:
    size = chunk_bytes_for(plan.size)
    sums = _Sums(size, [], size, xxhash.xxh3_128())
    with target.open_write(path, plan.size) as into:
        for data in _bytes(source, plan):
            sums.add(data)
            into.write(data)
        into.commit()
    return Shard(path, plan.size, size, sums.finish())


def _bytes(source: Source, plan: Plan) -> Iterator[memoryview]:
    yield memoryview(plan.header)
    for name, tensor in source.read(plan.spans):
        form, (begin, end) = source.tensors[name], plan.spans[name]
        if (tuple(tensor.shape), tensor.dtype) != (form.shape, form.dtype) or tensor.nbytes != end - begin:
            raise FormatError(
                f"{source.what}: {name} is {tensor.dtype} {tuple(tensor.shape)}, and was said to be {form}"
            )
        if end > begin:
            yield memoryview(to_bytes(tensor))
