"""Libraries of stores and of data: urllib3, s3fs, gcsfs and litdata. Torch is not imported for them."""

from __future__ import annotations

import types
from importlib import import_module
from typing import Any


class OpensItself:
    """A base beside one of urllib3's classes of connections: `opened(host)` makes the socket in place of urllib3's own
    way. `host`: the name to look up, with its final dot if it has one."""

    def opened(self, host: str) -> Any:
        raise NotImplementedError

    def _new_conn(self) -> Any:
        mine: Any = self
        return self.opened(mine._dns_host)


def innermost(response: Any) -> Any:
    """The response of http.client that one of urllib3 wraps; itself if it wraps none. urllib3's own `readinto` makes
    bytes and copies them."""
    return getattr(response, "_fp", response)


def request_once(gcs: Any) -> None:
    """Let a `GCSFileSystem` send each request once. It would repeat it six times, up to half a minute."""
    once = getattr(type(gcs)._request, "__wrapped__", None)
    if once is not None:
        gcs._request = types.MethodType(once, gcs)


def path_of(filesystem: Any, url: str) -> str:
    """The URL without its protocol, as this file system of fsspec names it."""
    return str(filesystem._strip_protocol(url))


def endpoint_of(gcs: Any) -> str:
    """The URL of the service that a `GCSFileSystem` talks to."""
    return str(gcs._location)


async def call_s3(filesystem: Any, method: str, **arguments: Any) -> Any:
    """Call a method of S3's client with the options of an `S3FileSystem`. In its event loop."""
    return await filesystem._call_s3(method, **arguments)


def litdata_serializers() -> Any:
    """litdata's own serializers."""
    return import_module("litdata.streaming.serializers")._get_serializers(None)


def litdata_spec(text: str) -> Any:
    """The structure of litdata's samples, from the text in an index."""
    return import_module("litdata.utilities._pytree").treespec_loads(text)


def litdata_codecs(compression: Any) -> Any:
    """litdata's codecs by name. `compression`: its module."""
    return compression._COMPRESSORS
