"""Images of chats that arrive again are decoded once.

An agent sends its screenshots again with every request, and vLLM decodes each of them before it finds their embeddings or KV in
its caches. `use` has vLLM take `DecodedImages` as its media connector, which is vLLM's own way to load media differently.
"""

import os
from typing import Any

import aiohttp
from blake3 import blake3  # eight times as fast as SHA-256; vLLM names media by it
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaConnector

from ctxwin.store.lru import LRUCache

NAME, VARIABLE = "ctxwin", "VLLM_MEDIA_CONNECTOR"
ROOM = 256 << 20  # bytes of decoded images that a server keeps, a hundred of 896 x 896 pixels
_decoded: LRUCache[Any] = LRUCache(ROOM)


@MEDIA_CONNECTOR_REGISTRY.register(NAME)
class DecodedImages(MediaConnector):  # type: ignore[misc]  # mypy sees vLLM as untyped
    """vLLM's media connector, with the images of ``data:`` URLs kept as decoded, by their bytes and by how they are decoded."""

    async def fetch_image_async(self, image_url: str, *, image_mode: str | None = "RGB") -> Any:
        """Return an image with its bytes, as vLLM does; it is shared, and nobody may change it."""
        if image_url[:5].lower() != "data:":
            return await super().fetch_image_async(image_url, image_mode=image_mode)
        how = sorted(({"image_mode": image_mode} | self.media_io_kwargs.get("image", {})).items())
        key = f"{blake3(image_url.encode()).hexdigest()} {how}"  # a megabyte takes less time than a thread does to wake up
        image = _decoded.get(key)
        if image is None:
            image = await super().fetch_image_async(image_url, image_mode=image_mode)
            _decoded.put(key, image, image.width * image.height * len(image.getbands()) + len(image_url))
        return image

    async def load_from_url_async(self, url: str, media_io: Any, *, fetch_timeout: int | None = None) -> Any:
        """Load media as vLLM does; what an address does not give is an error of the request (400), not of the server."""
        try:
            return await super().load_from_url_async(url, media_io, fetch_timeout=fetch_timeout)
        except (aiohttp.ClientError, OSError, RuntimeError) as error:
            got = f"media must be readable at {url[:200]!r}, got {type(error).__name__}: {error}"
            raise ValueError(str(error) if url[:5].lower() == "data:" else got) from error


def use() -> None:
    """Load images of this process through `DecodedImages`, unless the environment names a media connector."""
    os.environ.setdefault(VARIABLE, NAME)
