"""A TrainingJob's status keeps 800 characters of a refusal: the line that is wrong, and the line to write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from everstep.agent.processes import faults
from everstep.contract import env, redact, termination
from everstep.recovery.errors import LoopError
from everstep.recovery.forming import same_calls
from everstep.train.guards import calls_before_steps
from everstep.train.guards.comparison import restart_check
from everstep.train.guards.plain_values import TRACK
from everstep.train.guards.script_check import NAMED, ScriptCheck
from everstep_operator.plan.state import losses

LONG = "the_number_of_samples_that_the_tokenizer_has_seen_"
FILE = "train_a_language_model_from_scratch.py"


def carried(count: int) -> LoopError:
    check = ScriptCheck({}, (), lambda *_: False, changes=True, goes_on=True, strict=True)
    check._lines = {f"self.{LONG}{i}": f"self.{LONG}{i} ({FILE}:{1300 + i})" for i in range(count)}
    with pytest.raises(LoopError) as found:
        check._refuse()
    return found.value


def other_calls() -> LoopError:
    place = same_calls.AT_PLACE.format(0)
    said = [place + calls_before_steps.call(f"run.track({rank}{LONG * 20})", None) for rank in range(2)]
    with pytest.raises(LoopError) as found:
        same_calls.check(said)
    return found.value


@pytest.mark.parametrize(
    ("error", "names", "advises"),
    [
        (carried(NAMED), f"({FILE}:1300)", "`everstep rehearse`"),
        (carried(20), f"({FILE}:1300)", "`everstep rehearse`"),
        (
            LoopError(restart_check.refusal("has other gradients", 12345, [f"{LONG}{i} (1 there)" for i in range(20)])),
            "the commit of step 12345",
            TRACK[-60:],
        ),
        (
            other_calls(),
            "rank 0's script made at place 0 run.track(",
            "keeps for itself into a buffer of a tracked module",
        ),
    ],
)
def test_longest_refusals_are_cut_so_that_the_line_to_write_is_kept(
    error: LoopError, names: str, advises: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "termination-log"
    log.touch()
    monkeypatch.setenv(env.JOB_UID, "uid-1")
    monkeypatch.setenv(env.TERMINATION_LOG, str(log))
    termination.write_error(error)
    record = losses._record_of(log.read_text().strip())
    assert record is not None
    assert len(str(error)) > losses.MAX_ERROR >= len(record.text)
    assert names in record.text
    assert advises in record.text
    file = tmp_path / "error.json"
    file.write_text(json.dumps({"message": {"message": f"LoopError: {error}", "extraInfo": {"refusedAfter": 0}}}))
    _, why = faults.judge(1, file, out_of_memory=False)
    assert len(why) <= faults.MAX_WHY
    assert why.endswith(str(error)[-40:])


@pytest.mark.parametrize("limit", [20, 800])
def test_text_that_is_cut_has_its_beginning_and_its_end(limit: int) -> None:
    assert redact.ends("a" * limit, limit) == "a" * limit
    shown = redact.ends("begin " + "x" * 5000 + " end", limit)
    assert len(shown) == limit
    assert (shown[:6], shown[-4:]) == ("begin ", " end")
