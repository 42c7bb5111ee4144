"""Every program that the package brings: `--help` explains and does nothing, and what it does not know it refuses."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

from everstep.contract import variables
from everstep_operator.arguments import read
from everstep_operator.kube.credentials import InCluster, KubeConfig, find_source, look_up
from everstep_operator.kube.errors import CredentialsError
from everstep_operator.settings import VARIABLES, SettingsError

ROOT = Path(__file__).resolve().parents[2]
SOURCES = {name: ROOT / name for name in ("operator", "worker", "local", "horovod", "sources")}


def programs() -> dict[str, list[str]]:
    """The console scripts of the distributions, and every module of theirs that runs as `python -m`."""
    found: dict[str, list[str]] = {}
    for source in SOURCES.values():
        scripts = tomllib.loads((source / "pyproject.toml").read_text())["project"].get("scripts", {})
        found |= {name: [str(Path(sys.executable).with_name(name))] for name in scripts}
        for path in sorted(source.rglob("*.py")):
            if '\nif __name__ == "__main__":' in path.read_text():
                module = ".".join(path.relative_to(source).with_suffix("").parts)
                found[module] = [sys.executable, "-m", module]
    return found


PROGRAMS = programs()


def call(command: list[str], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """In an empty folder, with a kubeconfig whose server answers nobody: who contacts it does not end in time."""
    kubeconfig = write_kubeconfig(folder / "kube.yaml")
    clean = {k: v for k, v in os.environ.items() if not k.startswith("EVERSTEP_")}
    environ = {
        **clean,
        "KUBECONFIG": str(kubeconfig),
        "HOME": str(folder),
        "XDG_RUNTIME_DIR": str(folder),
        **environment,
    }
    return subprocess.run(
        command,
        check=False,
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )


def write_kubeconfig(path: Path) -> Path:
    body = {
        "apiVersion": "v1", "kind": "Config", "current-context": "here",
        "clusters": [{"name": "c", "cluster": {"server": "https://192.0.2.1:6443"}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [
            {"name": "here", "context": {"cluster": "c", "user": "u"}},
            {"name": "there", "context": {"cluster": "c", "user": "u", "namespace": "x"}},
        ],
    }  # fmt: skip
    path.write_text(yaml.safe_dump(body))
    return path


def test_the_programs_are_all_found() -> None:
    assert {
        "everstep",
        "everstep-run",
        "everstep-operator",
        "everstep.agent.processes.forkserver",
        "everstep_operator.api.crd",
    } <= set(PROGRAMS)


@pytest.mark.long_but("everstep-operator", "everstep-run")
@pytest.mark.parametrize("name", PROGRAMS)
def test_help_explains_and_does_nothing(name: str, tmp_path: Path) -> None:
    done = call([*PROGRAMS[name], "--help"], tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert "usage" in done.stdout.lower()
    assert [p.name for p in tmp_path.iterdir()] == ["kube.yaml"]


@pytest.mark.long_but("everstep", "everstep-operator", "everstep-run")
@pytest.mark.parametrize("name", PROGRAMS)
def test_argument_that_nobody_knows_is_refused_and_nothing_is_done(name: str, tmp_path: Path) -> None:
    done = call([*PROGRAMS[name], "--hlep"], tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr
    assert done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["kube.yaml"]


@pytest.mark.parametrize("name", ["everstep", "everstep-run", "everstep-operator"])
def test_version_is_that_of_the_package(name: str, tmp_path: Path) -> None:
    assert call([*PROGRAMS[name], "--version"], tmp_path).stdout == f"{name} {version(name.removesuffix('-run'))}\n"


LOADS = """
import sys
from everstep.cli.main import main
sys.argv = ["everstep", *sys.argv[1:]]
try:
    main()
except SystemExit:
    print(*sys.modules, file=sys.stderr)
"""
MODULES = 300  # when the version is shown; with all commands there were 1,131


@pytest.mark.parametrize(
    ("arguments", "loaded", "others"),
    [
        (["--version"], "everstep.cli.main", "rich everstep.cli.ckpt everstep_local"),
        (["ckpt", "ls", "--help"], "everstep.cli.ckpt", "everstep.cli.rehearse everstep_local.run torch"),
        (["stacks", "--help"], "everstep.cli.stacks", "everstep.cli.ckpt everstep_local.run torch"),
        (["kill", "--help"], "everstep.cli.jobs.commands", "everstep.cli.ckpt everstep_local.run kubernetes torch"),
        (["run", "--help"], "everstep_local.run", "everstep.cli.ckpt everstep_local.plan everstep_local.bench torch"),
        (["plan", "--help"], "everstep_local.plan", "everstep.cli.ckpt everstep_local.run everstep_local.bench torch"),
    ],
)  # fmt: skip
def test_command_loads_its_own_modules_alone(arguments: list[str], loaded: str, others: str, tmp_path: Path) -> None:
    done = call([sys.executable, "-c", LOADS, *arguments], tmp_path)
    modules = set(done.stderr.split())
    assert loaded in modules
    assert modules.isdisjoint(others.split())
    if arguments == ["--version"]:
        assert len(modules) < MODULES


def test_command_that_is_misspelt_is_refused_with_the_nearest(tmp_path: Path) -> None:
    done = call([*PROGRAMS["everstep"], "doktor"], tmp_path)
    assert done.returncode == 2
    assert "No such command 'doktor'. Did you mean 'doctor'?" in done.stderr


def test_help_lists_all_commands_with_what_they_do(tmp_path: Path) -> None:
    done = call([*PROGRAMS["everstep"], "--help"], tmp_path, COLUMNS="200")
    assert (done.returncode, done.stderr) == (0, "")
    shown = done.stdout
    for name, does in {
        "run": "Run a job here with the real operator", "plan": "Show what the operator would decide",
        "bench": "Run a job with each number of workers", "ckpt": "List, check, pin, copy and export",
        "stacks": "Where each rank of a job is", "doctor": "Say which versions are installed",
    }.items():  # fmt: skip
        assert re.search(rf"\b{name}\b\W+{does}", shown), shown


# --- the operator

OPERATOR_MODULES = 650  # there were 987 with the official client


def test_operator_outside_of_a_pod_starts_in_no_cluster_that_nobody_named(tmp_path: Path) -> None:
    done = call(PROGRAMS["everstep-operator"], tmp_path, EVERSTEP_NAMESPACE="everstep-system")
    assert done.returncode == 2
    assert done.stderr.startswith("everstep-operator: this is no pod: name the cluster with --kubeconfig FILE")
    assert len(done.stderr.splitlines()) == 1


def test_operator_says_which_cluster_it_would_use_before_it_asks_for_the_namespace(tmp_path: Path) -> None:
    done = call([*PROGRAMS["everstep-operator"], "--context", "there"], tmp_path)
    assert done.returncode == 2
    assert "--namespace: needed outside of a pod" in done.stderr
    assert f"kubeconfig {tmp_path}/kube.yaml, context there, server https://192.0.2.1:6443" in done.stderr


def test_operator_tells_its_cluster_and_names_variables_that_change_nothing(tmp_path: Path) -> None:
    """It stays, because that server answers nobody; what it said at its start is what counts."""
    command = [
        *PROGRAMS["everstep-operator"],
        "--kubeconfig",
        str(write_kubeconfig(tmp_path / "k")),
        "--namespace",
        "n",
    ]
    environ = {**os.environ, "EVERSTEP_LEASE_SECOND": "5"}
    with subprocess.Popen([*command, "--port", "0"], stderr=subprocess.PIPE, text=True, env=environ) as process:
        try:
            assert process.stderr is not None
            said = ""
            while "operator starts" not in said:
                line = process.stderr.readline()
                assert line, said
                said += line
        finally:
            process.kill()
    assert "EVERSTEP_LEASE_SECOND: no such variable, so it changes nothing; is EVERSTEP_LEASE_SECONDS meant?" in said
    cluster = f"kubeconfig {tmp_path}/k, context here, server https://192.0.2.1:6443"
    assert f'"namespace":"n","watches":"all namespaces","cluster":"{cluster}"' in said


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--port", "http"], "--port: 'http' is not a whole number from 0 to 65535"),
        (["--log-level", "chatty"], "--log-level: 'chatty' is not DEBUG, INFO, WARNING or ERROR"),
        (["--kubeconfig", "none.yaml"], "kubeconfig none.yaml: there is no such file"),
        (["--context", "elsewhere"], "no context 'elsewhere'; it has here, there"),
    ],
)
def test_operator_refuses_what_cannot_be_used_by_the_name_that_was_given(
    arguments: list[str], problem: str, tmp_path: Path
) -> None:
    environ = {"KUBECONFIG": str(write_kubeconfig(tmp_path / "k")), "EVERSTEP_NAMESPACE": "n"}
    with pytest.raises((SettingsError, CredentialsError)) as refused:
        read(arguments, environ)
    assert problem in str(refused.value)


def test_flag_goes_before_its_variable_and_each_variable_has_one(tmp_path: Path) -> None:
    environ = {"EVERSTEP_PORT": "1", "EVERSTEP_WORKERS": "3", "EVERSTEP_NAMESPACE": "a"}
    asked = read(["--kubeconfig", str(write_kubeconfig(tmp_path / "k")), "--port", "2", "--namespace", "b"], environ)
    assert (asked.settings.port, asked.settings.workers, asked.settings.namespace) == (2, 3, "b")
    shown = call([*PROGRAMS["everstep-operator"], "--help"], tmp_path, EVERSTEP_PORT="4711").stdout
    assert all(v.flag in shown and f"[{v.name}]" in shown for v in VARIABLES)
    assert "here: 4711" in shown


def test_pod_uses_its_own_cluster_and_namespace_and_no_kubeconfig_by_chance(tmp_path: Path) -> None:
    for name, text in (("token", "t"), ("namespace", "team-a\n")):
        (tmp_path / name).write_text(text)
    environ = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "443"}
    assert find_source(environ, service_account=tmp_path) == InCluster(tmp_path, "10.0.0.1", "443")
    with pytest.raises(CredentialsError, match=r"unset KUBECONFIG, or give --kubeconfig"):
        find_source({**environ, "KUBECONFIG": "/x"}, service_account=tmp_path)
    named = find_source({**environ, "KUBECONFIG": "/x"}, "/y", service_account=tmp_path)
    assert named == KubeConfig("/y")


def test_pod_without_a_token_is_told_the_file_and_one_with_a_wrong_port_the_variable(tmp_path: Path) -> None:
    environ = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "tcp://10.0.0.1:443"}
    with pytest.raises(CredentialsError, match=f"no service account's token, {tmp_path}/token: name the cluster"):
        find_source(environ, service_account=tmp_path)
    (tmp_path / "token").write_text("t")
    with pytest.raises(CredentialsError, match=r"^KUBERNETES_SERVICE_PORT: 'tcp://10.0.0.1:443' is no port"):
        find_source(environ, service_account=tmp_path)


def test_server_with_an_ipv6_address_has_brackets(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("t")
    environ = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443"}
    assert look_up(find_source(environ, service_account=tmp_path)).server == "https://[fd00::1]:443"


def test_operator_loads_what_a_pod_needs_and_no_official_client(tmp_path: Path) -> None:
    code = "import sys, everstep_operator.main; print(*sys.modules)"
    modules = call([sys.executable, "-c", code], tmp_path).stdout.split()
    assert {name.partition(".")[0] for name in modules}.isdisjoint(
        ("kubernetes", "requests", "oauthlib", "dateutil", "yaml", "jwt", "cryptography", "rich", "typer", "fsspec")
    )
    assert len(modules) < OPERATOR_MODULES


WITHOUT = """
import sys
sys.modules["kubernetes"] = None
from everstep_operator.main import main
sys.exit(main())
"""


def test_kubeconfig_without_the_official_client_is_refused_with_what_to_install(tmp_path: Path) -> None:
    done = call([sys.executable, "-c", WITHOUT, "--context", "here", "--namespace", "n"], tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(f"everstep-operator: kubeconfig {tmp_path}/kube.yaml: the package kubernetes")
    assert "pip install 'everstep-operator[kubeconfig]'" in done.stderr
    assert len(done.stderr.splitlines()) == 1


# --- variables


def test_every_variable_that_the_worker_reads_is_known() -> None:
    names = {
        name
        for path in (ROOT / "worker").rglob("*.py")
        for name in re.findall(r'"(EVERSTEP_[A-Z_]*[A-Z])"', path.read_text())
    }
    assert names
    # `everstep doctor --cluster` reads those of an operator's Deployment.
    assert names <= variables.KNOWN | {variable.name for variable in VARIABLES}


def test_variable_that_nobody_reads_is_named_with_the_nearest_and_without_its_value() -> None:
    said = variables.unknown({"EVERSTEP_CHEKPOINT_URL": "s3://key:secret@b", "EVERSTEP_ZZZ": "1", "PATH": "/"})
    assert said == [
        "EVERSTEP_CHEKPOINT_URL: no such variable, so it changes nothing; is EVERSTEP_CHECKPOINT_URL meant?",
        "EVERSTEP_ZZZ: no such variable, so it changes nothing",
    ]


@pytest.mark.parametrize(
    "name", ["EVERSTEP_SERVICE_HOST", "EVERSTEP_PORT", "EVERSTEP_PORT_80_TCP_ADDR", "EVERSTEP_A_SERVICE_PORT_HTTP"]
)
def test_what_kubernetes_sets_for_a_service_is_no_mistake(name: str) -> None:
    assert variables.unknown({name: "x"}) == []
