"""Docker: installed and started where it may be, and given a runtime that asks only for what this machine has.

Invariant: never a second dockerd. One that answers is used as it is, with one exception: where the machine's capability
bounding set is incomplete, privileged containers cannot start without `runc-capfix`, so it is made the default runtime.
"""

import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from testcluster import cache, packages, programs
from testcluster.proc import ClusterError, CommandError, run, succeeds

DAEMON_JSON = Path("/etc/docker/daemon.json")
PID_FILE = Path("/var/run/docker.pid")
START_LIMIT = 60.0  # seconds until dockerd answers
CAP_SYS_RESOURCE = 24  # number in linux/capability.h; the one that machines inside sandboxes lack
REPOSITORY = "everstep-test"
# BuildKit's own plug-in is missing from Debian's package, and the builder inside dockerd does all that is needed here.
BUILDER = {"DOCKER_BUILDKIT": "0"}


def _answers() -> bool:
    return succeeds("docker", "version", timeout=20)


def _lacks_capability() -> bool:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapBnd:"):
            return not int(line.split()[1], 16) >> CAP_SYS_RESOURCE & 1
    return False


def _write_config(runtime: Path) -> bool:
    """Make `runtime` the default; keeps every other setting. Returns whether the file changed."""
    config = json.loads(DAEMON_JSON.read_text()) if DAEMON_JSON.exists() else {}
    before = json.dumps(config, sort_keys=True)
    config.setdefault("runtimes", {})["capfix"] = {"path": str(runtime)}
    config["default-runtime"] = "capfix"
    if json.dumps(config, sort_keys=True) == before:
        return False
    DAEMON_JSON.parent.mkdir(parents=True, exist_ok=True)
    DAEMON_JSON.write_text(json.dumps(config, indent=2) + "\n")
    return True


def _default_runtime() -> str:
    return run("docker", "info", "--format", "{{.DefaultRuntime}}").strip()


def _await(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + START_LIMIT
    while not condition():
        if time.monotonic() > deadline:
            raise ClusterError(f"{what} did not happen within {START_LIMIT:.0f} s; see {cache.logs() / 'dockerd.log'}")
        time.sleep(0.2)


def _start() -> None:
    log = (cache.logs() / "dockerd.log").open("ab")
    # Its own session and no inherited handles: it outlives this script and the shell that ran it.
    subprocess.Popen(["dockerd"], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd="/")
    _await(_answers, "dockerd's first answer")


def ensure() -> None:
    """A docker daemon that can run privileged containers. Raises `ClusterError` where there can be none."""
    began = time.monotonic()
    with cache.lock("docker"):
        runs = _answers()
        if not runs and os.geteuid() != 0:
            raise ClusterError("no docker daemon answers, and only root can start one: start docker, or run as root.")
        if not runs:
            packages.ensure(packages.DOCKER)
        changed = _write_config(programs.runc_capfix()) if _lacks_capability() and os.geteuid() == 0 else False
        if not runs:
            _start()
            cache.say(time.monotonic() - began, "docker", f"started, log in {cache.logs() / 'dockerd.log'}")
        elif changed:
            os.kill(int(PID_FILE.read_text()), signal.SIGHUP)
            _await(lambda: _default_runtime() == "capfix", "dockerd's change to the runtime capfix")
            cache.say(time.monotonic() - began, "docker", "told to use runc-capfix: CAP_SYS_RESOURCE is missing here")
        else:
            cache.say(0, "docker", "skipped, it answers")


def registry_answers() -> bool:
    """Whether images can be pulled. `EVERSTEP_REGISTRY=yes|no` overrides the look."""
    override = os.environ.get("EVERSTEP_REGISTRY", "auto")
    if override in {"yes", "no"}:
        return override == "yes"
    try:
        with urllib.request.urlopen("https://registry-1.docker.io/v2/", timeout=5):
            return True
    except urllib.error.HTTPError as error:
        return error.code == 401  # it answers, and wants a token as registries do
    except OSError:
        return False


def exists(tag: str) -> bool:
    return succeeds("docker", "image", "inspect", tag)


def container_exists(name: str) -> bool:
    return succeeds("docker", "container", "inspect", name)


def image(name: str, parts: tuple[cache.Part, ...], make: Callable[[str], None]) -> str:
    """The tag of an image, made by `make(tag)` only if none with the same `parts` exists."""
    key = cache.key_of(name, *parts)
    tag = f"{REPOSITORY}/{name}:{key}"
    if exists(tag):
        cache.say_skipped(f"image {name}", key)
        return tag
    with cache.lock(f"image-{name}"):
        if exists(tag):
            return tag
        began = time.monotonic()
        make(tag)
        _prune(name, tag)
        cache.say(time.monotonic() - began, f"image {name}", f"built {key}")
    return tag


def _prune(name: str, current: str) -> None:
    """Older images of the same name go, unless a container still runs from them."""
    for tag in run("docker", "images", f"{REPOSITORY}/{name}", "--format", "{{.Repository}}:{{.Tag}}").split():
        if tag != current:
            succeeds("docker", "rmi", tag)


def import_tar(tar: Path, tag: str, *changes: str) -> None:
    arguments = [part for change in changes for part in ("--change", change)]
    run("docker", "import", *arguments, str(tar), tag)


def build(folder: Path, tag: str, *arguments: str, dockerfile: Path | None = None) -> None:
    chosen = ["-f", str(dockerfile)] if dockerfile else []
    log = cache.logs() / f"docker-build-{tag.replace('/', '-').partition(':')[0]}.log"
    try:
        run("docker", "build", "-t", tag, *chosen, *arguments, str(folder), env=BUILDER, log=log)
    except CommandError as error:
        raise ClusterError(f"image {tag} could not be built, see {log}:\n{error}") from error
