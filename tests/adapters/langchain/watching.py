"""What the tests of `ChatCtxwin` share: a camera's messages with their oracle, a tool and a call of it."""

import base64
import io
from typing import Any

from langchain_core.messages import BaseMessage, HumanMessage, SystemMessage
from langchain_core.tools import tool
from PIL import Image

from ctxwin import Chunk
from ctxwin.baselines.reprefill import Reference
from ctxwin.engines.base import Engine
from ctxwin.engines.sampling import Sampling
from ctxwin.engines.segments import Encoded
from ctxwin.tiny.world import Frame, make_stream, questions_for, render

HEADER = "You watch a camera."


def picture(frame: Frame) -> dict[str, Any]:
    out = io.BytesIO()
    Image.fromarray(render(frame)).save(out, "PNG")
    return {"type": "image", "base64": base64.b64encode(out.getvalue()).decode(), "mime_type": "image/png"}


class Watch:
    """Frames, their messages, and what a forward over the whole prompt answers."""

    def __init__(self, engine: Engine, seed: int = 3) -> None:
        self.engine = engine
        self.frames = make_stream(seed, 8)
        self._messages = [
            HumanMessage([{"type": "text", "text": f"t={i} s\n"}, picture(f)]) for i, f in enumerate(self.frames)
        ]

    def messages(self, placed: list[int], query: str) -> list[BaseMessage]:
        return [SystemMessage(HEADER), *(self._messages[i] for i in placed), HumanMessage(query)]

    def question(self, placed: list[int], seed: int = 0) -> str:
        return questions_for([self.frames[i] for i in placed], 1, seed)[0].text

    def encoded(self, placed: list[int]) -> list[Encoded]:
        chunks = [Chunk.image(render(self.frames[i]), text=f"t={i} s") for i in placed]
        return [self.engine.encode(c) for c in chunks]

    def oracle(self, front: list[Encoded], query: str) -> str:
        reference = Reference(self.engine, self.engine.encode_system_prompt(HEADER))
        return reference.reprefill(front, self.engine.encode_query(query), Sampling(8)).text


@tool
def look(at: int) -> str:
    """Looks at a second of the video."""
    return f"at {at} s: a red circle"


CALL = '<tool_call>\n{"name": "look", "arguments": {"at": 3}}\n</tool_call>'
