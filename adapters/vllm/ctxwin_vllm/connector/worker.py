"""The worker's half of the connector: it loads spans before a forward and saves captures of requests that have ended."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from ctxwin_vllm.connector.scheduler import Step
from ctxwin_vllm.paged import STREAMS
from ctxwin_vllm.transport import LoadSpec, connect
from ctxwin_vllm.transport.base import Endpoint

if TYPE_CHECKING:
    import torch
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

_log = logging.getLogger("ctxwin.engines")


class WorkerHalf:
    """Methods that a vLLM worker calls; names and arguments are vLLM's."""

    def __init__(self, endpoint: Endpoint, block_size: int, whole: bool = False) -> None:
        self.endpoint = endpoint
        self.block_size = block_size
        self._failed_blocks: set[int] = set()
        self._failed: set[str] = set()  # requests of a hybrid, for which vLLM takes no block ids
        self._receiving: dict[tuple[str, str], list[Any]] = {}  # events behind background loads
        self._whole = whole  # whether a forward waits for all of its loads before it begins
        self._sent: set[str] = set()
        self._work = Step()

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Take the work of a step, and begin its captures; called before every forward, with or without loads."""
        super().bind_connector_metadata(connector_metadata)  # type: ignore[misc]  # of the connector's base
        assert isinstance(connector_metadata, Step)
        self._work = connector_metadata
        for stream in STREAMS.values() if connector_metadata.loads else ():
            stream.before_forward = stream.event()
        for capture in connector_metadata.captures:
            connect(capture.source).capture(capture)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Run the saves and loads that the scheduler planned for this step."""
        step = self._work
        for save in step.saves:
            if save.ranges:  # else its blocks are released
                connect(save.source).save(save)
            if save.last:
                self._sent.add(save.request)
        for load in step.loads:
            self._load(load)
        if self._whole or not _awaits_layers(forward_context):
            _finish()

    def _load(self, load: LoadSpec) -> None:
        # vLLM keeps one worker-side connector per process for all engines; the load names its engine's transport.
        try:
            endpoint = connect(load.source)
            endpoint.load(load)
            # No layer's attention waits for the last two, nor a write of the step's own token, which a compaction moves, for it.
            if load.keep or endpoint.draft_model is not None or endpoint.outputs is not None:
                _finish()
        except Exception as error:
            for stream in STREAMS.values():  # whoever gets its blocks next must find nothing of it on the way
                stream.event(loads=True).synchronize()
            self._fail(load, error)
        if load.background:
            self._receiving[load.source, load.request] = [stream.event(loads=True) for stream in STREAMS.values()]

    def _fail(self, load: LoadSpec, error: Exception) -> None:
        size = self.block_size  # of the process's first engine
        with contextlib.suppress(RuntimeError):  # reported before vLLM ends the request, if the engine still exists
            endpoint = connect(load.source)
            endpoint.fail(load.handle, error)
            size = endpoint.paged.block_size if endpoint.paged else size
        if load.states:
            self._failed.add(load.request)
        else:
            self._failed_blocks.update(load.blocks[load.begin // size : -(-load.end // size)])
        _log.warning("loading tokens [%d, %d) into the paged cache failed: %s", load.begin, load.end, error)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return the requests whose blocks may be freed, and those whose background load has ended or failed."""
        for request in finished_req_ids:
            self.endpoint.kept.pop(request, None)
        if not (self._sent or self._receiving):
            return None, None
        sent, self._sent = self._sent, set()
        own = (item for item in self._receiving.items() if item[0][0] == self._work.source)
        keys = [key for key, events in own if all(event.query() for event in events)]
        for key in keys:
            del self._receiving[key]
        return sent or None, {request for _, request in keys} or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return the same as `get_finished`, with the requests whose load has failed."""
        sent, received = self.get_finished(finished_req_ids)
        failed, self._failed = self._failed, set()
        return KVConnectorTransferResults(sent or set(), received or set(), failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks whose load has failed since the last call."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Let a layer's attention wait for the loads of that layer."""
        for stream in STREAMS.values():
            stream.wait(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: spans are read back whole."""

    def wait_for_save(self) -> None:
        """Let what follows wait for the step's loads; those that its forward did not wait for have failed."""
        if not _finish():
            self._whole = True
            for load in self._work.loads:
                if not load.background:
                    self._fail(load, RuntimeError("its forward did not wait for it; later ones wait for whole loads"))


def _awaits_layers(context: Any) -> bool:
    """Return True if the forward calls `WorkerHalf.wait_for_layer_load`, as a recorded graph of the whole model does not."""
    mode = getattr(getattr(context, "cudagraph_runtime_mode", None), "name", "")
    return getattr(context, "attn_metadata", None) is not None and mode in ("NONE", "PIECEWISE")


def _finish() -> bool:
    return all([stream.finish() for stream in STREAMS.values()])
