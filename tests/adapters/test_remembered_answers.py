"""An answer in which a model writes placeholders of media reaches its caller, and is remembered, through every interface."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import HumanMessage

from adapters.server.serving import serving
from ctxwin import AsyncWindow, Chunk, Fidelity, Window, open_engine
from ctxwin.engines.encoding.templates import Template
from ctxwin.engines.hf.engine import HFEngine
from ctxwin.errors import BudgetExceeded, UnsupportedModel
from ctxwin_client import RemoteWindow
from engines.tool_models import HERMES, write_tool_model
from langchain_ctxwin.langgraph import WindowContext, WindowNode, load
from node_graphs import CONFIG, graph_of
from window.on_engines import reprefill

HEADER, QUERY = "You watch a camera.", "what color is the square"
EXACT = Fidelity("exact")


@pytest.fixture(scope="module")
def engine(vision_dir: Path) -> Iterator[HFEngine]:
    with HFEngine(vision_dir, dtype="float32") as opened:
        yield opened


def options(seed: int) -> dict[str, Any]:
    return {"max_tokens": 48, "temperature": 2.0, "seed": seed}


@pytest.fixture(scope="module")
def answers(engine: HFEngine) -> dict[int, tuple[str, str]]:
    """By seed: an answer with placeholders, and the chunk that it becomes in a window in this process."""
    found, media = {}, engine.encoder.checkpoint.media
    assert media is not None
    for seed in range(150):
        with Window(engine, HEADER, fidelity=EXACT) as window:
            answer = window.ask(QUERY, **options(seed), remember=True)
            if {media.image, media.video} & set(answer.token_ids):
                assert answer.remembered is not None and answer.text
                found[seed] = answer.text, window.chunk(answer.remembered).id
        if len(found) == 3:
            break
    assert len(found) == 3
    return found


def test_async_windows(engine: HFEngine, answers: dict[int, tuple[str, str]]) -> None:
    async def ask(seed: int) -> tuple[str, str]:
        async with AsyncWindow(engine, HEADER, fidelity=EXACT) as window:
            answer = await window.ask(QUERY, **options(seed), remember=True)
            assert answer.remembered is not None
            return answer.text, window.window.chunk(answer.remembered).id

    assert {seed: asyncio.run(ask(seed)) for seed in answers} == answers


def test_remote_windows(vision_dir: Path, answers: dict[int, tuple[str, str]]) -> None:
    with serving(make=lambda store: HFEngine(vision_dir, dtype="float32", store=store)) as server:
        for seed, (text, chunk) in answers.items():
            with RemoteWindow(server.client(max_retries=0), HEADER, fidelity=EXACT) as window:
                answer = window.ask(QUERY, **options(seed), remember=True)
                assert answer.text == text and [entry.chunk_id for entry in window.plan().entries] == [chunk]


def test_nodes_of_graphs(engine: HFEngine, answers: dict[int, tuple[str, str]]) -> None:
    for seed, (text, chunk) in answers.items():
        app = graph_of(WindowNode(system_prompt=HEADER, fidelity=EXACT, **options(seed)))
        state = app.invoke({"messages": [HumanMessage(QUERY)]}, CONFIG, context=WindowContext(engine))
        with load(engine, state["window"]) as window:
            assert state["messages"][-1].text == text and [window.chunk(i).id for i in window.ids] == [chunk]


@pytest.mark.parametrize("begins", ["", "<think>\\n"])
def test_an_answer_that_the_template_cuts_is_remembered_as_a_chat_has_it(tmp_path: Path, begins: str) -> None:
    """As Qwen3's template drops thinking: here all up to the last ``o``, and what the generation prompt adds."""
    cuts = HERMES.replace("{{ m.content }}{% endif %}", "{{ m.content.split('o')[-1] }}{% endif %}")
    cuts = cuts.replace("<|im_start|>assistant\n{% endif %}", f"<|im_start|>assistant\n{begins}{{% endif %}}")
    with open_engine(f"hf:{write_tool_model(tmp_path, cuts)}", dtype="float32") as engine:
        checkpoint, cut = engine.encoder.checkpoint, 0  # type: ignore[attr-defined]
        for seed in range(8):
            with Window(engine, HEADER, fidelity=EXACT) as window:
                window.append(Chunk.text("t=0 s "))
                answer = window.ask(QUERY, 32, temperature=2.0, seed=seed, remember=True)
                assert window.plan().entries[-1].lane == "resident" and len(window.ids) == 2
                again = window.ask("and now", 1, logprobs=-1).first_token_logprobs
                messages = [{"role": "system", "content": HEADER}, {"role": "user", "content": "t=0 s " + QUERY}]
                messages += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": "and now"}]
                chat = checkpoint.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
                placed = [engine.encode(window.chunk(i)) for i in window.ids]
                parts = [engine.encode_system_prompt(HEADER), *placed, engine.encode_query("and now")]
                ids = [i for part in parts for i in part.token_ids]
                assert checkpoint.tokenizer.decode(ids, skip_special_tokens=False) == chat
                assert again == pytest.approx(reprefill(engine, window, "and now"), abs=1e-4)
                cut += "o" in answer.text
        assert cut > 0


def test_an_exchange_that_cannot_be_remembered_is_refused_before_it_is_answered(engine: HFEngine) -> None:
    need = engine.encode_system_prompt(HEADER).tokens + engine.encode_exchange(QUERY, ()).tokens
    with Window(engine, HEADER, budget=need + 3) as window:
        assert window.ask(QUERY, 3, remember=True).remembered
    before = engine.counters.prefill_tokens
    with Window(engine, HEADER, budget=need + 3) as window, pytest.raises(BudgetExceeded):
        window.ask(QUERY, 4, remember=True)
    with pytest.MonkeyPatch.context() as patched, Window(engine, HEADER) as window:
        checkpoint = replace(engine.encoder.checkpoint, template=Template(last_turn_only))
        patched.setattr(engine.encoder, "checkpoint", checkpoint)
        with pytest.raises(UnsupportedModel, match="no assistant turn"):
            window.ask(QUERY, 3, remember=True)
    assert engine.counters.prefill_tokens == before


def last_turn_only(messages: list[dict[str, Any]], generation: bool) -> str:
    return f"<|im_start|>user\n{messages[-1]['content']}<|im_end|>\n<|im_start|>assistant\n"
