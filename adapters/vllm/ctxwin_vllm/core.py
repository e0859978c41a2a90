"""One running vLLM and the state its engines share: checkpoint, driver, transport, inputs."""

from __future__ import annotations

import itertools
import json
import threading
import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from ctxwin.engines.forks import note_engine
from ctxwin.engines.outputs import outputs_identity
from ctxwin.engines.sampling import check_sampling
from ctxwin.engines.segments import check_states
from ctxwin.engines.vllm_support import on_a_processor, refused
from ctxwin.errors import EngineFailed, UnsupportedModel
from ctxwin.hashing import digest
from ctxwin.kv.config import kv_spec_from_config, with_maps
from ctxwin.kv.layout import KVSpec
from ctxwin.progress import step
from ctxwin_vllm import internals, requests
from ctxwin_vllm.draft_model import draft_model_spec
from ctxwin_vllm.drivers import Driver, LoopDriver, StepDriver
from ctxwin_vllm.inputs import Inputs, join
from ctxwin_vllm.lifecycle import folders, startup
from ctxwin_vllm.lora import Adapter, options_for
from ctxwin_vllm.paged import FP8
from ctxwin_vllm.prefix_record import PrefixRecord
from ctxwin_vllm.relocation import refusal
from ctxwin_vllm.stage_outputs import StageOutputs
from ctxwin_vllm.transport import PARAM, LocalTransport, SharedMemoryTransport, Transport
from ctxwin_vllm.vision import Vision, encode_media, remote

if TYPE_CHECKING:
    import asyncio

    from ctxwin.engines.encoding.checkpoint import Checkpoint
    from ctxwin.engines.sampling import Sampling
    from ctxwin.engines.segments import Encoded, Segment

_BLOCKS = 1 << 16  # where vLLM does not say how many it has
_prepared: weakref.WeakValueDictionary[str, SharedMemoryTransport] = weakref.WeakValueDictionary()

_DTYPES = {"auto": None, "half": "float16", "float": "float32"}  # further names that vLLM's --dtype takes


def read_model(
    model: str | Path, dtype: Any = "auto", cache: Any = "auto", position_free: bool = False, remote_code: bool = False
) -> tuple[Checkpoint, KVSpec]:
    """Return a checkpoint and the layout of its KV as vLLM serves it in one dtype. Weights are read only for their digest.

    KV of a quantised ``cache`` (vLLM's ``kv_cache_dtype``) counts as another model's KV: its name is part of the identity. So is
    whether a hybrid's maps are kept (``position_free``). ``remote_code``: as in `open_checkpoint`.

    Raises UnsupportedModel for a model whose config says that KV cannot be moved, ValueError for an unknown dtype.
    """
    from ctxwin.engines.encoding.checkpoint import open_checkpoint, read_config

    checkpoint = open_checkpoint(model, engine="vllm", remote_code=remote_code)
    config = read_config(checkpoint.path)  # the checkpoint's own may be a part of it
    if reason := refused(config):
        raise UnsupportedModel(f"{config.model_type!r} cannot be served on vLLM: {reason}; open it as hf:MODEL")
    name = checkpoint.dtype(_DTYPES.get(dtype, dtype), "bfloat16")
    cache = _cache_dtype(cache, config, checkpoint.path)
    rounded = f" in {'fp8_e4m3' if cache == 'fp8' else cache}" if cache in FP8 else ""
    kv = kv_spec_from_config(checkpoint.config, checkpoint.identity(name, f"vllm{rounded}"), name, "vllm")
    if kv.recurrent:
        kv = _of_hybrid(kv)
        kv = with_maps(kv, checkpoint.config) if position_free else kv
    return checkpoint, kv


def _read_model(model: str | Path, options: dict[str, Any]) -> tuple[Checkpoint, KVSpec, bool]:
    """Return `read_model` for the ``options`` of an engine, and whether it keeps outputs; drop those that vLLM does not have."""
    free, outputs = bool(options.pop("position_free", False)), bool(options.pop("outputs", False))
    cache, remote_code = options.get("kv_cache_dtype"), bool(options.get("trust_remote_code"))
    checkpoint, kv = read_model(model, options.pop("dtype", None) or "auto", cache, free, remote_code)
    return checkpoint, replace(kv, identity=outputs_identity(kv.identity, outputs)), outputs


def _cache_dtype(cache: Any, config: Any, folder: Path) -> Any:
    """Return the dtype that vLLM's cache has: a quantised checkpoint may name it where the option leaves it open."""
    from vllm.utils.torch_utils import get_kv_cache_quant_algo_string

    configs = [config, getattr(config, "text_config", None)]
    found = [getattr(c, name, None) for c in configs for name in ("quantization_config", "compression_config")]
    own = folder / "hf_quant_config.json"  # of ModelOpt before 0.31
    found += [{"quant_method": "modelopt", **json.loads(own.read_bytes())}] if own.exists() else []
    quantization: dict[str, Any] = next((one for one in found if isinstance(one, dict)), {})
    if cache not in (None, "auto") or not quantization:
        return cache
    named = get_kv_cache_quant_algo_string(quantization)
    return named or ("fp8" if quantization.get("kv_cache_scheme") else cache)


def _of_hybrid(kv: KVSpec) -> KVSpec:
    """Return a hybrid's layout as vLLM serves it here: CPUs and GPUs lay states out differently and share none."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and kv.dtype != "bfloat16":
        raise UnsupportedModel(
            f"vLLM's CPU kernels for recurrent layers take bfloat16 only, got {kv.dtype}; open it with dtype='bfloat16', "
            "or as hf:MODEL"
        )
    return replace(kv, identity=digest("states", current_platform.device_type, kv.identity))


def engine_arguments(model: str | Path, options: dict[str, Any]) -> dict[str, Any]:
    """Return ``options`` with the engine arguments that ctxwin needs, for vLLM.

    For programs that start vLLM themselves, a server for example, and then call ``VLLMEngine.attach`` in the same process.

    Raises:
        ValueError, UnsupportedModel: options that ctxwin cannot work with; the message says what to do.
    """
    if options.get("enable_lora"):
        raise ValueError("enable_lora must not be set under ctxwin, got True: plain requests would name adapters")
    options = dict(options)
    checkpoint, kv, outputs = _read_model(model, options)
    transport = SharedMemoryTransport(kv)
    transport.keeps_outputs = outputs
    try:
        arguments = startup.with_connector(str(checkpoint.path), {**options, "dtype": kv.dtype}, transport)
    except BaseException:
        transport.close()
        raise
    _prepared[transport.source] = transport
    _unattached.append(transport)
    return arguments


_unattached: list[SharedMemoryTransport] = []  # prepared, but not attached yet


class Core:
    """A running vLLM with a count of its engines; the last `release` ends what `start` began.

    Attributes:
        model: the path or hub name it was opened with.
        inputs: renders prompts and counts positions.
        encode_media: one run of the vision tower, or of the audio tower.
        vision: whether it sees images.
        max_tokens: tokens that a prompt and its answer may have.
        block_size: tokens of a block of its paged cache; has_prefix_cache: whether those stay; prefixes: which do.
        max_positions: how many positions the model can rotate to; a video's may run ahead of its tokens.
        whole_media: whether a prompt must not end in a picture, as where a picture's tokens see those behind them.
        on_gpu: whether it computes on GPUs.
        min_load: `RequestMeta.min_load` of exact KV: on a GPU a background load costs more than to compute less than a block.
        shortens: whether answers drop slots within one request; else each few tokens are a request.
        outputs: whether what forwards give for each token is kept beside its KV.
        draft_model: layout of the speculative draft model's KV, which spans hold beside their own; None where it keeps none.
    """

    def __init__(
        self, model: str | Path, checkpoint: Checkpoint, driver: Driver, transport: Transport, outputs: bool = False
    ) -> None:
        self.model, self.checkpoint = str(model), checkpoint
        self.driver, self.transport, self.kv = driver, transport, transport.kv
        cache = driver.config.cache_config
        self.block_size, self.has_prefix_cache = int(cache.block_size), bool(cache.enable_prefix_caching)
        self.prefixes = PrefixRecord(self.block_size, int(getattr(cache, "num_gpu_blocks", None) or _BLOCKS))
        driver.on_reset = self.prefixes.clear
        config = driver.config.model_config
        self.max_tokens = int(config.max_model_len)
        self.max_positions = max(
            self.max_tokens, int(getattr(checkpoint.text_config, "max_position_embeddings", 0) or 0)
        )
        self.outputs = outputs
        self.shortens = internals.shortens(driver.config)
        self.on_gpu = not on_a_processor()
        self.min_load = self.block_size if self.on_gpu else 0
        speculative, here = driver.config.speculative_config, None
        if isinstance(transport, LocalTransport):  # vLLM's worker-side connector is that of the process's first engine
            groups, compiled = internals.layer_groups(cast("StepDriver", driver).llm), driver.config.compilation_config
            transport.open_cache(compiled.static_forward_context, self.block_size, groups, speculative)
            here = transport.draft_model
        self.draft_model = draft_model_spec(speculative, self.kv) if here is None else here.kv
        if outputs and self.draft_model is not None:
            raise UnsupportedModel("outputs=True needs a vLLM whose drafter keeps no KV; leave out speculative_config")
        self._users = 0
        self._segments: set[str] = set()  # shared memory of processes that it started
        self._lock = threading.Lock()
        self.encode_media: Vision = self._encode_media_here
        if isinstance(transport, LocalTransport):
            worker = internals.worker_of(cast("StepDriver", driver).llm)
            model_here = worker.get_model()
            self.inputs = Inputs(config, driver.renderer, model_here)
            if self.inputs.takes_pixels_only or self.inputs.takes_audio:
                internals.pass_embeddings(model_here)
            transport.step = cast("StepDriver", driver).step
            if outputs:
                assert transport.paged is not None
                transport.outputs = StageOutputs(worker.model_runner, transport.paged)
            driver.between_steps = transport.read_ended
        elif isinstance(transport, SharedMemoryTransport):
            transport.alive = lambda: driver.dead is None
            if isinstance(driver, StepDriver) and driver.local:  # idle, it takes no step by itself
                transport.step = driver.step
            else:
                transport.step = lambda: driver.rpc("ctxwin_step")
            transport.capture_queries = cast("Any", partial(driver.rpc, "ctxwin_queries"))
            transport.remember_segments(folders.segments())
            parallel = driver.config.parallel_config
            transport.ranks = int(parallel.tensor_parallel_size) * int(parallel.pipeline_parallel_size)
            transport.stages = int(parallel.pipeline_parallel_size)
            transport.draft_model = self.draft_model
            if outputs:
                driver.rpc("ctxwin_outputs")
            self.inputs = Inputs(config, driver.renderer, internals.bare_model(config), files=True)
            self.encode_media = remote(driver.rpc, transport.path)
        whole = driver.config.scheduler_config.disable_chunked_mm_input or getattr(config, "is_mm_prefix_lm", False)
        self.whole_media = bool(whole) or self.inputs.marked
        self.vision = self.inputs.multimodal and checkpoint.media is not None
        if self.inputs.multimodal:
            internals.share_item_entry(driver.engine, self.inputs.prefix)

    @classmethod
    def start(
        cls, model: str | Path, processes: str | None, options: dict[str, Any], lora: Adapter | None = None
    ) -> Core:
        """See `VLLMEngine`; ``lora``: an adapter that has to be servable."""
        note_engine()
        options = dict(options)
        if options.get("enable_lora") and lora is None:
            raise ValueError("enable_lora must not be set under ctxwin, got True; name the adapter: lora=FOLDER")
        options |= {} if lora is None else {**options_for(lora), **options}
        checkpoint, kv, outputs = _read_model(model, options)
        if processes is None:
            processes = "multi" if startup.ranks(options) > 1 else "single"
        transport: Transport = LocalTransport(kv) if processes == "single" else SharedMemoryTransport(kv)
        driver, previous = None, folders.segments()
        try:
            options = {"dtype": kv.dtype, **options}
            driver = startup.start(str(checkpoint.path), transport, options, cast("Any", processes))
            step("reading how vLLM lays KV out")
            core = cls(model, checkpoint, driver, transport, outputs)
            core.check_relocation()
            core._segments = set() if driver.local else folders.segments() - previous
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
                "ctxwin_vllm.core.engine_arguments(model, options)"
            )
        if not transport.path.exists():
            raise ValueError("vLLM's last ctxwin engine was closed; start vLLM anew with new engine_arguments")
        if engine is llm and loop is None:
            raise ValueError("an AsyncLLM needs loop=, the running event loop that it was started on")
        dtype, cache = str(config.model_config.dtype), config.cache_config.cache_dtype
        checkpoint, kv = read_model(model, dtype, cache, transport.kv.maps, config.model_config.trust_remote_code)
        transport.kv = replace(kv, identity=outputs_identity(kv.identity, transport.keeps_outputs))
        driver: Driver = StepDriver(llm, lambda _: None) if engine is not llm else LoopDriver(llm, cast("Any", loop))
        try:
            core = cls(model, checkpoint, driver, transport, transport.keeps_outputs)
            core.check_relocation()
        except BaseException:
            driver.close()
            raise
        _unattached[:] = [t for t in _unattached if t is not transport]
        return core

    def retain(self) -> None:
        """Add one engine. Raises EngineFailed once the last is released."""
        with self._lock:
            if self._users < 0:
                raise EngineFailed("the engine is closed; open a new one")
            self._users += 1

    def release(self) -> None:
        """Release one engine; the last one ends what `start` began. A forked process leaves that to its parent."""
        if self.driver.inherited:
            return
        with self._lock:
            self._users -= 1
            if self._users:
                return
            self._users = -1
        try:
            self.driver.close()
        finally:
            folders.remove_segments(self._segments)
            self.inputs.close()
            self.transport.close()

    def check(self, layout: Sequence[Segment], tail: Sequence[Encoded], sampling: Sampling) -> int:
        """Validate a request before it is submitted; return the position that its first token is shifted by.

        Positions within a prompt are vLLM's, so the segments must stand where vLLM puts them. Only the whole prompt may
        be shifted: attention sees differences of positions. ``tail`` is the query, where there is one.

        Raises:
            ValueError, EngineFailed, UnsupportedModel: a request that vLLM would answer wrongly, or that would end it.
        """
        check_sampling(sampling, self.checkpoint.text_config.vocab_size)
        requests.check(self.driver, sampling)
        if self.kv.recurrent:
            check_states(self.model, layout, self.kv.maps)
        at = base = layout[0].start if layout else 0
        for i, segment in enumerate(layout):
            span, encoded = segment.span, segment.encoded
            if segment.start != at:
                raise ValueError(f"segment {i} must start at position {at}, behind the last one, got {segment.start}")
            at += encoded.advance
            if span is None:
                continue
            segment.parts()  # raises for ranges that are none
            span.validate(self.kv)
            if span.tokens != segment.slots or span.tokens > encoded.tokens:
                raise ValueError(f"the span of segment {i} must have {encoded.tokens} tokens, got {span.tokens}")
            if not np.array_equal(span.positions.numpy(), segment.places):
                raise ValueError(
                    f"the span of segment {i} must have the positions of its tokens; it is of another chunk"
                )
        parts = [*(segment.encoded for segment in layout), *tail]
        ids, media = join(parts)
        most = self.max_tokens - sampling.max_tokens
        if not 0 < len(ids) <= most:
            raise EngineFailed(
                f"the prompt must have 1 to {most} tokens (the model takes {self.max_tokens}, {sampling.max_tokens} of them for "
                f"the answer), got {len(ids)}"
            )
        starts = [0, *itertools.accumulate(part.advance for part in parts)]
        positions = np.concatenate([part.positions + start for part, start in zip(parts, starts, strict=False)], axis=1)
        last, limit = max(starts[-1] - 1, int(positions.max())) + sampling.max_tokens, self.max_positions
        if int(positions.min()) < 0 or last >= limit:  # beyond its table of angles vLLM would end for everybody
            raise EngineFailed(
                f"positions must be in [0, {limit}), the answer's included, got up to {last}; drop chunks, or give videos "
                "a rate and a length that the model was made for"
            )
        if not np.array_equal(positions, self.inputs.positions(ids, media)[0]):
            raise UnsupportedModel(
                f"{self.model} places a chunk by what precedes it; no KV of chunks fits another place"
            )
        return base

    def check_relocation(self) -> None:
        """Raise UnsupportedModel where keys do not rotate as the config says, as measured by every worker."""
        driver, transport = self.driver, self.transport
        if isinstance(driver, StepDriver) and isinstance(transport, LocalTransport):
            paged = transport.paged
            assert paged is not None
            draft_model, draft_kv = internals.draft_model_of(internals.worker_of(driver.llm)), transport.draft_model
            reasons = [driver.call(lambda: refusal(self.inputs.model, driver.config, paged, {}, draft_model, draft_kv))]
        else:
            reasons = driver.rpc("ctxwin_relocation")
        for reason in filter(None, reasons):
            raise UnsupportedModel(f"{self.model} cannot be served: {reason}")

    def _encode_media_here(self, inputs: torch.Tensor, grids: torch.Tensor, *, audio: bool = False) -> torch.Tensor:
        driver = cast("StepDriver", self.driver)
        model, config = self.inputs.model, driver.config.model_config.hf_config
        return driver.call(lambda: encode_media(model, config, inputs, grids, audio=audio))
