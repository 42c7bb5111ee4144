"""The command line is torchrun's: every flag of the torch that is installed is taken, obeyed or refused by name."""

from __future__ import annotations

import pytest
from torch.distributed.run import get_args_parser
from torch.numa.binding import AffinityMode

from everstep.agent.arguments import NUMA, UsageError, parser, read, streams
from everstep.agent.membership import open_driver


def options(of: object) -> set[str]:
    return {option for action in of._actions for option in action.option_strings}  # type: ignore[attr-defined]


def test_every_flag_of_torchrun_is_known_in_both_spellings() -> None:
    assert options(get_args_parser()) <= options(parser({}))


def test_flags_are_read_from_the_environment_as_torchrun_reads_them() -> None:
    environ = {
        "PET_NNODES": "2:4",
        "PET_NPROC_PER_NODE": "2",
        "PET_RDZV_BACKEND": "etcd-v3",
        "PET_RDZV_ENDPOINT": "h:2379",
        "PET_RDZV_ID": "job",
        "PET_RDZV_CONF": "last_call=3, ttl=4",
        "PET_MAX_RESTARTS": "5",
        "PET_MODULE": "1",
        "PET_REDIRECTS": "0:3,1:1",
    }
    found = read(["pkg.train", "--lr", "0.1"], environ)
    assert (found.nodes, found.processes, found.backend, found.run_id) == ((2, 4), "2", "etcd-v3", "job")
    assert found.rendezvous == {"last_call": "3", "ttl": "4"}
    assert (found.max_restarts, found.program.module, found.program.arguments) == (5, True, ("--lr", "0.1"))
    assert [streams(found.redirects, slot) for slot in range(3)] == [(True, True), (True, False), (False, False)]
    assert read(["--nnodes=3", "t.py"], environ).nodes == (3, 3)


@pytest.mark.parametrize("value", ["true", "yes", "-1", ""])
def test_switch_in_the_environment_that_is_no_number_is_refused_as_torchrun_does(value: str) -> None:
    """It was no error, and meant no."""
    with pytest.raises(UsageError, match=f"PET_STANDALONE={value}: 0 or 1 is expected"):
        read(["t.py"], {"PET_STANDALONE": value})


def test_restarts_that_an_operator_leaves_to_this_agent_are_not_those_that_it_leaves_to_torchrun() -> None:
    environ = {"PET_MAX_RESTARTS": "5", "EVERSTEP_MAX_RESTARTS": "0"}
    assert read(["t.py"], environ).max_restarts == 0
    assert read(["--max-restarts=3", "t.py"], environ).max_restarts == 3


def test_processes_of_a_pod_have_its_grace_period_to_save_and_not_torchruns_30_seconds() -> None:
    in_pod = {"EVERSTEP_GRACE_SECONDS": "240"}
    assert (read(["t.py"], in_pod).shutdown_seconds, read(["t.py"], in_pod).grace_seconds) == (204, 204)
    assert read(["--shutdown-timeout=9", "t.py"], in_pod).shutdown_seconds == 9
    assert read(["t.py"], {}).shutdown_seconds == 30


def test_what_comes_after_the_script_is_the_scripts() -> None:
    found = read(["--nproc_per_node", "3", "train.py", "--nnodes", "9", "-m"], {})
    assert found.program.arguments == ("--nnodes", "9", "-m")
    assert (found.processes, found.nodes) == ("3", (1, 1))


@pytest.mark.parametrize(
    ("argv", "local", "ours"),
    [
        (["t.py"], True, True),
        (["--standalone", "t.py"], True, True),
        (["--nnodes=2", "t.py"], False, False),  # torch's static rendezvous
        (["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=h:1", "t.py"], False, False),
        (["--nnodes=2", "--rdzv-backend=etcd-v3", "--rdzv-endpoint=h:1", "t.py"], False, True),
        (["--master-port=29500", "t.py"], False, False),
    ],
)
def test_a_rendezvous_that_is_torchs_own_is_left_to_torchrun(argv: list[str], local: bool, ours: bool) -> None:
    found = read(argv, {})
    assert (found.local, found.ours) == (local, ours)


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--nnodes=0", "t.py"], "--nnodes=0"),
        (["--nnodes=3:2", "t.py"], "--nnodes=3:2"),
        (["--nproc-per-node=many", "t.py"], "--nproc-per-node=many"),
        (["--max-restarts=-1", "t.py"], "--max-restarts=-1"),
        (["--max-restarts=1.5", "t.py"], "--max-restarts=1.5"),
        (["--tee=4", "t.py"], "--tee=4"),
        (["--redirects=0:9", "t.py"], "--redirects"),
        (["--rdzv-conf=last_call", "t.py"], "--rdzv-conf"),
        (["--local-ranks-filter=a", "t.py"], "--local-ranks-filter"),
        (["--standalone", "--nnodes=2", "t.py"], "--standalone"),
        (["--module", "--no-python", "t.py"], "--module and --no-python"),
        (["--numa-binding=near", "t.py"], "--numa-binding=near"),
        (["--logs-specs=mine", "t.py"], "--logs-specs: everstep-run does not do this; torchrun does"),
        (["--event-log-handler=console", "t.py"], "--event-log-handler"),
        (["--shutdown-timeout=soon", "t.py"], "--shutdown-timeout=soon"),
        (["--no-such-flag", "t.py"], "no-such-flag"),
        ([], "training_script"),
    ],
)
def test_a_value_that_means_nothing_is_refused_by_the_flags_name(argv: list[str], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        read(argv, {})


def test_modes_of_numa_binding_are_torchs() -> None:
    assert set(NUMA) == {mode.value for mode in AffinityMode}


def test_flags_that_change_nothing_are_known_by_name_if_they_were_given() -> None:
    given = ["--monitor-interval=5", "--start-method=fork", "--run-path", "--node-rank=1", "t.py"]
    assert read(given, {}).unused == ("--monitor-interval", "--start-method", "--node-rank", "--run-path")
    assert read(["t.py"], {}).unused == ()


def test_misspelt_setting_of_the_rendezvous_is_named_also_where_an_agent_is_alone() -> None:
    arguments = read(["--standalone", "--rdzv-conf=tineout=5", "train.py"], {})
    assert arguments.local
    with pytest.raises(UsageError, match="tineout: no such key; did you mean timeout"):
        open_driver(arguments, 1, {})
