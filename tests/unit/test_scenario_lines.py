"""What a scenario's lines do where their fault cannot be done: a job without workers, and one that has ended."""

from __future__ import annotations

from typing import Any

import pytest

from support.scenarios import given, lines
from support.scenarios.reference import ScenarioError

TEXT = """# seed 7
job workers=2 steps=100 pause=0.0 every=10
maybe delete-pod 0
scale 3
maybe kill-process 1
suspend
resume
until complete
"""


class JobOnPaper:
    """`there`: workers that can be struck. It ends after so many of the `faults` that were done to it."""

    def __init__(self, there: tuple[int, ...], faults: int) -> None:
        self.there, self.faults, self.done = there, faults, list[Any]()
        self.workers, self.sizes_seen, self.said = 2, set[int](), 0

    @property
    def over(self) -> str | None:
        return "Complete" if len(self.done) >= self.faults else None

    def ask_for(self, asked: lines.Asked) -> None:
        self.asked = asked

    def newest_step(self) -> int:
        return 0

    def until_complete(self) -> None: ...

    def delete_pods(self, indices: list[int]) -> None:
        self._strike("delete", indices)

    def kill_process(self, index: int) -> None:
        self._strike("kill", [index])

    def scale(self, replicas: int) -> None:
        self.done.append(("scale", replicas))

    def suspend(self, wanted: bool) -> None:
        self.done.append(("suspend", wanted))

    def _strike(self, what: str, indices: list[int]) -> None:
        if missing := set(indices) - set(self.there):
            raise ScenarioError(f"worker {missing.pop()} has no pod\nand much more")
        self.done.append((what, indices))


def played(job: JobOnPaper) -> None:
    given.play(job, TEXT, "tests/run/test_run_sequences.py")  # type: ignore[arg-type]


def test_sequence_whose_faults_were_all_done_passes() -> None:
    job = JobOnPaper((0, 1), faults=9)
    played(job)
    assert job.done == [("delete", [0]), ("scale", 3), ("kill", [1]), ("suspend", True), ("suspend", False)]


def test_sequence_with_half_of_its_faults_passes_and_says_what_was_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    played(JobOnPaper((), faults=9))
    said = capsys.readouterr().out.splitlines()
    assert said[-2:] == [
        "left out: delete-pod 0: worker 0 has no pod",
        "left out: kill-process 1: worker 1 has no pod",
    ]


@pytest.mark.parametrize("faults", [0, 1])
def test_sequence_whose_job_ended_before_most_of_its_faults_shows_nothing_and_fails(faults: int) -> None:
    job = JobOnPaper((0, 1), faults)
    with pytest.raises(ScenarioError, match=f"{faults} of 4 faults were done to the job; left out:\n") as told:
        played(job)
    assert len(job.done) == faults
    assert "suspend: the job is Complete\nresume: the job is Complete" in str(told.value)
    assert "EVERSTEP_SEEDS=7 pytest" in str(told.value)


def test_scenario_whose_job_has_ended_before_its_fault_fails_at_that_line() -> None:
    with pytest.raises(ScenarioError, match="line 4: scale 3\nthere is nothing to disturb any more, the job is Compl"):
        lines.play(JobOnPaper((0, 1), faults=1), TEXT)  # type: ignore[arg-type]


def test_example_is_asked_for_as_its_manifest_stands() -> None:
    asked = lines.Asked.parse(["example=elastic", "steps=600", "pause=0.05"])
    assert (asked.workers, asked.sizes, asked.every, asked.script, asked.launcher) == (
        3, "2:4", 100, "elastic", "everstep-run",
    )  # fmt: skip
    with pytest.raises(ScenarioError, match=r"job: example=elastc: there is no .*/examples/digits/elastc.yaml"):
        lines.Asked.parse(["example=elastc", "steps=600", "pause=0.05"])
