"""`everstep stacks`: where every rank of a job is now, and the stacks of its threads."""

from __future__ import annotations

import typer

from everstep.cli.agents import Answer, Format, Job, NoAgent, Output, ask, head, put_json
from everstep.cli.jobs.commands import Context, Kubeconfig, Namespace
from everstep.cli.printing import say
from everstep.contract.agent_requests import STACKS
from everstep.jobs.source import JobError, Where

SECONDS = 20.0  # for an agent to ask its processes

app = typer.Typer(add_completion=False)
EXPECTED = (NoAgent, JobError)


@app.command()
def stacks(
    job: Job = None,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    output: Output = Format.TEXT,
) -> None:
    """Where each rank of a job is: its step, the collective in which it waits, and the stacks of its threads.

    Nothing is stopped. A process that does not answer, because it holds the interpreter's lock, is read by a signal.
    """
    where = Where(namespace, context, kubeconfig)
    answers = ask(job, where, STACKS, SECONDS, ["stacks", *([job] if job else [])])
    if output is not Format.TEXT:
        put_json(answers, output)
    else:
        for answer in answers:
            say(f"{head(answer)}: {state_of(answer)}")
        for answer in answers:
            if answer.get("stacks"):
                say(f"\n--- {head(answer)}\n{answer['stacks'].rstrip()}")
    if any("error" in answer for answer in answers):
        raise typer.Exit(1)


def state_of(answer: Answer) -> str:
    """`step 17, waits in all_reduce of 1 tensor for 12 s, at train.py:31 in main`."""
    if "error" in answer:
        return str(answer["error"])
    parts = []
    if answer.get("step") is not None:
        parts.append(f"step {answer['step']}")
    elif not answer.get("waits"):
        parts.append("in no step that it has told of")
    if answer.get("waits_in"):
        parts.append(f"waits in {answer['waits_in']}")
    elif answer.get("waits"):
        parts.append("waits for the others at the end of its step")
    if answer.get("seconds"):
        parts.append(f"no progress for {answer['seconds']:g} s")
    if answer.get("at"):
        parts.append(str(answer["at"]))
    if not answer.get("stacks"):
        parts.append("it has written no stacks")
    return ", ".join(parts)
