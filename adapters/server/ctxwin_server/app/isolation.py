"""Isolation of tenants' plain requests: prefix-cache namespaces, names of media, and permitted fields.

A "plain" request is one that the OpenAI server itself answers. Its body is bound to its tenant before that server sees it.
"""

import math
from collections.abc import Callable
from typing import Any

from ctxwin.engines.base import Engine
from ctxwin.engines.sampling import MOST_CHOICES
from ctxwin.hashing import digest
from ctxwin_client.errors import NotAllowed
from ctxwin_server.app.accounts import encode_body
from ctxwin_server.app.content import ContentReader, own_name
from ctxwin_server.app.endpoints import PLAIN, ROUTERS, check_fields
from ctxwin_server.protocol.limits import Allowance

_TRANSFER = ("kv_transfer_params", "ec_transfer_params")
_LISTS = ("bad_words", "logit_bias", "stop", "stop_sequences", "stop_token_ids")
_MOST_ENTRIES = 1024
_SCORES = ("logprobs", "top_logprobs", "prompt_logprobs")


def check_scores(data: Any, most: int) -> None:
    """Raise ValueError for more log-probabilities than the server allows; -1 requests all of them.

    vLLM itself must not limit them, since windows need the whole vocabulary. vLLM's own token endpoint has them in
    ``sampling_params``.
    """
    if most < 0 or not isinstance(data, dict):
        return
    for name in _SCORES:
        requested = _number(data.get(name))
        if requested is not None and not 0 <= requested <= most:
            raise ValueError(f"{name} must be in 0..{most}, got {requested:g}; raise --max-logprobs")
    ids = data.get("logprob_token_ids")
    if isinstance(ids, list) and len(ids) > most:
        raise ValueError(f"logprob_token_ids must be at most {most} tokens, got {len(ids)}; raise --max-logprobs")
    check_scores(data.get("sampling_params"), most)


def check_options(data: Any) -> None:
    """Raise ValueError for options whose cost vLLM does not bound and pays before any other check."""
    if not isinstance(data, dict):
        return
    if not isinstance(data.get("structured_outputs"), dict | None):
        raise ValueError(f"structured_outputs must be an object, got {str(data['structured_outputs'])[:60]!r}")
    for name in _LISTS:
        value = data.get(name)
        if isinstance(value, list | dict) and len(value) > _MOST_ENTRIES:
            raise ValueError(f"{name} must have at most {_MOST_ENTRIES} entries, got {len(value)}")
    check_options(data.get("sampling_params"))


def most_scores(limit: int, vocabulary: int) -> int:
    """Return ``--max-logprobs`` as `check_scores` takes it: -1, no limit, where it covers the whole vocabulary."""
    return -1 if limit >= vocabulary else limit


def plain_salt(engine: Engine) -> str:
    """Return the prefix-cache salt of an engine's exact windows, which plain requests of its tenant share; "" is none."""
    salt = getattr(engine, "plain_salt", "")
    return salt if isinstance(salt, str) else ""


def bind(
    path: str,
    data: dict[str, Any],
    tenant: str,
    salt: str,
    allowance: Allowance,
    *,
    video_size: Callable[[bytes], tuple[int, int]],
    fetch: bool = False,
) -> bytes:
    """Return the body of a plain request, bound to its tenant.

    Args:
        salt: of the tenant's prefix-cache namespace.
        allowance: bounds of its pictures, which the OpenAI server decodes at any size.
        fetch: whether media may be named by URL.
        video_size: see `ContentReader`.

    Raises:
        NotAllowed: fields, media or tools that are not served to tenants. TooLarge, BadMedia: pictures beyond the limits.
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
        content = ContentReader(tenant, allowance, fetch, video_size)
        content.read_messages(data.get("messages"))
        content.read_messages(data.get("input"))
        content.read_content(data.get("system"))
    return encode_body(data)


def _check_counts(data: dict[str, Any]) -> None:
    choices = _number(data.get("n"))
    if choices is not None and choices > MOST_CHOICES:
        raise NotAllowed(f"n must be at most {MOST_CHOICES} for tenants, got {choices:g}")
    prompts = data.get("prompt")
    count = len(prompts) if isinstance(prompts, list) and any(not isinstance(p, int) for p in prompts) else 1
    if count * max(1, choices or 1) > MOST_CHOICES:
        raise NotAllowed(f"n of each prompt must be at most {MOST_CHOICES} together for tenants, got {count} prompts")


def _check_tools(tools: Any) -> None:
    """Raise NotAllowed for tools other than functions: the server would run those for any client."""
    for tool in tools if isinstance(tools, list) else ():
        if isinstance(tool, dict) and tool.get("type", "function") not in ("function", "custom"):
            raise NotAllowed(f"tools must be functions for tenants, got {str(tool.get('type'))[:60]!r}")


def _number(value: Any) -> float | None:
    """Return a value that vLLM reads as a number, numeric text included; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return math.inf if isinstance(value, int) else None


def _bind(data: dict[str, Any], tenant: str, salt: str) -> None:
    """Put a plain request into its tenant's prefix-cache namespace."""
    arguments = data.get("vllm_xargs")
    for name in _TRANSFER:
        if data.get(name) is not None or (isinstance(arguments, dict) and name in arguments):
            raise NotAllowed(f"{name} is set by the server alone; leave it out")
    if tenant and not (_number(data.get("priority")) or 0) >= 0:
        raise NotAllowed("priority must be at least 0 for tenants; lower ones would be served before everybody else's")
    if tenant and not salt:
        raise NotAllowed("this engine has no prefix-cache space of the tenant's own; use chunks and windows instead")
    client_salt = data.get("cache_salt")
    if isinstance(client_salt, str) and client_salt:
        data["cache_salt"] = digest("salt of a request", tenant, client_salt)
    elif salt and client_salt is None:
        data["cache_salt"] = salt
    if tenant and data.get("request_id") is not None:  # it names the response in vLLM's store, which tenants share
        data["request_id"] = own_name("request of a tenant", tenant, data["request_id"])
