"""docs/adr/0001 holds in every interleaving within the bounds, and each of its rules is needed for that.

The bounds are those of the table in the ADR. A sensitivity test switches one rule off and must find a violation: a
rule that nothing needs would be a rule that the model does not see.
"""

from __future__ import annotations

import pytest

from support.protocol import cluster, log, whole, worlds
from support.protocol.cluster import Cluster, ClusterModel
from support.protocol.explorer import Report, explore
from support.protocol.log import Claimed, LogModel
from support.protocol.rules import ClusterRule, LogRule, WorldRule
from support.protocol.whole import WholeModel
from support.protocol.worlds import Counted, State, WorldsModel

LIMIT = 250_000
# Exploration is bounded by states, not by time: seconds on a free machine, minutes on one that does much else.
pytestmark = pytest.mark.timeout(600)
OLD, NEW, OTHER = (1, "a", 1), (2, "a", 1), (1, "b", 2)


def holds(report: Report) -> None:
    print(report.describe())
    assert report.violation is None, report.describe()


@pytest.mark.long
@pytest.mark.parametrize(("indices", "rounds", "faults"), [(1, 2, 2), (1, 3, 1), (2, 2, 1)])
def test_operators_on_stale_caches_keep_one_owner_a_round(indices: int, rounds: int, faults: int) -> None:
    holds(explore(ClusterModel(indices=indices, rounds=rounds, faults=faults), LIMIT))


@pytest.mark.long
@pytest.mark.parametrize(
    ("claims", "saves", "faults"),
    [
        ((OLD, NEW), 2, 2),  # a zombie and its successor
        ((OLD, OLD, NEW), 1, 1),  # the same, and a second process group of the old round
        ((OLD, OTHER, NEW), 1, 1),  # the job is deleted and created again under the same URL
    ],
)
def test_writers_that_each_believe_to_be_alone_keep_one_line_of_commits(
    claims: tuple[Claimed, ...], saves: int, faults: int
) -> None:
    holds(explore(LogModel(claims=claims, saves=saves, faults=faults), LIMIT))


@pytest.mark.long_but("claims0-1-2-earlier release")
@pytest.mark.parametrize("copies", [True, False], ids=["copies", "earlier release"])
@pytest.mark.parametrize(
    ("claims", "saves", "faults"), [((OLD, NEW), 1, 2), ((OLD, OTHER), 1, 2), ((OLD, OLD, NEW), 1, 1)]
)
def test_damaged_record_lets_no_older_round_in_and_fences_no_living_one(
    claims: tuple[Claimed, ...], saves: int, faults: int, copies: bool
) -> None:
    model = LogModel(claims=claims, saves=saves, faults=faults, parts=1, damage=True, copies=copies)
    holds(explore(model, LIMIT))


@pytest.mark.parametrize(("claims", "newcomer"), [((OLD, NEW), (3, "a", 1)), ((OLD, OTHER), (2, "b", 2))])
def test_writer_commits_again_whichever_record_is_damaged(claims: tuple[Claimed, ...], newcomer: Claimed) -> None:
    """With one fault: a record that is damaged beside a copy that a dead writer left may leave the owner unknown."""
    model = LogModel(claims=claims, saves=1, faults=1, parts=1, damage=True)
    holds(explore(model, LIMIT, lambda s: log.progresses(model, s, newcomer)))


@pytest.mark.parametrize(
    ("rule", "copies", "found"),
    [
        (LogRule.COPY_BEFORE_OPEN, True, "the newer round is fenced"),
        (LogRule.UNKNOWN_OWNER_STOPS, False, "the newer round is fenced"),
        (LogRule.SPARE_WHAT_IS_UNKNOWN, True, "whose record is damaged"),
    ],
    ids=lambda x: getattr(x, "name", ""),
)
def test_rule_for_damaged_records_switched_off_breaks_an_invariant(rule: LogRule, copies: bool, found: str) -> None:
    report = explore(LogModel(frozenset({rule}), damage=True, copies=copies), LIMIT)
    print(report.describe())
    assert report.violation is not None, f"{rule.name} is not needed: {report.describe()}"
    assert found in report.violation, report.describe()


@pytest.mark.long_but("1-1")
@pytest.mark.parametrize(("rounds", "faults"), [(2, 0), (1, 1), (2, 1)])
def test_pods_and_writers_together_keep_state_whole_and_in_one_line(rounds: int, faults: int) -> None:
    holds(explore(WholeModel(rounds=rounds, faults=faults), LIMIT))


def test_cluster_without_further_faults_brings_up_a_whole_round_from_every_state() -> None:
    model = ClusterModel(indices=1, rounds=2, faults=2)

    def stuck(state: Cluster) -> str | None:
        settled = cluster.settle(model, state)
        return settled if isinstance(settled, str) else None

    holds(explore(model, LIMIT, stuck))


@pytest.mark.long_but("claims2-1-newcomer2")
@pytest.mark.parametrize(
    ("claims", "saves", "newcomer"),
    [
        ((OLD, NEW), 2, (3, "a", 1)),
        ((OLD, OLD), 1, (3, "a", 1)),
        ((OLD, OTHER), 1, (2, "b", 2)),  # a pod of the deleted job may open at any time, also for the first time
    ],
)
def test_writer_without_further_faults_commits_from_every_state(
    claims: tuple[Claimed, ...], saves: int, newcomer: Claimed
) -> None:
    model = LogModel(claims=claims, saves=saves, faults=1)
    holds(explore(model, LIMIT, lambda s: log.progresses(model, s, newcomer)))


def test_job_without_further_faults_commits_again_from_every_state() -> None:
    model = WholeModel(rounds=2, faults=0)
    holds(explore(model, LIMIT, lambda s: whole.recovers(model, s)))


CLUSTER_NEEDS = {
    ClusterRule.CAS_ON_PUBLISH: "two operators own one round",
    ClusterRule.PUBLISH_FIRST: "which nobody published",
    ClusterRule.NAME_FROM_ROUND: "two pods are the same worker of the same round",
    ClusterRule.OWNER_CHECK: "took another job's pod",
    ClusterRule.UID_PRECONDITION: "judged pod uid",
    ClusterRule.DELETE_ONLY_OLDER: "deleted a healthy pod of the published round",
}


@pytest.mark.parametrize("rule", list(ClusterRule), ids=lambda r: r.name)
def test_cluster_rule_switched_off_breaks_an_invariant(rule: ClusterRule) -> None:
    report = explore(ClusterModel(frozenset({rule}), indices=1), LIMIT)
    print(report.describe())
    assert report.violation is not None, f"{rule.name} is not needed: {report.describe()}"
    assert CLUSTER_NEEDS[rule] in report.violation, report.describe()
    assert report.trace


LOG_NEEDS = {
    LogRule.CONDITIONAL_CREATE: "owns the log",
    LogRule.OPEN_BEFORE_RESTORE: "fork",
    LogRule.ROUND_ORDER: "the newer round is fenced",
    LogRule.JOB_ORDER: "had taken over",
    LogRule.NEWER_OPEN_FENCES: "owns the log",
    LogRule.READ_WHAT_WON: "the newer round is fenced",
    LogRule.RECOGNISE_OWN: "was committed twice",
    LogRule.SHARDS_FIRST: "is torn",
    LogRule.UNIQUE_SAVES: "is torn",
    LogRule.CLEAR_WHAT_IS_IN_NO_RECORD: "is torn",
    LogRule.PROBE_PAST_LISTING: "committed steps are lost",
    LogRule.VERIFY_SHARDS: "trains from the damaged commit",
    LogRule.UNREADABLE_IS_NOT_DAMAGED: "committed steps are lost",
    LogRule.KEEP_UNANSWERED: "is torn",
    LogRule.CLEAN_ONLY_OLDER: "deleted the shards of commit",
    LogRule.CLEAN_WHILE_OWNER: "that the newer owner may keep",
    LogRule.COMPACT_IN_PLACE: "owns the log",
    LogRule.COMPACT_WHAT_IS_GONE: "is torn",
}


@pytest.mark.long_but("NEWER_OPEN_FENCES")
@pytest.mark.parametrize("rule", list(LOG_NEEDS), ids=lambda r: r.name)
def test_log_rule_switched_off_breaks_an_invariant(rule: LogRule) -> None:
    claims = (OLD, NEW, OTHER) if rule is LogRule.JOB_ORDER else (OLD, NEW)
    report = explore(LogModel(frozenset({rule}), claims=claims), LIMIT)
    print(report.describe())
    assert report.violation is not None, f"{rule.name} is not needed: {report.describe()}"
    assert LOG_NEEDS[rule] in report.violation, report.describe()
    assert report.trace


def test_job_age_switched_off_shuts_a_job_out_of_its_own_log() -> None:
    """State stays whole without this rule, but a pod of a deleted job that starts late takes the log for good."""
    model = LogModel(frozenset({LogRule.JOB_AGE}), claims=(OLD, OTHER), saves=1, faults=0)
    report = explore(model, LIMIT, lambda s: log.progresses(model, s, (2, "b", 2)))
    print(report.describe())
    assert report.violation is not None
    assert "writer 2 (job b, round 2) is stuck in phase stopped" in report.violation, report.describe()


def test_every_rule_of_the_log_has_a_test_with_it_switched_off() -> None:
    others = {
        LogRule.JOB_AGE, LogRule.COPY_BEFORE_OPEN, LogRule.UNKNOWN_OWNER_STOPS, LogRule.SPARE_WHAT_IS_UNKNOWN
    }  # fmt: skip
    assert set(LogRule) == set(LOG_NEEDS) | others


@pytest.mark.long
def test_same_model_explored_twice_gives_the_same_trace() -> None:
    off = frozenset({LogRule.OPEN_BEFORE_RESTORE})
    assert explore(LogModel(off), LIMIT) == explore(LogModel(off), LIMIT)


@pytest.mark.long_but("2-2-2-2-ETCD")
@pytest.mark.parametrize("counted", list(Counted), ids=lambda c: c.name)
@pytest.mark.parametrize(
    ("processes", "formed", "steps", "faults"), [(2, 3, 1, 1), (3, 2, 1, 1), (2, 2, 2, 2), (2, 3, 2, 0)]
)
def test_worlds_that_form_in_living_processes_open_the_log_in_their_order(
    counted: Counted, processes: int, formed: int, steps: int, faults: int
) -> None:
    model = WorldsModel(counted=counted, processes=processes, worlds=formed, steps=steps, faults=faults)
    holds(explore(model, LIMIT))


@pytest.mark.long_but("OPERATOR-all cut off")
@pytest.mark.parametrize("lost", [True, False], ids=["all lost", "all cut off"])
@pytest.mark.parametrize("counted", list(Counted), ids=lambda c: c.name)
def test_job_goes_on_from_every_state_in_a_new_world(counted: Counted, lost: bool) -> None:
    model = WorldsModel(counted=counted, processes=2, worlds=2, steps=1, faults=1)
    holds(explore(model, LIMIT, lambda s: worlds.goes_on(model, s, lost=lost)))


@pytest.mark.long_but("NEW_RENDEZVOUS_NEW_OWNER-ETCD-")
@pytest.mark.parametrize(
    ("rule", "counted", "found"),
    [
        (WorldRule.CLAIM_THE_PRESENT_ROUND, Counted.OPERATOR, "an older world opened the log"),
        (WorldRule.CLAIM_THE_PRESENT_ROUND, Counted.RUN, "an older world opened the log"),
        (WorldRule.COMPARE_UNDER_OWN_OPEN, Counted.OPERATOR, "goes back from 2 steps to 1"),
        (WorldRule.RENDEZVOUS_OWNS, Counted.RUN, "an older world opened the log"),
        (WorldRule.NEW_RENDEZVOUS_NEW_OWNER, Counted.ETCD, "round 1 is older than round 2"),
        (WorldRule.NEW_RENDEZVOUS_NEW_OWNER, Counted.RUN, "round 1 is older than round 2"),
    ],
    ids=lambda x: getattr(x, "name", ""),
)
def test_world_rule_switched_off_fences_a_healthy_world(rule: WorldRule, counted: Counted, found: str) -> None:
    steps, faults = (2, 0) if rule is WorldRule.COMPARE_UNDER_OWN_OPEN else (1, 1)
    model = WorldsModel(frozenset({rule}), counted=counted, processes=2, worlds=3, steps=steps, faults=faults)
    report = explore(model, LIMIT)
    print(report.describe())
    assert report.violation is not None, f"{rule.name} is not needed: {report.describe()}"
    assert found in report.violation, report.describe()


@pytest.mark.parametrize("counted", [Counted.OPERATOR, Counted.ETCD], ids=lambda c: c.name)
def test_claim_of_the_round_of_the_start_loses_a_job_that_is_suspended_and_resumed(counted: Counted) -> None:
    """Processes that are started before their first round then claim none, for ever."""

    class Unwatched(WorldsModel):
        def violation(self, s: State) -> str | None:
            return None

    model = Unwatched(frozenset({WorldRule.CLAIM_THE_PRESENT_ROUND}), counted=counted, processes=2, worlds=2)
    report = explore(model, LIMIT, lambda s: worlds.goes_on(model, s, lost=True))
    print(report.describe())
    assert report.violation is not None
    assert "round 0 is older than round 1" in report.violation
