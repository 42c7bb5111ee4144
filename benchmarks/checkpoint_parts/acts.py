"""What one rank can be asked to do. Every act that is measured returns its `Sample`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import fsspec
from checkpoint_parts.meter import Sample, measured
from checkpoint_parts.model import Trained
from checkpoint_parts.raw import Raw
from checkpoint_parts.subjects import Dcp, Everstep, TorchSave
from checkpoint_parts.training import Run, Training


class Acts:
    """The acts of one rank. `url` is a folder or an `s3://` prefix that no other act has used."""

    def __init__(self, rank: int, ranks: int, size: int, mapped: bool) -> None:
        self._rank, self._ranks = rank, ranks
        self._trained = Trained(size, mapped)
        self._everstep, self._dcp = Everstep(self._trained), Dcp(self._trained)
        self._torch = TorchSave(self._trained, rank)
        self._raw = Raw(self._trained.bytes // ranks, max(1, (os.cpu_count() or 1) // ranks))
        self._training = Training()
        self._right = self._trained.digest()

    def size(self) -> int:
        return self._trained.bytes

    def copy(self) -> Sample:
        with measured() as sample:
            self._raw.copy()
        return sample

    def raw_write(self, url: str, direct: bool) -> Sample:
        with measured() as sample:
            self._raw.write(Path(url), str(self._rank), direct=direct)
        return sample

    def raw_read(self, url: str) -> Sample:
        with measured() as sample:
            self._raw.read(Path(url), str(self._rank))
        return sample

    def raw_upload(self, bucket: str, prefix: str) -> Sample:
        """One object a rank, in parts at once: as any client that writes an object concurrently must."""
        client, where = _client(), {"Bucket": bucket, "Key": f"{prefix}/{self._rank}"}
        upload = client.create_multipart_upload(**where)["UploadId"]
        urls = [
            client.generate_presigned_url("upload_part", Params={**where, "UploadId": upload, "PartNumber": n})
            for n in range(1, len(self._raw.parts()) + 1)
        ]
        with measured() as sample:
            tags = self._raw.upload(urls)
            parts = [{"PartNumber": n, "ETag": tag} for n, tag in enumerate(tags, 1)]
            client.complete_multipart_upload(**where, UploadId=upload, MultipartUpload={"Parts": parts})
        return sample

    def raw_download(self, bucket: str, prefix: str) -> Sample:
        where = {"Bucket": bucket, "Key": f"{prefix}/{self._rank}"}
        url = _client().generate_presigned_url("get_object", Params=where)
        with measured() as sample:
            self._raw.download(url)
        return sample

    def s3fs_upload(self, url: str) -> Sample:
        """The same bytes by s3fs's own call for a whole object."""
        file_system, path = fsspec.core.url_to_fs(f"{url}/{self._rank}")
        data = bytes(self._raw.share)
        with measured() as sample:
            file_system.pipe_file(path, data)
        return sample

    def everstep_open(self, url: str) -> Sample:
        return self._everstep.open(url)

    def everstep_save(self) -> Sample:
        return self._everstep.save()

    def everstep_close(self) -> Sample:
        return self._everstep.close()

    def everstep_load(self, url: str) -> Sample:
        self._trained.spoil()
        return self._checked(self._everstep.load(url), "everstep")

    def torch_save(self, url: str) -> Sample:
        return self._torch.save(url)

    def torch_load(self, url: str) -> Sample:
        self._trained.spoil()
        return self._checked(self._torch.load(url), "torch.load")

    def dcp_save(self, url: str) -> Sample:
        return self._dcp.save(url)

    def dcp_async_save(self, url: str) -> Sample:
        return self._dcp.async_save(url)

    def dcp_load(self, url: str) -> Sample:
        self._trained.spoil()
        return self._checked(self._dcp.load(url), "DCP")

    def train(self, subject: str, url: str, seconds: float, threads: int, saves: int) -> Run | None:
        """A series of steps with saves by `subject`, or with none. `everstep_open` and a save come before."""
        starts = {"none": None, "everstep": self._everstep.start, "dcp": lambda: self._dcp.start(url)}
        return self._training.run(starts[subject], seconds, threads, saves)

    def _checked(self, sample: Sample, who: str) -> Sample:
        found = self._trained.digest()
        if found != self._right:
            raise RuntimeError(f"{who} did not bring back what was saved: digest {found}, {self._right} is right")
        return sample


def _client() -> Any:
    import boto3  # noqa: PLC0415  only the S3 rows need it
    from botocore.config import Config  # noqa: PLC0415

    return boto3.client("s3", config=Config(signature_version="s3v4", s3={"addressing_style": "path"}))
