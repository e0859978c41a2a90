"""`/v1/libraries`: a tenant's own files, references that are granted, windows that retrieve from both."""

from __future__ import annotations

import io
import signal
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai import APIError, OpenAI
from PIL import Image

from adapters.server.serving import Server, serving
from ctxwin import Chunk, Fidelity, Library, Window
from ctxwin.engines.base import Engine
from ctxwin.engines.hf.engine import HFEngine
from ctxwin.errors import BadMedia, ChunkUnavailable, NameTaken, StoreFull, UnknownFile
from ctxwin.library.prepared import prepared_key
from ctxwin.media import png
from ctxwin.store import open_store
from ctxwin.store.base import Store
from ctxwin.tiny import world
from ctxwin_client import RemoteLibrary, RemoteWindow, transport
from ctxwin_client.errors import NotAllowed, UnknownLibrary
from ctxwin_server.app.tenants import Tenant
from ctxwin_server.protocol.limits import Limits
from ctxwin_server.sandbox.decode_pool import FileSplitters
from engines.scripted import ScriptedEngine
from engines.tool_models import write_tool_model
from waiting import wait_until
from window.test_lookups import called

TENANTS = [Tenant(name="acme", keys=["key-acme"]), Tenant(name="bolt", keys=["key-bolt"])]
LIMITS = Limits(max_libraries=2, max_library_bytes=1 << 20, max_pixels=1 << 20)
FRAMES = world.make_stream(seed=3, n_frames=4)


def picture(index: int) -> bytes:
    return png(world.render(FRAMES[index]))


def manuals_of_a_plant() -> Store:
    """For one server, which closes it."""
    store = open_store("memory:")
    shelf = Library(store, "manuals")
    shelf.add(b"The red valve turns left.", "valves.txt")
    shelf.add(b"The pump is oiled on Monday.", "pump.txt")
    shelf.grant("acme")
    return store


@pytest.fixture(scope="module")
def references() -> Store:
    return manuals_of_a_plant()


@pytest.fixture(scope="module")
def server(references: Store) -> Iterator[Server]:
    with serving(LIMITS, TENANTS, ["key-own"], references=references) as made:
        yield made


@pytest.fixture
def acme(server: Server) -> OpenAI:
    return server.client("key-acme", max_retries=0)


@pytest.fixture
def shelf(acme: OpenAI) -> Iterator[RemoteLibrary]:
    made = RemoteLibrary(acme, "shelf")
    made.create()
    yield made
    made.delete()


def is_prepared(library: Library, engine: Engine) -> bool:
    corpus = library.corpus(library.view().rows)
    chunks = [corpus.chunk_with_pixels(passage) for _, passage in corpus.passages]
    return all(engine.repo.get_json(prepared_key(engine, chunk), bound=False) is not None for chunk in chunks)


def texts(window: RemoteWindow) -> list[str]:
    return [p.chunk.label for p in window.snapshot().placed]


def test_a_files_name_is_the_same_however_its_accents_are_written(shelf: RemoteLibrary) -> None:
    composed, apart = (unicodedata.normalize(form, "Kühler.txt") for form in ("NFC", "NFD"))
    shelf.add(b"text", apart)
    with pytest.raises(NameTaken):
        shelf.add(b"text", composed)
    shelf.remove(apart)
    shelf.add(b"text", composed)


def test_a_name_leads_nowhere_else(shelf: RemoteLibrary, acme: OpenAI) -> None:
    """Clients of HTTP resolve dots in a path, and names come from whoever named a file."""
    shelf.add(b"The door is red.", "door.txt")
    with RemoteWindow(acme, "You watch a camera.") as window:
        for bad in ("..", ".", ""):
            with pytest.raises(ValueError, match="a name on a server must not be empty"):
                shelf.remove(bad)
            with pytest.raises(ValueError, match="a name on a server must not be empty"):
                RemoteLibrary(acme, bad).delete()
            with pytest.raises(ValueError, match="a name on a server must not be empty"):
                RemoteWindow.attach(acme, bad)
        for elsewhere in (f"../windows/{window.id}", "shelf/files/door.txt", "shelf?"):
            with pytest.raises((LookupError, ValueError, APIError)):
                RemoteLibrary(acme, elsewhere).delete()
        assert window.ids == () and [file.filename for file in shelf.files()] == ["door.txt"]
    shelf.remove("door.txt")
    named = RemoteLibrary(acme, "büro-2")
    named.add(b"The desk is blue.", "desk.txt")
    assert [hit.filename for hit in named.search("desk")] == ["desk.txt"]
    named.delete()


def test_files_are_listed_found_and_removed(shelf: RemoteLibrary, acme: OpenAI) -> None:
    made = shelf.add(b"Oil the pump.\n\n" + b"Never run it dry. " * 80, "pump.txt", caption="plant 3", ttl=3600)
    shelf.add(picture(0), "plan.png", caption="a plan")
    assert made.filename == "pump.txt" and made.bytes == 1455 and made.expires_at == made.created_at + 3600
    assert (made.model_extra or {})["passages"] == 3
    assert [f.filename for f in shelf.files()] == ["pump.txt", "plan.png"]
    (hit,) = shelf.search("plan", k=1)
    assert hit.filename == "plan.png" and hit.content[0].text == "a plan" and hit.score > 0
    listed = {one["id"]: one for one in transport.get(acme, "/libraries")["data"]}
    assert listed["shelf"]["own"] and listed["shelf"]["version"] == 2 and listed["shelf"]["file_counts"] == {"total": 2}
    assert transport.get(acme, "/libraries/shelf/files/plan.png")["bytes"] == len(picture(0))
    shelf.remove("pump.txt")
    assert [f.filename for f in shelf.files()] == ["plan.png"]
    with pytest.raises(UnknownFile):
        shelf.remove("pump.txt")


def test_a_window_places_what_it_retrieves_and_nothing_prepared_is_encoded_again(
    shelf: RemoteLibrary, acme: OpenAI, server: Server
) -> None:
    for i in range(3):
        shelf.add(picture(i), f"{i}.png", caption=("north", "south", "west")[i])
    engine = server.engines["acme"]
    library = server.service.tenant_state("acme").libraries.find("shelf")
    assert wait_until(lambda: is_prepared(library, engine), 60)
    encodes, forwards = engine.counters.vision_encodes, engine.counters.prefill_tokens
    with RemoteWindow(acme, "You watch a camera.", fidelity=Fidelity("blind")) as window:
        (placed,) = window.retrieve("which camera looks south", shelf, 1)
        (same,) = window.retrieve(Chunk.text("south"), "shelf", 1) or [placed]
        assert texts(window) == ["1.png"] and placed == same
        assert engine.counters.vision_encodes == encodes
        usage = window.ask(f"color of {FRAMES[1].marks[0]:02d}?", 4).usage
        # what was prepared stands behind an empty system prompt and serves blind windows of any
        assert usage.computed_tokens == engine.counters.prefill_tokens - forwards < usage.prompt_tokens / 2
        kept = Window.restore(engine, window.snapshot())
        assert kept.ids == window.ids
        kept.close()


def test_a_window_goes_on_reading_the_version_it_opened(shelf: RemoteLibrary, acme: OpenAI) -> None:
    shelf.add(b"The valve is red.", "valve.txt")
    with RemoteWindow(acme) as old, RemoteWindow(acme) as new:
        shelf.add(b"Unrelated.", "other.txt")
        assert old.retrieve("unrelated", shelf) != []
        shelf.add(b"The valve is blue.", "valve.txt", replace=True)
        old.retrieve("valve", shelf)
        new.retrieve("valve", shelf)
        told = [[p.chunk.parts[0].text for p in w.snapshot().placed] for w in (old, new)]  # type: ignore[union-attr]
    assert told == [["Unrelated.", "The valve is red."], ["The valve is blue."]]


def test_what_is_granted_is_read_and_what_is_not_is_as_if_it_were_not_there(
    server: Server, acme: OpenAI, references: Store
) -> None:
    bolt = server.client("key-bolt", max_retries=0)
    manuals = RemoteLibrary(acme, "manuals")
    assert [hit.filename for hit in manuals.search("pump")] == ["pump.txt"]
    with RemoteWindow(acme) as window:
        assert len(window.retrieve("the red valve", "manuals", 1)) == 1
    for change in (lambda: manuals.add(b"x", "x.txt"), lambda: manuals.remove("pump.txt"), manuals.delete):
        with pytest.raises(NotAllowed, match="only who runs the server"):
            change()
    for name in ("manuals", "nothing"):
        with pytest.raises(UnknownLibrary, match=f"got '{name}'"):
            RemoteLibrary(bolt, name).search("pump")
        with RemoteWindow(bolt) as window, pytest.raises(UnknownLibrary):
            window.retrieve("pump", name)
    assert transport.get(bolt, "/libraries")["data"] == []
    own = RemoteLibrary(bolt, "manuals")  # a name of its own is free
    own.add(b"Ours.", "ours.txt")
    assert [f.filename for f in own.files()] == ["ours.txt"] and len(manuals.files()) == 2
    own.delete()
    Library(references, "manuals").revoke("acme")
    with pytest.raises(UnknownLibrary):
        manuals.search("pump")
    Library(references, "manuals").grant("acme")


def test_two_servers_share_what_is_in_their_stores(tmp_path: Path) -> None:
    url = f"disk:{tmp_path}"
    with serving(store=url) as one, serving(store=url) as other:
        first, second = (RemoteLibrary(s.client(max_retries=0), "shelf") for s in (one, other))
        first.add(b"The valve is red.", "valve.txt")
        assert [f.filename for f in second.files()] == ["valve.txt"]
        with RemoteWindow(other.client()) as old:
            old.retrieve("valve", second)
            first.add(b"The valve is blue.", "valve.txt", replace=True)
            first.add(b"The pump is new.", "pump.txt")
            assert [h.filename for h in second.search("pump")] == ["pump.txt"]
            assert old.retrieve("pump", second) == []


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("a.zip", b"PK", "must end with one of"),
        ("a.png", b"no picture", "image must be decodable"),
        ("a.pdf", b"no pdf", "PDF must be readable"),
        ("a.txt", b"\xff\xfe", "must be UTF-8"),
        ("a.txt", b"", "must not be empty"),
        ("a.txt", b"word " * (1 << 18), "at most 1,048,576 bytes"),
        ("a.mp4", b"no video", "a.mp4"),
        ("../a.txt", b"text", "without slashes"),
    ],
)
def test_a_bad_file_is_refused_and_changes_nothing(shelf: RemoteLibrary, name: str, data: bytes, said: str) -> None:
    shelf.add(b"kept", "kept.txt")
    with pytest.raises((BadMedia, ValueError), match=said):
        shelf.add(data, name)
    assert [f.filename for f in shelf.files()] == ["kept.txt"]


def test_more_than_a_tenant_may_have_is_refused(shelf: RemoteLibrary, acme: OpenAI, server: Server) -> None:
    Image.fromarray(np.zeros((1100, 1000, 3), np.uint8)).save(large := io.BytesIO(), "png")
    with pytest.raises(BadMedia, match=r"at most 1048576 pixels together \(--max-pixels\), got 1100000"):
        shelf.add(large.getvalue(), "large.png")
    shelf.add(b"kept", "kept.txt")
    with pytest.raises(NameTaken, match=r"kept\.txt"):
        shelf.add(b"other", "kept.txt")
    with pytest.raises(NameTaken, match="shelf"):
        shelf.create()
    second = RemoteLibrary(acme, "second")
    second.add(b"text", "text.txt")
    with pytest.raises(StoreFull, match="at most 2 libraries"):
        RemoteLibrary(acme, "third").add(b"text", "text.txt")
    with pytest.raises(StoreFull, match="at most 2 libraries"):
        RemoteLibrary(acme, "third").create()
    second.delete()
    assert [f.filename for f in shelf.files()] == ["kept.txt"]


def test_a_request_that_is_sent_again_is_done_once(server: Server) -> None:
    def post(key: str) -> Any:
        files = {"file": ("once.txt", b"text", "text/plain")}
        options: Any = {"headers": {"Content-Type": "multipart/form-data", "Idempotency-Key": key}}
        return server.client("key-acme").post(
            "/libraries/again/files", cast_to=object, body={}, files=files, options=options
        )

    made = [transport.our_errors()(post)("one") for _ in range(2)]
    assert made[0] == made[1] and made[0]["filename"] == "once.txt"
    with pytest.raises(NameTaken):
        transport.our_errors()(post)("two")
    RemoteLibrary(server.client("key-acme"), "again").delete()


def test_files_expire_counted_from_their_last_use(acme: OpenAI, server: Server) -> None:
    shelf = RemoteLibrary(acme, "brief")
    shelf.create(ttl=3600)
    shelf.add(b"The valve is red.", "valve.txt")
    shelf.add(b"The pump is new.", "pump.txt", ttl=7200)
    library = server.service.tenant_state("acme").libraries.find("brief")
    now = library.clock()
    try:
        library.clock = lambda: now + 3000
        with RemoteWindow(acme) as window:
            window.retrieve("valve", shelf)
        library.clock = lambda: now + 6000
        assert [f.filename for f in shelf.files()] == ["valve.txt", "pump.txt"]
        library.clock = lambda: now + 8000
        assert shelf.files() == []
        with RemoteWindow(acme) as window:
            assert window.retrieve("valve", shelf) == []
    finally:
        shelf.delete()


def test_what_takes_too_long_or_too_much_memory_ends_its_process_only() -> None:
    slow, small = FileSplitters(30, 3 << 29, 1), FileSplitters(600, 400 << 20, 1)
    try:
        slow.split("a.txt", b"text")
        process = slow._idle.queue[0]
        process._popen.send_signal(signal.SIGSTOP)  # it never answers, however fast the machine
        process._seconds = 0.1
        with pytest.raises(BadMedia, match="it took more than"):
            slow.split("a.txt", b"text")
        Image.new("1", (9900, 9900)).save(large := io.BytesIO(), "png")
        with pytest.raises(BadMedia, match=r"MemoryError|ended with"):
            small.split("large.png", large.getvalue(), most_pixels=1 << 40)
        assert [p.text for p in small.split("a.txt", b"text", "said")] == ["said text"]
    finally:
        slow.close()
        small.close()


def test_the_schema_of_the_routes_is_served(server: Server) -> None:
    paths = server.app.openapi()["paths"]
    assert {"get", "post"} <= paths["/v1/libraries"].keys() and "post" in paths["/v1/windows/{window_id}/retrieve"]


def test_the_model_looks_things_up_while_it_answers(tmp_path: Path) -> None:
    """By name, streamed and whole; what another tenant has is unknown, and nothing is lost by asking for it."""
    folder = write_tool_model(tmp_path)

    def make(store: Store) -> Engine:
        said = [called("pump"), "On Monday."] * 3
        return ScriptedEngine(HFEngine(folder, store=store, dtype="float32"), said)

    with serving(LIMITS, TENANTS, references=manuals_of_a_plant(), make=make) as server:
        client = server.client("key-acme", max_retries=0)
        window = RemoteWindow(client, "You read logs.", 3000)
        ids = window.extend([Chunk.text("The plant hums. ")])
        shelf = RemoteLibrary(client, "manuals")
        whole = window.ask("When is the pump oiled?", 300, libraries=[shelf])
        assert whole.text == "On Monday." and whole.looked_up[0].library == "manuals" and window.ids == tuple(ids)
        stream = window.stream("When is the pump oiled?", 300, libraries=["manuals"], remember=True)
        assert "".join(stream) == "On Monday." and stream.answer is not None
        assert stream.answer.looked_up == whole.looked_up and window.ids[-1] == stream.answer.remembered
        assert len(window.ids) > 3
        with pytest.raises(UnknownLibrary):
            RemoteWindow(server.client("key-bolt"), "h", 900).ask("?", libraries=["manuals"])
        with pytest.raises(UnknownLibrary):
            window.ask("?", libraries=["nowhere"])
        window.check()


def test_what_is_removed_goes_and_running_windows_do_not_find_it_again(
    server: Server, acme: OpenAI, references: Store, shelf: RemoteLibrary
) -> None:
    """A tenant's own file by its route, a granted one by whoever runs the server and the server's sweep."""
    manuals = Library(references, "manuals")
    manuals.add(b"The lever is made of brass.", "lever.txt")
    shelf.add(picture(1), "frame.png", caption="a frame")
    libraries = server.service.tenant_state("acme").libraries
    store, name = libraries.engine.repo.store, "lever.txt"
    with RemoteWindow(acme) as window:
        (frame,) = window.retrieve("frame", shelf, k=1)
        (lever,) = window.retrieve("lever", "manuals", k=1)
        window.ask("what now?", max_tokens=1)
        origins = [placed.chunk.origin for placed in window.snapshot().placed]
        assert all(list(store.list(f"trace/{origin}")) for origin in origins) and len(set(origins)) == 2
        shelf.remove("frame.png")
        manuals.remove(name)
        assert window.retrieve("frame", shelf, k=1) == [] and window.retrieve("lever", "manuals", k=1) == []
        assert window.ask("what now?", max_tokens=1).text is not None, "it is served as long as it is placed"
        window.evict(frame)
        window.evict(lever)
        with pytest.raises(ChunkUnavailable, match="was removed or has expired"):
            window.recall(frame)
        libraries.sweep()
    assert not any(list(store.list(f"trace/{origin}")) for origin in origins)
