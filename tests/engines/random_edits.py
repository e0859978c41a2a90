"""Random edits of a window, held to a prompt from nothing."""

from __future__ import annotations

import random

from ctxwin.chunk import Chunk
from ctxwin.engines.base import Engine
from ctxwin.engines.sampling import Sampling
from ctxwin.fidelity import Fidelity
from ctxwin.window.window import Window
from engines.conformance import HEADER, LOGPROB_TOLERANCE, QUERY, EngineConformance, laid, picture


class RandomEdits(EngineConformance):
    """And what an exact window serves, whatever was edited."""

    def test_random_edits_answer_as_a_prompt_from_nothing(self, engine: Engine) -> None:
        """Of an exact window: with appends, insertions, evictions and new orders of pictures and texts."""
        draw, query = random.Random(7), engine.encode_query(QUERY)
        with Window(engine, HEADER, fidelity=Fidelity("exact")) as window:
            placed: dict[str, Chunk] = {}
            for i in range(8):
                seen = self.vision and i % 2
                new = Chunk.image(picture(i, 56 + 28 * (i % 4 > 1))) if seen else Chunk.text(f"frame {i} is red\n")
                edit = draw.choice(("append", "insert", "evict", "reorder"))
                order = draw.sample(window.ids, len(window.ids))
                if edit == "evict" and len(order) > 2:
                    window.evict(order[0])
                if edit == "reorder":
                    window.reorder(order)
                at = draw.randrange(len(window.ids) + 1) if edit == "insert" else len(window.ids)
                placed[window.insert(at, new)] = new
                answer = window.ask(QUERY, max_tokens=3, logprobs=-1)
                encoded = [engine.encode_system_prompt(HEADER), *(engine.encode(placed[name]) for name in window.ids)]
                nothing = engine.generate(laid(encoded), query, Sampling(3, logprobs=-1), salt=f"nothing-{i}")
                assert list(answer.token_ids) == nothing.token_ids
                gaps = (abs(answer.first_token_logprobs[token] - v) for token, v in nothing.logprobs.items())
                assert max(gaps) <= LOGPROB_TOLERANCE
