"""What every engine must do beside `EngineConformance`, on one model of each kind."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from ctxwin.chunk import Chunk
from ctxwin.engines.base import Engine
from ctxwin.engines.results import Generation
from ctxwin.engines.sampling import Sampling
from ctxwin.engines.segments import Encoded
from ctxwin.errors import AnswerStopped, EngineFailed
from ctxwin.fidelity import Fidelity
from ctxwin.store import open_store
from ctxwin.window.window import Window
from engines.conformance import ALL, HEADER, QUERY, EngineConformance, assert_same_answer, laid, picture, with_spans


class WholeEngineConformance(EngineConformance):
    """And what an engine does alike for every family: sampling, streams, threads, refusals, the end."""

    def test_forced_logprobs_give_way(self, engine: Engine, encoded: list[Encoded], query: Encoded) -> None:
        with pytest.raises(AnswerStopped):
            engine.forced_logprobs(laid(encoded), [(query, [1])], stopped=lambda: True)
        assert not engine.busy

    def test_first_token_logprobs(self, engine: Engine, encoded: list[Encoded], query: Encoded) -> None:
        every = engine.generate(laid(encoded), query, ALL).logprobs
        assert sum(np.exp(list(every.values()))) == pytest.approx(1.0, abs=1e-4)
        some = engine.generate(laid(encoded), query, Sampling(max_tokens=1, logprobs=3)).logprobs
        assert sorted(some) == sorted(sorted(every, key=lambda i: -every[i])[:3])
        assert engine.generate(laid(encoded), query, Sampling(max_tokens=1)).logprobs == {}

    def test_an_answer_is_remembered_without_placeholders_that_the_model_writes(self, engine: Engine) -> None:
        """A random model writes them now and then; what it says besides keeps its tokens, and its KV as far as they lead."""
        if not engine.spec.vision:
            pytest.skip("a text model")
        media, found = engine.encoder.checkpoint.media, 0  # type: ignore[attr-defined]
        seed = iter(range(150))
        with Window(engine, HEADER, fidelity=Fidelity("exact")) as window:
            window.append(Chunk.text("a red circle"))
            while found < 2:
                answer = window.ask(QUERY, 48, temperature=2.0, seed=next(seed), remember=True)
                assert answer.remembered is not None
                said = [token for token in answer.token_ids if token not in (media.image, media.video)]
                if len(said) < len(answer.token_ids):
                    found += 1
                    exchange = engine.encode_exchange(QUERY, said)
                    assert engine.encode(window.chunk(answer.remembered)).token_ids == exchange.token_ids
                    assert engine.decode(said) == answer.text and window.chunks[-1].lane == "resident"
                    following = window.ask(QUERY, 1, logprobs=-1)
                    assert following.usage.exact and following.usage.computed_tokens < window.tokens
                    encoded = [
                        engine.encode_system_prompt(HEADER),
                        *(engine.encode(window.chunk(i)) for i in window.ids),
                    ]
                    anew = engine.generate(laid(encoded), engine.encode_query(QUERY), ALL, salt="anew").logprobs
                    assert max(abs(following.first_token_logprobs[i] - anew[i]) for i in anew) < 1e-4
                window.evict(answer.remembered)

    def test_streaming(self, engine: Engine, encoded: list[Encoded], query: Encoded, whole: Generation) -> None:
        heard: list[tuple[int, str]] = []

        def listen(token: int, text: str) -> bool:
            heard.append((token, text))
            return True

        got = engine.generate(laid(encoded), query, Sampling(max_tokens=5), on_token=listen)
        assert [t for t, _ in heard] == got.token_ids == whole.token_ids
        assert [text for _, text in heard] == [engine.decode(got.token_ids[: i + 1]) for i in range(len(heard))]
        assert got.text == engine.decode(got.token_ids)
        assert 0 < got.ttft_s <= got.total_s

        short = engine.generate(laid(encoded), query, Sampling(max_tokens=5), on_token=lambda *_: False)
        assert short.token_ids == whole.token_ids[:1]

    def test_stop_ids_end_an_answer(
        self, engine: Engine, encoded: list[Encoded], query: Encoded, whole: Generation
    ) -> None:
        stop = whole.token_ids[0]
        got = engine.generate(laid(encoded), query, Sampling(max_tokens=5, stop_ids=(stop,)))
        assert got.token_ids == []

    def test_sampling_is_seeded(self, engine: Engine, encoded: list[Encoded], query: Encoded) -> None:
        def drawn(seed: int) -> list[int]:
            return engine.generate(laid(encoded), query, Sampling(8, temperature=2.0, seed=seed)).token_ids

        assert drawn(1) == drawn(1)
        assert len({tuple(drawn(seed)) for seed in (1, 2, 3)}) > 1

    def test_a_prompt_that_does_not_fit(self, engine: Engine, encoded: list[Encoded], query: Encoded) -> None:
        long = engine.encode(Chunk.tokens([70] * (engine.spec.max_tokens - query.tokens)))
        with pytest.raises(EngineFailed, match=str(engine.spec.max_tokens)):
            engine.generate(laid([encoded[0], long]), query, ALL)
        assert engine.generate(laid(encoded), query, ALL).token_ids  # and it goes on

    def test_kv_of_other_tokens_is_refused(
        self, engine: Engine, encoded: list[Encoded], query: Encoded, whole: Generation
    ) -> None:
        wrong = with_spans(laid(encoded), {1: whole.captured[0]})
        with pytest.raises((ValueError, EngineFailed)):
            engine.generate(wrong, query, ALL)

    def test_threads(self, engine: Engine, encoded: list[Encoded], query: Encoded, whole: Generation) -> None:
        def ask(i: int) -> Generation:
            segments = laid(encoded) if i % 2 else with_spans(laid(encoded), {0: whole.captured[0]})
            engine.encode(Chunk.text(f"frame {i}"))
            return engine.generate(segments, query, Sampling(max_tokens=5, logprobs=-1))

        with ThreadPoolExecutor(4) as pool:
            for got in pool.map(ask, range(8)):
                assert_same_answer(got, whole)

    def test_windows_in_threads(self, engine: Engine) -> None:
        """Encoding and decoding meet from several threads; a lock taken in another order would hang here."""

        def agent(i: int) -> list[str]:
            with Window(engine, HEADER, fidelity=self.fidelity) as window:
                said = []
                for step in range(4):
                    part = Chunk.image(picture(10 + step)) if self.vision else Chunk.text(f"note {step}")
                    window.append(part)
                    window.slide(max(0, len(window.ids) - 2))
                    said.append(window.ask(QUERY, max_tokens=3).text)
                return said

        with ThreadPoolExecutor(4) as pool:
            runs = list(pool.map(agent, range(4)))
        assert all(run == runs[0] for run in runs)

    def test_work_is_counted(self, engine: Engine) -> None:
        fresh = engine.encode(Chunk.text("work that nothing has done yet\n"))
        before = engine.counters.prefill_tokens, engine.counters.prefill_forwards
        engine.prefill([], fresh, 700)
        assert engine.counters.prefill_tokens - before[0] == fresh.tokens
        assert engine.counters.prefill_forwards - before[1] == 1

    def test_a_closed_engine_says_so(self, model_dir: Path) -> None:
        made = self.make_engine(model_dir, open_store("memory:"))
        query = made.encode_query(QUERY)
        made.close()
        made.close()
        with pytest.raises(EngineFailed, match="closed"):
            made.generate([], query, ALL)
