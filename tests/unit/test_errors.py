"""Every error of the operator says by its type whether another try may succeed."""

from __future__ import annotations

import importlib
import inspect
import pkgutil

import pytest

import everstep_operator
from everstep_operator.errors import OperatorError, RetryableError, TerminalError
from everstep_operator.kube.errors import KubeError
from everstep_operator.plan.check import PlanError

BASES = {OperatorError, RetryableError, TerminalError, KubeError}
# A plan that breaks its own rules is a bug; a message for pydantic is none of our errors.
OTHERS = {PlanError, *(c for c in (importlib.import_module("everstep_operator.api.base").FieldError,))}


def errors() -> list[type[Exception]]:
    found: set[type[Exception]] = set()
    for module in pkgutil.walk_packages(everstep_operator.__path__, "everstep_operator."):
        for _, one in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
            if issubclass(one, Exception) and one.__module__.startswith("everstep_operator."):
                found.add(one)
    return sorted(found - BASES - OTHERS, key=lambda one: one.__qualname__)


@pytest.mark.parametrize("error", errors(), ids=lambda error: error.__qualname__)
def test_error_is_either_retryable_or_terminal(error: type[Exception]) -> None:
    assert issubclass(error, RetryableError) != issubclass(error, TerminalError)


def test_the_errors_are_all_found() -> None:
    assert {"Conflict", "NotLeading", "RoundsRefused", "SettingsError", "SpecError"} <= {
        e.__qualname__ for e in errors()
    }
