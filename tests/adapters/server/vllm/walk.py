"""The walk of a plain chat through the server's rooms, from the gateway until vLLM's engine has its request.

    python tests/adapters/server/vllm/walk.py

prints the rooms in the order in which the chat enters or comes back to them, one a line, with the function that is entered there.
A room is a package of `ctxwin_server`, or another distribution; `ctxwin` itself is the ground below all of them. The last lines
say how many calls of Python functions of ours a chat with a picture a turn takes on the same way, by turn, and how many pictures
were decoded for all of its turns.
"""

from __future__ import annotations

import asyncio
import base64
import dis
import io
import json
import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from types import FrameType
from typing import Any
from unittest import mock

_WALKS: ContextVar[Walk | None] = ContextVar("walk", default=None)
_PREFIXES = ("ctxwin_", "langchain_ctxwin")
TURNS = 4
"""Turns of the chat, whose last one is followed: by then the server has seen everything once."""
COUNTED = (5, 13)
"""Turns of the chat with pictures whose calls are counted."""


def room_of(frame: FrameType | None) -> str | None:
    """Return the room of a frame; None for the ground, "" for code of others."""
    module = "" if frame is None else frame.f_globals.get("__name__", "")
    if module == "ctxwin" or module.startswith("ctxwin."):
        return None
    if not module.startswith(_PREFIXES):
        return ""
    distribution, _, rest = module.partition(".")
    return rest.partition(".")[0] if distribution == "ctxwin_server" else distribution


class Walk:
    """Rooms in the order of a request's walk, each with the function that was entered, and the number of calls of ours."""

    def __init__(self) -> None:
        self.stays: list[tuple[str, str]] = []
        self.handed_over: list[tuple[str, str]] = []
        self.calls = self.calls_before = 0

    def call(self, frame: FrameType) -> None:
        """Note that a function is called."""
        self.calls += frame.f_globals.get("__name__", "").startswith("ctxwin")
        self.enter(frame)

    def enter(self, frame: FrameType | None) -> None:
        """Note that a frame goes on."""
        room = room_of(frame)
        if room and frame is not None and (not self.stays or self.stays[-1][0] != room):
            self.stays.append((room, f"{frame.f_globals['__name__']}:{frame.f_code.co_qualname}"))

    def hand_over(self) -> None:
        """Note that vLLM's engine has got a request; the last one is the chat's own."""
        self.handed_over, self.calls_before = list(self.stays), self.calls


def follow(frame: FrameType, event: str, _: Any) -> None:
    """Note calls and returns, but no pause: a coroutine that waits has not left its room."""
    if event not in ("call", "return") or (walk := _WALKS.get()) is None:
        return
    if frame.f_code.co_name == "receive":  # called beside the walk, in case that the client leaves
        return
    code, at = frame.f_code.co_code, max(frame.f_lasti, 0)
    operation = dis.opname[code[at]]
    if event == "call" and not (operation == "RESUME" and code[at + 1] & 3):
        walk.call(frame)
    elif event == "return" and operation != "YIELD_VALUE":
        walk.enter(frame.f_back)


async def _chat(app: Any, body: dict[str, Any], walk: Walk | None = None) -> dict[str, Any]:
    """Return the answer to a chat, which is followed where a walk is given."""
    raw, received, sent = json.dumps(body).encode(), [False], list[dict[str, Any]]()
    headers = [(b"host", b"server"), (b"content-type", b"application/json"), (b"content-length", b"%d" % len(raw))]
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": "/v1/chat/completions", "raw_path": b"/v1/chat/completions", "query_string": b"", "root_path": "",
        "headers": headers, "client": ("127.0.0.1", 1), "server": ("server", 80), "state": {},
    }  # fmt: skip

    async def receive() -> dict[str, Any]:
        if received[0]:
            await asyncio.get_running_loop().create_future()
        received[0] = True
        return {"type": "http.request", "body": raw, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    _WALKS.set(walk)
    await app(scope, receive, send)
    # A chat whose window failed is answered without usage of ours: the header says why.
    assert sent[0]["status"] == 200 and dict(sent[0]["headers"]).get(b"x-ctxwin-windows") == b"auto", sent
    answer: dict[str, Any] = json.loads(b"".join(message.get("body", b"") for message in sent))
    return answer


def _picture(turn: int) -> str:
    from PIL import Image

    packed = io.BytesIO()
    Image.new("RGB", (56, 56), (turn * 16, 0, 255 - turn * 16)).save(packed, "PNG")
    return "data:image/png;base64," + base64.b64encode(packed.getvalue()).decode()


async def _walk(content: Callable[[int], Any], app: Any, turns: Sequence[int], **options: Any) -> list[Walk]:
    """Return the walks of these turns of a chat, each of whose questions is ``content`` of its turn."""
    from ctxwin_server.chat.conversations import resolved_fidelity

    messages: list[dict[str, Any]] = [{"role": "system", "content": "You remember."}]
    walks = []
    for turn in range(1, turns[-1] + 1):
        messages.append({"role": "user", "content": content(turn)})
        body = {"model": "tiny", "messages": messages, "max_tokens": 4, "temperature": 0, **options}
        walk = Walk() if turn in turns else None
        resolved_fidelity.cache_clear()  # as where a second has passed since the turn before
        answer = await asyncio.create_task(_chat(app, body, walk))
        walks += [] if walk is None else [walk]
        messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"] or ""})
        await asyncio.gather(*app.state.engine_client._tasks)  # a turn before its write-back would wait for that
    assert answer["usage"]["ctxwin"]["lanes"].get("resident"), answer
    return walks


async def _walks() -> tuple[Walk, list[Walk], int]:
    from vllm.multimodal.media.image import ImageMediaIO
    from vllm.v1.engine.async_llm import AsyncLLM

    from ctxwin_server.app.settings import Settings
    from ctxwin_server.vllm.server import serving_app

    generate = AsyncLLM.generate

    def generate_after_walk(self: Any, *args: Any, **options: Any) -> Any:
        if (current := _WALKS.get()) is not None:
            current.hand_over()
        return generate(self, *args, **options)

    arguments = ["--dtype", "float32"]
    async with serving_app("tiny", arguments, Settings(windows="auto")) as (app, _):
        AsyncLLM.generate = generate_after_walk
        threading.setprofile(follow)  # of the threads that work for a request, which start with the first
        sys.setprofile(follow)  # not before: vLLM's start would take a minute
        [walk] = await _walk(lambda turn: f"step {turn}: a light is on.", app, [TURNS])

        def shown(turn: int) -> list[dict[str, Any]]:
            text = {"type": "text", "text": f"picture {turn}: a light is on."}
            return [{"type": "image_url", "image_url": {"url": _picture(turn)}}, text]

        with mock.patch.object(
            ImageMediaIO, "load_bytes", autospec=True, side_effect=ImageMediaIO.load_bytes
        ) as decode:
            counted = await _walk(shown, app, COUNTED, ctxwin={"fidelity": {"mode": "exact"}})
        sys.setprofile(None)
    return walk, counted, decode.call_count


def main() -> None:
    """Print the walk."""
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    walk, counted, decoded = asyncio.run(_walks())
    for room, function in walk.handed_over:
        print(f"{room:12} {function}")
    for turn, pictures in zip(COUNTED, counted, strict=True):
        print("calls", turn, pictures.calls_before)
    print("decoded", decoded)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
