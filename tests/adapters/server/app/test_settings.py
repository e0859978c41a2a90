"""Options of a server that are out of range, and files that they name: refused by name before anything is opened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ctxwin_server.app.settings import Settings

SIZES = ("max_upload_bytes", "store_bytes", "registry_bytes", "max_memory")


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("size", ["0", "-1", "lots", "1e3", "1,000", "GB"])
def test_a_size_is_refused_by_its_option(name: str, size: str) -> None:
    with pytest.raises(ValueError, match=f"--{name.replace('_', '-')}: a size must be .*, got "):
        Settings(**{name: size}).service()


def test_an_empty_size_is_no_default_where_there_must_be_one() -> None:
    with pytest.raises(ValueError, match="--max-upload-bytes: a size must be"):
        Settings(max_upload_bytes="").service()


@pytest.mark.parametrize("name", SIZES)
def test_a_size_is_taken_with_its_unit(name: str) -> None:
    limits = Settings(**{name: "10 GB"}).service()["limits"]
    assert getattr(limits, name, 10 * 10**9) == 10 * 10**9


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_concurrency", 0), ("max_windows", -1), ("fidelity", "fast"), ("windows", "on"), ("volatile", "never")],
)
def test_an_option_is_refused_by_its_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name.replace('_', '.')} must be .*, got {value!r}"):
        Settings(**{name: value}).service()


def test_a_file_holds_a_key_that_a_client_can_send(tmp_path: Path) -> None:
    file = tmp_path / "key"
    for raw in (b"", b"\n", b"two keys", "schlüssel".encode(), b"caf\xe9", "key".encode("utf-16")):
        file.write_bytes(raw)
        with pytest.raises(ValueError, match=r"--metrics-key-file must be a file with one key .*key'"):
            Settings(metrics_key_file=str(file)).service()
    file.write_bytes(b"\xef\xbb\xbfscrape\r\n")
    assert Settings(metrics_key_file=str(file)).service()["metrics_key"] == "scrape"
