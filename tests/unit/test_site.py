"""The site of the documents, as far as it needs no program: its files, its menu, and what a page must not load."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from documents.build_site import CONFIG, SiteError, foreign_assets, menu, pages, publish
from support import ROOT


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_each_page_of_the_documents_is_in_a_menu() -> None:
    nav = CONFIG.read_text().partition("\nnav:\n")[2]
    assert menu(yaml.safe_load(nav), pages(ROOT))


def test_site_has_what_its_pages_link_to_wherever_it_is(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "README.md": "[guide](docs/guide.md#first)",
            "docs/guide.md": "[job](../examples/a/job.yaml) ![](assets/a.svg) [out](https://x.test/y) [here](#first)\n"
            "```\n[no](link.md)\n```\n`[nor](this.md)`",
            "docs/assets/a.svg": "<svg/>",
            "examples/a/job.yaml": "kind: Job",
            "examples/b/job.yaml": "kind: Job",
        },
    )
    assert pages(tmp_path) == ["README.md", "docs/assets/a.svg", "docs/guide.md", "examples/a/job.yaml"]


@pytest.mark.parametrize("link", ["nothing.yaml", "..", "../../outside.md"])
def test_link_that_leads_to_no_file_of_the_repository_is_refused(tmp_path: Path, link: str) -> None:
    write(tmp_path, {"outside.md": "", "root/docs/guide.md": f"[a]({link})"})
    with pytest.raises(SiteError, match=r"docs/guide.md: .* is no file of the repository"):
        pages(tmp_path / "root")


def test_star_in_the_menu_stands_for_the_pages_that_it_does_not_name() -> None:
    nav = [{"A": ["a/first.md", {"B": ["a/*"]}]}, {"C": "c.md"}]
    names = ["a/first.md", "a/second.md", "a/third.md", "a/third.svg", "c.md"]
    assert menu(nav, names) == [{"A": ["a/first.md", {"B": ["a/second.md", "a/third.md"]}]}, {"C": "c.md"}]


def test_page_in_no_menu_and_star_without_a_page_are_refused() -> None:
    with pytest.raises(SiteError, match=r"nav lacks b.md"):
        menu(["a.md"], ["a.md", "b.md"])
    with pytest.raises(SiteError, match=r"b/\* stands for no page"):
        menu(["a.md", "b/*"], ["a.md"])


def test_assets_of_other_hosts_are_named_and_links_are_not(tmp_path: Path) -> None:
    own = '<script src="../a.js"></script><img src=a.png><a href="https://x.test/">x</a>'
    write(
        tmp_path,
        {
            "own.html": own,
            "script.html": '<script defer src="https://x.test/a.js">',
            "font.html": "<link rel=stylesheet href=//fonts.test/css>",
            "a.css": "@import 'https://x.test/b.css'; a{background:url(a.png)} b{background:url(//x.test/c.png)}",
        },
    )
    assert foreign_assets(tmp_path) == [
        "font.html: //fonts.test/css",
        "script.html: https://x.test/a.js",
        "a.css: https://x.test/b.css",
        "a.css: //x.test/c.png",
    ]


def test_root_of_the_site_leads_to_the_newest_version_and_lists_all(tmp_path: Path) -> None:
    write(tmp_path, {f"{version}/index.html": "" for version in ("0.9", "0.10.0.dev0", "0.10")})
    publish(tmp_path)
    assert [one["version"] for one in json.loads((tmp_path / "versions.json").read_text())] == [
        "0.10",
        "0.10.0.dev0",
        "0.9",
    ]
    assert "url=0.10/" in (tmp_path / "index.html").read_text()
