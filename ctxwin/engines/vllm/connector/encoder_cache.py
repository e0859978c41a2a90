"""The encoder-cache connector: stored vision embeddings go into vLLM's encoder cache, so that no request runs the tower for them.

vLLM's scheduler asks for each media item whose tokens must be computed whether the connector has it. An item that it has
is loaded by the workers right before the forward; it takes nothing of the encoder's compute budget, and the request need
not carry its data: the grid, which positions are counted from, is enough. So KV of an image can be formed by any later
request, long after vLLM's encoder cache has evicted it, and a load of KV that fails leaves a request that can still be
computed.

Items are found by the name in their multimodal identifier (`embeddings.name_of`), as files of one folder that every process
of the engine sees. The scheduler reads a file and checks it (checksum, model, shape, dtype) before vLLM is told that it is
there, and hands the workers what it has read: at a load, no file can be missing or damaged, which vLLM would have no
answer to but to end. A request without data of its own whose file is of no use fails alone, with vLLM's finish reason
``error``: an encoder that ran on nothing would stop the engine.

A request whose ``ec_transfer_params`` hold ``{"ctxwin": {"save": token}}`` has what the tower makes of its pixels written
to the folder, under the items' names. Clients of a server choose those names (``multi_modal_uuids``), so whoever may save
may replace what others load: only a request with the engine's own token may.

Extra config: ``folder``, ``identity`` of the model, and ``save_token``, without which nothing is saved. One instance
serves the scheduler, one each worker.
"""

from __future__ import annotations

import hmac
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorMetadata, ECConnectorRole

from ctxwin.engines.hf.model import deep_layers
from ctxwin.engines.vllm.transport.embeddings import AtHand, EmbeddingFiles, Held, name_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

PARAM = "ctxwin"
"""Key inside a request's ``ec_transfer_params``."""
_LARGE = 1 << 20
"""Bytes from which a file is checked beside the scheduler, which has other requests to serve."""
_ROOM = 64 << 20
"""Bytes of embeddings that are kept for the next request about the same media."""
_SLACK = 64
"""Tokens by which what vLLM says is computed may be behind what it schedules next."""
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
        return cls(embeddings.view(torch.uint8).numpy().reshape(-1), tuple(embeddings.shape), embeddings.dtype)

    def to(self, device: Any) -> torch.Tensor:
        """A copy of its own: what arrives may be read-only."""
        made = torch.empty(self.shape, dtype=self.dtype)
        made.view(torch.uint8).numpy().reshape(-1)[:] = self.data
        return made.to(device)


@dataclass
class EmbeddingMetadata(ECConnectorMetadata):  # type: ignore[misc]  # mypy sees vLLM as untyped
    """What the workers do in one step.

    Attributes:
        folder, identity: of `EmbeddingFiles`. Several engines of one process share the worker's side of the first.
        loads: embeddings by multimodal identifier.
        saves: name by multimodal identifier.
    """

    folder: str
    identity: str
    loads: dict[str, Content] = field(default_factory=dict, repr=False)
    saves: dict[str, str] = field(default_factory=dict)


class EncoderCacheConnector(ECConnectorBase):  # type: ignore[misc]  # mypy sees vLLM as untyped
    """Serves the items whose embeddings lie in the folder; others are encoded as ever.

    Raises:
        ValueError: no ``folder`` in the extra config.
    """

    def __init__(self, vllm_config: VllmConfig, role: ECConnectorRole) -> None:
        super().__init__(vllm_config=vllm_config, role=role)
        config = vllm_config.ec_transfer_config
        folder = config.get_from_extra_config("folder", "")
        if not folder:
            raise ValueError("ec_connector_extra_config must name the folder of the embeddings; add 'folder'")
        self._files = EmbeddingFiles(folder, str(config.get_from_extra_config("identity", "")))
        if role is ECConnectorRole.SCHEDULER:
            token = str(config.get_from_extra_config("save_token", ""))
            step = vllm_config.scheduler_config.max_num_batched_tokens
            self._scheduler = _Scheduler(self._files, *_form(vllm_config.model_config), token, step)

    # Scheduler side

    def ensure_cache_available(self, request: Request, num_computed_tokens: int) -> bool:
        """False while files are being checked, and for good where an item can be neither loaded nor computed."""
        return self._scheduler.ready(request, num_computed_tokens)

    def take_unavailable_requests(self) -> set[str]:
        taken, self._scheduler.unavailable = self._scheduler.unavailable, set()
        return taken

    def has_cache_item(self, identifier: str) -> bool:
        """Only what `ensure_cache_available`, which vLLM asks right before, found for its request."""
        return self._scheduler.holds(name_of(identifier))

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        self._scheduler.plan(request, request.mm_features[index].identifier)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> EmbeddingMetadata:
        planned = EmbeddingMetadata(str(self._files.folder), self._files.identity)
        if scheduler_output.total_num_scheduled_tokens:  # else the workers look at nothing
            planned.loads, self._scheduler.loads = self._scheduler.loads, {}
            planned.saves, self._scheduler.saves = self._scheduler.saves, {}
        return planned

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        self._scheduler.forget(request.request_id)
        return False, None

    def shutdown(self) -> None:
        if self.role is ECConnectorRole.SCHEDULER:
            self._scheduler.close()

    # Worker side

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, EmbeddingMetadata)
        for identifier, content in metadata.loads.items():
            if identifier not in encoder_cache:
                encoder_cache[identifier] = content.to(_device())

    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any) -> None:
        """Writes what the tower made of an item, if its request wants it; a file that cannot be written is a miss."""
        metadata = self._connector_metadata
        if not isinstance(metadata, EmbeddingMetadata) or mm_hash not in metadata.saves or _rank():
            return  # every rank holds the same embeddings
        try:
            self._files_of(metadata).put(metadata.saves[mm_hash], encoder_cache[mm_hash])
        except OSError as error:
            _log.warning("the vision embeddings of %s were not saved: %s", mm_hash, error)

    def _files_of(self, metadata: EmbeddingMetadata) -> EmbeddingFiles:
        own = self._files
        if (str(own.folder), own.identity) == (metadata.folder, metadata.identity):
            return own
        return EmbeddingFiles(metadata.folder, metadata.identity)


class _Scheduler:
    """What the connector knows of the requests in flight.

    Args:
        files: where embeddings lie.
        width, dtype: what the model takes.
        save_token: see the module; "" for nobody.
        step: tokens that vLLM schedules at once, at most.

    Attributes:
        at_hand: embeddings that the next steps of requests in flight may need.
        loads, saves: for the next step, as in `EmbeddingMetadata`.
        unavailable: requests that cannot be served.
    """

    def __init__(self, files: EmbeddingFiles, width: int, dtype: str, save_token: str, step: int) -> None:
        self.at_hand = AtHand(files, _LARGE, _ROOM)
        self.loads: dict[str, Content] = {}
        self.saves: dict[str, str] = {}
        self.unavailable: set[str] = set()
        self._width = width
        self._dtype = dtype
        self._save_token = save_token
        self._step = step + _SLACK
        self._asked = ""  # the request that vLLM is about to schedule
        self._ends: dict[str, int] = {}  # where the last medium of a request ends
        self._names: dict[str, set[str]] = {}  # held or waited for, by request

    def ready(self, request: Request, computed: int) -> bool:
        """Takes what the next two steps behind ``computed`` tokens may need; False while some of the next is being read.

        O(1) behind the last medium, else O(media).
        """
        self._asked = name = request.request_id
        if name not in self._ends:
            places = [feature.mm_position for feature in request.mm_features]
            self._ends[name] = max((place.offset + place.length for place in places), default=0)
        if computed >= self._ends[name]:
            self._keep(name, set())
            return True
        waiting, needed = False, set()
        for feature in request.mm_features:
            place = feature.mm_position
            if place.offset + place.length <= computed or place.offset >= computed + 2 * self._step:
                continue  # its KV is there, or its turn comes later
            found = self._take(name, feature)
            if found is not False:
                needed.add(name_of(feature.identifier))
                waiting |= found is None and place.offset < computed + self._step
            elif _bare(feature):
                _log.warning(
                    "request %s carries no data for %r, and its stored vision embeddings are not there",
                    name,
                    feature.identifier,
                )
                self.unavailable.add(name)
                return False
        self._keep(name, needed)
        return not waiting

    def holds(self, name: str) -> bool:
        return self.at_hand.find(name, self._asked) is not None

    def plan(self, request: Request, identifier: str) -> None:
        """An item gets room in the encoder cache: it is loaded where it was found, else encoded."""
        name = name_of(identifier)
        found = self.at_hand.find(name, request.request_id)
        if found is not None:
            self.loads[identifier] = Content.of(found)
        elif self._may_save(request):
            self.saves[identifier] = name

    def forget(self, request: str) -> None:
        self._keep(request, set())
        self._ends.pop(request, None)
        self.unavailable.discard(request)

    def close(self) -> None:
        self.at_hand.close()

    def _may_save(self, request: Request) -> bool:
        params = (request.ec_transfer_params or {}).get(PARAM)
        given = params.get("save") if isinstance(params, dict) else None
        return bool(self._save_token) and hmac.compare_digest(str(given).encode(), self._save_token.encode())

    def _take(self, request: str, feature: MultiModalFeatureSpec) -> torch.Tensor | Literal[False] | None:
        name = name_of(feature.identifier)
        want = Held((feature.mm_position.get_num_embeds(), self._width), self._dtype)
        found = self.at_hand.take(name, request, want)
        if found is not False:
            self._names.setdefault(request, set()).add(name)
        return found

    def _keep(self, request: str, needed: set[str]) -> None:
        """Lets go of what a request holds and does not need."""
        held = self._names.get(request)
        if held is None:
            return
        for name in held - needed:
            self.at_hand.release(name, request)
        if needed:
            self._names[request] = held & needed
        else:
            del self._names[request]


def _form(model: Any) -> tuple[int, str]:
    """Width and dtype of the embeddings that a model's encoder gives."""
    width = int(model.get_inputs_embeds_size()) * (1 + deep_layers(model.hf_config))
    return width, str(model.dtype).removeprefix("torch.")


def _bare(feature: MultiModalFeatureSpec) -> bool:
    """Whether an item carries neither pixels nor embeddings, only what positions are counted from."""
    return feature.data is None or all(element.field.keep_on_cpu for element in feature.data.values())


def _device() -> Any:
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return "cpu"
    return f"{current_platform.device_type}:{current_platform.current_device()}"


def _rank() -> int:
    from vllm.distributed.parallel_state import get_tp_group

    return int(get_tp_group().rank_in_group)
