"""The informer's cache: whatever events arrive, readers and handlers see the truth and every difference."""

from hypothesis import given, settings
from hypothesis import strategies as st

from everstep_operator.kube.client import Bookmark, Changed, EventType, ListResult
from everstep_operator.kube.wire import ObjectMeta, Pod
from everstep_operator.runtime.cache import Added, Cache, Deleted, Delta, Updated


def pod(name: str, version: int | str, uid: str = "u1", **labels: str) -> Pod:
    meta = ObjectMeta(name=name, namespace="ns", uid=uid, resource_version=str(version), labels=labels)
    return Pod(metadata=meta)


def changed(type: str, obj: Pod) -> Changed[Pod]:
    return Changed(EventType(type), obj)


def listed(version: int | str, *items: Pod) -> ListResult[Pod]:
    return ListResult(items, str(version))


def by_job(obj: Pod) -> list[str]:
    return [obj.metadata.labels["job"]] if "job" in obj.metadata.labels else []


def test_relist_after_a_gap_emits_the_delete_that_was_missed() -> None:
    cache: Cache[Pod] = Cache()
    a, b = pod("a", 1), pod("b", 2)
    assert cache.replace(listed(2, a, b)) == (Added(a), Added(b))
    newer = pod("b", 7)
    assert cache.replace(listed(9, newer)) == (Deleted(a), Updated(b, newer))
    assert cache.list() == (newer,)
    assert cache.position == "9"


def test_object_recreated_under_its_name_is_a_delete_and_an_add() -> None:
    cache: Cache[Pod] = Cache()
    old, new = pod("a", 1, uid="old"), pod("a", 5, uid="new")
    cache.replace(listed(1, old))
    assert cache.replace(listed(5, new)) == (Deleted(old), Added(new))
    newest = pod("a", 6, uid="newest")
    assert cache.apply(changed("ADDED", newest)) == (Deleted(new), Added(newest))


def test_delete_of_an_earlier_object_with_the_same_name_leaves_the_new_one() -> None:
    cache: Cache[Pod] = Cache()
    cache.replace(listed(5, pod("a", 5, uid="new")))
    assert cache.apply(changed("DELETED", pod("a", 6, uid="old"))) == ()
    assert cache.get("ns", "a") is not None


def test_stale_event_changes_nothing_and_does_not_revive_the_dead() -> None:
    cache: Cache[Pod] = Cache()
    cache.replace(listed(10, pod("a", 8)))
    cache.apply(changed("DELETED", pod("a", 12)))
    assert cache.apply(changed("MODIFIED", pod("a", 11))) == ()
    assert cache.apply(changed("DELETED", pod("a", 12))) == ()
    assert cache.list() == ()
    assert cache.position == "12"


def test_deleted_carries_the_last_state_of_the_event() -> None:
    cache: Cache[Pod] = Cache()
    cache.replace(listed(1, pod("a", 1)))
    last = pod("a", 2, job="final")
    assert cache.apply(changed("DELETED", last)) == (Deleted(last),)


def test_bookmark_moves_the_position_only() -> None:
    cache: Cache[Pod] = Cache()
    cache.replace(listed(1, pod("a", 1)))
    assert cache.apply(Bookmark("50")) == ()
    assert cache.position == "50"
    assert len(cache) == 1


def test_older_list_is_recognized_and_equal_or_opaque_ones_are_not() -> None:
    cache: Cache[Pod] = Cache()
    cache.replace(listed(10))
    assert cache.is_older_list(listed(9))
    assert not cache.is_older_list(listed(10))
    assert not cache.is_older_list(listed(11))
    assert not cache.is_older_list(listed("abc"))


def test_index_follows_relabelling_and_deletion() -> None:
    cache: Cache[Pod] = Cache({"job": by_job})
    cache.replace(listed(2, pod("b", 1, job="x"), pod("a", 2, job="x")))
    assert [obj.metadata.name for obj in cache.by_index("job", "x")] == ["a", "b"]
    cache.apply(changed("MODIFIED", pod("b", 3, job="y")))
    cache.apply(changed("DELETED", pod("a", 4, job="x")))
    assert cache.by_index("job", "x") == ()
    assert [obj.metadata.name for obj in cache.by_index("job", "y")] == ["b"]


def follow(view: dict[str, Pod], deltas: tuple[Delta[Pod], ...]) -> None:
    """A handler that trusts deltas alone: it fails on any that does not fit what it saw before."""
    for delta in deltas:
        name = delta.object.metadata.name
        match delta:
            case Added(obj):
                assert name not in view
                view[name] = obj
            case Updated(old, obj):
                assert view[name] == old
                view[name] = obj
            case Deleted(obj):
                assert view[name].metadata.uid == obj.metadata.uid
                del view[name]


@settings(max_examples=200, deadline=None)
@given(
    history=st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=30),
    faults=st.lists(st.tuples(st.integers(0, 29), st.sampled_from(["relist", "repeat", "lose"])), max_size=12),
)
def test_handlers_reach_the_truth_whatever_is_repeated_lost_or_relisted(
    history: list[tuple[str, bool]], faults: list[tuple[int, str]]
) -> None:
    truth: dict[str, Pod] = {}
    view: dict[str, Pod] = {}
    cache: Cache[Pod] = Cache({"name": lambda obj: [obj.metadata.name]})
    cache.replace(listed(0))
    events: list[Changed[Pod]] = []
    for version, (name, delete) in enumerate(history, start=1):
        old = truth.get(name)
        uid = old.metadata.uid if old else f"{name}-{version}"
        obj = pod(name, version, uid=uid)
        if delete and old:
            del truth[name]
            event = changed("DELETED", obj)
        else:
            truth[name] = obj
            event = changed("MODIFIED" if old else "ADDED", obj)
        events.append(event)
        kinds = {kind for at, kind in faults if at == version - 1}
        if "lose" not in kinds:
            follow(view, cache.apply(event))
        if "repeat" in kinds:
            for stale in events:
                follow(view, cache.apply(stale))
        if kinds & {"relist", "lose"}:
            follow(view, cache.replace(listed(version, *truth.values())))
    assert view == truth
    assert {obj.metadata.name: obj for obj in cache.list()} == truth
    for name in "abc":
        assert [obj.metadata.name for obj in cache.by_index("name", name)] == [name] * (name in truth)
