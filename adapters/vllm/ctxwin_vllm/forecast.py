"""Forecasts of the tokens that each request of a call would compute; see `Engine.forecast`.

Follows `VLLMEngine` and its connector: which requests a layout takes, the loaded prefix of each, the blocks in vLLM's prefix
cache, and the part of a block that is computed again rather than loaded.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ctxwin.engines.segments import Call, Encoded, Segment, gap_runs
from ctxwin.hashing import digest
from ctxwin_vllm.cache_namespace import CacheNamespace
from ctxwin_vllm.inputs import join
from ctxwin_vllm.prompts import EnginePrompts
from ctxwin_vllm.transport.base import RequestMeta


def forecast(prompts: EnginePrompts, calls: Sequence[Call]) -> list[int] | None:
    """See `Engine.forecast`."""
    if prompts.core.kv.recurrent or any(segment.merged for call in calls for segment in call.layout):
        return None
    blocks: set[bytes] = set()  # blocks that earlier requests of these calls leave in the prefix cache
    return [computed for call in calls for computed in _requests(prompts, call, blocks)]


def _requests(prompts: EnginePrompts, call: Call, blocks: set[bytes]) -> Iterator[int]:
    """Yield the computed tokens of each request, as `AskRunner.fill_layout` and its callers would make them."""
    layout = itertools.chain.from_iterable(segment.parts() for segment in call.layout)
    # Of an empty system prompt nothing is computed.
    segments = [replace(s, span=call.placeholder) if s.span is None and not s.encoded.tokens else s for s in layout]
    namespace = prompts.namespace(segments, call.salt)
    last = max((i for i, segment in enumerate(segments) if segment.span is not None), default=0)
    for i in range(last):
        if segments[i].gap and (runs := gap_runs([s.gap for s in segments], i)):
            rests = [prompts.core.inputs.end_at(segments, run.stop, prompts.core.whole_media)[1] for run in runs]
            at_once = [j for run in runs for j in run]
            yield sum(segments[j].tokens for j in at_once) + sum(rest.tokens for rest in rests if rest is not None)
            for j in at_once:
                segments[j] = replace(segments[j], span=call.placeholder)
        elif segments[i].span is None and segments[i + 1].span is not None:
            prefix, rest = prompts.core.inputs.end_at(segments, i + 1, prompts.core.whole_media)
            run_namespace = namespace
            if rest is not None and any(s.approximate for s in segments):
                run_namespace = prompts.namespace(prefix, digest(call.salt, "rest", i))
            yield _computed_tokens(prompts, prefix, rest, run_namespace, blocks)
            segments[: i + 1] = [replace(s, span=call.placeholder) if s.span is None else s for s in segments[: i + 1]]
    extra = call.query is None and call.has_query
    yield _computed_tokens(prompts, segments, call.query, namespace, blocks, extra=extra)


def _computed_tokens(
    prompts: EnginePrompts,
    segments: Sequence[Segment],
    tail: Encoded | None,
    namespace: CacheNamespace,
    blocks: set[bytes],
    extra: bool = False,
) -> int:
    """Return the tokens that one request computes; ``extra``: a query of unknown tokens follows, which is not counted."""
    core, block = prompts.core, prompts.core.block_size
    ids, media = join([*(s.encoded for s in segments), *([tail] if tail is not None else ())])
    names = prompts.names(ids, media, namespace) if core.has_prefix_cache else []
    total = len(ids) + extra
    hit = min(core.prefixes.hit(names, blocks), (total - 1) // block * block)
    covered = sum(s.tokens for s in itertools.takewhile(lambda s: s.span is not None, segments))
    loadable = min(covered, total - 1)
    min_load = core.min_load if namespace.exact else 0
    loaded = covered // block * block if min_load else None
    placeholder_tokens = 0
    for medium in media:
        end = medium.offset + medium.tokens
        if end <= loadable and (loaded is None or end <= loaded or not prompts.has_embeddings(medium.key)):
            placeholder_tokens = max(placeholder_tokens, end)
    meta = RequestMeta(covered, placeholder_tokens, private_from=namespace.private_from, min_load=min_load)
    blocks.update(names)
    return total - hit - meta.tokens_to_load(hit, total) - extra
