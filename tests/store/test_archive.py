"""Archives of records are read without trust: what they hold is verified before any of it is stored, in little memory."""

from __future__ import annotations

import io
import json
import os
import struct
import subprocess
import sys
import tracemalloc
import zipfile
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from ctxwin.cli.main import app
from ctxwin.hashing import digest
from ctxwin.store import STORE_KEY, open_store
from ctxwin.store.codec import MAGIC, PREFIX, Seal

MINE, OTHERS = "a key of sixteen bytes and more", "somebody else's key of as many bytes"
RECORDS = {f"span/{digest('record', i)}": bytes([i]) * (1000 * i + 1) for i in range(5)}


def invoke(*words: object) -> Result:
    return CliRunner().invoke(app, ["store", *map(str, words)], catch_exceptions=True)


def filled(folder: Path) -> Path:
    with closing(open_store(f"disk:{folder}")) as store:
        assert all(store.put(key, value) for key, value in RECORDS.items())
    return folder


def test_an_archive_is_its_owners_and_leaves_links_and_pipes_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "archive")
    (tmp_path / "archive").write_bytes(b"older")
    assert invoke("export", filled(tmp_path / "store"), tmp_path / "link").exit_code == 0
    assert (tmp_path / "link").is_symlink() and (tmp_path / "archive").stat().st_mode & 0o777 == 0o600
    assert invoke("import", tmp_path / "again", tmp_path / "archive").exit_code == 0 and held(tmp_path / "again")
    os.mkfifo(tmp_path / "pipe")
    refused = invoke("export", tmp_path / "store", tmp_path / "pipe")
    assert refused.exit_code and "must be written to a file" in refused.output and (tmp_path / "pipe").is_fifo()
    arguments = [sys.executable, "-m", "ctxwin", "store", "export", tmp_path / "store", "/dev/stdout"]
    piped = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert piped.returncode == 2 and "must be written to a file, got '/dev/stdout'" in piped.stderr


def held(folder: Path) -> dict[str, bytes]:
    with closing(open_store(f"disk:{folder}")) as store:
        return {key: store.get(key) or b"" for key in store.list()}


@pytest.fixture(scope="module", params=["", MINE], ids=["plain", "keyed"])
def key(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def archive(key: str, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("archive")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(STORE_KEY, key) if key else patch.delenv(STORE_KEY, raising=False)
        assert invoke("export", filled(folder / "kv"), folder / "all.ctxwin").exit_code == 0
    return (folder / "all.ctxwin").read_bytes()


def refused(raw: bytes, folder: Path, key: str, most_bytes: int | None = 4 << 20) -> str:
    """What `store import` says of a file that it takes nothing from, in little memory.

    None measures no memory: what is counted is the whole process's, whose other threads import and collect as they like.
    """
    path, into = folder / "file", folder / "into"
    path.write_bytes(raw)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(STORE_KEY, key) if key else patch.delenv(STORE_KEY, raising=False)
        held(into)
        if most_bytes is not None:
            tracemalloc.start()
        try:
            done = invoke("import", into, path)
            assert most_bytes is None or tracemalloc.get_traced_memory()[1] < most_bytes
        finally:
            tracemalloc.stop()
        assert done.exit_code not in (0, None), done.output
        assert held(into) == {}
    said = str(done.exception) if done.exception is not None and not done.output else done.output
    assert "must be" in said or "must have" in said, said
    return said


def test_what_was_exported_is_imported(
    archive: bytes, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(STORE_KEY, key) if key else monkeypatch.delenv(STORE_KEY, raising=False)
    (tmp_path / "file").write_bytes(archive)
    done = invoke("import", tmp_path / "into", tmp_path / "file", "--json", "--tenant", "")
    assert json.loads(done.stdout) == {"stored": 5, "there": 0, "refused": 0}
    assert held(tmp_path / "into") == RECORDS
    assert json.loads(invoke("import", tmp_path / "into", tmp_path / "file", "--json").stdout)["there"] == 5


def test_what_no_key_or_another_key_sealed_is_not_sealed_with_ours(
    archive: bytes, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "sealed" in refused(archive, tmp_path, OTHERS)
    monkeypatch.setenv(STORE_KEY, OTHERS)
    if key:
        monkeypatch.setenv("FORMER_KEY", key)
        done = invoke("import", tmp_path / "into", tmp_path / "file", "--sealed-with", "FORMER_KEY")
        assert done.exit_code == 0 and held(tmp_path / "into") == RECORDS
    assert invoke("import", tmp_path / "into", tmp_path / "file", "--sealed-with", "NOT_SET").exit_code != 0


def forged(*records: tuple[str, bytes], count: int | None = None) -> bytes:
    """An archive as somebody without a key makes it, whose checksums are right."""
    seal = Seal()
    parts = []
    for name, value in (*records, ("archive/end", str(len(records) if count is None else count).encode())):
        head, tail = seal.close(name, value)
        parts += [head, value, tail]
    return b"".join(parts)


def zipped(members: list[tuple[str, bytes]], method: int) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", method) as file:
        for name, value in members:
            file.writestr(zipfile.ZipInfo(name), value, compress_type=method)
    return made.getvalue()


def overlapping() -> bytes:
    """A zip whose two names lead to one member."""
    raw = bytearray(zipped([("span/aa", b"x" * 1000), ("span/bb", b"y" * 1000)], zipfile.ZIP_STORED))
    central = raw.rindex(b"PK\x01\x02")
    raw[central + 42 : central + 46] = struct.pack("<I", 0)
    return bytes(raw)


BOMB = zipped([("span/" + "0" * 64, bytes(256 << 20))], zipfile.ZIP_DEFLATED)
WHOLE = forged(*RECORDS.items())
HOSTILE = {
    "bomb": BOMB,
    "lzma bomb": zipped([("span/aa", bytes(16 << 20))], zipfile.ZIP_LZMA),
    "nested": zipped([("span/aa", BOMB)], zipfile.ZIP_DEFLATED),
    "overlapping": overlapping(),
    "twice": zipped([("span/aa", b"x"), ("span/aa", b"y")], zipfile.ZIP_STORED),
    "a path": forged(("../span/aa", b"x"), ("span/a b", b"y")),
    "an absolute path": forged(("\\etc\\passwd", b"x")),
    "no namespace": forged(("passwd", b"x")),
    "no records counted": forged(("span/aa", b"x"), count=0),
    "more counted": forged(("span/aa", b"x"), count=2),
    "something behind it": WHOLE + b"x",
    "two in one": WHOLE + WHOLE,
    "a record in a record": WHOLE[:-64] + WHOLE,
    "empty": b"",
    "no frame": b"x" * 100,
    "huge by its prefix": PREFIX.pack(MAGIC, 2, 3, 20, 1 << 40, 32) + bytes(100),
    "a huge header": PREFIX.pack(MAGIC, 2, 3, 60 << 20, 0, 32) + b" " * (60 << 20) + bytes(64),
    "sizes beyond all numbers": PREFIX.pack(MAGIC, 2, 3, (1 << 32) - 1, (1 << 64) - 1, (1 << 64) - 1),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_what_export_did_not_write_is_refused(name: str, key: str, tmp_path: Path) -> None:
    refused(HOSTILE[name], tmp_path, key)


def test_a_record_larger_than_the_store_is_refused_before_it_is_read(tmp_path: Path) -> None:
    from ctxwin.errors import BadMedia
    from ctxwin.store.archive import read_archive

    (tmp_path / "file").write_bytes(forged(("span/aa", bytes(20 << 20))))
    with closing(open_store("memory:", max_bytes=1 << 20)) as store:
        tracemalloc.start()
        with pytest.raises(BadMedia, match="at most"):
            next(read_archive(tmp_path / "file", store))
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
        tracemalloc.stop()


@given(data=st.data())
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))  # a busy machine draws slowly, too
def test_damage_anywhere_is_refused_whole(archive: bytes, key: str, tmp_path: Path, data: st.DataObject) -> None:
    raw, at = bytearray(archive), data.draw(st.integers(0, len(archive) - 1), label="at")
    kind = data.draw(st.sampled_from(["flip", "cut", "insert", "remove", "swap"]), label="kind")
    if kind == "flip":
        raw[at] ^= data.draw(st.integers(1, 255), label="by")
    elif kind == "cut":
        del raw[at:]
    elif kind == "insert":
        raw[at:at] = data.draw(st.binary(min_size=1, max_size=200), label="what")
    elif kind == "remove":
        del raw[at : at + data.draw(st.integers(1, 3000), label="bytes")]
    else:
        half = len(raw) // 2
        raw[:] = raw[half:] + raw[:half]
    refused(bytes(raw), tmp_path, key, most_bytes=None)  # all of it has 15 KB


def test_memory_does_not_grow_with_the_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(STORE_KEY, raising=False)
    (tmp_path / "file").write_bytes(forged(*((f"span/{i:064x}", bytes([i]) * (1 << 20)) for i in range(24))))
    invoke("ls", tmp_path)  # imports
    tracemalloc.start()
    done = invoke("import", tmp_path / "into", tmp_path / "file")
    assert done.exit_code == 0 and tracemalloc.get_traced_memory()[1] < 12 << 20
    tracemalloc.stop()
