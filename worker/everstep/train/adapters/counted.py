"""Finds sums over batches in the script's text. In a lost batch the loop's body runs to its end and the batch comes
again, so such a sum would count it twice.

Invariant: none of the script's code is called.
"""

from __future__ import annotations

import ast
import types
from collections.abc import Iterator
from pathlib import Path

from everstep.recovery.errors import LoopError
from everstep.train.guards.script_objects import is_script
from everstep.train.guards.sources import tree_of

_ADDS = frozenset({"append", "extend"})
_GUARD = "sync_gradients"
BY_HAND = (
    "gradients that the loop adds up by itself (`if step % k == 0:`) are lost with a lost process. Say Accelerator("
    "gradient_accumulation_steps=k), and for each batch, without dividing the loss, `with accelerator.accumulate(model"
    "):` around accelerator.backward(loss), optimizer.step(), optimizer.zero_grad()"
)
# A sum of losses is whole only with all of this: each part alone is refused for the next one.
_KEPT = (
    "in a tracked dictionary, of losses that are the same on all ranks. Before the loop over epochs write "
    '`sums = {"loss": 0.0}` and `run.track(sums=sums)`. '
)
_INSIDE = "Inside `with accelerator.accumulate(model):`, behind accelerator.backward(loss), write "
_ONCE = (
    "Write `if accelerator.sync_gradients:` before it, which is False in such a batch. Keep a sum of losses "
    f'{_KEPT}{_INSIDE}`mean = accelerator.reduce(loss.detach(), "mean")` and '
    '`if accelerator.sync_gradients: sums["loss"] += mean.item()`'
)
_SUM = (
    "With gradient accumulation a step has several batches, which come again together. For what counts steps, write "
    "`if accelerator.sync_gradients:` before it. For a sum over batches, collect those of the present step, and add "
    f"them when it is done, {_KEPT}Before the block `with accelerator.accumulate(model):` write "
    f"`if run.micro == 0: parts = []`. {_INSIDE}"
    '`parts.append(accelerator.reduce(loss.detach(), "mean").item())` and '
    '`if accelerator.sync_gradients: sums["loss"] += sum(parts)`'
)


def check_counters(frame: types.FrameType | None, micros: int) -> None:
    """Raises `LoopError` for the first such sum, for accumulation by hand, or for both, in the loop that takes its next
    batch in `frame` or above it. `micros`: the number of batches of a step."""
    while frame is not None and not is_script(frame.f_code.co_filename):
        frame = frame.f_back
    tree = tree_of(frame.f_code.co_filename) if frame is not None else None
    if frame is None or tree is None:
        return
    line, name = frame.f_lineno, Path(frame.f_code.co_filename).name
    loops = [n for n in ast.walk(tree) if isinstance(n, ast.For) and _spans(n.iter, line)]
    loop = max(loops, key=lambda n: n.lineno, default=None)
    if loop is None:
        return
    texts = list[str]()
    if at := by_hand(loop):
        texts.append(f"line {at} of {name}: {BY_HAND}")
    if sums := counters(loop):
        what, line = sums[0]
        texts.append(
            f"{what} ({name}:{line}) in the loop over the prepared loader: a batch in which a peer is lost comes "
            f"again, and would be counted twice. {_ONCE if micros == 1 and not at else _SUM}"
        )
    if texts:
        raise LoopError(". And ".join(texts))


def by_hand(loop: ast.For) -> int:
    """The line that decides by a remainder whether an optimizer steps; 0 if there is none."""
    for n in ast.walk(loop):
        if isinstance(n, ast.If) and any(isinstance(part, ast.Mod) for part in ast.walk(n.test)):
            parts = [part for statement in n.body for part in ast.walk(statement)]
            if any(isinstance(p, ast.Continue) or (isinstance(p, ast.Attribute) and p.attr == "step") for p in parts):
                return n.lineno
    return 0


def counters(loop: ast.For) -> list[tuple[str, int]]:
    """The statements that add to something that the loop's body has not made itself, each with its line."""
    added = {id(target) for n in ast.walk(loop) if (target := _added_to(n)) is not None}
    stored = [n for n in ast.walk(loop) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    made = {n.id for n in stored if id(n) not in added}
    statements = []
    for n in _runs(loop.body):
        if (grown := _added_to(n)) is not None and _root(grown) not in made:
            statements.append((ast.unparse(n), n.lineno))
        match n:
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=target, attr=name))) if (
                name in _ADDS and _root(target) not in made
            ):
                statements.append((f"{ast.unparse(target)}.{name}(…)", n.lineno))
    return sorted(statements, key=lambda pair: pair[1])


def _runs(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of `body` and of its blocks, except those that run only in a step that counts."""
    for n in body:
        if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        yield n
        guarded = isinstance(n, ast.If) and _asks(n.test)
        for part in ("body", "orelse", "finalbody"):
            if not (guarded and part == "body"):
                yield from _runs(getattr(n, part, []))
        for handler in getattr(n, "handlers", []):
            yield from _runs(handler.body)


def _asks(test: ast.expr) -> bool:
    """Whether the test is true only if `sync_gradients` is."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return any(map(_asks, test.values))
    return isinstance(test, ast.Attribute) and test.attr == _GUARD


def _root(target: ast.expr) -> str:
    while isinstance(target, ast.Attribute | ast.Subscript):
        target = target.value
    return target.id if isinstance(target, ast.Name) else ""


def _added_to(n: ast.AST) -> ast.expr | None:
    """The target of `total += x` and of `total = total + x`."""
    match n:
        case ast.AugAssign(target=target):
            return target
        case ast.Assign(targets=[target], value=ast.BinOp() as value):
            text = ast.unparse(target)
            parts = (part for part in ast.walk(value) if isinstance(part, ast.Name | ast.Attribute | ast.Subscript))
            return target if any(ast.unparse(part) == text for part in parts) else None
    return None


def _spans(e: ast.expr, line: int) -> bool:
    return e.lineno <= line <= (e.end_lineno or e.lineno)
