"""Reads documents without blocking the event loop: a large one in pieces, one piece in one turn of the loop.

Reading a megabyte takes 25 ms, for which all other requests would wait. The longest piece is the JSON itself, 3 ms.
Fair queueing between namespaces and their jobs decides which piece is next: many large documents of one job delay the
large documents of another a little, and small documents not at all.
"""

from __future__ import annotations

import asyncio

from everstep.contract.document import Document, DocumentInvalid, decode, decoding
from everstep_operator.rounds.document_shape import SMALL, check_shape
from everstep_operator.rounds.documents import JobRef
from everstep_operator.runtime.fair_queueing import FairQueue, Flow


class DocumentReader:
    """The reader of one replica, in one event loop."""

    def __init__(self) -> None:
        self._queue = FairQueue(lambda start: asyncio.get_running_loop().call_soon(start), max_of_group=1, max_of_all=1)

    async def read(self, data: bytes, job: JobRef) -> tuple[str, Document]:
        """The document as text, and decoded. Raises DocumentInvalid."""
        try:
            text = data.decode()
        except UnicodeDecodeError as e:
            raise DocumentInvalid(f"not UTF-8: {e}") from e
        if len(data) <= SMALL:
            return text, decode(data)
        flow = Flow(job.namespace, job.uid)
        await self._queue.wait(flow)
        check_shape(data)
        pieces = decoding(data)
        while True:
            await self._queue.wait(flow)
            try:
                next(pieces)
            except StopIteration as end:
                document: Document = end.value
                return text, document
