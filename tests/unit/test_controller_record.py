"""The status patch turns what is stored into what is wanted, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep_operator.api.status import Status
from everstep_operator.controller.record import Recorder, merge_patch
from everstep_operator.kube.wire import ObjectMeta, Unstructured
from everstep_operator.runtime.write_limit import WriteLimit

values = st.recursive(
    st.one_of(st.booleans(), st.integers(-3, 3), st.text("ab", max_size=2), st.lists(st.integers(0, 2), max_size=2)),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=12,
)
objects = st.dictionaries(st.sampled_from("abcd"), values, max_size=4)


def apply(target: Any, patch: Any) -> Any:
    """RFC 7386, section 2, as it is written there."""
    if not isinstance(patch, dict):
        return patch
    made = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            made.pop(name, None)
        else:
            made[name] = apply(made.get(name), value)
    return made


@given(objects, objects)
def test_patch_applied_to_the_old_gives_the_new(old: dict[str, Any], new: dict[str, Any]) -> None:
    assert apply(old, merge_patch(old, new)) == new


@given(objects)
def test_patch_between_equals_is_empty(value: dict[str, Any]) -> None:
    assert merge_patch(value, value) == {}


@given(objects, objects)
def test_patch_names_no_field_that_stays_as_it_is(old: dict[str, Any], new: dict[str, Any]) -> None:
    same = {key for key in old if key in new and type(old[key]) is type(new[key]) and old[key] == new[key]}
    assert not same & set(merge_patch(old, new))


class Server:
    """One stored job: a status patch is taken only at the resource version that it names, as by an API server."""

    def __init__(self, status: dict[str, Any]) -> None:
        self.status, self.version = status, 7
        self.written: list[dict[str, Any]] = []

    async def patch_status(
        self, resource: Any, namespace: str, name: str, patch: Any, *, resource_version: str
    ) -> Unstructured:
        assert resource_version == str(self.version), "written over a version that was not observed"
        self.status, self.version = apply(self.status, patch), self.version + 1
        self.written.append(patch)
        return self.read()

    def read(self) -> Unstructured:
        meta = ObjectMeta(name="digits", namespace="ns", uid="u", resource_version=str(self.version))
        return Unstructured(metadata=meta, status=self.status)


def recorder(server: Server, leading: bool = True) -> Recorder:
    def require() -> None:
        if not leading:
            raise PermissionError("another replica leads")

    now: Any = lambda: None  # noqa: E731 - no time is asked for
    return Recorder(server, None, instance="replica", require_leading=require, now=now, limit=WriteLimit())  # type: ignore[arg-type]


WANTED = Status.model_validate({"world": {"round": 2, "size": 2}, "progress": {"metrics": {"loss": "0.1"}}})


async def test_status_written_once_reads_back_equal_and_is_not_written_again() -> None:
    server = Server({"goodput": "3%", "goodputPercent": 3, "progress": {"metrics": {"old": "1"}, "step": 4}})
    assert await recorder(server).write_status(server.read(), WANTED) == "8"
    assert Status.model_validate(server.status) == WANTED
    assert await recorder(server).write_status(server.read(), WANTED) is None
    assert len(server.written) == 1


async def test_field_of_a_newer_version_is_left_alone() -> None:
    """Case 23: an older replica in an upgrade."""
    server = Server({"quota": {"granted": 3}, "world": {"round": 1, "size": 2}})
    await recorder(server).write_status(server.read(), WANTED)
    assert server.status["quota"] == {"granted": 3}
    assert server.status["world"]["round"] == 2


async def test_replica_that_does_not_lead_writes_nothing() -> None:
    server = Server({})
    with pytest.raises(PermissionError):
        await recorder(server, leading=False).write_status(server.read(), WANTED)
    assert server.written == []
