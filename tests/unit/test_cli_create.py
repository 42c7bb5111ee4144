"""`everstep init`: what it writes is a TrainingJob that the operator takes, whatever the names and arguments."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from everstep.cli.jobs import create
from everstep.jobs.source import JobError
from everstep_operator.api.parse import parse_spec

TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)


def init(*arguments: str) -> str:
    done = CliRunner().invoke(create.app, arguments)
    if done.exception is not None:
        raise done.exception
    return done.output


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("init") / "Train_2b.py"
    path.write_text("print(1)\n")
    return path


@settings(max_examples=60, deadline=None)
@given(
    arguments=st.lists(TEXTS, max_size=4),
    workers=st.integers(1, 9),
    below=st.integers(0, 8),
    above=st.integers(0, 8),
    elastic=st.booleans(),
    gpus=st.integers(0, 8),
    secret=st.sampled_from(["", "s3-credentials"]),
)
def test_the_job_is_one_that_the_operator_takes_and_starts_the_script_with_its_arguments(
    script: Path, arguments: list[str], workers: int, below: int, above: int, elastic: bool, gpus: int, secret: str
) -> None:
    bounds = [f"--elastic={max(1, workers - below)}:{workers + above}"] if elastic else []
    options = [f"--workers={workers}", f"--gpus={gpus}", f"--secret={secret}", *bounds]
    manifest = yaml.safe_load(init(str(script), "--print", *options, "--", *arguments))
    assert manifest["metadata"] == {"name": "train-2b"}
    (container,) = manifest["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["everstep-run", "Train_2b.py", *arguments]
    spec = parse_spec(manifest["spec"])
    assert spec.replicas == workers
    assert (spec.elastic is not None) == elastic
    assert container["resources"].get("limits", {}).get("nvidia.com/gpu", 0) == gpus


def test_two_files_are_written_beside_the_script_and_none_is_ever_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "my project"
    folder.mkdir()
    (folder / "train.py").write_text("")
    (folder / "requirements.txt").write_text("numpy\n")
    printed = init(str(folder / "train.py"), "--image", "r.example/train:1", "--checkpoint", "s3://mine/train")
    assert f"docker build -t r.example/train:1 {shlex.quote(str(folder))}" in printed
    assert "put your own" not in printed
    assert "pip install --no-cache-dir -r requirements.txt" in (folder / "Dockerfile").read_text()
    (folder / "job.yaml").unlink()
    with pytest.raises(JobError, match=r"Dockerfile is there already: move it, or take --print"):
        init(str(folder / "train.py"))
    assert not (folder / "job.yaml").exists(), "nothing half-done"
    assert "put your own in the place of REGISTRY/NAME:TAG and BUCKET" in init(str(tmp_path / _other(tmp_path)))


def _other(tmp_path: Path) -> str:
    (tmp_path / "other.py").write_text("")
    return "other.py"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["none.py"], "none.py: there is no such file"),
        (["--spares", "1"], "--spares 1 needs --elastic MIN:MAX"),
        (["--elastic", "3"], "--elastic 3: give the fewest and the most pods, as in 2:4"),
        (["--elastic", "3:4"], "--elastic 3:4: --workers 2 has to be from the fewest to the most"),
        (["--elastic", "0:4"], "1 at least"),
        (["--name", "Big"], "'Big' is no name of at most 48"),
    ],
)
def test_what_cannot_be_used_is_refused_and_nothing_is_written(
    arguments: list[str], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    with pytest.raises(JobError) as refused:
        init(*(arguments if arguments[0].endswith(".py") else ["train.py", *arguments]))
    assert problem in str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
