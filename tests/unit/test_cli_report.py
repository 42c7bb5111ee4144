"""`everstep report`: no secret of the objects, a run's logs without secrets, and what could not be read."""

from __future__ import annotations

import json
import tarfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from everstep.cli.jobs.report import without_values
from everstep.jobs.view import View, WorkerRow
from support.commands import caller


def test_logs_are_there_without_secrets_and_what_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    rows = [WorkerRow(n, f"train-w{n}-0", "node-1", "Failed", None, None, 0, None) for n in range(2)]
    view = View.unknown("train").to_json() | {"workers": [asdict(row) for row in rows]}
    (tmp_path / "out" / "logs").mkdir(parents=True)
    (tmp_path / "out" / "status.json").write_text(json.dumps(view))
    key = ["-----BEGIN PRIVATE KEY-----", *["aB3" * 20] * 3, "-----END PRIVATE KEY-----"]
    long = [f"step={n} " + "x" * 300 for n in range(1500)]  # more than `redact` looks at in one piece
    lines = [*long, "password=swordfish", *key, "last"]
    (tmp_path / "out" / "logs" / "train-w0-0.log").write_text("".join(f"00:00:00 {line}\n" for line in lines))
    caller()("report", "train", "--out", "out", "--file", "r.tar.gz")
    with tarfile.open("r.tar.gz") as archive:
        files = {each.name: archive.extractfile(each).read().decode() for each in archive.getmembers()}  # type: ignore[union-attr]
    log = files["r/logs/train-w0-0.log"].splitlines()
    assert log[:1500] == long
    assert log[-1] == "last"
    assert "swordfish" not in "".join(log)
    assert "aB3aB3" not in "".join(log)
    problems = files["r/problems.txt"].splitlines()
    assert problems[0].startswith("events: ")
    assert problems[1].startswith("log of train-w1-0: no log of")


S = "swordfish"
# A secret stands in each of these, in no known shape: what it stands behind or below says what it is.
SECRETS: dict[str, Any] = {
    "a list item behind an option": {"command": ["python", "t.py", "--hf-token", S, "--lr", "0.1"]},
    "one that looks like an option": {"args": ["--password", f"-{S}"]},
    "an option with an underscore": {"args": ["--wandb_key", S]},
    "an option and its value in one item": {"args": [f"--store.auth={S}"]},
    "a variable of env": {"command": ["env", f"STORE_KEY={S}", "python", "t.py"]},
    "a shell's line": {"command": ["sh", "-c", f"exec python t.py --wandb_key '{S} {S}' --auth {S} --lr 1"]},
    "a shell's variable": {"command": ["sh", "-c", f"STORE_KEY={S} MY_AUTH='{S} {S}' python t.py"]},
    "a volume's attribute": {"csi": {"driver": "d", "volumeAttributes": {"password": S, "key": S, "secretName": S}}},
    "an annotation": {"metadata": {"annotations": {"example.com/vault-token": S, "key": S}}},
    "a list below such a name": {"passwords": [S, [S]]},
    "a number below such a name": {"volumeAttributes": {"password": 1223334444}},
    "an object that an annotation repeats": {
        "annotations": {"kapp.k14s.io/original": json.dumps({"env": [{"name": "A", "value": S}], "args": ["--key", S]})}
    },
    "a compressed object": {"annotations": {"objectset.rio.cattle.io/applied": f"H4sI{S}"}},
    "a variable of the environment": {"env": [{"name": "PLAIN", "value": S}]},
    "a header": {"httpGet": {"httpHeaders": [{"name": "X-Own", "value": S}]}},
}  # fmt: skip
# Names of things, and facts, which whoever helps needs.
READABLE: dict[str, Any] = {
    "names of Secrets and of their keys": {
        "env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "s3", "key": "password"}}}],
        "volumes": [{"name": "v", "secret": {"secretName": "s3", "items": [{"key": "ca.crt", "path": "ca"}]}}],
        "imagePullSecrets": [{"name": "registry"}],
        "serviceAccountToken": {"audience": "everstep.dev/operator", "expirationSeconds": 3600, "path": "token"},
    },
    "taints and spreading": {
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        "topologySpreadConstraints": [{"topologyKey": "zone", "matchLabelKeys": ["everstep.dev/round"]}],
    },
    "figures": {"progress": {"metrics": {"tokens": 512.0}}, "automountServiceAccountToken": False},
    "a command": {"command": ["python", "t.py", "--lr", "0.1", "--steps=100", "--out", "/out", "A=1"]},
    "an option without a value, and the next": {"args": ["--use-auth", "--lr", "0.1"]},
    "sentences": {"message": "2/2 ready; the token of worker 1 was refused: token is expired"},
}


@pytest.mark.parametrize("data", SECRETS.values(), ids=SECRETS)
def test_secret_is_hidden_by_what_it_stands_behind_or_below(data: Any) -> None:
    text = json.dumps(without_values(data))
    assert S not in text
    assert "1223334444" not in text


@pytest.mark.parametrize("data", READABLE.values(), ids=READABLE)
def test_what_names_a_thing_stays_readable(data: Any) -> None:
    assert without_values(data) == data
