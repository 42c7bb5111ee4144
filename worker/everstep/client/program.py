"""The program that a job runs: files, of which the first is started. Made from a script or from a function's text.

A function is sent as text. Invariant: the text compiles to the code of the function, and uses no name that it does
not define or import itself; all else is refused before a job is made.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import dis
import inspect
import re
import symtable
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, Final

from everstep.client.errors import InvalidRequest

MAX_BYTES: Final = 1024 * 1024  # of a ConfigMap
_FILE = re.compile(r"[A-Za-z0-9_][-._A-Za-z0-9]{0,252}")
_CALLS: Final = {"LOAD_METHOD": "LOAD_ATTR", "CALL_METHOD": "CALL"}
_LEFT_OUT: Final = ("PUSH_NULL", "EXTENDED_ARG", "NOP")
_UNSTEADY: Final = frozenset([*dis.hasjrel, *dis.hasjabs, *dis.hasconst])  # constants are compared by themselves
_FUTURE: Final = sum({getattr(__future__, name).compiler_flag for name in __future__.all_feature_names})


@dataclass(frozen=True, slots=True)
class Program:
    name: str  # of the script or the function
    main: str  # the file that is started
    arguments: tuple[str, ...]
    files: Mapping[str, str]  # texts by name


def of(
    script: str | Path | None,
    function: Callable[..., Any] | None,
    args: Sequence[Any] | Mapping[str, Any],
    files: Iterable[str | Path],
) -> Program:
    """Raises `InvalidRequest`."""
    if (script is None) == (function is None):
        raise InvalidRequest("give either script=FILE or function=FUNCTION")
    if script is not None:
        main, name = Path(script), Path(script).stem
        texts, arguments = {main.name: _read(main)}, _words(args)
    else:
        assert function is not None
        name = getattr(function, "__name__", "function")
        main, arguments = Path(f"{name}.py"), ()
        texts = {main.name: _text(function, args)}
    for file in map(Path, files):
        if file.name in texts:
            raise InvalidRequest(f"files: {file.name} is there twice: all files lie in one folder")
        texts[file.name] = _read(file)
    for each in texts:
        if not _FILE.fullmatch(each):
            raise InvalidRequest(f"{each!r}: a file's name has letters, digits, '-', '_' and '.' alone: rename it")
    size = sum(len(text.encode()) for text in texts.values())
    if size > MAX_BYTES:
        raise InvalidRequest(f"the files have {size} bytes, more than the {MAX_BYTES} that can be sent: use an image")
    return Program(name, main.name, arguments, texts)


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise InvalidRequest(f"{path}: more than the {MAX_BYTES} bytes that can be sent: put it into an image")
        return path.read_text("utf-8")
    except UnicodeDecodeError:
        raise InvalidRequest(f"{path}: no text in UTF-8: put it into an image") from None
    except OSError as e:
        raise InvalidRequest(f"{path} cannot be read: {e.strerror}") from None


def _words(args: Sequence[Any] | Mapping[str, Any]) -> tuple[str, ...]:
    if isinstance(args, str | Mapping) or not all(isinstance(each, str | int | float | Path) for each in args):
        raise InvalidRequest(f"args={args!r}: of a script it is a list of words, as in ['--steps', 100]")
    return tuple(map(str, args))


def _text(function: Callable[..., Any], args: Sequence[Any] | Mapping[str, Any]) -> str:
    """A script that calls the function."""
    if not isinstance(function, FunctionType) or function.__name__ == "<lambda>":
        raise InvalidRequest(f"function={function!r}: a function that is written with def is expected; or give script=")
    name = function.__name__
    problem = f"function {name} cannot be sent"
    if function.__code__.co_freevars:
        names = ", ".join(function.__code__.co_freevars)
        raise InvalidRequest(f"{problem}: it uses {names} of the function around it: pass them by args={{...}}")
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError):
        raise InvalidRequest(
            f"{problem}: its text cannot be read back: write it into a file, and give script="
        ) from None
    if source[:1].isspace():
        source = f"if True:\n{source}"  # without it, strings of several lines would have to be changed too
    flags = function.__code__.co_flags & _FUTURE
    compiled = _compiled(source, name, flags)
    if compiled is None or not _same(compiled, function.__code__):
        raise InvalidRequest(
            f"{problem}: its text is not what was run: it has changed since, or was made by a decorator or another "
            "tool. Define it anew, or give script="
        )
    lacking = sorted(_globals(source) - set(dir(builtins)) - {name, "__file__"})
    if lacking:
        raise InvalidRequest(
            f"{problem}: it uses {', '.join(lacking)}, which are outside it: import and define inside the function, or "
            "pass values by args={...}"
        )
    features = [each for each in __future__.all_feature_names if flags & getattr(__future__, each).compiler_flag]
    head = f"from __future__ import {', '.join(features)}\n\n" if features else ""
    return f'{head}{source}\n\nif __name__ == "__main__":\n    {name}({_call(function, args)})\n'


def _call(function: FunctionType, args: Sequence[Any] | Mapping[str, Any]) -> str:
    keywords = args if isinstance(args, Mapping) else {}
    values = () if isinstance(args, Mapping) else args
    if isinstance(values, str):
        raise InvalidRequest(f"args={args!r}: a mapping of the function's arguments is expected, or a list of them")
    try:
        inspect.signature(function).bind(*values, **keywords)
    except TypeError as e:
        raise InvalidRequest(f"args={args!r} are not what {function.__name__} takes: {e}") from None
    return ", ".join([*map(_literal, values), *(f"{key}={_literal(value)}" for key, value in keywords.items())])


def _literal(value: Any) -> str:
    text = repr(value)
    try:
        same = repr(ast.literal_eval(text)) == text
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        same = False
    if not same:
        raise InvalidRequest(f"args: {text[:80]} is no literal: numbers, strings, None, and lists and dicts of them")
    return text


def _compiled(source: str, name: str, flags: int) -> CodeType | None:
    try:
        module = compile(source, "<function>", "exec", flags=flags, dont_inherit=True)
    except (SyntaxError, ValueError):
        return None
    codes = [each for each in module.co_consts if isinstance(each, CodeType) and each.co_name == name]
    return codes[0] if len(codes) == 1 else None


def _same(one: CodeType, other: CodeType) -> bool:
    parts = ("co_names", "co_varnames", "co_freevars", "co_cellvars", "co_argcount", "co_kwonlyargcount")
    return (
        all(getattr(one, part) == getattr(other, part) for part in parts)
        and _operations(one) == _operations(other)
        and len(one.co_consts) == len(other.co_consts)
        and all(map(_same_constant, one.co_consts, other.co_consts))
    )


def _operations(code: CodeType) -> list[tuple[str, Any]]:
    """What the code does. How a method is called, and so how far jumps go, also depends on the imports of the module
    around it, which the text alone does not have."""
    return [
        (_CALLS.get(each.opname, each.opname), None if each.opcode in _UNSTEADY else each.argval)
        for each in dis.get_instructions(code)
        if each.opname not in _LEFT_OUT
    ]


def _same_constant(one: Any, other: Any) -> bool:
    if isinstance(one, CodeType) and isinstance(other, CodeType):
        return _same(one, other)
    if isinstance(one, frozenset):  # whose order depends on how it was made
        return bool(one == other)
    return type(one) is type(other) and repr(one) == repr(other)


def _globals(source: str) -> set[str]:
    """The names that the text uses and does not define."""
    top = symtable.symtable(source, "<function>", "exec")
    names = {each.get_name() for each in top.get_symbols() if each.is_referenced() and not each.is_assigned()}
    own = {each.get_name() for each in top.get_symbols() if each.is_assigned()}
    tables = list(top.get_children())
    used: set[str] = set()
    while tables:
        table = tables.pop()
        tables += table.get_children()
        for each in table.get_symbols():
            if each.is_global() and each.is_referenced():
                used.add(each.get_name())
            if each.is_declared_global() and each.is_assigned():
                own.add(each.get_name())
    return names | (used - own)
