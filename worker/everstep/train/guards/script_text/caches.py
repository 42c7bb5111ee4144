"""Recognises caches: values that a loop keeps but a new process makes again as they were. They are not loop-carried."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager

from everstep.train.guards.script_text.syntax_patterns import current_of, is_index
from everstep.train.guards.script_text.value_origins import NONE, VARYING, Values


class Caches(Values):
    """Judges statements at the present place of the walk."""

    def _is_memo(self, target: ast.Subscript, source: ast.AST | None) -> bool:
        """Whether it stores, after `if key not in kept:`, a value that depends on the key only: a new process makes it
        again."""
        asked = (ast.unparse(target.slice), ast.unparse(target.value))
        if asked not in self.script.asked or not isinstance(source, ast.expr):
            return False
        source = self.script.source(source)
        parts = {ast.unparse(n) for n in ast.walk(source) if isinstance(n, ast.expr)}
        if asked[1] in parts:
            return False  # the value depends on what was stored before
        if self._is_of_sample(target.slice, source):
            return True
        if asked[0] not in parts:
            return False  # the presence of the key is information by itself
        with self._trying():
            for part in ast.walk(target.slice):
                if isinstance(part, ast.expr) and (key := self._key(part)) is not None:
                    self.env[key] = NONE
            return not self._value(source)

    def _is_of_sample(self, index: ast.expr, source: ast.expr) -> bool:
        """Whether it is the result of an unchanging module for the sample with this index."""
        calls = (n.func for n in ast.walk(source) if isinstance(n, ast.Call))
        frozen = any((key := self._key(f)) is not None and self.script.known.is_frozen(key) for f in calls)
        return frozen and is_index(index) and self._value(source) | self._value(index) <= VARYING

    def _is_of_current(self, s: ast.If) -> bool:
        """Whether it only makes a value again when another value, on which it depends, has changed."""
        for now, body in current_of(s):
            with self._trying():
                for part in ast.walk(now):
                    if isinstance(part, ast.expr) and (key := self._key(part)) is not None:
                        self.env[key] = NONE
                follows = True
                for assignment in body:
                    same = ast.unparse(assignment.value) == ast.unparse(now)
                    where = [t.slice for t in assignment.targets if isinstance(t, ast.Subscript)]
                    follows = follows and not self._all(where) and (same or not self._value(assignment.value))
                    for key in filter(None, map(self._key, assignment.targets)):
                        self.env[key] = NONE
            if follows:
                return True
        return False

    @contextmanager
    def _trying(self) -> Iterator[None]:
        """A context whose findings, made with other variables, leave those of the walk unchanged."""
        env, uses = dict(self.env), len(self.uses)
        yield
        self.env = env
        del self.uses[uses:]
