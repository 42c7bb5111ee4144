"""A commit as files that other tools open: safetensors with plain names, and one JSON file for the rest.

For every key of the state with tensors, `<key>.safetensors`; a module's tensors have the names of its `state_dict`, so
`model.safetensors` is what Hugging Face and other loaders expect, and what is too large for one file is split as they
split it (`…-00001-of-00003.safetensors` and `….safetensors.index.json`). `state.json` holds everything that is no
tensor, and the commit's metrics. Holds the tensors of one file in memory. Per-rank state (random generators) is left
out.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from everstep.checkpoint.errors import CheckpointError
from everstep.checkpoint.format.manifest import CommitRecord, Entry
from everstep.checkpoint.format.wire import Json
from everstep.checkpoint.load.reading import load_whole
from everstep.checkpoint.retention.late_metrics import all_metrics
from everstep.storage import ObjectStore

MAX_BYTES: Final = 5_000_000_000  # of one file, as in Hugging Face's `save_pretrained`
STATE: Final = "state.json"
FORMAT: Final = "everstep-export"  # of that file


@dataclass(frozen=True, slots=True)
class _File:
    """Tensors of one file: the name that each has there → its entry in the commit."""

    name: str
    tensors: dict[str, Entry]

    @property
    def bytes(self) -> int:
        return sum(_size(e) for e in self.tensors.values())


def export(
    store: ObjectStore, record: CommitRecord, path: str | os.PathLike[str], max_bytes: int = MAX_BYTES
) -> tuple[str, ...]:
    """Write the commit's files into the folder `path`, made if it is missing; their names. Each appears only whole.

    Raises `Damaged` if the commit is, and `CheckpointError` if the folder cannot be written.
    """
    folder = Path(path)
    entries = {e.name: e for e in record.entries}
    values: Mapping[str, Any] = record.values if isinstance(record.values, dict) else {}
    state: Mapping[str, Any] = values.get("state", {})
    written: list[str] = []
    told: dict[str, Json] = {}
    stems = set[str]()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / STATE).unlink(missing_ok=True)  # of an export before, whose files these replace one by one
        for key in sorted(state):
            body = state[key]
            tensors: dict[str, Entry] = {}
            tree = _renamed(body["tree"], (), entries, tensors)
            stem = _stem(key, stems)
            files = _split(stem, tensors, max_bytes)
            written += _write_all(store, record, folder, stem, files)
            told[key] = {"kind": body["kind"], "files": [f.name for f in files], "tree": tree}
        text: dict[str, Json] = {"format": FORMAT, "version": 1, "step": record.step, "at": record.at}
        if metrics := all_metrics(store, record):
            text["metrics"] = dict(metrics)
        text["state"] = told
        _place(folder / STATE, json.dumps(text, indent=1).encode())
    except OSError as e:
        raise unwritten(folder, e) from e
    return (*written, STATE)


def unwritten(path: Path, error: BaseException) -> CheckpointError:
    """For what a library or the system says of a file that is not there whole."""
    said = (error.strerror if isinstance(error, OSError) else None) or (str(error).strip() or repr(error))
    return CheckpointError(
        f"{path}: cannot be written: {said.splitlines()[0][:300]}; look whether the disk is full, or give another path"
    )


def write_key(
    store: ObjectStore, record: CommitRecord, folder: Path, key: str, stem: str, max_bytes: int = MAX_BYTES
) -> tuple[str, ...]:
    """Write the tensors of one key as `<stem>.safetensors`, or as several files and, at last, their index; the names.

    Raises `CheckpointError` if the key has no tensors, and `Damaged` if the commit is.
    """
    values: Mapping[str, Any] = record.values if isinstance(record.values, dict) else {}
    tensors: dict[str, Entry] = {}
    _renamed(values["state"][key]["tree"], (), {e.name: e for e in record.entries}, tensors)
    if not tensors:
        raise CheckpointError(f"{key}: holds no tensors")
    return tuple(_write_all(store, record, folder, stem, _split(stem, tensors, max_bytes)))


def _write_all(store: ObjectStore, record: CommitRecord, folder: Path, stem: str, files: list[_File]) -> list[str]:
    for file in files:
        _write(store, record, folder, file)
    return [f.name for f in files] + (_index(folder, stem, files) if len(files) > 1 else [])


def _renamed(value: Any, path: tuple[str, ...], entries: Mapping[str, Entry], found: dict[str, Entry]) -> Json:
    """The tree with the names that its tensors have in the key's file: their paths in it. `found` collects them, each
    of several tied ones too."""
    if isinstance(value, list):
        return [_renamed(v, (*path, str(i)), entries, found) for i, v in enumerate(value)]
    if not isinstance(value, dict):
        return value  # type: ignore[no-any-return]
    match next(iter(value.items())) if len(value) == 1 else None:
        case ("$tensor" | "$ndarray") as tag, str() as name:
            plain = "/".join(path)
            while plain in found:  # the keys 1 and "1" of one mapping
                plain += "~"
            found[plain] = entries[name]
            return {tag: plain}
        case "$tuple", list() as items:
            return {"$tuple": _renamed(items, path, entries, found)}
        case "$dict", list() as pairs:
            return {"$dict": [[k, _renamed(v, (*path, str(k)), entries, found)] for k, v in pairs]}
    return {k: _renamed(v, (*path, k), entries, found) for k, v in value.items()}


def _split(stem: str, tensors: Mapping[str, Entry], max_bytes: int) -> list[_File]:
    groups: list[dict[str, Entry]] = []
    size = 0
    for name in sorted(tensors):
        if not groups or (size + _size(tensors[name]) > max_bytes and groups[-1]):
            groups.append({})
            size = 0
        groups[-1][name] = tensors[name]
        size += _size(tensors[name])
    if len(groups) == 1:
        return [_File(f"{stem}.safetensors", groups[0])]
    return [_File(f"{stem}-{i + 1:05d}-of-{len(groups):05d}.safetensors", g) for i, g in enumerate(groups)]


def _write(store: ObjectStore, record: CommitRecord, folder: Path, file: _File) -> None:
    loaded = load_whole(store, record, {e.name for e in file.tensors.values()})
    tensors: dict[str, torch.Tensor] = {}
    used = set[str]()
    for name, entry in file.tensors.items():
        # The format holds no tensor twice; tied ones become two.
        tensors[name] = loaded[entry.name].clone() if entry.name in used else loaded[entry.name]
        used.add(entry.name)
    temporary = folder / f".{file.name}.{os.getpid()}"
    try:
        temporary.touch()
        mode = temporary.stat().st_mode  # by the umask; safetensors makes files that only their owner can read
        try:
            save_file(tensors, temporary, metadata={"format": "pt"})
        except SafetensorError as e:
            raise unwritten(folder / file.name, e) from e
        temporary.chmod(mode)
        temporary.replace(folder / file.name)
    finally:
        temporary.unlink(missing_ok=True)


def _index(folder: Path, stem: str, files: list[_File]) -> list[str]:
    name = f"{stem}.safetensors.index.json"
    where = {tensor: file.name for file in files for tensor in file.tensors}
    body = {"metadata": {"total_size": sum(f.bytes for f in files)}, "weight_map": where}
    _place(folder / name, json.dumps(body, indent=1).encode())
    return [name]


def _place(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _stem(key: str, taken: set[str]) -> str:
    """A file name for a key, which no other key has, also where capitals and small letters are one."""
    plain = stem = re.sub(r"[^A-Za-z0-9._-]", "_", key).lstrip(".") or "_"
    number = 0
    while stem.casefold() in taken:
        number += 1
        stem = f"{plain}-{number}"
    taken.add(stem.casefold())
    return stem


def _size(entry: Entry) -> int:
    return sum(p.end - p.begin for p in entry.pieces)
