"""What a rehearsal says of files and of printed lines, from their contents alone."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from pickle import dumps

import pytest
import torch

from everstep.rehearse import written
from everstep.rehearse.written import (
    MOST_CHARACTERS,
    Written,
    as_shown,
    differing_files,
    differing_prints,
    read_files,
)

CSV = ["step,loss", *(f"{i},0.{i}" for i in range(6))]
ROWS = [json.dumps({"step": i, "loss": i / 2}) for i in range(6)]


def text(lines: Sequence[str]) -> Written:
    return Written(len(lines), "\n".join(lines), tuple(lines))


def said(calm: Sequence[str], here: Sequence[str], again: Sequence[str] | None = None) -> str:
    found = differing_files({"f": text(calm)}, {"f": text(calm if again is None else again)}, {"f": text(here)})
    return found.get("f", "")


@pytest.mark.parametrize(
    ("calm", "here", "says"),
    [
        (CSV, CSV, ""),
        (CSV, [*CSV[:5], *CSV[3:]], "has step 2 twice, step 3 twice"),
        (CSV, [*CSV[:3], *CSV[4:]], "has step 2 missing"),
        (CSV, [*CSV, *CSV], "has the header twice, step 0 twice, step 1 twice, step 2 twice and 3 more"),
        (CSV, [*CSV[:3], "2,0.7", *CSV[4:]], "has other lines: line 4 is '2,0.7', and '2,0.2' in the calm run"),
        (ROWS, [*ROWS, ROWS[-1], ROWS[-1]], "has step 5 3 times"),
        (ROWS, ROWS[1:], "has step 0 missing"),
        (["a", "b"], ["a", "b", "b"], "has 'b' twice"),
        (["a", "b"], ["a"], "has 'b' missing"),
        (["a", "b"], ["a", "c"], "has other lines: line 2 is 'c', and 'b' in the calm run"),
        (["a", "b"], ["b", "a"], ""),
        (["a"], ["a", "x"], "has other lines: line 2 is 'x', and nothing in the calm run"),
    ],
)
def test_difference_of_a_text_is_named(calm: list[str], here: list[str], says: str) -> None:
    assert said(calm, here) == says


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("10%\r55%\r100%\r", "100%"),
        ("step 1\b2\b3", "step 3"),
        ("\b\b[=>]\b\b\b\b[==]", "[==]"),
        ("a\r", "a"),
        ("", ""),
    ],
)
def test_line_is_compared_as_a_terminal_shows_it(line: str, shown: str, tmp_path: Path) -> None:
    assert as_shown(line) == shown
    (tmp_path / "log.txt").write_text(f"{line}\nloss 1\n")
    assert read_files(tmp_path, ["log.txt"], tmp_path)["log.txt"].lines == (shown, "loss 1")


def test_numbers_that_differ_between_calm_runs_are_left_out_and_the_others_of_the_line_are_not() -> None:
    calm, again = ["step 1 took 0.5 s", "step 2 took 0.6 s"], ["step 1 took 0.7 s", "step 2 took 0.61 s"]
    assert said(calm, ["step 1 took 3 s", "step 2 took 4 s"], again) == ""
    assert "line 2 is 'step 3 took 4 s'" in said(calm, ["step 1 took 3 s", "step 3 took 4 s"], again)


def test_text_whose_calm_runs_differ_in_more_than_numbers_is_not_compared() -> None:
    assert said(["by host-a"], ["by host-c"], ["by host-b"]) == ""
    assert said(["a"], ["a", "a", "a"], ["a", "a"]) == ""


def test_files_that_are_missing_others_or_more_are_named_but_for_those_that_calm_runs_name_otherwise() -> None:
    one, other = Written(3, "x"), Written(3, "y")
    calm = {"best.pt": one, "chance.pt": one, "lost.pt": one, "events.17.a": one}
    again = {"best.pt": one, "chance.pt": other, "lost.pt": one, "events.18.a": one}
    here = {"best.pt": other, "chance.pt": Written(3, "z"), "events.19.a": one, "more.pt": one}
    assert differing_files(calm, again, here) == {
        "lost.pt": "is missing", "more.pt": "is written in no calm run", "best.pt": "has other bytes",
    }  # fmt: skip


def test_prints_are_compared_by_step_without_those_in_which_rank_0_was_killed() -> None:
    calm = {i: [f"step {i} rate {i}.5"] for i in range(4)}
    again = {i: [f"step {i} rate {i}.7"] for i in range(4)}
    other = {**calm, 1: [], 2: ["step 2 rate 9", "new best"]}
    assert differing_prints(calm, again, {**calm, 1: ["step 1 rate 8"]}, ()) is None
    assert differing_prints(calm, again, other, {1}) == (
        2, "in step 2 rank 0 printed 'new best', and nothing in the calm run"
    )  # fmt: skip
    assert differing_prints(calm, again, other, ()) == (
        1, "in step 1 rank 0 printed nothing, and 'step 1 rate 1.5' in the calm run"
    )  # fmt: skip


def test_of_long_lines_the_part_that_differs_is_shown() -> None:
    calm, here = ({0: [f"Epoch: [2][3/3] {'Time 0.159 ' * 9}Loss 2.4198 ({one}) Acc {'7 ' * 40}"]} for one in "18")
    found = differing_prints(calm, calm, here, ())
    assert found is not None
    assert found[1].count("Loss 2.4198 (") == 2
    assert "(8) Acc" in found[1].partition(", and ")[0]
    assert max(map(len, found[1].split("'"))) <= MOST_CHARACTERS + 2


def test_of_long_lines_numbers_that_differ_by_chance_do_not_choose_the_part() -> None:
    line = f"Epoch: [2][3/3] Time {{time}} {'Data 0.159 ' * 9}Loss 2.4198 ({{loss}})"
    calm, again, here = ({0: [line.format(time=t, loss=x)]} for t, x in (("0.1", "1"), ("0.2", "1"), ("0.3", "8")))
    found = differing_prints(calm, again, here, ())
    assert found is not None
    assert "(8)" in found[1].partition(", and ")[0]
    assert "(1)" in found[1].partition(", and ")[2]


def test_files_are_read_within_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(written, "TEXT_BYTES", 20)
    monkeypatch.setattr(written, "WHOLE_BYTES", 40)
    (tmp_path / "text").write_text("a\nb\n")
    (tmp_path / "long").write_text("a" * 30)
    (tmp_path / "binary").write_bytes(b"\0\1")
    (tmp_path / "latin").write_bytes(b"\xe9")
    (tmp_path / "huge").write_text("a" * 50)
    (tmp_path / "other").write_text("a" * 49 + "b")
    found = written.read_files(tmp_path, ["text", "long", "binary", "latin", "huge", "other"], tmp_path)
    assert {name: one.lines for name, one in found.items()} == {
        "text": ("a", "b"), "long": None, "binary": None, "latin": None, "huge": None, "other": None,
    }  # fmt: skip
    assert found["huge"].digest != found["other"].digest


def test_pickles_of_equal_values_are_equal_whatever_their_bytes(tmp_path: Path) -> None:
    word = "adam"
    own, other = {"a": word, "b": word, "t": torch.ones(2)}, {"a": word, "b": "".join(["a", "dam"]), "t": torch.ones(2)}
    found = []
    for i, state in enumerate((own, other, {**own, "t": torch.zeros(2)})):
        (tmp_path / f"{i}").mkdir()
        torch.save(state, tmp_path / f"{i}" / "ckpt.pt")
        found.append(read_files(tmp_path / f"{i}", {"ckpt.pt"}, tmp_path))
    assert (tmp_path / "0" / "ckpt.pt").read_bytes() != (tmp_path / "1" / "ckpt.pt").read_bytes()
    assert differing_files(found[0], found[0], found[1]) == {}
    assert differing_files(found[0], found[0], found[2]) == {"ckpt.pt": "has other content"}


class Net(torch.nn.Module):
    """A class of the script's: whoever makes one of its pickle runs the script's code."""

    def __init__(self, kind: str, weight: float) -> None:
        super().__init__()
        self.kind, self.copy = "adam", kind
        self.weight = torch.nn.Parameter(torch.full((2,), weight))

    def __setstate__(self, state: dict[str, object]) -> None:
        raise AssertionError("it was made")


class Meter:
    def __init__(self, kind: str, mean: float) -> None:
        self.kind, self.copy, self.mean = "adam", kind, mean

    __setstate__ = Net.__setstate__


@pytest.mark.parametrize(("kind", "save"), [(Net, torch.save), (Meter, lambda one, path: path.write_bytes(dumps(one)))])
def test_whole_objects_are_equal_whatever_their_bytes(
    tmp_path: Path, kind: Callable[[str, float], object], save: Callable[[object, Path], None]
) -> None:
    found = []
    equal = "".join(["a", "dam"])
    for i, one in enumerate((kind("adam", 1.0), kind(equal, 1.0), kind("sgd", 1.0), kind("adam", 2.0))):
        (tmp_path / f"{i}").mkdir()
        save(one, tmp_path / f"{i}" / "one.pt")
        found.append(read_files(tmp_path / f"{i}", {"one.pt"}, tmp_path))
    assert (tmp_path / "0" / "one.pt").read_bytes() != (tmp_path / "1" / "one.pt").read_bytes()
    differences = [differing_files(found[0], found[0], here) for here in found]
    assert differences == [{}, {}, {"one.pt": "has other content"}, {"one.pt": "has other content"}]


LOGGING = """
import logging, sys
from everstep.rehearse.printed import log_apart
log_apart()
logging.basicConfig(level=logging.INFO, format="[%(name)s] %(message)s", handlers=[
    logging.FileHandler(sys.argv[1]), logging.StreamHandler(sys.stdout)])
logging.getLogger("everstep.train").info("round 2")
logging.getLogger("everstep").warning("a peer is lost")
logging.getLogger("everstep_mine").info("loss 1")
logging.info("loss 2")
"""


def test_log_of_everstep_is_in_no_output_that_is_compared(tmp_path: Path) -> None:
    file = tmp_path / "main.log"
    run = subprocess.run([sys.executable, "-c", LOGGING, file], capture_output=True, text=True, check=True)
    assert run.stdout == file.read_text() == "[everstep_mine] loss 1\n[root] loss 2\n"
    assert run.stderr == "round 2\na peer is lost\n", "it is not lost either"
