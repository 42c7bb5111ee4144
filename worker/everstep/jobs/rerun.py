"""Runs a job again that has ended (ADR 0064). No commit is deleted: the script goes on from what is at the URL.

Invariant: a run that would have nothing to do is refused with what else may be meant, and nothing has changed then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from everstep.jobs.source import JobError, Source
from everstep.jobs.view import View, condition


def rerun(source: Source, job: str, url: str | None) -> tuple[Source, int]:
    """Begin a job anew, with commits at `url` if one is given. Returns the source that has it now, and the value of
    `status.rerun` by which the new run is known. Raises `JobError`, and `Unreachable`."""
    view = source.summary(job)
    spec = (source.objects(job).get("trainingjob") or {}).get("spec") or {}
    present = str((spec.get("checkpoint") or {}).get("url") or "")
    complete = condition(view.raw_status, "Complete").get("status") == "True"
    if complete and present and url in (None, present):
        step = "" if view.committed is None else f" (step {view.committed})"
        raise JobError(
            f"{job} is Complete: its newest commit at {present}{step} leaves nothing to train. From the start: "
            f"everstep rerun {job} --checkpoint URL, with a URL that has no commits. Longer: change what the script is "
            f"given; on a cluster raise spec.rerun in the same edit, here use `everstep run … --checkpoint {present}`"
        )
    return source.rerun(job, url)


def patch(job: Mapping[str, object], url: str | None) -> tuple[dict[str, object], int]:
    """The merge patch of a TrainingJob by which it runs again, and the value of its counter."""
    parts = [job.get(part) for part in ("spec", "status")]
    number = 1 + max(int(part.get("rerun") or 0) if isinstance(part, Mapping) else 0 for part in parts)
    return {"spec": {"rerun": number, **({"checkpoint": {"url": url}} if url is not None else {})}}, number


def look(source: Source, job: str, number: int) -> View:
    """The job in the run that was wanted: before that has begun, the status is about the one before, and says that it
    has ended."""
    view = source.summary(job)
    begun = int(view.raw_status.get("rerun") or 0) >= number
    return view if begun else replace(view, raw_status={}, observed=False)


def trains_or_has(view: View) -> bool:
    """Whether the run trains, or has ended well already."""
    return view.status.startswith("Running") or view.status == "Complete"
