"""The pictures of the page in the documents: of one recorded run, each with a digest of the page that it was taken of.

`demo/` is what `make demo` left on a machine that did much else. Browsers of two versions draw letters differently, so
pictures are not compared; what they were taken of is, without a browser.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from everstep.jobs.history import History
from everstep.jobs.view import View
from everstep_operator.page.links import LinkAccess
from everstep_operator.page.model import Detail, Fleet, Listed, May, Stack, Unavailable
from everstep_operator.page.server import FOLDER, Page, server
from support import ROOT

REWRITE = "EVERSTEP_REWRITE=1 pytest tests/run/test_page_browser.py -k pictures"
DEMO = Path(__file__).parent / "demo"
JOB = "/jobs/demo"
STYLES = ("page.css", "page.js", "vendor/uplot/uPlot.min.css")
SIGNATURE = b"\x89PNG\r\n\x1a\n"
KEYWORD = b"Digest\0"
MARGIN = 8  # pixels above the heading at which a picture ends


@dataclass(frozen=True, slots=True)
class Picture:
    """`until` is the id of the heading above which it ends."""

    name: str
    width: int
    until: str
    dark: bool = False

    @property
    def path(self) -> Path:
        return ROOT / "docs/assets" / self.name


PICTURES = (
    Picture("page.png", 1200, "goodput"),
    Picture("page-phone.png", 320, "to-curves", dark=True),
)


class Recorded:
    """The run of `demo/`, as the page gets it."""

    def __init__(self) -> None:
        view = View.from_json(json.loads((DEMO / "status.json").read_text()))
        self._listed = Listed("demo", "this machine", view)

    async def fleet(self, may: May) -> Fleet:
        del may
        return Fleet([self._listed])

    async def detail(self, may: May, key: str) -> Detail:
        del may, key
        return Detail(self._listed, self._listed.view.events, list(History.load(DEMO / "history.jsonl")), stacks="")

    async def stacks(self, may: May, key: str) -> Sequence[Stack]:
        raise Unavailable("the run has ended")


def page(access: LinkAccess) -> Page:
    return Page(Recorded(), access, "this machine")


@asynccontextmanager
async def served() -> AsyncIterator[tuple[str, str]]:
    """The page's address, and the token of a reader."""
    access = LinkAccess()
    async with server(page(access), "127.0.0.1", 0) as listener:
        yield f"http://127.0.0.1:{listener.port}", access.token


def digest(html: str) -> str:
    """Of what a browser makes a picture of."""
    found = hashlib.sha256(html.encode())
    for name in STYLES:
        found.update((FOLDER / "static" / name).read_bytes())
    return found.hexdigest()


def width(png: bytes) -> int:
    size: int = struct.unpack(">I", png[16:20])[0]
    return size


def with_digest(png: bytes, text: str) -> bytes:
    """The same picture with the digest in a chunk of text behind its header."""
    end = len(SIGNATURE) + 25  # of the first chunk, the header
    body = b"tEXt" + KEYWORD + text.encode()
    return png[:end] + struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body)) + png[end:]


def digest_in(png: bytes) -> str:
    """Empty if there is none."""
    _, _, rest = png.partition(b"tEXt" + KEYWORD)
    return rest[:64].decode("ascii", "replace")
