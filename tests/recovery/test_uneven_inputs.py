"""torch's `join` as the session has it, by names of torch's that are not public: they are watched here."""

import os
from pathlib import Path

import pytest

from support.processes.ranks import Ranks
from support.processes.warm_python import warm
from support.recovery import uneven_script

pytestmark = pytest.mark.timeout(240)


def test_gradients_of_uneven_inputs_are_those_of_one_process(tmp_path: Path) -> None:
    output = tmp_path / "output.txt"
    ranks = Ranks(warm(), 3, [Path(uneven_script.__file__)], output, dict(os.environ))
    try:
        codes = ranks.wait(180)
    finally:
        ranks.kill()
    assert codes == [0, 0, 0], output.read_text()[-4000:]
