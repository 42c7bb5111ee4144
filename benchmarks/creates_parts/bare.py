"""A client that sends requests which were made before, a bounded number at a time, and does nothing else.

python bare.py URL TOKEN CA_FILE REQUESTS_FILE

The file is a JSON list of [path, body]. A path that ends in `/status` is patched; to any other path the body is posted.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import sys
from pathlib import Path
from typing import Any

import aiohttp

IN_FLIGHT = 16


async def main(url: str, token: str, authority: str, requests: list[tuple[str, dict[str, Any]]]) -> None:
    connector = aiohttp.TCPConnector(ssl=ssl.create_default_context(cafile=authority), limit=IN_FLIGHT)
    waiting = iter(requests)
    headers = {"Authorization": f"Bearer {token}"}
    async with aiohttp.ClientSession(connector=connector, headers=headers) as session:

        async def send() -> None:
            for path, body in waiting:
                is_patch = path.endswith("/status")
                kind = "application/merge-patch+json" if is_patch else "application/json"
                data, method = json.dumps(body), "PATCH" if is_patch else "POST"
                async with session.request(method, url + path, data=data, headers={"Content-Type": kind}) as reply:
                    text = await reply.text()
                    if reply.status not in (200, 201):
                        raise SystemExit(f"{method} {path}: {reply.status} {text[:500]}")

        await asyncio.gather(*(send() for _ in range(IN_FLIGHT)))


if __name__ == "__main__":
    server, secret, ca, file = sys.argv[1:]
    asyncio.run(main(server, secret, ca, json.loads(Path(file).read_text())))
