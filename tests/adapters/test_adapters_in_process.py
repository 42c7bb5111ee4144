"""What the adapters refuse, how positions move between batch sizes, and runs that ended; in this process."""

# ruff: noqa: PLC0415  imported where used: collecting these tests must not cost every run of the suite ten seconds

from __future__ import annotations

import dataclasses
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import everstep
from everstep.checkpoint import CheckpointError, StateMismatch
from everstep.checkpoint.errors import NoCommit
from everstep.data import ElasticLoader
from support.adapters.adapter_script import Net, Options, Points

pytestmark = pytest.mark.timeout(300)  # importing a framework on a busy machine

GIVEN = Options(
    url="", workers=0, term_at=None, kill_at=None, kill_after=0, rank_told=0, batch=4, kind="", pause=0, seen=None
)


def net() -> Net:
    return Net(dataclasses.replace(GIVEN))


def hf_trainer(folder: Path, callback: Any, **arguments: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    options = {"per_device_train_batch_size": 4, "save_strategy": "no", "report_to": "none", "use_cpu": True}
    args = TrainingArguments(str(folder), disable_tqdm=True, **{**options, **arguments})
    return Trainer(model=net(), args=args, train_dataset=Points(), callbacks=[callback])


def hf_callback(url: Path) -> Any:
    from everstep.train.adapters.huggingface import EverstepCallback

    return EverstepCallback(str(url), every_steps=100)


def parameters(model: torch.nn.Module) -> list[float]:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


@pytest.mark.long
def test_trainer_that_ended_inside_an_epoch_and_is_started_again_makes_no_further_step(tmp_path: Path) -> None:
    first = hf_callback(tmp_path / "c")
    trainer = hf_trainer(tmp_path, first, max_steps=7)
    assert first.train(trainer).global_step == 7
    second = hf_callback(tmp_path / "c")
    again = hf_trainer(tmp_path, second, max_steps=7)
    assert second.train(again).global_step == 7
    assert parameters(again.model) == parameters(trainer.model)
    third = hf_callback(tmp_path / "c")
    assert third.train(hf_trainer(tmp_path, third, max_steps=9)).global_step == 9


def test_trainer_puts_back_what_sigterm_did(tmp_path: Path) -> None:
    callback = hf_callback(tmp_path / "c")
    callback.train(hf_trainer(tmp_path, callback, max_steps=1))
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.long
def test_trainer_with_model_init_goes_on_with_the_restored_parameters(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    def made(url: Path, steps: int) -> Any:
        callback = hf_callback(url)
        args = TrainingArguments(
            str(tmp_path), max_steps=steps, per_device_train_batch_size=4, save_strategy="no", report_to="none",
            use_cpu=True, disable_tqdm=True, lr_scheduler_type="constant",
        )  # fmt: skip
        trainer = Trainer(model_init=net, args=args, train_dataset=Points(), callbacks=[callback])
        callback.train(trainer)
        return trainer

    made(tmp_path / "b", 4)
    assert parameters(made(tmp_path / "b", 8).model) == parameters(made(tmp_path / "a", 8).model)


def test_trainer_started_without_the_callback_is_refused_with_the_call_to_make(tmp_path: Path) -> None:
    trainer = hf_trainer(tmp_path, hf_callback(tmp_path / "c"))
    with pytest.raises(CheckpointError, match=r"callback\.train\(trainer\)"):
        trainer.train()


def test_trainer_with_another_global_batch_than_its_commit_is_refused(tmp_path: Path) -> None:
    first, second = hf_callback(tmp_path / "c"), hf_callback(tmp_path / "c")
    first.train(hf_trainer(tmp_path, first, max_steps=2))
    with pytest.raises(StateMismatch, match="4 samples a step, this run has 3"):
        second.train(hf_trainer(tmp_path, second, max_steps=4, per_device_train_batch_size=3))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [({"auto_find_batch_size": True}, "auto_find_batch_size"), ({"ignore_data_skip": True}, "ignore_data_skip")],
)
def test_trainer_with_an_argument_that_cannot_resume_is_refused(
    arguments: dict[str, Any], words: str, tmp_path: Path
) -> None:
    callback = hf_callback(tmp_path / "c")
    with pytest.raises(CheckpointError, match=words):
        callback.train(hf_trainer(tmp_path, callback, **arguments))


def test_trainer_whose_order_is_drawn_from_lost_numbers_is_refused(tmp_path: Path) -> None:
    callback = hf_callback(tmp_path / "c")
    trainer = hf_trainer(tmp_path, callback, accelerator_config={"use_seedable_sampler": False})
    with pytest.raises(CheckpointError, match="use_seedable_sampler=True"):
        callback.train(trainer)


class Endless(IterableDataset[dict[str, torch.Tensor]]):
    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        points = Points()
        while True:
            for i in range(len(points)):
                yield points[i]


@pytest.mark.long_but("False")
@pytest.mark.parametrize("dispatched", [None, False])
def test_trainer_with_a_stream_is_refused_by_its_class_with_what_to_write(
    dispatched: bool | None, tmp_path: Path
) -> None:
    """`None` is Accelerate's default: rank 0 reads for all."""
    callback = hf_callback(tmp_path / "c")
    trainer = hf_trainer(tmp_path, callback, max_steps=3, accelerator_config={"dispatch_batches": dispatched})
    trainer.train_dataset = Endless()
    with pytest.raises(CheckpointError, match=r"^train_dataset=Endless: an IterableDataset .* with __len__ and"):
        callback.train(trainer)


def prepared(batch: int, *, seedable: bool = True) -> tuple[Any, Any]:
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    torch.manual_seed(3)
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=seedable))
    return accelerator, accelerator.prepare(DataLoader(Points(), batch_size=batch, shuffle=True))


def samples(batches: list[Any]) -> list[int]:
    return [round(x) for batch in batches for x in (batch["x"][:, 0] * 40).tolist()]


def test_position_goes_on_at_another_batch_size_with_the_samples_that_are_left() -> None:
    from everstep.train.adapters.accelerate import Position

    before, after = Position(*prepared(4)), Position(*prepared(8))
    rest = before.rest()
    used = samples([next(rest), next(rest)])
    after.load_state_dict(before.state_dict())
    assert sorted(used + samples(list(after.rest()))) == list(range(40))
    next(rest)
    with pytest.raises(StateMismatch, match="12 samples into epoch 0, which is no multiple of the 8"):
        after.load_state_dict(before.state_dict())


def test_position_at_the_end_of_an_epoch_gives_no_batch_and_then_the_next_epoch() -> None:
    from everstep.train.adapters.accelerate import Position

    before, after = Position(*prepared(4)), Position(*prepared(4))
    assert len(list(before.rest())) == 10
    after.load_state_dict(before.state_dict())
    assert list(after.rest()) == []
    before.next_epoch()
    after.next_epoch()
    assert samples(list(after.rest())) == samples(list(before.rest()))


def test_engine_that_keeps_state_of_its_own_is_refused_before_anything_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate.utils import DistributedType

    from everstep.train.adapters.accelerate import start, track

    accelerator, loader = prepared(4)
    monkeypatch.setitem(type(accelerator.state)._shared_state, "distributed_type", DistributedType.DEEPSPEED)
    with pytest.raises(CheckpointError, match=r"DEEPSPEED.*leave that plugin out"):
        start(accelerator, str(tmp_path / "c"), loader=loader)
    with pytest.raises(CheckpointError, match="DEEPSPEED"):
        track(accelerator, loader=loader)
    assert not (tmp_path / "c").exists()


def accelerate_run(folder: Path) -> Any:
    from everstep.train.adapters.accelerate import start

    accelerator, loader = prepared(4)
    model, optimizer = net(), torch.optim.SGD(net().parameters(), lr=0.1)
    return start(accelerator, str(folder), model=model, optimizer=optimizer, loader=loader)


def train_epoch(run: Any) -> int:
    taken = 0
    for _ in run.batches():
        run.step()
        taken += 1
    return taken


def test_epochs_of_accelerate_in_a_variable_are_refused_a_second_loop(tmp_path: Path) -> None:
    with accelerate_run(tmp_path) as run:
        epochs = run.epochs(2)
        assert [train_epoch(run) > 0 for _ in epochs] == [True, True]
        for again in (epochs, enumerate(epochs), run.epochs(2)):
            with pytest.raises(
                everstep.LoopError, match=r"a second loop over the epochs of this run.*one loop over all"
            ):
                list(again)
        assert [train_epoch(run) > 0 for _ in run.epochs(3)] == [True], "more epochs are another phase"
    with accelerate_run(tmp_path) as run:
        assert list(run.epochs(2)) == [], "a process that begins behind them"
        assert [train_epoch(run) > 0 for _ in run.epochs(4)] == [True]


def test_second_loop_over_the_batches_of_an_epoch_of_accelerate_is_refused(tmp_path: Path) -> None:
    said = r"a second loop over the batches of epoch 0, behind step \d+.*once in the body of `for epoch in run\.epochs"
    with accelerate_run(tmp_path) as run:
        next(run.epochs(2))
        train_epoch(run)
        with pytest.raises(everstep.LoopError, match=said):
            train_epoch(run)


def test_loader_without_a_known_order_is_refused_by_the_accelerate_adapter() -> None:
    from everstep.train.adapters.accelerate import track

    accelerator, loader = prepared(4, seedable=False)
    with pytest.raises(CheckpointError, match="use_seedable_sampler=True"):
        track(accelerator, loader=loader)
    with pytest.raises(CheckpointError, match=r"accelerator\.prepare"):
        track(accelerator, loader=DataLoader(Points()))


def test_tracked_name_that_is_taken_is_refused() -> None:
    from everstep.train.adapters.accelerate import track

    accelerator, loader = prepared(4)
    with pytest.raises(CheckpointError, match="'data' is taken"):
        track(accelerator, loader=loader, data=1)


def test_elastic_loader_in_lightning_says_the_position_before_the_batch_in_hand() -> None:
    from everstep.train.adapters.lightning import Elastic

    loader = Elastic(ElasticLoader(Points(), global_batch=4, rank=0, world_size=1))
    batches = iter(loader)
    used = samples([next(batches).data, next(batches).data])
    in_hand = next(batches).data
    again = Elastic(ElasticLoader(Points(), global_batch=4, rank=0, world_size=1))
    again.load_state_dict(loader.state_dict())
    rest = samples([batch.data for batch in again])
    assert rest[:4] == samples([in_hand])
    assert sorted(used + rest) == list(range(40))


def lightning_trainer(folder: Path, url: Path, **limits: int) -> Any:
    from lightning.pytorch import Trainer

    from everstep.train.adapters.lightning import EverstepCallback

    return Trainer(
        accelerator="cpu", devices=1, callbacks=[EverstepCallback(str(url))], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=str(folder), **({"limit_val_batches": 0} | limits),
    )  # fmt: skip


def lightning_fit(folder: Path, url: Path, epochs: int) -> list[float]:
    from support.adapters.lightning_module import Module

    module, trainer = Module(net()), lightning_trainer(folder, url, max_epochs=epochs)
    trainer.fit(module, DataLoader(Points(), batch_size=4, shuffle=True))
    assert trainer.global_step == epochs * 10
    return parameters(module)


def test_lightning_run_that_ended_goes_on_when_it_is_given_more_epochs(tmp_path: Path) -> None:
    whole = lightning_fit(tmp_path, tmp_path / "a", 2)
    first = lightning_fit(tmp_path, tmp_path / "b", 1)
    assert lightning_fit(tmp_path, tmp_path / "b", 1) == first, "nothing is left to train"
    assert lightning_fit(tmp_path, tmp_path / "b", 2) == whole
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_lightning_run_that_ended_shows_its_metrics_to_what_follows_when_it_is_started_again(tmp_path: Path) -> None:
    from support.adapters.lightning_module import Module

    loader, shown = DataLoader(Points(), batch_size=4), []
    for _ in range(2):
        trainer = lightning_trainer(tmp_path, tmp_path / "commits", max_epochs=1, limit_val_batches=2)
        trainer.fit(Module(net()), loader, loader)
        shown.append({name: value.item() for name, value in trainer.callback_metrics.items()})
    assert list(shown[0]) == ["val_loss"]
    assert shown[1] == shown[0]


@pytest.mark.long_but("10")
@pytest.mark.parametrize("kept", [5, 10])
def test_lightning_run_that_goes_on_where_a_validation_was_due_counts_its_steps_once(kept: int, tmp_path: Path) -> None:
    """Lightning's loggers have their own count of steps."""
    from lightning.pytorch import Callback, Trainer

    from everstep.train.adapters.lightning import EverstepCallback
    from support.adapters.lightning_module import Module

    class Dies(Callback):  # type: ignore[misc]  # mypy does not read Lightning
        def on_train_batch_start(self, trainer: Any, *_: object) -> None:
            step = trainer.global_step
            if step > 5 and step % 5 == 2:
                while newest() != step - 2:  # a save goes on beside the training, and a later one waits for no earlier
                    time.sleep(0.01)
            if step == kept + 2:
                raise ZeroDivisionError

    def newest() -> int:
        try:
            return everstep.load(tmp_path / "commits").step
        except NoCommit:
            return 0

    def fit(*callbacks: object) -> Any:
        ours = EverstepCallback(str(tmp_path / "commits"), every_steps=5)
        trainer = Trainer(
            accelerator="cpu", devices=1, callbacks=[*callbacks, ours], logger=False, enable_checkpointing=False,
            enable_progress_bar=False, default_root_dir=str(tmp_path), limit_val_batches=2, val_check_interval=5,
            max_epochs=2,
        )  # fmt: skip
        loader = DataLoader(Points(), batch_size=4)
        trainer.fit(Module(net()), loader, loader)
        return trainer

    with pytest.raises(ZeroDivisionError):
        fit(Dies())
    trainer = fit()
    assert (trainer.global_step, trainer.fit_loop.epoch_loop._batches_that_stepped) == (20, 20)


@pytest.mark.long
def test_lightning_run_with_a_checkpoint_path_and_a_commit_is_refused(tmp_path: Path) -> None:
    from support.adapters.lightning_module import Module

    first = lightning_trainer(tmp_path, tmp_path / "c", max_steps=2)
    first.fit(Module(net()), DataLoader(Points(), batch_size=4))
    first.save_checkpoint(tmp_path / "theirs.ckpt")
    second = lightning_trainer(tmp_path, tmp_path / "c", max_steps=2)
    with pytest.raises(CheckpointError, match="leave ckpt_path out"):
        second.fit(Module(net()), DataLoader(Points(), batch_size=4), ckpt_path=tmp_path / "theirs.ckpt")


@pytest.mark.long_but("limits1-8")
@pytest.mark.parametrize(
    ("limits", "steps"),
    [
        ({"max_epochs": 2}, 20),
        ({"max_epochs": 2, "accumulate_grad_batches": 3}, 8),  # the last step of an epoch has one batch
        ({"max_epochs": 2, "max_steps": 3}, 3),
        ({"max_epochs": -1, "max_steps": 3}, 3),
    ],
)
def test_all_steps_of_a_lightning_run_are_known(limits: dict[str, int], steps: int, tmp_path: Path) -> None:
    """So that the job's status shows how much of the run is done."""
    from everstep.train.adapters.fitting import total_steps
    from support.adapters.lightning_module import Module

    trainer = lightning_trainer(tmp_path, tmp_path / "c", **limits)
    trainer.fit(Module(net()), DataLoader(Points(), batch_size=4))
    assert total_steps(trainer) == trainer.global_step == steps


def test_all_steps_of_a_lightning_run_are_not_guessed_where_accumulation_changes(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import GradientAccumulationScheduler

    from everstep.train.adapters.fitting import total_steps
    from support.adapters.lightning_module import Module

    trainer = lightning_trainer(tmp_path, tmp_path / "c", max_epochs=2)
    trainer.callbacks.append(GradientAccumulationScheduler({0: 1, 1: 2}))
    trainer.fit(Module(net()), DataLoader(Points(), batch_size=4))
    assert trainer.global_step == 15
    assert total_steps(trainer) is None
