"""Shared by the commands of `everstep ckpt`: arguments, the store, and how an error becomes a line and a code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, NoReturn, TypeVar

import typer

from everstep.cli.printing import say_error
from everstep.contract import redact

if TYPE_CHECKING:
    from everstep.checkpoint.retention.catalog import Catalog
    from everstep.storage import ObjectStore

DAMAGED, USAGE, STORE = 1, 2, 3
T = TypeVar("T")

Url = Annotated[str, typer.Argument(help="A folder, or file://, s3://, gs://, az:// and every other fsspec URL.")]
Step = Annotated[int | None, typer.Option("--step", min=0, help="The commit of this step; else the newest.")]
Record = Annotated[int | None, typer.Option("--record", min=0, help="The commit with this number in the log.")]
Tag = Annotated[str | None, typer.Option("--tag", help="The commit of this tag.")]
AsJson = Annotated[bool, typer.Option("--json", help="JSON instead of a table.")]
Options = Annotated[
    list[str] | None, typer.Option("--storage-option", metavar="NAME=VALUE", help="For the fsspec file system.")
]


@contextmanager
def catalog_of(url: str, options: list[str] | None) -> Iterator[tuple[Catalog, ObjectStore]]:
    """The catalog of a store and the store; every error within is one line and an exit code."""
    with translated():
        from everstep.checkpoint.retention.catalog import Catalog  # noqa: PLC0415  `everstep run` does without

        store = open_for(url, options)
        yield Catalog(store), store


@contextmanager
def translated() -> Iterator[None]:
    """Every error of the checkpoint or the store within is one line and an exit code."""
    try:
        from everstep.checkpoint.errors import CheckpointError, NoCommit  # noqa: PLC0415
        from everstep.storage import StorageError  # noqa: PLC0415
    except ImportError as e:
        fail(f"the package {e.name} is missing: pip install 'everstep[worker]'", STORE)
    try:
        yield
    except NoCommit as e:
        fail(str(e), USAGE)
    except CheckpointError as e:
        fail(str(e), DAMAGED)
    except StorageError as e:
        fail(str(e), STORE)
    except ImportError as e:
        fail(f"the package {e.name} is missing: pip install 'everstep[worker]'", STORE)


def open_for(url: str, options: list[str] | None, *, to_write: bool = False) -> ObjectStore:
    """A store to look at (any will do), or with `to_write` one that can hold a log."""
    from everstep.storage import open_for_command, probe  # noqa: PLC0415

    given = {}
    for option in options or ():
        name, equals, value = option.partition("=")
        if not equals:
            fail(f"--storage-option {redact.text(option)}: expected NAME=VALUE", USAGE)
        given[name] = value
    store = open_for_command(url, given or None, single_committer=not to_write)
    if to_write:
        probe(store)
    return store


def counted(store: ObjectStore, advance: Callable[[int], None]) -> ObjectStore:
    """The store, which says of each read how many bytes it brought."""
    from everstep.storage.wrapped import WrappedStore  # noqa: PLC0415

    class Counted(WrappedStore):
        def call(self, operation: str, name: str, act: Callable[[], T], tear: object = None) -> T:
            del operation, name, tear
            return act()

        def get(self, name: str, start: int | None = None, end: int | None = None) -> bytes:
            data = super().get(name, start, end)
            advance(len(data))
            return data

        def get_into(self, name: str, start: int, *buffers: memoryview) -> None:
            super().get_into(name, start, *buffers)
            advance(sum(buffer.nbytes for buffer in buffers))

    return Counted(store)


def fail(text: str, code: int) -> NoReturn:
    say_error(f"everstep: {redact.text(text)}")
    raise typer.Exit(code)
