"""Opens what `torch.save` and safetensors have written: single files, and the folders of Hugging Face.

torch's and safetensors' own readers do the work: `torch.load(weights_only=True, mmap=True)`, which executes nothing and
reads a tensor when it is used, and `safe_open`. Invariant: a file that is missing, cut or of another kind is named
before anything is written elsewhere.
"""

from __future__ import annotations

import json
import pickle
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open

from everstep.checkpoint.convert.outgoing import FORMAT, STATE
from everstep.checkpoint.convert.source import MODEL, Form, Source, check_key, checked, of_state
from everstep.checkpoint.errors import CheckpointError, FormatError
from everstep.checkpoint.format.wire import Json
from everstep.checkpoint.state.tree import TORCH, join

_INDEX: Final = ".safetensors.index.json"


def open_source(path: Path, key: str = MODEL, stateful: Iterable[str] = ()) -> Source:
    """The source at `path`: a folder of `torch.distributed.checkpoint`, a folder of Hugging Face (its index, or its one
    safetensors file), a safetensors file, or a file of `torch.save`.

    `key`: of the state that a model's tensors become, where the files say none. `stateful`: as in `source.of_state`.
    Raises `CheckpointError` naming the file and what is wrong with it.
    """
    if path.is_dir():
        if (path / ".metadata").is_file():
            from everstep.checkpoint.convert.source_dcp import open_dcp  # noqa: PLC0415  it takes seconds to import

            return open_dcp(path, key, stateful)
        return _open_safetensors(str(path), _files_of(path), key)
    if not path.is_file():
        raise CheckpointError(f"{path}: there is no such file or folder")
    if path.name.endswith(_INDEX):
        return _open_safetensors(str(path), _indexed(path), key)
    if path.suffix == ".safetensors":
        return _open_safetensors(str(path), {None: path}, key)
    return of_state(str(path), load_torch(path), key, stateful)


def is_source(path: Path) -> bool:
    """Whether `open_source` can open this file or folder. A folder of commits is no source."""
    if path.is_dir():
        if (path / "log").is_dir():
            return False
        return (path / ".metadata").is_file() or any(path.glob("*.safetensors*"))
    return path.is_file()


def load_torch(path: Path) -> Any:
    """The object in a file of `torch.save`, its tensors on the CPU and mapped. Raises `FormatError`."""
    if not _is_zip(path):
        raise FormatError(
            f"{path}: is no file that torch.save writes today (a zip archive). If an old torch wrote it, load it with "
            "torch.load and save it again; a safetensors file needs the ending .safetensors"
        )
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as e:
        raise FormatError(
            f"{path}: holds objects that only pickle makes, and nothing here executes pickles: "
            f"{_first_line(e)}. Save state_dicts, tensors and numbers instead"
        ) from e
    except Exception as e:  # a pickle that was cut or changed raises anything
        raise FormatError(f"{path}: cannot be read: {_first_line(e)}") from e


def _files_of(folder: Path) -> dict[str | None, Path]:
    """The files of a folder that Hugging Face would load, by tensor; a file that has all tensors under None."""
    indices = sorted(folder.glob(f"*{_INDEX}"))
    singles = [p for p in sorted(folder.glob("*.safetensors")) if "-of-" not in p.name]
    candidates = [p for p in (folder / f"model{_INDEX}", folder / "model.safetensors") if p.is_file()]
    candidates = candidates or (indices if len(indices) == 1 and not singles else singles if not indices else [])
    if len(candidates) != 1:
        raise CheckpointError(
            f"{folder}: holds {'several' if indices or singles else 'no'} checkpoints that could be meant: a .metadata "
            f"of torch.distributed.checkpoint, model{_INDEX} or model.safetensors is expected; give the file itself"
        )
    if len(keys := _exported(folder)) > 1:
        raise CheckpointError(
            f"{folder}: is an export of everstep with the keys {', '.join(keys)}, and an import of safetensors takes "
            f"one module. Give its file itself ({candidates[0]}), or copy the commit with `everstep ckpt restore`"
        )
    return _indexed(candidates[0]) if candidates[0].name.endswith(_INDEX) else {None: candidates[0]}


def _exported(folder: Path) -> list[str]:
    """The keys of the state in this folder, if `export` has written it."""
    try:
        body = json.loads((folder / STATE).read_text())
        return sorted(body["state"]) if body["format"] == FORMAT else []
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _indexed(index: Path) -> dict[str | None, Path]:
    try:
        body = json.loads(index.read_text())
        where = body["weight_map"]
        files: dict[str | None, Path] = {str(name): index.parent / file for name, file in where.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise FormatError(f"{index}: is no index of safetensors files: {e!r}") from e
    for name, file in files.items():
        if file.parent != index.parent:
            raise FormatError(f"{index}: weight_map: {name} is in {file}, outside of the folder")
    return files


def _open_safetensors(what: str, files: dict[str | None, Path], key: str) -> Source:
    check_key(what, key)
    where: dict[str, tuple[Path, str]] = {}
    forms: dict[str, Form] = {}
    for file in sorted(set(files.values())):
        with _opened(file) as reader:
            there = list(reader.keys())
            wanted = there if None in files else [n for n, f in files.items() if f == file and n is not None]
            for name in wanted:
                if name not in there:
                    raise FormatError(f"{what}: {file.name} has no tensor {name!r}, which the index says is in it")
                part = reader.get_slice(name)
                path = join(key, name)
                forms[path] = Form(tuple(part.get_shape()), _dtype(file, name, part.get_dtype()))
                where[path] = (file, name)
    if not forms:
        raise FormatError(f"{what}: holds no tensors")
    named: list[Json] = [[where[path][1], {"$tensor": path}] for path in sorted(forms)]
    if any(name.startswith("$") for _, name in where.values()):
        tree: Json = {"$dict": named}
    else:
        tree = {where[path][1]: {"$tensor": path} for path in sorted(forms)}

    def read(requested: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for path in requested:
            file, name = where[path]
            with _opened(file) as reader:
                yield path, reader.get_tensor(name)

    return checked(Source(what, {key: {"kind": "module", "tree": tree}}, forms, read))


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except FileNotFoundError as e:
        raise CheckpointError(f"{file}: is missing") from e
    except (SafetensorError, OSError) as e:
        raise FormatError(f"{file}: is no whole safetensors file: {_first_line(e)}") from e


def _dtype(file: Path, name: str, dtype: str) -> torch.dtype:
    if dtype not in TORCH:
        raise FormatError(f"{file}: {name}: tensors of type {dtype} cannot be in a checkpoint; convert it")
    return TORCH[dtype]


def _is_zip(path: Path) -> bool:
    try:
        return zipfile.is_zipfile(path)
    except zipfile.BadZipFile:  # it says that it is of several disks
        return False


def _first_line(e: Exception) -> str:
    return (str(e).strip() or repr(e)).splitlines()[0][:300]
