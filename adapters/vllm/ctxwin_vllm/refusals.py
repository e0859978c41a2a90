"""Refusals, at start-up, of vLLM configurations under which spans would be served wrongly.

`check_config` reads the finished ``VllmConfig``, in which every way to set an option has come together (arguments,
command line, environment, the model's own config). It is called where the connector is made, so it also covers a vLLM that
another program has started.

**Compiled modes need no refusal**, piecewise or full CUDA graphs included. The replay of a graph of the whole model skips the
hooks that vLLM calls around each attention layer (hence its ``requires_piecewise_for_cudagraph``). Such a forward, and any other
that may skip them, waits for whole loads before it begins (`connector.worker`):

- Both model runners call ``start_load_kv`` before the model, on the stream on which a graph is replayed. Graphs are captured on
  the addresses of the paged cache, to which loads write.
- A background load fills blocks of a request that takes part in no step until the load is reported as done.
- Captures are read when a request has ended, after its last token was sampled from the forward that they come from.
- Rows that pad a batch up to a captured size have no slot: they write nothing into anybody's blocks.

On a CPU ``enforce_eager=False`` compiles the whole decoder into one graph; ``tests/adapters/vllm/test_vllm_compiled.py`` compares
its answers with the eager engine's.
"""

from collections.abc import Iterator
from typing import Any

from ctxwin.engines.vllm_support import on_a_processor
from ctxwin.errors import UnsupportedModel
from ctxwin_vllm.draft_model import METHODS
from ctxwin_vllm.paged import FP8

CONNECTOR = "CtxwinConnector"
ONE = {
    "data_parallel_size": "each replica has a cache of its own, and a window's spans lie in one of them",
    "decode_context_parallel_size": "each rank holds every nth token of a block",
    "prefill_context_parallel_size": "each rank computes a part of every prompt",
}
"""Kinds of parallelism that spans cannot follow, and why."""

BARE_DRAFTERS = ("ngram",)
"""Methods of speculative decoding that draft from the text alone: they keep no KV, and vLLM checks what they draft."""


def check_config(config: Any) -> None:
    """Refuse a ``VllmConfig`` under which the connector would load or read back wrong KV, or would not be asked.

    Raises:
        UnsupportedModel: names the option, why it cannot be served, and what to do. Cost: a few attributes.
    """
    for name, want, got, fits, reason in _rules(config):
        if not fits:
            raise UnsupportedModel(f"{name} must be {want} under ctxwin, got {got}: {reason}")


def _rules(config: Any) -> Iterator[tuple[str, str, object, bool, str]]:
    """Yield (option, required value, actual value, True if it fits, reason)."""
    for name, reason in ONE.items():
        size = getattr(config.parallel_config, name, 1)
        yield name, "1", size, size == 1, f"{reason}; serve larger models by tensor_parallel_size or from replicas"
    dbo = getattr(config.parallel_config, "enable_dbo", False)
    yield "enable_dbo", "False", dbo, not dbo, "half of a batch runs on streams that do not wait for loads"
    transfer, model = config.kv_transfer_config, config.model_config
    sleeps = bool(getattr(model, "enable_sleep_mode", False))
    reason = "it takes the paged cache's memory away under spans that are loaded or read back, and has not been tried"
    yield "enable_sleep_mode", "False", sleeps, not sleeps, reason
    connector = getattr(transfer, "kv_connector", None)
    reason = "beside another connector a request may be given KV that was computed for other neighbours"
    yield "kv_connector", repr(CONNECTOR), repr(connector), connector == CONNECTOR, reason
    policy = transfer.kv_load_failure_policy
    reason = "after a failed load vLLM would keep the blocks in front of it, which may be approximate"
    yield "kv_load_failure_policy", "'fail'", repr(policy), policy == "fail", reason
    reason = "stored KV is named, and keys are turned, by the checkpoint's own config; change its config.json instead"
    yield "hf_overrides", "empty", model.hf_overrides, not model.hf_overrides, reason
    for name in ("revision", "hf_config_path"):
        setting = getattr(model, name, None)
        reason = "ctxwin reads config and weights where the model's name leads; open a local folder of that revision"
        yield name, "unset", repr(setting), setting is None, reason
    quantised = getattr(model, "quantization", None)
    in_checkpoint = not quantised or bool(getattr(model.hf_config, "quantization_config", None))
    reason = "KV of a model that is quantised while it loads would be stored under the name of the full one"
    reason += "; save the quantised checkpoint and open that"
    yield "quantization", "the checkpoint's own", repr(quantised), in_checkpoint, reason
    coder = getattr(model, "is_encoder_decoder", False)
    yield "the model", "a decoder", "an encoder with a decoder", not coder, "cross-attention KV is no prefix"
    runner = getattr(model, "runner_type", "generate")
    yield "runner", "'generate'", repr(runner), runner == "generate", "there is no answer to ask a window for"
    dummy = str(config.load_config.load_format) == "dummy"
    reason = "stored KV is named by the checkpoint's own weights"
    yield "load_format", "one that reads the weights", "'dummy'", not dummy, reason
    cache_dtype, dtype = str(config.cache_config.cache_dtype), str(model.dtype).removeprefix("torch.")
    reason = "spans are read back to the bit from the model's own dtype and from caches with one scale a layer"
    fits = cache_dtype in ("auto", dtype, *FP8)
    yield "kv_cache_dtype", f"'auto', {dtype!r}, {', '.join(map(repr, FP8))}", repr(cache_dtype), fits, reason
    draft_model, methods = config.speculative_config, (*BARE_DRAFTERS, *METHODS)
    method = getattr(draft_model, "method", None) or "set"
    reason = "what another drafter keeps between steps beside KV of tokens, or how it lays that out, is not known"
    fits = draft_model is None or method in methods
    yield "speculative_config", f"unset, or of a method among {', '.join(methods)}", repr(method), fits, reason
    reason = "that drafters keep KV of tokens alone has been tried one token at a time only"
    parallel = bool(getattr(draft_model, "parallel_drafting", False))
    yield "parallel_drafting", "False", parallel, not parallel, reason
    drafter = getattr(draft_model, "draft_model_config", None) if method in METHODS else None
    revision = getattr(drafter, "revision", None)
    reason = "its KV is named by the weights that its model's name leads to; open a local folder of that revision"
    yield "the drafter's revision", "unset", repr(revision), revision is None, reason
    whole = bool(getattr(model, "is_mm_prefix_lm", False)) and on_a_processor()
    reason = "vLLM's attention on a processor lets no token see those behind it; open it as hf:MODEL, or on a GPU"
    sees = "one whose tokens of a picture see those behind them"
    yield "the model", "causal in its pictures", sees, not whole, reason
    ranks = config.parallel_config.tensor_parallel_size
    uneven = bool(getattr(getattr(model, "hf_text_config", None), "is_heterogeneous", False))
    reason = "the heads of such layers are not split among ranks yet; serve from replicas"
    yield "tensor_parallel_size", "1 where layers differ in their heads", ranks, ranks == 1 or not uneven, reason
    if getattr(model, "is_hybrid", False):
        yield from _hybrid_rules(config)
    stages = config.parallel_config.pipeline_parallel_size
    reason = "which stage has the drafter, and what it keeps there, has not been tried"
    yield "speculative_config", "unset in a pipeline", repr(method), draft_model is None or stages == 1, reason
    adapters = (getattr(transfer, "kv_connector_extra_config", None) or {}).get("lora", False)
    fits = config.lora_config is None or adapters
    reason = "an adapter makes KV that is another model's; open it as VLLMEngine(lora=...)"
    yield "enable_lora", "False", "True", fits, reason


def _hybrid_rules(config: Any) -> Iterator[tuple[str, str, object, bool, str]]:
    """Yield the further rules for a model with recurrent layers."""
    cached = bool(config.cache_config.enable_prefix_caching)
    reason = "vLLM would keep recurrent states at block boundaries only, and copy them before a load has brought them"
    yield "enable_prefix_caching", "False for a model with recurrent layers", cached, not cached, reason
    for name, kind in (("tensor_parallel_size", "ranks"), ("pipeline_parallel_size", "stages")):
        count = getattr(config.parallel_config, name)
        reason = f"recurrent states are not split among {kind} yet; serve from replicas, or on transformers"
        yield name, "1 for a model with recurrent layers", count, count == 1, reason
    draft = getattr(config.speculative_config, "method", None)
    reason = "a state cannot take back the tokens of a draft that was not accepted"
    yield "speculative_config", "unset for a model with recurrent layers", repr(draft), draft is None, reason
    ahead = bool(config.scheduler_config.async_scheduling)
    reason = "a state would be a step ahead of the tokens that it is read back with"
    yield "async_scheduling", "False for a model with recurrent layers", ahead, not ahead, reason
