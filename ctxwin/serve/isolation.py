"""Keeps plain requests of tenants apart: their prefix-cache spaces, the names of their media, and what they may ask for.

"Plain" is a request that the OpenAI server itself answers. Its body is bound to its tenant before that server sees it.
"""

from __future__ import annotations

import base64
import hmac
import json
import math
import secrets
from typing import Any

from ctxwin.engines.base import Engine
from ctxwin.hashing import digest
from ctxwin.serve.endpoints import PLAIN, ROUTERS, check_fields
from ctxwin.serve.errors import NotAllowed
from ctxwin.serve.limits import Allowance
from ctxwin.serve.specs import decode_data, picture_size
from ctxwin.window.decoding import MOST_CHOICES, schema_text

_TRANSFER = ("kv_transfer_params", "ec_transfer_params")
_SCORES = ("logprobs", "top_logprobs", "prompt_logprobs")
_IMAGES = ("image_url", "input_image", "image_embeds")
_MEDIA = (*_IMAGES, "audio_url", "input_audio", "audio_embeds", "video_url", "video_embeds")
"""Types of content parts, each the key of its medium, too, but for OpenAI's ``input_image``."""
_SECRET = secrets.token_bytes(32)
"""Of this process: a mark that could be told from a tenant's name could be put into a file for vLLM to fetch."""


def check_scores(data: Any, most: int) -> None:
    """Raises ValueError for more log-probabilities than the server gives; -1 asks for all of them.

    vLLM itself must refuse none, since windows need the whole vocabulary. ``sampling_params`` is where vLLM's own token
    endpoint has them.
    """
    if most < 0 or not isinstance(data, dict):
        return
    for name in _SCORES:
        wanted = _number(data.get(name))
        if wanted is not None and not 0 <= wanted <= most:
            raise ValueError(f"{name} must be in 0..{most}, got {wanted:g}; raise --max-logprobs")
    ids = data.get("logprob_token_ids")
    if isinstance(ids, list) and len(ids) > most:
        raise ValueError(f"logprob_token_ids must be at most {most} tokens, got {len(ids)}; raise --max-logprobs")
    check_scores(data.get("sampling_params"), most)


def most_scores(given: int, vocabulary: int) -> int:
    """``--max-logprobs`` as `check_scores` takes it: what holds the whole vocabulary is no limit, so -1 may be asked for."""
    return -1 if given >= vocabulary else given


def plain_salt(engine: Engine) -> str:
    """The prefix-cache salt of an engine's exact windows, which plain requests of its tenant share; "" is none."""
    salt = getattr(engine, "plain_salt", "")
    return salt if isinstance(salt, str) else ""


def bind(
    path: str, data: dict[str, Any], tenant: str, salt: str, allowance: Allowance, *, fetch: bool = False
) -> bytes:
    """The body of a plain request as its tenant's own.

    Args:
        salt: of the tenant's prefix-cache space.
        allowance: what its pictures may have; the OpenAI server decodes them, whatever they claim.
        fetch: whether media may be named by URL.

    Raises:
        NotAllowed: fields, media or tools that tenants are not served. TooLarge, BadMedia: pictures beyond the limits.
    """
    if tenant:
        for name in ROUTERS:
            data.pop(name, None)
        check_fields(path, data)
        _check_counts(data)
        _check_tools(data.get("tools"))
    if PLAIN[path].generates:
        _bind(data, tenant, salt)
    if tenant:
        media = _Media(tenant, allowance, fetch)
        for name in ("messages", "input", "system"):
            media.rename(data.get(name))
    return json.dumps(data).encode()


def _check_counts(data: dict[str, Any]) -> None:
    choices = _number(data.get("n"))
    if choices is not None and choices > MOST_CHOICES:
        raise NotAllowed(f"n must be at most {MOST_CHOICES} for tenants, got {choices:g}")
    prompts = data.get("prompt")
    if isinstance(prompts, list) and any(not isinstance(p, int) for p in prompts) and len(prompts) > MOST_CHOICES:
        raise NotAllowed(f"prompt must be at most {MOST_CHOICES} prompts for tenants, got {len(prompts)}")
    for name in ("response_format", "structured_outputs", "text"):
        schema_text(data.get(name))


def _check_tools(tools: Any) -> None:
    """Functions are the client's; other tools are run by the server, for whoever asks."""
    for tool in tools if isinstance(tools, list) else ():
        if isinstance(tool, dict) and tool.get("type", "function") not in ("function", "custom"):
            raise NotAllowed(f"tools must be functions for tenants, got {str(tool.get('type'))[:60]!r}")


def _number(value: Any) -> float | None:
    """What vLLM takes for a number, text that spells one included; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return math.inf if isinstance(value, int) else None


def _bind(data: dict[str, Any], tenant: str, salt: str) -> None:
    """Puts a plain request into its tenant's prefix-cache space."""
    arguments = data.get("vllm_xargs")
    for name in _TRANSFER:
        if data.get(name) is not None or (isinstance(arguments, dict) and name in arguments):
            raise NotAllowed(f"{name} is set by the server alone; leave it out")
    if tenant and not (_number(data.get("priority")) or 0) >= 0:
        raise NotAllowed("priority must be at least 0 for tenants; lower ones would be served before everybody else's")
    if tenant and not salt:
        raise NotAllowed("this engine has no prefix-cache space of the tenant's own; use chunks and windows instead")
    given = data.get("cache_salt")
    if isinstance(given, str) and given:
        data["cache_salt"] = digest("salt of a request", tenant, given)
    elif salt and given is None:
        data["cache_salt"] = salt
    if tenant and data.get("request_id") is not None:  # the name of a response in what vLLM keeps of all tenants'
        data["request_id"] = _own("request of a tenant", tenant, data["request_id"])


class _Media:
    """Gives the media of one request names of their tenant's own.

    Names that clients choose (``uuid``) are keys of caches which all tenants share.
    """

    def __init__(self, tenant: str, allowance: Allowance, fetch: bool) -> None:
        self._tenant = tenant
        self._allowance = allowance
        self._fetch = fetch

    def rename(self, value: Any) -> None:
        """Renames whatever stands in ``value``, a part of the body."""
        if isinstance(value, list):
            for item in value:
                self.rename(item)
        elif isinstance(value, dict):
            self._rename_part(value)
            for key, item in value.items():
                # Media hold no parts; arguments of a call and schemas of a tool are text of the prompt.
                if key not in _MEDIA and (value.get("type"), key) not in (
                    ("tool_use", "input"),
                    ("tool_addition", "tool"),
                ):
                    self.rename(item)

    def _rename_part(self, part: dict[str, Any]) -> None:
        kind, medium = _medium(part)
        if kind.endswith("_embeds"):
            raise NotAllowed(
                "embeddings are not served to tenants: nothing checks them before the engine; send the media"
            )
        linked = _link(part)
        if linked is not None and not self._fetch:
            raise NotAllowed(f"media must be data: URLs for tenants, got {linked[:60]!r}; fetch it and send its bytes")
        if kind in ("image_url", "input_image") and isinstance(medium, str) and linked is None:
            self._allowance.take_picture(*picture_size(decode_data("data:" + medium[5:])))
        named = part.get("uuid")
        if named is None:  # its content is the key; what is fetched is another medium each time
            named = medium if linked is None else secrets.token_hex(16)
        if named is not None:
            part["uuid"] = _own("medium of a tenant", self._tenant, named)
        if part.get("type") == "image" and isinstance(part.get("source"), dict):
            self._mark(part["source"])

    def _mark(self, source: dict[str, Any]) -> None:
        """Puts the tenant's mark behind a picture of ``/v1/messages``, which takes no name for it.

        The key is the file's bytes then, and no decoder reads on behind a picture's end.
        """
        key = "url" if source.get("type") == "url" else "data"
        given = source.get(key)
        if not isinstance(given, str) or (key == "url" and not _is_data(given)):
            return
        head, comma, _ = given.rpartition(",")
        picture = decode_data("data:" + given[5:] if key == "url" else given)
        self._allowance.take_picture(*picture_size(picture))
        mark = hmac.digest(_SECRET, self._tenant.encode(), "sha256")
        source[key] = head + comma + base64.b64encode(picture + mark).decode()


def _medium(part: dict[str, Any]) -> tuple[str, Any]:
    """The kind and the medium of a content part; "" for a part that is none."""
    kind = part.get("type")
    key = next((name for name in _MEDIA if name in part), "") if kind is None else kind
    if not isinstance(key, str) or key not in _MEDIA:
        return "", None
    medium = part.get("image_url" if key == "input_image" else key)
    if key.endswith("_url") or key == "input_image":
        medium = medium.get("url") if isinstance(medium, dict) else medium
    return key, medium


def _link(part: dict[str, Any]) -> str | None:
    """The URL of a medium that the server would have to fetch, else None."""
    kind, medium = _medium(part)
    source = part.get("source")
    named = [part.get("file_url"), source.get("url") if isinstance(source, dict) else None]
    if kind.endswith("_url") or kind == "input_image":
        named.append(medium)
    return next((url for url in named if isinstance(url, str) and not _is_data(url)), None)


def _is_data(url: str) -> bool:
    return url[:5].lower() == "data:"


def _own(what: str, tenant: str, name: Any) -> str:
    """A tenant's own name for what it calls ``name``; whatever JSON that is, it is no name of another one's."""
    return digest(what, tenant, name if isinstance(name, str) else json.dumps(name))
