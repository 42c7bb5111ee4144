"""Which parts of a commit are taken, and under which names: `strict`, `include`, `exclude`, `rename` and `cast`.

Pure: texts, no torch. A path is a key of the state, then a name in it: `model/0.weight`; a prefix ends where a `/` or a
`.` follows. Invariant: a pattern that fits nothing is an error, because it is a misspelt one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from everstep.checkpoint.errors import CheckpointError, StateMismatch


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a load left out, as paths: `missing`: in the state that was passed, and not in the commit; they are as they
    were. `not_taken`: in the commit, and not put anywhere. `mismatched`: in both with another shape; as they were."""

    missing: tuple[str, ...] = ()
    not_taken: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Selection:
    """What of a commit to take. The default is all of it, which must then fit exactly."""

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
        """Raises `CheckpointError` for a text where several are expected."""
        for name, value in (("include", include), ("exclude", exclude)):
            if isinstance(value, str):
                raise CheckpointError(f"{name}={value!r}: a list of paths is expected, [{value!r}]")
        return cls(
            strict, None if include is None else tuple(include), tuple(exclude or ()),
            tuple(sorted((rename or {}).items(), key=lambda pair: -len(pair[0]))), cast,
        )  # fmt: skip

    @property
    def whole(self) -> bool:
        """Whether all of the commit is to go into all of the state."""
        return self.strict and self.include is None and not self.exclude and not self.rename

    def takes(self, path: str) -> bool:
        """Whether what has this path, after `rename`, is to be taken."""
        included = self.include is None or any(below(path, pattern) for pattern in self.include)
        return included and not any(below(path, pattern) for pattern in self.exclude)

    def touches(self, key: str) -> bool:
        """Whether anything of this key of the state may be taken."""
        some = self.include is not None and any(pattern.startswith(f"{key}/") for pattern in self.include)
        return (some or self.takes(key)) and not any(below(key, pattern) for pattern in self.exclude)

    def renamed(self, path: str) -> str:
        """The path in the state of what has this path in the commit: by the longest prefix that is to be renamed."""
        for old, new in self.rename:
            if not below(path, old, literally=True):
                continue
            rest = path[len(old) :]
            return new + (f"{'.' if '/' in new else '/'}{rest[1:]}" if rest else "")
        return path

    def check(self, saved: Iterable[str], targets: Iterable[str]) -> None:
        """Raises `StateMismatch` for a pattern that fits none of the commit's paths and none of the state's."""
        saved = list(saved)
        known = {self.renamed(path) for path in saved} | set(targets)
        for name, patterns in (("include", self.include or ()), ("exclude", self.exclude)):
            for pattern in patterns:
                if not any(below(path, pattern) for path in known):
                    raise StateMismatch(
                        f"{name}: {pattern!r} fits nothing in the commit and nothing in the state passed"
                    )
        for old, _ in self.rename:
            if not any(below(path, old, literally=True) for path in saved):
                raise StateMismatch(f"rename: the commit has no {old!r}; it has {', '.join(sorted(saved)[:8])}, …")


def below(path: str, pattern: str, *, literally: bool = False) -> bool:
    """Whether the pattern is the path, a part of it from the beginning up to a `/` or `.`, or a glob that fits it."""
    if path == pattern or (path.startswith(pattern) and path[len(pattern)] in "/."):
        return True
    return not literally and fnmatchcase(path, pattern)
