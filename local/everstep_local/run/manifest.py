"""Reads a YAML file as strictly as `kubectl apply --validate=strict`: it refuses whatever would be dropped silently.

In YAML the last of two equal keys wins, and a cluster prunes unknown fields. Both would run a job with settings that
nobody wrote. Invariant: the result has one value for each key, and no unknown field.
"""

from __future__ import annotations

from collections.abc import Hashable
from itertools import starmap
from pathlib import Path
from typing import Any

import yaml

from everstep.contract import labels
from everstep_operator.api.crd import crd
from everstep_operator.api.unknown import MAX_SHOWN, field, unknown
from everstep_operator.kube.pod_fields import unknown_fields

MAX_FILE = 4 * 1024 * 1024  # bytes; the API server accepts at most 3 MiB
MAX_VALUES = 100_000  # values of a document, each counted as often as an alias repeats it


class JobFileError(Exception):
    """The file cannot be run. The text names the file, the field and the fix."""


class _Twice(yaml.YAMLError):
    """A key that occurs twice in one object."""


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: dict[Any, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            line = key.start_mark.line + 1
            if (first := seen.setdefault((key.tag, key.value), line)) != line:
                raise _Twice(f"line {line}: {key.value!r} is given already in line {first}; remove one of them")
        return super().construct_mapping(node, deep=deep)


def read(path: Path) -> dict[str, Any]:
    """The one TrainingJob of a YAML or JSON file. Raises `JobFileError`."""
    if path.stat().st_size > MAX_FILE:
        raise JobFileError(f"{path}: more than {MAX_FILE} bytes; this is no TrainingJob")
    try:
        documents = [d for d in yaml.load_all(path.read_text("utf-8"), _Loader) if d is not None]
    except _Twice as e:
        raise JobFileError(f"{path}: {e}") from e
    except (yaml.YAMLError, ValueError, RecursionError) as e:
        raise JobFileError(f"{path}: not YAML: {e}") from e
    except OSError as e:
        raise JobFileError(f"{path}: cannot be read: {e.strerror}") from e
    _require_bounded(path, documents)
    kinds = [str(d.get("kind")) if isinstance(d, dict) else type(d).__name__ for d in documents]
    if kinds != [labels.KIND]:
        raise JobFileError(
            f"{path}: {kinds.count(labels.KIND)} documents of kind {labels.KIND}"
            + (f", beside {', '.join(sorted(set(kinds) - {labels.KIND}))[:200]}" if set(kinds) - {labels.KIND} else "")
            + "; give a file with one TrainingJob and nothing else"
        )
    (job,) = documents
    if not isinstance(job.get("metadata"), dict):
        raise JobFileError(f"{path}: metadata: must be an object with a name")
    _require_known(path, job)
    return dict(job)


def _require_known(path: Path, job: dict[str, Any]) -> None:
    if (version := job.get("apiVersion")) != labels.API_VERSION:
        raise JobFileError(f"{path}: apiVersion: {str(version)[:60]!r}; {labels.API_VERSION} is expected")
    (served,) = crd()["spec"]["versions"]
    spec = job.get("spec")
    template = spec.get("template") if isinstance(spec, dict) else None
    found = [
        *unknown(job, served["schema"]["openAPIV3Schema"]),
        *starmap(field, unknown_fields(job["metadata"], "V1ObjectMeta", "metadata")),
        *starmap(field, unknown_fields(template, "V1PodTemplateSpec", "spec.template")),
    ]
    if found:
        more = [f"and {len(found) - MAX_SHOWN} more"] if len(found) > MAX_SHOWN else []
        raise JobFileError("\n".join(f"{path}: {one}" for one in [*map(str, found[:MAX_SHOWN]), *more]))


def _require_bounded(path: Path, documents: list[Any]) -> None:
    """Aliases can make a large value from a small file. Refuse that before any other code expands it."""
    left, waiting = MAX_VALUES, [*documents]
    while waiting:
        value = waiting.pop()
        left -= 1
        if left < 0:
            raise JobFileError(f"{path}: more than {MAX_VALUES} values with its aliases expanded")
        if isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
