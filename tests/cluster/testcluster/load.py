"""Carry a docker image to the nodes, but only the layers that they lack.

`kind load` sends an image whole: two minutes for one with torch on three nodes. containerd asks for a layer's bytes only
if it has no unpacked snapshot of it, so an archive in OCI layout that leaves those layers out is complete to a node that
has them. What a node has is read from its snapshots, whose keys are the chain ids of the OCI image specification
(image-spec, config.md, "Layer ChainID").
"""

import hashlib
import io
import json
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from testcluster import cache
from testcluster.proc import ClusterError, CommandError, run

LIMIT = 600.0  # seconds for one image on one node
CHUNK = 1 << 20
CTR = ("ctr", "-n", "k8s.io")


@dataclass(frozen=True, slots=True)
class Image:
    """A docker image: its id (the digest of its config) and the digests of its unpacked layers, lowest first."""

    name: str
    id: str
    layers: tuple[str, ...]

    def chain_ids(self) -> list[str]:
        chain: list[str] = []
        for layer in self.layers:
            chain.append(
                layer if not chain else "sha256:" + hashlib.sha256(f"{chain[-1]} {layer}".encode()).hexdigest()
            )
        return chain


def full_name(tag: str) -> str:
    """The name that containerd and Kubernetes know a docker tag by."""
    head, _, rest = tag.partition("/")
    if not rest:
        return f"docker.io/library/{tag}"
    return tag if "." in head or ":" in head or head == "localhost" else f"docker.io/{tag}"


def _inspect(tag: str) -> Image:
    try:
        described = json.loads(run("docker", "image", "inspect", tag))[0]
    except CommandError as error:
        raise ClusterError(f"no image {tag} in docker: build it first") from error
    return Image(full_name(tag), described["Id"], tuple(described["RootFS"]["Layers"]))


def _missing(image: Image, node: str) -> int | None:
    """How many of the upper layers `node` lacks; None if it has this very image under this name."""
    try:
        found = json.loads(run("docker", "exec", node, "crictl", "inspecti", image.name))
        if found["status"]["id"] == image.id and image.name in found["status"]["repoTags"]:
            return None
    except CommandError:
        pass  # crictl's way to say that there is no such image
    keys = {
        line.split()[0] for line in run("docker", "exec", node, *CTR, "snapshots", "ls").splitlines() if line.strip()
    }
    have = 0
    for chain_id in image.chain_ids():
        if chain_id not in keys:
            break
        have += 1
    return len(image.layers) - have


def _spool(image: Image, tag: str, wanted: set[str], folder: Path) -> dict[str, int]:
    """Read `docker save`; leave the wanted blobs in `folder`. Returns the size of every blob by its digest."""
    sizes: dict[str, int] = {}
    with subprocess.Popen(["docker", "save", tag], stdout=subprocess.PIPE) as saver:
        with tarfile.open(fileobj=saver.stdout, mode="r|") as stream:
            for member in stream:
                source = stream.extractfile(member) if member.isfile() else None
                if source is None:
                    continue
                part = folder / "part"
                total = hashlib.sha256()
                with part.open("wb") as sink:
                    while chunk := source.read(CHUNK):
                        total.update(chunk)
                        sink.write(chunk)
                digest = f"sha256:{total.hexdigest()}"
                sizes[digest] = member.size
                if digest in wanted:
                    part.rename(folder / digest.removeprefix("sha256:"))
    absent = sorted(({image.id, *image.layers}) - sizes.keys())
    if absent:
        raise ClusterError(f"`docker save {tag}` left out {', '.join(absent)}")
    return sizes


def _archive(image: Image, sizes: dict[str, int], blobs: Path, out: Path) -> None:
    """An OCI layout of `image` with the blobs at hand, and no others."""

    def descriptor(kind: str, digest: str, size: int) -> dict[str, object]:
        return {"mediaType": f"application/vnd.oci.image.{kind}", "digest": digest, "size": size}

    manifest = json.dumps(
        {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": descriptor("config.v1+json", image.id, sizes[image.id]),
            "layers": [descriptor("layer.v1.tar", layer, sizes[layer]) for layer in image.layers],
        }
    ).encode()
    digest = hashlib.sha256(manifest).hexdigest()
    named = {"io.containerd.image.name": image.name, "org.opencontainers.image.ref.name": image.name}
    entry = descriptor("manifest.v1+json", f"sha256:{digest}", len(manifest)) | {"annotations": named}
    index = json.dumps({"schemaVersion": 2, "manifests": [entry]}).encode()
    with tarfile.open(out, "w") as tar:
        for name, data in (
            ("oci-layout", b'{"imageLayoutVersion": "1.0.0"}'),
            ("index.json", index),
            (f"blobs/sha256/{digest}", manifest),
        ):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
        for blob in sorted(blobs.iterdir()):
            if blob.name != "part":
                tar.add(blob, f"blobs/sha256/{blob.name}")


def _import(node: str, archive: Path) -> None:
    with archive.open("rb") as data:
        done = subprocess.run(
            ["docker", "exec", "-i", node, *CTR, "images", "import", "--all-platforms", "--snapshotter", "overlayfs", "-"],
            stdin=data, capture_output=True, timeout=LIMIT, check=False,
        )  # fmt: skip
    if done.returncode != 0:
        raise ClusterError(f"node {node} refused the image: {done.stderr.decode(errors='replace')[-2000:]}")


def load(tag: str, nodes: Sequence[str]) -> None:
    """Make docker's image `tag` startable on each of `nodes` (containers of kind nodes)."""
    began = time.monotonic()
    image = _inspect(tag)
    with ThreadPoolExecutor(8) as pool:
        missing = dict(zip(nodes, pool.map(lambda node: _missing(image, node), nodes), strict=True))
        behind = {node: count for node, count in missing.items() if count is not None}
        if not behind:
            cache.say(time.monotonic() - began, f"load {tag}", "skipped, every node has it")
            return
        layers = max(behind.values())
        wanted = {image.id, *image.layers[len(image.layers) - layers :]}
        with tempfile.TemporaryDirectory(dir=cache.root()) as folder:
            blobs = Path(folder) / "blobs"
            blobs.mkdir()
            sizes = _spool(image, tag, wanted, blobs)
            archive = Path(folder) / "image.tar"
            _archive(image, sizes, blobs, archive)
            size = archive.stat().st_size / 1e6
            list(pool.map(lambda node: _import(node, archive), behind))
    cache.say(time.monotonic() - began, f"load {tag}", f"{layers} layers, {size:.1f} MB to {len(behind)} nodes")
