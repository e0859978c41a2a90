"""The worker's half of the connector: it loads spans before a forward and saves captures of requests that have ended."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from ctxwin_vllm.connector.scheduler import Step
from ctxwin_vllm.transport import Endpoint, LoadSpec, connect

if TYPE_CHECKING:
    import torch
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

_log = logging.getLogger("ctxwin.engines")


class WorkerHalf:
    """Methods that a vLLM worker calls; names and arguments are vLLM's."""

    def __init__(self, endpoint: Endpoint, block_size: int) -> None:
        self.endpoint = endpoint
        self.block_size = block_size
        self._failed_blocks: set[int] = set()
        self._failed: set[str] = set()  # requests of a hybrid, for which vLLM takes no block ids
        self._received: set[str] = set()
        self._sent: set[str] = set()
        self._work = Step()

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Take the work of a step, and begin its captures; called before every forward, with or without loads."""
        super().bind_connector_metadata(connector_metadata)  # type: ignore[misc]  # of the connector's base
        assert isinstance(connector_metadata, Step)
        self._work = connector_metadata
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

    def _load(self, load: LoadSpec) -> None:
        # vLLM keeps one worker-side connector per process for all engines; the load names its engine's transport.
        try:
            connect(load.source).load(load)
        except Exception as error:
            with contextlib.suppress(RuntimeError):  # reported before vLLM ends the request, if the engine still exists
                connect(load.source).fail(load.handle, error)
            size = self.block_size
            if load.states:
                self._failed.add(load.request)
            else:
                self._failed_blocks.update(load.blocks[load.begin // size : -(-load.end // size)])
            _log.warning("loading tokens [%d, %d) into the paged cache failed: %s", load.begin, load.end, error)
        if load.background:
            self._received.add(load.request)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return the requests whose blocks may be freed, and those whose background load has ended or failed."""
        if not (self._sent or self._received):
            return None, None
        sent, received = self._sent, self._received
        self._sent, self._received = set(), set()
        return sent or None, received or None

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
        """Do nothing: loads are complete when the forward begins."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: spans are read back whole."""

    def wait_for_save(self) -> None:
        """Do nothing: no save is pending."""
