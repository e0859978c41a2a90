"""One running vLLM and what its engines share: checkpoint, driver, transport, inputs."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ctxwin.engines.vllm.drivers import Driver, LoopDriver, StepDriver
from ctxwin.engines.vllm.inputs import Inputs
from ctxwin.engines.vllm.internals import bare_model, worker_model
from ctxwin.engines.vllm.lifecycle import cleanup, startup
from ctxwin.engines.vllm.paged import PagedKV
from ctxwin.engines.vllm.relocation import refusal
from ctxwin.engines.vllm.transport import PARAM, LocalTransport, SharedMemoryTransport, Transport
from ctxwin.engines.vllm.vision import remote, see
from ctxwin.errors import EngineFailed, UnsupportedModel

if TYPE_CHECKING:
    import asyncio

    import torch

    from ctxwin.engines.encoding.checkpoint import Checkpoint
    from ctxwin.kv.layout import KVSpec

VISION_MODELS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "internvl")
REFUSED = {"kimi_k25": "vLLM 0.32 does not know transformers' class of it"}
"""Why families of the transformers engine are not served here."""
_DTYPES = ("bfloat16", "float16", "float32")
_prepared: weakref.WeakValueDictionary[str, SharedMemoryTransport] = weakref.WeakValueDictionary()


@dataclass(frozen=True)
class Served:
    """A checkpoint as vLLM serves it in one dtype."""

    checkpoint: Checkpoint
    dtype: str
    identity: str
    kv: KVSpec


def read_model(model: str | Path, dtype: Any = "auto") -> Served:
    """Raises UnsupportedModel for a model whose KV cannot be moved, ValueError for an unknown dtype. Reads no weights."""
    from ctxwin.engines.encoding.checkpoint import open_checkpoint
    from ctxwin.kv.config import kv_spec_from_config

    checkpoint = open_checkpoint(model)
    kind = str(checkpoint.config.model_type)
    if checkpoint.media is not None and kind not in VISION_MODELS:
        reason = f" ({REFUSED[kind]})" if kind in REFUSED else ""
        raise UnsupportedModel(
            f"a vision model on vLLM must be one of {', '.join(VISION_MODELS)}, got {kind!r}{reason}; "
            "open it as hf:MODEL"
        )
    name = _dtype(dtype, checkpoint.config)
    identity = checkpoint.identity(name, "vllm")
    return Served(checkpoint, name, identity, kv_spec_from_config(checkpoint.config, identity, name, "vllm"))


def engine_arguments(model: str | Path, options: dict[str, Any]) -> dict[str, Any]:
    """``options`` and what ctxwin needs beside them, as engine arguments of vLLM.

    For whoever starts vLLM himself, a server for example, and then calls ``VLLMEngine.attach`` in the same process.

    Raises:
        ValueError, UnsupportedModel: options that ctxwin cannot work with; the message says what to do.
    """
    served = read_model(model, options.get("dtype") or "auto")
    transport = SharedMemoryTransport(served.kv)
    try:
        given = {**options, "dtype": served.dtype}
        arguments = startup.with_connector(str(served.checkpoint.path), given, transport)
    except BaseException:
        transport.close()
        raise
    _prepared[transport.source] = transport
    _kept.append(transport)
    return arguments


_kept: list[SharedMemoryTransport] = []  # prepared, but not attached yet


class Core:
    """A running vLLM, counted by its engines; the last `release` ends what `start` began.

    Attributes:
        model: the path or hub name it was opened with.
        inputs: renders prompts, counts positions, runs the tower.
        vision: whether it sees images.
        block: tokens of a block of its paged cache.
        positions: how many positions the model can rotate to; a video's may run ahead of its tokens.
    """

    def __init__(self, model: str | Path, served: Served, driver: Driver, transport: Transport) -> None:
        self.model = str(model)
        self.checkpoint, self.identity, self.kv = served.checkpoint, served.identity, served.kv
        self.driver = driver
        self.transport = transport
        self.block = int(driver.config.cache_config.block_size)
        text = self.checkpoint.config.get_text_config()
        longest = int(driver.config.model_config.max_model_len)
        self.positions = max(longest, int(getattr(text, "max_position_embeddings", 0) or 0))
        self._users = 0
        self._segments: set[str] = set()  # shared memory of processes that it started
        self._lock = threading.Lock()
        config = driver.config.model_config
        if isinstance(transport, LocalTransport):
            model_here = worker_model(cast("StepDriver", driver).llm)
            self.inputs = Inputs(config, driver.renderer, model_here, self._see_here)
            layers = driver.config.compilation_config.static_forward_context
            transport.paged = PagedKV(layers, self.kv, driver.config.cache_config.block_size, alone=True)
        elif isinstance(transport, SharedMemoryTransport):
            transport.alive = lambda: driver.dead is None
            transport.remember_segments(cleanup.segments())
            transport.ranks = int(driver.config.parallel_config.tensor_parallel_size)
            self.inputs = Inputs(
                config, driver.renderer, bare_model(config), remote(driver.rpc, transport.path), files=True
            )
        self.vision = self.inputs.multimodal and self.checkpoint.media is not None

    @classmethod
    def start(cls, model: str | Path, processes: str | None, options: dict[str, Any], connector: bool = True) -> Core:
        """See `VLLMEngine`; ``connector``: as for `startup.start`."""
        options = dict(options)
        served = read_model(model, options.pop("dtype", "auto"))
        if processes is None:
            processes = "multi" if options.get("tensor_parallel_size", 1) > 1 else "single"
        transport: Transport
        transport = LocalTransport(served.kv) if processes == "single" else SharedMemoryTransport(served.kv)
        driver, before = None, cleanup.segments()
        try:
            given = {"dtype": served.dtype, **options}
            driver = startup.start(str(served.checkpoint.path), transport, given, cast("Any", processes), connector)
            core = cls(model, served, driver, transport)
            if connector:
                core.check_relocation()
            core._segments = set() if driver.local else cleanup.segments() - before
            return core
        except BaseException:
            if driver is not None:
                driver.close()
            transport.close()
            raise

    @classmethod
    def attach(cls, llm: Any, model: str | Path, loop: asyncio.AbstractEventLoop | None) -> Core:
        """See `VLLMEngine.attach`."""
        engine = getattr(llm, "llm_engine", llm)
        config = engine.vllm_config
        extra = getattr(config.kv_transfer_config, "kv_connector_extra_config", None) or {}
        transport = _prepared.get(str(extra.get(PARAM, "")))
        if transport is None:
            raise ValueError(
                "vLLM must have been started in this process with the arguments of "
                "ctxwin.engines.vllm.core.engine_arguments(model, options)"
            )
        if not transport.path.exists():
            raise ValueError("vLLM's last ctxwin engine was closed; start vLLM anew with new engine_arguments")
        if engine is llm and loop is None:
            raise ValueError("an AsyncLLM needs loop=, the running event loop that it was started on")
        served = read_model(model, str(config.model_config.dtype))
        driver: Driver
        driver = StepDriver(llm, lambda _: None) if engine is not llm else LoopDriver(llm, cast("Any", loop))
        try:
            core = cls(model, served, driver, transport)
            core.check_relocation()
        except BaseException:
            driver.close()
            raise
        _kept[:] = [t for t in _kept if t is not transport]
        return core

    def retain(self) -> None:
        with self._lock:
            if self._users < 0:
                raise EngineFailed("the engine is closed; open a new one")
            self._users += 1

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users:
                return
            self._users = -1
        try:
            self.driver.close()
        finally:
            cleanup.remove(self._segments)
            self.inputs.close()
            self.transport.close()

    def check_relocation(self) -> None:
        """Raises UnsupportedModel where keys do not turn as the config says, as measured by every worker."""
        driver, transport = self.driver, self.transport
        if isinstance(driver, StepDriver) and isinstance(transport, LocalTransport):
            paged = transport.paged
            assert paged is not None
            found = [driver.call(lambda: refusal(self.inputs.model, driver.config, paged))]
        else:
            found = driver.rpc("ctxwin_relocation")
        for said in filter(None, found):
            raise UnsupportedModel(f"{self.model} cannot be served: {said}")

    def _see_here(self, pixels: torch.Tensor, grids: torch.Tensor) -> torch.Tensor:
        driver = self.driver
        assert isinstance(driver, StepDriver)
        return driver.call(lambda: see(self.inputs.model, driver.config.model_config.hf_config, pixels, grids))


def _dtype(wanted: Any, config: Any) -> str:
    """The name of the dtype to serve in: what was asked for, else the checkpoint's."""
    name = str(wanted).removeprefix("torch.")
    if name == "auto":
        own = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
        name = str(own or "bfloat16").removeprefix("torch.")
    if name not in _DTYPES:
        raise ValueError(f"dtype must be auto, {', '.join(_DTYPES)}, got {wanted!r}")
    return name
