"""The fixture that the tests of recipes share."""

from __future__ import annotations

import pytest

from support.recipes.shared import SharedRuns, shared_folder


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> SharedRuns:
    """Makes undisturbed runs, each once for all tests."""
    return SharedRuns(shared_folder(tmp_path_factory))
