"""Starting and stopping vLLM with the ctxwin connector: in this process, or in processes of its own.

vLLM is made for processes of its own: starting it seeds the global random generators, replaces ``torch.set_num_threads``,
reads its settings from environment variables and logs a screenful. Here everything that a host program would notice is
restored, and several engines can be open at once although vLLM keeps its process groups in globals.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import multiprocessing
import os
import random
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch

from ctxwin.engines import vllm_support as versions
from ctxwin.engines.encoding.checkpoint import read_config
from ctxwin.errors import EngineFailed, UnsupportedModel
from ctxwin.progress import step
from ctxwin_vllm import internals
from ctxwin_vllm.drivers import Driver, LoopDriver, StepDriver, in_turn
from ctxwin_vllm.lifecycle import watchdog
from ctxwin_vllm.refusals import CONNECTOR, ONE
from ctxwin_vllm.transitions import check_version
from ctxwin_vllm.transport import PARAM, SharedMemoryTransport, Transport

Processes = Literal["single", "multi", "async"]
"""``single``: all of vLLM in this process. ``multi``: ``vllm.LLM`` with engine and workers in processes of their own.
``async``: ``AsyncLLM``, the engine of vLLM's server, likewise in processes of its own."""
CPU_KV_BYTES = 1 << 30
"""Default paged cache on a CPU, or what one request of full length takes where that is more; vLLM's own default there is most
of the machine's memory."""

_FIXED: dict[str, Any] = {
    "enable_mm_embeds": True,
    "enable_prefix_caching": True,
    "max_logprobs": -1,
    "scheduling_policy": "priority",  # work that nobody waits for comes last
    "mm_device_do_normalize": False,  # pixels come normalised from the model's own processor
}
_MAIN_GUARD = "open it under `if __name__ == '__main__':`, as the processes that it starts import this script"
_log = logging.getLogger("ctxwin.engines")
_lock = threading.Lock()
_open = 0


def start(
    model: str, transport: Transport, options: dict[str, Any], processes: Processes = "single", connector: bool = True
) -> Driver:
    """Start vLLM with the ctxwin connector and return its driver.

    Args:
        model: path or hub name.
        transport: where the connector finds its transfers; a `SharedMemoryTransport` unless ``processes`` is "single".
        options: engine arguments of vLLM (those of ``vllm.LLM``); refused where they contradict what ctxwin depends on.
        processes: see `Processes`.
        connector: False starts the same vLLM without it, to compare with.

    Raises:
        ValueError: an option that cannot be changed. UnsupportedModel: a kind of parallelism that spans cannot follow.
        EngineFailed: vLLM does not start; the cause is chained. Cost: loading the model, 3-30 s, in which other engines
        in this process stand still; with processes of its own 10-30 s more.
    """
    if processes not in get_args(Processes):
        raise ValueError(f"processes must be one of {', '.join(get_args(Processes))}, got {processes!r}")
    if processes == "single" and ranks(options) != 1:
        raise ValueError("tensor_parallel_size, pipeline_parallel_size need processes='multi' or 'async', got 'single'")
    if processes != "single" and getattr(multiprocessing.current_process(), "_inheriting", False):
        raise EngineFailed(f"vLLM could not open {model!r} while a process imports its script: {_MAIN_GUARD}")
    versions.check(options.get("allow_untested_vllm"))
    with _lock, in_turn() if processes == "single" else contextlib.nullcontext(), _unnoticed(processes, options):
        from vllm import envs
        from vllm.config import StructuredOutputsConfig

        arguments = {
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
            "skip_mm_profiling": True,  # the tower never runs inside a window's request
            "structured_outputs_config": StructuredOutputsConfig(backend="guidance"),  # enforces the most
            **with_connector(model, options, transport),
        }
        if not connector:
            for name in ("kv_transfer_config", "ec_transfer_config", "worker_extension_cls"):
                arguments.pop(name, None)
        internals.import_model_classes(read_config(model).architectures)
        envs.disable_envs_cache()  # vLLM keeps the settings of the first engine of a process, which may be of another kind
        step("vLLM loads weights and makes room for KV")
        try:
            return _in_thread(model, arguments) if processes == "async" else _stepped(model, arguments)
        except Exception as error:
            if processes == "single" and not _open:
                internals.tear_down_groups()
            if isinstance(error, TypeError) and "unexpected keyword argument" in str(error):
                raise ValueError(f"options of the vLLM engine must be engine arguments of vLLM: {error}") from error
            if isinstance(error, UnsupportedModel):
                raise
            refusal = transport.refusal if isinstance(transport, SharedMemoryTransport) else None
            if refusal is not None:
                raise UnsupportedModel(refusal) from error
            remedy = f"; {_MAIN_GUARD}" if processes != "single" and _lacks_main_guard() else ""
            raise EngineFailed(f"vLLM could not open {model!r}: {error}{remedy}") from error


def _lacks_main_guard() -> bool:
    """Return True if the program is a script that never asks for ``__main__``, so that importing it runs all of it."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    try:
        return script is not None and "__main__" not in Path(script).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return False


def ranks(options: dict[str, Any]) -> int:
    """Return the number of workers that vLLM starts for one engine."""
    return int(options.get("tensor_parallel_size", 1)) * int(options.get("pipeline_parallel_size", 1))


def with_connector(model: str, options: dict[str, Any], transport: Transport) -> dict[str, Any]:
    """See `core.engine_arguments`; ``transport`` is where the connector finds its transfers."""
    internals.let_numba_be_scanned()  # Kimi's model imports it
    from vllm.platforms import current_platform

    options = dict(options)
    versions.check(options.pop("allow_untested_vllm", None))
    arguments = _arguments(transport, options)
    if current_platform.is_cpu():
        kv = transport.kv
        if kv.family == "mla":
            # The other one, which vLLM prefers where the processor has AMX, takes no float32.
            arguments.setdefault("attention_backend", "CPU_MLA")
            _correct_rotation(arguments)  # the size of its blocks is the platform's choice
        else:
            arguments.setdefault("block_size", 32)  # the smallest for CPU kernels: less to load after a prefix hit
        arguments.setdefault("enforce_eager", True)  # compiling costs more than a CPU window wins back
        if "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
            text = read_config(model).get_text_config()
            longest = arguments.get("max_model_len") or text.max_position_embeddings
            room = int(longest) + 2 * arguments.get("block_size", 128)
            whole = kv.span_bytes(room, 4 if kv.dtype == "float32" else 2)
            arguments.setdefault("kv_cache_memory_bytes", max(CPU_KV_BYTES, whole))
    return arguments


def _stepped(model: str, arguments: dict[str, Any]) -> StepDriver:
    global _open
    from vllm import LLM

    with watchdog.starting():
        llm = LLM(model, **arguments)
    if internals.in_process(llm.llm_engine):
        _open += 1
    return StepDriver(llm, stop)


def _in_thread(model: str, arguments: dict[str, Any]) -> LoopDriver:
    """Start an ``AsyncLLM`` on an event loop of its own."""
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="ctxwin-vllm", daemon=True)
    thread.start()

    def stop_loop() -> None:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()

    async def make() -> Any:
        with watchdog.starting():
            return AsyncLLM.from_engine_args(AsyncEngineArgs(model=model, **arguments))

    try:
        llm: Any = asyncio.run_coroutine_threadsafe(make(), loop).result()
    except BaseException:
        stop_loop()
        raise

    running = [llm]

    async def shut_down() -> None:
        running.pop().shutdown()
        await asyncio.sleep(0)  # what was cancelled ends before its loop does

    def stop_all() -> None:
        with _lock, _quiet():
            asyncio.run_coroutine_threadsafe(shut_down(), loop).result()
            stop_loop()
            gc.collect()  # vLLM cleans up once more with the last reference, which must not be at the interpreter's end

    return LoopDriver(llm, loop, stop_all)


def stop(llm: Any) -> None:
    """Shuts a ``vllm.LLM`` down; the last one of this process also takes vLLM's process groups with it."""
    global _open
    with _lock, _quiet():
        engine = llm.llm_engine
        engine.renderer.shutdown()
        if not internals.in_process(engine):
            engine.engine_core.shutdown()
            return
        with in_turn():
            _open -= 1
            if _open == 0:
                engine.engine_core.shutdown()
            else:
                internals.release_core(engine)
            gc.collect()


def _arguments(transport: Transport, options: dict[str, Any]) -> dict[str, Any]:
    for name, reason in ONE.items():
        if options.get(name, 1) != 1:
            raise UnsupportedModel(
                f"{name} must be 1, got {options[name]!r}: {reason}; use tensor_parallel_size, or serve from several replicas"
            )
    fixed = dict(_FIXED)
    if transport.kv.recurrent:  # see `refusals`
        fixed |= {"enable_prefix_caching": False, "async_scheduling": False}
        if transport.kv.maps:
            check_version()
            fixed["enforce_eager"] = True  # a recorded graph skips the hooks on its layers
    else:
        fixed["disable_hybrid_kv_cache_manager"] = True  # or it would drop what left a sliding window
    connector = {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": "ctxwin_vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {PARAM: transport.source, "lora": bool(options.get("enable_lora"))},
    }
    connectors = {"kv_transfer_config": connector}
    if isinstance(transport, SharedMemoryTransport):
        fixed["worker_extension_cls"] = "ctxwin_vllm.vision.WorkerExtension"
        connectors["ec_transfer_config"] = {
            "ec_connector": "EncoderCacheConnector",
            "ec_connector_module_path": "ctxwin_vllm.connector.encoder_cache",
            "ec_role": "ec_consumer",  # a producer encodes an item of the largest size at start-up, and must have a tower
            "ec_connector_extra_config": {"folder": str(transport.embeddings), "identity": transport.kv.identity},
        }
    for name, value in fixed.items():
        if options.get(name) not in (None, "", value):
            raise ValueError(f"{name} must be {value!r} under ctxwin, got {options[name]!r}; leave it out")
    for name in (*connectors, "kv_offloading_size"):
        if options.get(name):
            raise ValueError(f"{name} must not be set under ctxwin, got {options[name]!r}; leave it out")
    return {"seed": 0, **options, **fixed, **connectors}


def _correct_rotation(arguments: dict[str, Any]) -> None:
    """Make torch compute rotary embeddings: vLLM 0.32's CPU kernel misreads the strided view that MLA passes."""
    compilation = arguments.get("compilation_config") or {}
    if not isinstance(compilation, dict):
        got = type(compilation).__name__
        raise ValueError(f"compilation_config must be a dict for a model with latent attention on a CPU, got {got}")
    ops = list(compilation.get("custom_ops", ()))
    if "+rotary_embedding" in ops:
        raise ValueError("custom_ops must not switch on rotary_embedding for a model with latent attention on a CPU")
    arguments["compilation_config"] = {**compilation, "custom_ops": [*ops, "-rotary_embedding"]}


def eager_on_cpu(options: dict[str, Any]) -> bool:
    """Return True if vLLM will compile nothing: there is no GPU, and the options do not ask for it."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu()) and bool(options.get("enforce_eager", True))


@contextlib.contextmanager
def _unnoticed(processes: Processes, options: dict[str, Any]) -> Iterator[None]:
    """Restore what starting vLLM changes in the process: environment, random state, threads, logging."""
    environment = dict(os.environ)
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    threads, set_threads = torch.get_num_threads(), torch.set_num_threads
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if processes == "single" else "1"
    if processes != "single" and eager_on_cpu(options):
        # As `StepDriver` does in this process: vLLM's few compiled sampling functions would take 5-17 s.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # the host program's threads are not ours to pin
    try:
        with _quiet():
            yield
    finally:
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        torch.set_num_threads = set_threads
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep vLLM's log at errors unless the user chose a level, and silences its deprecation warnings."""
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
