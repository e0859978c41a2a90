"""The KV connector: spans go into vLLM's paged blocks before a forward, computed spans come out when a request ends.

vLLM imports this module by its path and instantiates the class for its scheduler and for each of its workers, in one process
or several. The connector serves requests that carry a ctxwin handle; all others pass untouched.

**Loading.** KV that only this window can hit (its blocks are its own, see `cache_namespace`) is loaded synchronously, in the step
that needs it. Exact KV lies in blocks that plain requests share, so it is loaded asynchronously: vLLM publishes the blocks
of an asynchronous load only once they are written, whereas a plain request in the same step could hit those of a synchronous
one, and would fail with it. With ``kv_load_failure_policy="fail"`` vLLM drops the step's token, evicts the blocks and ends
that request alone, and the engine asks again. ``recompute`` would keep the blocks before the failed one, which may be
approximate. On a GPU both are written by a stream of their own (`ctxwin.kv.kernels.load_stream`).

**Reading back** happens when a request has ended: every forward is complete then, tokens of earlier steps, of chunked prefill and
of vLLM's own prefix cache are all there, and the time to the first token is unaffected. In the engine's own process the blocks
are read at once; elsewhere vLLM keeps them until the workers have written them out, a piece in each of the next steps, so that
no other request waits for all of them.

**Hybrids** (recurrent layers beside attention) take part in vLLM's hybrid memory allocator: a request has blocks in several
groups. KV and the states after it (`paged_states`) are loaded together, in the background, or the request fails; both are read
back together. Where chunks' maps are kept, they are captured in between (`transitions`). vLLM's own prefix cache is off for
hybrids, since it keeps states at block boundaries only.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole, SupportsHMA
from vllm.model_executor.model_loader.utils import get_model_cls
from vllm.v1.kv_cache_interface import MambaSpec, SlidingWindowSpec, UniformTypeKVCacheSpecs

from ctxwin.errors import UnsupportedModel
from ctxwin.kv.config import text_backbone
from ctxwin.process_exit import leave_when_shut_down
from ctxwin_vllm import internals
from ctxwin_vllm.connector.scheduler import SchedulerHalf
from ctxwin_vllm.connector.worker import WorkerHalf
from ctxwin_vllm.lifecycle.folders import owner_of
from ctxwin_vllm.refusals import check_config
from ctxwin_vllm.transport import PARAM, connect

if TYPE_CHECKING:
    import torch
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


class CtxwinConnector(SchedulerHalf, WorkerHalf, KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # mypy sees vLLM as untyped
    """Loads and captures the spans of the requests that carry a ctxwin handle."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
        source = str(self._kv_transfer_config.kv_connector_extra_config.get(PARAM, ""))  # no `Lifeline`, in every step
        self._source = source
        endpoint, block_size = connect(source), int(vllm_config.cache_config.block_size)
        self._groups = [list(group.layer_names) for group in kv_cache_config.kv_cache_groups]
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        holds_kv = [i for i, spec in enumerate(specs) if not isinstance(spec, MambaSpec)]
        try:
            check_config(vllm_config)
            if len(holds_kv) != 1:
                raise UnsupportedModel(f"all layers with KV must share one block table, got {len(holds_kv)} of them")
            spec = specs[holds_kv[0]]
            inner = spec.kv_cache_specs.values() if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]
            if any(isinstance(each, SlidingWindowSpec) for each in inner):
                raise UnsupportedModel(
                    "vLLM drops what left the window of a model whose layers all slide; open it as hf:..."
                )
        except UnsupportedModel as error:
            endpoint.refuse(error)
            raise
        if role == KVConnectorRole.WORKER:
            internals.name_sharing_layers()
            internals.rewind_generators()
        if hasattr(text_backbone(vllm_config.model_config.hf_config), "audio_config"):
            internals.pair_sound(get_model_cls(vllm_config.model_config))
        SchedulerHalf.__init__(self, endpoint, source, block_size, holds_kv[0])
        # With drafts vLLM asks for failed loads before it reports the forward's end.
        WorkerHalf.__init__(self, endpoint, block_size, whole=vllm_config.speculative_config is not None)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:
        """Return False, from vLLM 0.33 on which asks; `refusals` says why, on every version."""
        return False

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a span that is not captured is computed again later."""
        return False

    def shutdown(self) -> None:
        """Let a process of vLLM's own end without delay once it has shut down; one that failed ends as it does."""
        owner = owner_of(Path(self._source)) if self._source.startswith("/") else None
        if owner not in (None, os.getpid()) and isinstance(sys.exc_info()[1], SystemExit | None):
            leave_when_shut_down()

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        layers = self._vllm_config.compilation_config.static_forward_context
        if not self.endpoint.in_memory:  # see `core.Core`
            self.endpoint.open_cache(layers, self.block_size, self._groups, self._vllm_config.speculative_config)
