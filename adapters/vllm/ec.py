"""The EC connector: stored vision embeddings go into vLLM's encoder cache, so that no request runs the tower for them.

vLLM's scheduler asks for each media item whose tokens must be computed whether the connector has it. An item that it has
is loaded by the workers right before the forward; it takes nothing of the encoder's compute budget, and the request need
not carry its data: the grid, which positions are counted from, is enough. So KV of an image can be formed by any later
request, long after vLLM's encoder cache has evicted it, and a load of KV that fails leaves a request that can still be
computed.

Items are found by the name in their multimodal identifier (`ecfiles.name_of`), as files of one folder that every process
of the engine sees. A file is checked (checksum, model, shape, dtype) before vLLM is told that it is there, and pinned
until the request has ended. A request without data of its own whose file is not there fails alone, with vLLM's finish
reason ``error``: an encoder that ran on nothing would stop the engine.

A request whose ``ec_transfer_params`` hold ``{"ctxwin": {"save": token}}`` has what the tower makes of its pixels written
to the folder, under the items' names. Clients of a server choose those names (``multi_modal_uuids``), so whoever may save
may replace what others load: only a request with the engine's own token may.

Extra config: ``folder``, ``identity`` of the model, and ``save_token``, without which nothing is saved. One instance
serves the scheduler, one each worker.
"""

from __future__ import annotations

import hmac
import logging
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorMetadata, ECConnectorRole

from ctxwin.adapters.vllm.ecfiles import EmbeddingFiles, Held, Pins, name_of
from ctxwin.engines.hf_model import deep_layers

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

PARAM = "ctxwin"
"""Key inside a request's ``ec_transfer_params``."""
_LARGE = 1 << 20
"""Bytes from which a file is checked beside the scheduler, which has other requests to serve."""
_log = logging.getLogger("ctxwin.engines")


@dataclass
class EmbeddingMetadata(ECConnectorMetadata):  # type: ignore[misc]  # mypy sees vLLM as untyped
    """What the workers do in one step.

    Attributes:
        folder, identity: of `EmbeddingFiles`. Several engines of one process share the worker's side of the first.
        loads: path by multimodal identifier.
        saves: name by multimodal identifier.
    """

    folder: str
    identity: str
    loads: dict[str, str] = field(default_factory=dict)
    saves: dict[str, str] = field(default_factory=dict)


class CtxwinECConnector(ECConnectorBase):  # type: ignore[misc]  # mypy sees vLLM as untyped
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
            self._scheduler = _Scheduler(self._files, *_form(vllm_config.model_config), token)

    # Scheduler side

    def ensure_cache_available(self, request: Request, num_computed_tokens: int) -> bool:
        """False while files are being checked, and for good where an item can be neither loaded nor computed."""
        return self._scheduler.ready(request, num_computed_tokens)

    def take_unavailable_requests(self) -> set[str]:
        taken, self._scheduler.unavailable = self._scheduler.unavailable, set()
        return taken

    def has_cache_item(self, identifier: str) -> bool:
        """Only what `ensure_cache_available`, which vLLM asks right before, found for its request: checked and pinned."""
        return self._scheduler.holds(name_of(identifier))

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        self._scheduler.plan(request, request.mm_features[index].identifier)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> EmbeddingMetadata:
        planned = EmbeddingMetadata(str(self._files.folder), self._files.identity)
        if scheduler_output.total_num_scheduled_tokens:  # else the workers look at nothing
            planned.loads, self._scheduler.loads = self._scheduler.loads, {}
            planned.saves, self._scheduler.saves = self._scheduler.saves, {}
            self._scheduler.pins.tick()
        return planned

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        self._scheduler.forget(request.request_id)
        return False, None

    def shutdown(self) -> None:
        if self.role is ECConnectorRole.SCHEDULER:
            self._scheduler.close()

    # Worker side

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        """Raises RuntimeError for a pinned file that has changed since it was checked: the step cannot be computed."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, EmbeddingMetadata)
        files = self._files_of(metadata)
        for identifier, path in metadata.loads.items():
            if identifier in encoder_cache:
                continue
            found = files.read(Path(path))
            if found is None:
                raise RuntimeError(f"the vision embeddings of {identifier!r} were damaged after they had been checked")
            encoder_cache[identifier] = found.to(_device(), copy=True)  # the file's own bytes are read-only

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

    Attributes:
        pins: checked files of requests in flight.
        loads, saves: for the next step, as in `EmbeddingMetadata`.
        unavailable: requests that cannot be served.
    """

    def __init__(self, files: EmbeddingFiles, width: int, dtype: str, save_token: str) -> None:
        self.pins = Pins(files)
        self.loads: dict[str, str] = {}
        self.saves: dict[str, str] = {}
        self.unavailable: set[str] = set()
        self._files = files
        self._width = width
        self._dtype = dtype
        self._save_token = save_token
        self._asked = ""  # the request that vLLM is about to schedule
        self._ready: dict[str, int] = {}  # token from which on everything was found, by request
        self._names: dict[str, set[str]] = {}  # pinned, by request
        self._checks: dict[Path, Future[Held | None]] = {}
        self._threads: ThreadPoolExecutor | None = None

    def ready(self, request: Request, computed: int) -> bool:
        """Pins what the request will need behind its first ``computed`` tokens. O(1) once that is done."""
        self._asked = request.request_id
        done = self._ready.get(request.request_id)
        if done is not None and computed >= done:
            return True
        waiting = False
        for feature in request.mm_features:
            place = feature.mm_position
            if place.offset + place.length <= computed:
                continue  # its KV is there
            found = self._find(request.request_id, feature)
            if found is None:
                waiting = True
            elif not found and _bare(feature):
                _log.warning(
                    "request %s carries no data for %r, and its stored vision embeddings are not there",
                    request.request_id,
                    feature.identifier,
                )
                self.unavailable.add(request.request_id)
                return False
        if not waiting:
            self._ready[request.request_id] = computed
        return not waiting

    def holds(self, name: str) -> bool:
        return self.pins.find(name, self._asked) is not None

    def plan(self, request: Request, identifier: str) -> None:
        """An item gets room in the encoder cache: it is loaded where it was found, else encoded."""
        name = name_of(identifier)
        path = self.pins.find(name, request.request_id)
        if path is not None:
            self.loads[identifier] = str(path)
        elif self._may_save(request):
            self.saves[identifier] = name

    def forget(self, request: str) -> None:
        self._ready.pop(request, None)
        self.unavailable.discard(request)
        for name in list(self._names.pop(request, ())):
            self.pins.unpin(name, request)

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
            self._threads = None
        self.pins.close()

    def _may_save(self, request: Request) -> bool:
        params = (request.ec_transfer_params or {}).get(PARAM)
        given = params.get("save") if isinstance(params, dict) else None
        return bool(self._save_token) and hmac.compare_digest(str(given).encode(), self._save_token.encode())

    def _find(self, request: str, feature: MultiModalFeatureSpec) -> bool | None:
        """Whether an item's file is there and fits; it is then pinned. None while it is being checked."""
        name = name_of(feature.identifier)
        path = self.pins.pin(name, request)
        if path is None:
            return False
        self._names.setdefault(request, set()).add(name)
        known, held = self._files.known(path)
        if not known:
            if path.stat().st_size >= _LARGE:
                self._check(path)
                return None
            held = self._files.check(path)
        want = Held((feature.mm_position.get_num_embeds(), self._width), self._dtype)
        if held == want:
            return True
        if held is not None:
            _log.warning("the stored vision embeddings of %r must be %s, got %s", feature.identifier, want, held)
        self._names[request].discard(name)
        self.pins.unpin(name, request)
        return False

    def _check(self, path: Path) -> None:
        """Has a file checked by a thread; the scheduler has other requests to serve meanwhile."""
        self._checks = {path: check for path, check in self._checks.items() if not check.done()}
        if path not in self._checks:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(1, "ctxwin-ec")
            self._checks[path] = self._threads.submit(self._files.check, path)


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
