"""Libraries: files, versions, expiry, grants, processes that change one at once, and what a broken store may do to it."""

from __future__ import annotations

import json
import subprocess
import sys
import unicodedata
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ctxwin import Chunk, Library, open_store
from ctxwin.errors import (
    BadMedia,
    ChunkUnavailable,
    NameTaken,
    StoreFull,
    StoreUnavailable,
    UnknownFile,
    UnknownVersion,
)
from ctxwin.library.files import MAX_TEXT, _pieces, passages_of
from ctxwin.library.library import KEPT, granted_libraries, libraries
from ctxwin.media import png
from library.conftest import Clock
from window.fake import FakeEngine


def picture(shade: int) -> np.ndarray:
    return np.full((6, 4, 3), shade, np.uint8)


def texts(library: Library) -> dict[str, list[str]]:
    view = library.view()
    return {name: [p.text for p in view.entry(name).passages] for name in sorted(view.names)}


def test_files_are_cut_into_passages(shelf: Library, tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("A red car.\n\nA blue bus." + "\n\n" + "x " * MAX_TEXT)
    Image.fromarray(picture(9)).save(tmp_path / "shot.png")
    notes, shot = shelf.add(tmp_path / "notes.md"), shelf.add(tmp_path / "shot.png", caption="a dark square")
    assert notes.passages[0].text.startswith("A red car.\n\nA blue bus.")
    assert all(len(p.text) <= MAX_TEXT for p in notes.passages)
    assert "".join("".join(p.text.split()) for p in notes.passages) == "Aredcar.Abluebus." + "x" * MAX_TEXT
    windows = shelf.add("\ufeffA red car.\r\n\r\nA blue\r\nbus.".encode(), "windows.txt")
    assert [p.chunk.id for p in windows.passages] == [Chunk.text("A red car.\n\nA blue\nbus.").id]
    shelf.remove("windows.txt")
    (passage,) = shot.passages
    assert passage.text == "a dark square" and passage.chunk.id == Chunk.image(picture(9)).id
    assert [row.name for row in shelf.files()] == ["notes.md", "shot.png"]


@pytest.mark.parametrize("use", ["view", "add", "replace", "remove", "create", "export"])
def test_a_library_whose_list_the_store_lost_says_so_until_it_is_deleted(
    use: str, shelf: Library, tmp_path: Path
) -> None:
    shelf.add(b"A red car.", "car.txt")
    shelf.store.delete(shelf._head.key)
    uses: dict[str, Callable[[], object]] = {
        "view": shelf.view,
        "add": lambda: shelf.add(b"A blue bus.", "bus.txt"),
        "replace": lambda: shelf.add(b"A blue bus.", "bus.txt", replace=True),
        "remove": lambda: shelf.remove("car.txt"),
        "create": shelf.create,
        "export": lambda: shelf.export(tmp_path / "archive"),
    }
    with pytest.raises((ChunkUnavailable, NameTaken), match=r"has left the store|must have a name of its own"):
        uses[use]()
    assert shelf.exists
    shelf.delete()
    assert not shelf.exists and not [key for key in shelf.store.list() if not key.startswith("edition/")]
    shelf.add(b"A blue bus.", "bus.txt")
    assert texts(shelf) == {"bus.txt": ["A blue bus."]}


def test_what_only_memory_took_is_not_acknowledged(tmp_path: Path) -> None:
    with closing(open_store(f"tiered:memory:,disk:{tmp_path}", max_bytes=20_000)) as store:
        library = Library(store, "zoo")
        library.add(b"A red car.", "car.txt")
        noise = np.random.default_rng(0).integers(0, 255, (200, 200, 3), np.uint8)
        with pytest.raises(StoreFull):
            library.add(Chunk.image(noise), "noise.png")
        assert set(library.view().names) == {"car.txt"}


def test_an_export_without_its_pixels_names_the_file(shelf: Library, tmp_path: Path) -> None:
    shelf.add(Chunk.image(picture(9)), "dark.png")
    shelf.store.delete(next(shelf.store.list("source/")))
    with pytest.raises(ChunkUnavailable, match=r"dark\.png.*must have its pixels"):
        shelf.export(tmp_path / "archive")


def test_rows_stay_whole_and_a_long_file_takes_linear_work() -> None:
    rows = [f"{i},item{i},{37 * i}" for i in range(1000)]
    pieces = [passage.text for passage in passages_of("a.csv", "\n".join(rows).encode())]
    assert [row for piece in pieces for row in piece.split()] == rows
    assert max(map(len, pieces)) <= MAX_TEXT < 2.2 * min(map(len, pieces[:-1]))
    words = "\t".join(f"word{i}" for i in range(3000))
    assert "\t".join(passage.text for passage in passages_of("a.log", words.encode())) == words
    assert "".join(passage.text for passage in passages_of("a.txt", b"x" * 3000)) == "x" * 3000

    class Counted(str):
        copied = 0

        def __getitem__(self, at: Any) -> str:
            piece = str.__getitem__(self, at)
            Counted.copied += len(piece)
            return piece

    text = Counted("2024-01-01 host7 ok took 12.5 ms \n" * 10_000 + "end")
    assert sum(map(len, _pieces(text))) == Counted.copied <= len(text)


def test_pages_of_a_pdf_are_pictures_found_by_their_words(shelf: Library) -> None:
    pdfium = pytest.importorskip("pypdfium2")
    with pdfium.PdfDocument.new() as pdf:
        for _ in range(3):
            pdf.new_page(40, 30)
        pdf.save(path := Path(shelf.name + ".pdf").absolute())
    try:
        made = shelf.add(path)
    finally:
        path.unlink()
    assert [p.chunk.media[0].shape for p in made.passages] == [(1, 30, 40)] * 3
    assert [p.chunk.label for p in made.passages] == [f"shelf.pdf, page {n}" for n in (1, 2, 3)]


def test_a_video_is_cut_into_clips_that_outlive_the_file(shelf: Library, engine: FakeEngine, tmp_path: Path) -> None:
    cv2 = pytest.importorskip("cv2")
    path = tmp_path / "walk.avi"
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"MJPG"), 2.0, (16, 16))
    for i in range(20):
        writer.write(np.full((16, 16, 3), 10 * i, np.uint8))
    writer.release()
    made = shelf.add(path)
    path.unlink()
    assert [p.chunk.media[0].shape[0] for p in made.passages] == [4, 4, 2]
    assert engine.encode(shelf.view().find("walk", 1, engine)[0]).tokens > 4


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("a.exe", b"MZ", "must end with one of"),
        ("a.txt", b"", "must not be empty"),
        ("a.txt", b" \n ", "must have text"),
        ("a.txt", b"\xff\xfe\x00", "must be UTF-8"),
        ("a.png", b"no picture", "must be decodable"),
        ("a.pdf", b"%PDF-1.7 broken", "must be readable"),
        ("a/b.txt", b"text", "without slashes"),
        ("", b"text", "1 to 255 characters"),
    ],
)
def test_a_bad_file_is_refused_and_changes_nothing(shelf: Library, name: str, data: bytes, said: str) -> None:
    if name.endswith(".pdf"):
        pytest.importorskip("pypdfium2")
    shelf.add(b"kept", "kept.txt")
    with pytest.raises(ValueError, match=said):
        shelf.add(data, name)
    assert texts(shelf) == {"kept.txt": ["kept"]} and shelf.view().version == 1


def test_a_huge_file_a_missing_one_and_too_many_are_refused(
    engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = Library(engine.store, "small", max_bytes=10, max_files=2)
    with pytest.raises(BadMedia, match="must be there"):
        shelf.add(tmp_path / "gone.txt")
    shelf.add(b"12345", "a.txt")
    with pytest.raises(BadMedia, match="at most 10 bytes, got 11"):
        shelf.add(b"123456", "b.txt")
    shelf.add(b"12", "b.txt")
    with pytest.raises(BadMedia, match="at most 2 files, got 3"):
        shelf.add(b"1", "c.txt")
    monkeypatch.setattr("ctxwin.library.files.MAX_FILE_BYTES", 3)
    (tmp_path / "long.txt").write_text("1234")
    with pytest.raises(BadMedia, match="split it"):
        shelf.add(tmp_path / "long.txt")
    assert sorted(texts(shelf)) == ["a.txt", "b.txt"]


@pytest.mark.parametrize("name", ["", "a b", "../up", "x" * 101])
def test_names_of_libraries_are_checked(engine: FakeEngine, name: str) -> None:
    with pytest.raises(ValueError, match="a library's name"):
        Library(engine.store, name)
    with pytest.raises(ValueError, match="a file's name must be Unicode"):
        Library(engine.store, "shelf").add(b"text", "caf\udce9.txt")


def test_a_name_is_taken_until_it_is_replaced_or_removed(shelf: Library) -> None:
    shelf.add(b"old", "a.txt")
    with pytest.raises(NameTaken, match="replace it"):
        shelf.add(b"new", "a.txt")
    shelf.add(b"new", "a.txt", replace=True)
    assert texts(shelf) == {"a.txt": ["new"]}
    shelf.remove("a.txt")
    with pytest.raises(UnknownFile, match=r"a\.txt"):
        shelf.remove("a.txt")
    assert texts(shelf) == {}


def test_a_name_is_the_same_however_its_accents_are_written(shelf: Library) -> None:
    composed, apart = (unicodedata.normalize(form, "Kühler.txt") for form in ("NFC", "NFD"))
    assert shelf.add(b"old", apart).name == composed
    with pytest.raises(NameTaken):
        shelf.add(b"new", composed)
    assert shelf.view().entry(apart).name == composed
    shelf.remove(apart)
    assert texts(shelf) == {}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"ttl": "7"}, "^ttl must be a number, got '7'$"),
        ({"ttl": True}, "^ttl must be a number, got True$"),
        ({"ttl": timedelta(days=1)}, "^ttl must be a number, got datetime.timedelta"),
        ({"caption": 3}, "^caption must be a str, got int$"),
        ({"source": 3}, "^source must be a path, the bytes of a file or a Chunk, got int$"),
    ],
)
def test_values_of_another_type_are_refused(shelf: Library, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(TypeError, match=said):
        shelf.add(**{"source": b"text", "name": "a.txt", **arguments})
    assert shelf.files() == ()
    with pytest.raises(TypeError, match=r"^max_files must be a number, got '7'$"):
        Library(shelf.store, "other", max_files="7")  # type: ignore[arg-type]


def test_bytes_of_any_kind_are_a_file(shelf: Library) -> None:
    shelf.add(bytearray(b"one"), "a.txt")
    shelf.add(memoryview(b"two"), "b.txt")
    assert texts(shelf) == {"a.txt": ["one"], "b.txt": ["two"]}


def test_old_versions_stay_readable(shelf: Library) -> None:
    shelf.add(b"one", "a.txt")
    before = shelf.view()
    shelf.add(b"two", "a.txt", replace=True)
    shelf.add(b"three", "a.txt", replace=True)
    assert [p.text for p in before.entry("a.txt").passages] == ["one"]
    assert [p.text for p in shelf.view(2).entry("a.txt").passages] == ["two"]
    with pytest.raises(UnknownVersion, match=r"\(1\.\.3\), got 4"):
        shelf.view(4)
    for i in range(KEPT):
        shelf.add(str(i).encode(), "b.txt", replace=True)
    with pytest.raises(UnknownVersion, match="open a new window"):
        shelf.view(2)


def test_files_expire_and_are_renewed_by_use(shelf: Library, clock: Clock, engine: FakeEngine) -> None:
    shelf.add(b"a red car", "brief.txt", ttl=100)
    shelf.add(b"a blue bus", "long.txt")
    clock.now += 60
    shelf.view().find("red", 1, engine)
    clock.now += 60
    assert {row.name: row.expires and row.expires - clock.now for row in shelf.files()} == {
        "brief.txt": 40.0,
        "long.txt": None,
    }
    clock.now += 60
    assert shelf.view().names == {"long.txt"} and shelf.search("red") == []
    with pytest.raises(UnknownFile, match="may have expired"):
        shelf.view().entry("brief.txt")
    shelf.add(b"again", "brief.txt")  # its name is free
    assert texts(shelf) == {"brief.txt": ["again"], "long.txt": ["a blue bus"]}


def test_a_library_may_say_when_its_files_expire(engine: FakeEngine, clock: Clock) -> None:
    shelf = Library(engine.store, "brief", ttl=10, clock=clock)
    shelf.add(b"text", "a.txt")
    clock.now += 11
    assert shelf.files() == ()


def test_grants_are_told_apart_from_what_is_not_there_by_nothing(engine: FakeEngine) -> None:
    for name in ("handbook", "secret"):
        Library(engine.store, name).add(b"text", "a.txt")
    Library(engine.store, "handbook").grant("acme")
    Library(engine.store, "secret").grant("bolt")
    assert granted_libraries(engine.store, "acme") == ("handbook",) and granted_libraries(engine.store, "nobody") == ()
    assert Library(engine.store, "handbook").revoke("acme") and granted_libraries(engine.store, "acme") == ()
    grants = list(engine.store.list("grants/"))
    assert not Library(engine.store, "handbook").revoke("acme") and not Library(engine.store, "secret").revoke("nobody")
    assert list(engine.store.list("grants/")) == grants and granted_libraries(engine.store, "bolt") == ("secret",)
    for change in (Library(engine.store, "secret").grant, Library(engine.store, "secret").revoke):
        with pytest.raises(ValueError, match="tenant must be a name, got ''"):
            change("")
    assert sorted(libraries(engine.store)) == ["handbook", "secret"]


def test_threads_that_add_at_once_lose_nothing(tmp_path: Path) -> None:
    store = open_store(f"disk:{tmp_path}")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: Library(store, "shelf").add(str(i).encode(), f"{i}.txt"), range(24)))
    shelf = Library(store, "shelf")
    assert shelf.view().version == 24 and texts(shelf) == {f"{i}.txt": [str(i)] for i in range(24)}
    store.close()


ADDS = """
import sys
import unicodedata
from ctxwin import Library, open_store
store = open_store("disk:" + sys.argv[1])
for i in range(1000):
    Library(store, "shelf").add(str(i).encode(), f"{sys.argv[2]}-{i}.txt")
    print(i, flush=True)
"""


def test_a_process_that_is_killed_loses_nothing_it_has_said(tmp_path: Path) -> None:
    said = {}
    running = [
        subprocess.Popen([sys.executable, "-c", ADDS, str(tmp_path), name], stdout=subprocess.PIPE, text=True)
        for name in ("left", "right")
    ]
    for name, process in zip(("left", "right"), running, strict=True):
        assert process.stdout is not None
        said[name] = [int(process.stdout.readline()) for _ in range(5)]
        process.kill()
        said[name] += [int(line) for line in process.stdout.read().split()]
        process.wait()
    store = open_store(f"disk:{tmp_path}")
    names = Library(store, "shelf").view().names
    assert {f"{name}-{i}.txt" for name, all_said in said.items() for i in all_said} <= names
    Library(store, "shelf").add(b"on", "on.txt")
    store.close()


def test_a_full_store_refuses_and_keeps_what_it_has(engine: FakeEngine) -> None:
    store = open_store("memory:", max_bytes=4000)
    shelf = Library(store, "shelf")
    shelf.add(b"text", "a.txt")
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    with pytest.raises(StoreFull, match="raise its limit"):
        shelf.add(png(noise), "big.png")
    assert texts(shelf) == {"a.txt": ["text"]}


def test_what_the_store_lost_is_said_by_name(shelf: Library, engine: FakeEngine) -> None:
    shelf.add(png(picture(3)), "shot.png", caption="a square")
    (content,) = (m.content for m in shelf.view().entry("shot.png").passages[0].chunk.media)
    engine.store.delete(f"source/{content}")
    with pytest.raises(ChunkUnavailable, match=r"shot\.png.*add it again"):
        shelf.view().find("square", 1, engine)
    engine.store.delete(shelf.files()[0].key)
    with pytest.raises(ChunkUnavailable, match=r"shot\.png.*add it again"):
        Library(engine.store, "shelf").search("square")


def test_an_entry_that_is_not_what_its_key_says_is_gone(shelf: Library, engine: FakeEngine) -> None:
    shelf.add(b"right", "a.txt"), shelf.add(b"wrong", "b.txt")
    right, wrong = (row.key for row in shelf.files())
    said = shelf.repo.get_json(wrong, bound=False)
    engine.store.delete(right)
    shelf.repo.put_json(right, said, bound=False)
    with pytest.raises(ChunkUnavailable, match=r"a\.txt"):
        shelf.view().entry("a.txt")


def test_an_export_is_loaded_elsewhere(shelf: Library, engine: FakeEngine, tmp_path: Path) -> None:
    shelf.add(png(picture(3)), "shot.png", caption="a square", ttl=50)
    shelf.add(b"text", "a.txt")
    records, _ = shelf.export(tmp_path / "shelf.ctxwin")
    assert records == 3
    other = FakeEngine()
    copy = Library(other.store, "copy")
    assert copy.load(tmp_path / "shelf.ctxwin") == ("shot.png", "a.txt") and texts(copy) == texts(shelf)
    assert copy.view().find("square", 1, other)[0].id == Chunk.image(picture(3)).id
    with pytest.raises(NameTaken):
        copy.load(tmp_path / "shelf.ctxwin")
    assert copy.load(tmp_path / "shelf.ctxwin", replace=True) and copy.view().version == 2


@pytest.mark.parametrize("name", ["put", "_store_entries"])
def test_an_interrupted_load_leaves_nothing(
    shelf: Library, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf.add(png(picture(3)), "shot.png")
    shelf.add(b"text", "a.txt")
    shelf.export(tmp_path / "shelf.ctxwin")
    other = Library(open_store("memory:"), "copy")
    other.repo.put_json("chunk/others", {})
    target: Any = other.store if name == "put" else other
    real, calls = getattr(target, name), []

    def interrupted(*arguments: Any) -> Any:
        done = real(*arguments)
        calls.append(arguments)
        if len(calls) == 2 or name == "_store_entries":
            raise KeyboardInterrupt
        return done

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(target, name, interrupted)
        other.load(tmp_path / "shelf.ctxwin")
    assert not [*other.store.list("entry/"), *other.store.list("source/")]
    assert other.load(tmp_path / "shelf.ctxwin") and texts(other) == texts(shelf)
    other.delete()
    assert [*other.store.list()] == ["chunk/others"]


def test_a_damaged_export_is_refused_whole(shelf: Library, tmp_path: Path) -> None:
    shelf.add(b"a text that is long enough to be damaged", "a.txt")
    path = tmp_path / "shelf.ctxwin"
    shelf.export(path)
    other = Library(open_store("memory:"), "copy")
    raw = path.read_bytes()
    path.write_bytes(raw[:200] + bytes([raw[200] ^ 1]) + raw[201:])
    with pytest.raises(BadMedia, match="must be"):
        other.load(path)
    path.write_bytes(b"no archive")
    with pytest.raises(BadMedia, match="whole file that"):
        other.load(path)
    assert texts(other) == {}


def test_malformed_records_are_misses_and_are_not_written_over(
    shelf: Library, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever can write to a store without a key plants what it likes, under names that fit its content."""
    from ctxwin.hashing import digest
    from ctxwin.library.records import Entry, get

    said = {"name": "a.txt", "passages": "none", "more": 1}
    key = f"entry/{digest('entry', json.dumps(said, sort_keys=True))}"
    assert shelf.repo.put_json(key, said, bound=False)
    assert get(shelf.repo, key, Entry) is None and shelf.repo.counters.corrupt == 1
    shelf.grant("acme")
    assert granted_libraries(shelf.store, "acme") == (shelf.name,)
    (grants,) = shelf.store.list("grants/")
    for planted in (b"{", b"[]", b'{"libraries": 3}', b'{"libraries": [], "since": 7}', b"\xff", b""):
        claimed = shelf.store.claim(grants)
        assert claimed is not None and shelf.store.commit(grants, planted, claimed[0])
        assert granted_libraries(shelf.store, "acme") == ()
        with pytest.raises(StoreUnavailable, match="must be readable"):
            shelf.grant("acme")
        assert shelf.store.read(grants) == planted
    assert "malformed" in caplog.text


def test_a_library_of_another_version_is_neither_missing_nor_empty(shelf: Library) -> None:
    shelf.add(b"text", "a.txt")
    other = Library(shelf.store, "other")
    other.add(b"text", "a.txt")
    token, raw = shelf.store.claim(shelf._head.key) or (0, b"")
    newer = json.dumps(json.loads(raw) | {"since": 7}).encode()
    assert shelf.store.commit(shelf._head.key, newer, token)
    for use in (shelf.files, shelf.view, lambda: shelf.add(b"new", "b.txt"), lambda: list(libraries(shelf.store))):
        with pytest.raises(StoreUnavailable, match=r"must be readable.*use the version of ctxwin that wrote it"):
            use()
    other.remove("a.txt")  # beside it, and without what it may need
    assert shelf.store.read(shelf._head.key) == newer
    assert shelf.store.commit(shelf._head.key, raw, token) and texts(Library(shelf.store, "shelf")) == {
        "a.txt": ["text"]
    }


def test_a_library_in_a_store_that_refuses_is_read(
    shelf: Library, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf.add(b"text", "a.txt", ttl=100)
    monkeypatch.setattr(shelf.store, "put", lambda key, value: False)
    clock.now += 60
    shelf.renew(["a.txt"])  # past half of its time, which cannot be renewed
    assert texts(shelf) == {"a.txt": ["text"]}
    with pytest.raises(StoreFull, match="full or read only"):
        shelf.add(b"text", "b.txt")
