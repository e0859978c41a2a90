"""The encoder-cache connector: stored vision embeddings go into vLLM's encoder cache, so no request runs the tower for them.

For each medium whose tokens must be computed, vLLM's scheduler asks whether the connector has it. If so, the workers load
it right before the forward; it takes nothing of the encoder's compute budget, and the request need not carry its data: the
grid, from which positions are counted, is enough. So the KV of an image can be formed by any later request, long after
vLLM's encoder cache has evicted it, and a load of KV that fails leaves a request that can still be computed.

Media are found by the name in their multimodal identifier (`embeddings.name_of`), as files in a folder that every process
of the engine sees and only the engine writes. The scheduler reads a file and checks it (checksum, model, shape, dtype)
before it reports it to vLLM, and sends the workers the content that it has read: no load can meet a missing or damaged file,
to which vLLM's only answer would be to exit. A request without data of its own whose file is useless fails alone, with
vLLM's finish reason ``error``: an encoder that ran on nothing would stop the engine.

Extra config: ``folder``, and ``identity`` of the model. One instance serves the scheduler, one each worker.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorMetadata, ECConnectorRole

from ctxwin.engines.hf.model import deep_layers
from ctxwin_vllm.transport.embeddings import EmbeddingFiles, name_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

_SLACK = 64  # tokens by which vLLM's count of computed tokens may lag behind its next schedule
_log = logging.getLogger("ctxwin.engines")


@dataclass(frozen=True)
class Content:
    """Embeddings in transfer to a worker; ``data`` are bytes that vLLM passes to its process without a further copy."""

    data: np.ndarray[Any, np.dtype[np.uint8]] = field(repr=False)
    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, embeddings: torch.Tensor) -> Content:
        """Return the content of embeddings on the CPU, not copied."""
        return cls(embeddings.view(torch.uint8).numpy().reshape(-1), tuple(embeddings.shape), embeddings.dtype)

    def to(self, device: Any) -> torch.Tensor:
        """Return a copy on ``device``; the received bytes may be read-only."""
        copy = torch.empty(self.shape, dtype=self.dtype)
        copy.view(torch.uint8).numpy().reshape(-1)[:] = self.data
        return copy.to(device)


@dataclass
class EmbeddingMetadata(ECConnectorMetadata):  # type: ignore[misc]  # mypy sees vLLM as untyped
    """Embeddings that the workers load in one step, by multimodal identifier."""

    loads: dict[str, Content] = field(default_factory=dict, repr=False)


class EncoderCacheConnector(ECConnectorBase):  # type: ignore[misc]  # mypy sees vLLM as untyped
    """Serves media whose embeddings are in the folder; vLLM encodes all others.

    Raises:
        ValueError: no ``folder`` in the extra config.
    """

    def __init__(self, vllm_config: VllmConfig, role: ECConnectorRole) -> None:
        super().__init__(vllm_config=vllm_config, role=role)
        config = vllm_config.ec_transfer_config
        folder = config.get_from_extra_config("folder", "")
        if not folder:
            raise ValueError("ec_connector_extra_config must name the folder of the embeddings; add 'folder'")
        if role is ECConnectorRole.SCHEDULER:
            files = EmbeddingFiles(Path(folder), str(config.get_from_extra_config("identity", "")))
            model = vllm_config.model_config
            width, step = int(model.get_inputs_embeds_size()), vllm_config.scheduler_config.max_num_batched_tokens
            self.scheduler = Scheduler(files, width * (1 + deep_layers(model.hf_config)), model.dtype, step, width)

    def ensure_cache_available(self, request: Request, num_computed_tokens: int) -> bool:
        """Return False where a medium can be neither loaded nor computed."""
        return self.scheduler.ready(request, num_computed_tokens)

    def take_unavailable_requests(self) -> set[str]:
        """Return the requests that cannot be served, once."""
        unavailable, self.scheduler.unavailable = self.scheduler.unavailable, set()
        return unavailable

    def has_cache_item(self, identifier: str) -> bool:
        """Return True for embeddings that `ensure_cache_available`, called right before, found for its request."""
        return self.scheduler.holds(name_of(identifier))

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        """Plan the load of a medium that gets room in the encoder cache."""
        self.scheduler.plan(request, request.mm_features[index].identifier)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> EmbeddingMetadata:
        """Return the loads of the coming step."""
        planned = EmbeddingMetadata()
        if scheduler_output.total_num_scheduled_tokens:  # else the workers read no metadata
            planned.loads, self.scheduler.loads = self.scheduler.loads, {}
        return planned

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        """Release the embeddings of a request."""
        self.scheduler.forget(request.request_id)
        return False, None

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        """Load the embeddings that the scheduler planned; called on a worker."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, EmbeddingMetadata)
        for identifier, content in metadata.loads.items():
            if identifier not in encoder_cache:
                encoder_cache[identifier] = content.to(_device())

    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any) -> None:
        """Do nothing: clients choose the names of their media, and only the engine writes embeddings."""


class Scheduler:
    """Scheduler's side: which embeddings of a folder can be loaded, and when.

    The content that was found is what is loaded, whatever happens to its file meanwhile.

    Args:
        files: the folder, of embeddings of this width and dtype.
        step: most tokens that vLLM schedules at once.
        audio_width: width of audio embeddings, which have no deepstack part; None is ``width``.

    Attributes:
        held: embeddings that running requests need in their next step, by request and name.
        loads: embeddings that the workers load in the next step, by multimodal identifier.
        unavailable: requests that cannot be served.
    """

    def __init__(
        self, files: EmbeddingFiles, width: int, dtype: torch.dtype, step: int, audio_width: int | None = None
    ) -> None:
        self.files, self._dtype, self._step = files, dtype, step + _SLACK
        self._width, self._audio_width = width, width if audio_width is None else audio_width
        self.held: dict[str, dict[str, torch.Tensor]] = {}
        self.loads: dict[str, Content] = {}
        self.unavailable: set[str] = set()
        self._current = ""  # the request that vLLM is about to schedule
        self._in_memory = WeakValueDictionary[str, torch.Tensor]()  # by name, those that are held
        self._unfit: dict[str, set[str]] = {}  # names by request: read once, of another shape

    def ready(self, request: Request, computed: int) -> bool:
        """Hold the embeddings that the step after ``computed`` tokens may need; return False where some cannot be had.

        Cost: O(1) after the last medium, else O(media).
        """
        self._current = name = request.request_id
        needed: dict[str, torch.Tensor] = {}
        last = max(map(_end, request.mm_features[-2:]), default=0)  # a video ends after its sound
        for feature in request.mm_features if computed < last else ():
            if _end(feature) <= computed or feature.mm_position.offset >= computed + self._step:
                continue  # its KV is there, or its turn comes later
            embeddings = self._find(feature)
            if embeddings is not None:
                needed[name_of(feature.identifier)] = embeddings
            elif feature.data is None or all(element.field.keep_on_cpu for element in feature.data.values()):
                # It carries neither pixels nor embeddings, only the fields that determine positions.
                message = "request %s carries no data for %r, and its stored vision embeddings are missing"
                _log.warning(message, name, feature.identifier)
                self.unavailable.add(name)
                return False
        if needed:
            self.held[name] = needed
        else:
            self.held.pop(name, None)
        return True

    def _find(self, feature: MultiModalFeatureSpec) -> torch.Tensor | None:
        """Return a medium's embeddings, read now unless a request holds them; None where there are none of its shape."""
        name, width = name_of(feature.identifier), self._audio_width if feature.modality == "audio" else self._width
        if name in self._unfit.get(self._current, ()):
            return None
        embeddings = self._in_memory.get(name)
        if embeddings is None and (embeddings := self.files.get(name)) is not None:
            self._in_memory[name] = embeddings
        shape = feature.mm_position.get_num_embeds(), width
        if embeddings is None or (embeddings.shape, embeddings.dtype) == (shape, self._dtype):
            return embeddings
        got = f"{[*embeddings.shape]} of {embeddings.dtype}"
        _log.warning("the embeddings of %r must be %s of %s, got %s", name, [*shape], self._dtype, got)
        self._unfit.setdefault(self._current, set()).add(name)
        return None

    def holds(self, name: str) -> bool:
        """Return True if the request that vLLM is about to schedule holds those embeddings."""
        return name in self.held.get(self._current, ())

    def plan(self, request: Request, identifier: str) -> None:
        """Load a medium that gets room in the encoder cache if its embeddings are held; else vLLM encodes it."""
        if (embeddings := self.held.get(request.request_id, {}).get(name_of(identifier))) is not None:
            self.loads[identifier] = Content.of(embeddings)

    def forget(self, request: str) -> None:
        """Release all embeddings that a request holds."""
        self.held.pop(request, None)
        self._unfit.pop(request, None)
        self.unavailable.discard(request)


def _end(feature: MultiModalFeatureSpec) -> int:
    return int(feature.mm_position.offset + feature.mm_position.length)


def _device() -> Any:
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return "cpu"
    return f"{current_platform.device_type}:{current_platform.current_device()}"
