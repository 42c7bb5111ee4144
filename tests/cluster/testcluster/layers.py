"""The bytes of a docker image's config and layers, exactly as their digests say.

`docker save` can only give an image whole, which takes half a minute for one with torch inside. dockerd keeps beside
each layer what it needs to write the layer's archive again (the format of github.com/vbatts/tar-split); where that can
be read, only the layers asked for are read. Both ways check every digest.
"""

import base64
import gzip
import hashlib
import json
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path

from testcluster.proc import ClusterError, CommandError, run

CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Image:
    """A docker image: its id (the digest of its config) and the digests of its unpacked layers, lowest first."""

    name: str
    id: str
    layers: tuple[str, ...]

    def chain_ids(self) -> list[str]:
        """One id for each stack of layers from the bottom up (OCI image-spec, config.md, "Layer ChainID")."""
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


def inspect(tag: str) -> Image:
    try:
        described = json.loads(run("docker", "image", "inspect", tag))[0]
    except CommandError as error:
        raise ClusterError(f"no image {tag} in docker: build it first") from error
    return Image(full_name(tag), described["Id"], tuple(described["RootFS"]["Layers"]))


def _hex(digest: str) -> str:
    return digest.removeprefix("sha256:")


def _reassemble(layer: Path, root: Path, out: Path) -> str:
    """Write the layer's archive to `out`; returns its digest. Headers and padding are segments, files are on disk."""
    content = root / "overlay2" / (layer / "cache-id").read_text().strip() / "diff"
    total = hashlib.sha256()
    with gzip.open(layer / "tar-split.json.gz", "rt") as entries, out.open("wb") as sink:

        def put(data: bytes) -> None:
            total.update(data)
            sink.write(data)

        for line in entries:
            entry = json.loads(line)
            if entry["type"] == 2:
                put(base64.b64decode(entry["payload"]))
            elif entry.get("size"):
                name = entry.get("name") or base64.b64decode(entry["name_raw"]).decode(errors="surrogateescape")
                with (content / name).open("rb") as source:
                    while chunk := source.read(CHUNK):
                        put(chunk)
    return f"sha256:{total.hexdigest()}"


def from_store(image: Image, wanted: set[str], folder: Path) -> dict[str, int]:
    """As `fetch`, out of dockerd's own folder. Raises `OSError` or `ValueError` where that is not to be read so."""
    root_text, driver = run("docker", "info", "--format", "{{.DockerRootDir}} {{.Driver}}").split()
    if driver != "overlay2":
        raise ValueError(f"storage driver {driver}")
    root = Path(root_text)
    store = root / "image" / driver
    config = (store / "imagedb/content/sha256" / _hex(image.id)).read_bytes()
    (folder / _hex(image.id)).write_bytes(config)
    sizes = {image.id: len(config)}
    for digest, chain_id in zip(image.layers, image.chain_ids(), strict=True):
        layer = store / "layerdb/sha256" / _hex(chain_id)
        if digest not in wanted:
            # dockerd counts files' bytes here, not the archive's; nobody who leaves the layer out reads its size
            sizes[digest] = int((layer / "size").read_text())
            continue
        archive = folder / _hex(digest)
        if _reassemble(layer, root, archive) != digest:
            archive.unlink()
            raise ValueError(f"layer {digest} came out different")
        sizes[digest] = archive.stat().st_size
    return sizes


def from_save(image: Image, tag: str, wanted: set[str], folder: Path) -> dict[str, int]:
    """As `fetch`, out of `docker save`: always right, and as slow as the image is big."""
    sizes: dict[str, int] = {}
    part = folder / "part"
    with (
        subprocess.Popen(["docker", "save", tag], stdout=subprocess.PIPE) as saver,
        tarfile.open(fileobj=saver.stdout, mode="r|") as stream,
    ):
        for member in stream:
            source = stream.extractfile(member) if member.isfile() else None
            if source is None:
                continue
            total = hashlib.sha256()
            with part.open("wb") as sink:
                while chunk := source.read(CHUNK):
                    total.update(chunk)
                    sink.write(chunk)
            digest = f"sha256:{total.hexdigest()}"
            sizes[digest] = member.size
            if digest in wanted or digest == image.id:
                part.rename(folder / _hex(digest))
    part.unlink(missing_ok=True)
    absent = sorted({image.id, *image.layers} - sizes.keys())
    if absent:
        raise ClusterError(f"`docker save {tag}` left out {', '.join(absent)}")
    return sizes


def fetch(image: Image, tag: str, wanted: set[str], folder: Path) -> dict[str, int]:
    """Put the config and the `wanted` layers into `folder`, named by digest; returns every blob's size in bytes."""
    try:
        return from_store(image, wanted, folder)
    except (OSError, ValueError, KeyError):
        return from_save(image, tag, wanted, folder)
