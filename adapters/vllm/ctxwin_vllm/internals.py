"""All uses of vLLM beyond its official interfaces, in one place.

Official are the connector classes (KV and encoder cache), ``kv_transfer_params``, ``worker_extension_cls``, ``LLM`` and
``AsyncLLM``, the renderer's engine inputs and the models' ``get_mrope_input_positions``. What is here, the attributes of
attention layers that `paged` reads (``kv_cache``, ``kv_cache_dtype``, ``impl.do_kv_cache_update``,
``compilation_config.static_forward_context``) and the forward that `relocation` runs (``set_forward_context``, the layers'
``forward``) and the rules of recurrent layers that `transitions` hooks may change with any minor version of vLLM: when `CHECKED`
gets another one, read each of them in that version first. The tests of the versions named there run all of it.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from bisect import bisect_left
from collections.abc import Callable
from concurrent.futures import InvalidStateError
from functools import cache, partial
from typing import Any

import torch

from ctxwin.engines.vllm_support import TESTED
from ctxwin.kv.config import text_backbone

CHECKED = TESTED  # the minor versions of vLLM on which every function here was read and run


def in_process(engine: Any) -> bool:
    """Return True if an ``LLMEngine`` runs its core in this process: its client then has the core itself."""
    return hasattr(engine.engine_core, "engine_core")


def steps_ahead(engine: Any) -> int:
    """Return how many steps of an ``LLMEngine`` in this process run whose outputs vLLM has not read yet."""
    core = getattr(engine.engine_core, "engine_core", None)
    return len(getattr(core, "batch_queue", None) or ())


async def abort_all(client: Any) -> None:
    """Abort every request of an ``AsyncLLM``; its caller gets a last output."""
    await client.abort(list(client.output_processor.request_states), internal=True)


def stop_listening(client: Any) -> None:
    """Stop reading outputs of an ``AsyncLLM``, so that its engine's orderly end is not logged as a death. Call in its loop."""
    if client.output_handler is not None:
        client.output_handler.cancel()


def worker_of(llm: Any) -> Any:
    """Return vLLM's worker of an ``LLM`` that runs in this process, through which alone its model is reachable."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker


def draft_model_of(worker: Any) -> Any:
    """Return the proposer of drafts in a worker, of either model runner; a draft model has ``model`` and ``hidden_size``."""
    runner = worker.model_runner
    return getattr(runner, "drafter", None) or getattr(runner, "speculator", None)


def observe_forwards(runner: Any, receive: Callable[[Any, dict[str, torch.Tensor]], None]) -> Callable[[], None]:
    """Call ``receive(outputs, slots by layer)`` behind each forward of a model runner; return a function that ends that.

    Whether the forward was eager, compiled or the replay of a graph, both runners keep what it gave until they sample
    (``execute_model_state``); in a pipeline the last stage does.
    """
    execute = runner.execute_model

    def observed(*args: Any, **options: Any) -> Any:
        result, state = execute(*args, **options), runner.execute_model_state
        if state is not None and state.hidden_states is not None:
            slots = getattr(state, "slot_mappings", None) or getattr(state, "slot_mappings_by_layer", None)
            if slots:
                receive((state.hidden_states, state.aux_hidden_states), slots)
        return result

    runner.execute_model = observed
    return partial(delattr, runner, "execute_model")


def layer_groups(llm: Any) -> list[list[str]]:
    """Return the names of the layers of an ``LLM`` in this process, in groups that share a block table."""
    config = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config
    return [list(group.layer_names) for group in config.kv_cache_groups]


@cache
def _paused() -> Any:
    from vllm.v1.request import Request

    # For the second model runner its scheduler sets the step whenever it has scheduled the request.
    never = property(lambda _: sys.maxsize, lambda _, step: None)
    return type("PausedRequest", (Request,), {"next_decode_eligible_step": never})


def pause(request: Any, paused: bool) -> None:
    """Keep the scheduler from running a request any further, or let it, where steps are scheduled ahead of their tokens."""
    request.__class__ = _paused() if paused else _paused().__base__


def shorten(request: Any, slots: int, output: Any, blocks: tuple[list[int], ...]) -> None:
    """Make a request of ``output``, a step that is being scheduled, one of ``slots`` computed tokens and of its last one.

    The next input of a session makes a running request such a one, too. ``blocks``: its blocks, by group.
    """
    from vllm.v1.core.sched.output import NewRequestData

    ids, answer = request._all_token_ids, request._output_token_ids
    ids[: request.num_computed_tokens] = [0] * slots
    request.prompt_token_ids, request.num_prompt_tokens = list(ids), len(ids)
    request.num_computed_tokens, request.max_tokens = slots, request.max_tokens - len(answer)
    if (seed := request.sampling_params.seed) is not None:  # by it and the place the second model runner draws
        request.sampling_params = request.sampling_params.clone()
        request.sampling_params.seed = (seed + len(answer)) % 2**63
    answer.clear()
    # Blocks that hold other KV by now are found by no one.
    request.cache_salt = f"{request.cache_salt}+"
    request.block_hashes.clear()
    request.update_block_hashes()
    cached = output.scheduled_cached_reqs
    index = cached.req_ids.index(request.request_id)
    for column in (cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, cached.num_output_tokens):
        del column[index]
    output.scheduled_new_reqs.append(NewRequestData.from_request(request, blocks, list(ids)))
    output.has_sync_kv_loads = True


def shortens(config: Any) -> bool:
    """Return True if a vLLM with this config takes requests that `shorten` changes: not in a pipeline, nor with drafts."""
    return not config.speculative_config and int(config.parallel_config.pipeline_parallel_size) == 1


def release_core(engine: Any) -> None:
    """Shut down the parts that belong to one in-process engine alone.

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
    """Destroy the process groups that a failed start has left."""
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    ensure_kv_transfer_shutdown()
    cleanup_dist_env_and_memory()


def core_died(engine: Any) -> bool:
    """Return True if the process of an ``LLM``'s engine has ended."""
    return bool(engine.engine_core.resources.engine_dead)


def unfinished(llm: Any) -> int:
    """Return the number of requests under way in an ``AsyncLLM``, whoever sent them."""
    return int(llm.output_processor.get_num_unfinished_requests())


def replace_media_cache(renderer: Any, cache: Any) -> None:
    """Make a renderer keep its processed media in ``cache``; see `media_cache`. vLLM builds its own from its config alone."""
    renderer._mm_processor_cache = cache


def wake_waiting(engine: Any, error: Exception) -> None:
    """Give ``error`` to all callers that wait for an engine that died: vLLM notices its death, but leaves them waiting."""
    client = engine.engine_core
    for future in list(client.utility_results.values()):
        with contextlib.suppress(InvalidStateError):
            future.set_exception(error)
    client.outputs_queue.put_nowait(error)


def tensor_parallel() -> tuple[int, int]:
    """Return rank and size of this worker's tensor-parallel group."""
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

    return get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()


def pipeline() -> tuple[int, int]:
    """Return rank and size of this worker's pipeline."""
    from vllm.distributed.parallel_state import get_pp_group

    return get_pp_group().rank_in_group, get_pp_group().world_size


def stage_layers(layers: int, stage: int, stages: int) -> range:
    """Return the decoder layers of one stage of a pipeline, as vLLM assigns them."""
    from vllm.distributed.utils import get_pp_indices

    return range(*get_pp_indices(layers, stage, stages))


def stage_inputs(runner: Any, tokens: int) -> dict[str, Any]:
    """Return random inputs of a pipeline stage for ``tokens`` tokens, as arguments of its model; none for the first stage.

    Where vLLM makes no trial run (on a CPU, uncompiled) its runner lacks the buffer for the previous stage's outputs, and would
    end with the first request. The buffer is allocated here.
    """
    if pipeline()[0] == 0:
        return {}
    options = {"dtype": runner.model_config.dtype, "device": runner.device}
    make = partial(runner.model.make_empty_intermediate_tensors, **options)
    if getattr(runner, "intermediate_tensors", False) is None:
        runner.intermediate_tensors = make(batch_size=runner.max_num_tokens)
    intermediate = make(batch_size=tokens)
    for name, tensor in intermediate.tensors.items():
        tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(len(name))))
    return {"intermediate_tensors": intermediate}


def use_no_adapter(model: Any, tokens: int) -> None:
    """Make the layers of a model that takes LoRA adapters compute the next ``tokens`` tokens without one.

    vLLM sets this mapping before each of its own forwards.
    """
    from vllm.lora.layers import LoRAMapping

    model.lora_manager.set_adapter_mapping(LoRAMapping((0,) * tokens, (0,), is_prefill=True))


def import_model_classes(architectures: Any) -> None:
    """Import models' classes here, so that vLLM does not start a Python process just to inspect them.

    That process costs seconds, and would need every repair of the environment that this process has had.
    """
    from vllm.model_executor.models.registry import ModelRegistry

    for name in architectures or ():
        entry = ModelRegistry.models.get(name)
        if entry is not None and not hasattr(entry, "model_cls"):
            ModelRegistry.register_model(name, entry.load_model_cls())


def let_numba_be_scanned() -> None:
    """Keep vLLM's start on a CPU from failing on numba, which library search imports, and many host programs.

    As it registers its kernels it calls ``vars(value).get`` on whatever any module holds. llvmlite's library answers every
    name, ``__dict__`` as well, with a wrapped C function, which has no ``get``; from here on it answers that name with a dict.
    """
    ffi = sys.modules.get("llvmlite.binding.ffi")
    functions = getattr(getattr(ffi, "lib", None), "_fntab", None)
    if isinstance(functions, dict):
        functions["__dict__"] = {}


_RUNNERS = ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.attn_utils")
_JOIN = "add_kv_sharing_layers_to_kv_cache_groups"


def name_sharing_layers() -> None:
    """Give layers that read another layer's cache that layer's cache spec, in this process, where layers differ in shape.

    A runner puts such layers into the group of the layer that they read. Where the layers of a group have specs of their own,
    vLLM would find none for them.
    """
    for runner in map(sys.modules.get, _RUNNERS):
        join = getattr(runner, _JOIN, None)
        if join is not None and not hasattr(join, "names_sharing_layers"):
            setattr(runner, _JOIN, _with_specs(join))


def _with_specs(join: Any) -> Any:
    def add(shared: Any, groups: Any, *rest: Any) -> None:
        join(shared, groups, *rest)
        for specs in (getattr(group.kv_cache_spec, "kv_cache_specs", {}) for group in groups):
            specs.update({name: specs[target] for name, target in shared.items() if target in specs})

    add.names_sharing_layers = True  # type: ignore[attr-defined]
    return add


class _Rewound(torch.Generator):
    """A request's generator on a CPU. It begins again where vLLM takes back a draw, by an offset that only GPUs' have.

    A request that is preempted, and prefilled again in several steps, goes on with the draws of its first tokens.
    """

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> torch.Generator:
        return self.manual_seed(self.initial_seed())


@cache
def rewind_generators() -> None:
    """Let seeded requests be prefilled in several steps on a CPU, in this process."""
    from vllm.v1.worker.gpu_input_batch import CachedRequestState

    prepare = CachedRequestState.__post_init__

    def prepare_rewound(self: Any) -> None:
        if self.generator is not None and self.generator.device.type == "cpu":
            self.generator = _Rewound().manual_seed(self.generator.initial_seed())
        prepare(self)

    CachedRequestState.__post_init__ = prepare_rewound


def bare_model(config: Any) -> Any:
    """Return an instance of the model's class with its config only, to count positions where the model is in another process."""
    from torch import nn
    from vllm.model_executor.model_loader.utils import get_model_cls

    kind = get_model_cls(config)
    model = kind.__new__(kind)
    nn.Module.__init__(model)
    model.config = text_backbone(config.hf_config)
    model.model_config = config
    pair_sound(kind)
    return model


def pair_sound(kind: Any) -> None:
    """Make a class of models find a video's sound by its place in the prompt; classes without such sound stay as they are.

    vLLM takes the first sound for that of the first video with one, even where it is a separate sound before the video.
    """
    if not hasattr(kind, "_get_audio_for_video_mapping"):
        return

    def paired(self: Any, features: list[Any]) -> tuple[dict[int, int], set[int]]:
        lengths: dict[int, int] = {}
        paired_sounds: set[int] = set()
        sounds = {f.mm_position.offset: f.data for f in features if f.modality == "audio"}
        for feature in features:
            has_sound = feature.data.get("use_audio_in_video") if feature.modality == "video" else None
            if has_sound is not None and bool(has_sound.data):
                at = feature.mm_position.offset
                sound = min(offset for offset in sounds if offset >= at)
                lengths[at] = int(sounds[sound]["audio_feature_lengths"].data)
                paired_sounds.add(sound)
        return lengths, paired_sounds

    kind._get_audio_for_video_mapping = paired


def sound_length(model: Any, tokens: int) -> int:
    """Return the fewest frames of a spectrogram that a model counts as so many tokens of sound."""
    return bisect_left(range(1 << 24), tokens, key=model._compute_audio_token_count)


def media_items(processor: Any, data: dict[str, torch.Tensor]) -> Any:
    """Return media fields as vLLM's own multimodal processor of the model would lay them out."""
    from transformers import BatchFeature
    from vllm.multimodal.inputs import MultiModalKwargsItems

    batch = BatchFeature(data)
    return MultiModalKwargsItems.from_hf_inputs(batch, processor._get_mm_fields_config(batch, {}))


_EMBEDDINGS = "ctxwin_embeddings"


def embeddings_item(modality: str, embeddings: torch.Tensor | None, **fields: torch.Tensor) -> Any:
    """Return one media item that consists of its embeddings ``[tokens, width]``, for a model prepared by `pass_embeddings`.

    They are None only where they come through the encoder cache. ``fields`` determine its positions, ``[1, ...]`` each.
    """
    from transformers import BatchFeature
    from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems

    configs = {name: MultiModalFieldConfig.batched(modality, keep_on_cpu=True) for name in fields}
    configs[_EMBEDDINGS] = MultiModalFieldConfig.batched(modality)
    data = fields if embeddings is None else {**fields, _EMBEDDINGS: embeddings[None]}
    return MultiModalKwargsItems.from_hf_inputs(BatchFeature(data), configs)[modality][0]


def share_item_entry(llm: Any, prefix: str) -> None:
    """Make all media whose names begin with ``prefix`` share one entry of an ``LLMEngine``'s or ``AsyncLLM``'s cache of media.

    Such media always come with their data, so a cached one is never looked up. They hold next to nothing, and that cache counts
    the bytes of tensors alone, so it would keep every one of them: some 2 KB of objects for each that it counts as 24 bytes.
    """
    processor = llm.input_processor

    def shared(request: Any) -> Any:
        for feature in request.mm_features or ():
            if feature.identifier.startswith(prefix):
                feature.mm_hash = prefix
        return request

    process = processor.process_inputs
    processor.process_inputs = lambda *args, **options: shared(process(*args, **options))
    if (process_later := getattr(processor, "process_inputs_async", None)) is not None:

        async def processed(*args: Any, **options: Any) -> Any:
            return shared(await process_later(*args, **options))

        processor.process_inputs_async = processed


def pass_embeddings(model: Any) -> None:
    """Make a model pass on the embeddings of an `embeddings_item`; it still embeds media with pixels itself."""
    plain = model.embed_multimodal

    def embed(**fields: Any) -> Any:
        embeddings = fields.pop(_EMBEDDINGS, None)
        return plain(**fields) if embeddings is None else list(embeddings)

    model.embed_multimodal = embed
