"""Every generating architecture that vLLM knows is served, refused with its reason, or unknown: none slips through."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.vllm
TOOLS = Path(__file__).parents[2] / "tools"


def test_no_architecture_slips_through() -> None:
    """What keeps a state, or another cache, beside its KV is refused from its config, or both are read here."""
    from vllm.model_executor.models.registry import ModelRegistry, _ModelInfo

    sys.path.insert(0, str(TOOLS))
    try:
        from reference_pages import architectures_of_vllm
    finally:
        sys.path.remove(str(TOOLS))
    found = architectures_of_vllm()
    assert len(found) > 200 and {a.standing for a in found.values()} == {"tested", "measured", "refused", "unknown"}
    wrong = []
    for name, assessed in found.items():
        if assessed.standing in ("tested", "measured") and "vllm" in assessed.engines:
            info = _ModelInfo.from_model_cls(ModelRegistry.models[name].load_model_cls())
            states = bool(assessed.state_bytes)  # which are loaded and read back beside its KV
            hybrid = info.is_hybrid or info.has_inner_state
            if hybrid != states or info.is_attention_free or info.has_noops:
                wrong.append(name)
        elif assessed.standing not in ("tested", "measured"):
            assert assessed.reason
    assert not wrong
    for name in ("DeepseekV32ForCausalLM", "MiniMaxM3SparseForConditionalGeneration"):
        assert found[name].standing == "refused"
    for name in ("Qwen3_5ForConditionalGeneration", "Qwen3NextForCausalLM"):
        assert found[name].engines == ("hf", "vllm") and found[name].state_bytes
