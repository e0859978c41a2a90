"""Looks into the folder of a disk store, past the store."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any


def blobs(path: Path) -> list[Path]:
    return [p for p in (path / "blobs").rglob("*") if p.is_file()]


def sql(path: Path, statement: str, *arguments: Any) -> list[Any]:
    with sqlite3.connect(path / "cache.db") as connection:
        rows = connection.execute(statement, arguments).fetchall()
    connection.close()
    return rows
