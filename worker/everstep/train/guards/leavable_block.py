"""Decides whether a step's block can be left in the middle without any effect on the code after it.

If the session suppresses an error that ends the block, the script goes on after the block. The code there may read a
value that the block has not computed. So a block can be left only if all that follows in its loop is code that waits
for `step.completed`. A step that is repeated after a lost peer may be left anywhere, because an earlier step has made
the values; before a process's first step there are none.
"""

from __future__ import annotations

import ast
import functools
import inspect
import types

from everstep.train.guards.script_objects import is_script
from everstep.train.guards.sources import frames_that_ask, loop_at

SESSION = "everstep.train.session"


def may_be_left(frame: types.FrameType | None) -> bool:
    """Whether the next step's block may be left, in the loop above `frame`. False if there is no text."""
    for above in frames_that_ask(frame):
        if is_script(above.f_code.co_filename):
            if (answer := _in_line(above.f_code, above.f_lineno)) is not None:
                return answer
        elif above.f_code.co_name == "train" and above.f_globals.get("__name__") == SESSION:
            return True  # no code of the script follows
    return False


@functools.lru_cache(maxsize=64)
def _in_line(code: types.CodeType, line: int) -> bool | None:
    """The same for the loop that asks in this line. None: it hands its steps on, and another one decides."""
    _, loop = loop_at(code.co_filename, line) or (None, None)
    if not isinstance(loop, ast.For):
        return False
    if not code.co_flags & inspect.CO_GENERATOR:
        return _is_last(loop)
    hands_on = all(isinstance(part, ast.Expr) and isinstance(part.value, ast.Yield) for part in loop.body)
    return None if hands_on else False


def _is_last(loop: ast.For) -> bool:
    """Whether the step's block is the last code that the loop runs for a step that does not count."""
    steps = {n.id for n in ast.walk(loop.target) if isinstance(n, ast.Name)}
    for i, part in enumerate(loop.body):
        if isinstance(part, ast.With) and any(
            isinstance(item.context_expr, ast.Name) and item.context_expr.id in steps for item in part.items
        ):
            behind = loop.body[i + 1 :]
            return all(isinstance(p, ast.If) and not p.orelse and _asks(p.test) for p in behind)
    return False


def _asks(test: ast.expr) -> bool:
    """Whether the test can be true only for a step that counts."""
    match test:
        case ast.BoolOp(op=ast.And(), values=values):
            return _asks(values[0])
        case ast.Attribute(attr="completed"):
            return True
    return False
