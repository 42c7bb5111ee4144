"""The mesh, and FSDP2's modules over it, by names of torch's that are not public: they are watched here."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from everstep.recovery.errors import LoopError
from everstep.recovery.forming import forming
from everstep.recovery.group.in_flight import PeerLost
from everstep.recovery.group.script_location import ScriptLocation
from everstep.recovery.sharding.fsdp import NotRecoverable, ShardedObjects, check, is_offloaded
from everstep.recovery.sharding.mesh import RecoverableMesh
from everstep.recovery.state.shape import MODEL, SHARD, TENSOR, Shape
from everstep.torch_private.sharded import forget_plans, shards_of
from everstep.train.mesh import likely_rank, make_mesh
from everstep.train.process_place import ProcessPlace
from support.recovery.lonely_mesh import mesh_of

pytestmark = pytest.mark.usefixtures("world_of_one")


UNTOLD = r"mesh\.\w+(\(\))? \(test_recovery_mesh\.py:\d+\): before the loop a process has no rank yet"


class Net(torch.nn.Module):
    """Seven rows are shared out as 3, 3, 1 or 4, 3; one row as 1, 0."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Linear(4, 7)
        self.b = torch.nn.Linear(7, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.b(self.a(x).relu())
        return found


def sharded(mesh: RecoverableMesh, **options: Any) -> Any:
    torch.manual_seed(0)
    model = Net()
    fully_shard(model.a, mesh=mesh.device_mesh, **options)
    return fully_shard(model, mesh=mesh.device_mesh, **options)


def shapes(model: Any) -> list[torch.Size]:
    return [p.to_local().shape for p in model.parameters()]


def test_number_of_replicas_is_known_from_the_first_round_on() -> None:
    mesh = mesh_of(2, 1, MODEL, ScriptLocation())
    made, replicate = mesh.device_mesh, mesh.device_mesh["replicate"]
    assert (made.size(1), made["model"].size()) == (2, 2)
    inside = made["model"]
    assert (inside.shape, inside.get_coordinate()) == ((2,), (1,))
    assert (inside.get_local_rank(), made.get_local_rank(1)) == (1, 1)
    for ask in (
        made.size, lambda: made.size(0), replicate.size, lambda: made.get_local_rank("replicate"),
        made["replicate"].get_local_rank, lambda: made.shape, lambda: made.mesh, made.get_coordinate,
        lambda: replicate.shape, replicate.get_coordinate, lambda: inside.mesh,
    ):  # fmt: skip
        with pytest.raises(LoopError, match=UNTOLD):
            ask()
    known = "'cpu', its ranks are known from run.steps() on)"
    assert repr(made) == f"DeviceMesh((replicate=?, model=2), {known}"
    assert repr(inside) == f"DeviceMesh((model=2), {known}"
    mesh.move(3, 6)
    assert repr(made).startswith("DeviceMesh((replicate=3, model=2), 'cpu', stride=")
    assert (made.size(), made.size(0), replicate.size()) == (6, 3, 3)
    assert (made.shape, made.get_coordinate()) == ((3, 2), (1, 1))
    assert (replicate.shape, inside.mesh.tolist(), made.mesh.tolist()) == ((3,), [2, 3], [[0, 1], [2, 3], [4, 5]])


@pytest.mark.parametrize("kind", [SHARD, TENSOR])
def test_shard_that_may_become_another_is_not_told_before_the_first_round(kind: str) -> None:
    mesh = mesh_of(2, 1, kind, ScriptLocation())
    made, inside = mesh.device_mesh, mesh.device_mesh[kind]
    assert (inside.size(), inside.shape) == (2, (2,))
    for ask in (lambda: made.get_local_rank(kind), inside.get_local_rank, inside.get_coordinate, lambda: inside.mesh):
        with pytest.raises(LoopError, match=UNTOLD):
            ask()
    mesh.move(3, 4)
    assert (inside.get_coordinate(), inside.mesh.tolist()) == ((1,), [2, 3])


@pytest.mark.parametrize(("rank", "world", "shards"), [(0, 2, 2), (3, 4, 2), (4, 6, 3), (5, 8, 4), (1, 3, 1)])
def test_moved_mesh_is_the_one_that_torch_would_make(rank: int, world: int, shards: int) -> None:
    mesh = mesh_of(shards)
    first, part, other = mesh.device_mesh["shard"], mesh.device_mesh["shard"], mesh.device_mesh["replicate"]
    mesh.move(rank, world)
    made = mesh.device_mesh
    expected = torch.arange(world).view(-1, shards)
    row, column = divmod(rank, shards)
    assert made.shape == (world // shards, shards)
    assert made.get_coordinate() == (row, column)
    assert made._layout.remap_to_tensor(made._rank_map)[0].equal(expected.int())
    assert first == part
    assert (part.size(), part.get_coordinate()) == (shards, (column,))
    assert (other.size(), other.get_coordinate()) == (world // shards, (row,))
    assert dist.get_process_group_ranks(made.get_group("shard")) == expected[row].tolist()
    assert dist.get_process_group_ranks(made.get_group("replicate")) == expected[:, column].tolist()
    assert (made.get_group("shard").rank(), made.get_group("shard").size()) == (column, shards)
    assert (made.get_group("replicate").rank(), made.get_group("replicate").size()) == (row, world // shards)
    assert hash(made) == hash(made["replicate", "shard"])


@pytest.mark.parametrize("shards", [2, 3])
def test_module_that_holds_another_shard_is_as_if_it_had_been_built_so(shards: int) -> None:
    for first in range(shards):
        for then in range(shards):
            mesh = mesh_of(shards, first)
            model = sharded(mesh)
            optimizer = torch.optim.AdamW(model.parameters())
            mesh.move(then, shards)
            ShardedObjects({"model": model, "optimizer": optimizer}).hold(then)
            built = sharded(mesh_of(shards, then))
            assert shapes(model) == shapes(built)
            with torch.no_grad():
                for mine, theirs in zip(model.parameters(), built.parameters(), strict=True):
                    mine.to_local().copy_(theirs.to_local())
            assert next(iter(model.parameters())) is optimizer.param_groups[0]["params"][0]
            for mine, theirs in zip(gathered(model), gathered(built), strict=True):
                assert torch.equal(mine, theirs), "what is gathered from it is something else"


def gathered(model: Any) -> list[torch.Tensor]:
    """What goes into the all-gathers."""
    found = [
        parameter._sharded_param_data
        for module in (model.a, model)
        for group in module._get_fsdp_state()._fsdp_param_groups
        for parameter in group.fsdp_params
    ]
    assert found
    return found


@pytest.mark.parametrize("offload", [None, CPUOffloadPolicy(pin_memory=False)])
def test_step_that_failed_with_gradients_half_accumulated_leaves_nothing_behind(offload: Any) -> None:
    mesh = mesh_of(1)
    model = sharded(mesh, **({"offload_policy": offload} if offload else {}))
    for group in mesh.groups:
        group.on_begin = None  # as in a step
    x = torch.randn(6, 4)

    def step(model: Any) -> None:
        for i in range(3):
            model.set_requires_gradient_sync(i == 2)
            model.set_reshard_after_backward(i == 2)
            model(x[2 * i : 2 * i + 2]).square().sum().backward()

    with pytest.raises(PeerLost):
        step(model)
    for parameter in (*shards_of(model), *shards_of(model.a)):
        parameter.grad_offload_event = object()  # of a copy that an accelerator makes; it cannot be waited for
    ShardedObjects({"model": model}).reset()
    assert all(p.grad is None for p in model.parameters())
    alone = [forming.alone() for _ in mesh.groups]
    for group, inner in zip(mesh.groups, alone, strict=True):
        group.attach(inner, 0, 1)
    step(model)
    torch.manual_seed(0)
    plain = Net()
    for i in range(3):
        plain(x[2 * i : 2 * i + 2]).square().sum().backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(mine.grad.to_local(), theirs.grad)  # type: ignore[arg-type]
    for group in mesh.groups:
        group.abandon("the test is over")


def cut(mesh: RecoverableMesh) -> Any:
    forget_plans()  # torch keeps an equal mesh of another test: a process has one
    torch.manual_seed(0)
    plan = {name: ColwiseParallel(output_layouts=Replicate()) for name in ("a", "b")}
    return parallelize_module(Net(), mesh.over, plan)  # type: ignore[arg-type]


def test_model_is_cut_by_tensor_parallelism_in_a_process_that_has_met_nobody() -> None:
    torch.manual_seed(0)
    whole = Net()
    for shard in range(2):
        model = cut(mesh_of(2, shard, TENSOR))
        assert model.a.weight.shape == (7, 4)
        assert model.a.weight.to_local().equal(whole.a.weight.chunk(2)[shard])
        assert shapes(model)[2:] == [torch.Size([1 - shard, 7]), torch.Size([1 - shard])]


@pytest.mark.parametrize("shards", [2, 3])
def test_cut_module_that_holds_another_shard_has_the_parts_that_it_would_have_been_built_with(shards: int) -> None:
    for first in range(shards):
        for then in range(shards):
            mesh = mesh_of(shards, first, TENSOR)
            model = cut(mesh)
            optimizer = torch.optim.AdamW(model.parameters())
            before = list(model.parameters())
            mesh.move(then, 2 * shards)
            ShardedObjects({"model": model, "optimizer": optimizer}, mesh.over).hold(then)
            assert shapes(model) == shapes(cut(mesh_of(shards, then, TENSOR)))
            assert all(p is was for p, was in zip(model.parameters(), before, strict=True))
            assert all(p.to_local().requires_grad for p in model.parameters())


def test_operations_of_a_cut_module_are_computed_anew_for_another_part() -> None:
    mesh = mesh_of(2, 0, TENSOR)
    model = cut(mesh)
    for shard, rows in ((0, 4), (1, 3), (0, 4)):
        mesh.move(shard, 2)
        ShardedObjects({"model": model}, mesh.over).hold(shard)
        assert model.a.bias.view(7).to_local().shape == (rows,)


def test_state_that_is_cut_over_the_tensor_mesh_is_accepted_and_other_placements_are_refused() -> None:
    mesh = mesh_of(2, 0, TENSOR)
    model = cut(mesh)
    check({"model": model, "optimizer": torch.optim.SGD(model.parameters())}, mesh.over)
    with pytest.raises(NotRecoverable, match=r"run\.mesh\(tensor=N\)"):
        check({"model": model}, None)
    with pytest.raises(NotRecoverable, match=r"model\.a\.weight is sharded over .* run\.average_gradients\(model\)"):
        check({"model": fully_shard(Net(), mesh=mesh.device_mesh["replicate"])}, mesh.over)
    partial = torch.nn.ParameterList([DTensor.from_local(torch.ones(2), mesh.over, [Partial()], run_check=False)])
    with pytest.raises(NotRecoverable, match=r"placement P.*Shard and Replicate"):
        check({"model": partial}, mesh.over)
    with pytest.raises(NotRecoverable, match=r"Call parallelize_module\(\)"):
        check({"model": Net()}, mesh.over)


def test_collective_over_a_mesh_that_has_met_nobody_is_refused_by_its_line() -> None:
    mesh = mesh_of(2, 0, TENSOR)
    for group in mesh.groups:
        with pytest.raises(LoopError, match=r"\(test_recovery_mesh\.py:\d+\) over a group of run\.mesh\(\)"):
            dist.all_reduce(torch.ones(1), group=group)


def test_state_over_the_sessions_mesh_is_accepted_and_any_other_is_refused() -> None:
    mine, other = mesh_of(2), mesh_of(3)
    model = sharded(mine)
    check({"model": model, "optimizer": torch.optim.SGD(model.parameters())}, mine.device_mesh)
    check({"model": Net()}, None)
    for mesh in (other.device_mesh, None):
        with pytest.raises(NotRecoverable, match=r"model\.a\.weight is sharded over DeviceMesh"):
            check({"model": model}, mesh)
    with pytest.raises(NotRecoverable, match="optimizer: parameter 0 is sharded"):
        check({"optimizer": torch.optim.SGD(model.parameters())}, None)


def test_sharded_job_whose_steps_cannot_be_voted_on_or_taken_back_is_refused() -> None:
    mesh = mesh_of(2)
    model, plain = sharded(mesh), Net()
    optimizer = torch.optim.SGD(model.parameters())
    for state, said in (
        ({"model": plain, "optimizer": torch.optim.SGD(plain.parameters())}, "no module that is sharded"),
        ({"model": model}, "no optimizer that is sharded"),
        ({"optimizer": optimizer}, "no module that is sharded"),
        ({"model": sharded(mesh), "optimizer": optimizer}, r"optimizer changes a sharded parameter of shape \[7, 4\]"),
    ):
        with pytest.raises(NotRecoverable, match=said):
            check(state, mesh.device_mesh)


def test_shards_that_rest_on_the_cpu_are_accepted() -> None:
    mesh = mesh_of(2)
    away = sharded(mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    state = {"model": away, "optimizer": torch.optim.SGD(away.parameters())}
    check(state, mesh.device_mesh)
    assert is_offloaded(state)
    assert not is_offloaded({"model": sharded(mesh)})


def test_fsdp1_is_refused_with_what_does_the_same() -> None:
    model = FullyShardedDataParallel(Net(), device_id=torch.device("cpu"))
    with pytest.raises(NotRecoverable, match=r"FullyShardedDataParallel.*shard=N.*set_requires_gradient_sync"):
        check({"model": model}, None)


def test_model_that_the_largest_world_cannot_be_divided_over_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERSTEP_MOST_PROCESSES", "5")
    place = ProcessPlace(0, 1, torch.device("cpu"), False, range(2, 6))
    nobody: Any = object()
    with pytest.raises(LoopError, match=r"mesh\(model=2\): the job may come to have 5 processes.*--nnodes"):
        make_mesh(place, nobody, Shape(MODEL, 2))


@pytest.mark.parametrize(
    ("environ", "rank"),
    [
        ({}, 0),
        ({"WORLD_SIZE": "4", "RANK": "3", "EVERSTEP_WORKER_INDEX": "1"}, 3),
        ({"WORLD_SIZE": "1", "RANK": "0", "EVERSTEP_WORKER_INDEX": "3"}, 3),
        ({"WORLD_SIZE": "1", "RANK": "0", "EVERSTEP_WORKER_INDEX": "3", "EVERSTEP_LAST_RANK": "5"}, 5),
        ({"WORLD_SIZE": "1", "RANK": "1", "EVERSTEP_WORKER_INDEX": "2", "LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "1"}, 9),
    ],
)
def test_rank_that_a_process_expects_is_its_rounds_or_its_workers(environ: dict[str, str], rank: int) -> None:
    assert likely_rank(environ) == rank
