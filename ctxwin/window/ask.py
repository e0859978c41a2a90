"""One question to a window: `ask` lays out its KV, runs the engine, and settles what was learnt about each chunk's KV."""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Unpack

from ctxwin import tracing
from ctxwin.chunk import Chunk
from ctxwin.engines.base import Engine
from ctxwin.engines.results import Generation
from ctxwin.engines.sampling import MOST_CHOICES, Sampling, SamplingOptions, check_sampling, sampling_under
from ctxwin.engines.segments import Encoded, Segment
from ctxwin.errors import AnswerStopped, BudgetExceeded
from ctxwin.hashing import digest
from ctxwin.validation import as_list, check_flags, check_integer, check_unicode
from ctxwin.window import edits
from ctxwin.window.answer import Answer, Disposability, Usage
from ctxwin.window.choice import Choice
from ctxwin.window.core import WindowCore
from ctxwin.window.defaults import check_searchable
from ctxwin.window.layout import Layout, Work
from ctxwin.window.protocols import ServedAnswer
from ctxwin.window.state import State

if TYPE_CHECKING:
    import torch

    from ctxwin.fidelity import Fidelity
    from ctxwin.kv.layout import SpanKV
    from ctxwin.window.protocols import Searchable

OnToken = Callable[[int, str], bool]
"""Called with each token and the whole text so far; returning False ends the answer there."""
Stop = str | int | Sequence[str | int]
"""Texts and token ids that end an answer."""


class AskOptions(SamplingOptions, total=False):
    """Options of `Window.ask`, `stream`, `aask` and `astream` beside query and length; None leaves the default.

    Attributes:
        remember: append the exchange as a chunk, with the KV of this very pass; without, to be computed later, where the end of
            its turn exceeds what the engine takes. An answer that the chat template writes differently in an earlier turn
            (Qwen3's drops thinking) is remembered as written there, and computed so.
        logprobs: how many log-probabilities of the first token to return; -1 for the whole vocabulary.
        stop: texts or token ids that end the answer and are no part of it.
        json_schema: the answer is JSON of this schema; ValueError for one that the engine cannot enforce (``not``, ``if`` ...).
        tools: what the model may call, as OpenAI describes tools; calls are in ``Answer.tool_calls``. The first question
            with other tools conditions the chunks behind the system prompt that shows them.
        libraries: where the model may look things up in the middle of its answer, by a call of the tool ``look_up``: what is
            found is placed behind the answer so far, which keeps its KV, and it goes on. `Answer.looked_up` has what was
            looked up, at most four times; it stays in the window where the exchange is remembered. Of a server: a
            `RemoteLibrary`, or its name.
        n: how many answers, which differ where ``temperature`` is above 0; those behind the first are in ``Answer.others``.
        outputs: names of the stage outputs to return in ``Answer.outputs``, of an engine that keeps them; default: all of
            them, of a server none. A server returns references, for `ctxwin_client.fetch_output`.
    """

    remember: bool
    logprobs: int | None
    stop: Stop | None
    json_schema: Mapping[str, Any] | str | None
    tools: Sequence[Mapping[str, Any]] | None
    libraries: Sequence[Any] | None
    n: int | None
    outputs: Sequence[str] | None


def not_stopped() -> bool:
    """Return False: the default ``stopped`` callback."""
    return False


@dataclass(frozen=True)
class Question:
    """A query and how to decode its answer. Raises ValueError for values out of range.

    Attributes:
        sampling: how to decode; at most ``sampling.max_tokens`` tokens.
        remember: whether the exchange becomes a chunk; a function decides by the answer's text.
        stop: texts that end the answer and are no part of it.
        bare: whether the query may be empty, where what is placed ends in the request itself.
        after: the piece of the chat template behind a remembered answer; None ends its turn and reopens the user's.
        tools: what the model may call, as OpenAI describes tools; `ctxwin.window.tools` asks such questions.
        libraries: where the model may look things up while it answers.
        n: how many answers; those behind the first are in `Answer.others`.
        outputs: names of the stage outputs to return; None is all that the engine keeps.
    """

    query: str
    sampling: Sampling = field(default_factory=Sampling)
    remember: bool | Callable[[str], bool] = False
    stop: tuple[str, ...] = ()
    bare: bool = False
    after: str | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    libraries: tuple[Searchable, ...] = ()
    n: int = 1
    outputs: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.query, str) or not (self.query or self.bare):
            raise ValueError(f"query must be a non-empty str, got {self.query!r}")
        check_unicode("query", self.query)
        check_sampling(self.sampling)
        check_integer("n", self.n, 1, MOST_CHOICES)

    @classmethod
    def of(cls, query: str, max_tokens: int = 32, **options: Unpack[AskOptions]) -> Question:
        """Return the question for these arguments of `Window.ask`. Raises TypeError for an unknown option."""
        if unknown := options.keys() - AskOptions.__annotations__.keys():
            raise TypeError(f"options must be of {', '.join(AskOptions.__annotations__)}, got {sorted(unknown)}")
        chosen: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
        remember, stop, schema = chosen.pop("remember", False), chosen.pop("stop", ()), chosen.get("json_schema")
        if not callable(remember):
            check_flags(remember=remember)
        tools = as_list("tools", chosen.pop("tools", ()), "a dict")
        libraries = as_list("libraries", chosen.pop("libraries", ()), "a library")
        for library in libraries:
            check_searchable("each of libraries", library)
        n, outputs = chosen.pop("n", 1), chosen.pop("outputs", None)
        stops = [stop] if isinstance(stop, str | int) else as_list("stop", stop, "a text or token id")
        if any(
            isinstance(s, bool) or not ((isinstance(s, int) and s >= 0) or (isinstance(s, str) and s)) for s in stops
        ):
            raise ValueError(f"stop must be non-empty texts or token ids, got {stop!r}")
        if schema is not None and not isinstance(schema, str):
            if not isinstance(schema, Mapping):
                raise TypeError(f"json_schema must be a dict or JSON text, got {type(schema).__name__}")
            chosen["json_schema"] = json.dumps(dict(schema))
        sampling = Sampling(max_tokens, stop_ids=tuple(s for s in stops if isinstance(s, int)), **chosen)
        texts = tuple(s for s in stops if isinstance(s, str))
        names = None if outputs is None else tuple(as_list("outputs", outputs, "a name"))
        return cls(query, sampling, remember, texts, tools=tuple(tools), libraries=tuple(libraries), n=n, outputs=names)


@dataclass
class _PreparedAsk:
    """A question and what the engine is given for it: the state laid out, the query, and what that has cost so far."""

    question: Question
    state: State
    strategy: str | None
    fidelity: Fidelity
    layout: Layout
    query: Encoded
    sampling: Sampling
    work: Work
    captures_query: bool
    planned_ms: float
    layout_s: float


def ask(
    core: WindowCore,
    question: Question,
    *,
    on_token: OnToken | None = None,
    stopped: Callable[[], bool] = not_stopped,
    audited: bool = True,
) -> Answer:
    """Answer ``question`` over the current state. Raises like `Window.ask`.

    ``stopped`` is polled: once it is true the engine stops, AnswerStopped is raised and the window stays as it was.
    ``audited``: True if audits may sample this answer.
    """
    wants_outputs = core.engine.spec.outputs and question.outputs != ()
    if question.outputs and not wants_outputs:
        raise ValueError(f"outputs must be left out, got {list(question.outputs)}; open the engine with outputs=True")
    with tracing.span("ask"), core.writing(edit=bool(question.remember), stopped=stopped) as state:
        begin, state = time.perf_counter(), core.audits.with_fallbacks(state)
        with core.counting_encodes():
            prompt = _prepare(core, question, state, wants_outputs)
            generation = _generate(core, prompt, on_token, stopped)
            text, ids, is_cut = _cut(core.engine, generation, question.stop)
            if generation.fallbacks:
                prompt.layout = prompt.layout.as_computed(state)
            with tracing.span("settle", captured=len(generation.captured)):
                answered_state = core.assembly.write_back(state, prompt.layout, generation.captured, prompt.fidelity)
            new_state, remembered = answered_state, None
            if question.remember is True or (question.remember and question.remember(text)):
                new_state, remembered = _with_exchange(core, answered_state, prompt, ids, generation)
            if prompt.sampling.merge_prompt:  # what the chunks have stays theirs
                prompt.layout = prompt.layout.as_computed(state)
        layout, most, total_s = prompt.layout, prompt.sampling.max_tokens, time.perf_counter() - begin
        if stopped():
            raise AnswerStopped("the answer was stopped before its end")
        prefilled = missed = 0
        if core.idle is not None:
            computed = generation.computed_tokens + prompt.work.tokens
            prefilled, missed = core.idle.served(state, layout, computed, prompt.query.tokens + most)
        outputs = _outputs(layout, generation, question.outputs) if wants_outputs and layout.exact else None
        core.commit(new_state)
        core.prefill_ahead(answered=True)
        usage = _usage(core, prompt, generation, total_s, prefilled_tokens=prefilled, missed_tokens=missed)
        core.vision_encodes = 0
        answer = Answer(text, ids, usage, generation.logprobs, remembered=remembered, outputs=outputs)
        ended = not is_cut and len(ids) < most and generation.finished
        _report(core, prompt, answered_state, answer, ended=ended, audited=audited)
        core.engine.costs.settle_later()
    return answer


def _report(
    core: WindowCore, prompt: _PreparedAsk, answered_state: State, answer: Answer, *, ended: bool, audited: bool
) -> None:
    """Tell traces, audits and observers of an answer, and of the state with its KV; ``ended``: the model ended it by itself."""
    usage, layout, query, sampling = answer.usage, prompt.layout, prompt.question.query, prompt.sampling
    tracing.note(
        window=core.id, engine=usage.engine, prompt_tokens=usage.prompt_tokens, computed_tokens=usage.computed_tokens,
        forwards=usage.forwards, bytes_loaded=usage.bytes_loaded,
        **{f"lane.{lane}": tokens for lane, tokens in usage.reused_tokens.items()},
    )  # fmt: skip
    served = ServedAnswer(
        core.id, core.parent, prompt.state, answered_state, prompt.strategy, prompt.fidelity, query,
        sampling.max_tokens, sampling.temperature, core.assembly.memo,
    )  # fmt: skip
    core.audits.submit(served, layout, answer, audited=audited, ended=ended)
    if core.observers:
        new, lanes = (answer.remembered,) if answer.remembered else (), {c.entry.id: c.lane for c in layout.choices}
        core.announce(core.event("ask", new, query=query, answer=answer, lanes=lanes, ended=ended))


def _prepare(core: WindowCore, question: Question, state: State, wants_outputs: bool) -> _PreparedAsk:
    """Return what the engine is given for ``question``, and form what of it the fidelity asks for. Raises BudgetExceeded."""
    begin, sampling, costs = time.perf_counter(), question.sampling, core.engine.costs
    strategy, fidelity = core.audits.in_force()
    query = core.engine.encode_query(question.query)
    check_budget(state, query.tokens, sampling.max_tokens)
    if question.remember:  # what cannot be remembered is refused before it is answered
        turn = core.engine.encode_exchange(question.query, (), question.after)
        check_budget(state, turn.tokens - (state.tokens - state.system_prompt_tokens), sampling.max_tokens)
    if core.idle is not None:
        core.idle.give_way(state)
    work = Work()
    layout = core.assembly.build_layout(state, fidelity, work)
    layout = core.assembly.newest.without_transient(layout, state, core.engine)
    layout_s = time.perf_counter() - begin
    captures_query = bool(question.remember) or wants_outputs
    if not captures_query:
        merged = fidelity.merge is not None and any(segment.merged for segment in layout.segments)
        decoded = fidelity if state.conditioned else fidelity.with_advanced(merge_prompt=False)
        sampling = sampling_under(decoded, sampling, merged)
    planned_ms = layout.ms + costs.forward_ms(query.tokens, state.tokens)
    if sampling.merge_prompt:
        planned_ms = costs.request_ms + costs.forward_ms(state.tokens + query.tokens, 0)
    return _PreparedAsk(
        question, state, strategy, fidelity, layout, query, sampling, work, captures_query, planned_ms, layout_s
    )


def _generate(
    core: WindowCore, prompt: _PreparedAsk, on_token: OnToken | None, stopped: Callable[[], bool]
) -> Generation:
    """Run the engine, with the text so far to ``on_token``. Raises AnswerStopped once ``stopped`` is true."""

    def relay(token: int, text: str) -> bool:
        core.heartbeat()
        if stopped():
            return False
        text, ended = until_stop(text, prompt.question.stop)
        return (on_token is None or on_token(token, text)) and not ended

    generation = core.assembly.run(
        prompt.layout, prompt.query, prompt.sampling, capture_query=prompt.captures_query, on_token=relay
    )
    if stopped():
        raise AnswerStopped("the answer was stopped before its end")
    return generation


def _cut(engine: Engine, generation: Generation, stops: tuple[str, ...]) -> tuple[str, tuple[int, ...], bool]:
    """Return an answer's text and tokens up to a stop text, and whether there was one."""
    text, ended = until_stop(generation.text, stops, last=True)
    ids = tuple(generation.token_ids)
    while ended and len(engine.decode(ids)) > len(text):
        ids = ids[:-1]
    return text, ids, ended


def split_choices(question: Question) -> Iterator[Question]:
    """Yield one question per answer, each with its own seed where one is given. Only the first is remembered."""
    seed = question.sampling.seed
    for i in range(question.n):
        sampling = question.sampling if seed is None else replace(question.sampling, seed=seed + i)
        yield replace(question, n=1, sampling=sampling, remember=question.remember if not i else False)


def until_stop(text: str, stops: Sequence[str], *, last: bool = False) -> tuple[str, bool]:
    """Return the part of a growing answer before the first stop text, and whether a stop text was found.

    Unless ``last``, a tail that may be the beginning of a stop text is held back.
    """
    positions = [at for at in (text.find(s) for s in stops) if at >= 0]
    if positions:
        return text[: min(positions)], True
    longest = 0 if last else max(map(len, stops), default=0)
    for at in range(max(0, len(text) - longest + 1), len(text)):
        if any(s.startswith(text[at:]) for s in stops):
            return text[:at], False
    return text, False


def check_budget(state: State, query: int, max_tokens: int) -> None:
    """Raise BudgetExceeded if system prompt, chunks, query and answer do not fit together."""
    needed = state.tokens + query + max_tokens
    if needed > state.budget:
        told = f"system prompt and chunks ({state.tokens} tokens), query ({query}) and answer ({max_tokens}) must fit the budget"
        told += f" of {state.budget}, got {needed}; slide() the window, shorten the query or lower max_tokens"
        raise BudgetExceeded(told, needed=needed, budget=state.budget)


def _usage(core: WindowCore, prompt: _PreparedAsk, generation: Generation, total_s: float, **ahead: int) -> Usage:
    state, layout, work = prompt.state, prompt.layout, prompt.work
    computed = layout.segments[0].span is None or work.system_prompt
    lanes = Counter[str]({"computed" if computed else "resident": state.system_prompt_tokens})
    lanes.update(layout.lanes)
    return Usage(
        core.engine.spec.name, layout.tokens + prompt.query.tokens, generation.computed_tokens + work.tokens, dict(lanes),
        forwards=generation.forwards + work.forwards, vision_encodes=core.vision_encodes,
        bytes_loaded=generation.bytes_loaded, cached_tokens=generation.cached_tokens,
        answer_tokens=len(generation.token_ids), misses=work.misses, fallbacks=generation.fallbacks,
        ttft_s=prompt.layout_s + generation.ttft_s, total_s=total_s, planned_s=prompt.planned_ms / 1e3,
        exact=layout.exact and prompt.sampling.hold == 1,
        low_water_saves=advice.saved if (advice := core.sliding_advice()) else 0, **ahead,
    )  # fmt: skip


def _outputs(layout: Layout, generation: Generation, names: Collection[str] | None) -> dict[str, torch.Tensor] | None:
    """Return the named outputs of the forwards for each token of the prompt and of the answer; None if some are missing."""
    from ctxwin.engines.outputs import concat_outputs

    spans = [generation.captured.get(i, segment.span) for i, segment in enumerate(layout.segments)]
    spans.append(generation.query_span)
    if any(span is None for span in spans):
        return None  # it was stopped before all of it was read back
    outputs = concat_outputs([span.outputs for span in spans if span is not None and span.tokens])
    if unknown := set(names or ()) - outputs.keys():
        raise ValueError(f"outputs must be of {', '.join(outputs)}, got {', '.join(sorted(unknown))}")
    return {name: rows for name, rows in outputs.items() if names is None or name in names}


def exchange(engine: Engine, query: str, ids: Sequence[int], after: str | None = None) -> tuple[Chunk, Encoded]:
    """Return a question and the tokens of its answer as a chunk, and the chunk's tokens."""
    encoded = engine.encode_exchange(query, ids, after)
    return Chunk.tokens(encoded.token_ids, label=f"{query} {engine.decode(list(ids))}".strip()), encoded


def _with_exchange(
    core: WindowCore, state: State, prompt: _PreparedAsk, ids: Sequence[int], generation: Generation
) -> tuple[State, str]:
    """Append the exchange with the KV of the same pass; only the turn's closing tokens are computed."""
    question, layout = prompt.question, prompt.layout
    chunk, encoded = exchange(core.engine, question.query, ids, question.after)
    entry, prefix = core.place(state, chunk), layout.end(state)
    start = state.system_prompt_advance + sum(p.advance for p in state.placed)
    conditioning, span = prefix.computed(chunk.id, "computed"), generation.query_span
    # What ends its turn may exceed the engine: then all of it is computed later, when other chunks have left.
    if span is not None and state.tokens + encoded.tokens < core.engine.spec.max_tokens:
        # Without what follows a stop text, or the first token that is remembered otherwise (thinking, a placeholder of media).
        computed = (*prompt.query.token_ids, *ids)
        same = takewhile(lambda pair: pair[0] == pair[1], zip(computed, encoded.token_ids, strict=False))
        span = span.slice(0, min(span.tokens, len([*same])))
        span = _complete_exchange(core, layout, generation, encoded, span, start, prompt.work)
        record = {"chunk": chunk.id, "provenance": conditioning.provenance, "exact": conditioning.exact}
        core.assembly.put(conditioning.span, span, encoded, **record, absorbed=layout.absorbed(len(layout.choices)))
        entry = entry.replace(kv=conditioning, seen=True)
        exchange_choice = Choice(entry, "computed", prefix, conditioning, compute=True)
        core.assembly.memo.remember([exchange_choice], core.fidelity)
    return edits.append(state, entry), entry.id


def _complete_exchange(
    core: WindowCore, layout: Layout, generation: Generation, exchange: Encoded, head: SpanKV, start: int, work: Work
) -> SpanKV:
    """Return KV of the whole exchange: ``head`` was captured, the tokens after it are computed."""
    import torch

    from ctxwin.engines.outputs import concat_outputs

    n = head.tokens
    if n >= exchange.tokens:
        return head.slice(0, exchange.tokens)
    segments = [
        replace(segment, span=generation.captured[i], recompute=()) if i in generation.captured else segment
        for i, segment in enumerate(layout.segments)
    ]
    kv = core.engine.spec.kv
    if not n or kv.maps or (kv.recurrent and not head.states):  # cut short there is no state, and never a map
        return core.engine.prefill(segments, exchange, start, salt=layout.salt, tally=work)
    shift = int(exchange.positions[:, n].min())
    first = replace(exchange, token_ids=exchange.token_ids[:n], positions=exchange.positions[:, :n], advance=shift)
    rest = replace(exchange, token_ids=exchange.token_ids[n:], positions=exchange.positions[:, n:] - shift)
    rest = replace(rest, chunk_id=digest("tail", exchange.chunk_id), advance=exchange.advance - shift)
    preceding = [*segments, Segment(first, start, span=head)]
    tail = core.engine.prefill(preceding, rest, start + shift, salt=layout.salt, tally=work)
    positions = torch.from_numpy(exchange.positions.copy())
    k, v = torch.cat([head.k, tail.k], 1), torch.cat([head.v, tail.v], 1)
    outputs = concat_outputs([head.outputs, tail.outputs])
    return replace(head, k=k, v=v, positions=positions, outputs=outputs, states=tail.states)


def disposable(core: WindowCore, placement: str, query: str, max_tokens: int, *, clean: bool) -> Disposability:
    """See `Window.disposable`."""
    check_flags(clean=clean)
    question = Question.of(query, max_tokens, logprobs=-1)
    core.state.index(placement)
    answers = []
    for leaves in (False, True):
        # Windows over their budget are tested too, so the branches get the engine's maximum.
        with closing(core.fork(budget=core.engine.spec.max_tokens)) as branch:
            if leaves:
                with branch.writing() as state:
                    entry = state.placed[state.index(placement)]
                    new = edits.forget(state, entry) if clean else edits.evict(state, [entry])
                    if clean:
                        branch.assembly.memo.clear()
                    branch.commit(new)  # under no edit's name: lazy ones must wait in both branches
            answers.append(ask(branch, question, audited=False))
    with_chunk, without_chunk = answers
    same = with_chunk.token_ids == without_chunk.token_ids
    core.emit(core.event("disposable", (placement,), query=query, note="disposable" if same else "needed"))
    divergence = kl(with_chunk.first_token_logprobs, without_chunk.first_token_logprobs)
    return Disposability(disposable=same, kl=divergence, answer_with=with_chunk.text, answer_without=without_chunk.text)


def kl(p: dict[int, float], q: dict[int, float]) -> float:
    """Return KL(p || q) in nats of two next-token distributions over the same vocabulary, by token id."""
    if p.keys() != q.keys():
        raise ValueError(f"both distributions must cover the whole vocabulary, got {len(p)} and {len(q)} tokens")
    return max(0.0, math.fsum(math.exp(lp) * (lp - q[token]) for token, lp in p.items() if lp > -math.inf))
