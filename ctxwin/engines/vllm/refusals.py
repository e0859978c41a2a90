"""What of vLLM's configuration would have spans served wrongly, refused at start-up by name.

`check_config` reads the finished ``VllmConfig``, in which every way to set an option has come together (arguments,
command line, environment, the model's own config). It is called where the connector is made, so it also holds for a
vLLM that somebody else has started.

**Compiled modes need no refusal**, piecewise or full CUDA graphs included. What a graph replay skips is the Python between
kernels, and with it the hooks that vLLM calls around each attention layer; a connector that loads layer by layer would
compute on stale blocks then (vLLM's ``requires_piecewise_for_cudagraph`` is there for it). This connector does nothing
in those hooks:

- A synchronous load is complete in stream order when the forward begins. Both model runners call ``start_load_kv`` in
  front of the model (``GPUModelRunner.execute_model`` enters ``maybe_get_kv_connector_output`` before
  ``_model_forward``; runner V2 calls ``pre_forward`` before ``run_fullgraph``), on the stream on which the graph is
  replayed. Graphs are captured on the addresses of the paged cache, and loads write to those addresses.
- A background load fills blocks of a request that is in none of the steps until vLLM has been told that it is done.
- Captures are read when a request has ended, after its last token was sampled from the forward that they come from.
- Rows that pad a batch up to a captured size have no slot: they write nothing into anybody's blocks.

On a CPU ``enforce_eager=False`` compiles the whole decoder into one graph; ``tests/engines/test_vllm_compiled.py`` holds
its answers against the eager engine's.
"""

from __future__ import annotations

from typing import Any

from ctxwin.errors import UnsupportedModel

CONNECTOR = "CtxwinConnector"
_ONE = {
    "pipeline_parallel_size": "a span holds the KV of all layers, and each stage has some of them",
    "data_parallel_size": "each replica has a cache of its own, and a window's spans lie in one of them",
    "decode_context_parallel_size": "each rank holds every nth token of a block",
    "prefill_context_parallel_size": "each rank computes a part of every prompt",
}


def check_config(config: Any) -> None:
    """Refuses a configuration under which the connector would load or read back wrong KV, or would not be asked.

    Args:
        config: a ``vllm.config.VllmConfig``.

    Raises:
        UnsupportedModel: names the option, why it cannot be served, and what to do. Cost: a few attributes.
    """
    _check_parallel(config.parallel_config)
    _check_connector(config.kv_transfer_config)
    _check_model(config.model_config)
    if str(config.load_config.load_format) == "dummy":
        raise _refusal(
            "load_format", "one that reads the weights", "'dummy'", "stored KV is named by the checkpoint's own weights"
        )
    kept, own = str(config.cache_config.cache_dtype), _name(config.model_config.dtype)
    if kept not in ("auto", own):
        raise _refusal("kv_cache_dtype", f"'auto' or {own!r}", kept, "spans are moved in the model's own dtype")
    if config.speculative_config is not None:
        raise _refusal(
            "speculative_config", "unset", _method(config.speculative_config),
            "a drafter keeps KV of its own, which no span brings back",
        )  # fmt: skip
    if config.lora_config is not None:
        raise _refusal("enable_lora", "False", "True", "an adapter makes KV that is another model's")


def _check_parallel(parallel: Any) -> None:
    for name, reason in _ONE.items():
        size = getattr(parallel, name, 1)
        if size != 1:
            raise _refusal(name, "1", size, f"{reason}; serve larger models by tensor_parallel_size or from replicas")
    if getattr(parallel, "enable_dbo", False):
        raise _refusal("enable_dbo", "False", "True", "half of a batch runs on streams that do not wait for loads")


def _check_connector(transfer: Any) -> None:
    name = getattr(transfer, "kv_connector", None)
    if name != CONNECTOR:
        raise _refusal(
            "kv_connector", repr(CONNECTOR), repr(name),
            "beside another connector a request may be given KV that was computed for other neighbours",
        )  # fmt: skip
    if transfer.kv_load_failure_policy != "fail":
        raise _refusal(
            "kv_load_failure_policy", "'fail'", repr(transfer.kv_load_failure_policy),
            "after a failed load vLLM would keep the blocks in front of it, which may be approximate",
        )  # fmt: skip


def _check_model(model: Any) -> None:
    if model.hf_overrides:
        raise _refusal(
            "hf_overrides", "empty", model.hf_overrides,
            "stored KV is named, and keys are turned, by the checkpoint's own config; change its config.json instead",
        )  # fmt: skip
    for name in ("revision", "hf_config_path"):
        given = getattr(model, name, None)
        if given is not None:
            raise _refusal(
                name, "unset", repr(given),
                "ctxwin reads the model's config and weights where its name leads; open a local folder of that revision",
            )  # fmt: skip
    quantised = getattr(model, "quantization", None)
    if quantised and not getattr(model.hf_config, "quantization_config", None):
        raise _refusal(
            "quantization", "the checkpoint's own", repr(quantised),
            "the KV of a model that is quantised while it loads would be stored under the name of the full one; save the "
            "quantised checkpoint and open that",
        )  # fmt: skip
    if getattr(model, "is_encoder_decoder", False):
        raise _refusal("the model", "a decoder", "an encoder with a decoder", "cross-attention KV is no prefix")
    if getattr(model, "runner_type", "generate") != "generate":
        raise _refusal("runner", "'generate'", repr(model.runner_type), "there is no answer to ask a window for")


def _refusal(name: str, want: str, got: object, reason: str) -> UnsupportedModel:
    return UnsupportedModel(f"{name} must be {want} under ctxwin, got {got}: {reason}")


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _method(speculative: Any) -> str:
    return repr(getattr(speculative, "method", None) or "set")
