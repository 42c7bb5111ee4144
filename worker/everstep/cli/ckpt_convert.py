"""`everstep ckpt import|export|diff|cat`: commits beside what other libraries write. These need torch."""

from __future__ import annotations

import json
import uuid
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from everstep.cli.ckpt_common import (
    DAMAGED,
    USAGE,
    AsJson,
    Options,
    Record,
    Step,
    Tag,
    Url,
    catalog_of,
    counted,
    fail,
    open_for,
    translated,
)  # fmt: skip
from everstep.cli.printing import byte_bar, say
from everstep.contract import redact

if TYPE_CHECKING:
    from everstep.checkpoint.convert.source import Source

_SHOWN = 1000  # elements of a tensor that are printed as text
_SEEDS = "seeds/seeds/"  # of each generator, in the commits of a session
_SEEDED = {"python": "random.seed(0)", "numpy": "numpy.random.seed(0)", "torch": "torch.manual_seed(0)"}

Key = Annotated[
    str, typer.Option("--key", help="The key of the state that a model's tensors become, where the files say none.")
]
Stateful = Annotated[
    list[str] | None,
    typer.Option("--stateful", metavar="KEY", help="A key of an object with state_dict and load_state_dict."),
]


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    app.command("import")(bring)
    app.command("export")(export)
    app.command("diff")(diff)
    app.command("cat")(cat)


def bring(
    source: Annotated[Path, typer.Argument(help="A DCP folder, a file of torch.save, safetensors, or their folder.")],
    url: Annotated[str, typer.Argument(help="An empty folder or URL; a run with this checkpoint URL goes on there.")],
    step: Annotated[int, typer.Option("--step", min=0, help="The step that the commit is of.")] = 0,
    key: Key = "model", stateful: Stateful = None, storage_option: Options = None,
) -> None:  # fmt: skip
    """Make a commit of what torch.distributed.checkpoint, torch.save or Hugging Face has written."""
    with translated():
        from everstep.checkpoint.convert.incoming import bring as write  # noqa: PLC0415
        from everstep.checkpoint.convert.source_files import open_source  # noqa: PLC0415
        from everstep.checkpoint.log.commitlog import now  # noqa: PLC0415

        opened = open_source(source, key, stateful or ())
        target = open_for(url, storage_option, to_write=True)
        with byte_bar("import", opened.bytes) as advance:
            record = write(opened.counted(advance), target, step, uuid.uuid4().hex, now())
    keys = ", ".join(sorted(opened.bodies))
    say(f"step {record.step}: {len(record.entries)} tensors to {redact.text(target.url)}: {keys}")


def export(
    url: Url,
    dest: Annotated[Path, typer.Argument(help="A folder; for --format torch a file.")],
    form: Annotated[
        str, typer.Option("--format", help="safetensors, huggingface, torch or dcp.")
    ] = "safetensors",
    key: Annotated[
        list[str] | None, typer.Option("--key", help="Only this key; with one, --format torch writes what it holds.")
    ] = None,
    step: Step = None, record: Record = None, tag: Tag = None, storage_option: Options = None,
) -> None:  # fmt: skip
    """Write a commit as files that other tools open. Needs torch."""
    with catalog_of(url, storage_option) as (catalog, store):
        from everstep.checkpoint.convert.outgoing import FORMATS, export_as  # noqa: PLC0415

        if form not in FORMATS:
            fail(f"--format {form}: one of {', '.join(FORMATS)} is expected", USAGE)
        commit = catalog.find(step, record, tag)
        with byte_bar("export", commit.bytes) as advance:
            names = export_as(counted(store, advance), commit, dest, form, key)
    say(f"step {commit.step}: {', '.join(names)} in {dest if dest.is_dir() else dest.parent}")


def diff(
    url: Url,
    other: Annotated[str | None, typer.Argument(help="Another URL, or files as for import; else the same.")] = None,
    step: Step = None, record: Record = None, tag: Tag = None,
    to_step: Annotated[int | None, typer.Option("--to-step", min=0, help="Of the other; else its newest.")] = None,
    to_record: Annotated[int | None, typer.Option("--to-record", min=0, help="Of the other, by record.")] = None,
    to_tag: Annotated[str | None, typer.Option("--to-tag", help="Of the other, by tag.")] = None,
    key: Key = "model", as_json: AsJson = False, storage_option: Options = None,
) -> None:  # fmt: skip
    """What differs between two commits, or a commit and other files: names, shapes, types, values. Exit code 1 if
    anything does. Needs torch."""
    with catalog_of(url, storage_option) as (catalog, store):
        from everstep.checkpoint.convert import differences  # noqa: PLC0415
        from everstep.checkpoint.convert.source_files import is_source, open_source  # noqa: PLC0415
        from everstep.checkpoint.retention.catalog import Catalog  # noqa: PLC0415

        first = differences.of_commit(store, catalog.find(step, record, tag))
        if other is not None and is_source(Path(other)):
            if to_step is not None or to_record is not None or to_tag is not None:
                fail(f"{other}: holds no commits; leave out --to-step, --to-record and --to-tag", USAGE)
            counterpart = open_source(Path(other), key)
        else:
            second = store if other is None else open_for(other, storage_option)
            counterpart = differences.of_commit(second, Catalog(second).find(to_step, to_record, to_tag))
        with byte_bar("diff", first.bytes + counterpart.bytes) as advance:  # nothing can be printed below it
            listed = list(differences.differences(first.counted(advance), counterpart.counted(advance)))
    for difference in () if as_json else listed:
        say(f"{difference.kind:8} {difference.name}  {difference.text}")
    if as_json:
        say(json.dumps([asdict(d) | {"greatest": _number(d.greatest)} for d in listed], indent=2))
    elif not listed:
        say(f"the same: {first.what} and {counterpart.what}")
    elif seeds := [d.name.removeprefix(_SEEDS) for d in listed if d.name.startswith(_SEEDS)]:
        lines = ", ".join(f"`{line}`" for name, line in _SEEDED.items() if name in seeds)
        more = f". Write at the beginning of the script: {lines}" if lines else ""
        say(f"the runs seeded these generators otherwise: {', '.join(seeds)}{more}")
    if listed:
        raise typer.Exit(DAMAGED)


def cat(
    url: Url,
    name: Annotated[str, typer.Argument(help="A tensor or value: model/0.weight, epoch, optimizer/param_groups/0/lr.")],
    step: Step = None, record: Record = None, tag: Tag = None, as_json: AsJson = False, storage_option: Options = None,
) -> None:  # fmt: skip
    """Print one tensor or value of a commit by its name; with --json all of its numbers. Needs torch."""
    with catalog_of(url, storage_option) as (catalog, store):
        import torch  # noqa: PLC0415

        from everstep.checkpoint.convert import differences  # noqa: PLC0415

        source = differences.of_commit(store, catalog.find(step, record, tag))
        try:
            value = differences.value_at(source, name)
        except KeyError:
            fail(f"{source.what} has no {name!r}; {_near(source, name)}", USAGE)
    if not isinstance(value, torch.Tensor):
        say(json.dumps(_plain(value)) if as_json else value)
        return
    if as_json:
        body = {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape), "values": _plain(value)}
        say(json.dumps(body))
        return
    say(f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}")
    torch.set_printoptions(threshold=_SHOWN)  # type: ignore[no-untyped-call]
    say(value)


def _near(source: Source, name: str) -> str:
    from everstep.checkpoint.convert.differences import names_of  # noqa: PLC0415

    names = names_of(source)
    key = name.partition("/")[0]
    near = [n for n in names if n.startswith(f"{name}/")] or [n for n in names if n.partition("/")[0] == key]
    shown = (near or list(names))[:5]
    return f"it has {', '.join(shown)}{', …' if len(near or names) > len(shown) else ''}"


def _plain(value: Any) -> Any:
    """As JSON, which has no NaN and no infinity: they are texts."""
    import torch  # noqa: PLC0415

    if isinstance(value, torch.Tensor):
        if value.is_complex():
            value = torch.view_as_real(value)
        return _plain((value.double() if value.is_floating_point() else value).tolist())
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    with suppress(AttributeError):
        return value.decode("latin-1")
    return value


def _number(value: float) -> float | str:
    return value if value == value and abs(value) != float("inf") else str(value)  # noqa: PLR0124  only NaN is not itself
