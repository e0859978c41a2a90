"""The names that users import: errors live in `ctxwin.errors` only, and names that have moved tell where to."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

import ctxwin
from ctxwin import Window, errors, open_store
from ctxwin.store.tiered import TieredStore
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


def test_engines_and_stores_say_what_they_are(tmp_path: Path) -> None:
    store = open_store("memory:", max_bytes=5000)
    store.put("span/a", bytes(1200))
    assert repr(store) == "<MemoryStore 1 entries, 1,200 of 5,000 bytes>"
    assert repr(FakeEngine(store)) == f"<FakeEngine fake-model, 4,096 tokens, {store!r}>"
    disk = open_store(f"disk:{tmp_path}", max_bytes=5000)
    assert re.fullmatch(rf"<DiskStore {tmp_path}/\w+ 0 entries, 0 of 5,000 bytes>", repr(disk))
    tiers = TieredStore([store, disk])
    assert repr(tiers) == f"<TieredStore {store!r}, {disk!r}>"
    for one in (disk, store):
        one.close()
        assert repr(one).endswith(" closed>")
    assert repr(FakeEngine.__new__(FakeEngine)).startswith("<window.fake.FakeEngine object at ")
