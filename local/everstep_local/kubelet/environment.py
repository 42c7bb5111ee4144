"""Makes a command from a container's spec: arguments, environment, working folder.

It works as a kubelet does: first `envFrom`, then `env` in order, where each variable can use earlier ones as $(NAME),
then the command. There is no file system or name service for a container, so paths of volumes and names of pods in
these values are translated. Invariant: of this process's own environment a container gets only the variables named
here.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everstep.contract import env as contract
from everstep_local.kubelet.addresses import Addresses, PodHost
from everstep_local.kubelet.sources import NotStartable, PodFacts, Sources

# A program needs these to find its libraries, its home and the network. PET_*, RANK, EVERSTEP_* and the user's
# credentials are not among them.
PASSED = frozenset({"HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ"}) | frozenset(
    {"LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "CUDA_HOME", "CUDA_VISIBLE_DEVICES", "SSL_CERT_FILE", "SSL_CERT_DIR"}
)
_PROXIES = frozenset({"http_proxy", "https_proxy", "no_proxy"})
MAX_ENV_BYTES = 1024 * 1024  # of names and values; Linux accepts 2 MiB with the arguments
_REFERENCE = re.compile(r"\$(\$|\(([^()]*)\))")


class PathMap:
    """Maps paths in the pod to paths on this machine."""

    def __init__(self, folders: Mapping[str, Path]) -> None:
        self._folders = {where.rstrip("/"): folder for where, folder in folders.items()}
        # The longest path comes first, because a mount may be below another one.
        paths = "|".join(re.escape(p) for p in sorted(self._folders, key=len, reverse=True))
        # It matches a whole path, or its beginning, as in /data/x, --in=/data and file:///data, but not /my/data or
        # /database.
        self._pattern = re.compile(rf"(?<![\w.\-])(?<![^/]/)(?:{paths})(?=/|$|[^\w.\-])") if paths else None

    def translate(self, text: str) -> str:
        if self._pattern is None:
            return text
        return self._pattern.sub(lambda match: str(self._folders[match[0]]), text)


@dataclass(frozen=True, slots=True)
class Machine:
    """The resources of this machine for a container."""

    workdir: Path
    tmp: Path
    termination_log: Path
    paths: PathMap
    addresses: Addresses
    host: PodHost
    pass_env: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Command:
    """A command that is ready to be executed."""

    argv: tuple[str, ...]
    env: dict[str, str]
    cwd: Path


async def command(container: Mapping[str, Any], facts: PodFacts, sources: Sources, machine: Machine) -> Command:
    """Raises NotStartable, KubeError and AddressesExhausted."""
    variables = await _variables(container, facts, sources)
    variables.pop(contract.JOINED_FILE, None)  # there are no probes here that look for it
    argv = [expand(str(part), variables) for key in ("command", "args") for part in container.get(key) or ()]
    if not container.get("command"):
        raise NotStartable(
            f"container {container.get('name')!r} has no command; local mode has no images, so give the command"
        )
    holder = facts.pod.metadata.uid
    translated = {
        name: machine.addresses.translate(name, machine.paths.translate(value), machine.host, holder)
        for name, value in variables.items()
    }
    base = _base(machine, facts)
    env = {**base, **translated}
    if sum(len(name) + len(value) for name, value in env.items()) > MAX_ENV_BYTES:
        raise NotStartable(f"the environment is larger than {MAX_ENV_BYTES} bytes; use files")
    argv = [machine.paths.translate(part) for part in argv]
    if any("\0" in text for text in (*argv, *env.values())):
        raise NotStartable("a command, argument or variable has a NUL byte, which no program can be given")
    return Command((_program(argv[0]), *argv[1:]), env, _cwd(container, machine))


def _base(machine: Machine, facts: PodFacts) -> dict[str, str]:
    passed = PASSED | machine.pass_env
    own = {k: v for k, v in os.environ.items() if k in passed or k.startswith("LC_") or k.lower() in _PROXIES}
    # This interpreter's folder comes first, so that torchrun, python and everstep are those of local mode itself.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    loopback = "lo" if sys.platform.startswith("linux") else "lo0"
    return {
        **own,
        "PATH": path,
        "HOSTNAME": str(facts.pod.spec.get("hostname") or facts.pod.metadata.name),
        "TMPDIR": str(machine.tmp),
        # Otherwise gloo resolves the machine's name, to an interface that may be down or slow.
        "GLOO_SOCKET_IFNAME": loopback,
        contract.TERMINATION_LOG: str(machine.termination_log),
    }


def _program(name: str) -> str:
    """Some environments have no `python`, only `python3` or a version."""
    here = Path(sys.executable)
    return str(here) if name in ("python", "python3") and not (here.parent / name).exists() else name


def _cwd(container: Mapping[str, Any], machine: Machine) -> Path:
    wanted = str(container.get("workingDir") or "")
    mapped = machine.paths.translate(wanted)
    # A folder of the image does not exist here, but one inside a volume does.
    return Path(mapped) if wanted and mapped != wanted else machine.workdir


async def _variables(container: Mapping[str, Any], facts: PodFacts, sources: Sources) -> dict[str, str]:
    variables: dict[str, str] = {}
    for source in container.get("envFrom") or ():
        secret = "secretRef" in source
        values = await sources.values(source.get("secretRef") or source.get("configMapRef") or {}, secret=secret)
        for key, data in values.items():
            if key and "=" not in key:
                variables[str(source.get("prefix") or "") + key] = data.decode("utf-8", "surrogateescape")
    for variable in container.get("env") or ():
        name = str(variable.get("name", ""))
        if variable.get("valueFrom"):
            referenced = await _value_from(name, variable["valueFrom"], facts, sources)
            if referenced is None:
                continue
            value = referenced
        else:
            value = expand(str(variable.get("value") or ""), variables)
        # The variable gets a new place: a later one of the same name replaces the earlier one.
        variables.pop(name, None)
        variables[name] = value
    return variables


async def _value_from(name: str, source: Mapping[str, Any], facts: PodFacts, sources: Sources) -> str | None:
    match source:
        case {"fieldRef": {"fieldPath": path}}:
            return facts.field(str(path))
        case {"secretKeyRef": ref}:
            return await sources.value(ref, secret=True)
        case {"configMapKeyRef": ref}:
            return await sources.value(ref, secret=False)
        case _:
            kinds = ", ".join(sorted(source))
            raise NotStartable(
                f"env {name}: valueFrom.{kinds} is not supported in local mode; "
                "use a value, fieldRef, secretKeyRef or configMapKeyRef"
            )


def expand(text: str, values: Mapping[str, str]) -> str:
    """Replace `$(NAME)` by its value and `$$` by a dollar. A reference to an unknown name stays as it is."""

    def replaced(match: re.Match[str]) -> str:
        if match[1] == "$":
            return "$"
        return values.get(match[2], match[0])

    return _REFERENCE.sub(replaced, text)
