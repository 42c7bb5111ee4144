"""`everstep rehearse`: prove a script against losses on this machine, before it costs anything."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from everstep.cli.printing import SafeConsole, cell, say, say_error
from everstep.contract.stamp import Stamp
from everstep.rehearse import findings as compare
from everstep.rehearse import stamp as stamps
from everstep.rehearse.beginning import fetch
from everstep.rehearse.findings import Finding, Kind
from everstep.rehearse.folder import Folder, remove_abandoned
from everstep.rehearse.page import page
from everstep.rehearse.plan import Kill, PlanError, Scenario, calm, check, scenarios
from everstep.rehearse.play import Played, Player

SOMETHING_FOUND, USAGE, SLOW = 1, 2, 3  # exit codes
EVERY = 7  # steps between two saves; what a script does in a round number of steps has no commit at its beginning

app = typer.Typer(add_completion=False)
EXPECTED = ()


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def rehearse(
    script: Annotated[
        Path, typer.Argument(exists=True, dir_okay=False, help="The training script; its own arguments after it.")
    ],
    arguments: Annotated[list[str] | None, typer.Argument()] = None,
    ranks: Annotated[int, typer.Option(help="Processes.")] = 3,
    steps: Annotated[int, typer.Option(help="After so many steps the run ends.")] = 40,
    kill: Annotated[
        str, typer.Option(help="What is lost: rank, all, size, store; with commas between them.")
    ] = "rank,all,size",
    at: Annotated[str, typer.Option(help="auto, or kills of your own: 1@12:backward,0+1+2@20:begin.")] = "auto",
    limit: Annotated[float, typer.Option(min=10, help="Seconds to a run's first step, and as many from there.")] = 300,
    json_: Annotated[Path | None, typer.Option("--json", help="Write the report there, as JSON.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write the report there, as a page of HTML.")] = None,
    strict: Annotated[bool, typer.Option(help="A warning fails the rehearsal too.")] = False,
    keep: Annotated[bool, typer.Option(help="Keep the folder of the runs, with their logs.")] = False,
    from_: Annotated[
        str | None,
        typer.Option(
            "--from", metavar="URL@STEP", help="Begin from this commit of a run; without @STEP from its newest."
        ),
    ] = None,
    stamp: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Leave the stamp below this folder or checkpoint URL; else in .everstep by the script."
        ),
    ] = None,
) -> None:
    """Run a script calm, with a rank killed, with all killed, and with one rank more and fewer, in processes that go on
    and in new ones; compare the runs.

    Exit codes: 0, nothing found; 1, something was; 2, it cannot be rehearsed as asked; 3, the machine was too slow.
    """
    kinds, kills = _plan(ranks, steps, kill, at, stamp, {"--json": json_, "--html": html})
    _listen()
    remove_abandoned()
    owned = Folder()
    folder = owned.path
    began = time.monotonic()
    owned.kept = keep
    try:
        beginning = fetch(from_, folder / "beginning") if from_ is not None else None
        command = [str(script.absolute()), *(arguments or [])]
        player = Player(folder, command, min(EVERY, steps // 2 - 1), limit, beginning)
        runs: list[Played] = []
        with closing(player), _shown_if_interrupted(owned, script, runs, began):
            _play(
                player,
                calm(ranks, steps),
                lambda run: scenarios(ranks, run.last, kinds, kills, run.evaluated, run.commits, run.heap_read),
                runs,
            )
        findings = compare.find(runs)
        owned.kept |= any(f.certain for f in findings)
        slow = any(f.kind is Kind.SLOW for f in findings)
        proves = not kills and set(kinds) >= stamps.PROVEN and not slow
        differs = any(f.kind not in (Kind.WRITTEN, Kind.SLOW) for f in findings)
        left, problem = _stamp(
            stamp,
            script,
            folder,
            ranks,
            runs[0].last,
            compare.left_out(runs),
            compare.unread(runs),
            proves=proves,
            differs=differs,
        )
        seconds = time.monotonic() - began
        report = _report(script, arguments or [], ranks, steps, runs, findings, seconds)
        report |= {"stamp": left, "from": beginning.step if beginning is not None else None}
        if json_ is not None:
            json_.write_text(json.dumps(report, indent=1) + "\n")
        if html is not None:
            note, results = compare.not_compared(runs), _results(runs, findings)
            html.write_text(page(" ".join([str(script), *(arguments or [])]), runs, findings, seconds, results, note))
        _show(script, runs, findings, seconds)
        if left is not None:
            say(f"stamp: {left}")
        _say_where(owned)
    except PlanError as e:
        say_error(f"everstep: {e}")
        raise typer.Exit(USAGE) from e
    finally:
        owned.leave()
    if problem:
        say_error(f"everstep: {problem}")
    if any(f.certain for f in findings):
        raise typer.Exit(SOMETHING_FOUND)
    if slow:
        raise typer.Exit(SLOW)
    if strict and findings:
        raise typer.Exit(SOMETHING_FOUND)
    if problem and stamp is not None:
        raise typer.Exit(USAGE)


def _plan(
    ranks: int, steps: int, kill: str, at: str, stamp: str | None, reports: Mapping[str, Path | None]
) -> tuple[tuple[str, ...], tuple[Kill, ...]]:
    """The kinds of losses, and kills of the user's own. `reports`: files to write, by option. Ends the command if it
    cannot be rehearsed so."""
    try:
        kills = () if at == "auto" else tuple(Kill.parse(text) for text in at.split(","))
        kinds = tuple(filter(None, kill.split(",")))
        check(ranks, steps, kinds, kills)
        stamps.check(stamp, () if kills else kinds)
        for option, file in reports.items():
            if file is not None and not file.parent.is_dir():
                raise PlanError(f"{option} {file}: there is no folder {file.parent}")
    except PlanError as e:
        say_error(f"everstep: {e}")
        raise typer.Exit(USAGE) from e
    return kinds, kills


@contextmanager
def _shown_if_interrupted(owned: Folder, script: Path, runs: list[Played], began: float) -> Iterator[None]:
    """Show what the runs that are over have found, and keep the folder for it, if the others do not come."""
    try:
        yield
    except BaseException as e:
        if runs:
            findings = compare.find(runs)
            _show(script, runs, findings, time.monotonic() - began, "interrupted, and more runs were to come")
            owned.kept |= any(f.certain for f in findings)
        elif isinstance(e, (KeyboardInterrupt, SystemExit)):
            say(f"\n{script}: interrupted before the first run was over, so nothing is known of the script")
        _say_where(owned)
        raise


def _say_where(owned: Folder) -> None:
    if owned.kept:
        say(f"\nlogs of each run: {owned.path}/*/log")


def _stamp(
    path: str | None, script: Path, folder: Path, ranks: int, steps: int, left_out: str, unread: str,
    *, proves: bool, differs: bool,
) -> tuple[str | None, str]:  # fmt: skip
    """Where the stamp of this rehearsal lies, if it leaves one; and why it could not. `left_out`: what was not
    compared; `unread`: what cannot be."""
    try:
        if differs:
            stamps.withdraw(path, script)
            return None, ""
        if not proves:
            return None, ""
        if left_out:
            return None, (
                f"no stamp: a run would trust it, and these were not compared: {left_out}. Track them, or keep less in "
                "them while the script is rehearsed"
            )
        if unread:
            return None, (
                f"no stamp: a run would trust it, and these cannot be read: {unread}. If steps change what is in them, "
                "keep that in a list or a dictionary, and track it; if nothing is lost with them, declare them by "
                'run.untracked("name")'
            )
        program = stamps.program_of(folder)
        if program is None:
            return None, "no stamp: a file of the script was changed meanwhile, or none of its processes ended in order"
        at = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        return stamps.write(path, script, Stamp(program, ranks, steps, at)), ""
    except PlanError as e:
        return None, str(e)


def _listen() -> None:
    signal.signal(signal.SIGTERM, _interrupted)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell lets its background jobs ignore it
        signal.signal(signal.SIGINT, _interrupted)


def _interrupted(number: int, _: object) -> None:
    """Say so at once, because processes may take a minute to end on a busy machine. Then end as an error does, so that
    the processes and the folder of the rehearsal go."""
    with suppress(OSError):  # a closed terminal
        os.write(2, b"\neverstep: interrupted: the runs are being ended\n")  # a print may be what is interrupted
    raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)


def _play(player: Player, first: Scenario, rest: Callable[[Played], list[Scenario]], runs: list[Played]) -> None:
    """Append the calm run to `runs`, and those that `rest` makes of it, in this order; side by side
    where there are processors for it."""
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total} steps")
    with Progress(*columns, console=SafeConsole(stderr=True), transient=True) as bar:

        def play(scenario: Scenario) -> Played:
            task = bar.add_task(scenario.title, total=scenario.steps)
            run = player.play(scenario, lambda done: bar.update(task, completed=done))
            if runs and compare.differs_by_chance(runs[0], run):
                run = replace(run, alike=player.play_alike(scenario, lambda done: bar.update(task, completed=done)))
            bar.update(task, completed=run.last)
            return run

        def ended(run: Played) -> None:
            runs.append(run)
            if not bar.console.is_terminal:
                say_error(f"{run.scenario.title}: {run.last} step{'' if run.last == 1 else 's'} in {run.seconds:.0f} s")

        ended(play(first))
        if compare.find(runs):
            return
        further, seconds = rest(runs[0]), runs[0].seconds
        room = max(1, (os.cpu_count() or 1) // (first.sizes[0] + 1))
        bar.console.print(f"{len(further)} runs more, each of about {seconds:.0f} s and more", style="dim")
        with ThreadPoolExecutor(room) as pool:
            try:
                for run in pool.map(play, further):
                    ended(run)
                    if run.proves_nothing or compare.differs_from_itself(runs):
                        player.stop()  # the others would be as slow, or could be compared with nothing
                        break
                    for finding in compare.find(runs):
                        if finding.certain and finding.scenarios == (run.scenario.title,):
                            bar.console.print(cell(f"FOUND ({run.scenario.title}): {finding.text}"), soft_wrap=True)
            except BaseException:
                player.stop()  # else Ctrl-C would wait for the runs in progress
                raise


def _show(script: Path, runs: list[Played], findings: list[Finding], seconds: float, end: str = "") -> None:
    console = SafeConsole()
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("RUN", "STEPS", "KILLED", "SECONDS", "RESULT"):
        table.add_column(column, justify="left" if column in ("RUN", "RESULT") else "right")
    for run, result in zip(runs, _results(runs, findings), strict=True):
        mine = [f for f in findings if run.scenario.title in f.scenarios]
        certain = [f for f in mine if f.certain]
        table.add_row(
            cell(run.scenario.title), str(run.last), str(run.killed), f"{run.seconds:.1f}",
            cell(result, "red" if certain else "yellow" if mine else "green"),
        )  # fmt: skip
    console.print(table)
    for finding in findings:
        what = "FOUND" if finding.certain else "NOT JUDGED" if finding.kind is Kind.SLOW else "WARNING"
        runs_of = "; ".join(finding.scenarios)
        console.print(cell(f"\n{what} ({runs_of}): {finding.text}", "bold" if finding.certain else ""))
    if left_out := compare.left_out(runs):
        say(f"\nnot compared: {left_out}")
    if unread := compare.unread(runs):
        say(
            f"\nnot read: {unread}. If steps change what is in them: keep that in a list or a dictionary, and track it."
            ' If nothing is lost with them: run.untracked("name")'
        )
    certain_count = sum(f.certain for f in findings)
    if carried := next((run.carried for run in runs if run.carried), ""):
        harmless = " (the parameters came out the same)" if not certain_count and not end else ""
        say(f"\ncarried by the loop and not tracked{harmless}: {carried}")
    if not end and runs[-1].proves_nothing:
        end = "no further run was made, because the machine was too slow"
    elif not end and compare.differs_from_itself(runs):
        end = "no run with a loss was made, because two calm ones differ already: mend that first"
    elif not end and len(runs) == 1:
        end = "no other run was made, because the calm one came to nothing"
    counts = f"{certain_count} found, {len(findings) - certain_count} warnings, in {seconds:.0f} s"
    say(f"\n{script}: {counts}{'; ' if end else ''}{end}")


def _results(runs: list[Played], findings: list[Finding]) -> list[str]:
    """For each run what came of it, in a few words."""
    results = []
    for run in runs:
        mine = [f for f in findings if run.scenario.title in f.scenarios]
        if any(f.kind is Kind.SLOW for f in mine):
            results.append("too slow")
        elif any(f.certain for f in mine):
            results.append("failed" if run is runs[0] else "differs")
        elif run is runs[0]:
            results.append("–")
        else:
            kinds = ", ".join(sorted({f.kind for f in mine}))
            results.append(f"as calm, but {kinds}" if kinds else "as calm")
    return results


def _report(
    script: Path,
    arguments: list[str],
    ranks: int,
    steps: int,
    runs: list[Played],
    findings: list[Finding],
    seconds: float,
) -> dict[str, Any]:
    return {
        "script": str(script),
        "arguments": arguments,
        "ranks": ranks,
        "steps": steps,
        "seconds": round(seconds, 1),
        "left_out": compare.left_out(runs),
        "unread": compare.unread(runs),
        "carried": next((run.carried for run in runs if run.carried), ""),
        "runs": [
            {
                "name": run.scenario.name, "title": run.scenario.title, "steps": run.last, "killed": run.killed,
                "code": run.code, "hung": run.hung, "seconds": round(run.seconds, 1),
                "played": 1 if run.first is None else 2,
                "files": {name: file.size for name, file in run.files.items()},
            }
            for run in runs
        ],
        "findings": [
            {
                "kind": f.kind, "certain": f.certain, "runs": list(f.scenarios), "step": f.step, "names": list(f.names),
                "text": f.text,
            }
            for f in findings
        ],
    }  # fmt: skip
