"""Writes what the code decides into the pages: `make generate` runs this script.

A page that is generated as a whole is in PAGES. A part of a page stands between a line `<!-- generated: NAME -->` and
the next line `<!-- end -->`; BLOCKS has what makes it. A test compares all of them, so a page cannot say anything else
than the code. Nothing is written if one of them cannot be made.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable

from documents import tables
from documents.build_site import ROOT
from everstep_operator.api import crd, reference

PAGES: dict[str, Callable[[], str]] = {
    "manifests/crd.yaml": crd.render,
    "charts/everstep/files/crd.yaml": crd.render,
    "docs/reference/trainingjob.md": reference.render,
}
BLOCKS: dict[str, dict[str, Callable[[], str]]] = {
    "charts/everstep/README.md": {"values": tables.chart_values},
    "docs/operations/observability.md": {"metrics": tables.metrics, "metrics of jobs": tables.metrics_of_jobs},
    "docs/reference/cli.md": {"exit codes": tables.exit_codes},
    "docs/reference/cli-options.md": {"commands": tables.commands},
    "docs/reference/environment.md": {
        "variables of users": tables.variables_of_users,
        "variables of workers": tables.variables_of_workers,
        "internal variables": tables.internal_variables,
    },
    "docs/reference/everstep-operator.md": {"settings": tables.settings_of_the_operator},
}


class GenerateError(Exception):
    """A page cannot be made."""


def with_blocks(page: str, text: str, blocks: dict[str, Callable[[], str]]) -> str:
    """`text` of a page with its blocks as the code makes them. Raises GenerateError: a block is not there once."""
    for name, make in blocks.items():
        begin = f"<!-- generated: {name} -->\n"
        pattern = re.compile(re.escape(begin) + r".*?^<!-- end -->$", re.MULTILINE | re.DOTALL)
        body = f"{begin}\n{make()}\n<!-- end -->"
        text, count = pattern.subn(lambda _, body=body: body, text)  # type: ignore[misc]
        if count != 1:
            raise GenerateError(f"{page}: {begin.strip()} … <!-- end --> is there {count} times: write it once")
    return text


def generated() -> dict[str, str]:
    """All files with generated parts, by path."""
    texts = {page: make() for page, make in PAGES.items()}
    for page, blocks in BLOCKS.items():
        texts[page] = with_blocks(page, (ROOT / page).read_text(), blocks)
    return texts


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    for page, text in generated().items():
        (ROOT / page).write_text(text)


if __name__ == "__main__":
    try:
        main()
    except GenerateError as e:
        sys.exit(f"make generate: {e}")
