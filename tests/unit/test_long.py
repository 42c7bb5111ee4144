"""Which tests `make nightly` alone has: every file has others, and every lane of tests has its part of each table."""

from __future__ import annotations

import ast
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from support import TESTS

LANES = runpy.run_path(str(TESTS / "lanes" / "lanes.py"))["LANES"]
NIGHTLY = {"long", "long-nodes", "long-alone"}
LONG = "pytest.mark.long"
CONFTEST = (
    "from support.lanes.long import Long\n"
    "def pytest_configure(config):\n"
    "    config.addinivalue_line('markers', 'long: see there')\n"
    "    config.addinivalue_line('markers', 'long_but(row, ...): see there')\n"
    "    config.pluginmanager.register(Long())\n"
)
ROWS = """
import pytest

@pytest.mark.long_but("2-b", "0-a")
@pytest.mark.parametrize("letter", ["a", "b"])
@pytest.mark.parametrize("number", range(3))
def test_table(number, letter): pass

@pytest.mark.long
def test_slow(): pass

def test_quick(): pass
"""
KEPT = {"test_table[2-b]", "test_table[0-a]", "test_quick"}
OTHERS = {"test_table[0-b]", "test_table[1-a]", "test_table[1-b]", "test_table[2-a]", "test_slow"}


def ran(folder: Path, *arguments: str, text: str = ROWS) -> set[str] | str:
    """The tests that passed; pytest's error where it refuses to begin."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_rows.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *arguments]
    environ = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode in (0, 4), done.stdout + done.stderr
    if done.returncode:
        return done.stderr
    return {line.split()[0].partition("::")[2] for line in done.stdout.splitlines() if " PASSED" in line}


def test_a_table_has_the_named_rows_in_one_lane_and_the_others_in_the_other(tmp_path: Path) -> None:
    assert ran(tmp_path, "-m", "not long") == KEPT
    assert ran(tmp_path, "-m", "long") == OTHERS
    assert ran(tmp_path) == KEPT | OTHERS
    assert ran(tmp_path, "test_rows.py::test_table[1-b]") == {"test_table[1-b]"}


def test_a_row_that_is_not_there_is_refused_by_its_name(tmp_path: Path) -> None:
    said = ran(tmp_path, text=ROWS.replace('"0-a"', '"3-a"'))
    assert "test_rows.py::test_table: long_but('2-b', '3-a') has to name rows of it" in said
    assert "its 6 rows begin with ['0-a', '0-b'" in said


RECIPE = "a run of this recipe takes half a minute; test_layerwise.py has a killed worker"
RANK = "half a minute of a whole local run; agents, operator and worker have each part in tests of their own"
# Test files of which `make nightly` has all tests.
WHOLLY_LONG = {
    "apiserver/test_kueue.py": "what Kueue itself does; operator/test_operator_queues.py has what we do by it",
    "apiserver/test_gang_scheduler.py": "it builds the API server and the scheduler of another Kubernetes",
    "apiserver/test_kubernetes_range.py": "two API servers to build, and hundreds of tests at each",
    "agent/test_agent_outage.py": "its time-outs are waited for; a store that is away is in rendezvous/",
    "agent/test_agent_partition.py": "its time-outs are waited for; links that fail are in rendezvous/",
    "agent/test_agent_sharded.py": "recovery/test_recovery_sharded.py has a lost replica without agents",
    "agent/test_agent_slow.py": "it waits for a slow rank to be seen; unit/ has the decision",
    "apiserver/operator/test_operator_autoscaler.py": "it waits for a controller; unit/ has the sizes",
    "apiserver/operator/test_operator_prometheus.py": "it builds Prometheus; unit/test_metric_queries.py has the names",
    "apiserver/operator/test_operator_plan.py": "unit/test_plan_command.py has the command and its answers",
    "data/test_sources_outside.py": "it installs two libraries",
    "e2e/test_deepspeed.py": "it builds an image of its own",
    "e2e/test_drains.py": "it evicts a worker ten times; scenarios/a_node_is_drained.txt drains a node",
    "e2e/test_lifecycle.py": "unit/ and apiserver/ have both; here are the kubelets and their network",
    "e2e/test_queues.py": "it installs the chart twice; apiserver/operator/test_operator_queues.py has each decision",
    "e2e/test_documents.py": "minutes on a cluster",
    "e2e/test_edited.py": "minutes on a cluster",
    "e2e/test_elastic.py": "minutes on a cluster",
    "e2e/test_installation.py": "minutes on a cluster",
    "e2e/test_namespaced.py": "minutes on a cluster; apiserver/test_namespaced_install.py has the roles",
    "e2e/test_network_policy.py": "minutes on a cluster, and the build of kube-router",
    "e2e/test_readiness.py": "half a minute on a cluster; rendezvous/test_rendezvous_start_probe.py has the probe",
    "e2e/test_recipes.py": "minutes on a cluster",
    "e2e/test_rerun.py": "minutes on a cluster; apiserver/operator/test_operator_rerun.py has the operator",
    "e2e/test_restarts.py": "minutes on a cluster; test_gate.py has the suspension and the loss of a node",
    "e2e/test_rights.py": "minutes on a cluster; apiserver/ has the page's readers and what the operator may not",
    "e2e/test_scenarios.py": "minutes on a cluster; test_gate.py has the hardest of them",
    "e2e/test_sequences.py": "minutes on a cluster",
    "e2e/test_slow_server.py": "minutes on a cluster; apiserver/operator/test_operator_slow_server.py has a small one",
    "e2e/test_tls.py": "minutes on a cluster; apiserver/test_tls_chart.py has the chart, rendezvous/ the agents",
    "e2e/test_traces.py": "minutes on a cluster; unit/test_recovery_traces.py has a real exporter and collector",
    "e2e/test_upgrade.py": "minutes on a cluster; test_commands.py has `helm test` of what is installed",
    "local/test_kubelet_torchrun.py": "rendezvous/test_rendezvous_start_probe.py has torchrun at the operator",
    "ordinary/test_ordinary_rehearsed.py": "each row is a rehearsal; rehearse/test_held_tensors.py has one",
    "recipes/test_async_ps.py": RECIPE,
    "recipes/test_comm_hooks.py": RECIPE,
    "recipes/test_context_parallel.py": RECIPE,
    "recipes/test_fedavg.py": RECIPE,
    "recipes/test_heterogeneous.py": RECIPE,
    "recipes/test_many_kills.py": RECIPE,
    "recipes/test_resnet.py": RECIPE,
    "recipes/test_rl.py": RECIPE,
    "recipes/test_sequence_parallel.py": RECIPE,
    "recipes/test_slurm.py": "it installs a Slurm",
    "recipes/test_streaming.py": RECIPE,
    "recipes/test_tensor_parallel.py": RECIPE,
    "recovery/test_recovery_sources.py": "recovery/test_recovery_kills.py has the samples over kills",
    "rehearse/test_horovod_loops.py": "rehearsals; recipes/test_horovod.py has killed ranks",
    "rehearse/test_live_change.py": "rehearsals; unit/test_rehearse_live_change.py has the finding",
    "rehearse/test_evaluated.py": "rehearsals; ordinary/test_evaluated_statistics.py has a loss in an evaluation",
    "rehearse/test_rehearse_slow_saves.py": "it waits for slow saves; rehearse/test_store_loss.py waits for a store",
    "rehearse/test_held_values.py": "test_hidden_state.py has values of each kind",
    "rehearse/test_library_loops.py": "each is a rehearsal; test_store_loss.py has one",
    "rehearse/test_rehearse_in_ci.py": "each is a rehearsal; test_held_tensors.py has one, and unit/ the options",
    "rehearse/test_statistics.py": "unit/test_rehearse_findings.py has the finding",
    "run/test_page_browser.py": "it installs a browser; unit/test_page.py reads the page with a strict parser",
    "run/test_run_commands.py": "test_run_client.py changes a live run, unit/test_cli_runs.py has the commands",
    "run/test_run_compared.py": "three whole local runs; recovery/test_recovery_bits.py has a lost process",
    "run/test_run_elastic.py": RANK,
    "run/test_run_fixed.py": RANK,
    "run/test_run_instruments.py": RANK,
    "run/test_run_migrate.py": "a minute; agent/test_agent_leaving.py has the agents, and transcripts the operator",
    "run/test_run_notebook.py": "run/test_run_client.py has what its cells call",
    "run/test_run_refusals.py": "agent/test_agent_launcher.py has each way in which a refusal leaves a script",
    "run/test_run_restarts.py": RANK,
    "run/test_run_scenarios.py": RANK,
    "run/test_run_sequences.py": RANK,
    "storage/test_storage_killed.py": "worker/test_storage_upload.py has a writer killed at each part",
    "run/test_run_page.py": "a local run from start to end; unit/test_page.py has what the page shows",
    "run/test_run_rerun.py": "two local runs; apiserver/operator/test_operator_rerun.py has a rerun",
}


def has_long(decorators: list[ast.expr]) -> bool:
    return any(ast.unparse(one) == LONG for one in decorators)


def quick_ones(body: list[ast.stmt], bases: set[str]) -> list[str]:
    """Tests that are not long themselves. A class without tests of its own inherits those of another."""
    found = []
    for one in body:
        if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef)):
            if one.name.startswith("test") and not has_long(one.decorator_list):
                found.append(one.name)
        elif isinstance(one, ast.ClassDef) and not has_long(one.decorator_list):
            own = quick_ones(one.body, bases)
            inherits = one.name.startswith("Test") and one.bases and ast.unparse(one.bases[0]) not in bases
            found += own or ([one.name] if inherits else [])
    return found


def wholly_long(path: Path) -> bool:
    tree = ast.parse(path.read_text())
    for one in tree.body:
        if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == "pytestmark":
            marks = one.value.elts if isinstance(one.value, ast.List) else [one.value]
            if has_long(marks):
                return True
    long_classes = {one.name for one in tree.body if isinstance(one, ast.ClassDef) and has_long(one.decorator_list)}
    return not quick_ones(tree.body, long_classes)


def test_every_file_has_a_test_in_make_test_or_a_reason_why_not() -> None:
    folders = {folder for name, lane in LANES.items() if name not in NIGHTLY for folder in lane.folders}
    files = [path for folder in folders for path in (TESTS / folder).rglob("test_*.py")]
    found = {path.relative_to(TESTS).as_posix() for path in files if wholly_long(path)}
    assert found - set(WHOLLY_LONG) == set(), "leave the quickest row of each to `make test`, or write the reason here"
    assert set(WHOLLY_LONG) - found == set(), "these have a test in `make test`: take them out here"


def test_every_folder_of_tests_is_in_the_lanes_of_make_test_and_in_the_long_one() -> None:
    folders = {path.relative_to(TESTS).parts[0] for path in TESTS.rglob("test_*.py")} - {"soak"}
    assert {folder for name, lane in LANES.items() if name not in NIGHTLY for folder in lane.folders} == folders
    assert {folder for name in NIGHTLY for folder in LANES[name].folders} == folders


@pytest.mark.parametrize("name", sorted(set(LANES) - NIGHTLY))
def test_no_lane_of_make_test_has_a_test_that_is_long(name: str) -> None:
    """The rows that are restarted as a whole took an hour once, because an expression for marks had left one out."""
    chosen = LANES[name].chosen
    assert "not long" in chosen[chosen.index("-m") + 1].split(" and ")


def test_tests_that_need_nodes_are_in_the_folders_of_their_lanes() -> None:
    """Elsewhere a test marked `kind` would be in no lane, and in e2e one that is not."""
    marked = {path.relative_to(TESTS) for path in TESTS.rglob("test_*.py") if "mark.kind" in path.read_text()}
    assert {path.parts[0] for path in marked} - {"unit"} == {"cluster", "e2e"}
    assert {path.relative_to(TESTS) for path in (TESTS / "e2e").glob("test_*.py")} <= marked


def test_budgets_of_make_test_are_fifteen_minutes() -> None:
    assert sum(lane.budget for name, lane in LANES.items() if name not in NIGHTLY) <= 15 * 60


# Libraries that take seconds to import. Each process of a lane collects all of its tests, also those of the night.
SLOW = {
    "accelerate", "cyclonedx", "datasets", "jsonschema", "lightning", "nbclient", "nbformat", "pandas", "peft", "scipy",
    "sklearn", "torchmetrics", "transformers", "trl",
}  # fmt: skip


def test_no_file_of_tests_imports_a_slow_library_when_it_is_collected() -> None:
    found = []
    for path in (*TESTS.rglob("test_*.py"), *TESTS.rglob("conftest.py")):
        for one in ast.parse(path.read_text()).body:
            names = [alias.name for alias in one.names] if isinstance(one, ast.Import) else []
            names += [one.module or ""] if isinstance(one, ast.ImportFrom) else []
            found += [f"{path.relative_to(TESTS)}: {name}" for name in names if name.partition(".")[0] in SLOW]
    assert found == [], "import it in the function that needs it"
