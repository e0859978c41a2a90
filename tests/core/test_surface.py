"""The names that users import: errors live in `ctxwin.errors` only, and names that have moved tell where to."""

from __future__ import annotations

import importlib

import pytest

import ctxwin
from ctxwin import Window, errors
from window.fake import FakeEngine

ERRORS = sorted(name for name, value in vars(errors).items() if isinstance(value, type))


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_is_found_in_one_place_and_named_elsewhere(name: str) -> None:
    assert issubclass(getattr(errors, name), errors.CtxwinError)
    assert name not in ctxwin.__all__ and name not in dir(ctxwin)
    with pytest.raises(ImportError, match=rf"ctxwin\.errors\.{name};"):
        exec(f"from ctxwin import {name}", {})
    with pytest.raises(ImportError, match=rf"ctxwin\.errors\.{name};"):
        getattr(ctxwin, name)


def test_every_public_name_is_there_and_others_are_not() -> None:
    assert all(getattr(ctxwin, name) is not None for name in ctxwin.__all__)
    assert not hasattr(ctxwin, "annotations_of_nothing")
    with pytest.raises(ImportError, match="cannot import name 'errors_of_nothing'"):
        exec("from ctxwin import errors_of_nothing", {})
    assert importlib.import_module("ctxwin.errors") is errors


@pytest.mark.parametrize("name", ["dependents", "touch", "prepare_orbit", "refresh", "compress", "merge", "prefill"])
def test_maintenance_stands_apart_from_a_window(name: str) -> None:
    with Window(FakeEngine()) as window:
        assert callable(getattr(window.maintenance, name))
        assert name not in dir(window) and not hasattr(window, name)
        with pytest.raises(AttributeError, match=rf"Window\.maintenance\.{name}$"):
            getattr(window, name)


def test_a_window_is_checked_by_either_name_and_unknown_names_stay_unknown() -> None:
    with Window(FakeEngine()) as window:
        window.check()
        window.maintenance.check()
        with pytest.raises(AttributeError, match=r"^'Window' object has no attribute 'mergee'$"):
            getattr(window, "mergee")  # noqa: B009
