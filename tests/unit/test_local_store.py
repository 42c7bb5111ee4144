"""The store's history against a dumb one: a copy of everything after every change."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep_local.apiserver.refusals import Refusal
from everstep_local.apiserver.storage.feed import Feed
from everstep_local.apiserver.storage.selectors import parse
from everstep_local.apiserver.storage.store import Store
from everstep_operator.kube.client import EventType

THINGS = ("", "things")
# (namespace, name, value of the label, or None for a delete)
STEPS = st.lists(
    st.tuples(st.sampled_from("ab"), st.sampled_from("xyz"), st.sampled_from(["0", "1", None])), max_size=30
)
State = dict[tuple[str, str], str]


def play(store: Store, steps: list[tuple[str, str, str | None]]) -> dict[int, State]:
    """What existed after each version."""
    table = store.table(THINGS)
    state: State = {}
    states = {store.version: dict(state)}
    for number, (namespace, name, value) in enumerate(steps):
        old = table.get((namespace, name))
        if value is not None:
            uid = old.uid if old is not None else f"uid-{number}"
            meta: dict[str, Any] = {"namespace": namespace, "name": name, "uid": uid, "labels": {"l": value}}
            store.put(THINGS, {"metadata": meta}, old)
            state[namespace, name] = value
        elif old is not None:
            store.remove(THINGS, old)
            del state[namespace, name]
        states[store.version] = dict(state)
    return states


def content(store: Store, at: int | None) -> State:
    return {one.key: one.labels["l"] for one in store.table(THINGS).select(None, at)}


@given(STEPS)
@settings(deadline=None)
def test_every_version_can_be_read_as_it_was(steps: list[tuple[str, str, str | None]]) -> None:
    store = Store()
    for version, state in play(store, steps).items():
        assert content(store, version) == state
        for namespace in "ab":
            for name in "xyz":
                found = store.table(THINGS).at((namespace, name), version)
                assert (found.labels["l"] if found is not None else None) == state.get((namespace, name))


@given(STEPS, st.sampled_from([None, "a", "b"]), st.sampled_from([None, "l=1", "l!=1", "!l"]))
@settings(deadline=None)
def test_events_from_any_version_lead_to_the_newest_state(
    steps: list[tuple[str, str, str | None]], namespace: str | None, selector: str | None
) -> None:
    store = Store()
    states = play(store, steps)
    chosen = parse(selector) if selector is not None else None

    def seen(state: State) -> State:
        return {
            key: value
            for key, value in state.items()
            if namespace in (None, key[0]) and (chosen is None or chosen({"l": value}))
        }

    for version, state in states.items():
        mine = seen(state)
        last = version
        for told in Feed(store.table(THINGS), namespace, chosen, version).take():
            assert told.object.version > last
            last = told.object.version
            key = told.object.key
            assert (told.type is EventType.ADDED) == (key not in mine)
            if told.type is EventType.DELETED:
                del mine[key]
            else:
                mine[key] = told.object.labels["l"]
        assert mine == seen(states[store.version])


@given(STEPS, st.integers(0, 40))
@settings(deadline=None)
def test_compaction_refuses_what_it_forgot_and_nothing_else(
    steps: list[tuple[str, str, str | None]], asked: int
) -> None:
    store = Store()
    states = play(store, steps)
    floor = store.compact(asked)
    assert floor == min(asked, store.version)
    for version, state in states.items():
        if version >= floor:
            assert content(store, version) == state
            Feed(store.table(THINGS), None, None, version)
        else:
            with pytest.raises(Refusal):
                Feed(store.table(THINGS), None, None, version)


def test_selectors_of_every_form_are_parsed_or_refused() -> None:
    labels = {"app.kubernetes.io/name": "x", "empty": "", "n": "1"}
    for text in (
        "app.kubernetes.io/name=x",
        "empty=",
        "empty",
        "n in ( 1 , 2 )",
        " n = 1 , !other",
        "n notin (2),other!=1",
    ):
        assert parse(text)(labels), text
    for text in ("n=2", "!n", "other", "n in (2)", "n notin (1)", "empty in (1)", "n!=1"):
        assert not parse(text)(labels), text
    for text in ("n=1 2", "n in 1", "in (1)x", "n==", "=1", "n=(1)", "n,,m(", "!"):
        if text == "n==":
            assert not parse(text)(labels)  # the empty value
        else:
            with pytest.raises(Refusal):
                parse(text)
