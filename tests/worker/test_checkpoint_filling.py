"""Chunks read straight to where they belong, whatever the segments."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.checkpoint.errors import Damaged
from everstep.checkpoint.format.chunks import describe
from everstep.checkpoint.format.manifest import Shard
from everstep.checkpoint.load.reading import Filler, Segment, reads_into
from everstep.storage import Capabilities, MemoryStore

NAME = "data/save/00000.safetensors"


class Coarse(MemoryStore):
    """A store that wants reads of `read_size`."""

    read_size = 64

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(read_size=self.read_size)


@st.composite
def segmented(draw: st.DrawFn) -> tuple[int, list[Segment]]:
    """A chunk's size and what is wanted of it: long and short, side by side, apart, overlapping."""
    size = draw(st.integers(1, 700))
    found = []
    for buffer in range(draw(st.integers(0, 8))):
        begin = draw(st.integers(0, size - 1))
        found.append(Segment(begin, draw(st.integers(1, size - begin)), buffer, draw(st.integers(0, 5))))
    return size, found


@given(segmented(), st.integers(1, 200))
def test_any_segments_of_a_chunk_are_filled_with_its_bytes(wanted: tuple[int, list[Segment]], read_size: int) -> None:
    size, segments = wanted
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    store = Coarse("filling")
    store.read_size = read_size
    store.put(NAME, data.tobytes())
    buffers = [np.zeros(s.at + s.size, dtype=np.uint8) for s in segments]
    Filler(store, buffers).fill(describe(NAME, data.tobytes()), 0, segments)
    for s, buffer in zip(segments, buffers, strict=True):
        assert not buffer[: s.at].any()
        assert np.array_equal(buffer[s.at :], data[s.begin : s.end])


@given(segmented(), st.integers(1, 200))
def test_reads_cover_a_chunk_once_and_in_order(wanted: tuple[int, list[Segment]], read_size: int) -> None:
    size, segments = wanted
    position = 0
    for runs in reads_into(segments, size, read_size):
        assert runs[-1].end - runs[0].begin <= read_size
        for run in runs:
            assert run.begin == position < run.end
            position = run.end
    assert position == size


def test_long_segments_are_read_without_a_copy() -> None:
    segments = [Segment(8, 100, 0, 0), Segment(108, 4, 1, 0), Segment(112, 200, 2, 0)]
    runs = [run for read in reads_into(segments, 320, 64) for run in read]
    straight = [(r.begin, r.end) for r in runs if r.segment is not None]
    assert straight == [(8, 64), (64, 108), (112, 128), (128, 192), (192, 256), (256, 312)]


def test_neighbours_are_read_into_their_places_by_one_request() -> None:
    large = 2**18
    segments = [Segment(n * large, large, n, 0) for n in range(4)]
    (read,) = reads_into(segments, 4 * large, 2**24)
    assert [run.segment for run in read] == segments


@pytest.mark.parametrize("position", [0, 50, 299])
def test_byte_that_was_changed_is_found_wherever_it_lies(position: int) -> None:
    data = bytes(range(256)) + bytes(44)
    shard = describe(NAME, data)
    store = Coarse("filling")
    changed = bytearray(data)
    changed[position] ^= 1
    store.put(NAME, changed)
    with pytest.raises(Damaged, match=r"00000\.safetensors: chunk 0 fails its checksum"):
        Filler(store, [np.zeros(200, dtype=np.uint8)]).fill(shard, 0, [Segment(40, 200, 0, 0)])


@pytest.mark.parametrize("kept", [0, 10, 299])
def test_shard_that_is_cut_or_gone_is_damaged(kept: int) -> None:
    shard: Shard = describe(NAME, bytes(300))
    store = Coarse("filling")
    with pytest.raises(Damaged, match="is missing"):
        Filler(store, []).fill(shard, 0, [])
    store.put(NAME, bytes(kept))
    with pytest.raises(Damaged, match="shorter"):
        Filler(store, []).fill(shard, 0, [])
