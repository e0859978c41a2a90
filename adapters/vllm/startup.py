"""Starting and stopping vLLM inside this process without leaving traces in it.

vLLM is made for processes of its own: starting it seeds the global random generators, replaces
``torch.set_num_threads``, reads its settings from environment variables and logs a screenful. Here everything that a
host program would notice is put back, and several engines can be open at once although vLLM keeps its process groups in
globals.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import logging
import os
import random
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any

from ctxwin.adapters.vllm.registry import PARAM, Exchange
from ctxwin.errors import EngineFailed, UnsupportedModel

CPU_KV_BYTES = 1 << 30
"""Paged cache on a CPU unless told otherwise, or what one request of full length takes where that is more; vLLM's own
default there is most of the machine's memory."""

_FIXED = {
    "enable_mm_embeds": True,
    "enable_prefix_caching": True,
    "max_logprobs": -1,
    "async_scheduling": False,
    "mm_device_do_normalize": False,  # pixels come normalised from the model's own processor
}
_OWN_PROCESS = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "decode_context_parallel_size")
_log = logging.getLogger("ctxwin.engines")
_lock = threading.Lock()
_open = 0


def start(model: str, exchange: Exchange, options: dict[str, Any]) -> Any:
    """An in-process ``vllm.LLM`` with the ctxwin connector.

    Args:
        model: path or hub name.
        exchange: where the connector finds its transfers.
        options: keyword arguments of ``vllm.LLM``; those that ctxwin depends on are refused where they differ.

    Raises:
        ValueError: an option that cannot be changed. UnsupportedModel: an option that needs further processes.
        EngineFailed: vLLM does not start; the cause is chained. Cost: loading the model, 3-30 s.
    """
    arguments = _arguments(exchange, options)
    with _lock, _unnoticed():
        _hide_unloadable("torchcodec")
        from transformers import AutoConfig
        from vllm import LLM
        from vllm.platforms import current_platform

        config = AutoConfig.from_pretrained(model)

        if current_platform.is_cpu():
            if exchange.kv.family == "mla":
                _correct_rotation(arguments)  # the size of its blocks is the platform's choice
            else:
                arguments.setdefault("block_size", 32)  # the smallest for CPU kernels: less to load behind a prefix hit
            arguments.setdefault("enforce_eager", True)  # compiling costs more than a CPU window wins back
            if "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
                longest = arguments.get("max_model_len") or config.get_text_config().max_position_embeddings
                room = longest + 2 * arguments.get("block_size", 128)
                whole = exchange.kv.span_bytes(room, _itemsize(exchange.kv.dtype))
                arguments.setdefault("kv_cache_memory_bytes", max(CPU_KV_BYTES, whole))
        _import_model_classes(config)
        try:
            llm = LLM(model, **arguments)
        except Exception as error:
            _tear_down_groups()
            if isinstance(error, TypeError) and "unexpected keyword argument" in str(error):
                raise ValueError(f"options of the vLLM engine must be arguments of vllm.LLM: {error}") from error
            raise EngineFailed(f"vLLM could not open {model!r}: {error}") from error
        global _open
        _open += 1
    return llm


def stop(llm: Any) -> None:
    """Shuts an engine down; the last one also takes vLLM's process groups with it."""
    global _open
    with _lock, _quiet():
        _open -= 1
        engine = llm.llm_engine
        engine.renderer.shutdown()
        if _open == 0:
            engine.engine_core.shutdown()
        else:
            # EngineCore.shutdown would destroy the process groups and the worker-side connector, which the other
            # engines of this process share: release only what is this engine's own.
            engine.engine_core._finalizer.detach()
            core = engine.engine_core.engine_core
            core.structured_output_manager.clear_backend()
            core.scheduler.shutdown()
            core.model_executor.driver_worker.worker.model_runner.shutdown()
            gc.unfreeze()
        gc.collect()


def _arguments(exchange: Exchange, options: dict[str, Any]) -> dict[str, Any]:
    for name in _OWN_PROCESS:
        if options.get(name, 1) != 1:
            raise UnsupportedModel(
                f"{name} must be 1, got {options[name]!r}: spans are handed over inside one process; "
                "serve larger models from several replicas"
            )
    for name, value in _FIXED.items():
        if options.get(name, value) != value:
            raise ValueError(f"{name} must be {value!r} under ctxwin, got {options[name]!r}; leave it out")
    for name in ("kv_transfer_config", "speculative_config", "enable_lora"):
        if options.get(name):
            raise ValueError(f"{name} must not be set under ctxwin, got {options[name]!r}; leave it out")
    defaults: dict[str, Any] = {
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "skip_mm_profiling": True,  # the tower never runs inside a request
        "seed": 0,
    }
    connector = {
        "kv_connector": "CtxwinConnector",
        "kv_connector_module_path": "ctxwin.adapters.vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {PARAM: exchange.name},
    }
    return {**defaults, **options, **_FIXED, "kv_transfer_config": connector}


def _correct_rotation(arguments: dict[str, Any]) -> None:
    """Has rotary embedding done by torch: vLLM 0.32's CPU kernel gets the strided view wrong that MLA hands to it."""
    given = arguments.get("compilation_config")
    if given is None or isinstance(given, dict):
        ops = list((given or {}).get("custom_ops", ()))
        if "+rotary_embedding" in ops:
            raise ValueError(
                "custom_ops must not switch on rotary_embedding for a model with latent attention on a CPU"
            )
        arguments["compilation_config"] = {**(given or {}), "custom_ops": [*ops, "-rotary_embedding"]}
    else:
        raise ValueError(
            "compilation_config must be a dict for a model with latent attention on a CPU, got "
            f"{type(given).__name__}; ctxwin adds to it"
        )


def _hide_unloadable(name: str) -> None:
    """Marks an installed package whose libraries do not load beside this torch as not installed.

    vLLM imports torchcodec for audio where it is installed, and takes it for missing only on an ImportError.
    """
    if name in sys.modules or importlib.util.find_spec(name) is None:
        return
    try:
        importlib.import_module(name)
    except (OSError, RuntimeError, ImportError) as error:
        for loaded in [n for n in sys.modules if n == name or n.startswith(name + ".")]:
            del sys.modules[loaded]
        sys.modules[name] = None  # type: ignore[assignment]  # Python's own mark for "not installed"
        _log.info("%s does not load and is left out: %s", name, error)


def _itemsize(dtype: str) -> int:
    return 4 if dtype == "float32" else 2


def _import_model_classes(config: Any) -> None:
    """Imports the model's class here, so that vLLM does not start a Python process just to look at it.

    That process costs seconds, and would need any repair of the environment that this one has had.
    """
    from vllm.model_executor.models.registry import ModelRegistry

    for name in getattr(config, "architectures", None) or ():
        entry = ModelRegistry.models.get(name)
        if entry is not None and not hasattr(entry, "model_cls"):
            ModelRegistry.register_model(name, entry.load_model_cls())


def _tear_down_groups() -> None:
    if _open == 0:
        from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        ensure_kv_transfer_shutdown()
        cleanup_dist_env_and_memory()


@contextlib.contextmanager
def _unnoticed() -> Iterator[None]:
    """Restores what starting vLLM changes in the process: environment, random state, threads, logging."""
    import numpy as np
    import torch

    before = dict(os.environ)
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    threads, set_threads = torch.get_num_threads(), torch.set_num_threads
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # The threads of the host program are not ours to pin.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    try:
        with _quiet():
            yield
    finally:
        for name in [n for n in os.environ if n not in before]:
            del os.environ[name]
        for name, value in before.items():
            if os.environ.get(name) != value:
                os.environ[name] = value
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        torch.set_num_threads = set_threads
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps vLLM's log at errors unless the user chose a level, and its deprecation warnings to itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        if "VLLM_LOGGING_LEVEL" in os.environ:
            yield
            return
        # vLLM reads the variable once, when it is first imported; before and after that its logger's level counts.
        os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
        logging.getLogger("vllm").setLevel(logging.ERROR)
        try:
            yield
        finally:
            os.environ.pop("VLLM_LOGGING_LEVEL", None)
            logging.getLogger("vllm").setLevel(logging.ERROR)
