"""Generated pages and parts of pages: they are what the code says, and the code says all that they need."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

import pytest

from documents import tables
from documents.generate import BLOCKS, PAGES, GenerateError, with_blocks
from everstep.contract import env, variables
from everstep_operator.api import meanings
from everstep_operator.api.conditions import Cause, ConditionType, FailedReason, ReadyReason, Rung
from everstep_operator.api.events import EventReason
from support import ROOT


@pytest.mark.parametrize("path", [*PAGES, *BLOCKS])
def test_committed_file_is_what_the_code_generates(path: str) -> None:
    text = (ROOT / path).read_text()
    assert text == (PAGES[path]() if path in PAGES else with_blocks(path, text, BLOCKS[path])), "run `make generate`"


@pytest.mark.parametrize("text", ["", "<!-- generated: a -->\n", "<!-- generated: a -->\n<!-- end -->\n" * 2])
def test_block_that_is_not_there_once_is_refused(text: str) -> None:
    with pytest.raises(GenerateError, match=r"page\.md: <!-- generated: a --> … <!-- end --> is there \d times"):
        with_blocks("page.md", text, {"a": lambda: "| a |"})


def test_text_around_a_block_stays_and_what_was_in_it_goes() -> None:
    page = "# Title\n\n<!-- generated: a -->\nold\n<!-- end -->\n\nbehind <!-- end -->\n"
    made = with_blocks("page.md", page, {"a": lambda: "new \\1\n"})
    assert made == "# Title\n\n<!-- generated: a -->\n\nnew \\1\n\n<!-- end -->\n\nbehind <!-- end -->\n"
    assert with_blocks("page.md", made, {"a": lambda: "new \\1\n"}) == made


@pytest.mark.parametrize(
    ("words", "described"),
    [
        (ConditionType, meanings.CONDITIONS),
        (ReadyReason, meanings.READY),
        (FailedReason, meanings.FAILED),
        (Cause, meanings.CAUSES),
        (Rung, meanings.RUNGS),
        (EventReason, meanings.EVENTS),
    ],
)
def test_each_word_of_the_status_and_of_events_has_a_meaning(
    words: type[StrEnum], described: Iterable[StrEnum]
) -> None:
    assert list(described) == list(words)


def test_each_variable_is_described_in_one_place() -> None:
    names = [*variables.SET_BY_USERS, *variables.SET_BY_OPERATOR, *variables.INTERNAL]
    assert len(names) == len(variables.KNOWN)
    assert {value for name, value in vars(env).items() if name.isupper() and isinstance(value, str)} <= set(names)


@pytest.mark.parametrize("make", [tables.chart_values, tables.settings_of_the_operator, tables.metrics])
def test_each_row_has_a_meaning(make: object) -> None:
    assert callable(make)
    assert not [line for line in make().splitlines() if line.endswith("| |")]


def test_each_command_and_option_of_the_program_has_a_help_text() -> None:
    text = tables.commands()
    assert "## everstep ckpt restore\n" in text
    assert not [line for line in text.splitlines() if line.endswith("| |")]
