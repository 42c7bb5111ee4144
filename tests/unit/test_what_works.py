"""docs/what-works.md claims nothing without a test, and names fields that there are."""

from __future__ import annotations

import re

from everstep_operator.api.crd import crd
from support import ROOT

PAGE = (ROOT / "docs/what-works.md").read_text()
ROWS = re.findall(r"^\| (?!\|)(?!-)(.+?) \| (.+?) \| (.+?) \|$", PAGE, re.MULTILINE)
UNPROVEN = ("untested on GPUs",)


def test_each_row_names_tests_that_are_there_or_says_that_it_is_untested() -> None:
    assert len(ROWS) > 20
    for what, state, proof in ROWS:
        files = re.findall(r"`(tests/[\w/]+\.py)`", proof)
        assert bool(files) != any(word in state for word in UNPROVEN), what
        assert [name for name in files if not (ROOT / name).is_file()] == [], what


def test_each_field_that_the_page_names_is_in_the_crd() -> None:
    """A field that came, went or got another name changes a row, too."""
    (version,) = crd()["spec"]["versions"]
    spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    named = re.findall(r"`(?:spec\.)?((?:checkpoint|elastic|recovery|rendezvous|rerun|suspend)(?:\.\w+)*)\b", PAGE)
    assert {"rerun", "suspend", "checkpoint.onPreemption", "elastic.spares", "recovery.hang"} <= set(named)
    for path in named:
        node = spec
        for name in path.split("."):
            assert name in node["properties"], path
            node = node["properties"][name]
