"""A client that creates pods, a bounded number at a time, and does nothing else.

python bare.py URL TOKEN CA_FILE NAMESPACE POD_FILE COUNT
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


async def main(url: str, token: str, authority: str, namespace: str, body: dict[str, Any], count: int) -> None:
    connector = aiohttp.TCPConnector(ssl=ssl.create_default_context(cafile=authority), limit=IN_FLIGHT)
    numbers = iter(range(count))
    headers = {"Authorization": f"Bearer {token}"}
    path = f"{url}/api/v1/namespaces/{namespace}/pods"
    async with aiohttp.ClientSession(connector=connector, headers=headers) as session:

        async def create() -> None:
            for number in numbers:
                pod = {**body, "metadata": {**body["metadata"], "name": f"bare-{number}"}}
                async with session.post(path, json=pod) as reply:
                    text = await reply.text()
                    if reply.status != 201:
                        raise SystemExit(f"pod {number}: {reply.status} {text[:500]}")

        await asyncio.gather(*(create() for _ in range(IN_FLIGHT)))


if __name__ == "__main__":
    server, secret, ca, place, file, pods = sys.argv[1:]
    asyncio.run(main(server, secret, ca, place, json.loads(Path(file).read_text()), int(pods)))
