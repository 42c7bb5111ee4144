"""Who gives which shard to whom: examples by hand, and random members against the definition."""

from hypothesis import given
from hypothesis import strategies as st

from everstep.recovery.transfer.shard_transfer_plan import NEW, Cover, Held, cover, fresh, missing, undecided, was_made
from everstep.recovery.validity import Quality


def held(step: int, shard: int, *, made: int = 1, quality: Quality = Quality.WHOLE, digest: int = 7) -> Held:
    return Held(step, made, quality, shard, digest + shard)


def new(shard: int = 0) -> Held:
    return Held(0, NEW, Quality.NONE, shard, 0)


def test_members_of_a_lost_replica_get_their_shards_from_their_counterparts() -> None:
    found = cover([held(5, 0), held(5, 1), new(), new()], 2)
    assert found == Cover(5, 1, ((2, 0), (3, 1)))


def test_member_that_has_its_shard_gets_nothing() -> None:
    assert cover([held(5, 0), held(5, 1), held(5, 0), held(5, 1)], 2) == Cover(5, 1, ())


def test_survivor_whose_rank_moved_gets_the_shard_of_its_new_rank() -> None:
    # Ranks 0 and 1 hold each other's shards.
    assert cover([held(5, 1), held(5, 0)], 2) == Cover(5, 1, ((0, 1), (1, 0)))


def test_shards_left_of_two_replicas_make_one_state() -> None:
    assert cover([held(5, 0), held(5, 1), new(), held(5, 1)], 2) == Cover(5, 1, ((2, 0),))


def test_newest_step_that_is_not_whole_gives_way_to_the_newest_that_is() -> None:
    members = [held(6, 0), held(5, 1), held(5, 0), held(5, 1)]
    assert cover(members, 2) == Cover(5, 1, ((0, 2),))


def test_same_step_made_in_two_rounds_is_not_one_version() -> None:
    # Each half was made by members that did not know of the other: together they are no state.
    assert cover([held(6, 0, made=1), held(6, 1, made=2)], 2) is None
    both = [held(6, 0, made=1), held(6, 1, made=2), held(6, 0, made=2), held(6, 1, made=1)]
    assert cover(both, 2) == Cover(6, 2, ((0, 2), (3, 1)))


def test_no_version_whole_is_no_cover_and_the_missing_shards_are_named() -> None:
    members = [held(5, 0), held(5, 0), new(1), held(5, 1, quality=Quality.TORN)]
    assert cover(members, 2) is None
    assert missing(members, 2) == (1,)


def test_new_job_starts_from_the_shards_that_the_scripts_made() -> None:
    members = [new(0), new(1), new(0), new(1)]
    assert fresh(members)
    assert cover(members, 2) == Cover(0, NEW, ())
    assert cover([new(0), new(0)], 2) is None


def test_other_parameters_after_the_same_step_are_named_and_corrected() -> None:
    members = [held(5, 0), held(5, 1), held(5, 0, digest=8), held(5, 1)]
    assert cover(members, 2) == Cover(5, 1, ((2, 0),), (2,))


def test_several_receivers_of_a_shard_take_it_from_several_givers() -> None:
    members = [held(5, 0), held(5, 0), new(), new()]
    assert cover(members, 1) == Cover(5, 1, ((2, 0), (3, 1)))


def test_voter_makes_its_step_only_if_another_made_it_in_that_round() -> None:
    voter = Held(5, 3, Quality.VOTED, 0, 0)
    assert undecided([voter, held(6, 1, made=3)])
    assert was_made(voter, [voter, held(6, 1, made=3)])
    assert not was_made(voter, [voter, held(5, 1, made=2)])
    assert not was_made(voter, [voter, held(6, 1, made=4)]), "they repeated it without this member"
    assert not was_made(voter, [voter, Held(5, 3, Quality.VOTED, 1, 0)])
    assert not was_made(voter, [voter, held(6, 1, made=3, quality=Quality.TORN)])


settled = st.sampled_from([Quality.TORN, Quality.NONE, Quality.WHOLE])


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[Held], int]:
    shards = draw(st.integers(1, 4))
    size = shards * draw(st.integers(1, 4))
    some = st.builds(
        Held, st.integers(4, 6), st.integers(1, 2), settled, st.integers(0, shards - 1), st.sampled_from([7, 7, 7, 8])
    )
    return draw(st.lists(some, min_size=size, max_size=size)), shards


@given(worlds())
def test_random_members_end_with_the_shard_of_their_rank_of_the_newest_whole_version(
    world: tuple[list[Held], int],
) -> None:
    members, shards = world
    usable = [m for m in members if m.quality is Quality.WHOLE] or (members if fresh(members) else [])
    whole = [
        version
        for version in {(m.step, m.made) for m in usable}
        if {m.shard for m in usable if (m.step, m.made) == version} == set(range(shards))
    ]
    found = cover(members, shards)
    assert (found is None) == (not whole)
    if found is None:
        return
    version = (found.step, found.made)
    assert version == max(whole)
    gifts = dict(found.gifts)
    assert len(gifts) == len(found.gifts), "a member receives twice"
    digests: dict[int, set[int]] = {}
    for rank in range(len(members)):
        source = members[gifts.get(rank, rank)]
        assert source in usable
        assert (source.step, source.made, source.shard) == (*version, rank % shards)
        digests.setdefault(rank % shards, set()).add(source.digest)
    assert all(len(found) == 1 for found in digests.values()), "replicas differ"
    assert all(members[rank] != members[giver] for rank, giver in gifts.items()), "a gift of what was there"
