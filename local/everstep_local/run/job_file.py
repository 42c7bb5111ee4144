"""Makes the TrainingJob that runs here from a YAML file or a script.

It only reads files. A job that was written for a cluster runs unchanged, except for what a laptop lacks: a checkpoint
store whose Secret is not given becomes a folder, and so does a volume claim. Every such change is reported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import quote

from everstep.contract import env, labels
from everstep.jobs import names
from everstep_local.run.manifest import JobFileError, read


@dataclass(frozen=True, slots=True)
class Overrides:
    """The values of the command line. None keeps the file's value."""

    name: str | None = None
    workers: int | None = None
    checkpoint: str | None = None
    elastic: tuple[int, int] | None = None  # the fewest and the most workers
    spares: int | None = None
    secrets: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Prepared:
    manifest: dict[str, Any]
    workdir: Path  # where the workers run: the folder of the file
    notes: tuple[str, ...] = ()  # texts that say what was changed for this machine

    @property
    def name(self) -> str:
        return str(self.manifest["metadata"]["name"])

    @property
    def namespace(self) -> str:
        return str(self.manifest["metadata"]["namespace"])


def parse_elastic(text: str | None) -> tuple[int, int] | None:
    """`2:4`: the fewest and the most workers. Raises `JobFileError`."""
    if text is None:
        return None
    fewest, colon, most = text.partition(":")
    if not colon or not fewest.isascii() or not fewest.isdigit() or not most.isascii() or not most.isdigit():
        raise JobFileError(f"--elastic {text}: expected MIN:MAX, the fewest and the most workers, as in 2:4")
    return int(fewest), int(most)


def load(path: Path, arguments: Sequence[str], overrides: Overrides) -> Prepared:
    """The job of a `.py` file with these arguments, or of a YAML file. Raises `JobFileError`."""
    if not path.is_file():
        raise JobFileError(f"{path}: there is no such file; give a TrainingJob's YAML file or a Python script")
    if path.suffix == ".py":
        manifest = _of_script(path, arguments, overrides)
    else:
        if arguments:
            raise JobFileError(f"{path}: arguments are for scripts; a job's are in its container's command")
        manifest = read(path)
    metadata = manifest["metadata"]
    metadata["name"] = overrides.name or metadata.get("name") or ""
    metadata.setdefault("namespace", "default")
    name = metadata["name"]
    # The name is checked here already, because files and a socket are named by it before the cluster checks it.
    if not isinstance(name, str) or not names.valid(name):
        raise JobFileError(f"{path}: metadata.name: {str(name)[:60]!r} is not a {names.RULE}; --name gives another")
    if isinstance(spec := manifest.get("spec"), dict):
        if overrides.elastic is not None:
            fewest, most = overrides.elastic
            spec["elastic"] = {**(spec.get("elastic") or {}), "minReplicas": fewest, "maxReplicas": most}
        if overrides.spares is not None:
            if not isinstance(elastic := spec.get("elastic"), dict):
                problem = "a job of a fixed size has none; give --elastic MIN:MAX too"
                raise JobFileError(f"--spares {overrides.spares}: {problem}")
            spec["elastic"] = {**elastic, "spares": overrides.spares}
        if overrides.workers is not None:
            spec["replicas"] = overrides.workers
    return Prepared(manifest, path.resolve().parent)


def _of_script(path: Path, arguments: Sequence[str], overrides: Overrides) -> dict[str, Any]:
    if find_spec("torch") is None:
        raise JobFileError(f"{path}: a script is started by torch's torchrun: pip install 'everstep[worker]'")
    name = names.cut(path.stem)
    name = name if name[:1].isalpha() else names.cut(f"job-{name}")
    # A run of a fixed size works with any script and torch alone. In an elastic run survivors have to go on.
    launcher, backend = ("everstep-run", "everstep") if overrides.elastic is not None else ("torchrun", "c10d")
    # A folder for commits that nobody asked for is no cause for a warning where the script names its own.
    variables = [{"name": env.CHECKPOINT_DEFAULT, "value": "1"}] if overrides.checkpoint is None else []
    command = [launcher, path.name, *arguments]
    container = {"name": labels.WORKER_CONTAINER, "image": "local", "command": command, "env": variables}
    return {
        "apiVersion": labels.API_VERSION,
        "kind": labels.KIND,
        "metadata": {"name": name},
        "spec": {
            "replicas": 1,
            "rendezvous": {"backend": backend},
            "checkpoint": {"url": ""},
            "template": {"spec": {"containers": [container]}},
        },
    }


def with_local_checkpoints(job: Prepared, overrides: Overrides, folder: Path) -> Prepared:
    """The job with a store for its commits that exists here: the requested one, the job's own, or `folder`."""
    spec = job.manifest.get("spec")
    checkpoint = spec.get("checkpoint") if isinstance(spec, dict) else None
    if not isinstance(spec, dict) or not (isinstance(checkpoint, dict) or overrides.checkpoint is not None):
        return job
    checkpoint = dict(checkpoint or {})
    secret = checkpoint.get("secretRef")
    name = secret.get("name") if isinstance(secret, dict) else None
    notes = job.notes
    if overrides.checkpoint is not None:
        checkpoint["url"] = location_url(overrides.checkpoint)
    elif name is not None and name not in overrides.secrets:
        notes += (f"Secret {name} is not here (--secret {name}=FILE gives it): commits go to {folder}",)
        checkpoint["url"] = location_url(str(folder))
    elif not checkpoint.get("url"):
        checkpoint["url"] = location_url(str(folder))
    if name is not None and name not in overrides.secrets:
        del checkpoint["secretRef"]
        if overrides.checkpoint is not None:
            notes += (f"Secret {name} is not here (--secret {name}=FILE gives it): commits go without it",)
    return replace(job, manifest={**job.manifest, "spec": {**spec, "checkpoint": checkpoint}}, notes=notes)


def without_pod_group(job: Prepared) -> Prepared:
    """The job without the group of its pods, with a note: here all workers start at once."""
    spec = job.manifest.get("spec")
    if not isinstance(spec, dict) or not spec.get("scheduling"):
        return job
    note = "spec.scheduling has no effect on this machine, which places workers without a scheduler"
    kept = {key: value for key, value in spec.items() if key != "scheduling"}
    return replace(job, manifest={**job.manifest, "spec": kept}, notes=(*job.notes, note))


def with_local_claims(job: Prepared, folder: Path) -> Prepared:
    """The job with a note on each volume claim: pods find a folder below `folder` in its place."""
    node: Any = job.manifest
    for key in ("spec", "template", "spec", "volumes"):
        node = node.get(key) if isinstance(node, dict) else None
    claims = [volume.get("persistentVolumeClaim") for volume in node or () if isinstance(volume, dict)]
    names = dict.fromkeys(
        str(claim["claimName"]) for claim in claims if isinstance(claim, dict) and "claimName" in claim
    )
    notes = (
        f"volume claim {name} is not here: {folder / name} takes its place. Put the data there that it should hold, or "
        "a link to them; --out names the same folder each time"
        for name in names
    )
    return replace(job, notes=(*job.notes, *notes))


def location_url(location: str) -> str:
    return location if "://" in location else f"file://{quote(str(Path(location).resolve()))}"


def read_secret(path: Path) -> dict[str, str]:
    """The variables of a file with a NAME=value on each line. Raises `JobFileError` naming the line."""
    variables: dict[str, str] = {}
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise JobFileError(f"{path}: {e}") from e
    for number, line in enumerate(lines, 1):
        name, equals, value = line.partition("=")
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        if not equals or not name.strip().isidentifier():
            raise JobFileError(f"{path}:{number}: expected NAME=value")
        if name.strip() in variables:
            raise JobFileError(f"{path}:{number}: {name.strip()} is given already; remove one of the lines")
        variables[name.strip()] = value.strip()
    return variables
