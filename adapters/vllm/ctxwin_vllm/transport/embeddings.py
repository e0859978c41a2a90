"""Vision embeddings as files in one folder, which the encoder-cache connector loads.

A file is a blob of the store's codec (`ctxwin.store.codec`) with one tensor, ``embeddings [tokens, width]``, and a sum of that
blob. The tensor has the form that vLLM's encoder cache holds: ``width`` is the model's hidden size, times 1 + D for a deepstack
model with D injected layers. What cannot be used (missing, corrupt, of another model) is a miss. Nothing here imports vLLM.
"""

from __future__ import annotations

import hashlib
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ctxwin.errors import StoreCorrupt
from ctxwin.store import codec
from ctxwin_vllm.lifecycle.folders import sum_of

if TYPE_CHECKING:
    import torch

_TENSOR, _SUM_BYTES = "embeddings", 8
_log = logging.getLogger("ctxwin.engines")


def name_of(identifier: str) -> str:
    """Return the name of the embeddings of a multimodal identifier: the part before its first ``@``.

    The rest separates blocks in vLLM's prefix cache (``<name>@<provenance>``). It identifies the KV of the medium's tokens, not
    its embeddings.
    """
    return identifier.partition("@")[0]


def file_name(name: str) -> str:
    """Return the file name of the embeddings ``name``; any text is safe, because it is hashed."""
    return f"embed-{hashlib.sha256(name.encode()).hexdigest()}"


def encode(embeddings: torch.Tensor, identity: str = "") -> bytes:
    """Return the content of a file.

    Args:
        embeddings: ``[tokens, width]`` on any device, in the dtype the model computes in.
        identity: digest of what makes embeddings of this model interchangeable; compared on a read.
    """
    if embeddings.ndim != 2:
        raise ValueError(f"embeddings must be [tokens, width], got {list(embeddings.shape)}")
    blob = codec.encode_tensors({_TENSOR: embeddings}, {"identity": identity}, checked=False)
    return blob + sum_of(blob).to_bytes(_SUM_BYTES, "little")


@dataclass
class EmbeddingFiles:
    """Embeddings by name in a folder in shared memory, which may be gone; thread-safe, also beside the writing process.

    ``identity``: see `encode`.
    """

    folder: Path
    identity: str = ""

    def path(self, name: str) -> Path:
        """Return the path of the embeddings of that name."""
        return self.folder / file_name(name)

    def get(self, name: str) -> torch.Tensor | None:
        """Return the embeddings, read-only, or None. Cost: a read and a sum, both at the speed of memory."""
        path = self.path(name)
        try:
            with path.open("rb") as file:
                blob = file.read(max(0, os.fstat(file.fileno()).st_size - _SUM_BYTES))
                total = int.from_bytes(file.read(), "little")
            if sum_of(blob) != total:
                raise StoreCorrupt("they are not what the engine wrote")
            tensors, meta = codec.decode_tensors(blob, checked=False)
            embeddings = tensors.get(_TENSOR)
            if embeddings is None or embeddings.ndim != 2 or meta.get("identity") != self.identity:
                raise StoreCorrupt("they are another model's, or none")
            return embeddings
        except FileNotFoundError:
            return None
        except (OSError, StoreCorrupt) as error:
            _log.warning("embeddings %s cannot be used: %s", path.name, error)
            return None
