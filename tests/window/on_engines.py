"""Parts of the tests of windows on the real engines and the bundled model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ctxwin import Answer, Chunk, Fidelity, Window
from ctxwin.engines.base import Engine
from ctxwin.engines.sampling import Sampling
from ctxwin.engines.segments import Segment
from ctxwin.profiles import ModelBasis, require_basis, user_profile, write_basis
from ctxwin.tiny import checkpoint_dir, world

HEADER = "You watch a camera."
SHARED = Fidelity("patched", advanced={"layout": "shared"}, rank=48)
FRAMES = world.make_stream(seed=5, n_frames=6)
QUESTIONS = [q.text for q in world.questions_for(FRAMES[:4], 3, 0, ("single_hop", "multi_hop"))]


def chunk(i: int) -> Chunk:
    return Chunk.image(world.render(FRAMES[i]), text=f"t={i} s")


def window_on(engine: Engine, mode: Any = "patched", n: int = 4) -> Window:
    window = Window(engine, HEADER, fidelity=Fidelity(mode, bytes_share=0.11, layers="deep"))
    window.extend([chunk(i) for i in range(n)])
    return window


def reprefill(engine: Engine, window: Window, query: str) -> dict[int, float]:
    """An exact forward over what is placed, past the window and the store's spans."""
    system_prompt = engine.encode_system_prompt(window.system_prompt)
    segments, at = [Segment(system_prompt, 0)], system_prompt.advance
    for placement in window.ids:
        encoded = engine.encode(window.chunk(placement))
        segments.append(Segment(encoded, at))
        at += encoded.advance
    return engine.generate(segments, engine.encode_query(query), Sampling(1, logprobs=-1), salt="reference").logprobs


def ask(window: Window, query: str) -> Answer:
    return window.ask(query, max_tokens=2, logprobs=-1)


def close(a: dict[int, float], b: dict[int, float], tolerance: float) -> bool:
    return a.keys() == b.keys() and max(abs(a[t] - b[t]) for t in a) <= tolerance


def ask_exactly(engine: Engine, window: Window, query: str, tolerance: float) -> Answer:
    """The answer, which must be that of a re-prefill."""
    answer = ask(window, query)
    assert close(answer.first_token_logprobs, reprefill(engine, window, query), tolerance)
    return answer


def another_basis() -> None:
    """A newer basis of the bundled model, of other directions, where windows find it."""
    shipped = require_basis(str(checkpoint_dir()))
    other = replace(shipped.basis, right=shipped.basis.right.flip(-1).contiguous())
    newer = ModelBasis(other, shipped.weight, "9999-01-01T00:00:00+00:00")
    write_basis(newer, checkpoint_dir(), user_profile(checkpoint_dir(), ".st"))
