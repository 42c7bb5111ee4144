"""`everstep ckpt`: look at, check, keep and move the commits below a checkpoint URL, with no job and no torch.

Thin: it parses, asks `everstep.checkpoint.retention.catalog` and prints. Safe beside a run that trains: nothing here
takes its log. Invariant: what went wrong is one line without credentials; exit codes 1 (damaged, or refused), 2
(wrongly given, or no such commit), 3 (the store cannot be used).
"""

from __future__ import annotations

import json
import sys
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from everstep.cli import ckpt_convert
from everstep.cli.ckpt_common import (
    DAMAGED,
    AsJson,
    Options,
    Record,
    Step,
    Tag,
    Url,
    catalog_of,
    fail,
    open_for,
)  # fmt: skip
from everstep.cli.printing import SafeConsole, byte_bar, cell, say
from everstep.contract import redact
from everstep.jobs.view import byte_size

if TYPE_CHECKING:
    from everstep.checkpoint.format.manifest import CommitRecord
    from everstep.checkpoint.retention.catalog import Catalog, Found

app = typer.Typer(
    help="List, check, pin, copy and export the commits below a checkpoint URL.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
EXPECTED = ()

ckpt_convert.add_to(app)


@app.command("ls")
def ls(url: Url, as_json: AsJson = False, storage_option: Options = None) -> None:
    """The commits that have their data, newest first. Looks at names and sizes, not at the bytes: see `verify`."""
    with catalog_of(url, storage_option) as (catalog, _):
        commits = _there(catalog, url).list()
    if as_json:
        say(json.dumps([asdict(f) for f in commits], indent=2))
        return
    if not commits:
        say(f"no commits below {redact.text(url)}")
        return
    table = _table(("STEP", "RECORD", "SIZE", "WORLD"), ("COMMITTED", "STATE"))
    for f in commits:
        state, style = _state(f)
        table.add_row(str(f.step), str(f.n), byte_size(f.bytes), str(f.world_size), cell(f.at), cell(state, style))
    _console().print(table)


@app.command("show")
def show(
    url: Url, step: Step = None, record: Record = None, tag: Tag = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="Each tensor of the state, in place of its keys.")] = False,
    as_json: AsJson = False, storage_option: Options = None,
) -> None:  # fmt: skip
    """What is in a commit: the keys of its state and their sizes; with --tensors each tensor."""
    with catalog_of(url, storage_option) as (catalog, store):
        from everstep.checkpoint.retention.late_metrics import all_metrics  # noqa: PLC0415

        commit = catalog.find(step, record, tag)
        metrics = all_metrics(store, commit)
    if as_json:
        say(json.dumps({**_described(commit), "metrics": metrics}, indent=2))
        return
    console = _console()
    console.print(
        f"step {commit.step}  record {commit.n}  committed {commit.at}  world {commit.world_size}  "
        f"round {commit.round}  save {commit.save_id}"
    )
    keys = _table(("TENSORS", "SIZE"), ("KEY", "KIND"))
    for key, kind, count, size in _keys(commit):
        keys.add_row(str(count), byte_size(size), cell(key), cell(kind))
    console.print(keys)
    shards = _table(("SIZE",), ("SHARD",))
    for shard in commit.shards:
        shards.add_row(byte_size(shard.bytes), cell(shard.path))
    console.print(shards)
    if tensors:
        rows = _table(("SIZE", "PIECES"), ("TENSOR", "TYPE", "SHAPE"))
        for e in commit.entries:
            size = sum(p.end - p.begin for p in e.pieces)
            rows.add_row(byte_size(size), str(len(e.pieces)), cell(e.name), e.dtype, cell(str(list(e.shape))))
        console.print(rows)


@app.command("verify")
def verify(
    url: Url, step: Step = None, record: Record = None, tag: Tag = None,
    every: Annotated[bool, typer.Option("--all", help="Every commit that has its data.")] = False,
    as_json: AsJson = False, storage_option: Options = None,
) -> None:  # fmt: skip
    """Read every byte of a commit and check it. Exit code 1 names the files that are damaged."""
    with catalog_of(url, storage_option) as (catalog, store):
        from everstep.checkpoint.format.chunks import verify as check  # noqa: PLC0415

        records = (
            [catalog.find(n=f.n) for f in _there(catalog, url).list()] if every else [catalog.find(step, record, tag)]
        )
        with byte_bar("verify", sum(record.bytes for record in records)) as advance:
            results = [(r, check(store, r, advance)) for r in records]
    if as_json:
        say(json.dumps([{"step": r.step, "n": r.n, "problems": list(p)} for r, p in results], indent=2))
    else:
        for r, problems in results:
            size = byte_size(r.bytes)
            say(f"step {r.step}  record {r.n}  {'damaged' if problems else 'whole'}  {size}")
            for problem in problems:
                say(f"  {problem}")
    if any(problems for _, problems in results):
        raise typer.Exit(DAMAGED)


@app.command("pin")
def pin(url: Url, step: Step = None, record: Record = None, storage_option: Options = None) -> None:
    """Keep a commit, whatever a job's `keep` says, until `unpin`."""
    with catalog_of(url, storage_option) as (catalog, _):
        commit = catalog.pin(step, record)
    say(f"step {commit.step} (record {commit.n}) is pinned")


@app.command("unpin")
def unpin(url: Url, step: Step = None, record: Record = None, storage_option: Options = None) -> None:
    """Take back a pin, or what a run's rules keep it by; the next clean-up deletes the commit if it is old enough."""
    with catalog_of(url, storage_option) as (catalog, _):
        commit = catalog.unpin(step, record)
    say(f"step {commit.step} (record {commit.n}) is not pinned")


@app.command("tag")
def tag(
    url: Url,
    name: Annotated[str, typer.Argument(help="1 to 64 letters, digits, '.', '_' and '-'.")],
    step: Step = None, record: Record = None, storage_option: Options = None,
) -> None:  # fmt: skip
    """Call a commit by a name, and keep it until `untag`. The commit that had the name before loses it."""
    with catalog_of(url, storage_option) as (catalog, _):
        commit = catalog.tag(name, step, record)
    say(f"step {commit.step} (record {commit.n}) is tagged {name}")


@app.command("untag")
def untag(
    url: Url, name: Annotated[str, typer.Argument(help="The tag.")], storage_option: Options = None
) -> None:  # fmt: skip
    """Take a tag away; the commit stays as long as something else keeps it."""
    with catalog_of(url, storage_option) as (catalog, _):
        catalog.untag(name)
    say(f"no commit is tagged {name}")


@app.command("restore")
def restore(
    url: Url,
    dest: Annotated[str, typer.Argument(help="An empty folder or URL; a run with this checkpoint URL goes on there.")],
    step: Step = None, record: Record = None, tag: Tag = None, storage_option: Options = None,
) -> None:  # fmt: skip
    """Copy a commit to DEST as a log of its own, checked on the way: a run that is given DEST goes on from it."""
    with catalog_of(url, storage_option) as (catalog, store):
        from everstep.checkpoint.convert.copying import copy  # noqa: PLC0415
        from everstep.checkpoint.log.commitlog import now  # noqa: PLC0415

        commit = catalog.find(step, record, tag)
        target = open_for(dest, storage_option, to_write=True)
        with byte_bar("restore", commit.bytes) as advance:
            copied = copy(store, commit, target, uuid.uuid4().hex, now(), advance)
    say(f"step {copied.step}: {byte_size(copied.bytes)} copied to {redact.text(target.url)}")


@app.command("gc")
def gc(
    url: Url,
    keep: Annotated[int, typer.Option("--keep", min=1, help="How many of the newest whole commits to keep.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be deleted.")] = False,
    as_json: AsJson = False, storage_option: Options = None,
) -> None:  # fmt: skip
    """Delete the data of older commits and of saves that never became one. Pinned ones and saves in flight stay."""
    with catalog_of(url, storage_option) as (catalog, _):
        deleted = _there(catalog, url).gc(keep, really=not dry_run)
    if as_json:
        say(json.dumps([asdict(d) for d in deleted], indent=2))
        return
    for d in deleted:
        say(f"{'would delete' if dry_run else 'deleted'} {d.save_id}: {d.reason}")
    if not deleted:
        say("nothing to delete")


def _there(catalog: Catalog, url: str) -> Catalog:
    """The catalog, if there is a log: a folder that is misspelt holds no commits either, and is not to look fine."""
    if not catalog.begun():
        fail(f"{redact.text(url)}: there is no checkpoint log there; look for a mistake in the URL", DAMAGED)
    return catalog


def _state(f: Found) -> tuple[str, str]:
    words = ["pinned"] * f.pinned + ["kept"] * f.kept + [f"tag {tag}" for tag in f.tags]
    if f.missing:
        return ", ".join([*words, f"damaged: {len(f.missing)} shards missing or cut"]), "red"
    if f.nonfinite:
        return ", ".join([*words, "holds NaN or infinity"]), "yellow"
    return ", ".join(words), "cyan"


def _keys(record: CommitRecord) -> Iterator[tuple[str, str, int, int]]:
    """Key, kind, tensors, bytes of everything in the state. Of tied tensors only the first key has them."""
    values: dict[str, Any] = record.values if isinstance(record.values, dict) else {}
    kinds = {key: str(body["kind"]) for key, body in values.get("state", {}).items()}
    kinds |= {key: f"{body['kind']}, each rank's own" for own in values.get("ranks", []) for key, body in own.items()}
    counts, sizes = Counter[str](), Counter[str]()
    for e in record.entries:
        name = e.name.partition("/")[2] if e.name.startswith("@") else e.name
        # A key may itself hold a slash: the longest that fits is meant.
        key = max((k for k in kinds if f"{name}/".startswith(f"{k}/")), key=len, default=name)
        counts[key] += 1
        sizes[key] += sum(p.end - p.begin for p in e.pieces)
    for key in sorted({*counts, *kinds}):
        yield key, kinds.get(key, ""), counts[key], sizes[key]


def _described(record: CommitRecord) -> dict[str, Any]:
    return {
        "step": record.step, "n": record.n, "at": record.at, "world_size": record.world_size, "round": record.round,
        "job_uid": record.job_uid, "writer": record.writer, "save_id": record.save_id,
        "keys": [{"key": k, "kind": kind, "tensors": n, "bytes": size} for k, kind, n, size in _keys(record)],
        "shards": [{"path": s.path, "bytes": s.bytes} for s in record.shards],
        "tensors": [{"name": e.name, "dtype": e.dtype, "shape": list(e.shape)} for e in record.entries],
        "values": record.values,
    }  # fmt: skip


def _table(numbers: tuple[str, ...], texts: tuple[str, ...]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in numbers:
        table.add_column(column, justify="right", no_wrap=True)
    for column in texts:
        table.add_column(column, overflow="fold")
    return table


def _console() -> SafeConsole:
    # In a pipe there is no width to keep to: a row is a line.
    return SafeConsole() if sys.stdout.isatty() else SafeConsole(width=10_000)
