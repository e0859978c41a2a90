"""Results of asking: `Answer` with its `Usage`, `Plan` with its price, and `Disposability`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from ctxwin.fidelity import Lane
from ctxwin.window.reordering import ReorderAdvice
from ctxwin.window.sliding import SlidingAdvice

_Ids = Annotated[Sequence[str], AfterValidator(tuple)]


@dataclass(frozen=True)
class Usage:
    """Cost of an answer. Tokens are prompt tokens unless stated otherwise.

    Attributes:
        engine: ``hf`` or ``vllm``.
        prompt_tokens: system prompt + chunks + query.
        computed_tokens: tokens that went through a forward, canonicals and patch forming included.
        reused_tokens: tokens by lane of every placed chunk and the system prompt (``computed`` and ``formed`` included, so the
            values sum to system prompt + chunks).
        forwards: prefill forwards.
        vision_encodes: runs of the vision tower since the previous answer of this window (its appends included).
        bytes_loaded: KV bytes brought into the engine's cache.
        misses: stored KV that was expected but gone, and was recomputed.
        fallbacks: loads that failed inside the engine and were recomputed.
        ttft_s, total_s: seconds to the first token and to the last; planned_s: those to the first, as the plan priced them,
            query included.
        exact: whether every placed chunk was served exactly.
        low_water_saves: tokens an ask that a low-water mark would save this window, which is exact and slides one by one
            (`Plan.sliding`); 0 for others.
        prefilled_tokens: tokens that were computed ahead of this ask while the engine was idle (``Window(prefill="idle")``) and
            served to it; they are not in ``computed_tokens``. missed_tokens: those computed ahead since the last answer for
            nothing.
    """

    engine: str
    prompt_tokens: int
    computed_tokens: int
    reused_tokens: dict[str, int]
    forwards: int
    vision_encodes: int
    bytes_loaded: int
    ttft_s: float
    total_s: float
    cached_tokens: int = 0
    answer_tokens: int = 0
    misses: int = 0
    fallbacks: int = 0
    exact: bool = True
    planned_s: float = 0.0
    low_water_saves: int = 0
    prefilled_tokens: int = 0
    missed_tokens: int = 0


@dataclass(frozen=True)
class ToolCall:
    """A tool that an answer calls. ``id`` is made up, for who has to tell calls apart."""

    name: str
    arguments: dict[str, Any]
    id: str


@dataclass(frozen=True)
class BrokenCall:
    """A call that cannot be read: its ``text`` as the model wrote it, and what is wrong with it."""

    name: str | None
    text: str
    error: str
    id: str


@dataclass(frozen=True)
class LookUp:
    """A look-up of an answer: labels of the passages that are placed, and the number of matches that did not fit."""

    library: str
    query: str
    labels: tuple[str, ...]
    left_out: int


@dataclass(frozen=True)
class Answer:
    """An answer.

    Attributes:
        text: without tool calls, where tools were offered; token_ids: with them.
        tool_calls, broken_calls: of the tools that were offered.
        looked_up: in the libraries that were offered, in order.
        outputs: what forwards gave for each token of the prompt and of the answer, but for the last one where ``max_tokens``
            ended it; tensors ``[tokens, ...]`` by name (``hidden_states`` are the last ones); None unless the engine keeps them
            (``open_engine(..., outputs=True)``) and all is exact. Of a server references to those that were asked for
            (`ctxwin_client.fetch_output`).
        others: the further answers, where more than one was asked for.
        first_token_logprobs: log-probability by token id, as many as asked for.
        audit: mean KL(re-prefill || served) a token, by the stricter reference, where this ask was audited; None until that is
            done in the background, behind the answer (`ctxwin.audit.Auditor.drain` waits for it); with look-ups of its last part.
        remembered: placement id of the remembered exchange, else None.
    """

    text: str
    token_ids: tuple[int, ...]
    usage: Usage
    first_token_logprobs: dict[int, float] = field(default_factory=dict)
    audit: float | None = None
    remembered: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    broken_calls: tuple[BrokenCall, ...] = ()
    looked_up: tuple[LookUp, ...] = ()
    outputs: Annotated[Mapping[str, Any] | None, Field(exclude=True)] = field(default=None, repr=False, compare=False)
    others: tuple[Answer, ...] = ()


def amend(answer: Answer, **fields: Any) -> Answer:
    """Set fields of an answer and return it; what an audit finds would not reach a copy."""
    for name, value in fields.items():
        object.__setattr__(answer, name, value)
    return answer


@dataclass(frozen=True)
class PlanEntry:
    """How one placed chunk would be served.

    Attributes:
        offset: index of its first token in the prompt; ``start``: position of its origin.
        compute: tokens a forward would run for it.
        bytes: KV bytes that would be brought in, at most; see `Plan`.
        exact: whether it equals a re-prefill; depth: length of the chain of approximations behind it.
        ms: what that costs on this engine, estimated from its calls so far.
        not_attended: placement ids in front that its KV has not absorbed; evicted_antecedents: ids it absorbed that are not in
            front any more.
        reused: whether it is served just as it was before behind the same contents, where it would be computed otherwise.
        exact_only: whether an audit made it fall back to exact.
    """

    id: str
    chunk_id: str
    lane: Lane
    tokens: int
    offset: int
    start: int
    compute: int
    bytes: int
    exact: bool
    depth: int
    conditioned: bool = True
    pinned: bool = False
    not_attended: _Ids = ()
    evicted_antecedents: _Ids = ()
    ms: float = 0.0
    reused: bool = False
    exact_only: bool = False


@dataclass(frozen=True)
class PlanRequest:
    """One request to the engine.

    An engine takes the KV it is given as one prefix, so chunks that must be computed in front of held ones take a
    request of their own, whose KV the next one is given along with the rest.

    Attributes:
        purpose: ``system_prompt`` and ``canonical`` form KV that the layout needs; ``chunks`` computes chunks with held ones
            behind them; ``answer``, always the last, computes the rest and the query.
        tokens: prompt tokens, the query left out unless the plan was made for it.
        computed: how many of them run a forward.
    """

    purpose: Literal["system_prompt", "canonical", "chunks", "answer"]
    tokens: int
    computed: int

    @property
    def reused(self) -> int:
        """Prompt tokens that are loaded, or found in the engine's own prefix cache: earlier requests leave them there.
        On a GPU vLLM computes less than a block of them again, which is cheaper than a load."""
        return self.tokens - self.computed


@dataclass(frozen=True)
class Plan:
    """Forecast of the next ask, made without running it. The query's own tokens come on top.

    Attributes:
        steps: the engine's requests in order; those of one ask run one after the other, those of several windows
            together.
        computed_tokens: tokens of system prompt and chunks that would run a forward.
        repair_tokens: further tokens that re-forming every approximation behind that ask (`Window.maintenance.refresh`) would
            run, those that it computes behind others or in part included.
        bytes: KV bytes that would be brought in, at most: vLLM loads nothing that its own cache holds.
        salted: whether something is approximate: it and what stands behind it are kept apart from the engine's exact
            prefix cache.
        ms: milliseconds up to the first token, what the query's own tokens take apart; a chunk's share stands in its entry.
            A prediction from what calls of this engine took so far (`ctxwin.engines.cost`); of a new engine, a guess.
        sliding: of an exact window that slides one by one: what that costs, and what a low-water mark would.
        prefilled_tokens: tokens computed ahead of the next ask so far (``Window(prefill="idle")``).
        reorder: where chunks stand in another order than their KV does, and are computed again: what copies would take.
        merges_prompt: whether the whole prompt is merged for its answer (`AdvancedFidelity`); the chunks stay whole.
    """

    system_prompt_tokens: int
    system_prompt_resident: bool
    entries: tuple[PlanEntry, ...]
    salted: bool
    steps: tuple[PlanRequest, ...] = ()
    ms: float = 0.0
    sliding: SlidingAdvice | None = None
    prefilled_tokens: int = 0
    reorder: ReorderAdvice | None = None
    merges_prompt: bool = False

    @property
    def requests(self) -> int:
        """How many requests the engine gets: `Usage.forwards` of the answer, unless something held turns out to be gone. Of a
        model with recurrent layers the hf engine counts a forward for each chunk that it computes."""
        return len(self.steps)

    @property
    def tokens(self) -> int:
        """Tokens of system prompt and chunks: what a full re-prefill would run."""
        return self.system_prompt_tokens + sum(e.tokens for e in self.entries)

    @property
    def computed_tokens(self) -> int:
        """Tokens of system prompt and chunks that would run a forward.

        On vLLM that is less than the entries say where its own prefix cache holds what has no KV in the store, and more where
        less than a block is computed again instead of loaded, on a GPU. What cannot be known ahead: blocks that plain requests
        and other processes leave there or that vLLM drops meanwhile, what of a question that was asked before it still holds
        (unless the plan was made for that question), and the few tokens that end an exchange which is remembered.
        """
        if self.steps:
            return sum(step.computed for step in self.steps)
        return sum(e.compute for e in self.entries) + (0 if self.system_prompt_resident else self.system_prompt_tokens)

    @property
    def repair_tokens(self) -> int:
        """Further tokens that forming every approximation anew would run."""
        return sum(e.tokens for e in self.entries if not e.exact and e.conditioned)

    @property
    def bytes(self) -> int:
        """KV bytes that would be brought in, at most."""
        return sum(e.bytes for e in self.entries)

    @property
    def exact(self) -> bool:
        """True if every chunk equals a re-prefill, and the answer sees all of it."""
        return not self.merges_prompt and all(e.exact for e in self.entries)

    @property
    def tokens_by_lane(self) -> dict[str, int]:
        """Tokens by lane, the system prompt under ``resident`` or ``computed``."""
        lanes = {"resident" if self.system_prompt_resident else "computed": self.system_prompt_tokens}
        for entry in self.entries:
            lanes[entry.lane] = lanes.get(entry.lane, 0) + entry.tokens
        return lanes

    def __str__(self) -> str:
        rows = [f"{'id':<12}{'lane':<10}{'tokens':>7}{'compute':>9}{'ms':>8}{'exact':>7}{'depth':>7}"]
        rows += [
            f"{e.id:<12}{e.lane:<10}{e.tokens:>7}{e.compute:>9}{e.ms:>8.1f}{e.exact!s:>7}{e.depth:>7}"
            for e in self.entries
        ]
        total = f"computes {self.computed_tokens} of {self.tokens} tokens in about {self.ms:.0f} ms"
        total += f"; repairing everything: {self.repair_tokens} more"
        if exact_only := [e.id for e in self.entries if e.exact_only]:
            total += f"\nfell back to exact after an audit: {', '.join(exact_only)}"
        if self.requests > 1:
            each = ", ".join(f"{step.computed} behind {step.reused} ({step.purpose})" for step in self.steps)
            total += f"\n{self.requests} requests: {each}"
        if self.sliding is not None:
            total += f"\nsliding one by one computes about {self.sliding.one_by_one:.0f} tokens of chunks an ask"
            total += f"; with a low-water mark of half, {self.sliding.halved.tokens:.0f}"
        if self.reorder is not None:
            total += f"\nreordered; the order before with {len(self.reorder.copied)} copies appended: {self.reorder.copy} tokens"
        if self.prefilled_tokens:
            total += f"\n{self.prefilled_tokens} tokens were computed ahead while the engine was idle"
        return "\n".join([*rows, total])

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Show it in a notebook as `print` does."""
        printer.text(str(self))


@dataclass(frozen=True)
class Disposability:
    """Effect of a chunk on the answer to a query.

    Attributes:
        disposable: the greedy answer is the same without it.
        kl: KL(with || without) of the first answer token over the whole vocabulary, in nats.
    """

    disposable: bool
    kl: float
    answer_with: str
    answer_without: str
