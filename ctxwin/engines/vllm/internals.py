"""Everything that ctxwin touches of vLLM beyond its official interfaces, in one place.

Official are the connector classes (KV and encoder cache), ``kv_transfer_params``, ``worker_extension_cls``, ``LLM`` and
``AsyncLLM``, the renderer's engine inputs and the models' ``get_mrope_input_positions``. What is here, the attributes of
attention layers that `paged` reads (``kv_cache``, ``kv_cache_dtype``, ``impl.do_kv_cache_update``,
``compilation_config.static_forward_context``) and the forward that `relocation` runs (``set_forward_context``, the layers'
``forward``) and what `transitions` hears of recurrent layers may change with any minor version of vLLM: when `CHECKED` gets
another one, read each of them in that version first. The tests of the versions named there run all of it.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from concurrent.futures import InvalidStateError
from typing import Any

import torch

from ctxwin.engines.vllm.lifecycle.versions import TESTED
from ctxwin.kv.config import thinker

CHECKED = TESTED
"""The minor versions of vLLM on which every function here was read and run."""


def in_process(engine: Any) -> bool:
    """Whether an ``LLMEngine`` runs its core in this process: its client then has the core itself."""
    return hasattr(engine.engine_core, "engine_core")


def worker_model(llm: Any) -> Any:
    """The model of an ``LLM`` that runs in this process, which vLLM reaches through its worker only."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.get_model()


def worker_drafter(llm: Any) -> Any:
    """As `drafter_of`, of an ``LLM`` that runs in this process."""
    return drafter_of(llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker)


def drafter_of(worker: Any) -> Any:
    """What proposes drafts in a worker, of either model runner; where it is a model it has ``model`` and ``hidden_size``."""
    runner = worker.model_runner
    return getattr(runner, "drafter", None) or getattr(runner, "speculator", None)


def layer_groups(llm: Any) -> list[list[str]]:
    """The layers of an ``LLM`` that runs in this process, by name, in groups that share a block table."""
    config = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config
    return [list(group.layer_names) for group in config.kv_cache_groups]


def release_core(engine: Any) -> None:
    """Shuts down what belongs to one in-process engine alone.

    ``EngineCore.shutdown`` would also destroy the process groups and the worker-side connector, which the other engines of
    this process share.
    """
    engine.engine_core._finalizer.detach()
    core = engine.engine_core.engine_core
    core.structured_output_manager.clear_backend()
    core.scheduler.shutdown()
    core.model_executor.driver_worker.worker.model_runner.shutdown()
    gc.unfreeze()


def tear_down_groups() -> None:
    """Destroys the process groups that a failed start has left behind."""
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    ensure_kv_transfer_shutdown()
    cleanup_dist_env_and_memory()


def core_died(engine: Any) -> bool:
    """Whether the process of an ``LLM``'s engine has ended."""
    return bool(engine.engine_core.resources.engine_dead)


def unfinished(llm: Any) -> int:
    """Requests under way in an ``AsyncLLM``, whoever sent them."""
    return int(llm.output_processor.get_num_unfinished_requests())


def wake_waiting(engine: Any, error: Exception) -> None:
    """Gives ``error`` to all who wait for an engine that died: vLLM notices its death, but leaves them waiting."""
    client = engine.engine_core
    for future in list(client.utility_results.values()):
        with contextlib.suppress(InvalidStateError):
            future.set_exception(error)
    client.outputs_queue.put_nowait(error)


def tensor_parallel() -> tuple[int, int]:
    """Rank and size of this worker's tensor-parallel group."""
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

    return get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()


def pipeline() -> tuple[int, int]:
    """Rank and size of this worker's pipeline."""
    from vllm.distributed.parallel_state import get_pp_group

    return get_pp_group().rank_in_group, get_pp_group().world_size


def stage_layers(layers: int, stage: int, stages: int) -> range:
    """The decoder layers of one stage of a pipeline, as vLLM deals them out."""
    from vllm.distributed.utils import get_pp_indices

    return range(*get_pp_indices(layers, stage, stages))


def handed_on(runner: Any, tokens: int) -> dict[str, Any]:
    """What a stage of a pipeline computes ``tokens`` tokens from, as arguments of its model: nothing for the first.

    Where vLLM makes no trial run (on a CPU, uncompiled) its runner lacks the room into which the stage before hands on, and
    would end with the first request; it is made here.
    """
    if pipeline()[0] == 0:
        return {}
    if getattr(runner, "intermediate_tensors", False) is None:
        room = {"batch_size": runner.max_num_tokens, "dtype": runner.model_config.dtype, "device": runner.device}
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(**room)
    config = runner.model_config
    made = runner.model.make_empty_intermediate_tensors(batch_size=tokens, dtype=config.dtype, device=runner.device)
    for name, tensor in made.tensors.items():
        noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(len(name)))
        tensor.copy_(noise)
    return {"intermediate_tensors": made}


def use_no_adapter(model: Any, tokens: int) -> None:
    """Has the layers of a model that takes LoRA adapters compute the next ``tokens`` tokens without one.

    vLLM tells them so before each of its own forwards.
    """
    from vllm.lora.layers import LoRAMapping

    model.lora_manager.set_adapter_mapping(LoRAMapping((0,) * tokens, (0,), is_prefill=True))


def import_model_classes(architectures: Any) -> None:
    """Imports models' classes here, so that vLLM does not start a Python process just to look at them.

    That process costs seconds, and would need any repair of the environment that this one has had.
    """
    from vllm.model_executor.models.registry import ModelRegistry

    for name in architectures or ():
        entry = ModelRegistry.models.get(name)
        if entry is not None and not hasattr(entry, "model_cls"):
            ModelRegistry.register_model(name, entry.load_model_cls())


def let_numba_be_scanned() -> None:
    """Keeps vLLM's start on a CPU from falling over numba, which search in libraries imports, and many a host program.

    As it registers its kernels it calls ``vars(value).get`` on whatever any module holds. llvmlite's library answers every
    name, ``__dict__`` as well, with a wrapped C function, which has no ``get``; from here on it answers that name with a dict.
    """
    ffi = sys.modules.get("llvmlite.binding.ffi")
    functions = getattr(getattr(ffi, "lib", None), "_fntab", None)
    if isinstance(functions, dict):
        functions["__dict__"] = {}


_RUNNERS = ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.attn_utils")
_JOIN = "add_kv_sharing_layers_to_kv_cache_groups"


def name_readers() -> None:
    """Has vLLM know the cache layout of layers that read another layer's cache, where layers differ in their shapes.

    A runner puts such layers into the group of the layer that they read. Where the layers of a group have specs of their own it
    then finds none for them; from here on they have that layer's, in this process.
    """
    for runner in map(sys.modules.get, _RUNNERS):
        own = getattr(runner, _JOIN, None)
        if own is not None and not hasattr(own, "names_readers"):
            setattr(runner, _JOIN, _naming(own))


def _naming(own: Any) -> Any:
    def add(shared: Any, groups: Any, *rest: Any) -> None:
        own(shared, groups, *rest)
        for specs in (getattr(group.kv_cache_spec, "kv_cache_specs", {}) for group in groups):
            specs.update({name: specs[target] for name, target in shared.items() if target in specs})

    add.names_readers = True  # type: ignore[attr-defined]
    return add


def bare_model(config: Any) -> Any:
    """The model's class with its config and nothing else: enough to count positions where the model itself is in
    another process."""
    from torch import nn
    from vllm.model_executor.model_loader.utils import get_model_cls

    kind = get_model_cls(config)
    model = kind.__new__(kind)
    nn.Module.__init__(model)
    model.config = thinker(config.hf_config)
    model.model_config = config
    pair_sound(kind)
    return model


def pair_sound(kind: Any) -> None:
    """Has a class of models find the sound of a video in a prompt by where it stands; others it leaves as they are.

    vLLM takes the first sound for that of the first video with one, also where it is one of its own in front of the video.
    """
    if not hasattr(kind, "_get_audio_for_video_mapping"):
        return

    def paired(self: Any, features: list[Any]) -> tuple[dict[int, int], set[int]]:
        lengths: dict[int, int] = {}
        taken: set[int] = set()
        sounds = {f.mm_position.offset: f.data for f in features if f.modality == "audio"}
        for feature in features:
            told = feature.data.get("use_audio_in_video") if feature.modality == "video" else None
            if told is not None and bool(told.data):
                at = feature.mm_position.offset
                own = min(offset for offset in sounds if offset >= at)
                lengths[at] = int(sounds[own]["audio_feature_lengths"].data)
                taken.add(own)
        return lengths, taken

    kind._get_audio_for_video_mapping = paired


def media_items(processor: Any, data: dict[str, torch.Tensor]) -> Any:
    """Media fields as vLLM's own multimodal processor of the model would lay them out."""
    from transformers import BatchFeature
    from vllm.multimodal.inputs import MultiModalKwargsItems

    batch = BatchFeature(data)
    return MultiModalKwargsItems.from_hf_inputs(batch, processor._get_mm_fields_config(batch, {}))


_GIVEN = "ctxwin_embeddings"


def given_item(modality: str, embeddings: torch.Tensor | None, **told: torch.Tensor) -> Any:
    """One media item that is its own embeddings ``[tokens, width]``, for a model that `hand_on` was called for.

    Args:
        modality: of the item.
        embeddings: None only where they come by the encoder cache.
        told: fields from which the positions of its tokens follow, ``[1, ...]`` each.
    """
    from transformers import BatchFeature
    from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems

    fields = {name: MultiModalFieldConfig.batched(modality, keep_on_cpu=True) for name in told}
    fields[_GIVEN] = MultiModalFieldConfig.batched(modality)
    held = told if embeddings is None else {**told, _GIVEN: embeddings[None]}
    return MultiModalKwargsItems.from_hf_inputs(BatchFeature(held), fields)[modality][0]


def hand_on(model: Any) -> None:
    """Has a model hand on the embeddings of a `given_item`; what has pixels it embeds itself, as ever."""
    own = model.embed_multimodal

    def embed(**fields: Any) -> Any:
        given = fields.pop(_GIVEN, None)
        return own(**fields) if given is None else list(given)

    model.embed_multimodal = embed
