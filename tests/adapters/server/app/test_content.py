"""Content parts are read as vLLM reads them, in every spelling."""

from __future__ import annotations

import base64
import io
import itertools
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from core.videos import write_sound
from ctxwin.errors import BadMedia
from ctxwin_client.errors import NotAllowed, TooLarge
from ctxwin_server.app.content import EMBEDDINGS, MEDIA, TEXTS, ContentReader
from ctxwin_server.protocol.limits import Allowance, Limits
from ctxwin_server.sandbox.decode_pool import VideoHeaders


def picture(width: int = 2, height: int = 2) -> str:
    Image.new("RGB", (width, height)).save(made := io.BytesIO(), "PNG")
    return base64.b64encode(made.getvalue()).decode()


SMALL, LARGE = picture(), picture(200, 200)
DATA, BOMB, LINK = f"data:image/png;base64,{SMALL}", f"data:image/png;base64,{LARGE}", "http://host/cat.png"
MOST = 10_000
REFUSED = (ValueError, NotAllowed, TooLarge, BadMedia)


def size_of_frame(raw: bytes) -> tuple[int, int]:
    with Image.open(io.BytesIO(raw)) as shown:
        return shown.size[0] // 6, shown.size[1] // 6  # a video has 32 of them


def read(messages: list[Any], tenant: str = "acme") -> list[Any]:
    """What is left of ``messages`` behind the gate."""
    copy = json.loads(json.dumps(messages))
    ContentReader(tenant, Allowance(Limits(max_pixels=MOST)), fetch=False, video_size=size_of_frame).read_messages(copy)
    return list(copy)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "text", "text": "x", "uuid": "u", "image_url": LINK},
        {"type": "text", "text": "x", "uuid": "u", "image_url": {"url": BOMB}},
        {"type": "refusal", "refusal": "x", "uuid": "of another", "video_url": {"url": LINK}},
        {"type": "thinking", "thinking": "x", "uuid": 5, "input_audio": {"data": "AAAA", "format": "wav"}},
        {"type": "tool_reference", "name": "x", "audio_url": LINK},
        {"type": "image_url", "image_url": {"url": DATA}, "image_embeds": "AAAA", "uuid": "u"},
        {"type": "image_url", "image_url": {"url": DATA}, "video_url": {"url": DATA}, "uuid": "u"},
        {"type": "video_url", "video_url": {"url": DATA}, "image_url": LINK, "uuid": "u"},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "x;base64,AAAA#"}},
        {"type": "input_image", "image_url": None, "file_id": "file-1"},
        {"type": "image", "source": {"type": "base64", "media_type": f"image/png;base64,{LARGE}#", "data": SMALL}},
        {"type": "image", "source": {"type": "base64", "data": f"{LARGE},{SMALL}"}},
        {"type": "image", "source": {"type": "file", "file_id": "file-1"}},
        {"type": "image", "source": [DATA]},
        {"type": "text", "text": "x", "source": {"type": "url", "url": LINK}},
        {"type": "tool_result", "content": [{"type": "text", "text": "x", "source": {"type": "url", "url": LINK}}]},
        {"type": "tool_result", "content": [{"type": "image", "source": {"data": LARGE}}]},
        {"type": "document", "source": {"type": "text", "data": "x"}},
        {"type": "video_url", "video_url": {"url": f"data:VIDEO/jpeg;base64,{SMALL},{LARGE}"}},
        {"type": "video_url", "video_url": {"url": BOMB}},
        {"type": ["image_url"], "image_url": LINK},
        {"type": "image_url", "image_url": [LINK]},
        {"type": "image_url", "image_url": {"url": {"url": LINK}}},
        {"type": "Image_URL", "image_url": {"url": DATA}},
        {"type": "text", "text": "x", "Image_Url": LINK},
        {"type": "text", "text": {"image_url": LINK}},
        {"image_url": DATA, "audio_url": DATA},
        {"text": "x"},
        {"type": "image_pil", "image_pil": LINK},
        {"image_pil": LINK},
        {"type": "prompt_embeds", "data": "AAAA"},
        [{"type": "image_url", "image_url": LINK}],
        None,
    ],
)
@pytest.mark.parametrize("role", ["user", "tool", "system", "assistant"])
def test_no_medium_passes_in_another_spelling(part: Any, role: str) -> None:
    for message in ({"role": role, "content": [part]}, {"type": "function_call_output", "output": ["x", part]}):
        with pytest.raises(REFUSED):
            read([message])


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": {"type": "image_url", "image_url": LINK}},
        {"role": "user", "content": "x", "image_url": LINK},
        {"type": "computer_call_output", "output": {"type": "computer_screenshot", "image_url": LINK}},
        {"type": "input_image", "image_url": LINK},
        [{"type": "input_image", "image_url": LINK}],
        LINK,
    ],
)
def test_no_medium_passes_beside_the_content(message: Any) -> None:
    with pytest.raises(REFUSED):
        read([message])


def test_nulls_name_no_medium() -> None:
    """For vLLM a null with a ``uuid`` is the medium that somebody has sent under it."""
    (message,) = read([{"role": "user", "content": [{"type": "text", "text": "x", "image_url": None, "uuid": None}]}])
    assert message["content"] == [{"type": "text", "text": "x"}]
    names = []
    for tenant in ("acme", "bolt"):
        (message,) = read(
            [{"role": "user", "content": [{"type": "image_url", "image_url": None, "uuid": "u"}]}], tenant
        )
        names.append(message["content"][0]["uuid"])
    assert len({*names, "u"}) == 3


@pytest.mark.parametrize("kind", ["image_url", "input_image", "input_audio"])
def test_a_name_of_a_clients_choice_is_never_that_of_content(kind: str) -> None:
    """A picture under the name of the one that another user of the tenant shows without a name would be shown to both."""
    field, shown = MEDIA[kind], {"data": "AAAA", "format": "wav"} if kind == "input_audio" else DATA

    def name(**chosen: str) -> str:
        (message,) = read([{"role": "user", "content": [{"type": kind, field: shown, **chosen}]}])
        return str(message["content"][0]["uuid"])

    assert name() == name() and name(uuid="u") == name(uuid="u")
    for chosen in ("u", json.dumps(shown), str(shown), name()):
        assert name(uuid=chosen) != name()


FIELDS = sorted({"text", "refusal", "thinking", "name", "data", "uuid", "source", *MEDIA, *MEDIA.values(), *EMBEDDINGS})
VALUES = st.sampled_from(
    [None, "x", "u", LINK, DATA, BOMB, {"url": LINK}, {"url": DATA}, {"url": BOMB}, {"url": None}, [DATA], 5,
     {"data": "AAAA", "format": "wav"}, {"data": SMALL}, {"type": "url", "url": LINK}, {"data": LARGE}]
)  # fmt: skip


def vllm_reads(message: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """(type, medium or text, name) of each part of a chat's message, as vLLM reads it; raises for what it refuses."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.renderers import chat_utils

    request = ChatCompletionRequest.model_validate({"messages": [message]})
    for part in request.messages[0].get("content") or ():
        if isinstance(part, str):
            yield "text", part, None
        else:
            yield *chat_utils._parse_chat_message_content_mm_part(part), part.get("uuid")


def check_reading(part: dict[str, Any]) -> bool:
    """Whether the gate takes a part; asserts that vLLM then finds nothing in it that the gate has not seen."""
    try:
        one, other = (read([{"role": "user", "content": [part]}], tenant)[0] for tenant in ("acme", "bolt"))
    except REFUSED:
        return False
    try:
        read_by_vllm = [list(vllm_reads(json.loads(json.dumps(message)))) for message in (one, other)]
    except Exception:
        return True  # it refuses the part
    for (kind, medium, name), (_, _, name_of_other) in zip(*read_by_vllm, strict=True):
        if kind in ("image_url", "input_image", "video_url", "audio_url", "input_audio"):
            assert medium is None or medium == DATA or isinstance(medium, dict), (part, medium)
            assert name is None or name != name_of_other, part  # None: vLLM's own key, by content
            assert name is not None or medium is None, part
        else:
            assert kind in TEXTS, (part, kind)
    return True


@pytest.mark.vllm
def test_vllm_finds_nothing_in_a_part_that_the_gate_has_not_seen() -> None:
    """vLLM's whole table of types, with each two fields."""
    from vllm.renderers import chat_utils

    kinds: list[Any] = [*chat_utils.MM_PARSER_MAP, "image", "unknown", None, 5]
    fields = sorted({*FIELDS, *chat_utils._KNOWN_CONTENT_PART_FIELDS} - {"type"})
    taken = 0
    for kind, (first, second) in itertools.product(kinds, itertools.combinations(fields, 2)):
        for values in ((LINK, "u"), ({"url": DATA}, "u"), (None, "u")):
            taken += check_reading({"type": kind, first: values[0], second: values[1]})
    assert taken > 50
    assert {*chat_utils.MM_PARSER_MAP} <= {*TEXTS, *MEDIA, *EMBEDDINGS, "image_pil"}, "vLLM reads a new type of part"


@pytest.mark.vllm
@settings(max_examples=300, deadline=None)
@given(
    kind=st.sampled_from([*TEXTS, *MEDIA, *EMBEDDINGS, None, "IMAGE_URL", " image_url", ""]),
    fields=st.dictionaries(st.sampled_from([*FIELDS, "Image_URL", "image_url ", "file", "detail"]), VALUES, max_size=5),
)
def test_odd_parts(kind: str | None, fields: dict[str, Any]) -> None:
    check_reading({**({} if kind is None else {"type": kind}), **fields})


def video(width: int, height: int) -> bytes:
    av = pytest.importorskip("av")
    made = io.BytesIO()
    with av.open(made, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=5)
        stream.width, stream.height = width, height
        for _ in range(3):
            frame = av.VideoFrame.from_ndarray(np.zeros((height, width, 3), np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return made.getvalue()


def test_the_size_of_a_video_is_read_in_a_process_that_may_end() -> None:
    pytest.importorskip("cv2")
    headers = VideoHeaders(seconds=30, most_bytes=512 << 20, count=1)
    try:
        assert headers.size(video(64, 48)) == (64, 48)
        for raw, reason in ((b"no video", "must be decodable"), (write_sound("mp4", "aac"), "no video stream")):
            with pytest.raises(BadMedia, match=reason):
                headers.size(raw)
        with pytest.raises(BadMedia, match="which is truncated"):
            headers.size(video(64, 48)[:400])
        (helper,) = headers._idle.queue
        assert helper._popen is not None
        helper._popen.kill()
        with pytest.raises(BadMedia, match="within bounds"):
            headers.size(video(64, 48))
        assert headers.size(video(32, 16)) == (32, 16)
    finally:
        headers.close()
    assert helper._popen is None
