"""A headless Chromium, driven by its DevTools protocol: a tab, its size, its keys, and what its scripts see.

It needs Debian's package chromium: `apt-get install chromium`.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import shutil
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

SECONDS = 60.0  # for a start, an answer, a page: the machine may be busy
KEYS = {"Tab": 9, "Enter": 13}


class BrowserError(Exception):
    """The browser is missing, or did not do what it was to do."""


def program() -> str:
    """Raises `BrowserError` with what to install."""
    path = shutil.which("chromium")
    if path is None:
        raise BrowserError("chromium is not installed: apt-get install chromium")
    return path


class Tab:
    """`problems`: what the page's console said was wrong, blocked scripts and styles among it."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self.problems: list[str] = []

    async def listen(self) -> None:
        async for message in self._socket:
            body = json.loads(message.data)
            if "id" in body:
                waiting = self._waiting.pop(body["id"], None)
                if waiting is None:
                    continue
                if "error" in body:
                    waiting.set_exception(BrowserError(body["error"]["message"]))
                else:
                    waiting.set_result(body["result"])
            elif body.get("method") == "Log.entryAdded" and body["params"]["entry"]["level"] in ("error", "warning"):
                self.problems.append(body["params"]["entry"]["text"])
            elif body.get("method") == "Page.javascriptDialogOpening":
                self.problems.append(f"a script opened a dialog: {body['params']['message']}")
                dialog = {
                    "id": next(self._numbers),
                    "method": "Page.handleJavaScriptDialog",
                    "params": {"accept": True},
                }
                await self._socket.send_json(dialog)
            elif body.get("method") == "Runtime.exceptionThrown":
                self.problems.append(json.dumps(body["params"]["exceptionDetails"])[:500])

    async def send(self, method: str, **arguments: Any) -> Any:
        number = next(self._numbers)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": arguments})
        async with asyncio.timeout(SECONDS):
            return await self._waiting[number]

    async def begin(self, *, javascript: bool = True) -> None:
        for domain in ("Page", "Runtime", "Log"):
            await self.send(f"{domain}.enable")
        if not javascript:
            await self.send("Emulation.setScriptExecutionDisabled", value=True)

    async def show(self, url: str, *, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        await self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        await self.send("Emulation.setEmulatedMedia", features=scheme)
        await self.send("Page.navigate", url=url)
        await self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    async def value(self, script: str) -> Any:
        """What an expression comes to."""
        answer = await self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise BrowserError(json.dumps(answer["exceptionDetails"])[:500])
        return answer["result"].get("value")

    async def until(self, script: str) -> None:
        """Wait until an expression is true."""
        until = time.monotonic() + SECONDS
        while not await self.value(script):
            if time.monotonic() > until:
                raise BrowserError(f"not so within {SECONDS:.0f} s: {script}")
            await asyncio.sleep(0.05)

    async def press(self, key: str) -> None:
        code = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key]}
        extra = {"text": "\r"} if key == "Enter" else {}
        await self.send("Input.dispatchKeyEvent", type="keyDown", **code, **extra)
        await self.send("Input.dispatchKeyEvent", type="keyUp", **code)

    async def picture(self, width: int, height: int) -> bytes:
        """The page as a PNG, from its top left corner."""
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        taken = await self.send("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        return base64.b64decode(taken["data"])


@asynccontextmanager
async def opened(*, javascript: bool = True) -> AsyncIterator[Tab]:
    """A tab of a browser of its own. Raises `BrowserError`."""
    with tempfile.TemporaryDirectory(prefix="everstep-browser-", ignore_cleanup_errors=True) as folder:
        process = await asyncio.create_subprocess_exec(
            program(), "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", "--no-first-run",
            f"--user-data-dir={folder}", "about:blank",
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        try:
            port = await _port(Path(folder) / "DevToolsActivePort", process)
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                    pages = [each for each in await answer.json() if each["type"] == "page"]
                async with session.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=2**28) as socket:
                    tab = Tab(socket)
                    listening = asyncio.create_task(tab.listen())
                    await tab.begin(javascript=javascript)
                    yield tab
                    listening.cancel()
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            await process.wait()


async def _port(file: Path, process: asyncio.subprocess.Process) -> int:
    for _ in range(int(SECONDS / 0.05)):
        if lines := await asyncio.to_thread(lambda: file.read_text().splitlines() if file.exists() else []):
            return int(lines[0])
        if process.returncode is not None:
            raise BrowserError(f"chromium ended with {process.returncode}")
        await asyncio.sleep(0.05)
    raise BrowserError(f"chromium did not start within {SECONDS:.0f} s")
