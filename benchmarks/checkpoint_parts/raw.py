"""The least that the same bytes can cost: a warm copy, bare writes, bare HTTP requests. No format, no checksum.

The source is one warm, page-aligned buffer, reused as often as the bytes need. Files are synced, and their folder too,
as an engine that promises durability must. The S3 client is `http.client` on presigned URLs over kept connections:
no signing, hashing or copying of bodies.
"""

from __future__ import annotations

import ctypes
import http.client
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

BUFFER = 256 * 2**20
BLOCK = 8 * 2**20
PART = 16 * 2**20
CONNECTIONS = 4


class Raw:
    """The references of one rank, whose share is `share` bytes."""

    def __init__(self, share: int, threads: int) -> None:
        self.share, self.threads = share, threads
        size = min(BUFFER, max(BLOCK, share))
        self.source, self.target = _warm(size), _warm(size)

    def copy(self) -> None:
        """Copy the bytes from warm memory to warm memory as libc does, in one thread: on the machines that this was
        measured on, one core fills the memory bus, and torch's own copy on two takes longer."""
        source, target = (ctypes.addressof(ctypes.c_char.from_buffer(m)) for m in (self.source, self.target))
        left = self.share
        while left > 0:
            n = min(left, len(self.source))
            ctypes.memmove(target, source, n)
            left -= n

    def write(self, folder: Path, name: str, *, direct: bool) -> None:
        """Write and sync the bytes as one file a thread."""
        folder.mkdir(parents=True, exist_ok=True)
        together(self.threads, lambda i: self._file(folder / f"{name}-{i}", self.share // self.threads, direct))
        descriptor = os.open(folder, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)

    def read(self, folder: Path, name: str) -> None:
        """Read the files back into warm memory."""

        def one(index: int) -> None:
            with (folder / f"{name}-{index}").open("rb", buffering=0) as file:
                view, at = memoryview(self.target), 0
                while n := file.readinto(view[at : at + BLOCK]):
                    at = (at + n) % len(view)

        together(self.threads, one)

    def _file(self, path: Path, size: int, direct: bool) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | (os.O_DIRECT if direct else 0), 0o644)
        try:
            view = memoryview(self.source)
            for begin in range(0, size, BLOCK):
                at = begin % len(view)
                block = view[at : at + BLOCK]
                if not direct:
                    block = block[: size - begin]
                while block:
                    block = block[os.write(descriptor, block) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def parts(self) -> list[tuple[int, int]]:
        """Where the parts of this rank's object begin and end."""
        return [(begin, min(self.share, begin + PART)) for begin in range(0, self.share, PART)]

    def upload(self, urls: list[str]) -> list[str]:
        """PUT the parts over several connections; their tags."""
        tags = [""] * len(urls)

        def put(connection: http.client.HTTPConnection, url: str, index: int) -> None:
            view = self._part(self.source, index)
            connection.request("PUT", url, view, {"Content-Length": str(len(view))})
            answer = _answer(connection, 200)
            tags[index] = answer.headers["ETag"]
            answer.read()

        _requests(urls, put)
        return tags

    def download(self, url: str) -> None:
        """GET the object by ranges into warm memory."""

        def get(connection: http.client.HTTPConnection, path: str, index: int) -> None:
            begin, end = self.parts()[index]
            connection.request("GET", path, headers={"Range": f"bytes={begin}-{end - 1}"})
            answer, view = _answer(connection, 206), self._part(self.target, index)
            while view:
                n = answer.readinto(view)
                if not n:
                    raise RuntimeError(f"{url}: the answer ended {len(view)} bytes early")
                view = view[n:]
            answer.read()

        _requests([url] * len(self.parts()), get)

    def _part(self, buffer: mmap.mmap, index: int) -> memoryview:
        begin, end = self.parts()[index]
        at = begin % len(buffer)
        return memoryview(buffer)[at : at + end - begin]


def together(threads: int, body: Callable[[int], Any]) -> None:
    """Run `body(0)` to `body(threads - 1)` at once; raises what the first of them raised."""
    errors: list[BaseException] = []

    def call(index: int) -> None:
        try:
            body(index)
        except BaseException as e:
            errors.append(e)

    started = [threading.Thread(target=call, args=(i,)) for i in range(threads)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    if errors:
        raise errors[0]


def _warm(size: int) -> mmap.mmap:
    buffer = mmap.mmap(-1, -(-size // BLOCK) * BLOCK)
    noise = np.random.default_rng(1).integers(0, 256, BLOCK, dtype=np.uint8)
    np.frombuffer(buffer, dtype=np.uint8).reshape(-1, BLOCK)[:] = noise
    return buffer


def _requests(urls: list[str], send: Callable[[http.client.HTTPConnection, str, int], None]) -> None:
    def serve(worker: int) -> None:
        connection = http.client.HTTPConnection(urlsplit(urls[0]).netloc, timeout=60, blocksize=2**20)
        for index in range(worker, len(urls), CONNECTIONS):
            where = urlsplit(urls[index])
            send(connection, f"{where.path}?{where.query}", index)
        connection.close()

    together(min(CONNECTIONS, len(urls)), serve)


def _answer(connection: http.client.HTTPConnection, status: int) -> http.client.HTTPResponse:
    answer = connection.getresponse()
    if answer.status != status:
        raise RuntimeError(f"the store answered {answer.status}: {answer.read(500)!r}")
    return answer
