"""An image's layers, read by either way, are the bytes that its digests name."""

import hashlib
import io
import os
import tarfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from testcluster import layers
from testcluster.proc import ClusterError, run, succeeds


@pytest.mark.parametrize(
    ("tag", "name"),
    [
        ("busybox:1", "docker.io/library/busybox:1"),
        ("everstep/operator:dev", "docker.io/everstep/operator:dev"),
        ("registry.k8s.io/pause:3", "registry.k8s.io/pause:3"),
        ("localhost:5000/a/b:1", "localhost:5000/a/b:1"),
    ],
)
def test_docker_tag_has_the_name_that_containerd_gives_it(tag: str, name: str) -> None:
    assert layers.full_name(tag) == name


def test_chain_id_of_two_layers_is_the_hash_of_both() -> None:
    image = layers.Image("x", "sha256:0", ("sha256:a", "sha256:b"))
    assert image.chain_ids() == ["sha256:a", "sha256:" + hashlib.sha256(b"sha256:a sha256:b").hexdigest()]


@pytest.fixture
def two_layers(tmp_path: Path, kind_cluster: object) -> Iterator[str]:
    """An image of two layers, with a long name and a hole that archives write in their special ways."""
    del kind_cluster  # only so that docker runs
    tag = f"everstep-test/layers:{uuid.uuid4().hex[:8]}"
    with tarfile.open(tmp_path / "root.tar", "w") as tar:
        member = tarfile.TarInfo("etc/" + "long/" * 30 + "name")
        member.size = 70_000
        tar.addfile(member, io.BytesIO(os.urandom(70_000)))
    run("docker", "import", str(tmp_path / "root.tar"), tag)
    context = tmp_path / "context"
    context.mkdir()
    (context / "second").write_bytes(os.urandom(3000))
    (context / "Dockerfile").write_text(f"FROM {tag}\nCOPY second /second\n")
    run("docker", "build", "-t", tag, str(context), env={"DOCKER_BUILDKIT": "0"})
    yield tag
    succeeds("docker", "rmi", tag)


@pytest.mark.kind
def test_layers_from_dockers_store_and_from_save_have_the_bytes_of_their_digests(
    two_layers: str, tmp_path: Path
) -> None:
    image = layers.inspect(two_layers)
    assert len(image.layers) == 2
    for way, folder in (("store", tmp_path / "store"), ("save", tmp_path / "save")):
        folder.mkdir()
        wanted = set(image.layers)
        match way:
            case "store":
                sizes = layers.from_store(image, wanted, folder)
            case _:
                sizes = layers.from_save(image, two_layers, wanted, folder)
        for digest in (image.id, *image.layers):
            data = (folder / digest.removeprefix("sha256:")).read_bytes()
            assert f"sha256:{hashlib.sha256(data).hexdigest()}" == digest
            assert sizes[digest] == len(data)


@pytest.mark.kind
def test_upper_layer_alone_is_fetched_without_the_lower(two_layers: str, tmp_path: Path) -> None:
    image = layers.inspect(two_layers)
    folder = tmp_path / "out"
    folder.mkdir()
    layers.fetch(image, two_layers, {image.layers[1]}, folder)
    assert {path.name for path in folder.iterdir()} == {
        digest.removeprefix("sha256:") for digest in (image.id, image.layers[1])
    }


@pytest.mark.kind
def test_image_that_docker_lacks_is_named_in_the_error(kind_cluster: object) -> None:
    with pytest.raises(ClusterError, match="everstep-test/none:1"):
        layers.inspect("everstep-test/none:1")
