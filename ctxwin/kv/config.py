"""From a transformers config to `RopeSpec` and `KVSpec`, or a refusal that names the property in the way.

Inverse frequencies come from transformers' own functions. What cannot be moved is refused, before any KV is stored:

- frequencies that depend on the length of the sequence (dynamic NTK, LongRoPE), so a key has no one rotation to undo;
- positions that are no rotation of the key (ALiBi, learned absolute, none at all);
- state that is no KV of tokens (linear attention, state space, convolution layers), but for hybrids whose states are known:
  Gated DeltaNet beside full attention;
- layers that see chunks of a fixed grid (Llama 4), which depends on the place in the prompt.

Layers with a sliding window turn like others, or by frequencies of their own (Gemma 3), and a cached span depends on its
antecedents only; both engines keep all of their KV (on vLLM by its own setting). Models whose other layers have no positions
(Cohere 2) do not pass.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Literal, cast

from ctxwin.errors import UnsupportedModel
from ctxwin.hashing import digest
from ctxwin.kv.layout import Family, KVSpec, LayerKind, RopeSpec
from ctxwin.kv.rows import row_width

Engine = Literal["hf", "vllm"]


def _names(words: str) -> frozenset[str]:
    return frozenset(words.split())


_LEARNED = _names(
    "bart bert biogpt ctrl electra gpt2 gpt_bigcode gpt_neo imagegpt marian mbart openai-gpt opt roberta trocr whisper xglm "
    "xlm"
)
_RECURRENT = _names(
    "bamba falcon_h1 falcon_mamba granitemoehybrid jamba kimi_linear lfm2 lfm2_moe mamba mamba2 minimax nemotron_h "
    "olmo_hybrid recurrent_gemma rwkv xlstm zamba zamba2"
)
_DELTANET = _names("qwen3_5_moe_text qwen3_5_text qwen3_next")
"""Hybrids of Gated DeltaNet and full attention layers, whose states are kept with the KV."""
_UNEVEN = _names("mimo_v2_flash")
"""Layers that slide have other heads, of keys and values that differ in width, and the config does not say so."""
_IN_ROWS = _names("gemma4_text")
"""Layers that slide have other heads than those that do not: their KV is laid out in rows."""
_SHARING = _names("gemma4_text")
"""The last layers read the KV of earlier ones, and every layer may have an embedding of the token of its own."""
_ALIBI = frozenset(("bloom", "mpt"))
_UNTURNED = _names("afmoe cohere2 cohere2_moe exaone4 exaone_moe")
"""Have no positions in their full attention layers wherever others slide."""
# Models that turn neighbouring dimensions (2i, 2i + 1) and leave them where they are. DeepSeek-V3 and its kin also pair
# neighbours, but transformers caches their keys de-interleaved (half), vLLM as they were (interleaved).
_PAIRED = _names("cohere cohere2 cohere2_moe deepseek_v2 ernie4_5 ernie4_5_moe glm glm4 glm4v_text glm_ocr_text helium")
_CYCLING_MROPE = ("qwen3_vl", "qwen3_omni", "qwen3_5")
_BLOCKED_MROPE = ("qwen2_vl", "qwen2_5_vl", "qwen2_5_omni", "glm4v", "glm_ocr", "paddleocr_vl")
# Sections that the modelling code falls back to where the config names none.
_DEFAULT_SECTIONS = {
    "qwen2_vl": (16, 24, 24), "qwen2_5_vl": (16, 24, 24), "qwen3_vl": (24, 20, 20), "qwen3_5": (11, 11, 10),
    "qwen3_omni": (24, 20, 20),
}  # fmt: skip
_STATE_LAYERS = {
    "linear_attention": "linear attention layers",
    "mamba": "state space layers",
    "conv": "convolution layers",
    "recurrent": "recurrent layers",
    "chunked_attention": "chunked attention layers",
}
_COMPOSING = ("linear", "llama3", "yarn", "proportional")


def text_backbone(config: Any) -> Any:
    """Return the config of an Omni model's text backbone, its thinker with the encoders; any other config as it is."""
    return getattr(config, "thinker_config", config)


def text_config(config: Any) -> Any:
    """The decoder's config inside a multimodal one; the config itself where it is one."""
    get = getattr(config, "get_text_config", None)
    return get(decoder=True) if get is not None else getattr(config, "text_config", config)


def check_supported(config: Any) -> None:
    """Raises UnsupportedModel, naming the property, where KV of this model cannot be moved."""
    text = text_config(config)

    def has(name: str) -> Any:
        return getattr(text, name, None)

    kind, types = str(has("model_type") or ""), set(has("layer_types") or ())
    types -= {"linear_attention"} if kind in _DELTANET else set()
    states = [label for name, label in _STATE_LAYERS.items() if any(name in t for t in types)]
    others = sorted(types - {"full_attention", "sliding_attention", "attention"})
    learned = kind in _LEARNED or has("position_embedding_type") in ("absolute", "learned_absolute")
    crossed = has("is_encoder_decoder") or has("cross_attention_layers")
    both_ways = has("use_bidirectional_attention") in (True, "all")
    unrotated = has("no_rope_layers") and not all(has("no_rope_layers"))
    unrotated = unrotated or (kind in _UNTURNED and sliding_window(config) is not None)
    sizes = {name: has(f"num_{name}") for name in ("hidden_layers", "attention_heads")}
    empty = [f"{name} = {size}" for name, size in sizes.items() if isinstance(size, int) and size < 1]
    indexed = has("index_topk") or has("index_topk_blocks")
    uneven = kind in _UNEVEN or (has("is_heterogeneous") and kind not in _IN_ROWS)
    reusing, fed = (kind not in _SHARING and has(x) for x in ("num_kv_shared_layers", "hidden_size_per_layer_input"))
    rules = (
        (empty, ", ".join(empty), "it must have at least one of each"),
        (kind in _ALIBI or has("alibi") or has("use_alibi"), "ALiBi", "its bias is in the attention, not in the key"),
        (learned, "learned absolute positions", "they are mixed into the values and cannot be turned"),
        (kind in _RECURRENT, "linear attention or state space layers", "their state is no KV of tokens"),
        (crossed, "cross attention layers", "their KV does not belong to tokens of the window"),
        (both_ways, "bidirectional attention", "a chunk's KV depends on what follows it"),
        (indexed, "a sparse attention indexer", "its own key cache would have to move too"),
        (states, "".join(states[:1]), "they keep no KV for every token of the window"),
        (others, f"{', '.join(others)} layers", "only full attention is known to move"),
        (unrotated, "layers without rotary positions", "all layers must turn"),
        (uneven, "layers of different shapes", "their KV must have one"),
        (reusing, "layers that reuse the KV of others", "they have no cache"),
        (fed, "inputs to every layer", "a chunk's embeddings are what the first one is fed"),
    )
    for refused, prop, why in rules:
        if refused:
            raise _refusal(kind, prop, why)


def sliding_window(config: Any) -> int | None:
    """Return how many tokens sliding layers see, their own included; None where no layer slides.

    A window that is configured but never takes effect (Qwen2 with ``use_sliding_window`` false, or one no shorter than the
    context) counts as none.
    """
    text = text_config(config)
    window, longest = getattr(text, "sliding_window", None), getattr(text, "max_position_embeddings", None)
    types = getattr(text, "layer_types", None)
    slides = "sliding_attention" in types if types else getattr(text, "use_sliding_window", None) is not False
    return int(window) if slides and window and not (longest and window >= longest) else None


def all_slide(config: Any) -> bool:
    """Return True if every layer of a model has a sliding window."""
    types = getattr(text_config(config), "layer_types", None)
    return sliding_window(config) is not None and (not types or set(types) == {"sliding_attention"})


def rope_spec_from_config(config: Any, engine: Engine = "hf", layer_type: str | None = None) -> RopeSpec:
    """Return how a model turns positions into angles, from its transformers config.

    Args:
        config: a text config (or a multimodal one, whose decoder's is used), with ``rope_parameters`` (transformers 5) or
            ``rope_scaling`` and ``rope_theta`` (older). It is not changed.
        engine: engine whose cache the keys come from; transformers and vLLM lay out DeepSeek-V3's differently.
        layer_type: one of ``layer_types``, for a model whose frequencies differ by them; None is the first layer's.

    Returns:
        The spec, with transformers' own float32 inverse frequencies.

    Raises:
        UnsupportedModel: a property under which keys cannot be moved.
    """
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    check_supported(config)
    text = text_config(config)
    kind = str(getattr(text, "model_type", ""))
    view = _rope_view(text, kind, layer_type)
    parameters = view.rope_parameters
    scaling = parameters["rope_type"]
    if scaling == "dynamic":
        raise _refusal(kind, "dynamic NTK rope scaling", "its frequencies change with the length of the sequence")
    if scaling == "longrope":
        raise _refusal(kind, "LongRoPE scaling", "its frequencies switch at a length of the sequence")
    if scaling == "default":
        dim = int(view.head_dim * parameters.get("partial_rotary_factor", 1.0))
        inv_freq = 1.0 / (parameters["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float) / dim))
        magnitude = 1.0
    elif scaling in _COMPOSING:
        inv_freq, magnitude = ROPE_INIT_FUNCTIONS[scaling](cast(Any, view), torch.device("cpu"))
    else:
        raise _refusal(kind, f"rope type {scaling!r}", f"known are default, {', '.join(_COMPOSING)}")
    sections, cycling = _sections(parameters, kind)
    return RopeSpec(
        inv_freq=tuple(inv_freq.to(torch.float32).tolist()),
        rotary_dim=2 * inv_freq.numel(),
        pairing=_pairing(text, kind, engine),
        sections=sections,
        mrope_interleaved=cycling,
        magnitude=float(magnitude),
    )


def kv_spec_from_config(config: Any, identity: str, dtype: str, engine: Engine = "hf") -> KVSpec:
    """Return the layout of a model's KV cache, from its transformers config.

    Args:
        config: text or multimodal config.
        identity: digest of the model, see `KVSpec.identity`.
        dtype: name of the dtype that KV is served in.
        engine: as in `rope_spec_from_config`.

    Returns:
        ``mla`` where the config has a ``kv_lora_rank``, ``mha`` where there are as many KV heads as query heads, else
        ``gqa``.

    Raises:
        UnsupportedModel: see `rope_spec_from_config`.
    """
    rope = rope_spec_from_config(config, engine)
    text = text_config(config)
    layers, queries, states = int(text.num_hidden_layers), int(text.num_attention_heads), 0
    if str(text.model_type) in _DELTANET:
        recurrent = sum(kind == "linear_attention" for kind in text.layer_types)
        layers, states = layers - recurrent, recurrent * _deltanet_bytes(text, dtype, engine)
    if getattr(text, "is_heterogeneous", False):
        return _spec_in_rows(text, identity, dtype, engine)
    family: Family = "mla"
    if getattr(text, "kv_lora_rank", None):
        heads, k_dim, v_dim = 1, int(text.qk_rope_head_dim), int(text.kv_lora_rank)
    else:
        heads = int(getattr(text, "num_key_value_heads", None) or queries)
        family = "mha" if heads == queries else "gqa"
        k_dim = int(getattr(text, "head_dim", None) or text.hidden_size // queries)
        v_dim = int(getattr(text, "v_head_dim", None) or k_dim)
    return KVSpec(identity, family, layers, heads, k_dim, v_dim, rope, dtype, states, kinds=_kinds(text, engine))


def _kinds(text: Any, engine: Engine) -> tuple[LayerKind, ...]:
    """Group the layers by their rotation; empty where all rotate alike."""
    if not _by_type(text):
        return ()
    layers: dict[RopeSpec, tuple[int, ...]] = {}
    for i, layer_type in enumerate(text.layer_types):
        rope = rope_spec_from_config(text, engine, layer_type)
        layers[rope] = (*layers.get(rope, ()), i)
    return tuple(LayerKind(numbers, rope) for rope, numbers in layers.items()) if len(layers) > 1 else ()


def _spec_in_rows(text: Any, identity: str, dtype: str, engine: Engine) -> KVSpec:
    """Return the layout of a model whose layers differ in their heads, with values as wide as keys."""
    shapes = []
    for i in attention_layers(text):
        layer_config = text.per_layer_config[i]
        shapes.append((text.layer_types[i], int(layer_config.num_key_value_heads), int(layer_config.head_dim)))
    width = row_width([shape for _, *shape in shapes])  # type: ignore[misc]
    rows: dict[tuple[str, int, int], list[int]] = {}
    count = 0
    for name, heads, dim in shapes:
        own_rows = range(count, count + -(-heads * dim // width))
        rows.setdefault((name, heads, dim), []).extend(own_rows)
        count = own_rows.stop
    kinds = tuple(
        LayerKind(tuple(numbers), rope_spec_from_config(text, engine, name), heads, dim)
        for (name, heads, dim), numbers in rows.items()
    )
    return KVSpec(identity, "gqa", count, 1, width, width, kinds[0].rope, dtype, kinds=kinds)


def _by_type(text: Any) -> bool:
    """Return True if the config has rotary parameters for each type of layer."""
    parameters = getattr(text, "rope_parameters", None) or {}
    return any(isinstance(value, dict) for value in parameters.values())


def attention_layers(config: Any) -> tuple[int, ...]:
    """Return the decoder layers that keep KV of their own: neither recurrent layers nor the last, kv-sharing layers."""
    text = text_config(config)
    every = range(int(text.num_hidden_layers) - int(getattr(text, "num_kv_shared_layers", None) or 0))
    return tuple(i for i in every if str(text.model_type) not in _DELTANET or text.layer_types[i] != "linear_attention")


def with_maps(kv: KVSpec, config: Any) -> KVSpec:
    """Return the layout of a hybrid whose spans also hold maps on the recurrent states; it has another identity."""
    text = text_config(config)
    heads, k, v = (int(getattr(text, f"linear_{n}")) for n in ("num_value_heads", "key_head_dim", "value_head_dim"))
    recurrent = int(text.num_hidden_layers) - kv.layers
    maps = 4 * recurrent * heads * k * (k + v)
    return replace(kv, identity=digest("maps", kv.identity), state_bytes=kv.state_bytes + maps, maps=True)


def _deltanet_bytes(text: Any, dtype: str, engine: Engine) -> int:
    """Return the bytes of one Gated DeltaNet layer's state: a float32 matrix per value head, and a convolution's last inputs.

    transformers keeps one input more than vLLM. Some checkpoints make vLLM keep the matrix in fewer bytes.
    """
    keys, values = (int(getattr(text, f"linear_num_{what}_heads")) for what in ("key", "value"))
    k, v = (int(getattr(text, f"linear_{what}_head_dim")) for what in ("key", "value"))
    inputs = (2 * keys * k + values * v) * (int(text.linear_conv_kernel_dim) - (engine == "vllm"))
    return 4 * values * k * v + inputs * {"float64": 8, "float32": 4}.get(dtype, 2)


def _rope_view(text: Any, kind: str, layer_type: str | None) -> Any:
    """Return the attributes that transformers' rope functions read, with parameters in the form of transformers 5; a copy."""
    parameters = dict(getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {})
    if _by_type(text):
        types = getattr(text, "layer_types", None) or ("",)
        layer_type = layer_type or types[0]
        if getattr(text, "is_heterogeneous", False):
            text = text.per_layer_config[list(types).index(layer_type)]
        if not isinstance(parameters.get(layer_type), dict):
            raise _refusal(kind, f"no rotary positions in layers of type {layer_type!r}", "all layers must turn")
        parameters = dict(parameters[layer_type])
    theta = parameters.get("rope_theta") or getattr(text, "rope_theta", None)
    if theta is None:
        raise _refusal(kind, "no rotary positions", "its config has neither rope_parameters nor rope_theta")
    parameters["rope_theta"] = float(theta)
    scaling = parameters.get("rope_type") or parameters.get("type") or "default"
    # Qwen2-VL's checkpoints from before transformers 5 call plain frequencies with sections "mrope".
    parameters["rope_type"] = "default" if scaling == "mrope" else scaling
    partial = getattr(text, "partial_rotary_factor", None)
    if partial is not None:
        parameters.setdefault("partial_rotary_factor", partial)
    longest = getattr(text, "max_position_embeddings", None)
    pretrained = getattr(text, "original_max_position_embeddings", None)
    if pretrained is not None:
        parameters["original_max_position_embeddings"] = pretrained
    else:
        parameters.setdefault("original_max_position_embeddings", longest)
    mla = getattr(text, "kv_lora_rank", None)
    dim = text.qk_rope_head_dim if mla else getattr(text, "head_dim", None)
    return SimpleNamespace(
        rope_parameters=parameters,
        hidden_size=text.hidden_size,
        num_attention_heads=text.num_attention_heads,
        head_dim=dim or text.hidden_size // text.num_attention_heads,
        max_position_embeddings=longest,
        standardize_rope_params=lambda: None,
    )


def _sections(parameters: dict[str, Any], kind: str) -> tuple[tuple[int, ...] | None, bool]:
    fallback = next((size for name, size in _DEFAULT_SECTIONS.items() if kind.startswith(name)), None)
    sections = parameters.get("mrope_section") or fallback
    if sections is None:
        return None, False
    if kind.startswith(_CYCLING_MROPE):
        return tuple(sections), True
    if kind.startswith(_BLOCKED_MROPE):
        return tuple(sections), False
    raise _refusal(kind, "an unknown M-RoPE layout", f"known are {', '.join(_BLOCKED_MROPE + _CYCLING_MROPE)}")


def _pairing(text: Any, kind: str, engine: Engine) -> Literal["half", "interleaved"]:
    # DeepSeek-VL2-tiny says deepseek_v2 as well, but has the attention of DeepSeek's first model.
    if kind in _PAIRED and getattr(text, "kv_lora_rank", 0) is not None:
        return "interleaved"
    neighbours = getattr(text, "kv_lora_rank", None) and getattr(text, "rope_interleave", True)
    return "interleaved" if neighbours and engine == "vllm" else "half"


def _refusal(kind: str, prop: str, why: str) -> UnsupportedModel:
    return UnsupportedModel(f"model type {kind or 'unknown'!r} has {prop}: {why}; cached KV cannot be moved")
