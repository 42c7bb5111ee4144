"""Pickles of equal contents have one digest, other contents have another, and no code of a pickle runs."""

from __future__ import annotations

import io
import os
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest

from everstep.rehearse.pickled import digest_of


class Meter:
    """Of a script: with a state, and elements of its own."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values


class Runs:
    def __reduce__(self) -> Any:
        return os.mkdir, (str(Path.cwd() / "ran"),)


def digest(value: Any) -> str:
    found = digest_of(pickle.dumps(value))
    assert found
    return found


def test_order_of_a_dictionary_or_a_set_and_shared_texts_do_not_count() -> None:
    letters = {chr(number): number for number in range(97, 117)}
    turned = dict(reversed(letters.items()))
    for wrap in (lambda of: of, Meter, lambda of: [Meter(of), {"of": of}], set):
        assert digest(wrap(letters)) == digest(wrap(turned)), wrap
    text = "".join(["loss", str(1)])
    assert digest([text, text]) == digest([text, "".join(["loss", str(1)])])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": 1}, {"a": 2}),
        (Meter({"a": 1}), Meter({"a": 1.0})),
        ([Meter({})], [OrderedDict()]),
        (OrderedDict(a=1, b=2), OrderedDict(b=2, a=1)),
        ((1, 2), [1, 2]),
        (b"a", bytearray(b"a")),
        (Meter, Runs),
    ],
)  # fmt: skip
def test_what_differs_has_another_digest(one: Any, other: Any) -> None:
    assert digest(one) != digest(other)


def test_object_that_contains_itself_and_one_that_occurs_a_million_times_are_read() -> None:
    inside: list[Any] = []
    inside.append(inside)
    for _ in range(20):
        inside = [inside, inside]
    assert digest(inside) == digest(inside)


def test_second_pickle_of_a_file_and_what_follows_it_count() -> None:
    first = pickle.dumps({"step": 1})
    files = [first, first + pickle.dumps(2), first + pickle.dumps(3), first + b"rest", first + b"more"]
    assert len({digest_of(file) for file in files}) == 5


def test_no_code_of_a_pickle_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert digest(Runs())
    assert not (tmp_path / "ran").exists()


def test_tensors_of_a_saved_model_count_and_the_order_of_its_dictionaries_does_not() -> None:
    import torch  # noqa: PLC0415

    def saved(value: dict[str, Any], *, zipped: bool) -> str:
        file = io.BytesIO()
        torch.save({"meter": Meter({}), **value}, file, _use_new_zipfile_serialization=zipped)
        return digest_of(file.getvalue())

    one, two = torch.ones(3), torch.zeros(3)
    same = saved({"a": one, "b": two}, zipped=True)
    assert same == saved({"b": two, "a": one}, zipped=True)
    assert same != saved({"a": two, "b": one}, zipped=True)
    assert saved({"a": one}, zipped=False) != saved({"a": two}, zipped=False)


def test_other_files_have_none() -> None:
    assert digest_of(b"\x80 no pickle") == digest_of(b"PK\x03\x04 no archive") == ""
