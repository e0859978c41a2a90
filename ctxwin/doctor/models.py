"""Assessment of a model from its config alone: no weights are read or downloaded.

It applies the rules that refuse a model when it is opened (`check_supported`, `family_of`) before a download, and adds what is
not in a config: the families that a test compares with transformers' own answers.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ctxwin.errors import UnsupportedModel

Standing = Literal["tested", "measured", "refused", "unknown"]
_BOTH, _HF, _VLLM = ("hf", "vllm"), ("hf",), ("vllm",)


TESTED = {
    kind: engines
    for engines, kinds in (
        (_BOTH, "qwen2_vl qwen2_5_vl qwen3_vl qwen3_vl_moe internvl glm4v glm4v_moe mistral3 smolvlm idefics3 gemma3"),
        (_BOTH, "gemma4 llava llava_next llava_onevision kimi_k25 glm_ocr paddleocr_vl qwen2_5_omni qwen3_omni_moe"),
        (
            _BOTH,
            "qwen2 llama deepseek_v2 deepseek_v3 gemma gemma2 gemma3_text gemma4_text glm4 granite mistral mixtral",
        ),
        (_BOTH, "phi3 qwen2_moe qwen3 qwen3_moe stablelm qwen3_5 qwen3_5_text qwen3_5_moe qwen3_5_moe_text qwen3_next"),
        (_HF, "apertus cohere ernie4_5 exaone4 gpt_oss granitemoe ministral nemotron olmo2 olmoe phi qianfan_ocr"),
        (_HF, "deepseek_ocr2 deepseek_vl deepseek_vl_hybrid llava_next_video starcoder2 qwen2_5_omni_thinker"),
        (_HF, "qwen3_omni_moe_thinker"),
        (_VLLM, "deepseek_vl_v2 kimi_vl"),
    )
    for kind in kinds.split()
}
"""Engines on which a test compares a ``model_type`` with transformers (``tests/**/test_*families.py``)."""


@dataclass(frozen=True)
class Assessment:
    """Support of a model by ctxwin.

    Attributes:
        model: its name in the request.
        kind: ``model_type`` of its config; "" if it is not known.
        standing: ``tested``: a test compares this family with transformers; ``measured``: nothing in its config forbids it,
            and the rotation of its keys is measured when it is opened; ``refused``; ``unknown``: it has no config.
        reason: reason why it is refused or unknown.
        engines: engines that can open it: ``hf``, ``vllm``.
        layout: of its KV: family, layers, heads, dimensions per head, positions.
        token_bytes: KV bytes per token as served.
        state_bytes: additional bytes per chunk, of recurrent layers; 0 for a model without.
    """

    model: str
    kind: str
    standing: Standing
    reason: str = ""
    engines: tuple[str, ...] = ()
    layout: str = ""
    token_bytes: int = 0
    state_bytes: int = 0


def assess(name: str | Path) -> Assessment:
    """Assess a local folder, a Hugging Face Hub name (only its config is read) or ``tiny``. Cost: reading the config."""
    from ctxwin.engines.encoding.checkpoint import local_folder, read_config
    from ctxwin.engines.torchvision_repair import repair
    from ctxwin.tiny import checkpoint_dir

    repair()
    name = str(name).removeprefix("hf:").removeprefix("vllm:")
    try:
        config = read_config(checkpoint_dir() if name == "tiny" else local_folder(name, config_only=True))
    except (OSError, ValueError) as error:  # no such model, no network, or a class that only its own code has
        return Assessment(name, "", "unknown", str(error).splitlines()[0])
    except UnsupportedModel as error:  # one that vLLM alone has, without vLLM
        return Assessment(name, "", "refused", str(error))
    return assess_config(config, name)


def assess_config(config: Any, name: str = "", processor: bool | None = None) -> Assessment:
    """Assess a transformers config; see `assess`. ``processor``: vLLM would run on a CPU; None: decided by this machine."""
    from ctxwin.engines.encoding.families import family_of
    from ctxwin.engines.vllm_support import refused
    from ctxwin.kv.config import all_slide, kv_spec_from_config, sliding_window
    from ctxwin.kv.rows import layer_kinds

    kind = str(config.model_type)
    dtype = str(getattr(config, "dtype", None) or "bfloat16").removeprefix("torch.")
    try:
        kv = kv_spec_from_config(config, "", dtype)
        family_of(config)
    except UnsupportedModel as error:
        return Assessment(name, kind, "refused", str(error))
    form = "1-D" if kv.rope.sections is None else f"M-RoPE {'/'.join(map(str, kv.rope.sections))}"
    shapes = dict.fromkeys((k.heads, k.head_dim) for k in kv.kinds) if kv.in_rows else {}
    heads = f"{kv.heads} KV head{'s' * (kv.heads > 1)} of {kv.k_dim} and {kv.v_dim}"
    heads = " or ".join(f"{count} KV heads of {dim}" for count, dim in shapes) or heads
    form += f", {len(kv.kinds)} sets of frequencies" * bool(kv.kinds)
    count = len(layer_kinds(kv)) if kv.in_rows else kv.layers
    layout = f"{kv.family}, {count} layers, {heads}, {form} over {kv.rope.rotary_dim} dimensions, {dtype}"
    why = refused(config, processor) or _not_on_vllm(config, dtype)
    if window := sliding_window(config):
        which = "all layers see" if all_slide(config) else "some layers see"
        layout += f"; {which} the last {window:,} tokens only"
    if kv.recurrent:
        layout += f", beside recurrent layers with states of {kv.state_bytes:,} bytes a chunk"
    engines = _HF if why else TESTED.get(kind, _BOTH)
    standing: Standing = "tested" if kind in TESTED else "measured"
    return Assessment(
        name, kind, standing, f"not on vLLM: {why}" if why else "", engines, layout, kv.token_bytes, kv.state_bytes
    )


def _not_on_vllm(config: Any, dtype: str) -> str:
    """Return the reason why KV cannot be read in vLLM's layout; "" if it can."""
    from ctxwin.kv.config import kv_spec_from_config

    try:
        kv_spec_from_config(config, "", dtype, "vllm")
    except UnsupportedModel as error:
        return str(error)
    return ""
