"""Which parts of a commit are taken, and under which names: `strict`, `include`, `exclude`, `rename` and `cast`.

Pure: texts, no torch. A path is a key of the state, then a name in it: `model/0.weight`; a prefix ends where a `/` or a
`.` follows. Invariant: a pattern that fits nothing is an error, because it is a misspelt one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from everstep.checkpoint.errors import SettingUnusable, StateMismatch


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a load left out, as paths. `missing`: in the state that was passed, and not in the commit. `not_taken`: in
    the commit, and not loaded. `mismatched`: in both, with different shapes. The load has not changed these values."""

    missing: tuple[str, ...] = ()
    not_taken: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Selection:
    """Which part of a commit to load. The default is all of it, which must then fit exactly."""

    strict: bool = True
    include: tuple[str, ...] | None = None
    exclude: tuple[str, ...] = ()
    rename: tuple[tuple[str, str], ...] = ()
    cast: bool = False

    @classmethod
    def of(
        cls,
        strict: bool = True,
        include: Iterable[str] | None = None,
        exclude: Iterable[str] | None = None,
        rename: Mapping[str, str] | None = None,
        cast: bool = False,
    ) -> Selection:
        """Raises `SettingUnusable` for a text where several are expected, and for an `include` that takes nothing."""
        for name, value in (("include", include), ("exclude", exclude)):
            if isinstance(value, str):
                raise SettingUnusable(f"{name}={value!r}: a list of paths is expected, [{value!r}]")
        included = None if include is None else tuple(include)
        if included == ():
            raise SettingUnusable("include=[] would load nothing: name what to take, or leave include= out to take all")
        return cls(
            strict, included, tuple(exclude or ()),
            tuple(sorted((rename or {}).items(), key=lambda pair: -len(pair[0]))), cast,
        )  # fmt: skip

    @property
    def whole(self) -> bool:
        """Whether all of the commit has to go into all of the state."""
        return self.strict and self.include is None and not self.exclude and not self.rename

    def takes(self, path: str) -> bool:
        """Whether the selection takes this path (after `rename`)."""
        included = self.include is None or any(below(path, pattern) for pattern in self.include)
        return included and not any(below(path, pattern) for pattern in self.exclude)

    def touches(self, paths: Iterable[str]) -> bool:
        """Whether the selection takes one of these paths of a key; a key without parts has itself as its path."""
        return any(self.takes(path) for path in paths)

    def renamed(self, path: str) -> str:
        """The path in the state for a path in the commit: the longest prefix in `rename` that fits is replaced."""
        for old, new in self.rename:
            if not below(path, old, literally=True):
                continue
            rest = path[len(old) :]
            return new + (f"{'.' if '/' in new else '/'}{rest[1:]}" if rest else "")
        return path

    def check(self, saved: Iterable[str], targets: Iterable[str]) -> None:
        """Raises `StateMismatch` for an `include` that fits no path of the state (it would load nothing), an `exclude`
        that fits no path of the commit or the state, and a `rename` of a path that the commit does not have."""
        saved, targets = list(saved), list(targets)
        known = {self.renamed(path) for path in saved} | set(targets)
        for pattern in self.include or ():
            if not any(below(path, pattern) for path in targets):
                raise StateMismatch(f"include: {pattern!r} fits nothing in the state passed, {_some(targets)}")
        for pattern in self.exclude:
            if not any(below(path, pattern) for path in known):
                raise StateMismatch(
                    f"exclude: {pattern!r} fits nothing in the commit and nothing in the state passed, {_some(known)}"
                )
        for old, _ in self.rename:
            if not any(below(path, old, literally=True) for path in saved):
                keys = ", ".join(sorted({path.partition("/")[0] for path in saved})[:8])
                raise StateMismatch(f"rename: the commit has no {old!r}; it has {keys}, …")


def _some(paths: Iterable[str]) -> str:
    shown = sorted(paths)
    return f"which has {', '.join(shown[:4])}{', …' if len(shown) > 4 else ''}; a wildcard has to fit a whole path"


def below(path: str, pattern: str, *, literally: bool = False) -> bool:
    """Whether the pattern is the path, its beginning up to a `/` or `.`, or a glob that fits all of it, in which `*`
    stands for any text, `/` and `.` too."""
    if path == pattern or (path.startswith(pattern) and path[len(pattern)] in "/."):
        return True
    return not literally and fnmatchcase(path, pattern)
