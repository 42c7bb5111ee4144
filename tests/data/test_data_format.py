"""The order is a documented format: the reference's own code gives the same samples as ours."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from everstep.data import Permutation

REFERENCE = Path(__file__).parents[2] / "docs" / "reference" / "data.md"


@pytest.fixture(scope="module")
def sample() -> Callable[[int, bytes, int], int]:
    code = next(part for part in REFERENCE.read_text().split("```python\n") if part.startswith("def sample("))
    names: dict[str, object] = {"hashlib": hashlib}
    exec(code.split("```")[0], names)
    return names["sample"]  # type: ignore[return-value]


@pytest.mark.parametrize("n", [1, 2, 10, 256, 257, 1000, 2**16, 2**16 + 1, 2**48])
def test_code_in_the_reference_gives_the_same_order(n: int, sample: Callable[[int, bytes, int], int]) -> None:
    positions = np.linspace(0, n - 1, 40).astype(np.int64)
    for key in (b"", b"everstep", (42).to_bytes(8, "little") + (0).to_bytes(8, "little")):
        assert Permutation(n, key).take(positions).tolist() == [sample(n, key, int(p)) for p in positions]
