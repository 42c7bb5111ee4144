"""The version: which forms it has, and each place of the checkout that has it.

All distributions, the chart and the tag of its image have one version. Between two releases it is that of the next one
with `.dev0`: an image or a wheel of a commit is not taken for a release.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from packaging.version import InvalidVersion, Version

from release.errors import ReleaseError

ROOT = Path(__file__).resolve().parents[2]
DISTRIBUTIONS = {
    "everstep": "worker",
    "everstep-operator": "operator",
    "everstep-local": "local",
    "everstep-horovod": "horovod",
    "everstep-sources": "sources",
}
RELEASE = re.compile(r"\d+\.\d+\.\d+(rc\d+)?")
DEVELOPMENT = re.compile(r"\d+\.\d+\.\d+\.dev\d+")


def semantic(version: str) -> str:
    """The same version as Helm wants a chart's: `0.2.0rc1` is `0.2.0-rc.1`, and comes behind `0.2.0-dev.0`."""
    return re.sub(r"\.?(rc|dev)(\d+)$", r"-\1.\2", version)


def same(version: str) -> str:
    return version


@dataclass(frozen=True, slots=True)
class Place:
    """A file with the version in the group of `pattern`, in the form that `form` makes of it."""

    path: str
    pattern: str
    form: Callable[[str], str] = same

    def versions(self, root: Path) -> list[str]:
        return re.findall(self.pattern, (root / self.path).read_text(), re.MULTILINE)

    def changed(self, text: str, version: str) -> str:
        """The file's text with `version`. Raises `ReleaseError` where the pattern matches nothing."""
        new, count = re.subn(
            self.pattern, lambda match: match[0].replace(match[1], self.form(version)), text, flags=re.MULTILINE
        )
        if not count:
            raise ReleaseError(f"{self.path} has no version: no line of it matches {self.pattern}")
        return new


SOURCE = Place("worker/everstep/version.py", r'^__version__ = "(.+)"$')
CHART = "charts/everstep/Chart.yaml"
PLACES = (
    SOURCE,
    *(
        Place(f"{folder}/pyproject.toml", r'"everstep[\w-]*(?:\[\w+\])?==([^"]+)"')
        for name, folder in DISTRIBUTIONS.items()
        if name != "everstep"
    ),
    Place(CHART, r"^version: (.+)$", semantic),
    Place(CHART, r"^appVersion: (.+)$"),  # also the default of the tag of the operator's image
)


def parse(text: str, *forms: re.Pattern[str]) -> Version:
    """`text` as a version. Raises `ReleaseError` if it has none of the forms."""
    try:
        version = Version(text)
    except InvalidVersion:
        version = Version("0")
    if str(version) != text or not any(form.fullmatch(text) for form in forms):
        known = {RELEASE: "0.2.0 or 0.2.0rc1", DEVELOPMENT: "0.2.0.dev0"}
        raise ReleaseError(f"VERSION={text} has another form than {' or '.join(known[form] for form in forms)}")
    return version


def changed(root: Path, version: str) -> dict[str, str]:
    """The texts of all places with `version`, by path; nothing is written."""
    texts = {place.path: (root / place.path).read_text() for place in PLACES}
    for place in PLACES:
        texts[place.path] = place.changed(texts[place.path], version)
    return texts


def current(root: Path) -> str:
    """The version of the checkout."""
    return SOURCE.versions(root)[0]


def differing(root: Path) -> list[str]:
    """The places that have another version than `SOURCE`, in words."""
    version = current(root)
    return [
        f"{place.path} has {present}, and not {place.form(version)}"
        for place in PLACES
        for present in place.versions(root) or ["none"]
        if present != place.form(version)
    ]
