"""Measures an idle operator: its memory, its loaded modules, and the packages that its image has besides Python.

    python benchmarks/operator_memory.py [--quick] [--json PATH] [--python PATH]

An environment is made as the image's is: the packages of requirements/operator.txt by their hashes, and the wheels of
`everstep` and `everstep-operator`, with bytecode of what the operator loads. `--python` names the interpreter of an
environment that exists, instead. The operator is started in it as in a pod, with a token and a CA in a folder, before a
real kube-apiserver with one job of two workers.

- `operator.idle.rss`: resident memory a minute after the job has its pods (5 s in a quick run).
- `operator.modules`: how many modules it has loaded by then.
- `operator.packages.installed`: the bytes of `site-packages` without pip and setuptools, which the base image has.
- `operator.packages.compressed`: the same as a layer of an image: tar and gzip, level 6. The image has these beside its
  base.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "benchmarks")]
from figures import Better, Figure, finish, parser

from everstep.contract.labels import API_VERSION, KIND
from testcluster.controlplane import ControlPlane
from testcluster.daemon import free_ports

IN_POD = ROOT / "tests/support/operator/in_pod.py"
UV = Path(sys.executable).with_name("uv")
BASE = re.compile(r"pip|setuptools|pkg_resources|_distutils_hack|distutils-precedence|_virtualenv")  # of the base image
IMAGE = {"FROZENLIST_NO_EXTENSIONS": "1"}  # what the Dockerfile sets for the operator
LIMIT = 120.0  # seconds until the job has its pods
CONTAINER = {"name": "worker", "image": "train:1", "command": ["everstep-run", "train.py"]}
JOB = {
    "apiVersion": API_VERSION,
    "kind": KIND,
    "metadata": {"name": "idle"},
    "spec": {"replicas": 2, "template": {"spec": {"containers": [CONTAINER]}}},
}


def environment(folder: Path) -> Path:
    """The interpreter of an environment with what the operator's image installs."""
    python = folder / "venv/bin/python"
    subprocess.run([UV, "venv", "-q", "--python", sys.executable, folder / "venv"], check=True)
    install: list[str | Path] = [UV, "pip", "install", "-q", "--python", python]
    subprocess.run([*install, "--require-hashes", "-r", ROOT / "requirements/operator.txt"], check=True)
    build: list[str | Path] = [
        UV,
        "build",
        "-q",
        "--offline",
        "--wheel",
        "--no-build-isolation",
        "--python",
        sys.executable,
    ]
    for name in ("worker", "operator"):
        subprocess.run([*build, "-o", folder / "wheels", ROOT / name], check=True)
    subprocess.run([*install, "--no-deps", *(folder / "wheels").glob("*.whl")], check=True)
    # As in the Dockerfile: only what the operator loads is compiled.
    writes = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    subprocess.run([python, "-P", "-c", "import everstep_operator.main, jwt"], check=True, env=writes)
    return python


def packages(python: Path) -> tuple[int, int]:
    """The bytes of what is installed there beyond the base image: as files, and as a layer."""
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    place = Path(subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip())
    ours = [path for path in sorted(place.iterdir()) if not BASE.match(path.name)]
    layer = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=layer, mode="wb", compresslevel=6) as packed,
        tarfile.open(fileobj=packed, mode="w|") as tar,
    ):
        for path in ours:
            tar.add(path, path.name)
    files = (file for path in ours for file in ([path] if path.is_file() else path.rglob("*")))
    return sum(file.stat().st_size for file in files if file.is_file()), len(layer.getvalue())


def idle(python: Path, plane: ControlPlane, folder: Path, seconds: float) -> tuple[float, int]:
    """Resident MiB of the operator that has one job, and how many modules it has loaded."""
    account = folder / "account"
    account.mkdir()
    (account / "token").write_text(plane.token)
    (account / "ca.crt").write_bytes(plane.ca_file.read_bytes())
    (account / "namespace").write_text("default")
    host, port = plane.url.removeprefix("https://").split(":")
    environ = {k: v for k, v in os.environ.items() if k != "KUBECONFIG" and not k.startswith(("EVERSTEP_", "PYTHON"))}
    environ |= {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}
    environ |= IMAGE
    ports = [str(port) for port in free_ports(2)]
    flags = ["--host", "127.0.0.1", "--port", ports[0], "--probe-port", ports[1]]
    with (folder / "operator.log").open("wb") as log:
        process = subprocess.Popen(
            [python, "-P", IN_POD, account, *flags], env=environ, stdout=subprocess.PIPE, stderr=log, text=True
        )
    try:
        (folder / "job.json").write_text(json.dumps(JOB))
        done = plane.kubectl("create", "-f", str(folder / "job.json"))
        assert done.returncode == 0, done.stderr
        deadline = time.monotonic() + LIMIT
        while json.loads(plane.get("/api/v1/namespaces/default/pods"))["items"][1:] == []:
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the job has no pods: {(folder / 'operator.log').read_text()}")
            time.sleep(0.2)
        time.sleep(seconds)
        status = Path(f"/proc/{process.pid}/status").read_text()
        memory = int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]) / 1024
        process.terminate()
        modules, _ = process.communicate(timeout=60)
        return memory, len(modules.split())
    finally:
        process.kill()
        process.wait()


def measure(python: Path | None, seconds: float, folder: Path) -> list[Figure]:
    python = python or environment(folder)
    installed, compressed = packages(python)
    plane = ControlPlane(folder / "plane")
    plane.start()
    try:
        done = plane.kubectl("apply", "--server-side", "-f", str(ROOT / "manifests/crd.yaml"))
        assert done.returncode == 0, done.stderr
        served = plane.kubectl("wait", "--for=condition=Established", "crd/trainingjobs.everstep.dev", "--timeout=30s")
        assert served.returncode == 0, served.stderr
        memory, modules = idle(python, plane, folder, seconds)
    finally:
        plane.stop()
    lower = Better.LOWER
    return [
        Figure("operator.idle.rss", memory, "MiB", lower, 1, goal=45),
        Figure("operator.modules", modules, "1", lower, 1),
        Figure("operator.packages.installed", installed / 1e6, "MB", lower, 1),
        Figure("operator.packages.compressed", compressed / 1e6, "MB", lower, 1),
    ]


if __name__ == "__main__":
    cli = parser(__doc__)
    cli.add_argument("--python", type=Path, metavar="PATH", help="the interpreter of an environment with the operator")
    args = cli.parse_args()
    with tempfile.TemporaryDirectory() as place:
        sys.exit(finish(measure(args.python, 5.0 if args.quick else 60.0, Path(place)), args))
