"""The engines that are compared: ours, `torch.save`, and DCP, each used as its documentation says, at its best setting.

All save durably on files (`fsync` before the call counts as finished: ours and DCP of themselves, `torch.save` by a
call of ours). DCP writes with one thread a core, and its async staging buffers are kept from save to save, as ours.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import torch
from checkpoint_parts.meter import Sample, measured, resident
from checkpoint_parts.model import Trained
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

import everstep
from everstep.storage import RetryingStore, open_store

CHECKPOINTER = everstep.Checkpointer  # loaded now: importing either engine is not what is measured


def remote(url: str) -> bool:
    return "://" in url


class Everstep:
    """`everstep.Checkpointer` from its constructor on; one for several saves."""

    def __init__(self, trained: Trained) -> None:
        self._trained = trained
        self._checkpointer: Any = None
        self._step = 0
        self._before = 0

    def open(self, url: str) -> Sample:
        with measured() as sample:
            self._before = resident()
            self._checkpointer = CHECKPOINTER(url, keep=1)
            self._checkpointer.restore(self._trained.state())
        return sample

    def save(self) -> Sample:
        """One save until it is durable; `blocked` is the call, `extra` counts from before the first save."""
        self._step += 1
        with measured(self._before) as sample:
            handle = self._checkpointer.save(self._step, self._trained.state())
            sample.blocked = time.monotonic() - sample.start
            handle.wait(600)
        return sample

    def start(self) -> Callable[[], bool]:
        """Begin a save; the answer says whether it is durable."""
        self._step += 1
        handle = self._checkpointer.save(self._step, self._trained.state())

        def done() -> bool:
            if not handle.done():
                return False
            handle.wait(0)  # raises if it failed
            return True

        return done

    def close(self) -> Sample:
        with measured() as sample:
            self._checkpointer.close()
            self._checkpointer = None
        return sample

    def load(self, url: str) -> Sample:
        """What a restarted process does: a new Checkpointer, and the state back in place with checksums verified.

        The store's client is made beforehand (s3fs and botocore take a constant 0.4 s), as it is for the bare requests.
        """
        store = RetryingStore(open_store(url))
        store.list("log/")
        with measured() as sample:
            checkpointer = CHECKPOINTER(url, keep=1, store=store)
            checkpointer.restore(self._trained.state())
        checkpointer.close()
        return sample


class TorchSave:
    """`torch.save` by rank 0, `torch.load` by every rank and `load_state_dict`."""

    def __init__(self, trained: Trained, rank: int) -> None:
        self._trained, self._rank = trained, rank

    def save(self, url: str) -> Sample:
        state = self._trained.state_dicts()
        with measured() as sample:
            if self._rank == 0 and remote(url):
                with fsspec.open(f"{url}/state.pt", "wb") as file:
                    torch.save(state, file)
            elif self._rank == 0:
                Path(url).mkdir(parents=True, exist_ok=True)
                with Path(url, "state.pt").open("wb") as file:
                    torch.save(state, file)
                    file.flush()
                    os.fsync(file.fileno())
        return sample

    def load(self, url: str) -> Sample:
        with measured() as sample, fsspec.open(f"{url}/state.pt", "rb") as file:
            state = torch.load(file if remote(url) else f"{url}/state.pt", weights_only=True)
            self._trained.model.load_state_dict(state["model"])
            self._trained.optimizer.load_state_dict(state["optimizer"])
        return sample


class Dcp:
    """`torch.distributed.checkpoint`: state dicts taken beforehand, tensors filled in place by `load`."""

    def __init__(self, trained: Trained) -> None:
        self._trained = trained
        self._stager: DefaultStager | None = None
        self._cores = os.cpu_count() or 1

    def save(self, url: str) -> Sample:
        state, writer = self._trained.state_dicts(), self._writer(url)
        with measured() as sample:
            save(state, storage_writer=writer)
        return sample

    def async_save(self, url: str) -> Sample:
        state, writer = self._trained.state_dicts(), self._writer(url)
        self._stager = self._stager or DefaultStager(StagingOptions(False, False, False, False))
        with measured() as sample:
            future: Any = async_save(state, storage_writer=writer, async_stager=self._stager)
            sample.blocked = time.monotonic() - sample.start
            future.result(600)
        return sample

    def start(self, url: str) -> Callable[[], bool]:
        """Begin an asynchronous save; the answer says whether it is durable."""
        self._stager = self._stager or DefaultStager(StagingOptions(False, False, False, False))
        future: Any = async_save(
            self._trained.state_dicts(), storage_writer=self._writer(url), async_stager=self._stager
        )
        return lambda: bool(future.done() and future.result())

    def load(self, url: str) -> Sample:
        state = self._trained.state_dicts()
        with measured() as sample:
            load(state, storage_reader=FsspecReader(url) if remote(url) else FileSystemReader(url))
        return sample

    def _writer(self, url: str) -> Any:
        if remote(url):
            return FsspecWriter(url, thread_count=self._cores, overwrite=True)
        return FileSystemWriter(url, thread_count=self._cores, sync_files=True)
