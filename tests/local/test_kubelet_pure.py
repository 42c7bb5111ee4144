"""The parts of local mode that decide without doing: names, quantities, placement, expansion, conditions."""

from __future__ import annotations

import socket
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from everstep_local.kubelet.addresses import Addresses, PodHost
from everstep_local.kubelet.environment import PathMap, expand
from everstep_local.kubelet.pod_status import PodView, Running, Terminated, Waiting, phase, pod_status
from everstep_local.kubelet.processes.guard import MAX_LINE, Log
from everstep_local.kubelet.processes.log import last_text, read, tail
from everstep_local.kubelet.processes.root import LOCK, Root, remove_stale
from everstep_local.nodes.resources import quantity, requests_of
from everstep_local.nodes.scheduler import Seat, choose_node, obstacle
from everstep_operator.kube.wire import ObjectMeta, OwnerReference, Unstructured

NOW = datetime(2026, 1, 1, tzinfo=UTC)
HOST = PodHost("ns", "w0", "sub")


@pytest.mark.parametrize(
    ("text", "number"),
    [("100m", Fraction(1, 10)), ("2", 2), ("1.5Gi", 3 * 2**29), ("2e3", 2000), ("1k", 1000), ("3M", 3_000_000)],
)
def test_quantity_is_exact(text: str, number: Fraction | int) -> None:
    assert quantity(text) == number


@pytest.mark.parametrize("text", ["", "1 GB", "x", "1ki", "--1"])
def test_quantity_of_nonsense_is_refused_with_the_text(text: str) -> None:
    with pytest.raises(ValueError, match="is not a quantity"):
        quantity(text)


def test_requests_are_the_larger_of_the_containers_sum_and_any_init_container() -> None:
    def container(cpu: str) -> dict[str, Any]:
        return {"resources": {"limits": {"cpu": cpu, "nvidia.com/gpu": "1"}}}

    spec = {"containers": [container("1"), container("500m")], "initContainers": [container("2")]}
    assert requests_of(spec) == {"cpu": 2, "nvidia.com/gpu": 2, "pods": 1}


def pod(owner: str = "", **spec: Any) -> Unstructured:
    owners = (OwnerReference(uid=owner, controller=True),) if owner else ()
    return Unstructured(metadata=ObjectMeta(name="p", owner_references=owners), spec=spec)


def seat(name: str, *owners: str | None, obstacle: str = "", **capacity: int) -> Seat:
    have = {"pods": Fraction(3), **{k: Fraction(v) for k, v in capacity.items()}}
    return Seat(name, have, {"disk": name}, obstacle, [(o, {"pods": Fraction(1), "cpu": Fraction(1)}) for o in owners])


def test_pod_goes_where_fewest_of_its_job_are() -> None:
    found = choose_node(pod("job"), [seat("n1", "job"), seat("n2", "other", "other")])
    assert isinstance(found, Seat)
    assert found.name == "n2"


def test_pod_goes_to_a_node_that_it_avoids_only_if_no_other_has_room() -> None:
    terms = [{"preference": {"matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": ["n1"]}]}}]
    avoiding = pod(affinity={"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": terms}})
    for others, expected in ((2, "n2"), (3, "n1")):  # there is room for three
        chosen = choose_node(avoiding, [seat("n1"), seat("n2", *["other"] * others)])
        assert isinstance(chosen, Seat)
        assert chosen.name == expected


def test_pod_that_fits_nowhere_is_told_why_of_each_node() -> None:
    asks: dict[str, Any] = {"containers": [{"resources": {"requests": {"cpu": "1", "gpu": "1"}}}]}
    seats = [
        seat("n1", None, cpu=1),
        seat("n2", obstacle="node(s) were not ready"),
        seat("n3", None, None, None, gpu=9),
    ]
    assert choose_node(pod(**asks), seats) == (
        "0/3 nodes are available: 1 Insufficient cpu, 1 Insufficient gpu, 1 Too many pods, 1 node(s) were not ready."
    )
    assert choose_node(pod(nodeSelector={"disk": "n9"}), [seat("n1")]) == (
        "0/1 nodes are available: 1 node(s) didn't match Pod's node affinity/selector."
    )


@pytest.mark.parametrize(
    ("spec", "ready", "why"),
    [
        ({}, "True", ""),
        ({}, "Unknown", "node(s) were not ready"),
        ({"unschedulable": True}, "True", "node(s) were unschedulable"),
        ({"taints": [{"key": "k", "effect": "PreferNoSchedule"}]}, "True", ""),
        ({"taints": [{"key": "k", "effect": "NoExecute"}]}, "True", "node(s) had untolerated taint {k: }"),
    ],
)
def test_node_takes_pods_only_when_nothing_speaks_against_it(spec: dict[str, Any], ready: str, why: str) -> None:
    status = {"conditions": [{"type": "Ready", "status": ready}]}
    assert obstacle(Unstructured(spec=spec, status=status)) == why


def test_cpu_and_memory_are_unbounded_unless_stated() -> None:
    asks: dict[str, Any] = {"containers": [{"resources": {"requests": {"cpu": "999", "memory": "9Ti"}}}]}
    assert isinstance(choose_node(pod(**asks), [seat("n1")]), Seat)


def test_name_means_one_address_and_port_until_all_have_let_go() -> None:
    addresses = Addresses(linux=True)
    address, port = addresses.address_of(HOST, "a"), addresses.port_of(HOST, 29400, "a")
    name = "w0.sub.ns.svc"
    assert addresses.translate("PET_RDZV_ENDPOINT", f"{name}.cluster.local:29400", HOST, "b") == f"{address}:{port}"
    assert addresses.translate("URL", f"http://{name}:80/x", HOST, "b") == f"http://{address}:80/x"
    addresses.release("a")
    assert addresses.address_of(HOST, "b") == address
    addresses.release("b")
    assert addresses.in_use == 0


def test_reserved_port_is_the_stores_to_listen_on_and_nobody_elses() -> None:
    addresses, others = Addresses(), Addresses()
    port = addresses.port_of(HOST, 29400, "a")
    assert others.port_of(HOST, 29400, "a") != port  # another run on this machine
    with socket.create_server(("127.0.0.1", port)):
        pass
    addresses.release("a")
    others.release("a")


def test_text_that_only_looks_like_a_name_is_left_alone() -> None:
    addresses = Addresses(linux=True)
    for text in ("a.b.svc:80", "w0.sub.ns.service", "localhost:29400", "x.w0.sub.ns.svc.local.com"):
        assert addresses.translate("URL", text, HOST, "a") == text
    addresses.release("a")


def test_unrouted_loopback_has_one_address_and_many_ports() -> None:
    addresses = Addresses(linux=False)
    other = PodHost("ns", "v0", "sub")
    assert addresses.address_of(HOST, "a") == addresses.address_of(other, "a") == "127.0.0.1"
    port = addresses.port_of(HOST, 29400, "a")
    addresses.before_start(HOST)
    with socket.socket() as alone:
        alone.bind(("127.0.0.1", port))  # where a reservation would be in the way, it is given up
    assert addresses.port_of(other, 29400, "a") != port
    addresses.release("a")


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("/data", "/there"),
        ("/data/x:/data", "/there/x:/there"),
        ("--in=/data/x", "--in=/there/x"),
        ("file:///data/x", "file:///there/x"),
        ("/data/inner/x", "/inside/x"),
        ("/database /my/data data", "/database /my/data data"),
        ("s3://bucket/data", "s3://bucket/data"),
    ],
)
def test_paths_of_volumes_are_translated_and_no_others(text: str, result: str) -> None:
    assert PathMap({"/data": Path("/there"), "/data/inner/": Path("/inside")}).translate(text) == result


@pytest.mark.parametrize(
    ("text", "result"),
    [("$(A)", "1"), ("$$(A)", "$(A)"), ("$$$(A)", "$1"), ("$(B)", "$(B)"), ("$A $ $", "$A $ $"), ("$(", "$(")],
)
def test_expansion_is_that_of_a_kubelet(text: str, result: str) -> None:
    assert expand(text, {"A": "1"}) == result


RUNNING = Running(NOW, 7)


def ended(code: int) -> Terminated:
    return Terminated(code, "Error", "", NOW, NOW)


@pytest.mark.parametrize(
    ("states", "inits", "wanted"),
    [
        ([Waiting("x")], [], "Pending"),
        ([RUNNING, Waiting("x")], [], "Pending"),
        ([RUNNING, ended(0)], [], "Running"),
        ([RUNNING, ended(1)], [], "Running"),
        ([ended(0), ended(0)], [], "Succeeded"),
        ([ended(0), ended(2)], [], "Failed"),
        ([Waiting("x")], [RUNNING], "Pending"),
        ([Waiting("x")], [ended(1)], "Failed"),
    ],
)
def test_phase_follows_from_the_containers(states: list[Any], inits: list[Any], wanted: str) -> None:
    view = PodView({str(i): s for i, s in enumerate(states)}, {f"i{i}": s for i, s in enumerate(inits)})
    assert phase(view) == wanted


def test_conditions_keep_their_time_and_those_of_others() -> None:
    view = PodView({"worker": RUNNING}, pod_ip="127.0.0.2", start_time=NOW)
    spec = [{"name": "worker"}]
    other = {"type": "DisruptionTarget", "status": "True"}
    first = pod_status(view, {"conditions": [other]}, spec, [], NOW)
    again = pod_status(view, first, spec, [], NOW + timedelta(hours=1))
    assert again == first
    assert other in first["conditions"]


def test_folder_of_a_dead_run_is_removed_and_that_of_a_living_one_is_not(tmp_path: Path) -> None:
    living = Root(tmp_path)
    dead = tmp_path / "everstep-dead"
    dead.mkdir()
    (dead / LOCK).touch()
    unrelated = tmp_path / "everstep-unrelated"
    unrelated.mkdir()
    assert remove_stale(tmp_path) == (dead,)
    assert living.path.exists()
    assert unrelated.exists()
    living.close()
    assert not living.path.exists()


def test_log_gives_back_what_was_written_to_it(tmp_path: Path) -> None:
    log = Log(str(tmp_path / "log"), limit=10**6)
    long = "é" * (2 * MAX_LINE)
    log.feed("stdout", b"one\ntw")
    log.feed("stderr", b"error\n")
    log.feed("stdout", b"o\n\n" + long.encode() + b"\nunfinished")
    log.finish()
    lines = list(read(tmp_path / "log"))
    texts = {stream: [line.text for line in lines if line.stream == stream] for stream in ("stdout", "stderr")}
    assert texts["stderr"] == ["error"]
    assert [text for text in texts["stdout"] if text != long] == ["one", "two", "", "unfinished"]
    assert long in texts["stdout"]


@pytest.mark.long
def test_tail_is_found_across_a_rotation(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = Log(str(path), limit=10**6)
    for number in range(20_000):
        log.feed("stdout", f"line {number} {'x' * 20}\n".encode())
    everything = list(read(path))
    assert path.with_name("log.1").exists()
    for count in (0, 1, 100, 5_000, 10**6):
        assert tail(path, count) == everything[max(0, len(everything) - count) :]
    assert last_text(path, lines=2, size=2048).splitlines() == [line.text for line in everything[-2:]]
    assert len(last_text(path, lines=80, size=100)) == 100
