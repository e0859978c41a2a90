"""Windows over vLLM's prefix cache, and plain requests of the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ctxwin import Answer, Chunk, Fidelity, Window
from ctxwin.engines.segments import MediaSpan
from ctxwin.tiny import world

HEADER = "You watch a camera. " + "red blue circle square color number " * 9
FRAMES = world.make_stream(seed=11, n_frames=30)
QUERY = "color of 03?"
BLOCK = 32
"""Tokens of a block of vLLM's paged cache on a CPU."""
CLOSE = 1e-4
"""Float32 logprobs of the same KV in another batch: sums in another order; 1.3e-5 was seen."""


def frame(i: int) -> Chunk:
    return Chunk.image(world.render(FRAMES[i]), text=f"t={i} s")


def words(i: int) -> Chunk:
    return Chunk.text(f"{i} " + "red blue circle square color number " * 3)


def window_on(engine: Any, chunks: Sequence[Chunk], mode: Any = "exact", system_prompt: str = HEADER) -> Window:
    made = Window(engine, system_prompt, fidelity=Fidelity(mode, rank=4))
    made.extend(chunks)
    return made


def ask(window: Window, query: str = QUERY) -> Answer:
    return window.ask(query, max_tokens=4, logprobs=-1)


def prompt_of(engine: Any, window: Window, query: str = QUERY) -> tuple[list[int], list[MediaSpan]]:
    """The tokens that ``window`` asks with, and their media."""
    from ctxwin_vllm.inputs import join

    chunks = [engine.encode(window.chunk(i)) for i in window.ids]
    return join([engine.encode_system_prompt(window.system_prompt), *chunks, engine.encode_query(query)])


def collapsed(engine: Any, ids: Sequence[int]) -> list[int]:
    """One placeholder a picture, which vLLM's processor expands."""
    pad = engine.encoder.checkpoint.media.image
    return [token for at, token in enumerate(ids) if token != pad or not at or ids[at - 1] != pad]


def plain_request(engine: Any, window: Window, query: str = QUERY, **more: Any) -> dict[str, Any]:
    ids, media = prompt_of(engine, window, query)
    if not media:
        return {"prompt_token_ids": ids, **more}
    return {
        "prompt_token_ids": collapsed(engine, ids),
        "multi_modal_data": {
            "image": {
                "image_embeds": torch.cat([engine.embed(span.key) for span in media]),
                "image_grid_thw": torch.tensor([span.grid_thw for span in media]),
            }
        },
        # The name under which windows know a picture, which nobody outside can know: vLLM would hash the embeddings.
        "multi_modal_uuids": {"image": [engine._core.inputs.name(span.key) for span in media]},
        **more,
    }


def plain(engine: Any, prompt: dict[str, Any]) -> Any:
    """One request of somebody who knows nothing of ctxwin, by `vllm.LLM.generate` on the same vLLM."""
    from vllm import SamplingParams

    from ctxwin_vllm.drivers import _no_compilation

    driver = engine._core.driver
    parameters = SamplingParams(max_tokens=4, temperature=0, logprobs=-1, detokenize=False)

    def generate() -> Any:
        with _no_compilation(driver.config):
            (out,) = driver.llm.generate(dict(prompt), parameters, use_tqdm=False)
        return out

    return driver.call(generate)


def logprobs_of(out: Any) -> list[dict[int, float]]:
    return [{token: entry.logprob for token, entry in row.items()} for row in out.outputs[0].logprobs]


def whole_blocks(tokens: int) -> int:
    return tokens // BLOCK * BLOCK
