"""A run reads its script's loop before the first step: what it carries is warned of, and two forms are refused."""

from __future__ import annotations

import ast
import logging
import runpy
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from everstep.recovery.errors import LoopError
from everstep.train.guards.script_check import ScriptCheck
from everstep.train.guards.sources import counted_around

BEFORE = """
import torch
import everstep

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.utils.data.TensorDataset(torch.randn(16, 2, generator=torch.Generator().manual_seed(1)))

def work(batch, weight=1.0):
    (model(batch.data[0]).pow(2).mean() * weight).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
COUNTED = """
with everstep.start(URL) as run:
    n = 0
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(run.loader(x, global_batch=4), until=3):
        with step as batch:
            n += 1
            work(batch, n)
"""
DECAY = "\n            for p in own:\n                p.data.mul_(0.9)"
WARNING = "carried by the loop and not tracked: "


@pytest.fixture
def play(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Any:
    """Runs a script that saves, and returns what it is warned of: the names with their lines."""

    def playing(body: str, url: bool = True) -> list[str]:
        script = tmp_path / "train.py"
        script.write_text(BEFORE + textwrap.dedent(body))
        runpy.run_path(str(script), {"URL": str(tmp_path / "commits") if url else None}, "__main__")
        told = [r.getMessage() for r in caplog.records if WARNING in r.getMessage()]
        assert all(r.levelno == logging.WARNING for r in caplog.records if WARNING in r.getMessage())
        return [text.removeprefix(WARNING).partition(". In a new process")[0] for text in told]

    return playing


def line_of(text: str, body: str) -> int:
    return 1 + next(i for i, line in enumerate((BEFORE + textwrap.dedent(body)).splitlines()) if text in line)


def test_one_warning_names_each_carried_name_with_its_line_and_what_to_write(
    play: Any, caplog: pytest.LogCaptureFixture
) -> None:
    body = COUNTED.replace("n += 1", "n += 1; m = n + (m if n > 1 else 0)")
    at = line_of("n += 1", body)
    assert play(body) == [f"m (train.py:{at}), n (train.py:{at})"]
    assert 'run.untracked("m", "n")' in caplog.text
    assert "everstep rehearse" in caplog.text


@pytest.fixture
def logging_as_before() -> Iterator[None]:
    ours, handlers = logging.getLogger("everstep.train"), list(logging.root.handlers)
    level = ours.level
    yield
    logging.disable(logging.NOTSET)
    ours.setLevel(level)
    logging.root.handlers[:] = handlers


@pytest.mark.usefixtures("logging_as_before")
@pytest.mark.long_but("disabled")
@pytest.mark.parametrize(
    "silence",
    [
        "logging.disable(logging.CRITICAL)", "logging.root.handlers[:] = [logging.NullHandler()]",
        "logging.getLogger('everstep.train').setLevel(logging.ERROR)",
        "logging.root.handlers[:] = [logging.StreamHandler()]; logging.root.handlers[0].setLevel(logging.ERROR)",
    ],
    ids=["disabled", "no output", "level", "level of a handler"],
)  # fmt: skip
def test_list_is_on_stderr_where_the_script_drops_warnings(
    silence: str, play: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert play(f"import logging; {silence}{COUNTED}") == []
    shown = capsys.readouterr().err
    assert f"everstep: {WARNING}n (train.py:" in shown
    assert "logging.getLogger('everstep.train').addHandler" in shown


@pytest.mark.usefixtures("logging_as_before")
def test_dropped_warnings_are_named_where_nothing_is_carried(play: Any, capsys: pytest.CaptureFixture[str]) -> None:
    play("import logging; logging.disable()" + COUNTED.replace("n += 1", "n = step.number"))
    assert "everstep: the logging of this script drops warnings" in capsys.readouterr().err


@pytest.mark.long_but("tracked", "bound anew")
@pytest.mark.parametrize(
    "body",
    [
        COUNTED.replace("n = 0", "n = 0\n    run.untracked('n')"),
        COUNTED.replace("n = 0", "n = {'n': 0}").replace("n += 1", "n['n'] += 1").replace("batch, n", "batch, n['n']")
        .replace("optimizer=optimizer", "optimizer=optimizer, n=n"),
        COUNTED.replace("n += 1", "n = step.number"),
        COUNTED.replace("n += 1", "n = model.count = step.number"),
        COUNTED.replace("n += 1", "model.bias.data = model.bias.data * 1.0"),
        COUNTED.replace("n = 0", "n, own = 1, list(model.parameters())").replace("n += 1", DECAY),
        COUNTED.replace("n = 0", "n, own = 1, torch.nn.Sequential(model)")
        .replace("n += 1", DECAY.replace("own:", "own.parameters():")),
    ],
    ids=["untracked", "tracked", "bound anew", "part of a module", "attribute bound anew", "list", "module around it"],
)  # fmt: skip
def test_nothing_is_said_of_what_is_tracked_or_declared_untracked(body: str, play: Any) -> None:
    assert play(body) == []


def test_nothing_is_said_where_nothing_is_saved(play: Any) -> None:
    assert play(COUNTED, url=False) == []


def test_attribute_of_a_tracked_module_is_named_unless_the_module_saves_it(play: Any) -> None:
    body = COUNTED.replace("n += 1", "n = model.count = step.number")
    body = body.replace("            work", "            if step.number: model.rate = 1\n            work")
    assert play(body) == [f"model.rate (train.py:{line_of('model.rate', body)})"]


def test_buffer_of_a_module_that_is_not_tracked_is_named(play: Any) -> None:
    """It was taken for saved, because modules save their buffers."""
    body = COUNTED.replace("n = 0", "n, norm = 1, torch.nn.Module(); norm.register_buffer('mean', torch.zeros(1))")
    body = body.replace("n += 1", "norm.mean = norm.mean + n")
    assert play(body) == [f"norm.mean (train.py:{line_of('norm.mean =', body)})"]


def test_list_of_tracked_parameters_that_gets_another_element_is_named(play: Any) -> None:
    body = COUNTED.replace("n = 0", "n, own = 1, list(model.parameters())").replace("n += 1", "own[0] = own[0] * n")
    at = line_of("own[0] =", body)
    assert play(body) == [f"own[0] (train.py:{at}, another object than the tracked one)"]


def test_tracked_list_whose_name_gets_another_list_is_named(play: Any) -> None:
    body = COUNTED.replace("n = 0", "n = [1.0]").replace("n += 1", "n = [*n[-4:], 1.0]")
    body = body.replace("batch, n", "batch, sum(n)").replace("optimizer=optimizer", "optimizer=optimizer, n=n")
    at = line_of("n = [*n", body)
    assert play(body) == [f"n (train.py:{at}, another object than the tracked one)"]


@pytest.mark.long_but("enumerated")
@pytest.mark.parametrize(
    "around",
    ["enumerate(run.steps({}))", "(step for step in run.steps({}))", "list_of(run.steps({}))"],
    ids=["enumerated", "expression", "function"],
)
def test_loop_is_found_behind_what_hands_its_steps_on(around: str, play: Any) -> None:
    steps = around.format("run.loader(x, global_batch=4), until=3")
    body = COUNTED.replace("run.steps(run.loader(x, global_batch=4), until=3)", steps)
    body = body.replace("for step in enumerate", "for _, step in enumerate")
    passing_on = "def list_of(steps):\n    for step in steps:\n        yield step\n"
    body = passing_on + body
    assert play(body) == [f"n (train.py:{line_of('n += 1', body)})"]


PARTS = """
from itertools import islice

with everstep.start(URL) as run:
    run.track(model=model, optimizer=optimizer)
    steps = run.steps(run.loader(x, global_batch=4), until=3)
    for part in range(4):
        print(PRINTED)
        for step in islice(steps, 1):
            with step as batch:
                work(batch)
"""


@pytest.mark.parametrize(
    ("printed", "names"),
    [
        ("part", ["part (train.py:19, which begins with its first pass: compute it from step.number)"]),
        ("'a part'", []),  # no value depends on the part
    ],
)
def test_variable_of_the_parts_in_which_the_steps_are_taken_is_named(printed: str, names: list[str], play: Any) -> None:
    assert play(PARTS.replace("PRINTED", printed)) == names


BY_NEXT = """
with everstep.start(URL) as run:
    n = 0
    run.track(model=model, optimizer=optimizer)
    steps = run.steps(run.loader(x, global_batch=4), until=3)
    for i in range(3):
        step = next(steps)
        with step as batch:
            n += 1
            work(batch, n + i)
"""


def test_count_of_steps_that_are_taken_by_next_is_named(play: Any) -> None:
    (names,) = play(BY_NEXT)
    assert names == "n (train.py:21), i (train.py:18, which begins with its first pass: compute it from step.number)"


def test_epoch_that_the_run_counts_is_no_part_of_the_scripts_own() -> None:
    tree = ast.parse("for epoch in run.epochs(3):\n  for batch in loader:\n    train(batch, epoch)\n")
    loop = tree.body[0].body[0]  # type: ignore[attr-defined]
    assert counted_around(tree, loop) == {}


def test_function_that_takes_a_step_is_read_too(play: Any) -> None:
    body = """
    def main():
        n = 0

        def one(batch):
            nonlocal n
            n += 1
            work(batch, n)

        with everstep.start(URL) as run:
            run.track(model=model, optimizer=optimizer)
            run.train(one, run.loader(x, global_batch=4), until=3)

    main()
    """
    assert play(body) == [f"n (train.py:{line_of('n += 1', body)})"]


def test_loops_over_epochs_and_over_their_steps_are_named_in_one_warning(play: Any) -> None:
    body = """
    best = 0
    with everstep.start(URL) as run:
        run.track(model=model, optimizer=optimizer)
        for epoch in run.epochs(run.loader(x, global_batch=4), 2):
            since = 0
            for step in run.steps():
                with step as batch:
                    since += 1
                    work(batch, since)
            best = max(best, since)
    """
    best, since = line_of("best = max", body), line_of("since += 1", body)
    assert play(body) == [f"best (train.py:{best}), since (train.py:{since})"]


def test_what_an_evaluation_changes_is_named(play: Any) -> None:
    body = """
    def main():
        best = 1e9

        @torch.no_grad()
        def validate():
            nonlocal best
            best = min(best, model(torch.ones(1, 2)).item())

        with everstep.start(URL) as run:
            run.track(model=model, optimizer=optimizer)
            run.evaluate(validate, every=1)
            for step in run.steps(run.loader(x, global_batch=4), until=3):
                with step as batch:
                    work(batch)

    main()
    """
    assert play(body) == [f"best (train.py:{line_of('best = min', body)})"]


def test_strict_run_refuses_what_is_carried_before_the_first_step(play: Any) -> None:
    body = COUNTED.replace("start(URL)", "start(URL, strict=True)").replace("n += 1", "n += 1; raise ValueError")
    with pytest.raises(LoopError, match=r"not tracked: n \(train\.py:\d+\).*strict=True"):
        play(body)


def test_strict_run_refuses_what_the_steps_of_an_epoch_carry(play: Any) -> None:
    body = (
        COUNTED.replace("run.steps(", "run.epochs(")
        .replace("until=3", "epochs=1")
        .replace("start(URL)", "start(URL, strict=True)")
    )
    body = body.replace(
        "        with step as batch:", "        for step in run.steps():\n          with step as batch:"
    )
    with pytest.raises(LoopError, match=r"not tracked: n .*strict=True"):
        play(body)


def test_environment_makes_a_run_strict(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERSTEP_STRICT", "1")
    with pytest.raises(LoopError, match="not tracked: n"):
        play(COUNTED)
    monkeypatch.setenv("EVERSTEP_STRICT", "yes")
    with pytest.raises(LoopError, match=r"EVERSTEP_STRICT=yes: .*write 0 or 1"):
        play(COUNTED)


# What is refused.


YIELDS = """
def batches(steps):
    for step in steps():
        with step as batch:
            yield batch

for batch in batches(steps):
    pass
"""
RANK = """
import os
RANK = int(os.environ["RANK"])
main = RANK == 0
def log(text):
    if RANK == 0:
        print(text)
def keep(text):
    if main:
        open("log.txt", "a").write(text)
for step in steps():
    if {test}:
        {does}
"""


def read(folder: Path, body: str) -> None:
    """As when the first step of the script is asked for."""

    def steps() -> Any:
        check = ScriptCheck({}, (), lambda *_: False, changes=True, goes_on=True, strict=False)
        if (refused := check.before_steps(sys._getframe(1), (), nested=False)) is not None:
            raise refused
        yield from ()

    script = folder / "train.py"
    script.write_text(body)
    runpy.run_path(str(script), {"steps": steps}, "__main__")


def test_generator_function_that_yields_from_within_a_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LoopError, match=r"line 5 of train\.py is in a generator function that yields from within"):
        read(tmp_path, YIELDS)


def test_generator_function_that_yields_the_step_is_let_through(tmp_path: Path) -> None:
    read(tmp_path, YIELDS.replace("        with step as batch:\n            yield batch", "        yield step"))


@pytest.mark.parametrize("test", ["RANK == 0", "main", "not RANK"])
def test_rank_that_was_read_before_the_loop_is_refused_where_it_decides(
    test: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(LoopError, match=r"was read from the environment.*(RANK|main), of line \d, in line \d+\. "):
        read(tmp_path, RANK.format(test=test, does="open('log.txt', 'a')"))


def test_rank_that_a_function_of_the_loop_asks_for_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(LoopError, match=r"main, of line 4, in line 9\. Compute what main is"):
        read(tmp_path, RANK.format(test="True", does="keep('text')"))


READ = """
import argparse, os
{bound}
for step in steps():
    {used}
"""


@pytest.mark.parametrize(
    ("bound", "used"),
    [
        ("rank, size = int(os.environ['RANK']), int(os.environ['WORLD_SIZE'])", "lr = 0.1 * size"),
        ("rank: int = int(os.getenv('RANK', 0))", "save = rank == 0"),
        ("rate = 0.1 * int(os.environ['WORLD_SIZE'])", "lr = rate"),
        ("main = True if int(os.environ['RANK']) == 0 else False", "save = main"),
        ("ddp_rank = int(os.environ['RANK']); seed = 1337 + ddp_rank", "draw = seed"),
        ("main = os.environ.get('RANK') in (None, '0')", "save = main"),
        ("here = max(int(os.environ.get('RANK', 0)), 0)", "save = here == 0"),
        ("accumulate = 6; accumulate //= int(os.environ['WORLD_SIZE'])", "micro = range(accumulate)"),
        ("main = os.environ['RANK'] == '0'", "save = main; main = False"),
        ("main = os.environ['RANK'] == '0'", "main = not main"),
    ],
)
def test_rank_is_found_in_what_was_computed_from_it(
    bound: str, used: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(LoopError, match=r"was read from the environment"):
        read(tmp_path, READ.format(bound=bound, used=used))


@pytest.mark.parametrize(
    ("bound", "used", "advised"),
    [
        (
            "rank = int(os.environ['RANK'])", "save = rank == 0\n    part = rank",
            "rank, of line 3, in lines 5 and 6. Write run.rank or run.world_size in the loop in place of rank",
        ),
        (
            "rank, size = int(os.environ['RANK']), int(os.environ.get('WORLD_SIZE', 1))", "part = rank, size",
            "rank, of line 3, in line 5; size, of line 3, in line 5. Write run.rank or run.world_size in the loop in "
            "place of rank, size",
        ),
        (
            "rank = int(os.environ['RANK']); main = rank == 0", "save = main",
            "main, of line 3, in line 5. Compute what main is in the loop, under another name, with run.rank or "
            "run.world_size",
        ),
        (
            "accumulate = 6; size = int(os.environ['WORLD_SIZE']); accumulate //= size", "micro = range(accumulate)",
            "accumulate, of line 3, in line 5. Compute what accumulate is in the loop, under another name, with "
            "run.rank or run.world_size. Take line 3 out, which changes accumulate itself",
        ),
    ],
)  # fmt: skip
def test_refusal_of_a_rank_that_was_read_names_each_line_and_what_to_write(
    bound: str, used: str, advised: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    with pytest.raises(LoopError) as refused:
        read(tmp_path, READ.format(bound=bound, used=used))
    assert str(refused.value).endswith(advised)


@pytest.mark.parametrize(
    "function",
    [
        "def learn(batch, rank):\n    return batch + rank",
        "def learn(batch, *, rank=0):\n    return batch + rank",
        "def learn(batch, now):\n    rank = now\n    return batch + rank",
    ],
)
def test_name_of_a_functions_own_is_no_rank_that_was_read(
    function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As scripts are that pass run.rank to the function, in place of the rank that they have read."""
    monkeypatch.setenv("RANK", "1")
    bound = f"rank = int(os.environ['RANK'])\n{function}"
    read(tmp_path, READ.format(bound=bound, used="learn(step, 0)"))
    (passed := tmp_path / "passed").mkdir()
    with pytest.raises(LoopError, match=r"rank, of line 3, in line \d+\. Write run\.rank"):
        read(passed, READ.format(bound=bound, used="learn(step, rank)"))


@pytest.mark.parametrize(
    ("bound", "used"),
    [
        ("model = list([1]) if 'RANK' in os.environ else [1]", "model.append(1)"),
        ("model = list([1]) if int(os.environ['WORLD_SIZE']) > 1 else [1]", "model.append(1)"),
        ("ddp = int(os.environ.get('RANK', -1)) != -1", "synced = not ddp or True"),
        ("rank = os.environ.get('RANK'); ddp = rank is not None", "synced = ddp"),
        ("rank = int(os.environ.get('RANK', -1)); ddp = rank >= 0", "synced = ddp"),
        ("arguments = argparse.Namespace(rank=os.environ['RANK'])", "print(arguments)"),
        ("device = 'cpu:' + os.environ['LOCAL_RANK']", "where = device"),
    ],
)
def test_what_is_chosen_where_there_are_ranks_at_all_is_no_rank(
    bound: str, used: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    read(tmp_path, READ.format(bound=bound, used=used))


@pytest.mark.parametrize(
    "used",
    [
        "main = run.rank == 0\n    save = main",
        "with step:\n        main = run.rank == 0\n        save = main",
    ],
)
def test_rank_that_the_loop_computes_anew_is_let_through(
    used: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    read(tmp_path, READ.format(bound="main = int(os.environ['RANK']) == 0", used=used))


@pytest.mark.parametrize("test", ["RANK == 0", "main", "log('text')"])
def test_rank_that_was_read_before_the_loop_may_decide_who_prints(
    test: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    read(tmp_path, RANK.format(test=test, does="print(step)"))


def test_object_that_looks_its_attributes_up_in_a_way_of_its_own_hides_nothing(play: Any) -> None:
    body = COUNTED.replace("n = 0", "n = 0\n    settings = Settings(lr=0.1)").replace(
        "batch, n", "batch, n * settings.lr"
    )
    made = "class Settings(dict):\n    def __getattr__(self, name):\n        return self[name]\n" + body
    assert play(made) == [f"n (train.py:{line_of('n += 1', made)})"]


def test_name_that_some_steps_bind_and_a_hook_reads_is_compared(play: Any) -> None:
    assert (
        play("""
scale = 1.0
next(model.parameters()).register_hook(lambda gradient: gradient * scale)
with everstep.start(URL) as run:
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(run.loader(x, global_batch=4), until=3):
        with step as batch:
            if run.step == 1:
                scale = 0.25
                said = print(run.step)
            work(batch)
    assert [run._script.may_differ(name) for name in ("scale", "said", "batch")] == [False, True, True]
""")
        == []
    )


def test_strict_run_whose_text_cannot_be_read_is_refused(play: Any) -> None:
    body = COUNTED.replace("n += 1", f"print({' + '.join(['batch.step'] * 900)})")
    assert play(body) == []
    with pytest.raises(LoopError, match=r"could not be read for names .* and the run is strict: prove the script"):
        play(body.replace("start(URL)", "start(URL, strict=True)"))


def test_file_is_parsed_once_however_many_of_its_functions_a_step_calls(
    play: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    parse, parsed = ast.parse, list[str]()

    def counted(text: Any, *args: Any, **options: Any) -> Any:
        parsed.append(str(text))
        return parse(text, *args, **options)

    functions = "".join(f"def f{i}():\n    pass\n" for i in range(30))
    calls = "".join(f"            f{i}()\n" for i in range(30))
    monkeypatch.setattr(ast, "parse", counted)
    play(functions + COUNTED.replace("            n += 1\n", f"            n += 1\n{calls}"))
    assert sum("def f29" in text for text in parsed) <= 4
