"""Prompts of an engine's own requests, and the blocks of vLLM's prefix cache that they share."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from ctxwin.engines.encoding.encoder import Encoder
from ctxwin.engines.segments import Encoded, MediaSpan, Segment
from ctxwin.hashing import digest
from ctxwin.store.lru import LRUCache
from ctxwin_vllm.cache_namespace import CacheNamespace, namespace_of
from ctxwin_vllm.core import Core
from ctxwin_vllm.inputs import join
from ctxwin_vllm.transport import Transfer

_EMBEDDED_BYTES, _CUT_BYTES = 64 << 20, 16 << 20


class PromptBuilder(Protocol):
    """Builds the prompts of requests: an engine from chunks, a `RenderedRequest` from the prompt that vLLM rendered."""

    def namespace(self, segments: Sequence[Segment], salt: str) -> CacheNamespace:
        """Return the namespace of a layout's blocks in vLLM's prefix cache."""
        ...

    def prompt(
        self, ids: list[int], media: list[MediaSpan], namespace: CacheNamespace, transfer: Transfer
    ) -> dict[str, Any]:
        """Return an engine input of vLLM; record in ``transfer`` the tokens that have no content to compute from."""
        ...


class EnginePrompts:
    """The `PromptBuilder` of an engine: prompts of chunks, for one tenant, whose blocks are separate.

    ``identity`` is that of the model with its adapter; ``encoder`` has the vision embeddings of media.
    """

    def __init__(self, core: Core, tenant: str, identity: str, encoder: Encoder) -> None:
        self.core, self.tenant, self._identity, self.encoder = core, tenant, identity, encoder
        self._embeddings: LRUCache[torch.Tensor] = LRUCache(_EMBEDDED_BYTES)  # of the media of recent requests
        self.cut_prompts: LRUCache[Any] = LRUCache(_CUT_BYTES)  # of chats, see `rendered.CutPrompt`

    def namespace(self, segments: Sequence[Segment], salt: str) -> CacheNamespace:
        """See `PromptBuilder`."""
        return namespace_of(segments, salt, self.core.block_size)

    def prompt(
        self, ids: list[int], media: list[MediaSpan], namespace: CacheNamespace, transfer: Transfer
    ) -> dict[str, Any]:
        """See `PromptBuilder`."""
        core = self.core
        rendered = core.inputs.prompt(
            ids,
            media,
            self._embedded,
            self.salted(namespace.salt),
            transfer.covered,
            tenant=self.tenant,
            marks=namespace.marks,
            tail=transfer.covered // core.block_size * core.block_size if transfer.min_load else None,
            cached_embedding=self._embeddings.get,
        )
        transfer.placeholder_tokens, transfer.embeddings = rendered.placeholder_tokens, rendered.embeddings
        return rendered.prompt

    def has_embeddings(self, key: str) -> bool:
        """Return True if the vision embeddings of a medium are in memory, from a recent request."""
        return self._embeddings.get(key) is not None

    def _embedded(self, key: str) -> torch.Tensor:
        """Return the embeddings of a medium and keep them, since the next request mostly has the same media."""
        embeddings = self.encoder.embed(key)
        self._embeddings.put(key, embeddings, embeddings.nbytes)
        return embeddings

    def record(self, parts: Sequence[Encoded], answer: Sequence[int], namespace: CacheNamespace) -> None:
        """Record the blocks that a request over ``parts`` and its ``answer`` have left in vLLM's prefix cache."""
        if self.core.has_prefix_cache:
            ids, media = join(parts)
            self.core.prefixes.add(self.names([*ids, *answer], media, namespace))

    def names(self, ids: list[int], media: list[MediaSpan], namespace: CacheNamespace) -> list[bytes]:
        """Return the names of a prompt's blocks in `Core.prefixes`: others than other tenants' and adapters'."""
        return self.salted_names(ids, media, self.salted(namespace.salt), namespace.marks)

    def salted_names(
        self, ids: Sequence[int], media: Sequence[MediaSpan], salt: str, marks: Mapping[int, str] | None = None
    ) -> list[bytes]:
        """Return them for a prompt with this ``cache_salt``."""
        return self.core.prefixes.names(ids, media, marks or {}, digest("record", salt, self._identity))

    def salted(self, salt: str) -> str:
        """Return the ``cache_salt`` of a namespace; "" for exact windows of no tenant, which share plain requests' blocks."""
        return digest("salt", self.core.inputs.secret, self.tenant, salt) if salt or self.tenant else ""
