"""Long random tests twice: few programs in every run, and all of them among the guards, see `conftest.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.stateful import RuleBasedStateMachine


def guard(test: Any) -> Any:
    """Mark a test that continuous integration runs by turns."""
    return pytest.mark.slow(pytest.mark.guard(test))


def _drawn(count: int, **options: Any) -> settings:
    return settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck), **options)


def twins(check: Callable[..., None], few: int, many: int, *drawn: Any, **named: Any) -> tuple[Any, Any]:
    """Return a test of few draws of the strategies, and its guard of many."""
    short, long = (_drawn(count)(given(*drawn, **named)(check)) for count in (few, many))
    return short, guard(long)


def machines(machine: type[RuleBasedStateMachine], few: int, many: int, **options: Any) -> tuple[Any, Any]:
    """Return a test of few runs of a state machine, and its guard of many; options are those of `settings`."""
    short, long = (
        type(machine.__name__, (machine.TestCase,), {"settings": _drawn(count, **options)}) for count in (few, many)
    )
    return short, guard(long)


def seeds(few: int, many: int) -> list[Any]:
    """Return values of a parameter: the first few run always, the others as guards."""
    marks = (pytest.mark.slow, pytest.mark.guard)
    return [*range(few), *(pytest.param(seed, marks=marks) for seed in range(few, many))]
