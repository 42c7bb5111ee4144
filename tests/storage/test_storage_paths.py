"""A URL that is no URL: it is meant as a folder, or refused with what to write instead. No folder is named `s3:`."""

from pathlib import Path
from urllib.parse import quote

import pytest

from everstep.storage import AlreadyExists, StorageError, StoreUnusable, open_store


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("s3:/bucket/run", "s3://bucket/run"),
        ("gs:bucket/run", "gs://bucket/run"),
        ("az:/container", "az://container"),
        ("file:/data/run", "file:///data/run"),
        ("file:data/run", "file:///"),
        ("dbfs:/run", "/dbfs/run"),
        ("run:1/x", r"\./run:1/x"),
        ("$HOME/x", r"\$HOME.*environment variable"),
        ("/data/${RUN}/x", r"\$\{RUN\}.*environment variable"),
        ("file:///data/$RUN", "%24RUN"),
        ("file://$HOME/x", "absolute path"),
        ("~nobody-of-this-name/x", "~nobody-of-this-name.*home"),
        (" /data/x", "blank"),
        ("/data/x\n", "blank"),
        ("s3://bucket/x\n", "blank"),
        ("minio:9000/bucket", "host with a port.*s3://BUCKET/FOLDER"),
        ("localhost:9000", "http://localhost:9000"),
        ("10.0.0.5:9000/bucket", "host with a port"),
        ("[::1]:9000", "host with a port"),
        ("https://host/run?token=1", r"has a query.*params.*%3F"),
        ("http://host/run#top", r"has a fragment.*%23"),
        ("file://host/data", "absolute path"),
    ],
)
def test_url_that_nobody_can_mean_as_a_folder_is_refused_with_what_to_write(url: str, says: str) -> None:
    with pytest.raises(StoreUnusable, match=says):
        open_store(url)


def test_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_store("~/x").url == f"file://{tmp_path}/x"
    assert open_store("~").url == f"file://{tmp_path}"


def test_scheme_has_no_case_and_localhost_is_this_machine() -> None:
    for url in ("FILE:///data/x", "File://localhost/data/x", "file://LOCALHOST/data/x"):
        assert open_store(url).url == "file:///data/x"
    assert open_store("S3://bucket/Run").url == "s3://bucket/Run"
    assert open_store("GS://bucket/x").url == "gs://bucket/x"


@pytest.mark.parametrize("below", ["", "/run"])
def test_file_in_place_of_a_folder_is_refused_and_not_taken_for_an_empty_one(tmp_path: Path, below: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"x")
    with pytest.raises(StoreUnusable, match=r"model\.safetensors.*is a file or lies below one: give the folder"):
        open_store(f"{tmp_path}/model.safetensors{below}").list()


@pytest.mark.parametrize("place", ["", "/log"])
@pytest.mark.parametrize("what", ["file", "dangling link", "link to itself"])
def test_what_is_no_folder_in_a_folders_place_is_named_and_is_no_taken_name(
    tmp_path: Path, place: str, what: str
) -> None:
    store = open_store(f"{tmp_path}/run")
    taken = tmp_path / f"run{place}"
    taken.parent.mkdir(exist_ok=True)
    match what:
        case "file":
            taken.write_bytes(b"x")
        case "dangling link":
            taken.symlink_to(tmp_path / "nothing")
        case _:
            taken.symlink_to(taken)
    for write in (store.create, store.put):
        with pytest.raises(StorageError, match=rf"{taken} is a file, or a link to no folder") as caught:
            write("log/000000000000.json", b"x")
        assert not isinstance(caught.value, AlreadyExists)


def test_folders_with_such_characters_can_still_be_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in ("./run:1", "runs/10:30", "2026-01-01T10:00", "./~x", "a~b", "cost$", "with space/x"):
        store = open_store(path)
        store.create("a", b"1")
        assert (tmp_path / path / "a").read_bytes() == b"1"
    assert open_store(f"file://{quote('/data/$RUN')}").url == "file:///data/$RUN"
