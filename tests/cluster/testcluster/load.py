"""Carry a docker image to the nodes, but only the layers that they lack.

`kind load` sends an image whole: two minutes for one with torch on three nodes. containerd asks for a layer's bytes
only if it has no unpacked snapshot of it, so an archive in OCI layout that leaves those layers out is complete to a
node that has them. What a node has is read from its snapshots, whose keys are the chain ids of the image's layers.
"""

import hashlib
import io
import json
import re
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from testcluster import cache, layers
from testcluster.layers import Image
from testcluster.proc import ClusterError, CommandError, run

LIMIT = 600.0  # seconds for one image on one node
ATTEMPTS = 3
# As ctr says it: before the import has come to the layer, or just then.
COLLECTED = re.compile(r"content digest \S+: not found|parent snapshot \S+ does not exist")


class _LayerCollected(ClusterError):
    """A node had a layer when it was asked, and no longer when the image came: that of an image whose tag has moved
    is collected."""


CTR = ("ctr", "-n", "k8s.io")


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
            tar.add(blob, f"blobs/sha256/{blob.name}")


def _import(image: Image, node: str, archive: Path) -> None:
    with archive.open("rb") as data:
        done = subprocess.run(
            ["docker", "exec", "-i", node, *CTR, "images", "import", "--snapshotter", "overlayfs", "-"],
            stdin=data, capture_output=True, timeout=LIMIT, check=False,
        )  # fmt: skip
    if done.returncode != 0:
        # The name comes before the layers: without this the node would count as having the image.
        subprocess.run(["docker", "exec", node, *CTR, "images", "rm", image.name], capture_output=True, check=False)
        said = done.stderr.decode(errors="replace")[-2000:]
        raise (_LayerCollected if COLLECTED.search(said) else ClusterError)(f"node {node} refused the image: {said}")


def load(tag: str, nodes: Sequence[str]) -> None:
    """Make docker's image `tag` startable on each of `nodes` (containers of kind nodes)."""
    for left in reversed(range(ATTEMPTS)):
        try:
            return _load(tag, nodes)
        except _LayerCollected:
            if not left:
                raise


def _load(tag: str, nodes: Sequence[str]) -> None:
    began = time.monotonic()
    image = layers.inspect(tag)
    with ThreadPoolExecutor(8) as pool:
        missing = dict(zip(nodes, pool.map(lambda node: _missing(image, node), nodes), strict=True))
        behind = {node: lacks for node, lacks in missing.items() if lacks is not None}
        if not behind:
            cache.say(time.monotonic() - began, f"load {tag}", "skipped, every node has it")
            return
        count = max(behind.values())
        wanted = set(image.layers[len(image.layers) - count :])
        with tempfile.TemporaryDirectory(dir=cache.root()) as folder:
            blobs = Path(folder) / "blobs"
            blobs.mkdir()
            sizes = layers.fetch(image, tag, wanted, blobs)
            archive = Path(folder) / "image.tar"
            _archive(image, sizes, blobs, archive)
            size = archive.stat().st_size / 1e6
            list(pool.map(lambda node: _import(image, node, archive), behind))
    cache.say(time.monotonic() - began, f"load {tag}", f"{count} layers, {size:.1f} MB to {len(behind)} nodes")
