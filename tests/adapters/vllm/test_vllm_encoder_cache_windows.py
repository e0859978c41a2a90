"""An engine in processes of its own: embeddings reach it as files, long after its encoder cache forgot a picture."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from adapters.vllm.layouts import encoded, gap, laid
from ctxwin.engines.sampling import Sampling
from ctxwin.engines.segments import Segment
from ctxwin.kv.patch import form_patch

pytestmark = [pytest.mark.slow]
FIRST = Sampling(max_tokens=3, logprobs=-1)
CACHE = 96
_floods = itertools.count()
# Float32: prompts are prefilled in parts of other sizes.
CLOSE = 1e-4


@pytest.fixture(scope="module")
def engine(model_dir: Path) -> Iterator[Any]:
    """An encoder cache of 96 embeddings: ten pictures of 9."""
    from ctxwin_vllm.engine import VLLMEngine

    opened = VLLMEngine(
        model_dir,
        dtype="float32",
        max_model_len=512,
        max_num_batched_tokens=CACHE,
        processes="multi",
        enforce_eager=True,
    )
    yield opened
    opened.close()


def ask(engine: Any, layout: list[Segment], salt: str) -> Any:
    return engine.generate(layout, engine.encode_query("what color"), FIRST, salt=salt)


def flood(engine: Any) -> int:
    """Pushes everything else out of the encoder cache; returns the encodes so far."""
    for seed in range(100, 100 + CACHE // 9 + 1):
        ask(engine, laid(encoded(engine, [seed])), f"flood {next(_floods)}")
    encodes: int = engine.counters.vision_encodes
    return encodes


def test_seeded_requests_that_are_prefilled_in_several_steps(engine: Any) -> None:
    parts = encoded(engine, range(1, 14))
    assert sum(part.tokens for part in parts) > CACHE
    drawn = Sampling(max_tokens=6, temperature=2.0, seed=3)
    query = engine.encode_query("what color")
    answers = [engine.generate(laid(parts), query, drawn, salt=f"drawn {i}").token_ids for i in range(2)]
    assert answers[0] == answers[1]


def test_formed_long_after(engine: Any) -> None:
    """A canonical and a patch, by background requests that carry a grid and a name."""
    parts = encoded(engine, [1, 2, 3])
    whole = ask(engine, laid(parts), "whole")
    spans = [whole.captured[i] for i in range(4)]
    encodes = flood(engine)
    seen: list[Any] = []
    submit = engine._core.driver.submit

    def watched(prompt: dict[str, Any], parameters: Any, priority: int, lora: Any = None) -> Any:
        seen.append((priority, [set(item) for item in prompt["mm_kwargs"]["image"]]))
        return submit(prompt, parameters, priority)

    with mock.patch.object(engine._core.driver, "submit", watched):
        segments = laid(parts, spans)
        # The second picture behind the system prompt alone, and behind the first picture, whose KV is computed anew as well.
        canonical = engine.prefill(segments[:1], parts[2], parts[0].advance, salt="late", background=True)
        behind = laid(parts)[:2]
        start = sum(part.advance for part in parts[:2])
        conditioned = engine.prefill(behind, parts[2], start, salt="later", background=True)
    assert [priority > 0 for priority, _ in seen] == [True, True]
    assert all(fields == {"image_grid_thw"} for _, items in seen for fields in items)
    torch.testing.assert_close(conditioned.k, spans[2].k, atol=CLOSE, rtol=0)
    torch.testing.assert_close(conditioned.v, spans[2].v, atol=CLOSE, rtol=0)
    patch = form_patch(conditioned, canonical, engine.spec.kv, dtype=torch.float32)
    served = ask(engine, laid(parts, [spans[0], spans[1], canonical, spans[3]], {2: patch}), "served")
    assert gap(served, whole) < CLOSE and served.fallbacks == 0
    assert gap(ask(engine, laid(parts, [spans[0], spans[1], canonical, spans[3]]), "bare"), whole) > 10 * CLOSE
    assert engine.counters.vision_encodes == encodes


def test_a_synchronous_load_that_fails_cold(engine: Any) -> None:
    parts = encoded(engine, [4, 5])
    whole = ask(engine, laid(parts), "cold")
    spans = [whole.captured[i] for i in range(3)]
    encodes = flood(engine)
    with mock.patch("ctxwin_vllm.transport.shared_memory.encode_span", return_value=b"nothing that anybody can read"):
        found = ask(engine, laid(parts, spans), "cold load")
    assert found.fallbacks == 1 and gap(found, whole) < CLOSE
    assert engine.counters.vision_encodes == encodes


@pytest.mark.parametrize("content", [None, b"", b"nothing that anybody can read"], ids=["gone", "empty", "corrupt"])
def test_files_that_are_lost(engine: Any, content: bytes | None) -> None:
    """The request is given its embeddings again; no other request and no process is any the worse."""
    parts = encoded(engine, [6, 7])
    whole = ask(engine, laid(parts), f"lost {content!r}")
    encodes = flood(engine)
    folder: Path = engine._core.transport.path / "embed"
    files = sorted(folder.glob("embed-*"))
    assert len(files) >= 2
    for path in files:
        path.unlink()
        if content is not None:
            path.write_bytes(content)
    again = ask(engine, laid(parts), f"lost again {content!r}")
    assert gap(again, whole) < CLOSE and engine.counters.vision_encodes == encodes
    assert gap(ask(engine, laid(parts), f"and again {content!r}"), whole) < CLOSE


def test_nothing_is_left_of_ended_requests(engine: Any) -> None:
    ask(engine, laid(encoded(engine, [8])), "left")
    names = [path.name for path in engine._core.transport.path.iterdir()]
    assert not [name for name in names if name.startswith(("job-", "media-", "out-", "error-", "encoded-"))]
