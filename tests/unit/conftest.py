"""The toy cluster of the planner tests, shared as a fixture because test modules cannot import one another."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import elastic_world as toy_agents
import plan_world as toy_cluster


@pytest.fixture(scope="session")
def plan_world() -> ModuleType:
    return toy_cluster


@pytest.fixture(scope="session")
def elastic_world() -> ModuleType:
    return toy_agents
