"""The metadata that the server keeps for every object, whatever its kind.

Invariant: clients write names, labels, annotations, owners and finalizers. The server writes identity, versions and
times; a client's values of these are at most a precondition.
"""

from __future__ import annotations

import re
from typing import Any

from everstep_local.apiserver.refusals import FieldError, forbidden, invalid
from everstep_local.apiserver.storage.store import Json

_LABEL_PART = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
_DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_DNS_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_LABEL = (
    "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must start and "
    "end with an alphanumeric character, with at most 63 characters"
)
MAX_ANNOTATIONS = 256 * 1024  # bytes of all keys and values
_WRITTEN = ("labels", "annotations", "ownerReferences", "finalizers")
_KEPT = ("name", "generateName", "namespace", "uid", "creationTimestamp", "generation")
_DELETION = ("deletionTimestamp", "deletionGracePeriodSeconds")


def dns_label(name: str) -> list[str]:
    """Why `name` is no DNS-1123 label."""
    if len(name) > 63:
        return ["must be no more than 63 bytes"]
    text = (
        "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end "
    )
    return [] if _DNS_LABEL.fullmatch(name) else [_must(text + "with an alphanumeric character", "my-name", _DNS_LABEL)]


def dns_1035(name: str) -> list[str]:
    """Why `name` is no DNS-1035 label, which a Service needs."""
    if len(name) > 63:
        return ["must be no more than 63 bytes"]
    text = "a DNS-1035 label must consist of lower case alphanumeric characters or '-', start with an alphabetic "
    ends = "character, and end with an alphanumeric character"
    return [] if _DNS_1035.fullmatch(name) else [_must(text + ends, "my-name", _DNS_1035)]


def dns_subdomain(name: str) -> list[str]:
    """Why `name` is no DNS-1123 subdomain."""
    if len(name) > 253:
        return ["must be no more than 253 bytes"]
    text = (
        "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start "
    )
    ends = "and end with an alphanumeric character"
    return [] if _DNS_SUBDOMAIN.fullmatch(name) else [_must(text + ends, "example.com", _DNS_SUBDOMAIN)]


def _must(what: str, example: str, pattern: re.Pattern[str]) -> str:
    return f"{what} (e.g. '{example}', regex used for validation is '{pattern.pattern}')"


def of_new(sent: Json, *, name: str, namespace: str, uid: str, now: str, counts: bool) -> Json:
    """The metadata of an object that is being created. `now` is in RFC 3339."""
    meta: Json = {"name": name}
    if sent.get("generateName"):
        meta["generateName"] = sent["generateName"]
    if namespace:
        meta["namespace"] = namespace
    meta |= {"uid": uid, "creationTimestamp": now}
    if counts:
        meta["generation"] = 1
    return meta | _written(sent)


def of_changed(sent: Json, old: Json) -> Json:
    """The metadata after an update: fields that clients write are new, the others old."""
    fixed = {field: old[field] for field in (*_KEPT, *_DELETION) if field in old}
    written = _written(sent)
    for field in _WRITTEN:
        # If nothing changed, the old list itself is kept, because callers compare it by identity.
        if field in written and written[field] == old.get(field):
            written[field] = old[field]
    return fixed | written


def _written(sent: Json) -> Json:
    return {field: value for field in _WRITTEN if (value := sent.get(field))}


def errors(new: Json, old: Json | None, name_errors: list[str]) -> list[FieldError]:
    """The errors in the metadata."""
    field_errors = [invalid("metadata.name", new["name"], text) for text in name_errors]
    for key, value in (new.get("labels") or {}).items():
        field_errors += _label(key, value)
    annotations = new.get("annotations") or {}
    for key, value in annotations.items():
        if not isinstance(value, str):
            field_errors.append(invalid(f"metadata.annotations.{key}", value, "must be a string"))
        elif not _qualified(key.lower()):
            field_errors.append(invalid("metadata.annotations", key, "name part must be a qualified name"))
    if sum(len(k.encode()) + len(str(v).encode()) for k, v in annotations.items()) > MAX_ANNOTATIONS:
        field_errors.append(
            FieldError("TooLong", "metadata.annotations", "Too long: may not be more than 262144 bytes")
        )
    field_errors += _owners(new.get("ownerReferences") or ())
    for name in new.get("finalizers") or ():
        if not isinstance(name, str) or not _qualified(name):
            field_errors.append(invalid("metadata.finalizers", name, "name part must be a qualified name"))
    if old is not None and "deletionTimestamp" in old:
        added = sorted(set(new.get("finalizers") or ()) - set(old.get("finalizers") or ()))
        if added:
            text = f"no new finalizers can be added if the object is being deleted, found new finalizers {added}"
            field_errors.append(forbidden("metadata.finalizers", text))
    return field_errors


def _qualified(name: str) -> bool:
    prefix, slash, rest = name.rpartition("/")
    if slash and dns_subdomain(prefix):
        return False
    return len(rest) <= 63 and _LABEL_PART.fullmatch(rest) is not None


def _label(key: str, value: Any) -> list[FieldError]:
    field_errors = []
    if not _qualified(key):
        field_errors.append(invalid("metadata.labels", key, "name part must be a qualified name"))
    if not isinstance(value, str):
        field_errors.append(invalid("metadata.labels", value, "must be a string"))
    elif len(value) > 63 or (value and not _LABEL_PART.fullmatch(value)):
        field_errors.append(invalid("metadata.labels", value, _LABEL))
    return field_errors


def _owners(owners: Any) -> list[FieldError]:
    field_errors = []
    path = "metadata.ownerReferences"  # the server names no index
    for owner in owners:
        field_errors += [
            invalid(
                f"{path}.{field}", "", "version must not be empty" if field == "apiVersion" else "must not be empty"
            )
            for field in ("apiVersion", "kind", "name", "uid")
            if not owner.get(field)
        ]
    controllers = [owner for owner in owners if owner.get("controller")]
    if len(controllers) > 1:
        field_errors.append(
            invalid("metadata.ownerReferences", owners, "Only one reference can have Controller set to true")
        )
    return field_errors
