"""The simulated cluster of the planner tests. Its modules are fixtures, which the tests take by name."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # of the helpers that test modules here import

from everstep_local.plan.simulation import agents, cluster


@pytest.fixture(scope="session")
def plan_world() -> ModuleType:
    return cluster


@pytest.fixture(scope="session")
def elastic_world() -> ModuleType:
    return agents
