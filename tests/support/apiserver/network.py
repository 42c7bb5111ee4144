"""A network between the operator's client and the API server that a test can break."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit


class Network:
    """A TCP proxy before the API server. Cut: connections break, none is accepted. Frozen: open, and silent."""

    def __init__(self, kubeconfig: Path, folder: Path) -> None:
        config = json.loads(kubeconfig.read_text())
        target = urlsplit(config["clusters"][0]["cluster"]["server"])
        assert target.hostname is not None
        assert target.port is not None
        self._host, self._port = target.hostname, target.port
        self._config = config
        self.kubeconfig = folder / "through-network"
        self._cut = False
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    async def start(self, host: str = "127.0.0.1") -> int:
        """The port of `host` at which the API server is now. `kubeconfig` names an IPv4 address alone."""
        self._server = await asyncio.start_server(self._serve, host, 0)
        port = int(self._server.sockets[0].getsockname()[1])
        self._config["clusters"][0]["cluster"]["server"] = f"https://{host}:{port}"
        self.kubeconfig.write_text(json.dumps(self._config))
        return port

    async def stop(self) -> None:
        self.cut()
        assert self._server is not None
        self._server.close()

    def cut(self) -> None:
        self._cut = True
        self._flowing.set()
        for writer in self._writers:
            writer.transport.abort()

    def freeze(self) -> None:
        self._flowing.clear()

    def heal(self) -> None:
        self._cut = False
        self._flowing.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._cut:
            writer.transport.abort()
            return
        with suppress(OSError):
            there_reader, there_writer = await asyncio.open_connection(self._host, self._port)
            self._writers |= {writer, there_writer}
            await asyncio.gather(self._pump(reader, there_writer), self._pump(there_reader, writer))
            self._writers -= {writer, there_writer}

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(65536):
                await self._flowing.wait()
                writer.write(data)
                await writer.drain()
        writer.close()
