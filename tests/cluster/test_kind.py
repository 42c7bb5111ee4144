"""The kind cluster does what the end-to-end tests need: pods on each worker, network, DNS, S3, images, dying nodes."""

import json
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import BotoCoreError, ClientError

from testcluster import docker, layers, load, pybases
from testcluster.handle import Cluster
from testcluster.layers import Image

pytestmark = [pytest.mark.kind, pytest.mark.timeout(300)]
LIMIT = 90.0  # seconds
HELLO = (
    "import http.server,os\n"
    "class H(http.server.BaseHTTPRequestHandler):\n"
    "    def do_GET(self):\n"
    "        body = os.environ['NODE'].encode()\n"
    "        self.send_response(200); self.send_header('Content-Length', str(len(body))); self.end_headers()\n"
    "        self.wfile.write(body)\n"
    "http.server.ThreadingHTTPServer(('', 8000), H).serve_forever()\n"
)


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {LIMIT} s"
        time.sleep(0.3)


@pytest.fixture
def namespace(kind_cluster: Cluster) -> Iterator[str]:
    name = f"kind-{uuid.uuid4().hex[:8]}"
    assert kind_cluster.kubectl("create", "namespace", name).returncode == 0
    account = ("get", "serviceaccount", "default")  # no pod is taken before Kubernetes has made it
    until(lambda: kind_cluster.kubectl("-n", name, *account).returncode == 0, "the default service account")
    yield name
    kind_cluster.kubectl("delete", "namespace", name, "--wait=false")


def server_pod(name: str, node: str, image: str) -> dict[str, Any]:
    """A pod that answers HTTP with its node's name; `node` is a wish of the scheduler, so that eviction is real."""
    container = {
        "name": "main",
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python3", "-u", "-c", HELLO],
        "env": [{"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}],
        "readinessProbe": {"httpGet": {"path": "/", "port": 8000}, "periodSeconds": 1},
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": "hello"}},
        "spec": {
            "nodeSelector": {"kubernetes.io/hostname": node},
            "terminationGracePeriodSeconds": 0,
            "containers": [container],
        },
    }


@pytest.fixture(scope="module")
def image(kind_cluster: Cluster) -> str:
    """The operator's base on every node: a cluster that was made before its last change does not have it."""
    tag = pybases.operator()
    kind_cluster.load(tag)
    return tag


@pytest.fixture
def hello(kind_cluster: Cluster, namespace: str, image: str) -> dict[str, str]:
    """A server pod on each worker, behind the Service `hello`: node → pod's address."""
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "hello"},
        "spec": {"selector": {"app": "hello"}, "ports": [{"port": 80, "targetPort": 8000}]},
    }
    pods = [server_pod(f"on-{node}", node, image) for node in kind_cluster.workers()]
    items = {"apiVersion": "v1", "kind": "List", "items": [service, *pods]}
    done = kind_cluster.kubectl("-n", namespace, "apply", "-f", "-", input=json.dumps(items))
    assert done.returncode == 0, done.stderr
    ready = kind_cluster.kubectl("-n", namespace, "wait", "--for=condition=Ready", "pod", "--all", "--timeout=50s")
    assert ready.returncode == 0, ready.stderr
    listed = json.loads(kind_cluster.kubectl("-n", namespace, "get", "pods", "-o", "json").stdout)
    return {pod["spec"]["nodeName"]: pod["status"]["podIP"] for pod in listed["items"]}


def fetch(cluster: Cluster, namespace: str, pod: str, url: str) -> subprocess.CompletedProcess[str]:
    code = f"import urllib.request as u; print(u.urlopen({url!r}, timeout=5).read().decode())"
    return cluster.kubectl("-n", namespace, "exec", pod, "--", "python3", "-c", code)


def test_cluster_has_a_control_plane_and_two_workers(kind_cluster: Cluster) -> None:
    assert len(kind_cluster.nodes()) >= 3
    assert len(kind_cluster.workers()) >= 2


def test_pod_on_one_worker_reaches_the_pod_on_the_other(
    kind_cluster: Cluster, namespace: str, hello: dict[str, str]
) -> None:
    nodes = sorted(hello)
    for here, there in ((nodes[0], nodes[1]), (nodes[1], nodes[0])):
        got = fetch(kind_cluster, namespace, f"on-{here}", f"http://{hello[there]}:8000/")
        assert got.stdout.strip() == there, got.stderr


def test_service_name_resolves_and_spreads_over_both_workers(
    kind_cluster: Cluster, namespace: str, hello: dict[str, str]
) -> None:
    pod = f"on-{min(hello)}"
    url = f"http://hello.{namespace}.svc.cluster.local/"
    seen: set[str] = set()

    def both() -> bool:
        seen.add(fetch(kind_cluster, namespace, pod, url).stdout.strip())
        return seen >= set(hello)

    until(both, "an answer from each worker through the Service")


def test_s3_is_reached_from_a_pod_and_from_this_machine_alike(
    kind_cluster: Cluster, namespace: str, hello: dict[str, str]
) -> None:
    bucket = kind_cluster.s3.bucket(f"b-{namespace}")
    kind_cluster.s3.client().put_object(Bucket=bucket, Key="k", Body=b"x")
    # Without a signature the server refuses, by name: it is there, and it is S3.
    code = (
        "import urllib.request as u, urllib.error as e\n"
        f"try: u.urlopen('{kind_cluster.s3_in_cluster.endpoint}/{bucket}/k', timeout=5)\n"
        "except e.HTTPError as error: print(error.code, error.read().decode())\n"
    )
    got = kind_cluster.kubectl("-n", namespace, "exec", f"on-{min(hello)}", "--", "python3", "-c", code)
    assert got.stdout.startswith("403"), got.stderr
    assert "AccessDenied" in got.stdout


@pytest.mark.alone
def test_s3_pod_replaced_keeps_its_objects(kind_cluster: Cluster, namespace: str) -> None:
    bucket = kind_cluster.s3.bucket(f"b-{namespace}")
    kind_cluster.s3.client().put_object(Bucket=bucket, Key="k", Body=b"kept")
    kind_cluster.kubectl("-n", "s3", "delete", "pod", "-l", "app=s3", "--now")
    kind_cluster.kubectl("-n", "s3", "rollout", "status", "deployment/s3", "--timeout=50s")

    def answered() -> bool:
        try:
            return bool(kind_cluster.s3.client().get_object(Bucket=bucket, Key="k")["Body"].read() == b"kept")
        except (BotoCoreError, ClientError) as error:
            # The gateway answers a bare 404 for a moment while it stops; an object that is lost never comes back.
            print(error)
            return False

    until(answered, "the object's return")


def test_image_built_here_starts_on_every_worker_without_a_registry(
    kind_cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    mark = uuid.uuid4().hex
    (tmp_path / "mark").write_text(mark)
    (tmp_path / "Dockerfile").write_text(f"FROM {pybases.operator()}\nCOPY mark /mark\n")
    tag = f"everstep-test/marked:{namespace}"
    docker.build(tmp_path, tag)
    kind_cluster.load(tag)
    for node in kind_cluster.workers():
        pod = server_pod(f"marked-{node}", node, tag)
        pod["spec"]["containers"][0]["imagePullPolicy"] = "Never"
        kind_cluster.kubectl("-n", namespace, "create", "-f", "-", input=json.dumps(pod))
    kind_cluster.kubectl("-n", namespace, "wait", "--for=condition=Ready", "pod", "--all", "--timeout=50s")
    for node in kind_cluster.workers():
        assert kind_cluster.kubectl("-n", namespace, "exec", f"marked-{node}", "--", "cat", "/mark").stdout == mark


def test_image_comes_although_a_node_loses_a_layer_meanwhile(
    kind_cluster: Cluster, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each node says once that it has the lower one of two layers, which was collected before the image comes."""
    files = ("lower", "upper")
    for name in files:
        (tmp_path / name).write_text(uuid.uuid4().hex)
    copies = "".join(f"COPY {name} /{name}\n" for name in files)
    (tmp_path / "Dockerfile").write_text(f"FROM {pybases.operator()}\n{copies}")
    tag = f"everstep-test/marked:{namespace}"
    docker.build(tmp_path, tag)
    missing, asked = load._missing, set[str]()

    def lower_is_there(image: Image, node: str) -> int | None:
        lacks = missing(image, node)
        first = node not in asked
        asked.add(node)
        assert lacks == len(files), "neither layer"
        return 1 if first else lacks

    monkeypatch.setattr(load, "_missing", lower_is_there)
    kind_cluster.load(tag)
    monkeypatch.undo()
    image = layers.inspect(tag)
    assert [missing(image, node) for node in kind_cluster.nodes()] == [None] * len(asked)


@pytest.mark.long
@pytest.mark.alone
def test_worker_node_killed_loses_its_pods_in_seconds_and_comes_back(
    kind_cluster: Cluster, namespace: str, hello: dict[str, str]
) -> None:
    victim = kind_cluster.workers()[-1]

    def gone() -> bool:
        shown = kind_cluster.kubectl("-n", namespace, "get", "pod", f"on-{victim}", "-o", "json")
        return shown.returncode != 0 or "deletionTimestamp" in json.loads(shown.stdout)["metadata"]

    kind_cluster.kill_node(victim)
    try:
        killed = time.monotonic()
        until(gone, "the deletion of the dead node's pod")
        # 12 s until the node counts as silent, 10 s toleration, the rest for a busy machine; the defaults take 350 s
        assert time.monotonic() - killed < 60
    finally:
        kind_cluster.start_node(victim)
        kind_cluster.wait_ready()
    replacement = server_pod("after", victim, pybases.operator())
    kind_cluster.kubectl("-n", namespace, "create", "-f", "-", input=json.dumps(replacement))
    ready = kind_cluster.kubectl("-n", namespace, "wait", "--for=condition=Ready", "pod/after", "--timeout=50s")
    assert ready.returncode == 0, ready.stderr
