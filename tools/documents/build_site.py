"""Builds the documents as a site: `make docs` runs this script, and it needs no network.

The pages are docs/, the Markdown files at the root, and what they link to in the repository: recipes, the chart's page,
a manifest. Each file is copied to its own path below .everstep/site/source, so a relative link leads on the site where
it leads in a checkout. mkdocs.yml has the menu and the rest. The build fails for a link or an anchor that leads
nowhere, for a page that the menu lacks, and for an asset that a browser would load from another host.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from packaging.version import Version

from everstep.version import __version__

ROOT = Path(__file__).resolve().parents[2]

CONFIG = ROOT / "mkdocs.yml"
WORK = ROOT / ".everstep/site"
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)")
# What a browser loads by itself; a link that a reader clicks on may lead anywhere.
LOADED = re.compile(
    r"<(?:script|link|img|iframe|source|video|audio)\b[^>]*?\s(?:src|href)=[\"']?((?:https?:)?//[^\s\"'>]+)"
)
STYLED = re.compile(r"(?:url\(|@import\s+)[\"']?((?:https?:)?//[^\s\"')]+)")


class SiteError(Exception):
    """The site cannot be built as the repository stands."""


def pages(root: Path) -> list[str]:
    """Files of the site, from `root`: docs/, the Markdown at the root, and all that these link to, directly or not.

    Raises SiteError: a link leads to no file.
    """
    waiting = [*root.glob("*.md"), *(path for path in (root / "docs").rglob("*") if path.is_file())]
    files = set[Path]()
    while waiting:
        path = waiting.pop()
        if path in files:
            continue
        files.add(path)
        if path.suffix == ".md":
            for link in LINK.findall(CODE.sub("", FENCED.sub("", path.read_text()))):
                target = (path.parent / link).resolve()
                if not target.is_file() or not target.is_relative_to(root):
                    raise SiteError(f"{path.relative_to(root)}: {link} is no file of the repository: link to a file")
                waiting.append(target)
    return sorted(path.relative_to(root).as_posix() for path in files)


def menu(nav: list[Any], names: Sequence[str]) -> list[Any]:
    """`nav` with the pages that each `*` in it stands for; one that the menu names itself is not among them.

    Raises SiteError: a `*` stands for no page, or a page is in no menu.
    """
    entries = _expanded(nav, names, frozenset(_listed(nav)))
    missing = sorted({name for name in names if name.endswith(".md")} - set(_listed(entries)))
    if missing:
        raise SiteError(f"mkdocs.yml: nav lacks {', '.join(missing)}: add it, or delete the page and the links to it")
    return entries


def _expanded(nav: list[Any], names: Sequence[str], listed: frozenset[str]) -> list[Any]:
    entries: list[Any] = []
    for entry in nav:
        if isinstance(entry, dict):
            entries += [
                {title: below if isinstance(below, str) else _expanded(below, names, listed)}
                for title, below in entry.items()
            ]
        elif "*" in entry:
            matching = [name for name in fnmatch.filter(names, f"{entry}.md") if name not in listed]
            if not matching:
                raise SiteError(f"mkdocs.yml: nav: {entry} stands for no page: name one, or delete it")
            entries += matching
        else:
            entries.append(entry)
    return entries


def _listed(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for entry in nav.values() if isinstance(nav, dict) else nav:
            yield from _listed(entry)


def stage(folder: Path) -> Path:
    """Copy the files of the site to `folder/source`, and write the configuration that builds `folder/built` of them.

    Its path.
    """
    source = folder / "source"
    shutil.rmtree(source, ignore_errors=True)
    names = pages(ROOT)
    for name in names:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, source / name)
    # Only the menu is read here: a tag above it, such as !!python/object/apply, is for the program that builds.
    head, _, nav = CONFIG.read_text().partition("\nnav:\n")
    config = folder / "mkdocs.yml"
    own = {"docs_dir": "source", "site_dir": "built", "nav": menu(yaml.safe_load(nav), names)}
    config.write_text(f"{head}\n{yaml.safe_dump(own, sort_keys=False)}")
    return config


def foreign_assets(site: Path) -> list[str]:
    """What a browser loads from another host to show a page of the site."""
    return [
        f"{path.relative_to(site)}: {url}"
        for suffix, pattern in (("html", LOADED), ("css", STYLED))
        for path in sorted(site.rglob(f"*.{suffix}"))
        for url in pattern.findall(path.read_text())
    ]


def publish(site: Path) -> None:
    """List the versions below `site` for the menu of versions, and let its root lead to the newest."""
    versions = sorted((path.parent.name for path in site.glob("*/index.html")), key=Version, reverse=True)
    listed = [{"version": name, "title": name, "aliases": []} for name in versions]
    (site / "versions.json").write_text(json.dumps(listed))
    (site / "index.html").write_text(
        f'<!doctype html><title>Everstep</title><meta http-equiv="refresh" content="0; url={versions[0]}/">\n'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--site", type=Path, default=WORK / "html", help="the folder of all versions")
    parser.add_argument("--version", type=Version, default=__version__, help="the folder of this version, below it")
    arguments = parser.parse_args()
    built = WORK / "built"
    shutil.rmtree(built, ignore_errors=True)
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict", "-f", str(stage(WORK))]
    if subprocess.run(command, check=False).returncode:
        raise SiteError("the site is not built: a warning above names the page and the link")
    if foreign := foreign_assets(built):
        raise SiteError("\n".join(["loaded from another host, so no page shows without a network:", *foreign]))
    target = arguments.site / str(arguments.version)
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(built, target)
    publish(arguments.site)
    print(f"python3 -m http.server -b 127.0.0.1 -d {arguments.site}   # shows it on port 8000")


if __name__ == "__main__":
    try:
        main()
    except SiteError as e:
        sys.exit(f"make docs: {e}")
