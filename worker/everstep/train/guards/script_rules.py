"""Refuses two forms of a loop that are certain to go wrong, by its text, before the first step.

A generator function that yields from within a step's block: an error in the code that takes the batches does not reach
the step. A rank that was read from the environment before the loop and is used in it: a process gets another rank when
the world changes, and no comparison of values shows that, because the others' values are right. Both need no knowledge
of what the script computes, and there is one line to write instead.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Collection, Iterator, Mapping

from everstep.train.guards.sources import end, path_of

RANKS = frozenset({"RANK", "WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"})
_CONVERSIONS = frozenset({"int", "str", "float", "bool", "min", "max", "abs"})
_ABSENT = (None, "", "-1", -1)  # what scripts use as the rank if there is none
_TALKS = frozenset({"print", "info", "debug", "warning", "log", "write", "set_postfix", "set_description"})


def of_generator(loop: ast.stmt, file: str) -> Iterator[str]:
    """What is wrong with a loop over steps in `file` that yields from within a step."""
    if not isinstance(loop, ast.For):
        return
    steps = {n.id for n in ast.walk(loop.target) if isinstance(n, ast.Name)}
    for block in ast.walk(loop):
        if not isinstance(block, ast.With) or not steps & {path_of(item.context_expr) for item in block.items}:
            continue
        if (inner := next((n for n in ast.walk(block) if isinstance(n, ast.Yield | ast.YieldFrom)), None)) is not None:
            yield (
                f"line {inner.lineno} of {file} is in a generator function that yields from within `with step`: "
                "an error in the code that takes the batches (the loss of a peer, for example) would not reach the "
                "step. Yield the step, `for step in run.steps(…): yield step`, and write `with step as batch:` around "
                "the work"
            )


def of_ranks(tree: ast.Module, loop: ast.stmt, early: Collection[tuple[str, ast.AST]], file: str) -> Iterator[str]:
    """Ranks in variables: one text, with each variable and all lines by which a step uses it. `early`: what a step of
    the loop in `file` may read that was bound before it (`carried_names`)."""
    names = read_ranks(tree, (loop.lineno, end(loop)))
    quiet = {id(part) for n in ast.walk(tree) if _only_talks(n) for part in ast.walk(n)} if names else set()
    uses: dict[str, set[int]] = {}
    for path, node in early:
        if path in names and id(node) not in quiet:
            uses.setdefault(path, set()).add(node.lineno)  # type: ignore[attr-defined]  # an expression
    if not uses:
        return
    lines = "; ".join(f"{path}, of line {names[path].lineno}, in {_lines(used)}" for path, used in uses.items())
    yield (
        f"a rank or world size was read from the environment (RANK, WORLD_SIZE) before the loop, and {file} uses it in "
        f"the loop, where after the loss of a process it may be another: {lines}. {_instead(uses, names)}"
    )


def _lines(numbers: Collection[int]) -> str:
    *first, last = map(str, sorted(numbers))
    return f"lines {', '.join(first)} and {last}" if first else f"line {last}"


def _instead(paths: Collection[str], names: Mapping[str, ast.expr]) -> str:
    """What to write in place of these variables."""
    read = [path for path in paths if not _is_computed(names[path], names)]
    computed = [path for path in paths if path not in read]
    texts = [f"Write run.rank or run.world_size in the loop in place of {', '.join(read)}"] if read else []
    if computed:
        texts.append(
            f"Compute what {', '.join(computed)} {'is' if len(computed) == 1 else 'are'} in the loop, under another "
            "name, with run.rank or run.world_size"
        )
    # Such a line has already changed the number from which the loop would compute.
    texts += [
        f"Take line {names[path].lineno} out, which changes {path} itself"
        for path in computed
        if path in {path_of(n) for n in ast.walk(names[path])}
    ]
    return ". ".join(texts)


def _is_computed(value: ast.expr, names: Collection[str]) -> bool:
    """Whether the value is another one than the number that was read."""
    match value:
        case ast.Call(func=ast.Name(id="int"), args=[read]):
            return _is_computed(read, names)
        case ast.Subscript() | ast.Call():
            return not holds(value, ())
    return True


def _only_talks(n: ast.AST) -> bool:
    match n:
        case ast.If(orelse=[]):
            return all(map(_only_talks, n.body))
        case ast.Expr(value=ast.Call(func=func)):
            return (path_of(func) or "").rpartition(".")[2] in _TALKS
    return False


def read_ranks(tree: ast.Module, within: tuple[int, int]) -> dict[str, ast.expr]:
    """The path of each variable that holds a rank and is bound outside of the lines `within`, and its value. It holds
    one if it was assigned one, a value computed from one, or the answer to a question about one (`main = RANK == 0`).
    The result of a call is not a rank, and neither is the answer to whether there are ranks at all (`rank != -1`)."""
    ranks = dict[str, ast.expr]()
    changed = ((n.target, _sum_of(n)) for n in ast.walk(tree) if isinstance(n, ast.AugAssign))  # `accumulate //= world`
    for target, value in sorted((*_bound(tree), *changed), key=lambda pair: pair[1].lineno):
        if not within[0] <= value.lineno <= within[1] and (path := path_of(target)) is not None and holds(value, ranks):
            ranks[path] = value
    return ranks


def _sum_of(n: ast.AugAssign) -> ast.expr:
    """What `a //= b` gives to a."""
    read = copy.copy(n.target)
    read.ctx = ast.Load()
    return ast.copy_location(ast.BinOp(read, n.op, n.value), n.value)


def _bound(tree: ast.Module) -> Iterator[tuple[ast.expr, ast.expr]]:
    """The assignments in the order of the lines; `a, b = c, d` is two."""
    assignments = [n for n in ast.walk(tree) if isinstance(n, ast.Assign | ast.AnnAssign)]
    for n in sorted(assignments, key=lambda n: n.lineno):
        if n.value is None:
            continue
        for target in n.targets if isinstance(n, ast.Assign) else [n.target]:
            pair = (target, n.value)
            if all(isinstance(e, ast.Tuple | ast.List) for e in pair) and len(target.elts) == len(n.value.elts):  # type: ignore[attr-defined]
                yield from zip(target.elts, n.value.elts, strict=True)  # type: ignore[attr-defined]
            else:
                yield pair


def holds(value: ast.expr, names: Collection[str]) -> bool:
    """Whether the expression is a rank, or depends on one. `names`: the variables that hold one."""
    if (path_of(value) or "") in names:
        return True
    match value:
        case ast.Subscript(value=owner, slice=ast.Constant(value=str() as key)):
            return key in RANKS and _is_environment(owner)
        case ast.Call(func=ast.Name(id=name), args=arguments) if name in _CONVERSIONS:
            return any(holds(a, names) for a in arguments)
        case ast.Call(func=ast.Attribute(value=owner, attr="get"), args=[ast.Constant(value=key), *_]):
            return key in RANKS and _is_environment(owner)
        case ast.Call(func=function, args=[ast.Constant(value=key), *_]):
            return key in RANKS and (path_of(function) or "").endswith("getenv")
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            return not _asks_whether_any(op, right) and (holds(left, names) or holds(right, names))
        case ast.IfExp(test=test, body=body, orelse=orelse):
            # A choice between objects is made once; a choice between values gives each rank its own.
            chosen = not any(isinstance(e, ast.Call) for e in (body, orelse)) and holds(test, names)
            return chosen or holds(body, names) or holds(orelse, names)
        case ast.BinOp() | ast.UnaryOp() | ast.BoolOp() | ast.Compare():
            return any(holds(e, names) for e in ast.iter_child_nodes(value) if isinstance(e, ast.expr))
    return False


def _is_environment(owner: ast.expr) -> bool:
    path = path_of(owner) or ""
    return path == "environ" or path.endswith(".environ")


def _asks_whether_any(op: ast.cmpop, right: ast.expr) -> bool:
    try:
        limit = ast.literal_eval(right)
    except ValueError:
        return False
    match op:
        case ast.Eq() | ast.NotEq() | ast.Is() | ast.IsNot():
            return limit in _ABSENT
        case ast.Gt() | ast.LtE():
            return bool(limit == -1)
        case ast.GtE() | ast.Lt():
            return bool(limit == 0)
    return False
