"""Custom resources: the `Kind` of a CustomResourceDefinition."""

from __future__ import annotations

from functools import cache
from typing import Any

from everstep_local.apiserver.kinds.kind import Kind, Scale
from everstep_local.apiserver.kinds.metadata import dns_subdomain
from everstep_local.apiserver.kinds.schema import Schema
from everstep_local.apiserver.refusals import FieldError, invalid
from everstep_local.apiserver.storage.merging import at_path
from everstep_local.apiserver.storage.store import Json
from everstep_operator.api.crd import crd as trainingjob_crd

# Errors after which the rules cannot be evaluated. The server then says that it did not check them.
_BLOCKING = frozenset({"NotSupported", "Required", "TooLong", "TooMany", "TypeInvalid"})
_NOT_CHECKED = FieldError(
    "Invalid",
    "<nil>",
    "Invalid value: null: some validation rules were not checked because the object was invalid; correct the existing "
    "errors to complete validation",
)


def custom_kind(definition: Json) -> Kind:
    """The kind of a CRD with one version. Raises ValueError for parts that the in-memory cluster does not implement."""
    spec = definition["spec"]
    names = spec["names"]
    if len(spec["versions"]) != 1:
        raise ValueError(f"{definition['metadata']['name']}: spec.versions must be one; conversion is not implemented")
    (version,) = spec["versions"]
    schema = Schema(version["schema"]["openAPIV3Schema"])
    subresources = version.get("subresources", {})
    has_status = "status" in subresources

    scale = _scale(subresources.get("scale"))

    def prepare(new: Json, old: Json | None) -> Json:
        normal: Json = schema.normal(new, old, root=True)
        return normal

    def validate(new: Json, old: Json | None) -> list[FieldError]:
        errors = list(schema.errors(new, old, "", root=True))
        if scale is not None:
            errors += _scale_errors(new, scale)
        if any(error.kind in _BLOCKING for error in errors):
            return [*errors, _NOT_CHECKED]
        return errors + list(schema.broken_rules(new, old, ""))

    def counts(raw: Json) -> Any:
        left_out = ("metadata", "status") if has_status else ("metadata",)
        return {key: value for key, value in raw.items() if key not in left_out}

    return Kind(
        spec["group"],
        version["name"],
        names["plural"],
        names["kind"],
        namespaced=spec["scope"] == "Namespaced",
        typed=False,
        has_status=has_status,
        status_metadata=False,
        counts=counts,
        unconditional_update=False,
        scale=scale,
        prepare=prepare,
        validate=validate,
        name_errors=dns_subdomain,
    )


def _scale(subresource: Json | None) -> Scale | None:
    if subresource is None:
        return None
    paths = (
        subresource["specReplicasPath"],
        subresource["statusReplicasPath"],
        subresource.get("labelSelectorPath", ""),
    )
    spec, status, selector = (tuple(path.split(".")[1:]) for path in paths)
    return Scale(spec, status, selector)


def _scale_errors(raw: Json, scale: Scale) -> list[FieldError]:
    """The errors of the scale subresource. A value that it cannot show is named a second time, by a path that begins
    with a dot."""
    errors = []
    for names in (scale.replicas, scale.status_replicas):
        replicas, path = at_path(raw, names), "." + ".".join(names)
        if isinstance(replicas, int) and not isinstance(replicas, bool):
            if replicas < 0:
                errors.append(invalid(path, replicas, "should be a non-negative integer"))
        elif replicas is not None:
            message = f"{replicas} is of the type {_GO[type(replicas)]}, expected int64"
            errors.append(invalid(path, 0, f"{path} accessor error: {message}"))
    return errors


_GO = {str: "string", bool: "bool", float: "float64", list: "[]interface {}", dict: "map[string]interface {}"}


@cache  # compiling takes longer than a small simulation, and verdicts are the only state of a kind
def training_jobs() -> Kind:
    """TrainingJobs, as manifests/crd.yaml defines them."""
    return custom_kind(trainingjob_crd())
