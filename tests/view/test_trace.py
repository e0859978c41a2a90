"""What a trace holds, against what was done to the windows."""

from __future__ import annotations

import base64
import io
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ctxwin import Chunk, Fidelity, Window
from ctxwin.video import decode_video
from ctxwin.view.thumbnail import thumbnail
from ctxwin.view.totals import in_words, totals
from ctxwin.view.trace import Trace, read_trace
from window.fake import FakeEngine


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.jsonl"


def picture(value: int, height: int = 40, width: int = 160) -> np.ndarray:
    return np.full((height, width, 3), value, np.uint8)


def decoded(line: dict[str, Any]) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(line["thumbnail"]))))


def test_every_operation_is_a_line_with_what_is_placed_after_it(engine: FakeEngine, path: Path) -> None:
    done: list[tuple[str, str, list[str]]] = []

    def did(op: str, window: Window) -> None:
        done.append((op, window.id, list(window.ids)))

    with Trace(path) as trace, Window(engine, "hd", budget=100, fidelity=Fidelity("patched", rank=2)) as window:
        trace.watch(window)
        trace.watch(window)  # changes nothing
        did("watch", window)
        ids = window.extend([Chunk.text("aa"), Chunk.image(picture(9), text="b"), Chunk.text("cc", pin=True)])
        did("append", window)
        answer = window.ask("q", max_tokens=3)
        did("ask", window)
        branch = window.fork()
        did("fork", window)
        branch.evict(ids[0])
        did("evict", branch)
        window.adopt(branch)
        did("adopt", window)
        window.recall(ids[0])
        did("recall", window)
        window.toggle(ids[0], conditioned=False)
        did("toggle", window)
        branch.close()
        did("close", branch)
    did("close", window)
    events = read_trace(path).events
    assert [(e["op"], e["window"], [p["id"] for p in e["placed"]]) for e in events] == done
    assert [e["n"] for e in events] == list(range(len(done)))
    assert events[0]["system_prompt"] == "hd"
    assert (events[2]["query"], events[2]["answer"]) == ("q", answer.text)
    assert events[2]["usage"]["computed_tokens"] == answer.usage.computed_tokens
    assert events[2]["usage"]["reused_tokens"] == answer.usage.reused_tokens
    assert [p["lane"] for p in events[2]["placed"]] == ["computed"] * 3
    assert [e.get("encodes", 0) for e in events] == [0, 1, *[0] * (len(events) - 2)]
    assert events[3]["other"] == events[4]["window"] == branch.id
    assert events[4]["parent"] == window.id
    assert events[4]["evicted"] == 1
    assert events[6]["ids"] == [ids[0]]
    assert [p.get("pinned", False) for p in events[6]["placed"]] == [False, False, True]
    assert events[7]["placed"][0]["conditioned"] is False
    assert events[7]["note"] == "clean"


def test_chunks_are_described_once_with_a_thumbnail(engine: FakeEngine, path: Path, tmp_path: Path) -> None:
    Image.fromarray(picture(200, 300, 100)).save(tmp_path / "shot.png")
    with Trace(path) as trace, Window(engine) as window:
        trace.watch(window)
        window.append(Chunk.image(picture(9), text="in memory"))
        window.append(Chunk.image(tmp_path / "shot.png", label="on disk"))
        window.append(Chunk.image(picture(50), keep_source=False))
        window.append(Chunk.video([picture(70), picture(80)]))
        window.append(Chunk.tokens([5, 6, 7]))
        window.append(Chunk.message("assistant", "x" * 3000))
        window.append(Chunk.image(picture(9), text="in memory"))
    chunks = read_trace(path).chunks
    assert list(chunks) == list(range(6))
    assert [c["what"] for c in chunks.values()] == ["image", "image", "image", "video", "tokens", "text"]
    assert decoded(chunks[0]).shape == (24, 96, 3)
    assert abs(int(decoded(chunks[0]).mean()) - 9) < 3
    assert decoded(chunks[1]).shape == (96, 32, 3)
    assert chunks[1]["label"] == "on disk"
    assert "thumbnail" not in chunks[2]  # the user does not want its pixels kept
    assert chunks[3]["frames"] == 2
    assert abs(int(decoded(chunks[3]).mean()) - 70) < 3
    assert chunks[4]["text"] == "3 token ids"
    assert chunks[5]["role"] == "assistant"
    assert len(chunks[5]["text"]) < 200


def test_the_thumbnail_of_a_clip_is_its_first_frame(engine: FakeEngine, path: Path, tmp_path: Path) -> None:
    import cv2

    clip = tmp_path / "clip.mp4"
    writer = cv2.VideoWriter(str(clip), cv2.VideoWriter_fourcc(*"mp4v"), 4, (64, 48))
    for i in range(10):
        writer.write(picture(20 * i, 48, 64))
    writer.release()
    with Trace(path) as trace, Window(engine) as window:
        trace.watch(window)
        window.append(Chunk.video(clip, start=1.0, end=2.0, fps=2))
        window.append(Chunk.video(clip, start=2.0))  # half a second is left
    first, second = read_trace(path).chunks.values()
    assert abs(decoded(first).mean() - decode_video(clip, 1.0, 2.0)[0][0].mean()) < 4
    assert abs(decoded(second).mean() - decode_video(clip, 2.0)[0][0].mean()) < 4


def test_a_file_that_was_overwritten_has_no_thumbnail(engine: FakeEngine, path: Path, tmp_path: Path) -> None:
    latest, sound = tmp_path / "latest.png", np.zeros(8000, dtype=np.float32)
    with Trace(path) as trace, Window(engine) as window:
        for value in (9, 90):
            Image.fromarray(picture(value)).save(latest)
            window.append(Chunk.image(latest).light())
        heard = Chunk.audio(sound, 8000).parts
        assert thumbnail(engine.repo, Chunk(parts=heard)) is None
        assert thumbnail(engine.repo, Chunk(parts=(*heard, *Chunk.image(latest).parts)))
        trace.watch(window)
    first, second = read_trace(path).chunks.values()
    assert "thumbnail" not in first and abs(decoded(second).mean() - 90) < 3


def test_pictures_can_be_left_out(engine: FakeEngine, path: Path) -> None:
    with Trace(path, thumbnails=False) as trace, Window(engine) as window:
        trace.watch(window)
        window.append(Chunk.image(picture(9)))
    assert "thumbnail" not in path.read_text()


def test_notes_stand_in_the_ask_they_belong_to(engine: FakeEngine, path: Path) -> None:
    with Trace(path) as trace, Window(engine, "a") as one, Window(engine, "b") as two:
        with pytest.raises(LookupError, match="got none"):
            trace.note({"naive": 1})
        trace.watch(one)
        trace.watch(two)
        one.ask("1", max_tokens=1)
        two.ask("2", max_tokens=1)
        trace.note({"naive": 31}, truth="red", text="a remark")
        trace.note({"trim": 17})
        trace.note({"naive": 99}, window=one)
        with pytest.raises(ValueError, match="finite numbers"):
            trace.note({"naive": float("nan")})
    asks = [e for e in read_trace(path).events if e["op"] == "ask"]
    assert [a["costs"] for a in asks] == [{"naive": 99}, {"naive": 31, "trim": 17}]
    assert (asks[1]["truth"], asks[1]["text"]) == ("red", "a remark")


def test_a_second_process_goes_on_behind_an_unfinished_line(engine: FakeEngine, path: Path) -> None:
    with Trace(path) as trace, Window(engine) as window:
        trace.watch(window)
        window.append(Chunk.text("aa"))
    with path.open("ab") as file:
        file.write(b'{"kind": "event", "n": 2, "windo')
    assert len(read_trace(path).events) == 3
    with Trace(path, append=True) as trace, Window(engine) as window:
        trace.watch(window)
        window.append(Chunk.text("bb"))
    recording = read_trace(path)
    assert [e["n"] for e in recording.events] == [0, 1, 2, 3, 4, 5]
    assert [c["text"] for c in recording.chunks.values()] == ["aa", "bb"]
    assert [p["chunk"] for p in recording.events[4]["placed"]] == [1]


def test_threads_write_whole_lines(engine: FakeEngine, path: Path) -> None:
    with Trace(path) as trace:

        def work(name: str) -> None:
            with Window(engine, name) as window:
                trace.watch(window)
                for i in range(20):
                    window.append(Chunk.text(f"{name} {i}"))

        threads = [threading.Thread(target=work, args=(f"w{i}",)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    recording = read_trace(path)
    assert [e["n"] for e in recording.events] == list(range(4 * 22))
    assert len(recording.chunks) == 80


def test_a_full_disk_costs_lines_and_not_the_trace(engine: FakeEngine, path: Path) -> None:
    class Disk:
        """Takes as many bytes as there is room for, as a file system does."""

        def __init__(self, file: Any, reserve_tokens: int) -> None:
            self.file, self.reserve_tokens = file, reserve_tokens

        def write(self, raw: memoryview) -> int:
            if not self.reserve_tokens:
                raise OSError(28, "No space left on device")
            taken = self.file.write(raw[: self.reserve_tokens])
            self.reserve_tokens -= taken
            return int(taken)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

    with Trace(path) as trace, Window(engine, "hd") as window:
        trace.watch(window)
        file = trace._file
        trace._file = Disk(file, 50)  # type: ignore[assignment]
        window.append(Chunk.text("lost"))
        trace._file = file
        window.append(Chunk.text("kept"))
    recording = read_trace(path)
    assert [e["op"] for e in recording.events] == ["watch", "append", "close"]
    assert [c["text"] for c in recording.chunks.values()] == ["lost", "kept"], "described when it is shown at last"


def test_a_closed_trace_is_silent(engine: FakeEngine, path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Window(engine) as window:
        with Trace(path) as trace:
            trace.watch(window)
            branch = window.fork()
        size = path.stat().st_size
        window.append(Chunk.text("aa"))
        branch.append(Chunk.text("bb"))
        branch.close()
    assert path.stat().st_size == size
    assert not caplog.records


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "without a whole line"),
        (b"PNG\r\n", "another kind of file"),
        (b'{"kind": "other"}\n', "another kind of file"),
        (b'{"kind": "trace", "format": 2}\n', "format .* must be 1, got 2; use the ctxwin that"),
        (b'{"kind": "trace", "format": 1}\n{"kind"\n', "line 2"),
        (b'{"kind": "trace", "format": 1}\n{"kind": "event", "n": 1}\n', "line 2"),
        (b'{"kind": "trace", "format": 1}\n[]\n', "line 2"),
    ],
)
def test_files_of_another_kind_are_refused(content: bytes, message: str, path: Path) -> None:
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_trace(path)
    if content:
        with pytest.raises(ValueError, match=message):
            Trace(path, append=True)
        assert path.read_bytes() == content


def test_a_new_trace_replaces_an_old_one(engine: FakeEngine, path: Path) -> None:
    path.write_text("something else")
    Trace(path).close()
    assert [json.loads(line)["kind"] for line in path.read_text().splitlines()] == ["trace"]


def test_a_trace_loads_no_torch() -> None:
    code = "import sys, ctxwin.view.trace; print([m for m in ('torch', 'cv2', 'numpy', 'PIL') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_restored_window_goes_on_as_the_one_it_was(engine: FakeEngine, path: Path) -> None:
    with Trace(path) as trace:
        state = None
        with Window(engine) as window:
            trace.watch(window)
            for i in range(3):
                window.append(Chunk.text(f"{i}"))
                state = window.snapshot()
        assert state is not None
        for i in range(2):
            with Window.restore(engine, state) as again:
                trace.watch(again)
                again.append(Chunk.text(f"again {i}"))
                state = again.snapshot() if i == 0 else state
        with Window.restore(engine, window.at(1).snapshot()) as earlier:
            trace.watch(earlier)  # time travel: another version, which is shown
    ops = [event["op"] for event in read_trace(path).events]
    assert ops == [
        "watch",
        "append",
        "append",
        "append",
        "close",
        "append",
        "close",
        "append",
        "close",
        "watch",
        "close",
    ]


def test_encodes_are_counted_from_the_engine_where_it_is_named(engine: FakeEngine, path: Path) -> None:
    for named, at, expected in ((engine, 7, 2), (None, 8, 1)):
        with Trace(path, engine=named) as trace, Window(engine) as window:
            engine.encode(Chunk.image(picture(at)))  # looked at in advance
            trace.watch(window)
            window.append(Chunk.image(picture(at)))
            window.append(Chunk.image(picture(at + 50)))
        assert sum(event.get("encodes", 0) for event in read_trace(path).events) == expected


def test_patches_are_counted_at_the_event_that_formed_or_served_them(engine: FakeEngine, path: Path) -> None:
    with Trace(path) as trace, Window(engine, fidelity=Fidelity("patched", rank=2, survivors="removal")) as window:
        trace.watch(window)
        window.extend([Chunk.text(letter * 30) for letter in "abc"])
        window.ask("q")
        window.slide(1)
        for _ in range(3):  # the first forms a patch, the second is the first that it serves
            window.ask("q")
    recording = read_trace(path)
    asks = [event.get("patches") for event in recording.events if event["op"] == "ask"]
    assert asks == [None, [1, 0, 0], [0, 1, 0], None]
    assert totals(recording)["patches"] == {"formed": 1, "served": 1, "dropped": 0}
    assert "Patches: 1 formed, 1 served, 0 dropped." in in_words(totals(recording))
