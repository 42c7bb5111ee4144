"""Parts of the reference pages that the code decides, as Markdown: tables of commands, metrics, variables and values.

Each function is pure in that it reads only the code and the chart of this checkout.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from typing import Any

import yaml

from documents.build_site import ROOT
from everstep.cli.main import COMMANDS, EXIT_CODES
from everstep.contract import variables
from everstep_operator import settings
from everstep_operator.telemetry import job_metrics
from everstep_operator.telemetry.metrics import Metrics

CHART = ROOT / "charts/everstep"
MOST_VALUES = 13  # of a label that are listed


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["".join(f"| {cell} " if cell else "| " for cell in row) + "|" for row in (columns, *rows)]
    return "\n".join([lines[0], "|---" * len(columns) + "|", *lines[1:]]) + "\n"


def code(word: object) -> str:
    return f"`{word}`"


def in_a_cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def commands() -> str:
    """Each command of `everstep` with its arguments and options."""
    return "\n".join(text for name in sorted(COMMANDS) for text in _command(f"everstep {name}", COMMANDS[name]))


def _command(name: str, command: Any) -> Iterator[str]:
    shown = [parameter for parameter in command.params if not getattr(parameter, "hidden", False)]
    words = [_usage(parameter) for parameter in shown if not _is_option(parameter)]
    usage = " ".join([name, *words])
    text = f"## {name}\n\n{inspect.cleandoc(command.help or '')}\n\n```text\n{usage}\n```\n"
    rows = [(code(_usage(one)), _default(one), in_a_cell(_help(one))) for one in shown if _is_option(one) or _help(one)]
    yield text + ("\n" + table(("argument or option", "default", "meaning"), rows) if rows else "")
    for below, inner in sorted(getattr(command, "commands", {}).items()):
        yield from _command(f"{name} {below}", inner)


def _is_option(parameter: Any) -> bool:
    return str(parameter.opts[0]).startswith("-")


def _usage(parameter: Any) -> str:
    if not _is_option(parameter):
        word = parameter.name + ("..." if parameter.nargs == -1 else "")
        return word if parameter.required else f"[{word}]"
    names = ", ".join([*parameter.opts, *parameter.secondary_opts])
    return names if parameter.is_flag else f"{names} {parameter.metavar or parameter.name.strip('_').upper()}"


def _default(parameter: Any) -> str:
    value = parameter.default
    if parameter.required:
        return "**required**"
    if value is None or value is False or value in ([], ()) or callable(value):
        return ""
    return code(value.value if isinstance(value, Enum) else value)


def _help(parameter: Any) -> str:
    text = parameter.help or ""
    if isinstance(parameter.default, Enum):
        text += f" One of {', '.join(str(choice.value) for choice in type(parameter.default))}."
    return text


def exit_codes() -> str:
    return table(("code", "meaning"), ((str(number), meaning) for number, meaning in EXIT_CODES.items()))


def metrics() -> str:
    """The metrics of the operator as a whole."""
    rows = [
        (code(_sample(one.name, one.kind)), one.kind, "; ".join(map(_label, one.labels.items())) or "–", one.meaning)
        for one in Metrics(process=False).families
    ]
    own = (
        code("process_*") + ", " + code("python_info"),
        "",
        "",
        "Memory, CPU time and file descriptors of the operator.",
    )
    return table(("metric", "type", "labels", "meaning"), [*rows, own])


def _label(item: tuple[str, Iterable[str]]) -> str:
    name, values = item[0], list(item[1])
    return code(name) + (f" ({', '.join(values)})" if len(values) <= MOST_VALUES else "")


def _sample(name: str, kind: str) -> str:
    return f"{name}_total" if kind == "counter" else name


def metrics_of_jobs() -> str:
    """The metrics of single jobs and nodes."""
    rows = [
        (code(_sample(one.name, one.kind)), one.kind, ", ".join(map(code, one.lines.labels)) or "–", one.meaning)
        for one in job_metrics.FAMILIES
    ]
    return table(("metric", "type", "labels", "meaning"), rows)


def variables_of_users() -> str:
    rows = [(code(name), default, meaning) for name, (default, meaning) in sorted(variables.SET_BY_USERS.items())]
    return table(("variable", "default", "meaning"), rows)


def variables_of_workers() -> str:
    return table(("variable", "meaning"), ((code(name), text) for name, text in variables.SET_BY_OPERATOR.items()))


def internal_variables() -> str:
    return f"{', '.join(map(code, sorted(variables.INTERNAL)))}.\n"


def settings_of_the_operator() -> str:
    rows = [
        (code(one.name), code(one.flag), code(one.default) if one.default else "", in_a_cell(one.text))
        for one in settings.VARIABLES
    ]
    return table(("variable", "flag", "default", "meaning"), rows)


def chart_values() -> str:
    """Each value of the chart that can be set by itself, with its default and what the schema says of it."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    default = yaml.safe_load((CHART / "values.yaml").read_text())
    return table(("value", "default", "meaning"), _values(schema, schema, default, (), ""))


def _values(
    schema: dict[str, Any], node: dict[str, Any], default: Any, path: tuple[str, ...], inherited: str
) -> Iterator[tuple[str, str, str]]:
    definition = schema["definitions"].get(node.get("$ref", "").rpartition("/")[2], {})
    described = node.get("description", definition.get("description", inherited))
    properties = {**definition, **node}.get("properties")
    if not properties or default == {}:
        yield code(".".join(path)), code(json.dumps(default, ensure_ascii=False)), in_a_cell(described)
        return
    for name, value in default.items():
        yield from _values(schema, properties[name], value, (*path, name), described)
