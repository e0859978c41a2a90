"""The encoder-cache connector: stored vision embeddings go into vLLM's encoder cache, so no request runs the tower for them.

For each medium whose tokens must be computed, vLLM's scheduler asks whether the connector has it. If so, the workers load
it right before the forward; it takes nothing of the encoder's compute budget, and the request need not carry its data: the
grid, from which positions are counted, is enough. So the KV of an image can be formed by any later request, long after
vLLM's encoder cache has evicted it, and a load of KV that fails leaves a request that can still be computed.

Media are found by the name in their multimodal identifier (`embeddings.name_of`), as files in a folder that every process
of the engine sees and only the engine writes. The scheduler reads a file and checks it (checksum, model, shape, dtype)
before it tells vLLM that it is there, and hands the workers what it has read: no load can meet a missing or damaged file,
to which vLLM's only answer would be to exit. A request without data of its own whose file is useless fails alone, with
vLLM's finish reason ``error``: an encoder that ran on nothing would stop the engine.

Extra config: ``folder``, and ``identity`` of the model. One instance serves the scheduler, one each worker.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorMetadata, ECConnectorRole

from ctxwin.engines.hf.model import deep_layers
from ctxwin.engines.vllm.transport.embeddings import AtHand, EmbeddingFiles, name_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

_LARGE = 1 << 20
"""Bytes from which a thread checks a file, while the scheduler serves other requests."""
_ROOM = 64 << 20
"""Bytes of embeddings that are kept for the next request about the same media."""
_SLACK = 64
"""Tokens by which vLLM's count of computed tokens may lag behind what it schedules next."""
_log = logging.getLogger("ctxwin.engines")


@dataclass(frozen=True)
class Content:
    """Embeddings on their way to a worker.

    Attributes:
        data: their bytes, which vLLM hands to another process without a copy on the way.
    """

    data: np.ndarray[Any, np.dtype[np.uint8]] = field(repr=False)
    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, embeddings: torch.Tensor) -> Content:
        """The content of embeddings on the CPU, not copied."""
        return cls(embeddings.view(torch.uint8).numpy().reshape(-1), tuple(embeddings.shape), embeddings.dtype)

    def to(self, device: Any) -> torch.Tensor:
        """A copy of its own: what arrives may be read-only."""
        made = torch.empty(self.shape, dtype=self.dtype)
        made.view(torch.uint8).numpy().reshape(-1)[:] = self.data
        return made.to(device)


@dataclass
class EmbeddingMetadata(ECConnectorMetadata):  # type: ignore[misc]  # mypy sees vLLM as untyped
    """What the workers load in one step: embeddings by multimodal identifier."""

    loads: dict[str, Content] = field(default_factory=dict, repr=False)


class EncoderCacheConnector(ECConnectorBase):  # type: ignore[misc]  # mypy sees vLLM as untyped
    """Serves the media whose embeddings lie in the folder; others are encoded as ever.

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
        """False while files are being checked, and for good where a medium can be neither loaded nor computed."""
        return self.scheduler.ready(request, num_computed_tokens)

    def take_unavailable_requests(self) -> set[str]:
        """The requests that cannot be served."""
        taken, self.scheduler.unavailable = self.scheduler.unavailable, set()
        return taken

    def has_cache_item(self, identifier: str) -> bool:
        """Only what `ensure_cache_available`, which vLLM calls right before, found for its request."""
        return self.scheduler.holds(name_of(identifier))

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        """A medium gets room in the encoder cache."""
        self.scheduler.plan(request, request.mm_features[index].identifier)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> EmbeddingMetadata:
        """What the workers load in the coming step."""
        planned = EmbeddingMetadata()
        if scheduler_output.total_num_scheduled_tokens:  # else the workers look at nothing
            planned.loads, self.scheduler.loads = self.scheduler.loads, {}
        return planned

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        """Lets go of what a request held."""
        self.scheduler.forget(request.request_id)
        return False, None

    def shutdown(self) -> None:
        """Ends the scheduler's reads."""
        if self.role is ECConnectorRole.SCHEDULER:
            self.scheduler.at_hand.close()

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        """On a worker: loads what the scheduler planned."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, EmbeddingMetadata)
        for identifier, content in metadata.loads.items():
            if identifier not in encoder_cache:
                encoder_cache[identifier] = content.to(_device())

    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any) -> None:
        """Saves nothing: clients choose the names of their media, and the engine alone writes embeddings."""


class Scheduler:
    """What vLLM's scheduler is told of the embeddings in a folder.

    Args:
        files: the folder.
        width: of the embeddings.
        dtype: of the embeddings.
        step: most tokens that vLLM schedules at once.
        heard: width of the embeddings of sound, which has no deep ones; None where the model does not hear.

    Attributes:
        at_hand: what running requests need of the folder.
        loads: what the workers load in the next step, by multimodal identifier.
        unavailable: requests that cannot be served.
    """

    def __init__(
        self, files: EmbeddingFiles, width: int, dtype: torch.dtype, step: int, heard: int | None = None
    ) -> None:
        self.at_hand = AtHand(files, _LARGE, _ROOM)
        self.loads: dict[str, Content] = {}
        self.unavailable: set[str] = set()
        self._width = width
        self._heard = width if heard is None else heard
        self._dtype = dtype
        self._step = step + _SLACK
        self._asked = ""  # the request that vLLM is about to schedule
        self._names: dict[str, set[str]] = {}  # held or waited for, by request

    def ready(self, request: Request, computed: int) -> bool:
        """Takes what the next two steps behind ``computed`` tokens may need; False while some of the next is being read.

        O(1) behind the last medium, else O(media).
        """
        self._asked = name = request.request_id
        waiting, needed = False, set()
        # In the order of the prompt.
        last = max(map(_end, request.mm_features[-2:]), default=0)  # a video ends behind its sound
        features = request.mm_features if computed < last else ()
        for feature in features:
            begin = feature.mm_position.offset
            if _end(feature) <= computed or begin >= computed + 2 * self._step:
                continue  # its KV is there, or its turn comes later
            held = name_of(feature.identifier)
            width = self._heard if feature.modality == "audio" else self._width
            shape = feature.mm_position.get_num_embeds(), width
            found = self.at_hand.take(held, name, shape, self._dtype)
            if found is not False:
                self._names.setdefault(name, set()).add(held)
                needed.add(held)
                waiting |= found is None and begin < computed + self._step
            elif _bare(feature):
                what = "request %s carries no data for %r, and its stored vision embeddings are missing"
                _log.warning(what, name, feature.identifier)
                self.unavailable.add(name)
                return False
        self._keep(name, needed)
        return not waiting

    def holds(self, name: str) -> bool:
        """Whether the request that vLLM is about to schedule holds those embeddings."""
        return self.at_hand.find(name, self._asked) is not None

    def plan(self, request: Request, identifier: str) -> None:
        """A medium gets room in the encoder cache: it is loaded where it was found, else encoded."""
        found = self.at_hand.find(name_of(identifier), request.request_id)
        if found is not None:
            self.loads[identifier] = Content.of(found)

    def forget(self, request: str) -> None:
        """Lets go of whatever a request holds or waits for."""
        self._keep(request, set())
        self.unavailable.discard(request)

    def _keep(self, request: str, needed: set[str]) -> None:
        """Lets go of what a request holds and does not need."""
        held = self._names.pop(request, set())
        for name in held - needed:
            self.at_hand.release(name, request)
        if needed:
            self._names[request] = held & needed


def _end(feature: MultiModalFeatureSpec) -> int:
    return int(feature.mm_position.offset + feature.mm_position.length)


def _bare(feature: MultiModalFeatureSpec) -> bool:
    """Whether a medium carries neither pixels nor embeddings, only what positions are counted from."""
    return feature.data is None or all(element.field.keep_on_cpu for element in feature.data.values())


def _device() -> Any:
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return "cpu"
    return f"{current_platform.device_type}:{current_platform.current_device()}"
