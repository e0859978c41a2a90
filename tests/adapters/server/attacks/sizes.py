"""Attacks by one request that costs much: positions, orders, text, pictures, numbers, schemas."""

from __future__ import annotations

import base64
import io
import random
import time
from typing import Any

import numpy as np
from PIL import Image

from adapters.server.attacks.content import FRAMES, picture, png, text
from adapters.server.attacks.victim import REFUSED, Victim, refused, together
from ctxwin.tiny import world


def attack_01_far_positions(at: Victim) -> None:
    """Six frames at 1e-6 a second reach positions beyond every cache of angles."""
    mallory = at.user("mallory")
    window = mallory.window()
    frames = [png(world.render(FRAMES[i % 3])) for i in range(6)]
    for fps in (1e-6, 1e-300, 1e300):
        added = mallory.call(f"/v1/windows/{window}/append", {"chunk": {"type": "video", "frames": frames, "fps": fps}})
        asked = mallory.ask(window, "what moves?")
        assert asked[0] in (200, *REFUSED), asked
        refused(*added)
    mallory.close(window)


def attack_05_orders_without_end(at: Victim) -> None:
    """More orders than eight chunks can have; the client leaves after four seconds."""
    mallory = at.user("mallory")
    window = mallory.window(chunks=[text(f"word {i}") for i in range(9)])
    ids = mallory.call(f"/v1/windows/{window}/summary")[1]["ids"]
    before = time.monotonic()
    status, answer = mallory.call(f"/v1/windows/{window}/prepare_orbit", {"ids": ids[:8], "orders": 50_000}, timeout=4)
    refused(status, answer)
    assert time.monotonic() - before < 2
    mallory.close(window)


_ENDLESS = b"the quick brown fox " * ((8 << 20) // 20)
_WIDE = b"[]," * ((16 << 20) // 3) + b"[]]}"


def attack_06_endless_text(at: Victim) -> None:
    """8 MB to tokenise, as a chunk, a system prompt and a question."""
    mallory = at.user("mallory")
    window = mallory.window()
    for path, body in (
        ("/v1/windows", b'{"%s": "%s"}' % (mallory.prompt.encode(), _ENDLESS)),
        (f"/v1/windows/{window}/append", b'{"chunk": {"type": "text", "text": "%s"}}' % _ENDLESS),
        (f"/v1/windows/{window}/ask", b'{"query": "%s"}' % _ENDLESS),
        ("/v1/completions", b'{"model": "tiny", "prompt": "%s", "max_tokens": 1}' % _ENDLESS),
        ("/tokenize", b'{"model": "tiny", "prompt": "%s"}' % _ENDLESS),
    ):
        refused(*mallory.call(path, body))
    mallory.close(window)


def attack_07_many_small_frames(at: Victim) -> None:
    """512 frames of one pixel: 46 KB of JSON."""
    mallory = at.user("mallory")
    window = mallory.window()
    dot = png(np.zeros((1, 1, 3), np.uint8))
    video = {"type": "video", "frames": [dot] * 512}
    refused(*mallory.call(f"/v1/windows/{window}/append", {"chunk": video}))
    refused(*mallory.call(f"/v1/windows/{window}/append", {"chunk": {**video, "as_frames": True}}))
    parts = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{dot}"}}] * 512
    refused(*mallory.chat([*parts, text("?")]))
    mallory.close(window)


def attack_09_pictures_that_cost(at: Victim) -> None:
    """A TIFF of one huge tile, and a progressive JPEG whose last scan comes three hundred times."""
    mallory = at.user("mallory")
    for made, media in ((_huge_tile(), "tiff"), (_many_scans(), "jpeg")):
        status, answer = mallory.call("/v1/chunks", {"type": "image", "image": base64.b64encode(made).decode()})
        refused(status, answer)
        url = f"data:image/{media};base64,{base64.b64encode(made).decode()}"
        mallory.chat([{"type": "image_url", "image_url": {"url": url}}, text("?")])


def _huge_tile() -> bytes:
    """A picture of 16 x 16 pixels in a tile of 30,000 x 30,000, compressed to nothing."""
    import struct

    tags = [
        (256, 3, 16), (257, 3, 16), (258, 3, 8), (259, 3, 8), (262, 3, 1), (277, 3, 1),
        (322, 4, 30_000), (323, 4, 30_000), (324, 4, 8 + 2 + 12 * 10 + 4), (325, 4, 9),
    ]  # fmt: skip
    head = struct.pack("<2sHIH", b"II", 42, 8, len(tags))
    rows = b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in tags)
    return head + rows + struct.pack("<I", 0) + b"\x78\x9c\x03\x00\x00\x00\x00\x01\x00"


_SCANS: list[bytes] = []


def _many_scans() -> bytes:
    if not _SCANS:
        Image.new("L", (8000, 8000), 128).save(buffer := io.BytesIO(), "JPEG", progressive=True)
        raw = buffer.getvalue()
        last = raw[raw.rindex(b"\xff\xda") : -2]
        _SCANS.append(raw[:-2] + last * 300 + raw[-2:])
    return _SCANS[0]


def attack_10_quadratic_work(at: Victim) -> None:
    """A window of thousands of chunks, a snapshot that claims a hundred thousand frames, a body of commas."""
    mallory = at.user("mallory")
    window = mallory.window(budget=1900)
    extend = f"/v1/windows/{window}/extend"
    refused(*mallory.call(extend, {"chunks": [text("a")] * 16_000}))
    for _ in range(3):
        status, answer = mallory.call(extend, {"chunks": [text("a")] * 500})
        assert status in (200, *REFUSED), answer
    before = time.monotonic()
    status, state = mallory.call(f"/v1/windows/{window}/snapshot")
    assert status == 200
    assert mallory.call(f"/v1/windows/{window}")[0] == 200
    assert time.monotonic() - before < 10
    claimed = picture(0)
    window_of_one = mallory.window(chunks=[claimed])
    status, state = mallory.call(f"/v1/windows/{window_of_one}/snapshot")
    for part in state["placed"][0]["chunk"]["parts"]:
        if part["kind"] == "media":
            part |= {"media": "video", "shape": [100_000, *part["shape"][1:]], "fps": 2.0}
    before = time.monotonic()
    refused(*mallory.call("/v1/windows", {"snapshot": {**state, "window": "0" * 12}}))
    assert time.monotonic() - before < 2
    refused(*mallory.call(extend, b'{"chunks": [' + _WIDE))
    refused(*mallory.call("/v1/completions", b'{"model": "tiny", "prompt": [' + _WIDE))
    deep = b'{"chunk": ' * 50_000 + b"1" + b"}" * 50_000
    refused(*mallory.call(extend, deep))
    for each in (window, window_of_one):
        mallory.close(each)


def attack_19_numbers_out_of_range(at: Victim) -> None:
    """Numbers that no type holds are the client's error, and never 500."""
    mallory = at.user("mallory")
    window = mallory.window(chunks=[text("x")])
    for path, body in (
        ("/v1/windows", b'{"%s": "h", "budget_bytes": %s}' % (mallory.prompt.encode(), b"9" * 400)),
        (f"/v1/windows/{window}/remember", {"query": "q", "answer": [-1]}),
        (f"/v1/windows/{window}/remember", {"query": "q", "answer": [10**9]}),
        (f"/v1/windows/{window}/ask", {"query": "q", "temperature": 2.5}),
        (f"/v1/windows/{window}/ask", {"query": "q", "max_tokens": 10**18}),
        (f"/v1/windows/{window}/slide", {"count": 10**30}),
        (f"/v1/windows/{window}/insert", {"index": -(10**20), "chunk": text("x")}),
    ):
        refused(*mallory.call(path, body))
    mallory.close(window)


def attack_24_parts_by_their_fields(at: Victim) -> None:
    """Media in parts that say they are something else: what counts pixels and URLs by the type overlooks them."""
    mallory = at.user("mallory")
    dot = f"data:image/png;base64,{png(np.zeros((8, 8, 3), np.uint8))}"
    url = "http://127.0.0.1:9/x.png"
    for part in (
        {"type": "text", "text": "x", "uuid": "u", "image_url": url},
        {"type": "text", "text": "x", "video_url": {"url": url}},
        {"type": "refusal", "refusal": "x", "image_url": {"url": url}},
        {"text": "x", "image_url": {"url": url}},
        {"type": "image_url", "image_url": {"url": dot}, "video_url": {"url": dot}},
        {"type": "thinking", "thinking": "x", "input_audio": {"data": dot, "format": "wav"}},
    ):
        refused(*mallory.chat([part, text("?")]))
    size = 9000  # 81 million pixels in some hundred KB
    Image.new("1", (size, size)).save(buffer := io.BytesIO(), "PNG")
    large = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    for part in (
        {"type": "image_url", "image_url": {"url": large}},
        {"type": "text", "text": "x", "image_url": {"url": large}},
        {"image_url": large},
    ):
        refused(*mallory.chat([part, text("?")]))


def attack_28_schemas_that_cost(at: Victim) -> None:
    """A schema of 250 KB, a grammar of 3,000 rules, and what costs as much by other means; each time another one."""
    mallory, seed = at.user("mallory"), random.randrange(1 << 20)
    properties = {f"p{seed}_{i}": {"enum": [f"v{i}_{k}" for k in range(20)]} for i in range(1000)}
    rules = [f'r{i} ::= [a-z]+ r{(i * 7) % 3000} "{seed}" | r{(i * 13 + 1) % 3000}? "b"' for i in range(3000)]
    root = "root ::= (" + " | ".join(f"r{i}" for i in range(3000)) + ")*"
    lengths = {f"p{i}": {"type": "string", "minLength": 5, "maxLength": 3000 + i + seed % 99} for i in range(100)}
    tool = {
        "type": "function",
        "function": {"name": f"f{seed}", "parameters": {"type": "object", "properties": lengths}},
    }
    plain = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}

    answers: list[tuple[int, Any]] = []

    def asks(more: dict[str, Any]) -> None:
        answers.append(mallory.call("/v1/chat/completions", {**plain, **more}, timeout=60))

    wide = {"type": "object", "properties": properties}
    together([
        lambda made=made: asks(made)
        for made in (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": wide}}},
            {"structured_outputs": {"grammar": "\n".join([root, *rules])}},
            {"structured_outputs": {"regex": "|".join(f"[a-z]{{{i},{i + 500}}}{i}" for i in range(1, 1500))}},
            {"tools": [tool], "tool_choice": "required"},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#", "$id": str(seed)}}}},
        )
    ])  # fmt: skip
    assert all(status in (200, *REFUSED) for status, _ in answers), str(answers)[:600]
