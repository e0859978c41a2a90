"""Similarity and disposability on the bundled model, against numpy and against re-prefilled answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from ctxwin import Chunk, Fidelity, Window, open_engine
from ctxwin.engines.base import Engine
from ctxwin.engines.sampling import Sampling
from ctxwin.engines.segments import Segment
from ctxwin.policies import ByDisposability, BySimilarity
from ctxwin.tiny import world
from ctxwin.tiny.world import Kind

HEADER = "You watch a camera."
FRAMES = world.make_stream(seed=0, n_frames=8)


@pytest.fixture(scope="module")
def model() -> Iterator[Engine]:
    with open_engine("tiny", engine="hf", dtype="float32") as opened:
        yield opened


def chunk(i: int) -> Chunk:
    return Chunk.image(world.render(FRAMES[i]), text=f"t={i} s")


def answer(engine: Engine, chunks: Sequence[Chunk], query: str) -> list[int]:
    """A re-prefill of system prompt, chunks and query, past windows and stored KV."""
    system_prompt = engine.encode_system_prompt(HEADER)
    segments, at = [Segment(system_prompt, 0)], system_prompt.advance
    for placed in chunks:
        encoded = engine.encode(placed)
        segments.append(Segment(encoded, at))
        at += encoded.advance
    return engine.generate(segments, engine.encode_query(query), Sampling(4), salt="reference").token_ids


def test_similarity_is_the_cosine_of_mean_embeddings_and_sees_nothing_twice(model: Engine) -> None:
    with Window(model, HEADER) as window:
        ids = window.extend([chunk(i) for i in range(8)])
        window.slide(6)
        pooled = {i: model.embed(model.encode(window.chunk(i)).media[0].key).double().numpy().mean(0) for i in ids}
        encodes = model.counters.vision_encodes

        def ranked(probe: str) -> list[str]:
            def cosine(i: str) -> float:
                return float(pooled[probe] @ pooled[i] / np.linalg.norm(pooled[probe]) / np.linalg.norm(pooled[i]))

            return sorted(window.evicted, key=lambda i: -cosine(i))

        assert BySimilarity(6).choose(window, "where?") == ranked(ids[7])
        assert BySimilarity(3, to=ids[2]).choose(window, "where?") == ranked(ids[2])[:3]
        assert ranked(ids[2])[0] == ids[2]
        # A picture seen before is its own nearest, and needs no run of the vision tower.
        window.retrieval = BySimilarity()
        assert window.look_back(Chunk.image(world.render(FRAMES[4]))) == [ids[4]]
        window.ask("shape of 01?", max_tokens=2)
        assert model.counters.vision_encodes == encodes


@pytest.mark.parametrize("kind", ["single_hop", "multi_hop"])
def test_disposable_frames_leave_first_as_re_prefilling_says(model: Engine, kind: Kind) -> None:
    """In an exact window, against a naive loop over re-prefilled answers."""
    (asked,) = world.questions_for(FRAMES[:4], 1, 3, (kind,))
    question, chunks = asked.text, {}
    with Window(model, HEADER, fidelity=Fidelity("exact")) as window:
        for i in range(4):
            chunks[window.append(chunk(i))] = chunk(i)
        window.ask(question, max_tokens=4)
        left, leaving = list(chunks), []
        for placement in chunks:
            rest = [i for i in left if i != placement]
            if answer(model, [chunks[i] for i in rest], question) == answer(model, [chunks[i] for i in left], question):
                left, leaving = rest, [*leaving, placement]
        encodes = model.counters.vision_encodes
        assert list(ByDisposability([question], max_tokens=4).order(window)) == leaving + left
        assert {asked.frame, *asked.antecedents} <= {list(chunks).index(i) for i in left}, "the frames that decide stay"
        assert leaving
        assert model.counters.vision_encodes == encodes
        truth = window.ask(question, max_tokens=4).token_ids
        window.eviction = ByDisposability([question], max_tokens=4)
        window.slide(len(leaving))
        assert window.ask(question, max_tokens=4).token_ids == truth, "what is left still answers"
