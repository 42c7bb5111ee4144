"""`everstep report`: what one needs to help with a job, in one file that may be sent to others.

Invariant: every text goes through `contract.redact` or `without_values` first, and the values of environment
variables are left out, whatever they look like. What cannot be read is named in the file, and ends nothing.
"""

from __future__ import annotations

import io
import json
import platform
import re
import tarfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from importlib.metadata import distributions
from pathlib import Path
from typing import Annotated, Any

import typer

from everstep.cli.jobs.commands import Context, Job, Kubeconfig, Namespace, Out
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


# --- objects
# `contract.redact` knows a credential by its shape or by the name before it. In an API object the name may be the key
# above a text, or the item of a list before it. Invariant: a text below such a name is hidden, unless the schema of
# Kubernetes says that the text only names something (a Secret, a taint).

# What an object repeats of itself, with all values.
LEFT_OUT = ("managedFields", "kubectl.kubernetes.io/last-applied-configuration")
# Fields of Kubernetes whose names look like those of secrets, and whose values are names.
_NAME_FIELDS = ("key", "secretName", "secretNamespace", "topologyKey", "matchLabelKeys", "mismatchLabelKeys")
# Below these the names are the user's own, so none of them is a field of Kubernetes.
_USERS_NAMES = ("annotations", "labels", "volumeAttributes", "options", "parameters")
_GZIP = "H4sI"  # how gzip's first bytes look in base64; some tools keep a whole object so
_OPTION = re.compile(r"--[A-Za-z][\w.-]*(?:=.*)?|-[A-Za-z]", re.DOTALL)
_OPTION_NAME = re.compile(r"--?[A-Za-z][\w.-]*")
# `--name value`, `--name=value`, `NAME=value` in a shell's line.
_ASSIGNED = re.compile(
    r"(?<![\w.-])(?P<name>-{0,2}[A-Za-z_][\w.-]{0,80})(?P<between>=|(?<=[\w.-])\s{1,3}(?!\s|--[A-Za-z]|-[A-Za-z]\b))"
    r"""(?P<value>"(?:[^"\\]|\\.)*"?|'[^']*'?|[^\s;&|"']+)""",
    re.DOTALL,
)


def without_values(data: Any, *, secret: bool = False, users: bool = False) -> Any:
    """The object without secrets, and without the values of environment variables (`env: [{name, value}]`).
    `secret`: it stands below or behind the name of one. `users`: the names in it are the user's own."""
    match data:
        case bool() | None:
            return data
        case str():
            return redact.HIDDEN if secret else _text(data)
        case {"name": name, "value": _}:
            return {"name": name, "value": redact.HIDDEN}
        case dict():
            return {
                key: without_values(
                    value,
                    secret=redact.secret_name(key) and (users or key not in _NAME_FIELDS),
                    users=users or key in _USERS_NAMES,
                )
                for key, value in data.items()
                if key not in LEFT_OUT
            }
        case list():
            return list(_items(data, secret, users))
        case _:  # a number below such a name is a count of tokens, where Kubernetes or Everstep chose the name
            return redact.HIDDEN if secret and users else data


def _items(items: Sequence[Any], secret: bool, users: bool) -> Iterator[Any]:
    behind = False  # an option whose value is secret
    for item in items:
        if isinstance(item, str):
            hide = behind and _OPTION.fullmatch(item) is None
            behind = _OPTION_NAME.fullmatch(item) is not None and redact.secret_name(item)
            yield without_values(item, secret=secret or hide, users=users)
        else:
            yield without_values(item, secret=secret, users=users)


def _text(value: str) -> str:
    if value.startswith(_GZIP):
        return redact.HIDDEN
    if value.startswith(("{", "[")):
        try:
            return json.dumps(without_values(json.loads(value), users=True))
        except (ValueError, RecursionError):
            pass  # it only looks like JSON
    return redact.text(_ASSIGNED.sub(_assigned, value[: redact.MAX_TEXT]))


def _assigned(match: re.Match[str]) -> str:
    name, between = match["name"], match["between"]
    named = redact.secret_name(name) and (between == "=" or name.startswith("-"))
    return f"{name}{between}{redact.HIDDEN}" if named else match[0]
