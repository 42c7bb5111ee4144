"""fsspec file systems on which a file is visible while it is written: in two pieces, with something between them.

`pieces://` renames as sftp does, `refusing://` as smb and hdfs, `silent://` as WebHDFS, which refuses without an error;
`inplace://` cannot rename. Option `between` is called after each piece.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Self

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractFileSystem


class InPieces:
    def __init__(self, opened: Any, between: Callable[[], object]) -> None:
        self._opened = opened
        self._between = between

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._opened.close()

    def write(self, data: bytes) -> None:
        half = len(data) // 2
        self._between()  # the file is there, and empty
        for piece in (data[:half], data[half:]):
            self._opened.write(piece)
            self._opened.flush()
            self._between()


class Pieces(LocalFileSystem):  # type: ignore[misc]  # fsspec has no types
    protocol: str | tuple[str, ...] = "pieces"

    def __init__(self, between: Callable[[], object] = lambda: None, **options: Any) -> None:
        super().__init__(**options)
        self.between = between

    def _open(self, path: Any, mode: str = "rb", block_size: Any = None, **options: Any) -> Any:
        opened = super()._open(path, mode, block_size, **options)
        return InPieces(opened, self.between) if "w" in mode else opened

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(path.removeprefix(f"{cls.protocol}://") if isinstance(path, str) else path)


class Refusing(Pieces):
    protocol = "refusing"

    def mv(self, path1: str, path2: str, **options: Any) -> None:
        if os.path.exists(path2):
            raise OSError("the name is taken")
        super().mv(path1, path2, **options)


class Silent(Pieces):
    protocol = "silent"

    def mv(self, path1: str, path2: str, **options: Any) -> None:
        if not os.path.exists(path2):
            super().mv(path1, path2, **options)


class InPlace(Pieces):
    protocol = "inplace"
    mv = AbstractFileSystem.mv


def register() -> None:
    """Tell fsspec of the schemes."""
    for kind in (Pieces, Refusing, Silent, InPlace):
        fsspec.register_implementation(kind.protocol, kind, clobber=True)
