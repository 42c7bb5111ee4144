"""Which cluster and whose credentials a kubeconfig names, and what is wrong with one, in one line."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from everstep.cli.jobs import commands
from everstep.jobs import kubeconfig
from everstep.jobs.cluster import connect
from everstep.jobs.source import JobError, Misconfigured, NoCluster, Unreachable, Where

SECRET = "swordfish"


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)


def context(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "context": {"cluster": "c", "user": "u", **more}}


def write(path: Path, contexts: list[dict[str, Any]], user: dict[str, Any] | None = None, /, **fields: Any) -> None:
    settings = {
        "clusters": [{"name": "c", "cluster": {"server": "https://127.0.0.1:1"}}],
        "users": [{"name": "u", "user": user or {}}],
        "contexts": contexts,
        **fields,
    }
    path.write_text(yaml.safe_dump(settings))


def call(*arguments: str) -> Result:
    return CliRunner().invoke(commands.app, arguments)


def token(where: Where = Where()) -> Any:  # noqa: B008  it is frozen
    return connect(where).api.configuration.get_api_key_with_prefix("BearerToken")


@pytest.mark.parametrize("current", [{}, {"current-context": ""}, {"current-context": "old"}])
def test_context_that_is_named_needs_no_current_one(current: dict[str, str], tmp_path: Path) -> None:
    write(tmp_path / "config", [context("a", namespace="ml"), context("b")], {"token": "t"}, **current)
    source = connect(Where(context="a"))
    assert source.title == "namespace ml of context a"
    with pytest.raises(JobError, match=r"no context 'x' in the kubeconfig .*config; it has a, b"):
        connect(Where(context="x"))
    problem = "its current context 'old' is none of them" if current.get("current-context") else "no current context"
    with pytest.raises(Misconfigured, match=rf"kubeconfig .*config .*{problem}.*a, b.*--context"):
        connect(Where())


BROKEN: dict[str, str] = {
    "no YAML": f"users: [{{name: u, user: {{token: {SECRET}}}}}\n  a: [",
    "a list": "[]",
    "a context without a cluster": "current-context: a\ncontexts: [{name: a, context: {cluster: gone}}]",
    "a user that is not there": (
        "current-context: a\nclusters: [{name: c, cluster: {server: 'https://h'}}]\n"
        "contexts: [{name: a, context: {cluster: c, user: gone}}]"
    ),
    "entries without names": "current-context: a\ncontexts: [{context: {}}]",
    "no server": "current-context: a\nclusters: [{name: c, cluster: {}}]\ncontexts: [{name: a, context: {cluster: c}}]",
    "a certificate that is not there": (
        "current-context: a\nclusters: [{name: c, cluster: {server: 'https://h', certificate-authority: gone.crt}}]\n"
        "contexts: [{name: a, context: {cluster: c}}]"
    ),
    "credentials of a kind that nobody reads": (
        "current-context: a\nclusters: [{name: c, cluster: {server: 'https://h'}}]\n"
        "contexts: [{name: a, context: {cluster: c, user: u}}]\n"
        "users: [{name: u, user: {auth-provider: {name: azure}}}]"
    ),
    "another one's name": (
        "current-context: a\nclusters: [{name: c, cluster: {server: 'https://h'}}]\n"
        "contexts: [{name: a, context: {cluster: c, user: u}}]\nusers: [{name: u, user: {as: root, token: t}}]"
    ),
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_broken_kubeconfig_is_no_missing_one(text: str, tmp_path: Path) -> None:
    (tmp_path / "config").write_text(text)
    for arguments in (["status", "digits"], ["list"], ["status", "digits", "-n", "ml"], ["kill", "digits-w0-0"]):
        done = call(*arguments)
        assert isinstance(done.exception, JobError), arguments
        assert "config" in str(done.exception)
        assert "no local run" not in str(done.exception)
        assert SECRET not in str(done.exception)
        assert len(str(done.exception).splitlines()) == 1


def test_data_in_the_kubeconfig_counts_before_a_file_that_is_gone(tmp_path: Path) -> None:
    cluster = {"server": "http://h", "certificate-authority": "gone.crt", "certificate-authority-data": "eA=="}
    write(tmp_path / "config", [context("a")], clusters=[{"name": "c", "cluster": cluster}], **{"current-context": "a"})
    assert connect(Where()).title == "namespace default of context a"


def test_credentials_that_the_client_cannot_use_send_no_anonymous_request(tmp_path: Path) -> None:
    oidc = {"name": "oidc", "config": {"id-token": "no JWT"}}
    write(tmp_path / "config", [context("a")], {"auth-provider": oidc}, **{"current-context": "a"})
    with pytest.raises(Misconfigured, match=r"context a .*credentials of its user cannot be used: auth-provider"):
        connect(Where())


def test_folder_is_no_kubeconfig_and_several_files_are_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(Misconfigured, match="folder cannot be read: "):
        connect(Where(kubeconfig=str(tmp_path / "folder")))
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "token").write_text("from a file beside the kubeconfig")
    write(inner / "second", [context("b"), context("a", namespace="other")], {"tokenFile": "token"})
    first: dict[str, Any] = {"current-context": "a", "users": []}
    write(tmp_path / "first", [context("a", namespace="ml")], **first)
    (tmp_path / "empty").write_text("")
    monkeypatch.setenv(
        "KUBECONFIG", f"{tmp_path / 'empty'}:{tmp_path / 'first'}:{tmp_path / 'gone'}:{inner / 'second'}"
    )
    assert connect(Where()).title == "namespace ml of context a", "the first file that says it counts"
    assert token() == "Bearer from a file beside the kubeconfig"


def test_files_that_are_named_and_missing_are_not_the_clusters_of_a_pod(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "1")
    with pytest.raises(NoCluster, match=r"\$KUBECONFIG names no file that is there: .*config"):
        connect(Where())
    shown = call("status", "digits")
    assert str(shown.exception).startswith("no local run named 'digits'; no cluster is configured: $KUBECONFIG names")
    with pytest.raises(JobError, match=r"kubeconfig .*absent cannot be read: No such file"):
        connect(Where(kubeconfig=str(tmp_path / "absent")))


def plugin(tmp_path: Path, body: str, **spec: Any) -> None:
    """A kubeconfig whose credentials are those of this program."""
    program = tmp_path / "plugin.py"
    program.write_text("import json, os, sys, time\n" + body)
    version = "client.authentication.k8s.io/v1"
    own = {"apiVersion": version, "command": sys.executable, "args": [str(program)], "interactiveMode": "Never"}
    write(tmp_path / "config", [context("a")], {"exec": {**own, **spec}}, **{"current-context": "a"})


def credential(**status: Any) -> str:
    body = {"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": status}
    return f"print(json.dumps({body!r}))"


def test_credentials_of_a_plug_in_are_used_and_made_anew_when_they_expire(tmp_path: Path) -> None:
    log = "open('calls', 'a').write(os.environ['EXTRA'] + json.loads(os.environ['KUBERNETES_EXEC_INFO'])['kind'])\n"
    plugin(tmp_path, log + credential(token="t"), env=[{"name": "EXTRA", "value": "x"}])
    api = connect(Where()).api
    for _ in range(3):
        assert api.configuration.get_api_key_with_prefix("BearerToken") == "Bearer t"
    assert (tmp_path / "calls").read_text() == "xExecCredential"
    plugin(
        tmp_path,
        log + credential(token="t", expirationTimestamp="2026-01-01T00:00:00Z"),
        env=[{"name": "EXTRA", "value": "y"}],
    )
    api = connect(Where()).api
    assert api.configuration.get_api_key_with_prefix("BearerToken") == "Bearer t"
    assert (tmp_path / "calls").read_text().count("y") == 2


FAILING: dict[str, tuple[str, str]] = {
    "it fails": ("sys.exit('first\\nnot signed in: aws sso login')", "ended with 1: not signed in: aws sso login"),
    "it prints nothing": ("", "printed no ExecCredential"),
    "it prints something else": ("print('[1]')", "printed no ExecCredential"),
    "it has no credentials": (credential(), "neither a token nor a certificate"),
}


@pytest.mark.parametrize(("body", "problem"), FAILING.values(), ids=FAILING)
def test_plug_in_that_has_no_credentials_is_no_anonymous_request(body: str, problem: str, tmp_path: Path) -> None:
    plugin(tmp_path, body)
    with pytest.raises(Unreachable, match="context a: the credentials plug-in .*python.* " + problem):
        connect(Where())


def test_plug_in_that_is_missing_says_how_to_install_it_and_one_that_hangs_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin(tmp_path, "", command="bin/no-such-plugin", installHint="Install it\nfrom https://example.com.")
    with pytest.raises(
        Unreachable, match=r"plug-in '.*/bin/no-such-plugin' is not installed: Install it from https://example"
    ):
        connect(Where())
    plugin(tmp_path, "open('pid', 'w').write(str(os.getpid()))\ntime.sleep(600)")
    monkeypatch.setattr(kubeconfig, "PLUGIN_SECONDS", 2.0)
    began = time.monotonic()
    with pytest.raises(Unreachable, match=r"did not end within 2 s"):
        connect(Where())
    assert time.monotonic() - began < 20
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text()}").exists()


def test_no_cluster_anywhere_is_said_without_the_words_of_a_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    shown = call("status", "digits")
    assert str(shown.exception) == (
        "no local run named 'digits'; no cluster is configured: give --kubeconfig FILE, or set KUBECONFIG. Start one "
        "with `everstep run`."
    )
