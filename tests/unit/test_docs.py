"""What the docs point at exists: tests by name, files and links."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
NAMED = re.compile(r"`((?:tests|worker|operator|benchmarks)/[\w/.]+\.(?:py|txt))(?:::(\w+))?`")
CODE = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"\]\((?!https?://|#)([^)#]+)")


@pytest.mark.parametrize("path", DOCS, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_tests_files_and_links_that_a_document_names_exist(path: Path) -> None:
    text = path.read_text()
    missing = []
    for file, name in NAMED.findall(text):
        found = ROOT / file
        if not found.exists() or (name and f"def {name}(" not in found.read_text()):
            missing.append(f"{file}::{name}" if name else file)
    missing += [link for link in LINK.findall(CODE.sub("", text)) if not (path.parent / link).exists()]
    assert not missing
