"""`everstep ckpt` through its entry point, as a person and as a script meet it; processes of its own, begun warm."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import everstep
from everstep.storage import open_store
from support.processes.warm_python import warm

pytestmark = pytest.mark.timeout(180)


def ckpt(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, **environment}
    return warm().run("-m", "everstep.cli.main", "ckpt", *arguments, timeout=90, env=variables)


def done(*arguments: str | Path) -> str:
    result = ckpt(*arguments)
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout


@pytest.fixture
def url(tmp_path: Path, runs: Any) -> str:
    """Commits of steps 10, 20 and 30 with a model, an optimizer and random generators."""
    url = str(tmp_path / "store")
    model = torch.nn.Linear(4, 3)
    state: dict[str, Any] = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), momentum=0.9),
        "a/b": torch.zeros(2),
    }
    model(torch.randn(2, 4)).sum().backward()
    state["optimizer"].step()  # type: ignore[union-attr]
    with everstep.Checkpointer(url, on_event=lambda kind, **_: None) as checkpointer:
        checkpointer.restore({**state, "rng": everstep.RngState()})
        for step in (10, 20, 30):
            checkpointer.save(step, {**state, "rng": everstep.RngState()}).wait(30)
    return url


def shards(url: str) -> list[Path]:
    return sorted(Path(url).glob("data/*/*.safetensors"))


def test_ls_shows_the_commits_newest_first_and_json_has_the_same(url: str) -> None:
    lines = done("ls", url).splitlines()
    assert lines[0].split() == ["STEP", "RECORD", "SIZE", "WORLD", "COMMITTED", "STATE"]
    assert [line.split()[:2] for line in lines[1:]] == [["30", "3"], ["20", "2"], ["10", "1"]]
    found = json.loads(done("ls", url, "--json"))
    assert [(f["step"], f["pinned"], f["missing"]) for f in found] == [
        (30, False, []),
        (20, False, []),
        (10, False, []),
    ]
    assert found[0]["bytes"] == shards(url)[-1].stat().st_size


def test_show_tells_what_is_in_a_commit(url: str) -> None:
    told = done("show", url, "--step", "20", "--tensors")
    assert "step 20  record 2" in told
    for words in (["2", "60", "B", "model", "module"], ["60", "B", "0.weight"][:2]):
        assert any(all(w in line.split() for w in words) for line in told.splitlines()), words
    assert any(line.split()[-2:] == ["[3,", "4]"] for line in told.splitlines())
    body = json.loads(done("show", url, "--json"))
    assert (body["step"], body["n"]) == (30, 3)
    assert {k["key"]: k["kind"] for k in body["keys"]} == {
        "model": "module", "optimizer": "stateful", "a/b": "value", "rng": "stateful, each rank's own",
    }  # fmt: skip


def test_verify_names_the_damaged_file_and_fails(url: str) -> None:
    assert done("verify", url).startswith("step 30  record 3  whole")
    damaged = shards(url)[1]
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 0x10
    damaged.write_bytes(data)
    assert ckpt("verify", url, "--step", "10").returncode == 0
    result = ckpt("verify", url, "--all")
    assert result.returncode == 1
    assert [line.split()[:5:4] for line in result.stdout.splitlines() if line.startswith("step")] == [
        ["step", "whole"], ["step", "damaged"], ["step", "whole"]
    ]  # fmt: skip
    assert f"data/{damaged.parent.name}/{damaged.name}: chunk 0 fails its checksum" in result.stdout
    told = json.loads(ckpt("verify", url, "--record", "2", "--json").stdout)
    assert len(told[0]["problems"]) == 1


@pytest.mark.long
def test_pinned_commit_survives_gc_until_it_is_unpinned(url: str) -> None:
    assert done("pin", url, "--step", "10") == "step 10 (record 1) is pinned\n"
    assert "pinned" in done("ls", url)
    would = done("gc", url, "--keep", "1", "--dry-run")
    assert would.count("would delete") == 1
    assert len(shards(url)) == 3
    assert done("gc", url, "--keep", "1").count("deleted") == 1
    assert [f["step"] for f in json.loads(done("ls", url, "--json"))] == [30, 10]
    assert done("unpin", url, "--step", "10") == "step 10 (record 1) is not pinned\n"
    assert len(json.loads(done("gc", url, "--keep", "1", "--json"))) == 1
    assert done("gc", url, "--keep", "1") == "nothing to delete\n"


@pytest.mark.long
def test_tagged_commit_survives_gc_and_is_found_by_its_tag(url: str) -> None:
    assert done("tag", url, "good", "--step", "10") == "step 10 (record 1) is tagged good\n"
    assert "tag good" in done("ls", url)
    assert done("gc", url, "--keep", "1").count("deleted") == 1
    assert done("verify", url, "--tag", "good").startswith("step 10  record 1  whole")
    assert json.loads(done("ls", url, "--json"))[1]["tags"] == ["good"]
    refused = ckpt("show", url, "--tag", "god")
    assert (refused.returncode, "no commit is tagged 'god'; there are good" in refused.stderr) == (2, True)
    assert done("untag", url, "good") == "no commit is tagged good\n"
    assert done("gc", url, "--keep", "1").count("deleted") == 1
    assert ckpt("tag", url, "a/b").returncode == 1


@pytest.mark.long
def test_restore_makes_a_log_that_a_run_goes_on_from(url: str, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    assert done("restore", url, copy, "--step", "20").startswith("step 20: ")
    assert json.loads(done("ls", copy, "--json"))[0]["step"] == 20
    assert done("verify", copy).startswith("step 20  record 1  whole")
    into = {"a/b": torch.ones(2)}
    assert everstep.Checkpointer(str(copy), on_event=lambda kind, **_: None).restore(into) == 20
    assert into["a/b"].tolist() == [0.0, 0.0]
    again = ckpt("restore", url, copy)
    assert again.returncode == 1
    assert "holds a log of 3 records already; give an empty folder" in again.stderr


def test_export_writes_files_for_other_tools(url: str, tmp_path: Path) -> None:
    assert "model.safetensors" in done("export", url, tmp_path / "out")
    assert load_file(tmp_path / "out" / "model.safetensors")["weight"].shape == (3, 4)


@pytest.mark.long_but("arguments10-3-/proc")
@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["show", "{url}", "--step", "11"], 2, "no commit of step 11; there are steps 30, 20, 10"),
        (["show", "{url}", "--record", "0"], 2, "record 0 is no commit"),
        (["verify", "{empty}"], 2, "there is no commit"),
        (["ls", "nothing://x/y"], 3, "unknown scheme 'nothing'"),
        (["ls", ""], 3, "no checkpoint URL"),
        (["ls", "http://127.0.0.1:1/x"], 3, "Cannot connect to host"),
        (["ls", "file://relative"], 3, "absolute path"),
        (["ls", "/proc/version"], 3, "/proc/version: is a file or lies below one: give the folder"),
        (["ls", "{empty}"], 1, "/empty: there is no checkpoint log there"),
        (["pin", "/proc/everstep"], 2, "there is no commit"),
        (["restore", "{url}", "/proc/everstep"], 3, "/proc"),
        (["ls", "{url}", "--storage-option", "key"], 2, "expected NAME=VALUE"),
        (["gc", "{url}"], 2, "--keep"),
        (["ls", "s3://user:hunter2@127.0.0.1:1/x", "--storage-option", "secret=hunter2"], 3, "127.0.0.1"),
    ],
)
def test_what_is_wrong_is_one_line_and_an_exit_code(
    arguments: list[str], code: int, text: str, url: str, tmp_path: Path
) -> None:
    result = ckpt(
        *[a.format(url=url, empty=tmp_path / "empty") for a in arguments], AWS_ENDPOINT_URL="http://127.0.0.1:1"
    )
    told = result.stdout + result.stderr
    assert (result.returncode, text in told) == (code, True), told
    assert "Traceback" not in told
    assert "hunter2" not in told


@pytest.mark.long
def test_looking_needs_no_torch(url: str) -> None:
    code = (
        "import sys; sys.modules['torch'] = None; sys.argv = ['everstep', 'ckpt', 'verify', sys.argv[1]];"
        "from everstep.cli.main import main; main()"
    )
    result = subprocess.run([sys.executable, "-c", code, url], capture_output=True, text=True, check=False, timeout=90)
    assert (result.returncode, result.stderr) == (0, "")
    export = code.replace("'verify', sys.argv[1]", "'export', sys.argv[1], sys.argv[1] + '/out'")
    result = subprocess.run(
        [sys.executable, "-c", export, url], capture_output=True, text=True, check=False, timeout=90
    )
    told = "everstep: the package torch is missing: pip install 'everstep[worker]'\n"
    assert (result.returncode, result.stderr) == (3, told)


def test_commands_work_on_an_object_store(s3_server: Any, runs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3_server.env.items():
        monkeypatch.setenv(name, value)
    url = f"s3://{s3_server.bucket('everstep-ckpt')}/run"
    runs(open_store(url)).save(1, 2)
    assert [f["step"] for f in json.loads(done("ls", url, "--json"))] == [2, 1]
    done("pin", url, "--step", "1")
    done("gc", url, "--keep", "1")
    assert done("verify", url, "--all").count("whole") == 2
    done("restore", url, f"{url}-copy")
    assert done("verify", f"{url}-copy").count("whole") == 1


@pytest.mark.parametrize("command", [("ls",), ("ls", "--json"), ("verify", "--all"), ("gc", "--keep", "1")])
def test_log_that_does_not_exist_is_no_success(command: tuple[str, ...], tmp_path: Path) -> None:
    result = ckpt(command[0], tmp_path / "nowhere", *command[1:])
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith(f"everstep: {tmp_path}/nowhere: there is no checkpoint log there; look for")
    assert not (tmp_path / "nowhere").exists()


def test_log_without_a_commit_is_there(tmp_path: Path) -> None:
    run = everstep.Checkpointer(str(tmp_path), on_event=lambda kind, **_: None)
    run.restore({"epoch": 0})
    run.close()
    assert done("ls", tmp_path) == f"no commits below {tmp_path}\n"
