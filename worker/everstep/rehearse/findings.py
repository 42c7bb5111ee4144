"""Compares the runs of a rehearsal step by step, and says what differs first. Pure.

The calm run is what a script does when nothing happens. A run that was disturbed must come to the same: to the bit with
the same number of ranks; with another number to what does not depend on it. A name whose value differs between two calm
runs (a time, a path) is compared in no other.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeVar

from everstep.rehearse import remedies
from everstep.rehearse.begun_anew import begun_anew
from everstep.rehearse.live_change import NOT_COMPARED, counted, difference, is_comparable, keeps_batch
from everstep.rehearse.measured_numbers import broken
from everstep.rehearse.plan import AGAIN, LEAST_STEPS
from everstep.rehearse.play import Played
from everstep.rehearse.record import BUFFERS, DIGEST, NUMBER, Record, Steps
from everstep.rehearse.remedies import MOST_NAMED
from everstep.rehearse.written import differing_files, differing_prints

_Value = TypeVar("_Value")

_STAMP = re.compile(r"^\d\d:\d\d:\d\d\S* everstep-run: (exit code \d+: )?")
_CODE_ALONE = re.compile(r"rank \d+: exit code \d+")
STDOUT = "stdout"


class Kind(StrEnum):
    REFUSED = "refused"  # by Everstep, while it ran
    ENDED = "ended"  # with another exit code, or never
    SAMPLES = "samples"  # other data
    TRACKED = "tracked"  # other parameters, or other tracked state
    HELD = "held"  # other values of the script's own, and no other result
    UNSAVED = "unsaved"  # nothing was committed, so a restart proves nothing
    SIZE = "size"  # another number of ranks is refused, by a library's loop that has one size; or makes another batch
    BUFFERS = "buffers"  # other running statistics, and no other parameter
    WORKERS = "workers"  # what changes in the workers of a loader, where no comparison reads it
    DRAWS = "draws"  # all ranks draw the same samples
    LOADED = "loaded"  # optimizers that had taken steps before the run began with its first
    WRITTEN = "written"  # other files or lines, and no other result
    CHANCE = "chance"  # two calm runs differ
    SLOW = "slow"  # no judgement: the machine was too slow
    ONCE = "once"  # a calm run that failed, and not when it was repeated


CERTAIN = frozenset({Kind.REFUSED, Kind.ENDED, Kind.SAMPLES, Kind.TRACKED, Kind.CHANCE})


@dataclass(frozen=True)
class Finding:
    """`step`: the first completed step behind which it shows; None: it belongs to no step."""

    kind: Kind
    scenarios: tuple[str, ...]  # the titles of the runs that show it
    text: str
    step: int | None = None
    names: tuple[str, ...] = ()

    @property
    def certain(self) -> bool:
        return self.kind in CERTAIN


def find(runs: list[Played]) -> list[Finding]:
    """All findings, the certain ones first. `runs[0]` is calm; a second one, of the same, too."""
    calm = runs[0]
    if (problem := _ended(calm)) is not None:
        return [problem]
    if not any(record.tracked for record in calm.steps.values()):
        text = (
            "the script keeps no state by Everstep, so no loss can be judged: it neither tracks any in a run "
            "(everstep.start) nor saves any by an everstep.Checkpointer, nor keeps any in an hvd.elastic.TorchState"
        )
        return [Finding(Kind.ENDED, (calm.scenario.title,), text, calm.last)]
    if calm.last < LEAST_STEPS:
        text = f"ended after {calm.last} steps. At least {LEAST_STEPS} are needed: give it more data, epochs or steps"
        return [Finding(Kind.ENDED, (calm.scenario.title,), text, calm.last)]
    found = _beside(calm) if len(runs) > 1 else []  # what a calm run alone shows ends a rehearsal
    chance: frozenset[str] = frozenset()
    again: Played | None = None
    for run in runs[1:]:
        if (problem := _ended(run)) is not None:
            found.append(problem)
            if problem.kind is Kind.SLOW and run.scenario.name == AGAIN:
                break  # which values differ by chance is not known
            continue
        if run.scenario.name == AGAIN:
            if run.first is not None and not run.first.slow:
                found.append(_failed_once(run.scenario.title, run.first))
            again, chance, problem = _twice_calm(calm, run)
            found += [problem] if problem is not None else []
            continue
        mine = _compared(calm, run, chance)
        if again is not None and not any(one.kind is Kind.TRACKED for one in mine):
            mine += _measured(calm, again, run, chance)
        if run.refused and not any(one.certain for one in mine):
            text = f"{run.refused}. A later start went on from the last commit, and came to the end"
            mine.append(Finding(Kind.REFUSED, (run.scenario.title,), text, run.last))
        if run.otherwise:
            mine = [one for one in mine if one.kind is not Kind.UNSAVED]  # it may be saved on a faster machine
            mine += [_lost_otherwise(run)] if not any(one.certain for one in mine) else []
        if again is not None and not run.scenario.resized:
            mine += _in_heap(calm, again, run, {name for one in mine for name in one.names})
            statistics = any(one.kind is Kind.BUFFERS for one in mine)
            mine += _written(calm, again, run, statistics) if not any(one.certain for one in mine) else []
        found += mine
    found += [one for pair in _live_pairs(runs) for one in _went_on_otherwise(calm, *pair, chance)]
    return sorted(_joined(found), key=lambda f: (not f.certain, f.kind == Kind.CHANCE))


def _beside(calm: Played) -> list[Finding]:
    """State where no comparison reads it, and samples that no run has otherwise: the calm run shows them."""
    return [*_in_workers(calm), *_in_files(calm), *_in_draws(calm), *_of_loaded(calm)]


def _in_draws(calm: Played) -> list[Finding]:
    """Generators from which all ranks draw the same samples, where no loader chooses them."""
    by_step: dict[int, list[Record]] = {}
    for (_, step), record in calm.steps.items():
        by_step.setdefault(step, []).append(record)
    steps = [ranks for ranks in by_step.values() if len(ranks) == ranks[0].world]
    if any(len(ranks) == 1 or any(one.losses != ranks[0].losses for one in ranks) for ranks in steps):
        return []
    names = sorted(
        name
        for name in {name for ranks in steps for one in ranks for name in one.drawn}
        if all(one.drawn.get(name) == ranks[0].drawn.get(name) for ranks in steps for one in ranks)
    )
    if not names:
        return []
    text = (
        f"all ranks drew the same random numbers in each step ({_listed(names)}) and had the same losses, so they "
        f"train on the same samples: {remedies.SEED if calm.own_loop else remedies.APART}"
    )
    return [Finding(Kind.DRAWS, (calm.scenario.title,), text, names=tuple(names))]


def _of_loaded(calm: Played) -> list[Finding]:
    """What the script has loaded from a file of its own, where the run begins with its first step."""
    if not calm.loaded or calm.begins is not None:
        return []
    text = (
        f"the script has loaded {calm.loaded} with steps that were taken before, and the run begins with step 0 and "
        "epoch 0 all the same, because it goes on from commits alone. If the file is of an earlier training: "
        "`run.epochs(loader, epochs - first)`, and do not write to it. If the run itself writes it, leave out what "
        "loads it"
    )
    return [Finding(Kind.LOADED, (calm.scenario.title,), text, names=tuple(calm.loaded.split(", ")))]


def _in_workers(calm: Played) -> list[Finding]:
    """What the workers of the script's loaders change in their copies of what it holds."""
    declared = {name for record in calm.steps.values() for name in record.untracked}
    names = [name for name in sorted(_outermost(dict.fromkeys(calm.in_workers))) if not _is_below(name, declared)]
    if not names:
        return []
    text = (
        f"{_listed(names)} change{'s' if len(names) == 1 else ''} in the workers of a loader, where nothing saves or "
        "compares it. After a loss, and in each new iterator, new workers begin with it anew. Let a sample depend on "
        "its index and the epoch alone, or compute in the step what depends on step.number; with num_workers=0 it "
        "would be compared. If no sample depends on it, declare it: "
        + ", ".join(f"run.untracked({name!r})" for name in names[:MOST_NAMED])
    )
    return [Finding(Kind.WORKERS, (calm.scenario.title,), text, names=tuple(names))]


def _in_files(calm: Played) -> list[Finding]:
    """Files outside of the script's folder by which a step hands something on to a later one."""
    if not calm.in_files:
        return []
    text = (
        f"a step reads what an earlier one has written to {_listed(list(calm.in_files))}, outside of the script's "
        "folder: another machine does not have it, and after a restart it is of a later step than the commit. Track "
        "what a later step reads"
    )
    return [Finding(Kind.WRITTEN, (calm.scenario.title,), text, names=calm.in_files)]


def left_out(runs: list[Played]) -> str:
    """What is not compared, so that the runs prove nothing of it, or "": what is too much to be read or cannot be read,
    and what one run alone has, though both came to their end."""
    calm = runs[0]
    names = {name for run in runs for record in run.steps.values() for name in record.beyond}
    for run in runs[1:]:
        if not run.scenario.resized and run.last == calm.last and not run.code:
            names |= _of_one_run(calm, run)
    for run, started in _live_pairs(runs):
        if not (run.code or started.code or is_comparable(run.live, _resized(started))):
            names.add(NOT_COMPARED)
    return _listed(sorted(names))


def unread(runs: list[Played]) -> str:
    """An object of each class in which a script may keep state and which cannot be read, if the script has not declared
    it; or ""."""
    records = [record for run in runs for record in run.steps.values()]
    declared = {name for record in records for name in record.untracked}
    first: dict[str, str] = {}
    for name, _, kind in sorted(one.partition(" (") for record in records for one in record.unread):
        if not _is_below(name, declared):
            first.setdefault(kind, f"{name} ({kind}")
    return _listed(sorted(first.values()))


def not_compared(runs: list[Played]) -> str:
    """Both of these."""
    return ", ".join(filter(None, (left_out(runs), unread(runs))))


def _of_one_run(calm: Played, run: Played) -> set[str]:
    """Steps and tracked objects. A rank that was killed when its step had been counted has not noted it."""
    killed = {(rank, kill.step + 1) for kill in run.scenario.kills for rank in kill.ranks}
    found = {f"step {step} of rank {rank}" for rank, step in (calm.steps.keys() ^ run.steps.keys()) - killed}
    for rank, step in calm.steps.keys() & run.steps.keys():
        if step == calm.last:
            alone = calm.steps[rank, step].tracked.keys() ^ run.steps[rank, step].tracked.keys()
            found |= {f"{name} (tracked in one run alone)" for name in alone}
    return found


def _joined(found: list[Finding]) -> list[Finding]:
    """One finding for all runs that show the same: the first of them has the text."""
    joined: dict[tuple[Kind, tuple[str, ...] | str], Finding] = {}
    for one in found:
        same = one.text if one.kind is Kind.WRITTEN else one.names or re.sub(r"\brank \d+", "a rank", one.text)
        key = (one.kind, same)
        known = joined.get(key)
        joined[key] = one if known is None else replace(known, scenarios=(*known.scenarios, *one.scenarios))
    return list(joined.values())


def _ended(run: Played) -> Finding | None:
    title = (run.scenario.title,)
    if run.refused and run.code and run.scenario.resized and run.in_library and not _went_on(run):
        text = (
            f"refused with another number of ranks: {run.refused}. Where the job has one size (--nnodes=N), that is as "
            "it should be"
        )
        return Finding(Kind.SIZE, title, text)
    if run.refused and run.code:
        beginning = f". {remedies.ANOTHER}" if run.begins is not None and run.last == 0 else ""
        seed = f". {remedies.seed(run)}" if remedies.SPLIT in run.refused else ""
        text = f"{run.refused}{_at(run, run.refused)}{beginning}{seed}{_anew(run)}"
        return Finding(Kind.REFUSED, title, text, run.last)
    if run.proves_nothing:
        twice = ", twice" if run.first is not None else ""
        text = (
            f"did not come to its end within --limit{twice}, and made {run.last} steps of {run.scenario.steps}: the "
            "machine was too slow to judge the script by it. Rehearse where less else runs, or with a longer --limit "
            "or fewer --steps"
        )
        return Finding(Kind.SLOW, title, text, run.last)
    if run.hung:
        text = f"did not come to its end within --limit: its last completed step is {run.last}"
        if run.last == 0:
            text = "completed no step within --limit: if it imports or builds for longer than that, pass a longer one"
        return Finding(Kind.ENDED, title, text, run.last)
    if run.code:
        text = f"exit code {run.code}: {_last_line(run)}{_at(run)}"
        if run.repeated:
            text = f"{run.repeated}; the next start ended with it too{_at(run)}"
        elif run.last >= run.scenario.steps and remedies.BEHIND_LOOP not in text:
            text += (
                f". It had taken all of its {run.last} steps: what a script does at an epoch's end may need --steps of "
                "a whole epoch"
            )
        text += _anew(run, remedies.of(run))
        return Finding(Kind.ENDED, title, text, run.last)
    if run.scenario.kills and run.killed == 0:
        points = ", ".join(kill.name for kill in run.scenario.kills)
        return Finding(Kind.ENDED, title, f"nobody was killed: the script never came to {points}", run.last)
    if run.last == 0:
        complete = f". The commit of --from has {run.begins} steps: the script may take no more" if run.begins else ""
        text = (
            remedies.UNCONVERTED
            if run.unconverted
            else f"ended before its first step, so there is nothing to compare{complete}"
        )
        return Finding(Kind.ENDED, title, text, 0)
    return None


def _lost_otherwise(run: Played) -> Finding:
    text = (
        f"{run.otherwise}, twice: the script is not judged by it. Rehearse where less else runs, or with a longer "
        "--limit"
    )
    return Finding(Kind.SLOW, (run.scenario.title,), text)


def _anew(run: Played, advice: str = "") -> str:
    """The names that the loop carries, for a finding that has no value of a new process to name; or ""."""
    if not run.carried or not run.scenario.kills:
        return ""
    return f". In a new process these begin anew, because nothing tracks them: {run.carried}{advice and f'. {advice}'}"


def _failed_once(title: str, run: Played) -> Finding:
    how = f"ended with exit code {run.code}: {_last_line(run)}" if not run.hung else "did not come to its end"
    text = (
        f"{how}. Nothing had been killed, and when it was repeated it came to its end: either the machine was too "
        "slow, or the script fails by chance"
    )
    return Finding(Kind.ONCE, (title,), text)


def _at(run: Played, text: str = "") -> str:
    """The script's line that an error came from, unless `text` names it."""
    place, _, _ = run.at.partition(" ")
    line = place.rpartition(":")[2]
    return f". It came from {run.at}" if place and place not in text and f"line {line} of" not in text else ""


def _last_line(run: Played) -> str:
    """Of the log. Where that is the agent's and has nothing but an exit code, the script's last line says more."""
    lines = [line for line in run.log.splitlines() if line.strip()]
    last = _STAMP.sub("", lines[-1]) if lines else "no output"
    printed = [line.strip() for line in lines if not _STAMP.match(line)]
    if printed and _CODE_ALONE.fullmatch(last):
        last += f", behind the line: {printed[-1]}"
    return last[:300].rstrip(": ")  # of an error without a text


def _went_on(run: Played) -> bool:
    """Whether a step was made with the last number of ranks."""
    return any(record.world == run.scenario.sizes[-1] for record in run.steps.values())


def _chance(calm: Played, again: Played) -> tuple[frozenset[str], Finding | None]:
    """The names of what each run has for itself; and a finding, if what is trained is among it."""
    names = set[str]()
    for key, record in calm.steps.items():
        other = again.steps.get(key)
        if other is not None:
            names |= {f"held {n}" for n in _differing(record.held, other.held)}
            names |= {f"tracked {n}" for n in _differing(record.tracked, other.tracked)}
    # A tracked number that alone differs is measured, as a sum of seconds is: nothing is trained by it.
    numbers = frozenset(
        f"tracked {name}"
        for record in calm.steps.values()
        for name, text in record.tracked.items()
        if text.startswith(NUMBER)
    )
    first = _first_tracked(calm, again, numbers) or _first_tracked(calm, again, frozenset(), buffers=True)
    if first is None:
        return frozenset(names), None
    step, tracked = first
    text = (
        f"two calm runs differ in {_listed(tracked)} from step {step} on, so no kill can be judged by it. "
        f"{remedies.seed(calm)}, and leave out what is not deterministic"
    )
    return frozenset(names), Finding(Kind.CHANCE, (again.scenario.title,), text, step, tuple(tracked))


def _twice_calm(calm: Played, again: Played) -> tuple[Played, frozenset[str], Finding | None]:
    """The second calm run, as `_chance` judges it: where the first has another hash seed, and training depends on that
    alone, the run that has the same seed."""
    names, problem = _chance(calm, again)
    if problem is None or (alike := _alike(calm, again)) is None:
        return again, names, problem
    return alike, _chance(calm, alike)[0], _of_order(problem)


def _alike(calm: Played, again: Played) -> Played | None:
    """The second calm run with the hash seed of the first, if it came to the same."""
    alike = again.alike
    return None if alike is None or alike.code or differs_by_chance(calm, alike) else alike


def differs_by_chance(calm: Played, again: Played) -> bool:
    """Whether what is trained differs between two calm runs."""
    return again.scenario.name == AGAIN and not again.code and _chance(calm, again)[1] is not None


def differs_from_itself(runs: list[Played]) -> bool:
    """Whether two calm runs are all that was made, and did not come to the same, with one hash seed either."""
    if len(runs) != 2 or runs[1].scenario.name != AGAIN:
        return False
    calm, again = runs
    if (problem := _ended(again)) is not None:
        return problem.certain
    return differs_by_chance(calm, again) and _alike(calm, again) is None


def _of_order(finding: Finding) -> Finding:
    """The hash seed alone was another."""
    text = (
        f"{_listed(list(finding.names))} come out otherwise from step {finding.step} on where PYTHONHASHSEED is "
        "another, and not in another calm run: what is trained depends on the order of a set or on hash(). Each "
        "process that begins anew has an order of its own. Take the elements in order (sorted(names)), or keep them in "
        "a list or a dictionary"
    )
    return replace(finding, text=text)


def _live_pairs(runs: list[Played]) -> list[tuple[Played, Played]]:
    """Each run in which processes went on with another number of ranks, and the run that was started with that one."""
    by_size = {run.scenario.sizes[-1]: run for run in runs if run.scenario.resized}
    changes = [(run, run.scenario.change) for run in by_size.values() if run.live]
    return [(run, by_size[change.size]) for run, change in changes if change is not None and change.size in by_size]


def _resized(run: Played) -> Steps:
    """The steps with the last number of ranks."""
    return {key: record for key, record in run.steps.items() if record.world == run.scenario.sizes[-1]}


def _went_on_otherwise(calm: Played, run: Played, started: Played, chance: frozenset[str]) -> list[Finding]:
    """A finding, if the processes that went on with another number of ranks trained otherwise than those that were
    started with it."""
    change, anew = run.scenario.change, _resized(started)
    if change is None or not is_comparable(run.live, anew) or keeps_batch(run.live, anew, calm.steps):
        return []
    first = difference(run.live, anew, _resized(run), chance)
    if first is None:
        return []
    what = "a rank had joined" if change.size > run.scenario.sizes[0] else "the last rank had left"
    shows = (
        f"step {first.step - 1} was computed from other samples"
        if first.samples
        else f"{_listed(first.tracked)} {'differs' if len(first.tracked) == 1 else 'differ'} from step {first.step} on"
    )
    values = {name: (first.step, text) for name, text in first.values.items()}
    text = (
        f"{shows}: behind step {change.step} {what} and the other processes went on, with {counted(change.size)}. "
        f"Processes that were started with {change.size} from the same commit train otherwise"
    )
    text += f". Before it, or with it, {_values(values)}. {remedies.PRESENT}" if values else f". {remedies.PRESENT}"
    kind = Kind.SAMPLES if first.samples else Kind.TRACKED
    return [Finding(kind, (run.scenario.title,), text, first.step, (*values, *first.tracked))]


def _measured(calm: Played, again: Played, run: Played, chance: frozenset[str]) -> list[Finding]:
    """The first number of a tracked object that differs in each run, and in this one in another way than in the calm
    ones."""
    for one in broken(calm.steps, again.steps, run.steps, chance)[:1]:
        text = (
            f"{one.name}, which differs in each run, {one.text} behind step {one.step}, and does nothing of the kind "
            f"in the calm runs. {remedies.of(run)}"
        )
        kind = Kind.TRACKED if one.saved else Kind.HELD
        return [Finding(kind, (run.scenario.title,), text, one.step, (one.name,))]
    return []


def _in_heap(calm: Played, again: Played, run: Played, known: Collection[str]) -> list[Finding]:
    """What changes with the steps and begins anew in places to which no variable leads. `known`: names of the run's
    other findings. An attribute that one of them has is that of its object: `Queue.queue` is `line.queue`."""
    values: Differing = {}
    for rank, heaps in sorted(calm.heaps.items()):
        values = begun_anew(heaps, again.heaps.get(rank, {}), run.heaps.get(rank, {}), rank) | values
    ends = {name.rpartition(".")[2] for name in known if "." in name}
    declared = {name for record in run.steps.values() for name in record.untracked}
    values = {
        name: value for name, value in values.items()
        if name.rpartition(".")[2] not in ends and not _is_below(name, declared)
    }  # fmt: skip
    if not values:
        return []
    step = max(step for step, _ in values.values())
    text = (
        f"{_values(values)}, behind step {step}. No variable of the loop leads to it. It changes with the steps and "
        "begins anew in a new process: what is decided or trained by it later would be wrong. "
        f"{remedies.of(run, values)}{remedies.or_declare(run, values)}"
    )
    return [Finding(Kind.HELD, (run.scenario.title,), text, step, tuple(values))]


def _compared(calm: Played, run: Played, chance: frozenset[str]) -> list[Finding]:
    title = (run.scenario.title,)
    scaled = _scaled(calm, run, chance)
    found = []
    if scaled:
        step = min(step for step, _ in scaled.values())
        text = f"{_values(scaled)}, from step {step} on: {remedies.SCALED}"
        found.append(Finding(Kind.SIZE, title, text, step, tuple(scaled)))
    if run.last != calm.last:
        text = f"ended after step {run.last}, and the calm run after step {calm.last}"
        found.append(Finding(Kind.ENDED, title, text, min(run.last, calm.last)))
    held = {name: value for name, value in _held(calm, run, chance).items() if name not in scaled}
    samples = _samples(calm, run, held)
    if samples is not None:
        found.append(samples)
    kills = run.scenario.kills
    lost = next((kill for kill in kills if len(kill.ranks) > 1), kills[-1] if kills and run.own_loop else None)
    if not run.saved and lost is not None:
        who = "all ranks were" if len(lost.ranks) >= run.scenario.sizes[0] else f"{lost.who} {lost.was}"
        text = (
            f"nothing had been saved when {who} killed, so the next start began from nothing, and proves nothing. Let "
            "the script save every few steps while it is rehearsed"
        )
        found.append(Finding(Kind.UNSAVED, title, text))
    if run.scenario.away is not None and not run.missed:
        text = (
            f"no request reached a store in these steps, so it proves nothing of {run.scenario.title}. Let the script "
            "save every few steps while it is rehearsed"
        )
        found.append(Finding(Kind.UNSAVED, title, text))
    first = _first_tracked(calm, run, chance)
    alike = first is None and not run.scenario.resized
    statistics = _first_tracked(calm, run, chance, buffers=True) if alike else None
    if statistics is not None:
        step, names = statistics
        text = (
            f"{_listed(names)} differ from the calm run's from step {step} on, and no parameter does. Each rank has "
            "running statistics of its own batches, and where rank 0 is lost those of another rank go on: they are as "
            "good, and not the same bits. An evaluation that decides something gets another result by them. "
            f"{remedies.ALIKE}"
        )
        found.append(Finding(Kind.BUFFERS, title, text, step, tuple(names)))
    if samples is not None and (first is None or samples.kind is Kind.SIZE):
        return found  # trained by another batch, the script's own values may be others
    if first is None:
        carried = _changing(calm) - (_positions(calm, run) if run.by_commits else set())
        declared = {name for record in run.steps.values() for name in record.untracked}
        # An object that differs without a change from step to step does not hide its parts that change.
        if held := _outermost({n: v for n, v in held.items() if n in carried and not _is_below(n, declared)}):
            step = min(step for step, _ in held.values())
            text = (
                f"{_values(held)}, from step {step} on. It made no other result in {run.last} steps; what is decided "
                f"or trained by it later (a best checkpoint, a rate) would be wrong. {remedies.of(run, held)}"
                f"{remedies.or_declare(run, held)}"
            )
            found.append(Finding(Kind.HELD, title, text, step, tuple(held)))
        return found
    step, tracked = first
    causes, cause = _causes(held, step, run)
    text = f"{_listed(tracked)} differ{'s' if len(tracked) == 1 else ''} from the calm run's from step {step} on"
    text += cause or _anew(run, remedies.of(run))
    found.append(Finding(Kind.TRACKED, title, text, step, (*causes, *tracked)))
    return found


def _causes(held: Differing, step: int, run: Played) -> tuple[Differing, str]:
    """The values that differ by then, and what is said of them, or ""."""
    causes = _outermost({name: value for name, value in held.items() if value[0] <= step})
    if not causes:
        return {}, ""
    first = min(first for first, _ in causes.values())
    return causes, f". Before it, or with it, from step {first} on, {_values(causes)}. {remedies.of(run, causes)}"


def _written(calm: Played, again: Played, run: Played, statistics: bool) -> list[Finding]:
    """What files and printed lines differ in, by file. `statistics`: running statistics differ too, and may be why."""
    title = (run.scenario.title,)
    otherwise = remedies.BY_STATISTICS if statistics else remedies.OTHERWISE
    found = []
    for name, text in differing_files(calm.files, again.files, run.files).items():
        advice = (
            remedies.REPEATED
            if (" twice" in text or " times" in text)
            else remedies.MISSED
            if "missing" in text
            else otherwise
        )
        advice = remedies.BYTES if text == "has other bytes" else advice
        found.append(Finding(Kind.WRITTEN, title, f"{name} {text}. {advice}", names=(name,)))
    killed = {kill.step for kill in run.scenario.kills if 0 in kill.ranks}
    if (other := differing_prints(calm.printed, again.printed, run.printed, killed)) is not None:
        found.append(Finding(Kind.WRITTEN, title, f"{other[1]}. {otherwise}", other[0], (STDOUT,)))
    return found


def _first_tracked(
    calm: Played, run: Played, chance: frozenset[str], *, buffers: bool = False
) -> tuple[int, list[str]] | None:
    """The first step behind which tracked objects differ, and their names: in more than their buffers, or in them."""
    for (rank, step), record in sorted(calm.steps.items(), key=lambda item: (item[0][1], item[0][0])):
        other = run.steps.get((rank, step))
        if other is None or other.world != record.world:  # with another number of ranks sums round otherwise
            continue
        names = _differing(record.tracked, other.tracked)
        names = [name for name in names if name.startswith(BUFFERS) == buffers and f"tracked {name}" not in chance]
        if names:
            return step, names
    return None


Differing = dict[str, tuple[int, str]]  # name → (the first step behind which it differs, "0.5 calm, 1.0 here")


def _held(calm: Played, run: Played, chance: frozenset[str]) -> Differing:
    """The script's own values that differ at the end, each with the step from which it does without a break. With
    another number of ranks tensors and fractions are left out."""
    found: Differing = {}
    alike = _of_steps_alone(calm)
    ranks = {rank for rank, _ in run.steps} & {rank for rank, _ in calm.steps}
    for rank in sorted(ranks):
        steps = sorted((s for r, s in run.steps if r == rank and (r, s) in calm.steps), reverse=True)
        left: set[str] | None = None
        for step in steps:
            a, b = calm.steps[rank, step], run.steps[rank, step]
            names = {n for n in _differing(a.held, b.held) if f"held {n}" not in chance}
            if run.scenario.resized:
                names = {name for name in names & alike if not _depends_on_size(a.held[name])}
            left = names if left is None else left & names
            if not left:
                break
            for name in left:
                found[name] = (step, _other(b.held[name], a.held[name], rank))
    return found


def _scaled(calm: Played, run: Played, chance: frozenset[str]) -> Differing:
    """The numbers that another number of ranks has multiplied in each step, but for that number itself."""
    found: Differing = {}
    others = {name.removeprefix("held ") for name in chance}
    for (rank, step), record in sorted(calm.steps.items(), key=lambda item: (item[0][1], item[0][0])):
        other = run.steps.get((rank, step))
        if other is None or other.world == record.world:
            continue
        for name in record.held.keys() & other.held.keys() - others:
            a, b = _number(record.held[name]), _number(other.held[name])
            if a and a != record.world and math.isclose(b / a, other.world / record.world, rel_tol=1e-9):
                text = f"{other.held[name]} with {other.world} ranks and {record.held[name]} with {record.world}"
                found.setdefault(name, (step, text))
            else:
                others.add(name)
    return {name: value for name, value in found.items() if name not in others}


def _depends_on_size(text: str) -> bool:
    """Whether a value may rightly be another with another number of ranks: sums round otherwise, and each rank draws
    its own random numbers (a dropout's), so a loss is another, and what follows from it."""
    if DIGEST in text:
        return True
    try:
        return math.isfinite(float(text)) and not text.lstrip("-").isdecimal()
    except ValueError:
        return False


def _number(text: str) -> float:
    """Of a value's text; 0 for another."""
    try:
        return float(text)
    except ValueError:
        return 0.0


def _other(here: str, there: str, rank: int) -> str:
    """How a value differs, without the digests of tensors, which say nothing to a person."""
    here, there = here.partition(DIGEST)[0], there.partition(DIGEST)[0]
    if here == there:
        return f"not the same {here} on rank {rank} as in the calm run"
    return f"{here} on rank {rank}, {there} in the calm run"


def _changing(calm: Played) -> set[str]:
    """The values that change from step to step. One that does not is no state: a path, the step of a start."""
    seen: dict[tuple[int, str], str] = {}
    found = set[str]()
    for (rank, _), record in calm.steps.items():
        found |= {name for name, value in record.held.items() if seen.setdefault((rank, name), value) != value}
    return found


def _positions(calm: Played, run: Played) -> set[str]:
    """The numbers by which `enumerate` counts the batches of a loop over a loader. A function that goes on from a
    commit begins such a loop anew, over what is left. A counter of the script's own may be such a number too, and is
    another all the same."""
    records = [record for one in (calm, run) for record in one.steps.values()]
    numbers = set.intersection(*({*record.indices} & record.held.keys() for record in records))
    return {
        name for name in numbers
        if all(record.held[name] in (str(record.position - 1), str(record.position)) for record in records)
    }  # fmt: skip


def _of_steps_alone(calm: Played) -> set[str]:
    """The values that change from step to step and are the same on all ranks: another number of ranks has them too."""
    by_step: dict[tuple[int, str], str] = {}
    own = set[str]()
    for (_, step), record in calm.steps.items():
        own |= {name for name, value in record.held.items() if by_step.setdefault((step, name), value) != value}
    return _changing(calm) - own


def _outermost(values: Mapping[str, _Value]) -> dict[str, _Value]:
    """Those that are no parts of others among them."""
    ends = {name: [end for end, letter in enumerate(name) if letter in ".["] for name in values}
    return {name: value for name, value in values.items() if not any(name[:end] in values for end in ends[name])}


def _is_below(name: str, others: Collection[str]) -> bool:
    """Whether it is one of these names, or that of a part of what they name."""
    return any(name == other or name.startswith((f"{other}.", f"{other}[")) for other in others)


def _samples(calm: Played, run: Played, held: Differing) -> Finding | None:
    """The first step for which all ranks together have read other samples. With another number of ranks, ranks that
    each read all of a batch have read each sample another number of times; and a batch of each rank's own makes another
    global batch, which is a warning. `held`: the values that differ."""
    there, here = _read_by_step(calm), _read_by_step(run)
    title = (run.scenario.title,)
    for step in sorted(there.keys() & here.keys()):
        a, b = there[step], here[step]
        resized = _world(calm, step) != _world(run, step)
        if a == b or (resized and a.keys() == b.keys()):
            continue
        if resized and a.total() != b.total():
            text = (
                f"from step {step - 1} on a step reads {b.total()} samples, and {a.total()} in the calm run: the batch "
                "grows with the number of ranks. "
                f"{remedies.FIT if run.in_library or run.own_loop else remedies.BATCH} keeps it"
            )
            return Finding(Kind.SIZE, title, text, step)
        text = (
            f"step {step - 1} was computed from other samples than in the calm run: {(a - b).total()} are missing, "
            f"{(b - a).total()} are others"
        )
        causes, cause = _causes(held, step, run)
        text += (cause or f". Let {remedies.SAMPLER if run.by_commits else remedies.LOADER}") + (
            remedies.PADDED if run.scenario.resized else ""
        )
        return Finding(Kind.SAMPLES, title, text, step, tuple(causes))
    return None


def _read_by_step(run: Played) -> dict[int, Counter[str]]:
    found: dict[int, Counter[str]] = {}
    complete: dict[int, int] = {}
    for (_, step), record in run.steps.items():
        found.setdefault(step, Counter()).update(record.samples)
        complete[step] = complete.get(step, 0) + 1
    return {step: read for step, read in found.items() if complete[step] == _world(run, step)}


def _world(run: Played, step: int) -> int:
    newest: Record = max((r for (_, s), r in run.steps.items() if s == step), key=lambda r: r.at)
    return newest.world


def _differing(a: dict[str, str], b: dict[str, str]) -> list[str]:
    return [name for name, value in a.items() if name in b and b[name] != value]


def _values(held: Differing) -> str:
    ordered = sorted(held.items(), key=lambda item: (item[1][0], item[0].count(".") + item[0].count("["), item[0]))
    more = f", and {len(held) - MOST_NAMED} more" if len(held) > MOST_NAMED else ""
    return "; ".join(f"{name} is {text}" for name, (_, text) in ordered[:MOST_NAMED]) + more


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more
