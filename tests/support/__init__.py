"""What tests share: everything that a test imports and that is no test is in a room of this package.

It is found by pytest's setting `pythonpath`, and by every process of the environment through a file that `make setup`
writes. A room's own `__init__.py` imports nothing: a test pays only for what it uses.
"""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
