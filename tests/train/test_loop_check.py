"""A run reads the text of its script's loop, in the file where it stands, with what its variables hold then."""

from __future__ import annotations

import logging
import runpy
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from everstep.recovery.errors import LoopError
from everstep.train.guards.script_text.loop_check import check_loop

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


def play(folder: Path, body: str, url: bool = True) -> dict[str, Any]:
    """Run it as a script that saves."""
    script = folder / "train.py"
    script.write_text(BEFORE + textwrap.dedent(body))
    return runpy.run_path(str(script), {"URL": str(folder / "commits") if url else None}, "__main__")


COUNTED = """
with everstep.start(URL) as run:
    n = 0
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(run.loader(x, global_batch=4), until=3):
        with step as batch:
            n += 1
            work(batch, n)
"""


def test_count_that_weights_the_loss_is_refused_with_its_lines_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(LoopError) as refused:
        play(tmp_path, COUNTED)
    lines = (tmp_path / "train.py").read_text().splitlines()
    said = str(refused.value)
    assert (
        f"n is carried from step to step in a plain variable (line {lines.index('            n += 1') + 1} of" in said
    )
    assert "Write carried = {'n': n} behind the line that makes n and run.track(carried=carried)" in said


def test_count_is_let_through_where_it_is_said_to_be_untracked(tmp_path: Path) -> None:
    found = play(tmp_path, COUNTED.replace("    n = 0", "    n = 0\n    run.untracked('n')"))
    assert found["n"] == 3


def test_count_is_let_through_where_nothing_is_saved(tmp_path: Path) -> None:
    assert play(tmp_path, COUNTED, url=False)["n"] == 3


def test_count_in_a_tracked_dictionary_is_restored_with_the_rest(tmp_path: Path) -> None:
    body = COUNTED.replace("n = 0", "n = {'n': 0}").replace("n += 1", "n['n'] += 1")
    body = body.replace("batch, n", "batch, n['n']").replace("optimizer=optimizer", "optimizer=optimizer, n=n")
    assert play(tmp_path, body)["n"] == {"n": 3}
    assert play(tmp_path, body.replace("until=3", "until=5"))["n"] == {"n": 5}


@pytest.mark.parametrize(
    "around",
    ["enumerate(run.steps({}))", "(step for step in run.steps({}))", "list_of(run.steps({}))"],
    ids=["enumerated", "expression", "function"],
)
def test_loop_is_found_behind_what_hands_its_steps_on(around: str, tmp_path: Path) -> None:
    steps = around.format("run.loader(x, global_batch=4), until=3")
    body = COUNTED.replace("run.steps(run.loader(x, global_batch=4), until=3)", steps)
    body = body.replace("for step in enumerate", "for _, step in enumerate")
    passing_on = "def list_of(steps):\n    for step in steps:\n        yield step\n"
    with pytest.raises(LoopError, match="n is carried"):
        play(tmp_path, passing_on + body)


def test_function_that_takes_a_step_is_read_too(tmp_path: Path) -> None:
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
    with pytest.raises(LoopError, match="n is carried"):
        play(tmp_path, body)


def test_loop_over_the_steps_of_an_epoch_is_read_with_what_the_epoch_begins_with(tmp_path: Path) -> None:
    body = """
    with everstep.start(URL) as run:
        run.track(model=model, optimizer=optimizer)
        for epoch in run.epochs(run.loader(x, global_batch=4), 2):
            since = 0
            for step in run.steps():
                with step as batch:
                    since += 1
                    work(batch, since)
    """
    with pytest.raises(LoopError, match="since is carried"):
        play(tmp_path, body)


def test_count_that_each_epoch_takes_from_the_run_is_let_through(tmp_path: Path) -> None:
    body = """
    with everstep.start(URL) as run:
        run.track(model=model, optimizer=optimizer)
        for epoch in run.epochs(run.loader(x, global_batch=4), 2):
            taken = run.step
            for step in run.steps():
                with step as batch:
                    taken += 1
                    work(batch, taken)
    """
    assert play(tmp_path, body)["taken"] == 8


def test_best_model_that_the_script_saves_by_a_plain_variable_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    body = f"""
    with everstep.start(URL) as run:
        best = 1e9
        run.track(model=model, optimizer=optimizer)
        for step in run.steps(run.loader(x, global_batch=4), until=3):
            with step as batch:
                work(batch)
            if (value := model(torch.ones(1, 2)).item()) < best:
                best = value
                torch.save(model.state_dict(), {str(tmp_path / "best.pt")!r})
    """
    with caplog.at_level(logging.WARNING, "everstep.train"):
        play(tmp_path, body)
    (said,) = [r.getMessage() for r in caplog.records if "best is carried" in r.getMessage()]
    assert "it affects what is saved" in said


def test_tracked_list_whose_name_is_bound_anew_is_refused(tmp_path: Path) -> None:
    body = COUNTED.replace("n = 0", "n = [1.0]").replace("n += 1", "n = [*n[-4:], 1.0]")
    body = body.replace("batch, n", "batch, sum(n)").replace("optimizer=optimizer", "optimizer=optimizer, n=n")
    with pytest.raises(LoopError, match=r"n is tracked, and line \d+ of train.py gives the name to another.*n\[:\]"):
        play(tmp_path, body)


EVALUATED = """
def main():
    best, waited, stop = 1e9, 0, False

    @torch.no_grad()
    def validate():
        nonlocal best, waited, stop
        value = model(torch.ones(1, 2)).item()
        if value < best:
            best, waited = value, 0
        else:
            waited += 1
        stop = waited > 5

    with everstep.start(URL) as run:
        run.track(model=model, optimizer=optimizer)
        run.evaluate(validate, every=1)
        for step in run.steps(run.loader(x, global_batch=4), until=3):
            with step as batch:
                work(batch)
            if {test}:
                {does}

main()
"""


def test_patience_that_an_evaluation_counts_is_refused_where_it_ends_the_loop(tmp_path: Path) -> None:
    with pytest.raises(LoopError, match=r"best is carried.*waited is carried.*whether the loop ends"):
        play(tmp_path, EVALUATED.format(test="stop", does="break"))


def test_patience_that_an_evaluation_counts_may_be_printed(tmp_path: Path) -> None:
    play(tmp_path, EVALUATED.format(test="stop", does="print(best)"))


MODULE = """
class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(2))
        self.calls, self.made, self.width, self.table = 0, {made}, 0, None

    def forward(self, x):
        {body}

model = torch.nn.Sequential(Layer(), model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with everstep.start(URL) as run:
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(run.loader(x, global_batch=4), until=3):
        with step as batch:
            work(batch)
"""
SET_UP = """if not self.made:
            self.scale.data.copy_(x.std(0))
            self.made = True
        return x * self.scale"""


@pytest.mark.parametrize(
    ("forward", "name"),
    [(SET_UP, "made"), ("self.calls += 1\n        return x * self.scale / self.calls", "calls")],
)
def test_plain_attribute_by_which_a_forward_pass_computes_is_refused(forward: str, name: str, tmp_path: Path) -> None:
    with pytest.raises(LoopError, match=rf"Layer\.{name} is a plain attribute.*self\.register_buffer\('{name}'"):
        play(tmp_path, MODULE.format(body=forward, made=False))


@pytest.mark.parametrize(
    "forward",
    [
        "self.calls += 1\n        return x * self.scale",
        "if self.width < x.shape[1]:\n            self.width = x.shape[1]\n"
        "            self.table = torch.ones(self.width)\n"
        "        return x * self.table * self.scale",
    ],
    ids=["count of its calls", "table that is made once"],
)
def test_attribute_that_changes_no_result_of_a_forward_pass_is_let_through(forward: str, tmp_path: Path) -> None:
    play(tmp_path, MODULE.format(body=forward, made=False))


def test_layer_that_the_script_has_set_up_before_is_let_through(tmp_path: Path) -> None:
    play(tmp_path, MODULE.format(body=SET_UP, made=True))


# Under everstep-run the world may change.

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
        check_loop(sys._getframe(1), None, {}, lambda *_: False, changes=True, nested=False)
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
    with pytest.raises(LoopError, match=r"(RANK|main) was read from the environment.*Write run\.rank"):
        read(tmp_path, RANK.format(test=test, does="open('log.txt', 'a')"))


def test_rank_that_a_function_of_the_loop_asks_for_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(LoopError, match=r"main was read from the environment"):
        read(tmp_path, RANK.format(test="True", does="keep('text')"))


def test_all_that_the_text_tells_is_told_in_one_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each start would cost another wait in the queue."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    body = """
import os
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
n = 0
for step in steps():
    n += 1
    if rank == 0:
        keep(size)
    loss = n * step
    loss.backward()
"""
    with pytest.raises(LoopError) as refused:
        read(tmp_path, body)
    for told in ("rank was read from the environment", "size was read", "n is carried from step to step"):
        assert told in str(refused.value)


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
