"""`everstep doctor`: whether the libraries of this machine have the private names that Everstep uses; or a cluster what
jobs need."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict
from importlib import import_module
from typing import Annotated, Any

import typer
from rich.table import Table

from everstep.cli.jobs.commands import Context, Kubeconfig, Namespace
from everstep.cli.printing import SafeConsole, cell, say
from everstep.jobs.source import JobError, Unreachable, Where
from everstep.torch_private import names
from everstep.torch_private.table import TABLE, TESTED
from everstep.version import __version__

MISSING = 1  # exit code

app = typer.Typer(add_completion=False)
EXPECTED = (JobError, Unreachable)


@app.command()
def doctor(
    json_: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    cluster: Annotated[bool, typer.Option("--cluster", help="Look at the cluster of your context instead.")] = False,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Say which versions are installed, and look for the private names of torch and other libraries that Everstep uses.

    Imports the libraries, which takes seconds. With --cluster, or one of -n, --context and --kubeconfig: whether the
    cluster has what jobs need, and you the rights. Exit codes: 0, all is there; 1, something is missing.
    """
    where = Where(namespace, context, kubeconfig)
    if cluster or where.names_a_cluster:
        _look_at_cluster(where, json_)
        return
    absent, missing = names.look()
    report = {
        "everstep": __version__,
        "python": platform.python_version(),
        "libraries": [
            {
                "name": library,
                "version": None if library in absent else names.version_of(library),
                "tested": TESTED[library],
                "names": sum(len(row.names.split()) for row in TABLE if row.library == library),
            }
            for library in TESTED
        ],
        "missing": [
            {"name": name, "library": row.library, "for": row.why, "since": row.since, "instead": row.instead}
            for row, name in missing
        ],
    }
    if json_:
        say(json.dumps(report, indent=1))
    else:
        _show(report)
    if missing:
        raise typer.Exit(MISSING)


def _look_at_cluster(where: Where, json_: bool) -> None:
    connected = import_module("everstep.jobs.cluster").connect(where)
    findings = list(import_module("everstep.cli.jobs.cluster_check").look(connected))
    if json_:
        say(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        for finding in findings:
            word = {True: "good", False: "BAD", None: "unknown"}[finding.good]
            say(f"{finding.check:<12} {word:<8} {finding.text}")
    if any(finding.good is False for finding in findings):
        raise typer.Exit(MISSING)


def _show(report: dict[str, Any]) -> None:
    say(f"everstep {report['everstep']}, Python {report['python']}")
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("LIBRARY", "INSTALLED", "TESTED WITH", "PRIVATE NAMES"):
        table.add_column(column)
    for row in report["libraries"]:
        lacking = sum(each["library"] == row["name"] for each in report["missing"])
        there = f"{lacking} of {row['names']} missing" if lacking else f"all {row['names']}"
        table.add_row(
            cell(row["name"]), cell(row["version"] or "no"), cell(row["tested"]),
            cell("–" if row["version"] is None else there, "red" if lacking else ""),
        )  # fmt: skip
    SafeConsole().print(table)
    for each in report["missing"]:
        say(f"\nMISSING {each['name']}: {each['for']}. There since {each['since']}. Public way: {each['instead']}")
    for library in sorted({each["library"] for each in report["missing"]}):
        say(f'\nTo have what is missing: pip install "{TESTED[library]}"')
