"""Who gives which shard to whom: examples by hand, and random members against the definition."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from everstep.recovery.transfer.shard_transfer_plan import (
    NEW,
    MemberShard,
    ShardTransferPlan,
    fresh,
    missing,
    plan_transfers,
    undecided,
    was_made,
)
from everstep.recovery.validity import Validity


def held(step: int, shard: int, *, made: int = 1, validity: Validity = Validity.WHOLE, digest: int = 7) -> MemberShard:
    return MemberShard(step, made, validity, shard, digest + shard)


def new(shard: int = 0) -> MemberShard:
    return MemberShard(0, NEW, Validity.NONE, shard, 0)


def test_members_of_a_lost_replica_get_their_shards_from_their_counterparts() -> None:
    found = plan_transfers([held(5, 0), held(5, 1), new(), new()], 2)
    assert found == ShardTransferPlan(5, 1, ((2, 0), (3, 1)))


def test_member_that_has_its_shard_gets_nothing() -> None:
    assert plan_transfers([held(5, 0), held(5, 1), held(5, 0), held(5, 1)], 2) == ShardTransferPlan(5, 1, ())


def test_survivor_whose_rank_moved_gets_the_shard_of_its_new_rank() -> None:
    # Ranks 0 and 1 hold each other's shards.
    assert plan_transfers([held(5, 1), held(5, 0)], 2) == ShardTransferPlan(5, 1, ((0, 1), (1, 0)))


def test_shards_left_of_two_replicas_make_one_state() -> None:
    assert plan_transfers([held(5, 0), held(5, 1), new(), held(5, 1)], 2) == ShardTransferPlan(5, 1, ((2, 0),))


def test_newest_step_that_is_not_whole_gives_way_to_the_newest_that_is() -> None:
    members = [held(6, 0), held(5, 1), held(5, 0), held(5, 1)]
    assert plan_transfers(members, 2) == ShardTransferPlan(5, 1, ((0, 2),))


def test_same_step_made_in_two_rounds_is_not_one_version() -> None:
    # Each half was made by members that did not know of the other: together they are no state.
    assert plan_transfers([held(6, 0, made=1), held(6, 1, made=2)], 2) is None
    both = [held(6, 0, made=1), held(6, 1, made=2), held(6, 0, made=2), held(6, 1, made=1)]
    assert plan_transfers(both, 2) == ShardTransferPlan(6, 2, ((0, 2), (3, 1)))


def test_no_version_whole_is_no_cover_and_the_missing_shards_are_named() -> None:
    members = [held(5, 0), held(5, 0), new(1), held(5, 1, validity=Validity.TORN)]
    assert plan_transfers(members, 2) is None
    assert missing(members, 2) == (1,)


def test_new_job_starts_from_the_shards_that_the_scripts_made() -> None:
    members = [new(0), new(1), new(0), new(1)]
    assert fresh(members)
    assert plan_transfers(members, 2) == ShardTransferPlan(0, NEW, ())
    assert plan_transfers([new(0), new(0)], 2) is None


def test_other_parameters_after_the_same_step_are_named_and_corrected() -> None:
    members = [held(5, 0), held(5, 1), held(5, 0, digest=8), held(5, 1)]
    assert plan_transfers(members, 2) == ShardTransferPlan(5, 1, ((2, 0),), (2,))


def test_holders_of_a_shard_that_differ_in_its_parameters_are_no_state_unless_most_hold_the_same() -> None:
    members = [replace(held(5, 0, digest=d), parameters=d) for d in (7, 8, 8)]
    assert plan_transfers(members[:2], 1) is None
    assert plan_transfers(members, 1) == ShardTransferPlan(5, 1, ((0, 1),), (0,))
    older = [held(4, 0)]
    assert plan_transfers([*members[:2], *older], 1) == ShardTransferPlan(4, 1, ((0, 2), (1, 2)))


def test_several_receivers_of_a_shard_take_it_from_several_givers() -> None:
    members = [held(5, 0), held(5, 0), new(), new()]
    assert plan_transfers(members, 1) == ShardTransferPlan(5, 1, ((2, 0), (3, 1)))


def test_voter_makes_its_step_only_if_another_made_it_in_that_round() -> None:
    voter = MemberShard(5, 3, Validity.VOTED, 0, 0)
    assert undecided([voter, held(6, 1, made=3)])
    assert was_made(voter, [voter, held(6, 1, made=3)])
    assert not was_made(voter, [voter, held(5, 1, made=2)])
    assert not was_made(voter, [voter, held(6, 1, made=4)]), "they repeated it without this member"
    assert not was_made(voter, [voter, MemberShard(5, 3, Validity.VOTED, 1, 0)])
    assert not was_made(voter, [voter, held(6, 1, made=3, validity=Validity.TORN)])


settled = st.sampled_from([Validity.TORN, Validity.NONE, Validity.WHOLE])


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[MemberShard], int]:
    shards = draw(st.integers(1, 4))
    size = shards * draw(st.integers(1, 4))
    some = st.builds(
        MemberShard,
        st.integers(4, 6),
        st.integers(1, 2),
        settled,
        st.integers(0, shards - 1),
        st.sampled_from([7, 7, 7, 8]),
    )
    return draw(st.lists(some, min_size=size, max_size=size)), shards


@given(worlds())
def test_random_members_end_with_the_shard_of_their_rank_of_the_newest_whole_version(
    world: tuple[list[MemberShard], int],
) -> None:
    members, shards = world
    usable = [m for m in members if m.validity is Validity.WHOLE] or (members if fresh(members) else [])
    whole = [
        version
        for version in {(m.step, m.made) for m in usable}
        if {m.shard for m in usable if (m.step, m.made) == version} == set(range(shards))
    ]
    found = plan_transfers(members, shards)
    assert (found is None) == (not whole)
    if found is None:
        return
    version = (found.step, found.made)
    assert version == max(whole)
    transfers = dict(found.transfers)
    assert len(transfers) == len(found.transfers), "a member receives twice"
    digests: dict[int, set[int]] = {}
    for rank in range(len(members)):
        source = members[transfers.get(rank, rank)]
        assert source in usable
        assert (source.step, source.made, source.shard) == (*version, rank % shards)
        digests.setdefault(rank % shards, set()).add(source.digest)
    assert all(len(found) == 1 for found in digests.values()), "replicas differ"
    assert all(members[rank] != members[sender] for rank, sender in transfers.items()), "a transfer of what was there"
