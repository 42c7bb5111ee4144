"""Ranks that wait for each other: in different collectives, or all in the same one (failure modes 63, 62)."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from everstep.agent.hang.mismatch import Seen, clash, compare, decode, ranks_in_words
from everstep.contract.calls import NO_MATCH, Call, in_group
from support.agent.agent_job import HERE, Agent, Job

SUM = "all_reduce(float32[10])"
LARGER = "all_reduce(float32[20])"
COPY = "broadcast(float32[10], root 0)"


def waits(number: int, what: str, at: str = "") -> Seen:
    call = Call(number, what)
    return Seen(call, (call,), at)


def test_the_rank_in_another_collective_is_named_first_with_its_line() -> None:
    here, there = " at train.py:31 in main", " at train.py:40 in main"
    verdict = compare({0: waits(7, COPY, there), 1: waits(7, COPY, there), 2: waits(7, SUM, here)})
    assert verdict.odd == (2,)
    assert verdict.why == (
        f"the ranks' collectives do not match: rank 2 waits in {SUM}{here}; ranks 0 and 1 wait in {COPY}{there}"
    )


def test_the_same_collective_at_another_place_in_the_order_is_told_apart_by_its_number() -> None:
    verdict = compare({0: waits(12, SUM), 1: waits(11, SUM), 2: waits(12, SUM)})
    assert verdict.odd == (1,)
    assert "rank 1 waits in all_reduce(float32[10]), the 11th in this round; ranks 0 and 2" in verdict.why


def test_a_rank_that_skipped_one_and_waits_at_the_end_of_its_step_is_the_odd_one() -> None:
    verdict = compare({0: Seen(None, (Call(4, SUM),)), 1: waits(5, SUM), 2: waits(5, SUM), 3: waits(5, SUM)})
    assert verdict.odd == (0,)
    assert "rank 0 waits at the end of the step, after 4 collectives in this round; ranks 1-3 wait" in verdict.why


@pytest.mark.parametrize("later", [Call(6, SUM), None], ids=["in the next one", "at the end of its step"])
def test_a_rank_that_went_on_because_it_need_not_wait_is_no_mismatch(later: Call | None) -> None:
    called = (Call(5, COPY), *([later] if later is not None else []))
    verdict = compare({0: Seen(later, called), 1: waits(5, COPY), 2: waits(5, COPY)})
    assert verdict.odd == (), "the data of the broadcast has not arrived"
    assert f"ranks 1 and 2 wait in {COPY}" in verdict.why
    assert "nothing arrives" in verdict.why
    assert NO_MATCH not in verdict.why


def test_a_rank_that_called_another_one_before_is_a_mismatch() -> None:
    ahead = Seen(Call(6, SUM), (Call(5, COPY), Call(6, SUM)))
    assert compare({0: ahead, 1: waits(5, SUM), 2: waits(5, SUM)}).odd == (0,)


def test_of_two_halves_the_one_with_rank_0_is_not_the_odd_one() -> None:
    assert compare({0: waits(1, SUM), 1: waits(1, COPY)}).odd == (1,)


def test_ranks_that_wait_in_the_same_collective_match() -> None:
    verdict = compare(dict.fromkeys(range(3), waits(7, SUM)))
    assert verdict.odd == ()
    assert verdict.why.startswith(f"ranks 0-2 wait in {SUM}, and nothing arrives")


def test_ranks_in_groups_of_their_own_are_told_with_their_lines_and_not_blamed() -> None:
    inner = in_group(Call(7, SUM))
    here, there = " at train.py:31 in main", " at train.py:40 in main"
    seen = {0: Seen(inner, (), here), 1: Seen(in_group(Call(7, COPY)), (), there), 2: Seen(None, (Call(4, SUM),))}
    verdict = compare(seen)
    assert verdict.odd == ()
    assert f"rank 0 waits in {SUM} in a group of some ranks{here}" in verdict.why
    assert f"rank 1 waits in {COPY} in a group of some ranks{there}" in verdict.why
    assert "rank 2 waits at the end of the step" in verdict.why
    assert "nothing arrives" in verdict.why


@pytest.mark.parametrize("elsewhere", [Call(5, SUM), Call(4, "send(to rank 2)"), None])
def test_a_message_that_has_not_arrived_is_no_mismatch(elsewhere: Call | None) -> None:
    message = Call(4, "recv(from rank 0)")
    verdict = compare({0: Seen(elsewhere, (Call(4, COPY),)), 1: Seen(message, (Call(4, COPY),), " at train.py:9")})
    assert verdict.odd == ()
    assert "rank 1 waits in recv(from rank 0) at train.py:9" in verdict.why
    assert "nothing arrives: no rank computes, and some wait for a message" in verdict.why
    assert NO_MATCH not in verdict.why


def test_an_aborted_rank_is_compared_with_what_others_had_at_the_same_place() -> None:
    ended = Seen(Call(7, SUM), (Call(6, COPY), Call(7, SUM)), " at train.py:31 in main")
    ahead = Seen(Call(8, SUM), (Call(7, LARGER), Call(8, SUM)))
    verdict = clash(2, ended, {0: ahead, 1: ahead})
    assert verdict is not None
    assert verdict.odd == (2,)
    assert f"rank 2 waits in {SUM} at train.py:31 in main; ranks 0 and 1 wait in {LARGER}" in verdict.why


@pytest.mark.parametrize("others", [{}, {0: waits(7, SUM)}, {0: waits(9, COPY)}])
def test_an_aborted_rank_of_which_nothing_else_is_known_is_no_mismatch(others: dict[int, Seen]) -> None:
    assert clash(2, waits(7, SUM), others) is None


def test_an_abort_outside_of_any_collective_is_no_mismatch() -> None:
    assert clash(2, Seen(None), {0: waits(7, SUM)}) is None


def test_what_is_said_is_bounded_however_many_ranks_differ() -> None:
    verdict = compare({rank: waits(rank, SUM) for rank in range(0, 4000, 2)})
    assert len(verdict.why) < 600
    assert ranks_in_words(range(0, 4000, 2)) == "ranks 0, 2, 4, 6, 8, 10 and others"


@pytest.mark.parametrize(
    ("ranks", "words"),
    [([2], "rank 2"), ([0, 1], "ranks 0 and 1"), ([0, 1, 2], "ranks 0-2"), ([0, 1, 2, 5], "ranks 0-2 and 5")],
)
def test_ranks_in_words(ranks: list[int], words: str) -> None:
    assert ranks_in_words(ranks) == words


def test_what_a_rank_says_of_itself_arrives_as_it_was_said_and_other_bytes_are_refused() -> None:
    seen = Seen(None, (Call(4, SUM), Call(5, COPY)), " at train.py:31 in main", waits=False)
    assert decode(seen.encode()) == seen
    for bad in (b"", b"[]", b"{}", b"[" * 5000, b'{"call":null,"recent":[[1]],"at":"","waits":true}'):
        with pytest.raises(ValueError):
            decode(bad)


# --- with real processes


def begun(job: Callable[..., Job], folder: Path, **environ: str) -> tuple[Job, list[Agent]]:
    run = job(HERE / "mismatch_script.py", folder, environ={"EVERSTEP_HANG_SECONDS": "2", **environ})
    agents = run.start(3)
    run.world(agents, 0.0)
    return run, agents


def tell(folder: Path, odd: str) -> None:
    """Say what rank 1 is to do, whole or not at all."""
    (folder / "odd.new").write_text(odd)
    (folder / "odd.new").rename(folder / "odd")


def said(agents: list[Agent]) -> list[str]:
    return [agent.log.read_text() for agent in agents]


@pytest.mark.long
@pytest.mark.timeout(180)
def test_a_rank_in_another_collective_ends_the_job_with_its_name_instead_of_a_timeout(
    job: Callable[..., Job], tmp_path: Path
) -> None:
    """Case 63: nobody computes, nobody would ever go on."""
    run, agents = begun(job, tmp_path, TMPDIR=str(tmp_path))
    tell(tmp_path, "other")
    at = time.monotonic()
    assert run.codes() == [1, 1, 1]
    print(f"ended after {time.monotonic() - at:.1f} s")
    words = (
        r"the ranks' collectives do not match: rank 1 waits in broadcast\(float32\[10\], root 0\) at "
        r"mismatch_script.py:\d+ in collect; ranks 0 and 2 wait in all_reduce\(float32\[10\]\) at "
    )
    for log in said(agents):
        assert re.search(words, log), log
    kept: dict[int, dict[str, str]] = {}  # by step: an earlier one may have been slow, too
    for path in tmp_path.glob("everstep-stacks-*/*/*.txt"):
        found = re.search(r"step-(\d+)-rank-(\d)\.txt", path.name)
        if found is not None:
            kept.setdefault(int(found[1]), {})[found[2]] = path.read_text()
    last = kept[max(kept)]
    assert set(last) == {"0", "1", "2"}, "the stacks of every rank"
    assert all("mismatch_script.py" in stacks for stacks in last.values())


@pytest.mark.long_but("size-rank 1 waits in all_reduce\\\\(float32\\\\[20000\\\\]\\\\)")
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ("size", r"rank 1 waits in all_reduce\(float32\[20000\]\)"),
        # It goes on to the next step where the ranks agree only every few steps, which they do where agreeing is slow.
        ("skip", r"rank 1 waits (at the end of the step|in all_reduce\(float32\[72\]\)) at mismatch_script\.py"),
    ],
)
def test_a_rank_whose_collective_has_another_size_is_named_though_gloo_aborts(
    job: Callable[..., Job], tmp_path: Path, odd: str, words: str
) -> None:
    run, agents = begun(job, tmp_path)
    tell(tmp_path, odd)
    assert run.codes() == [1, 1, 1]
    for log in said(agents):
        assert re.search(words + r".*; ranks? .*waits? in all_reduce\(float32\[10\]\)", log), "\n".join(said(agents))


@pytest.mark.timeout(180)
def test_a_rank_that_skips_a_collective_of_an_evaluation_is_named_by_the_agent_of_all(
    job: Callable[..., Job], tmp_path: Path
) -> None:
    """Of three ranks in a ring the odd one waits for a live one: it has no failure to tell of."""
    tell(tmp_path, "skip evaluation")
    run = job(HERE / "mismatch_script.py", tmp_path, nodes="1:1", environ={"EVALUATES": "1"})
    (agent,) = run.start(1, flags=["--nproc-per-node=3", "--max-restarts=2"])
    assert run.codes() == [1]
    log = agent.log.read_text()
    words = (
        r"exit code 1: .*the ranks' collectives do not match: rank 1 waits in all_reduce\(float32\[72\]\) at "
        r"mismatch_script\.py:\d+ in <module>; ranks 0 and 2 wait in all_reduce\(float32\[10\]\) at "
        r"mismatch_script\.py:\d+ in <lambda>"
    )
    assert re.search(words, log), log[-3000:]
    assert log.count("round 2: rank") == 0, "nothing is started again"


@pytest.mark.timeout(180)
def test_an_abort_that_is_no_mismatch_is_told_with_its_line_and_charged(
    job: Callable[..., Job], tmp_path: Path
) -> None:
    run, agents = begun(job, tmp_path)
    tell(tmp_path, "abort")
    assert set(run.codes()) <= {1, 128 + 6}
    assert any("SIGABRT at mismatch_script.py:" in log for log in said(agents))
    assert not any("gloo aborts" in log for log in said(agents)), "it was in no collective"
    assert not any("do not match" in log for log in said(agents))


@pytest.mark.long
@pytest.mark.timeout(180)
def test_all_ranks_that_wait_in_the_same_collective_repeat_the_step_in_the_same_processes(
    job: Callable[..., Job], tmp_path: Path
) -> None:
    """Case 62 without anybody to blame: a transfer that was lost."""
    run, agents = begun(job, tmp_path)
    before = [agent.trainers() for agent in agents]
    tell(tmp_path, "lost")
    run.until(lambda: any("and nothing arrives" in log for log in said(agents)), "nobody noticed")
    run.world(agents, time.monotonic())
    assert [agent.trainers() for agent in agents] == before
    assert not (tmp_path / "odd").exists()
    assert os.path.exists(f"/proc/{before[0][0]}")
