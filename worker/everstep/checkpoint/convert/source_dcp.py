"""Opens a folder that `torch.distributed.checkpoint` has written, with its own reader.

Its description, `.metadata`, is a pickle, and so is each value that is no tensor. Neither is executed here: the first
may name only the classes that the description is made of, the others are read with `weights_only=True`.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PosixPath, PurePosixPath
from typing import Any, Final

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load

from everstep.checkpoint.convert.source import Form, Source, checked, is_optimizer, of_state
from everstep.checkpoint.errors import CheckpointError, FormatError, StateMismatch
from everstep.checkpoint.format.boxes import check_tiling
from everstep.checkpoint.format.manifest import Piece
from everstep.torch_private.files import PRIVATE_OF_DCP, PRIVATE_OF_SAVE

_AT_ONCE: Final = 64 * 2**20  # bytes of tensors that are read by one call
_PATHS: Final = {
    ("pathlib", "PosixPath"): PosixPath, ("pathlib._local", "PosixPath"): PosixPath,
    ("pathlib", "PurePosixPath"): PurePosixPath, ("pathlib", "Path"): Path,
}  # fmt: skip
_CLASSES: Final = {
    ("torch.distributed.checkpoint.metadata", name): getattr(metadata, name)
    for name in (
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
        "TensorProperties", "StorageMeta",
    )
} | PRIVATE_OF_DCP  # fmt: skip
_OTHERS: Final = {
    ("torch", "Size"): torch.Size,
    ("collections", "OrderedDict"): dict,
} | PRIVATE_OF_SAVE


def open_dcp(folder: Path, key: str, stateful: Iterable[str] = ()) -> Source:
    """The state that the folder holds. Raises `CheckpointError` naming the file, or the value that no commit can hold.

    Every file that the description names has to be there, with the bytes that it says.
    """
    try:
        return _opened(folder, key, stateful)
    except CheckpointError:
        raise
    except (AttributeError, TypeError, ValueError, KeyError, IndexError) as e:
        raise FormatError(f"{folder}/.metadata: is no description of a checkpoint: {e!r:.300}") from e


def _opened(folder: Path, key: str, stateful: Iterable[str]) -> Source:
    reader = _Reader(folder)
    described = reader.read_metadata()
    _check_files(folder, described)
    entries: Mapping[str, Any] = described.state_dict_metadata
    paths = described.planner_data if isinstance(described.planner_data, dict) else {}
    names = [name for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)]
    for name in names:
        _check_chunks(folder, name, entries[name])
    values = _values(reader, [name for name, entry in entries.items() if isinstance(entry, BytesStorageMetadata)])
    # In the tree each tensor is replaced by an empty one whose shape has its number, so that no tensor is read.
    leaves: dict[str, Any] = {name: torch.empty((at, 0)) for at, name in enumerate(names)} | values
    tree = _nested({name: tuple(paths.get(name) or (name,)) for name in entries}, leaves, folder)
    state = {name: _numbered(value) for name, value in tree.items()}
    source = of_state(str(folder), state, key, stateful)
    meant = {path: names[form.shape[0]] for path, form in source.tensors.items()}
    forms = {path: Form(tuple(entries[n].size), entries[n].properties.dtype) for path, n in meant.items()}

    def read(requested: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        batch: dict[str, torch.Tensor] = {}
        size = 0
        for path in requested:
            batch[path] = torch.empty(forms[path].shape, dtype=forms[path].dtype)
            size += batch[path].nbytes
            if size >= _AT_ONCE:
                yield from _filled(reader, batch, meant)
                batch, size = {}, 0
        yield from _filled(reader, batch, meant)

    return checked(Source(str(folder), source.bodies, forms, read))


class _Unpickler(pickle.Unpickler):
    """Makes objects of the classes in a description, and of no others."""

    def find_class(self, module: str, name: str) -> Any:
        kind = {**_CLASSES, **_PATHS, **_OTHERS}.get((module, name))
        if kind is None and module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            kind = getattr(torch, name)
        if kind is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no description of a checkpoint is made of")
        return kind


class _Reader(filesystem.FileSystemReader):
    """torch's reader, with its description read without executing it, once."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._folder = folder
        self._described: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._described is None:
            path = self._folder / ".metadata"
            try:
                described = _Unpickler(io.BytesIO(path.read_bytes())).load()
                if not isinstance(described, Metadata) or not isinstance(described.state_dict_metadata, dict):
                    raise TypeError(f"it holds a {type(described).__name__}")
            except Exception as e:  # a pickle that was cut or changed raises anything
                raise FormatError(f"{path}: is no description of a checkpoint: {e!s:.300}") from e
            self._described = described
        if getattr(self._described, "storage_meta", None) is None:
            self._described.storage_meta = StorageMeta()
        self._described.storage_meta.load_id = self.load_id  # type: ignore[union-attr]
        return self._described


class _Planner(DefaultLoadPlanner):
    """Names as they are, and values read without executing them."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        try:
            self.state_dict[name] = torch.load(value, weights_only=True, map_location="cpu")
        except Exception as e:
            raise StateMismatch(
                f"{name}: a value that only pickle makes, and nothing here executes pickles: {str(e).splitlines()[0]}"
            ) from e


def _check_chunks(folder: Path, name: str, entry: TensorStorageMetadata) -> None:
    """torch reads the chunks that are described, and leaves what no chunk covers as the memory was."""
    pieces = tuple(Piece(0, name, tuple(c.offsets), tuple(c.sizes), 0, 0) for c in entry.chunks)
    check_tiling(tuple(entry.size), pieces, f"{folder}/.metadata: {name}")


def _check_files(folder: Path, described: Metadata) -> None:
    ends: dict[str, int] = {}
    for info in (described.storage_data or {}).values():
        path = str(info.relative_path)
        if "/" in path or path.startswith("."):
            raise FormatError(f"{folder}/.metadata: names {path!r}, which is no file of the folder")
        ends[path] = max(ends.get(path, 0), int(info.offset) + int(info.length))
    for path in sorted(ends):
        file = folder / path
        if not file.is_file():
            raise CheckpointError(f"{file}: is missing, and .metadata says that it holds a part of the checkpoint")
        if file.stat().st_size < ends[path]:
            raise FormatError(
                f"{file}: has {file.stat().st_size} bytes, .metadata says at least {ends[path]}: it was cut"
            )


def _values(reader: _Reader, names: list[str]) -> dict[str, Any]:
    absent = object()
    values: dict[str, Any] = dict.fromkeys(names, absent)
    if values:
        _load(reader, values)
    if lost := [name for name in names if values[name] is absent]:
        raise FormatError(f"{reader.path}: {lost[0]}: torch.distributed.checkpoint has not read it")
    return values


def _filled(reader: _Reader, batch: dict[str, torch.Tensor], meant: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    wanted: dict[str, Any] = {meant[path]: tensor for path, tensor in batch.items()}
    if wanted:
        _load(reader, wanted)
    yield from batch.items()


def _load(reader: _Reader, state: dict[str, Any]) -> None:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            load(state, storage_reader=reader, planner=_Planner(), no_dist=True)
    except CheckpointException as e:
        raise _translated(reader, cause_of(e)) from e
    except CheckpointError:
        raise
    except Exception as e:  # of any library below torch's reader
        raise _translated(reader, e) from e


def cause_of(error: CheckpointException) -> BaseException:
    """The error of this process: torch gathers the errors of all ranks, also those that are no `Exception`."""
    return next((failure[0] for _, failure in sorted(error.failures.items())), error)


def _translated(reader: _Reader, cause: BaseException) -> BaseException:
    if isinstance(cause, CheckpointError) or not isinstance(cause, Exception):
        return cause
    return FormatError(f"{reader.path}: torch.distributed.checkpoint cannot read it: {cause!s:.300}")


def _nested(paths: Mapping[str, tuple[Any, ...]], leaves: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The tree that has each leaf at its path; a number in a path is an index in a list."""
    root: dict[Any, Any] = {}
    for name, path in paths.items():
        level = root
        for part in path[:-1]:
            level = level.setdefault(part, {})
            if not isinstance(level, dict):
                raise FormatError(f"{folder}/.metadata: {name} is below another value")
        if path[-1] in level:
            raise FormatError(f"{folder}/.metadata: {name} stands twice")
        level[path[-1]] = _Leaf(leaves[name])
    listed = _listed(root, folder)
    assert isinstance(listed, dict)
    return listed


class _Leaf:
    """A leaf of the tree: its value may be a container itself, and is not changed."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _listed(level: Any, folder: Path) -> Any:
    if isinstance(level, _Leaf):
        return level.value
    if level and all(isinstance(part, int) for part in level):
        if sorted(level) != list(range(len(level))):
            raise FormatError(f"{folder}/.metadata: a list lacks some of its {max(level) + 1} items")
        return [_listed(level[at], folder) for at in range(len(level))]
    return {str(part): _listed(value, folder) for part, value in level.items()}


def _numbered(value: Any) -> Any:
    """An optimizer's state with numbers for its parameters, which torch writes as texts."""
    if not is_optimizer(value) or not all(str(name).isdecimal() for name in value["state"]):
        return value
    return {**value, "state": {int(name): moments for name, moments in value["state"].items()}}
