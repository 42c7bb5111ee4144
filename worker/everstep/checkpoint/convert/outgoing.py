"""A commit as other libraries read it: a folder of `torch.distributed.checkpoint`, a file of `torch.save`, a folder of
Hugging Face. `export` writes everstep's own plain form.

torch's and safetensors' own writers do the work. Invariant: a file or folder appears under its name only whole. A
folder is made under another name beside it and renamed; in a folder of Hugging Face the file that a reader begins with
comes last.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from everstep.checkpoint.errors import CheckpointError, StateMismatch
from everstep.checkpoint.format.manifest import CommitRecord, Entry
from everstep.checkpoint.format.wire import Json
from everstep.checkpoint.load.reading import load_whole
from everstep.checkpoint.retention.late_metrics import all_metrics
from everstep.checkpoint.state.tree import references, unflatten
from everstep.storage import ObjectStore

# --- export
# A commit as files that other tools open: safetensors with plain names, and one JSON file for the rest. For every key
# of the state with tensors, `<key>.safetensors`; a module's tensors have the names of its `state_dict`, so
# `model.safetensors` is what Hugging Face and other loaders expect, and what is too large for one file is split as they
# split it (`…-00001-of-00003.safetensors` and `….safetensors.index.json`). `state.json` holds everything that is no
# tensor, and the commit's metrics. Holds the tensors of one file in memory. Per-rank state (random generators) is left
# out.

MAX_BYTES: Final = 5_000_000_000  # of one file, as in Hugging Face's `save_pretrained`
STATE: Final = "state.json"
FORMAT: Final = "everstep-export"  # of that file


_Files = dict[str, dict[str, Entry]]  # by a file's name: the name that each tensor has there → its entry in the commit


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
    contents: dict[str, Json] = {}
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
            contents[key] = {"kind": body["kind"], "files": [*files], "tree": tree}
        text: dict[str, Json] = {"format": FORMAT, "version": 1, "step": record.step, "at": record.at}
        if metrics := all_metrics(store, record):
            text["metrics"] = dict(metrics)
        text["state"] = contents
        _write_json(folder / STATE, text)
    except OSError as e:
        raise unwritten(folder, e) from e
    return (*written, STATE)


def unwritten(path: Path, error: BaseException) -> CheckpointError:
    """The error for a file that could not be written whole, with the reason that a library or the system gave."""
    reason = (error.strerror if isinstance(error, OSError) else None) or (str(error).strip() or repr(error))
    return CheckpointError(
        f"{path}: cannot be written: {reason.splitlines()[0][:300]}; look whether the disk is full, or give another "
        "path"
    )


def _write_all(store: ObjectStore, record: CommitRecord, folder: Path, stem: str, files: _Files) -> list[str]:
    for name, tensors in files.items():
        _write(store, record, folder / name, tensors)
    return [*files, *(_index(folder, stem, files) if len(files) > 1 else ())]


def _renamed(value: Any, path: tuple[str, ...], entries: Mapping[str, Entry], tensors: dict[str, Entry]) -> Json:
    """The tree with the names that its tensors have in the key's file: their paths in the tree. They are added to
    `tensors`; each of several tied tensors has a name."""
    if isinstance(value, list):
        return [_renamed(v, (*path, str(i)), entries, tensors) for i, v in enumerate(value)]
    if not isinstance(value, dict):
        return value  # type: ignore[no-any-return]
    match next(iter(value.items())) if len(value) == 1 else None:
        case ("$tensor" | "$ndarray") as tag, str() as name:
            plain = "/".join(path)
            while plain in tensors:  # the keys 1 and "1" of one mapping
                plain += "~"
            tensors[plain] = entries[name]
            return {tag: plain}
        case "$tuple", list() as items:
            return {"$tuple": _renamed(items, path, entries, tensors)}
        case "$dict", list() as pairs:
            return {"$dict": [[k, _renamed(v, (*path, str(k)), entries, tensors)] for k, v in pairs]}
    return {k: _renamed(v, (*path, k), entries, tensors) for k, v in value.items()}


def _split(stem: str, tensors: Mapping[str, Entry], max_bytes: int) -> _Files:
    groups: list[dict[str, Entry]] = []
    size = 0
    for name in sorted(tensors):
        if not groups or (size + _size(tensors[name]) > max_bytes and groups[-1]):
            groups.append({})
            size = 0
        groups[-1][name] = tensors[name]
        size += _size(tensors[name])
    if len(groups) == 1:
        return {f"{stem}.safetensors": groups[0]}
    return {f"{stem}-{i + 1:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups)}


def _write(store: ObjectStore, record: CommitRecord, path: Path, entries: Mapping[str, Entry]) -> None:
    loaded = load_whole(store, record, {e.name for e in entries.values()})
    tensors: dict[str, torch.Tensor] = {}
    used = set[str]()
    for name, entry in entries.items():
        # The format holds no tensor twice; tied ones become two.
        tensors[name] = loaded[entry.name].clone() if entry.name in used else loaded[entry.name]
        used.add(entry.name)
    with _replaced(path) as temporary:
        temporary.touch()
        mode = temporary.stat().st_mode  # by the umask; safetensors makes files that only their owner can read
        try:
            save_file(tensors, temporary, metadata={"format": "pt"})
        except SafetensorError as e:
            raise unwritten(path, e) from e
        temporary.chmod(mode)


def _index(folder: Path, stem: str, files: _Files) -> list[str]:
    name = f"{stem}.safetensors.index.json"
    where = {tensor: file for file, tensors in files.items() for tensor in tensors}
    size = sum(_size(e) for tensors in files.values() for e in tensors.values())
    _write_json(folder / name, {"metadata": {"total_size": size}, "weight_map": where})
    return [name]


def _write_json(path: Path, body: Mapping[str, Any]) -> None:
    with _replaced(path) as temporary:
        temporary.write_bytes(json.dumps(body, indent=1).encode())


@contextmanager
def _replaced(path: Path) -> Iterator[Path]:
    """A temporary name beside `path`. Its file replaces `path` when the block ends without an error."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _stem(key: str, taken: set[str]) -> str:
    """A file name for a key that no other key has, also on file systems that ignore case."""
    plain = stem = re.sub(r"[^A-Za-z0-9._-]", "_", key).lstrip(".") or "_"
    number = 0
    while stem.casefold() in taken:
        number += 1
        stem = f"{plain}-{number}"
    taken.add(stem.casefold())
    return stem


def _size(entry: Entry) -> int:
    return sum(p.end - p.begin for p in entry.pieces)


# --- outgoing

FORMATS: Final = ("safetensors", "huggingface", "torch", "dcp")
_MODEL_FILES: Final = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json")


def export_as(
    store: ObjectStore,
    record: CommitRecord,
    path: str | os.PathLike[str],
    form: str,
    keys: Iterable[str] | None = None,
    max_bytes: int = MAX_BYTES,
) -> tuple[str, ...]:
    """Write a commit, or `keys` of it, to `path`; the names of the files there.

    - "safetensors": a folder with a file a key, and `state.json`; it has all keys.
    - "huggingface": the tensors of one key (the one module, if none is said) as `model.safetensors`, or in files of at
      most `max_bytes` with an index, into a folder that may hold a `config.json` but no model.
    - "torch": one new file, for `torch.load(weights_only=True)`: a dict by key, or of one key in `keys` what it holds.
    - "dcp": a new folder, for `torch.distributed.checkpoint.load`: keys and names as the state passed to it has them.

    What each rank has of its own (random generators) is left out. The last two hold the exported keys in memory.
    Raises `CheckpointError` for a target that is there, `Damaged` if the commit is, `StateMismatch` for an unknown key.
    """
    target, requested = Path(os.path.abspath(path)), None if keys is None else tuple(keys)
    if form not in FORMATS:
        raise CheckpointError(f"format {form!r}: one of {', '.join(FORMATS)} is expected")
    bodies = bodies_of(record, requested)
    if form == "safetensors":
        if requested is not None:
            raise CheckpointError("format 'safetensors' has all keys; leave them out, or take another format")
        return export(store, record, target, max_bytes)
    try:
        if form == "huggingface":
            key = _one_module(bodies, requested)
            return _huggingface(store, record, target, key, bodies[key]["tree"], max_bytes)
        if form == "torch":
            state = _values(store, record, bodies)
            whole: Any = state[requested[0]] if requested is not None and len(requested) == 1 else state
            with _placed(target) as temporary:
                try:
                    torch.save(whole, temporary)
                except RuntimeError as e:  # of its writer, for a disk that is full
                    raise unwritten(target, e) from e
            return (target.name,)
        return _dcp(_values(store, record, bodies), target)
    except OSError as e:
        raise unwritten(target, e) from e


def bodies_of(record: CommitRecord, keys: tuple[str, ...] | None = None) -> dict[str, Any]:
    """A commit's content under these keys, or under all. Raises `StateMismatch` for a key that it does not have."""
    values: Mapping[str, Any] = record.values if isinstance(record.values, dict) else {}
    state: dict[str, Any] = dict(values.get("state", {}))
    for key in keys or ():
        if key not in state:
            raise StateMismatch(
                f"the commit of step {record.step} has no key {key!r}; it has {', '.join(sorted(state))}"
            )
    return state if keys is None else {key: state[key] for key in keys}


def _one_module(bodies: Mapping[str, Any], requested: tuple[str, ...] | None) -> str:
    candidates = [key for key, body in bodies.items() if requested is not None or body["kind"] == "module"]
    if len(candidates) != 1:
        names = ", ".join(candidates) or "none"
        raise StateMismatch(f"format 'huggingface' is for the tensors of one key, and there are {names}; name one")
    return candidates[0]


def _huggingface(
    store: ObjectStore, record: CommitRecord, folder: Path, key: str, tree: Json, max_bytes: int
) -> tuple[str, ...]:
    there = sorted(p.name for p in folder.iterdir() if p.name.endswith(_MODEL_FILES)) if folder.is_dir() else []
    if there:
        raise CheckpointError(f"{folder}: holds {there[0]} already, and two models in a folder get mixed; give another")
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Entry] = {}
    _renamed(tree, (), {e.name: e for e in record.entries}, tensors)
    if not tensors:
        raise CheckpointError(f"{key}: holds no tensors")
    return tuple(_write_all(store, record, folder, "model", _split("model", tensors, max_bytes)))


def _values(store: ObjectStore, record: CommitRecord, bodies: Mapping[str, Any]) -> dict[str, Any]:
    """The state as plain values; numpy's arrays as tensors, which readers that execute nothing take."""
    tensors = load_whole(store, record, {name for body in bodies.values() for name in references(body["tree"])})
    state = {key: unflatten(_as_tensors(body["tree"]), tensors, key) for key, body in bodies.items()}
    modules = [key for key, body in bodies.items() if body["kind"] == "module"]
    for key, body in bodies.items():
        if body["kind"] == "optimizer":
            state[key] = _grouped(state[key], modules)
    return state


def _grouped(tree: Mapping[str, Any], modules: Iterable[str]) -> dict[str, Any]:
    """An optimizer's state by names, in the form of `torch.distributed.checkpoint.state_dict`: without the module's key
    in the names, where there is one, and with groups of those parameters that have the same options."""
    names = list(tree["param_groups"])
    short = len(next((f"{key}." for key in modules if all(name.startswith(f"{key}.") for name in names)), ""))
    groups: dict[object, dict[str, Any]] = {}
    for name, options in tree["param_groups"].items():
        texts = [(k, v.tolist() if isinstance(v, torch.Tensor) else repr(v)) for k, v in sorted(options.items())]
        groups.setdefault(str(texts), {"params": [], **options})["params"].append(name[short:])
    state = {name[short:]: value for name, value in tree["state"].items()}
    rest = {name: value for name, value in tree.items() if name not in ("state", "param_groups")}
    return {**rest, "state": state, "param_groups": list(groups.values())}


def _as_tensors(tree: Any) -> Any:
    if isinstance(tree, list):
        return [_as_tensors(value) for value in tree]
    if not isinstance(tree, dict):
        return tree
    if set(tree) == {"$ndarray"}:
        return {"$tensor": tree["$ndarray"]}
    return {name: _as_tensors(value) for name, value in tree.items()}


def _dcp(state: dict[str, Any], folder: Path) -> tuple[str, ...]:
    from torch.distributed.checkpoint.api import CheckpointException  # noqa: PLC0415
    from torch.distributed.checkpoint.filesystem import FileSystemWriter  # noqa: PLC0415  it takes seconds to import
    from torch.distributed.checkpoint.state_dict_saver import save  # noqa: PLC0415

    from everstep.checkpoint.convert.source_dcp import cause_of  # noqa: PLC0415

    with _placed(folder) as temporary, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        try:
            save(state, storage_writer=FileSystemWriter(temporary), no_dist=True)
        except CheckpointException as e:
            match cause_of(e):
                case OSError() | RuntimeError() as cause:
                    raise unwritten(folder, cause) from e
                case ValueError() as cause:  # the keys 1 and "1" of a dict, say
                    raise CheckpointError(f"{folder}: DCP cannot hold it: {cause}; take another format") from e
                case cause:
                    raise cause from e
    return tuple(sorted(p.name for p in folder.iterdir()))


@contextmanager
def _placed(path: Path) -> Iterator[Path]:
    """A temporary name beside `path`. Its file or folder is renamed to `path` when the block ends without an error.
    Raises `CheckpointError` if `path` exists."""
    _refuse_what_is_there(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.partial")
    try:
        yield temporary
        for file in [temporary, *temporary.rglob("*")] if temporary.is_dir() else [temporary]:
            _sync(file)
        _refuse_what_is_there(path)
        temporary.rename(path)
        _sync(path.parent)
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)


def _refuse_what_is_there(path: Path) -> None:
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise CheckpointError(f"{path}: is there already; give a name that is free")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
