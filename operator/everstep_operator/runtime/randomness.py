"""Randomness as an argument: a source of uniform numbers in [0, 1)."""

from collections.abc import Callable
from typing import TypeAlias

Random: TypeAlias = Callable[[], float]
