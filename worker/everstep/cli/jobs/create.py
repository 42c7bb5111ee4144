"""`everstep init`: a TrainingJob and a Dockerfile for a script. The texts are a person's from then on."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Annotated

import typer

from everstep.cli.printing import say
from everstep.contract import labels
from everstep.jobs import names
from everstep.jobs.source import JobError
from everstep.version import __version__

app = typer.Typer(add_completion=False)
EXPECTED = (JobError,)

JOB_FILE, DOCKERFILE = "job.yaml", "Dockerfile"
_WORKSPACE = "/workspace"


@app.command()
def init(
    script: Annotated[Path, typer.Argument(help="The Python script, in the folder that the image will have.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Arguments of the script, after --.")] = None,
    image: Annotated[str, typer.Option(help="The image's name in your registry.")] = "REGISTRY/NAME:TAG",
    base: Annotated[str, typer.Option(help="An image with torch and everstep.")] = f"everstep/worker:{__version__}",
    name: Annotated[str | None, typer.Option(help="The job's name, instead of the script's.")] = None,
    workers: Annotated[int, typer.Option(min=1, max=4096, help="Pods.")] = 2,
    elastic: Annotated[str | None, typer.Option(metavar="MIN:MAX", help="Fewest and most pods.")] = None,
    spares: Annotated[int, typer.Option(min=0, max=64, help="Pods that wait for the place of a lost one.")] = 0,
    gpus: Annotated[int, typer.Option(min=0, max=64, help="GPUs of a pod, with a process for each.")] = 0,
    checkpoint: Annotated[str | None, typer.Option(help="URL for commits, instead of s3://BUCKET/NAME.")] = None,
    secret: Annotated[str, typer.Option(help="The Secret with the store's account; '' for none.")] = "s3-credentials",
    show: Annotated[bool, typer.Option("--print", help="Print the job, and write nothing.")] = False,
) -> None:
    """Write job.yaml and a Dockerfile for a script, beside it. What is there already is never replaced."""
    if not script.is_file():
        raise JobError(f"{script}: there is no such file")
    bounds = _bounds(elastic, workers)
    if spares and bounds is None:
        raise JobError(f"--spares {spares} needs --elastic MIN:MAX: both may be the number of workers")
    job = name or names.cut(script.stem)
    if not names.valid(job):
        raise JobError(f"{job!r} is no {names.RULE}: --name gives another")
    url = checkpoint if checkpoint is not None else f"s3://BUCKET/{job}"
    text = _job(job, image, [script.name, *(arguments or [])], workers, bounds, spares, gpus, url, secret)
    if show:
        say(text, end="")
        return
    folder = script.parent
    files = {JOB_FILE: text, DOCKERFILE: _dockerfile(folder, base)}
    for file in files:
        if (folder / file).exists():
            raise JobError(f"{folder / file} is there already: move it, or take --print")
    for file, content in files.items():
        (folder / file).write_text(content, "utf-8")
    where = shlex.quote(str(folder))
    say(
        f"wrote {folder / JOB_FILE} and {folder / DOCKERFILE}. Next:\n"
        f"  docker build -t {image} {where} && docker push {image}\n"
        f"  kubectl apply -f {shlex.quote(str(folder / JOB_FILE))}\n"
        f"  everstep status {job} -w"
    )
    open_ = [word for word, there in (("REGISTRY/NAME:TAG", image), ("BUCKET", url)) if word in there]
    if open_:
        say(f"Before that, put your own in the place of {' and '.join(open_)}.")


def _bounds(elastic: str | None, workers: int) -> tuple[int, int] | None:
    if elastic is None:
        return None
    match = re.fullmatch(r"(\d{1,4}):(\d{1,4})", elastic)
    if match is None:
        raise JobError(f"--elastic {elastic}: give the fewest and the most pods, as in 2:4")
    fewest, most = int(match[1]), int(match[2])
    if not 1 <= fewest <= workers <= most:
        raise JobError(f"--elastic {elastic}: --workers {workers} has to be from the fewest to the most, 1 at least")
    return fewest, most


def _job(
    name: str,
    image: str,
    command: list[str],
    workers: int,
    bounds: tuple[int, int] | None,
    spares: int,
    gpus: int,
    url: str,
    secret: str,
) -> str:
    lines = [
        "# A worker that is lost is replaced, and the training goes on from the last commit or, with everstep.start in",
        "# the script, in the processes of the others. `kubectl explain tjob.spec` has every field.",
        f"apiVersion: {labels.API_VERSION}",
        f"kind: {labels.KIND}",
        f"metadata: {{name: {name}}}",
        "spec:",
        f"  replicas: {workers}",
    ]
    if bounds is not None:
        more = f", spares: {spares}" if spares else ""
        lines += [f"  elastic: {{minReplicas: {bounds[0]}, maxReplicas: {bounds[1]}{more}}}"]
    if gpus > 1:
        lines += ["  processesPerReplica: auto  # one for each GPU"]
    lines += ["  rendezvous: {backend: everstep}", "  checkpoint:", f"    url: {_quoted(url)}", "    keep: 3"]
    if secret:
        lines += [f"    secretRef: {{name: {_quoted(secret)}}}"]
    lines += [
        "  template:",
        "    spec:",
        "      containers:",
        f"        - name: {labels.WORKER_CONTAINER}",
        f"          image: {_quoted(image)}",
        f"          workingDir: {_WORKSPACE}",
        f"          command: [{', '.join(map(_quoted, ['everstep-run', *command]))}]",
        "          resources:",
        "            requests: {cpu: 1, memory: 2Gi}",
    ]
    if gpus:
        lines += [f"            limits: {{nvidia.com/gpu: {gpus}}}"]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """As YAML has it, which reads escapes beyond 16 bits otherwise than JSON, and no DEL."""
    plain = (c if c.isascii() and c.isprintable() and c not in '"\\' else f"\\U{ord(c):08x}" for c in text)
    return f'"{"".join(plain)}"'


def _dockerfile(folder: Path, base: str) -> str:
    wanted = "COPY requirements.txt .\nRUN pip install --no-cache-dir -r requirements.txt\n"
    return (
        f"# {base} has torch and everstep, and runs as user 65532.\n"
        f"FROM {base}\n"
        f"WORKDIR {_WORKSPACE}\n"
        "USER 0\n"
        f"{wanted if (folder / 'requirements.txt').is_file() else ''}"
        "COPY . .\n"
        "USER 65532:65532\n"
    )
