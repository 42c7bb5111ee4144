"""Decoding what no sane server sends, and what a hostile user can make it send."""

import gc
import json
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep_operator.kube.client import Changed
from everstep_operator.kube.errors import Operation, ServerError, StreamBroken
from everstep_operator.kube.framing import cut_depths, decode_event, decode_page, split_lines
from everstep_operator.kube.wire import Pod, Unstructured, micro_time, rfc3339, to_body

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.sampled_from('a"\\[]{}\n'), max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('a"\\[]{}', max_size=3), inner, max_size=3),
    max_leaves=20,
)


def cut(value: Any, depth: int) -> Any:
    """The same on the decoded value."""
    if isinstance(value, list):
        return [cut(item, depth - 1) for item in value] if depth else None
    if isinstance(value, dict):
        return {key: cut(item, depth - 1) for key, item in value.items()} if depth else None
    return value


@given(value=JSON, depth=st.integers(0, 6), indent=st.sampled_from([None, 1]))
def test_cutting_text_equals_cutting_the_value(value: Any, depth: int, indent: int | None) -> None:
    assert json.loads(cut_depths(json.dumps(value, indent=indent).encode(), depth)) == cut(value, depth)


def bomb(depth: int) -> bytes:
    return b'{"a":' * depth + b"1" + b"}" * depth


@pytest.mark.parametrize("depth", [500, 2 * sys.getrecursionlimit(), 100_000])
def test_depth_bomb_in_one_object_leaves_the_other_objects_readable(depth: int) -> None:
    evil = b'{"metadata":{"name":"evil"},"spec":{"x":' + bomb(depth) + b"}}"
    body = b'{"metadata":{"resourceVersion":"7"},"items":[' + evil + b',{"metadata":{"name":"good"},"spec":{"n":1}}]}'
    page = decode_page(Unstructured, body, Operation("list", "pods"))
    assert [item.metadata.name for item in page.items or ()] == ["evil", "good"]
    assert (page.items or [])[1].spec == {"n": 1}
    event = decode_event(Unstructured, b'{"type":"ADDED","object":' + evil + b"}", Operation("watch", "pods"))
    assert isinstance(event, Changed)
    assert event.object.metadata.name == "evil"


@pytest.mark.parametrize("body", [b'{"metadata":{},"items":[' + b"[" * 100_000, b'{"items":[]}', b"", b"null"])
def test_unreadable_page_is_a_server_error(body: bytes) -> None:
    with pytest.raises(ServerError, match="cannot be decoded"):
        decode_page(Pod, body, Operation("list", "pods"))


@given(line=st.binary(max_size=60))
def test_any_bytes_are_an_event_or_a_broken_stream(line: bytes) -> None:
    with pytest.raises(StreamBroken):
        decode_event(Pod, line, Operation("watch", "pods"))


@given(lines=st.lists(st.binary(min_size=1, max_size=9).filter(lambda b: b"\n" not in b and b.strip())), data=st.data())
async def test_lines_are_found_however_they_are_cut_into_chunks(lines: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(line + b"\n" for line in lines)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))

    async def chunks() -> Any:
        for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
            yield stream[start:end]

    assert [line async for line in split_lines(chunks(), Operation("watch", "pods"))] == lines


def test_pod_is_decoded_narrowly_with_times_in_utc() -> None:
    terminated = {"exitCode": 137, "reason": "OOMKilled", "signal": 9, "finishedAt": "2026-11-21T10:00:00Z"}
    body = {
        "kind": "Pod",
        "metadata": {"name": "w0", "creationTimestamp": None, "managedFields": [{"manager": "x"}]},
        "spec": {"nodeName": "n1", "containers": [{"name": "worker", "image": "i"}]},
        "status": {
            "phase": "Failed",
            "podIP": "10.1.2.3",
            "containerStatuses": [{"state": {"terminated": terminated}}],
        },
    }
    line = json.dumps({"type": "MODIFIED", "object": body}).encode()
    event = decode_event(Pod, line, Operation("watch", "pods"))
    assert isinstance(event, Changed)
    ended = event.object.status.container_statuses[0].state.terminated
    assert ended is not None
    assert (ended.exit_code, ended.reason) == (137, "OOMKilled")
    assert ended.finished_at is not None
    assert rfc3339(ended.finished_at) == "2026-11-21T10:00:00Z"
    assert micro_time(ended.finished_at) == "2026-11-21T10:00:00.000000Z"
    assert to_body(event.object.spec) == {"nodeName": "n1"}


def test_ten_thousand_cached_pods_are_nothing_to_the_garbage_collector() -> None:
    """A full collection walked all of them, and stopped the operator for so long that it lost its Lease."""
    owner = {"apiVersion": "v1", "kind": "Job", "name": "j", "uid": "u", "controller": True}
    ended = {"terminated": {"exitCode": 137, "finishedAt": "2026-01-01T00:00:00Z"}}
    pod = {
        "metadata": {"name": "w0", "namespace": "ns", "labels": {"a": "b", "c": "d"}, "ownerReferences": [owner]},
        "spec": {"nodeName": "n1"},
        "status": {
            "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}],
            "containerStatuses": [{"name": "worker", "state": ended}],
        },
    }
    page = json.dumps({"metadata": {}, "items": [pod] * 10_000}).encode()
    decode_page(Pod, page, Operation("list", "pods"))  # whatever is made once
    gc.collect()
    before = len(gc.get_objects())
    kept = decode_page(Pod, page, Operation("list", "pods")).items or []
    gc.collect()  # which also finds which tuples need no watching
    assert len(gc.get_objects()) - before < 100
    assert len(kept) == 10_000
