"""A run that is started again with other data is refused, and nothing else changes by the comparison."""

from __future__ import annotations

import multiprocessing
import random
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

import everstep
from everstep.data.common import read_samples
from everstep.recovery.errors import LoopError
from everstep.train.guards.common_samples import CommonSamples, Source
from support.agent.ordinary_scripts import TORCHRUN, play
from support.processes import warm_agent
from support.processes.commits import commits

X = torch.arange(480.0).reshape(120, 4) / 480


class Augmented(Dataset[Any]):
    """Draws from all generators, and counts what is read."""

    def __init__(self, order: list[int]) -> None:
        self.order, self.read = order, 0

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> Any:
        self.read += 1
        x = X[self.order[index]] + torch.randn(4) * 0.1 + random.random() + np.random.rand()
        return x.float(), x.float()[:2]


def split(seed: int) -> list[int]:
    return torch.randperm(120, generator=torch.Generator().manual_seed(seed))[:96].tolist()


def train(folder: Path, loader: Callable[[Any], Any], until: int) -> list[float]:
    torch.manual_seed(0)
    with everstep.start(folder / "commits", every_steps=4) as run:
        model = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Dropout(0.5))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        run.track(model=model, optimizer=optimizer)
        for step in run.steps(loader(run), until=until):
            with step as batch:
                data, target = batch.data
                batch.scale(mse_loss(model(data), target)).backward()
                optimizer.step()
                optimizer.zero_grad()
    return [float(v) for p in model.parameters() for v in p.flatten()]


def of_session(dataset: Any, **options: Any) -> Callable[[Any], Any]:
    return lambda run: run.loader(dataset, global_batch=12, **options)


def taken_over(dataset: Any, **options: Any) -> Callable[[Any], Any]:
    return lambda run: DataLoader(dataset, batch_size=12, shuffle=True, generator=torch.Generator(), **options)


@pytest.mark.long
@pytest.mark.parametrize("loader", [of_session, taken_over])
@pytest.mark.parametrize("workers", [0, 1])
def test_run_started_again_with_another_split_is_refused(loader: Any, workers: int, tmp_path: Path) -> None:
    train(tmp_path, loader(Augmented(split(0)), num_workers=workers), 4)
    train(tmp_path, loader(Augmented(split(0)), num_workers=workers), 8)
    with pytest.raises(
        LoopError, match=r"index 0, .* of Augmented reads otherwise than when the run was saved"
    ) as told:
        train(tmp_path, loader(Augmented(split(1)), num_workers=workers), 12)
    assert "generator=torch.Generator().manual_seed(0)" in str(told.value)
    assert len(str(told.value)) < 6 * 160
    assert commits(tmp_path) == [4, 8]
    assert not multiprocessing.active_children()  # though the error is held


def test_files_that_come_in_another_order_are_refused(tmp_path: Path) -> None:
    train(tmp_path, of_session(Subset(TensorDataset(X, X[:, :2]), list(range(96)))), 4)
    with pytest.raises(LoopError, match="of Subset reads otherwise"):
        train(tmp_path, of_session(Subset(TensorDataset(X, X[:, :2]), list(range(96))[::-1])), 8)


# The names of the files of a data set, in an order that only some starts of a process have in common.
ORDERS = {
    "glob": "sorted(Path('data').glob('*'), reverse=os.environ['ORDER'] == 'other' and os.environ['RANK'] == '1')",
    "set": "list({str(path) for path in Path('data').glob('*')})",
}
RANKS = """
class Files(torch.utils.data.Dataset):
    def __init__(self, paths):
        self.paths = paths
    def __len__(self):
        return len(self.paths)
    def __getitem__(self, index):
        return torch.tensor(float(Path(self.paths[index]).read_text())).reshape(1)

with everstep.start("commits", every_steps=2) as run:
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(run.loader(Files(ORDER), global_batch=4), until=int(os.environ["UNTIL"])):
        with step as batch:
            batch.scale(model(batch.data).mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
        say(step=step.number)
"""


@pytest.mark.long_but("glob-launcher0")
@pytest.mark.parametrize(
    ("order", "launcher"),
    [
        ("glob", (warm_agent.__file__, "--nproc-per-node=2", "--max-restarts=0")),
        ("glob", (*TORCHRUN[:-1], "--nproc-per-node=2")),
        ("set", (*TORCHRUN[:-1], "--nproc-per-node=2")),  # under the other one, processes share the seed of hashes
    ],
)
def test_ranks_that_restore_with_files_in_another_order_on_one_are_refused_and_commit_nothing(
    order: str, launcher: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    for number in range(24):
        (tmp_path / "data" / f"{number:02}").write_text(f"{number}")

    def start(order_of_files: str, until: int, seed_of_hashes: str) -> Any:
        monkeypatch.setenv("ORDER", order_of_files)
        monkeypatch.setenv("UNTIL", str(until))
        monkeypatch.setenv("PYTHONHASHSEED", seed_of_hashes)
        return play(tmp_path, RANKS.replace("ORDER", ORDERS[order], 1), *launcher)

    saved = start("the same", 4, "0")
    assert saved.returncode == 0, saved.stderr[-3000:]
    assert commits(tmp_path) == [2, 4]
    restored = start("other", 8, "random")
    assert restored.returncode == 1, restored.stderr[-3000:]
    refused = re.findall(r"everstep: refused: (.*)", restored.stderr)
    assert len(refused) == 1, restored.stderr[-3000:]
    assert "rank 1 reads another sample than rank 0 under index " in refused[0]
    assert "sort files, `sorted(glob(…))`, and what comes out of a set" in refused[0]
    assert commits(tmp_path) == [2, 4]


@pytest.mark.long
@pytest.mark.parametrize("option", [{"compare_samples": False}, {"allow_changes": {"dataset"}}])
def test_change_that_is_meant_goes_on(option: dict[str, Any], tmp_path: Path) -> None:
    train(tmp_path, of_session(Augmented(split(0))), 4)
    train(tmp_path, of_session(Augmented(split(1)), **option), 8)
    train(tmp_path, of_session(Augmented(split(1))), 12)  # the commit has what was read last
    assert commits(tmp_path)[-1] == 12


@pytest.mark.long
def test_comparison_draws_no_number_of_the_run_and_reads_each_sample_twice_once(tmp_path: Path) -> None:
    compared, plain = Augmented(split(0)), Augmented(split(0))
    one = train(tmp_path / "a", of_session(compared), 12)
    assert one == train(tmp_path / "b", of_session(plain, compare_samples=False), 12)
    assert compared.read - plain.read == 2 * 4


class Staged(Augmented):
    scale = 1.0

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x * self.scale, y


@pytest.mark.long
def test_dataset_that_the_loop_changes_goes_on(tmp_path: Path) -> None:
    """Its samples are of another stage than those of the saved run, by intent."""

    def staged(folder: Path, until: int, order: list[int]) -> None:
        torch.manual_seed(0)
        dataset = Staged(order)
        dataset.scale = 1.0
        with everstep.start(folder / "commits", every_steps=2) as run:
            model = torch.nn.Linear(4, 2)
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
            run.track(model=model, optimizer=optimizer)
            for step in run.steps(run.loader(dataset, global_batch=12), until=until):
                dataset.scale = 1.0 + step.number // 3
                with step as batch:
                    data, target = batch.data
                    batch.scale(mse_loss(model(data), target)).backward()
                    optimizer.step()
                    optimizer.zero_grad()

    for until in (2, 3, 4, 6, 8):  # behind commits of one stage and another
        staged(tmp_path, until, split(0))
    assert commits(tmp_path)[-1] == 8


def ranks(*sources: Callable[[], Source]) -> list[str]:
    """What each rank is told, where rank r has the r-th source."""
    met, told, said = threading.Barrier(len(sources)), [()] * len(sources), [""] * len(sources)

    def run(rank: int) -> None:
        def gather(values: Any) -> Any:
            told[rank] = tuple(values)  # type: ignore[call-overload]
            met.wait(10)
            found = list(told)
            met.wait(10)
            return found

        try:
            CommonSamples({"": sources[rank]()}).completed(gather)
        except LoopError as e:
            said[rank] = str(e)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(sources))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return said


def source(order: list[int]) -> Callable[[], Source]:
    dataset = Subset(TensorDataset(X, X[:, :2]), order)
    return lambda: Source("Subset", dataset, lambda: read_samples(dataset))


def test_ranks_that_read_apart_are_all_told_which_differ() -> None:
    said = ranks(source(split(0)), source(split(0)), source(split(1)))
    assert len(set(said)) == 1
    assert said[0].startswith("rank 2 reads another sample than rank 0 under index 0, ")
    assert len(said[0]) < 6 * 160


def test_ranks_are_compared_with_each_other_where_the_first_could_not_read() -> None:
    said = ranks(lambda: Source("Subset", Subset(TensorDataset(X), split(0)), dict), source(split(0)), source(split(1)))
    assert len(set(said)) == 1
    assert said[0].startswith("rank 2 reads another sample than rank 1 under index 0, ")


def test_ranks_of_other_lengths_are_told_the_lengths() -> None:
    said = ranks(source(split(0)), source(split(0)[:-1]))
    assert said[0] == said[1]
    assert said[0].startswith("rank 0 has 96 samples in Subset, and rank 1 has 95, so")


def test_ranks_that_read_alike_or_could_not_read_are_told_nothing() -> None:
    def unread() -> Source:
        return Source("Subset", Subset(TensorDataset(X), split(0)), dict)

    assert ranks(source(split(0)), source(split(0)), unread) == ["", "", ""]
