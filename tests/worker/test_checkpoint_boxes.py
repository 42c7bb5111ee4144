"""How a state is divided over ranks: exactly once, evenly, and alike on every rank. Against tensors as the oracle."""

import math
from collections.abc import Sequence

import torch
from hypothesis import given
from hypothesis import strategies as st

from everstep.checkpoint.format.boxes import Box, Item, first_element, flat_begin, flat_boxes, share

shapes = st.lists(st.sampled_from([0, 1, 1, 2, 3, 5, 17, 64]), max_size=3).map(tuple)
items = st.lists(st.tuples(shapes, st.sampled_from([1, 2, 4, 8])), max_size=8).map(
    lambda found: [Item(f"t{i}", shape, width) for i, (shape, width) in enumerate(found)]
)


def cut(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))


def loads(items: Sequence[Item], parts: int) -> list[int]:
    widths = {i.name: i.bytes_each for i in items}
    return [sum(p.box.elements * widths[p.name] for p in portions) for portions in share(items, parts)]


@given(items, st.integers(1, 9))
def test_shares_hold_every_element_exactly_once_and_are_the_same_for_every_rank(items: list[Item], parts: int) -> None:
    seen = {i.name: torch.zeros(i.shape, dtype=torch.int32) for i in items}
    named = set()
    for portions in share(items, parts):
        for portion in portions:
            seen[portion.name][cut(portion.box)] += 1
            named.add(portion.name)
    assert all(bool((count == 1).all()) for count in seen.values())
    assert named == set(seen), "a tensor without elements is somebody's too"
    assert share(list(reversed(items)), parts) == share(items, parts)


@given(items, st.integers(1, 9))
def test_no_share_is_off_by_more_than_two_grains(items: list[Item], parts: int) -> None:
    found = loads(items, parts)
    assert max(found) - min(found) <= sum(found) / parts * 2 / 128 + 16


def test_shares_of_a_transformer_are_even_within_five_percent_at_every_world_size() -> None:
    sizes = [(50257, 768), (1024, 768), *[(768, 2304), (2304,), (768, 768), (768,), (768, 3072), (3072,)] * 12]
    items = [Item(f"{i:03d}", shape, 4) for i, shape in enumerate(sizes)]
    for world in (2, 3, 7, 8, 16, 64):
        found = loads(items, world)
        assert max(found) / min(found) < 1.05, world


def test_small_tensors_are_not_cut() -> None:
    items = [Item("big", (1000, 100), 4), *[Item(f"small{i}", (7,), 4) for i in range(20)]]
    portions = [p for part in share(items, 4) for p in part if p.name.startswith("small")]
    assert len(portions) == 20


@given(shapes, st.data())
def test_flat_range_is_the_boxes_end_to_end(shape: tuple[int, ...], data: st.DataObject) -> None:
    size = math.prod(shape)
    begin = data.draw(st.integers(0, size))
    end = data.draw(st.integers(begin, size))
    flat = torch.arange(size).view(shape)
    boxes = list(flat_boxes(shape, begin, end))
    assert [int(v) for box in boxes for v in flat[cut(box)].flatten()] == list(range(begin, end))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    assert all(flat_begin(shape, box) == first_element(shape, box) for box in boxes)


@given(shapes.filter(math.prod), st.data())
def test_box_has_a_flat_beginning_if_and_only_if_it_is_one_run(shape: tuple[int, ...], data: st.DataObject) -> None:
    offset, extent = [], []
    for size in shape:
        offset.append(data.draw(st.integers(0, size - 1)))
        extent.append(data.draw(st.integers(1, size - offset[-1])))
    box = Box(tuple(offset), tuple(extent))
    found = torch.arange(math.prod(shape)).view(shape)[cut(box)].flatten().tolist()
    one_run = found == list(range(found[0], found[0] + len(found)))
    assert flat_begin(shape, box) == (found[0] if one_run else None)
