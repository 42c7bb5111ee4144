"""Asks the agents of a job: those on this machine over their sockets, those of a cluster through `kubectl exec`.

In a pod's container it runs this same program, which asks the agent there. Invariants: every wait has a bound; an agent
that does not answer is named, and the others' answers are shown.
"""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from everstep.contract import agent_requests, labels

Answer = dict[str, Any]
AT_ONCE = 64  # agents that are asked at the same time
KUBECTL_SECONDS = 60.0  # for a list of pods, and for what `kubectl exec` itself takes

Job = Annotated[str | None, typer.Argument(help="The job's name; without it every job on this machine.")]
Namespace = Annotated[
    str | None, typer.Option("--namespace", "-n", help="Ask a job on a cluster, in this namespace, through kubectl.")
]
Context = Annotated[str | None, typer.Option("--context", help="The context of kubectl.")]
Output = Annotated[str, typer.Option("--output", "-o", help="text, or jsonl: one JSON object a rank.")]


class NoAgent(Exception):
    """Nobody can be asked; the text says what to do."""


@dataclass(frozen=True, slots=True)
class Where:
    """The agents that are meant."""

    job: str | None
    namespace: str | None = None
    context: str | None = None


def ask(where: Where, verb: str, seconds: float, command: list[str], **arguments: Any) -> list[Answer]:
    """The answers, by rank; an agent that does not answer gives one with `error`. `command`: this request as the
    program's arguments, for the container of a pod. Raises `NoAgent`."""
    if where.namespace is not None or where.context is not None:
        answers = _ask_pods(where, seconds, command)
    else:
        answers = _ask_here(where.job, verb, seconds, arguments)
    return sorted(answers, key=lambda answer: (answer.get("rank", 2**31), answer.get("pod", "")))


def _ask_here(job: str | None, verb: str, seconds: float, arguments: dict[str, Any]) -> list[Answer]:
    question = {"verb": verb, "job": job, "seconds": seconds, "names": True, **arguments}
    request = json.dumps(question).encode() + b"\n"
    try:
        addresses = agent_requests.addresses(job)
    except OSError as e:
        raise NoAgent(f"the agents of this machine cannot be found: {e}") from e
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


def _ask_pods(where: Where, seconds: float, command: list[str]) -> list[Answer]:
    kubectl = ["kubectl", *(["--context", where.context] if where.context else [])]
    kubectl += ["--namespace", where.namespace] if where.namespace else []
    if where.job is None:
        raise NoAgent("give the job's name: a namespace may have many")
    selector = ["-l", f"{labels.JOB}={where.job}", "--field-selector=status.phase=Running"]
    listed = _run([*kubectl, "get", "pods", *selector, "-o", "name"], KUBECTL_SECONDS)
    if listed.returncode:
        raise NoAgent(f"kubectl get pods: {listed.stderr.strip()[-500:]}")
    pods = [line.removeprefix("pod/") for line in listed.stdout.split()]
    if not pods:
        raise NoAgent(f"job {where.job!r} has no running pod in namespace {where.namespace or 'of the context'}")

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


def where_of(job: str | None, namespace: str | None, context: str | None, output: str) -> Where:
    """Checks what all these commands share."""
    if output not in ("text", "jsonl"):
        raise NoAgent(f"--output {output}: give text or jsonl")
    return Where(job, namespace, context)


def head(answer: Answer) -> str:
    """`rank 1, pod digits-w1-0, pid 71`."""
    parts = [f"rank {answer['rank']}"] if "rank" in answer else []
    parts += [f"pod {answer['pod']}"] if answer.get("pod") else []
    parts += [f"pid {answer['pid']}"] if "pid" in answer else []
    return ", ".join(parts)
