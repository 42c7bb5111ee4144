"""Asks the agents of a job: those on this machine over their sockets, those of a cluster through `kubectl exec`.

In a pod's container it runs this same program, which asks the agent there. Invariants: every wait has a bound; an agent
that does not answer is named, and the others' answers are shown.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from typing import Annotated, Any

import typer

from everstep.cli.printing import say
from everstep.contract import agent_requests, env, labels
from everstep.jobs.source import JobError, Run, Where, local_alive

Answer = dict[str, Any]
AT_ONCE = 64  # agents that are asked at the same time
KUBECTL_SECONDS = 60.0  # for a list of pods, and for what `kubectl exec` itself takes
NAME_SECONDS = 5.0  # for an agent to name its job

Job = Annotated[str | None, typer.Argument(help="The job's name; without it the only job on this machine.")]


class Format(StrEnum):
    """`-o` of what agents answer."""

    TEXT = "text"
    JSON = "json"
    JSONL = "jsonl"


Output = Annotated[Format, typer.Option("--output", "-o", help="jsonl: one JSON object a rank; json: a list of them.")]


class NoAgent(Exception):
    """Nobody can be asked; the text says what to do."""


def ask(job: str | None, where: Where, verb: str, seconds: float, command: list[str], **arguments: Any) -> list[Answer]:
    """The answers, by rank; an agent that does not answer gives one with `error`. `command`: this request as the
    program's arguments, for the container of a pod. Raises `NoAgent`."""
    if where.names_a_cluster:
        answers = _ask_pods(job, where, seconds, command)
    else:
        answers = _ask_here(job, verb, seconds, arguments)
    return sorted(answers, key=lambda answer: (answer.get("rank", 2**31), answer.get("pod", "")))


def _ask_here(job: str | None, verb: str, seconds: float, arguments: dict[str, Any]) -> list[Answer]:
    try:
        name = _meant(job)
        addresses = agent_requests.addresses(name)
    except OSError as e:
        raise NoAgent(f"the agents of this machine cannot be found: {e}") from e
    request = _line({"verb": verb, "job": name, "seconds": seconds, "names": True, **arguments})
    with ThreadPoolExecutor(AT_ONCE) as pool:
        given = pool.map(lambda address: list(_from(address, request, seconds)), addresses)
        collected = [answer for answers in given for answer in answers]
    if not collected:
        of = f"no agent of a job {job!r}" if job is not None else "no agent"
        raise NoAgent(
            f"{of} runs on this machine, and no process of it that answers itself. For a job on a cluster: --namespace "
            "NAME. Agents are those of everstep-run. Under another launcher a process answers from the time at which "
            "it begins to train, by everstep.start or an adapter"
        )
    return collected


def _line(request: dict[str, Any]) -> bytes:
    return json.dumps(request).encode() + b"\n"


def _meant(job: str | None) -> str | None:
    """By which name the agents of the job know it: those of two local runs of one job share its name. None: there is
    one job at most. Raises `NoAgent` if several are meant, and OSError."""
    if env.JOB_UID in os.environ and job in (None, os.environ.get(env.JOB_NAME)):
        return os.environ[env.JOB_UID]  # in a pod, beside which others of its node may be seen
    run = next((run for run in local_alive() if run.name == job), None)
    if run is not None and (uid := _uid(run)):
        return uid
    addresses = {agent_requests.marks(address): address for address in agent_requests.addresses(job)}
    if len(addresses) < 2:
        return job
    runs = {agent_requests.mark(_uid(run)): run.name for run in local_alive()}
    known = (next((runs[mark] for mark in marks & runs.keys()), None) for marks in addresses)
    names = sorted(name or _name_at(address) for name, address in zip(known, addresses.values(), strict=True))
    raise NoAgent(f"several jobs run on this machine: {', '.join(names)}. Name the one that is meant")


def _uid(run: Run) -> str:
    """Of a run that does not answer, as one that is stopped, nothing is known."""
    try:
        return run.uid()
    except JobError:
        return ""


def _name_at(address: str) -> str:
    """The job of the agent there, as it says."""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(NAME_SECONDS)
            connection.connect(address)
            connection.sendall(_line({"verb": "", "names": True}))
            with connection.makefile("rb") as lines:
                return str(json.loads(lines.readline(agent_requests.MAX_ANSWER))["job"])
    except (OSError, ValueError, KeyError, TypeError):
        return "one that does not answer"


def _from(address: str, request: bytes, seconds: float) -> Iterator[Answer]:
    """Each process that ends before it answers is named, with an `error`."""
    expected: dict[int, Answer] = {}  # by pid
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(seconds)
            connection.connect(address)
            if not agent_requests.is_of_this_user(connection):
                return
            connection.sendall(request)
            with connection.makefile("rb") as lines:
                while line := lines.readline(agent_requests.MAX_ANSWER):
                    answer = json.loads(line)
                    if "answers" in answer:
                        expected = {process["pid"]: process for process in answer["answers"]}
                        continue
                    last = expected.pop(answer.get("pid"), None) is not None and not expected
                    yield answer
                    if last:
                        break
    except ConnectionRefusedError:
        pass  # it has just ended
    except ConnectionResetError:
        if not expected:
            yield {"error": f"the agent at {address[1:]} ended before it answered"}
    except (OSError, ValueError) as e:
        yield {"error": f"the agent at {address[1:]} does not answer: {e}"}
        return
    for unanswered in expected.values():
        yield {**unanswered, "error": "this process, or its agent, ended before it answered"}


def _ask_pods(job: str | None, where: Where, seconds: float, command: list[str]) -> list[Answer]:
    kubectl = ["kubectl", *(["--context", where.context] if where.context else [])]
    kubectl += ["--namespace", where.namespace] if where.namespace else []
    kubectl += ["--kubeconfig", where.kubeconfig] if where.kubeconfig else []
    if job is None:
        raise NoAgent("give the job's name: a namespace may have many")
    selector = ["-l", f"{labels.JOB}={job}", "--field-selector=status.phase=Running"]
    listed = _run([*kubectl, "get", "pods", *selector, "-o", "name"], KUBECTL_SECONDS)
    if listed.returncode:
        raise NoAgent(f"kubectl get pods: {listed.stderr.strip()[-500:]}")
    pods = [line.removeprefix("pod/") for line in listed.stdout.split()]
    if not pods:
        raise NoAgent(f"job {job!r} has no running pod in namespace {where.namespace or 'of the context'}")

    def ask_pod(pod: str) -> list[Answer]:
        inside = ["exec", pod, "-c", labels.WORKER_CONTAINER, "--", "everstep", *command, "--output", "jsonl"]
        done = _run([*kubectl, *inside], seconds + KUBECTL_SECONDS)
        answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode or not answers:
            problem = done.stderr.strip()[-500:] or f"exit code {done.returncode}"
            answers.append({"pod": pod, "error": f"kubectl exec {pod}: {problem}"})
        return answers

    with ThreadPoolExecutor(AT_ONCE) as pool:
        collected = [answer for answers in pool.map(ask_pod, pods) for answer in answers]
    # Pods with hostNetwork on one node see each other's agents.
    return list({(a.get("pod"), a.get("rank"), a.get("error")): a for a in collected}.values())


def _run(argv: list[str], seconds: float) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(argv, capture_output=True, text=True, timeout=seconds, check=False)
    except FileNotFoundError:
        raise NoAgent("kubectl is not on the PATH: it is how pods are reached") from None
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(argv, 124, "", f"no answer within {seconds:.0f} s")


def put_json(answers: list[Answer], output: Format) -> None:
    if output is Format.JSON:
        say(json.dumps(answers, indent=2))
    else:
        for answer in answers:
            say(json.dumps(answer))


def head(answer: Answer) -> str:
    """`rank 1, pod digits-w1-0, pid 71`."""
    parts = [f"rank {answer['rank']}"] if "rank" in answer else []
    parts += [f"pod {answer['pod']}"] if answer.get("pod") else []
    parts += [f"pid {answer['pid']}"] if "pid" in answer else []
    return ", ".join(parts)
