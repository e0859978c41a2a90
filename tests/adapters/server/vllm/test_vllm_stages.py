"""A pipeline of two stages over HTTP: a server with vLLM keeps the first one's hidden states, and is killed in between."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from adapters.server.vllm.processes import descendants, running_server
from ctxwin import Answer, Chunk, Fidelity
from ctxwin.engines.outputs import HIDDEN
from ctxwin.errors import OutputGone
from ctxwin.tiny import world
from ctxwin_client import RemoteWindow, fetch_output
from waiting import wait_until

CHUNKS = [Chunk.image(world.render(f), text=f"t={i} s") for i, f in enumerate(world.make_stream(seed=3, n_frames=3))]


def starts(log: Path) -> int:
    return sum(line.endswith("Application startup complete.") for line in log.read_text().splitlines())


def scores(rows: torch.Tensor) -> torch.Tensor:
    """The second stage: a small decoder with random weights over the first one's hidden states."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128}
    talker = Qwen2ForCausalLM(Qwen2Config(hidden_size=rows.shape[1], vocab_size=300, **sizes)).eval()
    with torch.no_grad():
        logits: torch.Tensor = talker(inputs_embeds=rows[None]).logits
    return logits


def asked(window: Any) -> Answer:
    answer: Answer = window.ask("which color", max_tokens=4, outputs=[HIDDEN])
    return answer


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_killed_engine_changes_no_bit_of_either_stage(tmp_path: Path) -> None:
    arguments = ("--outputs", "--store", f"disk:{tmp_path / 'kv'}")
    with running_server(tmp_path, *arguments, restarts=3) as server:
        client = server.client()
        window = RemoteWindow(client, "You watch a camera.", fidelity=Fidelity("exact"))
        window.extend(CHUNKS[:2])
        first = asked(window)
        assert first.outputs is not None
        reference = first.outputs[HIDDEN]
        rows = fetch_output(client, reference)
        window.append(CHUNKS[2])
        (engine,) = [
            pid for pid in descendants(server.process.pid) if b"EngineCore" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        os.kill(engine, signal.SIGKILL)
        assert wait_until(lambda: starts(server.log) == 2, 600), server.log.read_text()[-4000:]
        with pytest.raises(OutputGone, match="ask again"):
            fetch_output(client, reference)
        after = asked(window)
        assert after.outputs is not None and after.usage.computed_tokens < after.usage.prompt_tokens
        with RemoteWindow(client, "You watch a camera.", fidelity=Fidelity("exact")) as other:
            other.extend(CHUNKS)
            others = asked(other).outputs
            assert others is not None and others[HIDDEN]["digest"] == after.outputs[HIDDEN]["digest"]
        window.evict(window.ids[-1])
        again = asked(window)
        assert again.outputs is not None and again.token_ids == first.token_ids
        assert again.outputs[HIDDEN]["digest"] == reference["digest"]
        assert torch.equal(scores(fetch_output(client, again.outputs[HIDDEN])), scores(rows))
