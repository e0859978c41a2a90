"""Content parts of plain requests, read as vLLM reads them: by their fields, not by the type they claim.

vLLM reads a part with a ``uuid`` by the first media field in it, and pydantic chooses among its models by the fields that
fit. So a part has one medium, in the field of its type, and no other field that could be one; what is not listed here is
refused, and with it whatever a newer vLLM reads.
"""

import base64
import hmac
import json
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ctxwin.hashing import digest
from ctxwin_chats.bodies import decode_data, picture_size
from ctxwin_client.errors import NotAllowed
from ctxwin_server.protocol.limits import Allowance

TEXTS = frozenset(
    {
        "text", "input_text", "output_text", "refusal", "thinking", "reasoning_text", "summary_text", "redacted_thinking",
        "tool_reference", "tool_use", "tool_result", "tool_addition", "tool_removal",
    }
)  # fmt: skip
"""Types of parts that hold no medium of their own."""
MEDIA = {
    "image_url": "image_url",
    "input_image": "image_url",
    "audio_url": "audio_url",
    "input_audio": "input_audio",
    "video_url": "video_url",
    "image": "source",
}
"""The field that holds the medium of a part of each type; ``image`` is Anthropic's."""
EMBEDDINGS = frozenset({"image_embeds", "audio_embeds", "video_embeds", "prompt_embeds"})
_PICTURES = ("image_url", "input_image", "image")
_NAMED = frozenset({*MEDIA.values(), "uuid", "data"})
_LOOKS_LIKE_MEDIA = re.compile("image|audio|video|embed|media|file|url|picture", re.IGNORECASE)
"""Matches names of fields for media. OpenAI's, Anthropic's and vLLM's fields for media all match."""
_DATA_OF = {"redacted_thinking": "data"}
_FORMAT = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+_-]{0,63}")
"""A medium's format, which vLLM copies into a ``data:`` URL."""
_MEDIA_TYPE = re.compile(r"image/" + _FORMAT.pattern)
_TEXT_FIELDS = frozenset({"text", "refusal", "thinking", "name", "tool_use_id", "id", "signature", "tool_name"})
VIDEO_FRAMES = 32
"""Frames that vLLM samples from a video, unless the operator's ``--media-io-kwargs`` say otherwise."""
_SECRET = secrets.token_bytes(32)
"""Of this process: a mark that can be derived from a tenant's name could be put into a file for vLLM to fetch."""


def own_name(kind: str, tenant: str, name: Any) -> str:
    """Return the internal name of what a tenant calls ``name`` (any JSON); no two tenants share one."""
    return digest(kind, tenant, name if isinstance(name, str) else json.dumps(name))


@dataclass(frozen=True)
class ContentReader:
    """Checks the content of one tenant's request, counts its media, and gives them names of the tenant's own.

    Names that clients choose (``uuid``) are keys of caches which all tenants share.

    Args:
        allowance: pixels and frames that the request may have.
        fetch: whether media may be named by URL.
        video_size: width and height of a video by its header; BadMedia where it has none.
    """

    tenant: str
    allowance: Allowance
    fetch: bool
    video_size: Callable[[bytes], tuple[int, int]]

    def read_messages(self, messages: Any) -> None:
        """Read a chat's messages, or the items of a response's input. The media among them are changed in place.

        Raises:
            ValueError: what has no one reading. NotAllowed: what tenants are not served. TooLarge, BadMedia.
        """
        if messages is None or isinstance(messages, str):
            return
        if not isinstance(messages, list):
            raise ValueError(f"messages and items must be a list, got {type(messages).__name__}")
        for message in messages:
            if not isinstance(message, dict):
                raise ValueError(f"a message must be an object, got {_excerpt(message)}")
            _refuse_media(message, f"a message of role {_excerpt(message.get('role'))}")
            for name in ("content", "output"):
                self.read_content(message.get(name))

    def read_content(self, content: Any) -> None:
        """Read the parts of a message, of a system prompt or of a tool's result."""
        if content is None or isinstance(content, str):
            return
        if not isinstance(content, list):
            raise ValueError(f"content must be text or a list of parts, got {type(content).__name__}")
        for part in content:
            if isinstance(part, str):
                continue
            if not isinstance(part, dict):
                raise ValueError(f"a content part must be an object, got {_excerpt(part)}")
            self._read_part(part)

    def _read_part(self, part: dict[str, Any]) -> None:
        kind = part.get("type")
        if kind is None:
            kind = _only_medium(part)
        if not isinstance(kind, str):
            raise ValueError(f"the type of a content part must be a text, got {_excerpt(kind)}")
        if kind in EMBEDDINGS:
            raise NotAllowed("embeddings are not served to tenants: nothing checks them before the engine; send media")
        if kind in TEXTS:
            _refuse_media(part, f"a content part of type {kind!r}", {_DATA_OF.get(kind, "")})
            for name in _TEXT_FIELDS & part.keys():
                if not isinstance(part[name], str | None):
                    raise ValueError(f"{name} of a content part must be a text, got {_excerpt(part[name])}")
            if kind == "tool_result":
                self.read_content(part.get("content"))
        elif kind in MEDIA:
            field = MEDIA[kind]
            _refuse_media(part, f"a content part of type {kind!r}", {field, "uuid"})
            if kind == "image":
                self._read_source(part)
            else:
                self._read_medium(kind, field, part)
        else:
            raise NotAllowed(
                f"content parts must be of type {', '.join(sorted({*TEXTS, *MEDIA}))} for tenants, got {_excerpt(kind)}"
            )

    def _read_medium(self, kind: str, field: str, part: dict[str, Any]) -> None:
        """Read the medium of one of OpenAI's or vLLM's own parts, which may be named."""
        medium = part.get(field)
        if kind == "input_audio":
            _check_audio(medium)
        else:
            url = medium.get("url") if isinstance(medium, dict) else medium
            if url is not None:
                self._read_url(kind, url)
            medium = url
        name, named_by = part.get("uuid"), "client"
        if name is None:  # its content is the key; what is fetched is another medium each time
            linked = isinstance(medium, str) and not _is_data(medium)
            name, named_by = secrets.token_hex(16) if linked else medium, "content"
        if name is not None:  # what a client chooses is never the name of a medium that has none
            part["uuid"] = own_name(f"medium of a tenant by {named_by}", self.tenant, name)

    def _read_url(self, kind: str, url: Any) -> None:
        if not isinstance(url, str):
            raise ValueError(f"the URL of a medium must be a text, got {_excerpt(url)}")
        if not _is_data(url):
            if not self.fetch:
                raise NotAllowed(f"media must be data: URLs for tenants, got {url[:60]!r}; fetch it and send its bytes")
        elif kind in _PICTURES:
            self.allowance.take_picture(*picture_size(decode_data("data:" + url[5:])))
        elif kind == "video_url":
            self._take_video(url)

    def _take_video(self, url: str) -> None:
        """Count the frames that vLLM decodes of a video in a ``data:`` URL, which may be a sequence of pictures."""
        head, _, data = url[5:].partition(",")
        if head.partition(";")[0].lower() == "video/jpeg":
            for frame in data.split(",", VIDEO_FRAMES)[:VIDEO_FRAMES]:
                self.allowance.take_picture(*picture_size(decode_data(frame)))
        else:
            width, height = self.video_size(decode_data("data:" + url[5:]))
            self.allowance.take_frames(VIDEO_FRAMES, VIDEO_FRAMES * width * height)

    def _read_source(self, part: dict[str, Any]) -> None:
        """Read a picture of ``/v1/messages``, which has no name, and append the tenant's mark to it.

        vLLM's cache key is the file's bytes then, and no decoder reads past a picture's end.
        """
        source = part.get("source")
        if not isinstance(source, dict):
            raise ValueError(f"the source of a picture must be an object, got {_excerpt(source)}")
        if source.get("type") not in (None, "url", "base64"):
            raise NotAllowed(f"the source of a picture must be of type base64 or url, got {_excerpt(source['type'])}")
        kind = source.get("media_type")
        if kind is not None and not (isinstance(kind, str) and _MEDIA_TYPE.fullmatch(kind)):
            raise ValueError(f"media_type must be like image/png, got {_excerpt(kind)}")
        key = "url" if source.get("type") == "url" else "data"
        medium = source.get(key)
        if not isinstance(medium, str):
            raise ValueError(f"{key} of a picture's source must be a text, got {_excerpt(medium)}")
        if key == "url" and not _is_data(medium):
            self._read_url("image", medium)
            return
        head, comma, _ = medium.rpartition(",")
        if key == "data" and comma:
            raise ValueError("data of a picture's source must be base64 alone, got a comma in it")
        picture = decode_data("data:" + medium[5:] if key == "url" else medium)
        self.allowance.take_picture(*picture_size(picture))
        mark = hmac.digest(_SECRET, self.tenant.encode(), "sha256")
        source[key] = head + comma + base64.b64encode(picture + mark).decode()


def _only_medium(part: dict[str, Any]) -> Any:
    """Return the type of an untyped part: that of its only medium."""
    kinds = [kind for kind in (*MEDIA, *EMBEDDINGS) if kind not in ("input_image", "image") and kind in part]
    if len(kinds) != 1:
        raise ValueError(f"a content part without a type must have one medium, got {_excerpt(sorted(kinds))}")
    return kinds[0]


def _refuse_media(fields: dict[str, Any], where: str, allowed: set[str] | frozenset[str] = frozenset()) -> None:
    """Raise ValueError for a field that is, or could be, a medium beside the allowed ones; drop those that are null.

    A null is a medium, too, for vLLM: the one that has the part's ``uuid``.
    """
    for name in list(fields):
        if name not in allowed and (name in _NAMED or _LOOKS_LIKE_MEDIA.search(name)):
            if fields[name] is not None:
                raise ValueError(f"{where} must have no field {name[:60]!r}; send each medium as a part of its own")
            del fields[name]


def _check_audio(medium: Any) -> None:
    if medium is None:
        return
    if not isinstance(medium, dict) or not isinstance(medium.get("data"), str | None):
        raise ValueError("input_audio must be an object with data, as base64, and format")
    kind = medium.get("format")
    if kind is not None and not (isinstance(kind, str) and _FORMAT.fullmatch(kind)):
        raise ValueError(f"format of input_audio must be like wav, got {_excerpt(kind)}")


def _is_data(url: str) -> bool:
    return url[:5].lower() == "data:"


def _excerpt(value: Any) -> str:
    return repr(value)[:60]
