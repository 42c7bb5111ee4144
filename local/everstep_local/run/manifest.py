"""Reads a YAML file as strictly as `kubectl apply --validate=strict`: it refuses whatever would be dropped silently.

In YAML the last of two equal keys wins, and a cluster prunes unknown fields. Both would run a job with settings that
nobody wrote. Invariant: the result has one value for each key, and no unknown field.
"""

from __future__ import annotations

import re
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


MAX_DEPTH = 64  # levels; a pod's deepest field is at about 20
MAX_MERGED = 100  # mappings that one `<<` brings in

_SURROGATE = re.compile("[\ud800-\udfff]")


class _Refused(yaml.YAMLError):
    """What YAML allows and no job may hold. The text names the line."""


class _Loader(yaml.SafeLoader):
    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            line = self.peek_event().start_mark.line + 1  # type: ignore[no-untyped-call]
            raise _Refused(f"line {line}: nested deeper than {MAX_DEPTH} levels; no TrainingJob is")
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        for key, value in node.value:
            merged = key.tag == "tag:yaml.org,2002:merge" and isinstance(value, yaml.SequenceNode)
            if merged and len(value.value) > MAX_MERGED:
                raise _Refused(f"line {key.start_mark.line + 1}: `<<` merges more than {MAX_MERGED} mappings")
        super().flatten_mapping(node)
        if len(node.value) > MAX_VALUES:
            raise _Refused(f"line {node.start_mark.line + 1}: more than {MAX_VALUES} keys with its aliases expanded")

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        value = super().construct_scalar(node)
        if isinstance(value, str) and _SURROGATE.search(value):
            line = node.start_mark.line + 1
            raise _Refused(f"line {line}: {ascii(value)[:80]} has half of a character (a surrogate); write it whole")
        return value

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: dict[Any, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            line = key.start_mark.line + 1
            if (first := seen.setdefault((key.tag, key.value), line)) != line:
                raise _Refused(f"line {line}: {key.value!r} is given already in line {first}; remove one of them")
        return super().construct_mapping(node, deep=deep)


def read(path: Path) -> dict[str, Any]:
    """The one TrainingJob of a YAML or JSON file. Raises `JobFileError`."""
    if path.stat().st_size > MAX_FILE:
        raise JobFileError(f"{path}: more than {MAX_FILE} bytes; this is no TrainingJob")
    try:
        documents = [d for d in yaml.load_all(path.read_text("utf-8"), _Loader) if d is not None]
    except _Refused as e:
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
    problems = [
        *unknown(job, served["schema"]["openAPIV3Schema"]),
        *starmap(field, unknown_fields(job["metadata"], "V1ObjectMeta", "metadata")),
        *starmap(field, unknown_fields(template, "V1PodTemplateSpec", "spec.template")),
    ]
    if problems:
        more = [f"and {len(problems) - MAX_SHOWN} more"] if len(problems) > MAX_SHOWN else []
        raise JobFileError("\n".join(f"{path}: {problem}" for problem in [*map(str, problems[:MAX_SHOWN]), *more]))


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
