"""`everstep report`: what one needs to help with a job, in one file that may be sent to others.

Invariant: every text goes through `contract.redact` or `object_redaction` first, and the values of environment
variables are left out, whatever they look like. What cannot be read is named in the file, and ends nothing.
"""

from __future__ import annotations

import io
import json
import platform
import tarfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from importlib.metadata import distributions
from pathlib import Path
from typing import Annotated, Any

import typer

from everstep.cli.jobs.commands import Context, Job, Kubeconfig, Namespace, Out
from everstep.cli.jobs.object_redaction import without_values
from everstep.cli.printing import say
from everstep.contract import redact
from everstep.jobs.source import JobError, Source, Unreachable, Where, pick
from everstep.version import __version__

app = typer.Typer(add_completion=False)
EXPECTED = (JobError, Unreachable)

LOG_LINES = 2000  # of each worker, from the end
PIECE = redact.MAX_TEXT - 1  # characters; of a longer line the rest is left out
PACKAGES = ("everstep", "torch", "numpy", "kubernetes", "transformers", "accelerate", "lightning")


@app.command()
def report(
    job: Job = None,
    file: Annotated[Path | None, typer.Option("--file", help="Where it is written (everstep-JOB-TIME.tar.gz).")] = None,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    out: Out = None,
) -> None:
    """Gather a job's objects, events and logs into one file, without secrets: for whoever helps."""
    source, name = pick(job, Where(namespace, context, kubeconfig, out))
    path = file if file is not None else Path(f"everstep-{name}-{time.strftime('%Y%m%d-%H%M%S')}.tar.gz")
    if path.exists():
        raise JobError(f"{path} is there already: --file names another")
    texts = dict(_texts(source, name))
    try:
        _write(path, texts)
    except FileExistsError as e:  # by another command, since we looked
        raise JobError(f"{path} is there already: --file names another") from e
    except OSError as e:
        path.unlink(missing_ok=True)
        raise JobError(f"{path} cannot be written: {e}") from e
    say(f"wrote {path}: {', '.join(texts)}")
    say(
        "Secrets that their shapes or names give away and all values of environment variables are hidden; "
        "read it before you send it."
    )


def _texts(source: Source, job: str) -> Iterator[tuple[str, str]]:
    """The files by name. Whatever cannot be had is a line of `problems.txt`."""
    problems: list[str] = []
    yield "versions.json", json.dumps(without_values(_versions(source.title)), indent=2)
    view = source.view(job)
    yield "status.json", json.dumps(without_values(view.to_json()), indent=2)
    try:
        rows = [asdict(row) for row in source.events(job)]
        yield "events.json", json.dumps(without_values(rows), indent=2)
    except (JobError, Unreachable) as e:
        problems.append(f"events: {e}")
    try:
        for name, data in source.objects(job).items():
            yield f"{name}.json", json.dumps(without_values(data), indent=2)
    except (JobError, Unreachable) as e:
        problems.append(f"objects: {e}")
    for row in view.workers:
        try:
            lines = source.logs(job, row.pod, follow=False, tail=LOG_LINES)
            yield f"logs/{row.pod}.log", _hidden(lines)
        except (JobError, Unreachable) as e:
            problems.append(f"log of {row.pod}: {e}")
    if problems:
        yield "problems.txt", _hidden(problems)


def _versions(title: str) -> dict[str, Any]:
    installed = {each.metadata["Name"]: each.version for each in distributions() if each.metadata["Name"] in PACKAGES}
    return {"everstep": __version__, "source": title, "python": platform.python_version(), "packages": installed}


def _hidden(lines: Iterable[str]) -> str:
    """A log without secrets, in pieces of whole lines that `redact` looks at as a whole."""
    pieces: list[list[str]] = [[]]
    size = 0
    for line in lines:
        if size + len(line) > PIECE:
            pieces.append([])
            size = 0
        pieces[-1].append(line)
        size += len(line) + 1
    return "".join(f"{line}\n" for piece in pieces for line in redact.lines(piece))


def _write(path: Path, texts: dict[str, str]) -> None:
    with tarfile.open(path, "x:gz") as archive:
        for name, text in texts.items():
            content = text.encode("utf-8", "replace")
            entry = tarfile.TarInfo(f"{path.name.removesuffix('.tar.gz')}/{name}")
            entry.size, entry.mtime = len(content), int(time.time())
            archive.addfile(entry, io.BytesIO(content))
