"""Chunks a tenant has uploaded, by content id, in the tenant's own store."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ctxwin.chunk import Chunk
from ctxwin.engines.base import Engine
from ctxwin.serve.errors import TooLarge, UnknownUpload
from ctxwin.serve.limits import Allowance, Limits
from ctxwin.serve.specs import CHUNK, Decode, build_chunk, checked, without_sources
from ctxwin.window.placement import embeddings_of, keep_source

_ID = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Uploads:
    """Uploaded chunks of one engine's store. Thread-safe; nothing is held in memory.

    A record is not leased: what a full store drops is unknown, and is uploaded again. A record is believed only where
    its content has the id that it stands under, so whoever can write to the store can make an upload unknown at most.
    """

    engine: Engine
    limits: Limits
    decode: Decode

    def put(self, data: Any, files: Mapping[str, bytes] | None = None) -> tuple[dict[str, Any], bool]:
        """Stores a chunk and encodes it; returns its description and whether it is new. Idempotent by content.

        Raises ValueError, BadMedia, TooLarge, UnsupportedModel. Cost: decoding, and one run of the vision tower for new
        media.
        """
        chunk = self.build(data, files)
        new = not self._whole(chunk)
        encoded = self.engine.encode(chunk)
        if new:
            keep_source(self.engine, chunk)
            kept = self.engine.repo.put_json(_key(chunk.id), chunk.light().model_dump(mode="json"), bound=False)
            if not kept or not self._whole(chunk):
                raise TooLarge("the store refused the chunk: it is full of what open windows use; close some first")
        return _described(chunk, encoded.tokens), new

    def allowance(self) -> Allowance:
        """What one request's media may cost; its chunks share it."""
        return Allowance(self.limits)

    def build(self, data: Any, files: Mapping[str, bytes] | None = None, allowance: Allowance | None = None) -> Chunk:
        """The chunk that ``data`` is: an id, or a chunk as `ctxwin.serve.specs` takes it.

        ``allowance``: of the request where it has more than one chunk.
        """
        if isinstance(data, str):
            return self.find(data)
        spec = checked(CHUNK.validate_python, data)
        return build_chunk(spec, files or {}, allowance or self.allowance(), self.find, self.decode)

    def find(self, chunk_id: str) -> Chunk:
        """An uploaded chunk, without its pixels; raises UnknownUpload."""
        chunk = self._read(_key(chunk_id)) if _ID.fullmatch(chunk_id) else None
        if chunk is None:
            raise UnknownUpload(f"chunk must be the id of an uploaded chunk, got {chunk_id[:80]!r}; upload it first")
        return chunk

    def _read(self, key: str) -> Chunk | None:
        record = self.engine.repo.get_json(key, bound=False)
        try:
            chunk = None if record is None else Chunk.model_validate(record)
        except ValueError:
            return None
        if chunk is None or _key(chunk.id) != key:
            return None
        return chunk.model_copy(update={"parts": without_sources(chunk.parts)})

    def describe(self, chunk_id: str) -> dict[str, Any]:
        """What is known of an uploaded chunk; UnknownUpload, too, where its pixels have left the store."""
        chunk = self.find(chunk_id)
        if not self._whole(chunk):
            raise UnknownUpload(f"the content of chunk {chunk_id} has left the store; upload it again")
        return _described(chunk, self.engine.encode(chunk).tokens)

    def delete(self, chunk_id: str) -> None:
        """Forgets an upload; its pixels and embeddings, too, where no open window and no other upload shows them.

        KV stays in the store under its own keys until it is dropped; `Window.evict` with ``forget`` deletes that, too.
        """
        chunk, repo = self.find(chunk_id), self.engine.repo
        embeddings = embeddings_of(self.engine, chunk)
        repo.delete(_key(chunk_id))
        shown: set[str] = set()
        if chunk.media:
            for key in list(repo.store.list("upload/")):
                other = self._read(key)
                if other is not None:
                    shown |= {m.content for m in other.media}
        kept = {m.content for m in chunk.media if m.content in shown or repo.leased(f"source/{m.content}")}
        for part in chunk.media:
            if part.content not in kept:
                repo.delete(f"source/{part.content}")
        if not kept:  # which embeddings are which picture's is the encoder's affair
            for key in embeddings:
                repo.delete(key)

    def _whole(self, chunk: Chunk) -> bool:
        repo = self.engine.repo
        sources = (f"source/{m.content}" for m in chunk.media if chunk.keep_source)
        return repo.contains(_key(chunk.id)) and all(map(repo.contains, sources))


def _key(chunk_id: str) -> str:
    return f"upload/{chunk_id}"


def _described(chunk: Chunk, tokens: int) -> dict[str, Any]:
    media = [{"type": m.media, "frames": m.shape[0], "height": m.shape[1], "width": m.shape[2]} for m in chunk.media]
    return {"object": "ctxwin.chunk", "id": chunk.id, "tokens": tokens, "role": chunk.role, "media": media}
