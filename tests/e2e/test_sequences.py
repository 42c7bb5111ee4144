"""Random sequences on a cluster with real nodes: tests/support/scenarios/sequences.py, judged by `expect outcome`.

EVERSTEP_SEEDS=7 pytest -s tests/e2e/test_sequences.py       one seed; EVERSTEP_SEEDS=0:50 for fifty (`make soak`)
EVERSTEP_SEQUENCE=FILE pytest -s tests/e2e/test_sequences.py       a text, to replay or to shrink
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from support.e2e.driver import Job
from support.scenarios.given import play, texts
from support.scenarios.sequences import Place

WORKER_NODES = 2  # of the kind cluster


@pytest.mark.long
@pytest.mark.kind
@pytest.mark.alone  # most of them take nodes, the operator or the store away
@pytest.mark.parametrize("text", texts(os.environ, (0,), Place(WORKER_NODES, store=True, quota=True)))
def test_random_sequence_ends_as_if_undisturbed(text: str, new_job: Callable[..., Job]) -> None:
    play(new_job(), text, "tests/e2e/test_sequences.py")
