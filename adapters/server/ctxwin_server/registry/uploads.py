"""Chunks a tenant has uploaded, by content id, in the tenant's own store."""

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ctxwin.chunk import Chunk
from ctxwin.engines.base import Engine
from ctxwin.errors import StoreUnavailable
from ctxwin.store.base import Store
from ctxwin.validation import validate
from ctxwin.window.placements import keep_source
from ctxwin_client.errors import TooLarge, UnknownUpload
from ctxwin_server.protocol.limits import Allowance, Limits
from ctxwin_server.protocol.schemas import CHUNK, Decode, build_chunk, without_sources

_ID = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Uploads:
    """Uploaded chunks of one engine's store. Thread-safe; nothing is kept in memory.

    Records are not leased: a chunk that a full store dropped is unknown, and has to be uploaded again. A record is valid
    only if its content matches its id, so anyone who can write to the store can at most make an upload unknown.
    """

    engine: Engine
    limits: Limits
    decode: Decode

    def put(self, data: Any, files: Mapping[str, bytes] | None = None) -> tuple[dict[str, Any], bool]:
        """Store a chunk and encode it; return its description and whether it is new. Idempotent by content.

        Raises ValueError, BadMedia, TooLarge, UnsupportedModel. Cost: decoding, and one run of the vision tower for new
        media.
        """
        chunk = self.build(data, files)
        new = not self._whole(chunk)
        encoded = self.engine.encode(chunk)
        if new:
            keep_source(self.engine, chunk)
            stored = self.engine.repo.put_json(_key(chunk.id), chunk.light().model_dump(mode="json"), bound=False)
            if not stored or not self._whole(chunk):
                check_reachable(self.engine.repo.store, "chunks")
                raise TooLarge("the store refused the chunk: it is full of what open windows use; close some first")
        return _describe(chunk, encoded.tokens), new

    def allowance(self) -> Allowance:
        """Return the allowance for one request's media, which its chunks share."""
        return Allowance(self.limits)

    def build(self, data: Any, files: Mapping[str, bytes] | None = None, allowance: Allowance | None = None) -> Chunk:
        """Build the chunk that ``data`` describes: an id, or a chunk as `ctxwin_server.protocol.schemas` defines it.

        ``allowance``: of the request, if it has several chunks.
        """
        if isinstance(data, str):
            return self.find(data)
        spec = validate(CHUNK.validate_python, data)
        return build_chunk(spec, files or {}, allowance or self.allowance(), self.find, self.decode)

    def find(self, chunk_id: str) -> Chunk:
        """Return an uploaded chunk, without its pixels; raise UnknownUpload."""
        chunk = self._read(_key(chunk_id)) if _ID.fullmatch(chunk_id) else None
        if chunk is None:
            check_reachable(self.engine.repo.store, "chunks")
            raise UnknownUpload(f"chunk must be the id of an uploaded chunk, got {chunk_id[:80]!r}; upload it first")
        return chunk

    def _read(self, key: str) -> Chunk | None:
        with suppress(ValueError):  # there is none, or it is damaged
            chunk = Chunk.model_validate(self.engine.repo.get_json(key, bound=False))
            if _key(chunk.id) == key:
                return chunk.model_copy(update={"parts": without_sources(chunk.parts)})
        return None

    def describe(self, chunk_id: str) -> dict[str, Any]:
        """Describe an uploaded chunk; raise UnknownUpload also if its pixels have left the store."""
        chunk = self.find(chunk_id)
        if not self._whole(chunk):
            check_reachable(self.engine.repo.store, "chunks")
            raise UnknownUpload(f"the content of chunk {chunk_id} has left the store; upload it again")
        return _describe(chunk, self.engine.encode(chunk).tokens)

    def delete(self, chunk_id: str) -> None:
        """Delete an upload, with its pixels and embeddings unless an open window or another upload uses them.

        Its KV stays in the store until it is evicted; `Window.evict` with ``forget`` deletes it, too.
        """
        chunk, repo = self.find(chunk_id), self.engine.repo
        embeddings = self.engine.media_keys(chunk)
        repo.delete(_key(chunk_id))
        in_use: set[str] = set()
        if chunk.media:
            for key in list(repo.store.list("upload/")):
                if (other := self._read(key)) is not None:
                    in_use |= {m.content for m in other.media}
        retained = {m.content for m in chunk.media if m.content in in_use or repo.leased(f"source/{m.content}")}
        for part in chunk.media:
            if part.content not in retained:
                repo.delete(f"source/{part.content}")
        if not retained:  # only the encoder knows which embeddings belong to which picture
            for key in embeddings:
                repo.delete(key)

    def _whole(self, chunk: Chunk) -> bool:
        repo = self.engine.repo
        sources = (f"source/{m.content}" for m in chunk.media if chunk.keep_source)
        return repo.contains(_key(chunk.id)) and all(map(repo.contains, sources))


def check_reachable(store: Store, what: str) -> None:
    """Raise StoreUnavailable where a store does not answer, and so seems to hold nothing or to be full."""
    if not store.reachable():
        raise StoreUnavailable(
            f"the store must answer to take and give {what}, and does not; try again, and look at its server"
        )


def _key(chunk_id: str) -> str:
    return f"upload/{chunk_id}"


def _describe(chunk: Chunk, tokens: int) -> dict[str, Any]:
    media = [{"type": m.media, "frames": m.shape[0], "height": m.shape[1], "width": m.shape[2]} for m in chunk.media]
    return {"object": "ctxwin.chunk", "id": chunk.id, "tokens": tokens, "role": chunk.role, "media": media}
