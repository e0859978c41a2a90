"""The engine contract.

An engine turns chunks into tokens and positions, computes the KV of one span after others, and answers a query after
a layout of spans. It keeps no window state: each call carries everything it needs. Engines are thread-safe.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

from ctxwin.engines.cost import CostModel
from ctxwin.engines.results import EngineCounters
from ctxwin.engines.sampling import Sampling
from ctxwin.errors import ChunkUnavailable, UnsupportedModel

if TYPE_CHECKING:
    import torch

    from ctxwin.chunk import Chunk
    from ctxwin.engines.encoding.templates import Template
    from ctxwin.engines.results import AttendedKV, Generation, PrefillCost
    from ctxwin.engines.segments import Call, Encoded, Segment
    from ctxwin.kv.layout import KVSpec, SpanKV
    from ctxwin.store.base import Store
    from ctxwin.store.spans import SpanRepository


@dataclass(frozen=True)
class EngineSpec:
    """Model identity, cache layout and limits of an engine.

    Attributes:
        name: ``hf`` or ``vllm``.
        model: the path or hub name it was opened with.
        identity: digest of the model (config, weights, dtype, processor settings); part of every stored key.
        kv: layout of its KV cache.
        max_tokens: the longest prompt plus answer it accepts.
        vision: whether it accepts images.
        outputs: whether spans also hold a forward's other per-token tensors (`ctxwin.engines.outputs`).
        state_patches: whether patches of recurrent states can be served (`ctxwin.kv.states`), for a model that has them.
    """

    name: str
    model: str
    identity: str
    kv: KVSpec
    max_tokens: int
    vision: bool
    outputs: bool = False
    state_patches: bool = False


BEST = 32
"""Number of the highest log-probabilities that `Engine.forced_logprobs` returns at each position."""
WHOLE = Sampling()
"""All KV is kept."""


class Engine(ABC):
    """Interface of a backend. One conformance suite (`tests/engines/conformance.py`) runs on every engine."""

    spec: EngineSpec
    store: Store
    repo: SpanRepository  # typed access to `store`; windows keep their spans and patches there too
    counters: EngineCounters
    auditing: Callable[..., Any] | None = None
    """Opens the audits of a window (`ctxwin.window.auditing.Auditing`); None: its answers are not audited."""
    window_prefix = ""
    """Beginning of new windows' ids, by which a router finds the process that opened them."""
    forecasts = False
    """True where a request may compute other tokens than those without KV; `forecast` then counts them."""

    def __repr__(self) -> str:
        if not hasattr(self, "spec"):  # it is being opened
            return object.__repr__(self)
        tenant = f" of {self.tenant!r}" if self.tenant else ""
        return f"<{type(self).__name__}{tenant} {self.spec.model}, {self.spec.max_tokens:,} tokens, {self.store!r}>"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse `copy` and `pickle`: its model, threads and store are of this process."""
        raise TypeError("an engine must be opened where it is used, not copied or pickled; send its model's name")

    @property
    def caches_prefixes(self) -> bool:
        """True where KV of an exact prompt serves the next one that begins alike, whether it was captured or not."""
        return False

    @cached_property
    def costs(self) -> CostModel:
        """Cost model fitted to this engine's calls. Each tenant's view has its own, so that none sees another's times."""
        return CostModel()

    @abstractmethod
    def encode_system_prompt(self, system_prompt: str) -> Encoded:
        """Encode the system turn and the opening of the user turn: always the first segment, at position 0."""

    @abstractmethod
    def encode(self, chunk: Chunk) -> Encoded:
        """Encode a chunk inside the open user turn: its tokens, media and local positions.

        Vision embeddings are looked up in `store`, and computed and stored where missing: the vision tower runs at most
        once for the same media, also across restarts.

        Raises:
            BadMedia, ChunkUnavailable, UnsupportedModel: the chunk cannot be encoded.
        """

    def media_keys(self, chunk: Chunk) -> set[str]:
        """Return the store keys of every record that encoding the media of ``chunk`` leaves in `store`.

        Includes at least the keys of records that exist. An engine that must encode to know them returns none where both
        pixels and embeddings are gone.
        """
        try:
            return {m.key for m in self.encode(chunk).media}
        except ChunkUnavailable:
            return set()

    @abstractmethod
    def encode_query(self, query: str) -> Encoded:
        """Encode a query, the closing of the user turn and the opening of the assistant's."""

    @abstractmethod
    def encode_exchange(self, query: str, answer_ids: Sequence[int], after: str | None = None) -> Encoded:
        """Encode a remembered exchange: query, turn closing, answer, reopened user turn (or ``after``, template text).

        Its first tokens are exactly ``encode_query(query)`` followed by ``answer_ids``, without placeholders of media that the
        model wrote: `encode` must take them. Where the chat template writes the answer differently once a question follows
        (without its thinking), it stands as written then. Raises UnsupportedModel where the template has no such turn.
        """

    @property
    def template(self) -> Template | None:
        """The model's chat template in pieces; None where the engine has none, which leaves chats without tools."""
        return None

    def text_ids(self, text: str) -> tuple[int, ...]:
        """Tokenise content: special tokens spelled out in it stay text."""
        from ctxwin.chunk import Chunk

        return self.encode(Chunk.text(text)).token_ids if text else ()

    def template_ids(self, text: str) -> tuple[int, ...]:
        """Tokenise a piece of `template`, in which special tokens are recognised."""
        return self.text_ids(text)

    @abstractmethod
    def prefill(
        self,
        context: Sequence[Segment],
        target: Encoded,
        start: int,
        *,
        salt: str = "",
        background: bool = False,
        tally: PrefillCost | None = None,
        stopped: Callable[[], bool] | None = None,
    ) -> SpanKV:
        """Compute the KV of ``target`` after ``context`` (segments in order, loaded or computed in place).

        Exact to the engine's arithmetic, in the frame ``start``, counted in `counters`.

        Args:
            salt: as in `generate`.
            background: nobody waits for the call; an engine that batches serves others first.
            tally: the cost of the call is added to it.
            stopped: polled; once it is true the call ends, leaves nothing, and raises AnswerStopped.
        """

    def prefill_all(
        self, context: Sequence[Segment], targets: Sequence[Encoded], start: int, **options: Any
    ) -> list[SpanKV]:
        """Compute the KV of each of ``targets`` after the same ``context``, as `prefill` does with ``salt``, ``background`` and
        ``tally``; an engine that batches computes them together."""
        return [self.prefill(context, target, start, **options) for target in targets]

    @abstractmethod
    def generate(
        self,
        layout: Sequence[Segment],
        query: Encoded,
        sampling: Sampling,
        *,
        salt: str = "",
        capture_query: bool = False,
        on_token: Callable[[int, str], bool] | None = None,
        background: bool = False,
    ) -> Generation:
        """Answer ``query`` after ``layout``.

        Segments with a span are relocated and loaded, segments without one are computed in place, in order.

        Args:
            salt: separates prefix-cache entries of approximate windows; "" is the exact, shared namespace.
            capture_query: return the KV of query and answer in ``query_span``.
            on_token: called with ``(id, text_so_far)`` after each token; returning False ends the answer.
            background: as in `prefill`.

        Raises:
            EngineFailed: the model could not be run.
        """

    def forced_logprobs(
        self,
        layout: Sequence[Segment],
        answers: Sequence[tuple[Encoded, Sequence[int]]],
        *,
        best: int = BEST,
        stopped: Callable[[], bool] = lambda: False,
        tally: PrefillCost | None = None,
        sampling: Sampling = WHOLE,
    ) -> list[list[dict[int, float]]]:
        """Score given answers after a layout: the model's distribution at each token of an answer, and after its last.

        Background work, for audits. It shares no prefix-cache entries with other requests.

        Args:
            answers: queries, each with the tokens of its answer without the ending one; may be empty.
            best: how many log-probabilities to return at each position.
            stopped: polled; once it is true the work ends and AnswerStopped is raised.
            tally: the cost of the call is added to it.
            sampling: how much of the KV is kept along the answers: ``hold``, ``hold_every`` and ``merge_prompt``.

        Returns:
            For each answer of n tokens n + 1 rows: log-probabilities by token id, in nats, of the ``best`` tokens and, where
            one follows, of the answer's own. Row i is the distribution that its token i is drawn from.

        Raises:
            EngineFailed: also where a span could not be loaded, because another prompt would be scored.
            UnsupportedModel: an engine that cannot score answers.

        Cost: one forward over segments without KV, and one over each query and answer; no decoding.
        """
        raise UnsupportedModel(f"the {self.spec.name} engine cannot score a given answer, so it cannot be audited")

    def forecast(self, calls: Sequence[Call]) -> list[int] | None:
        """Count the tokens that each request of these calls, in order, would run through a forward.

        An unknown query counts as empty. None: exactly the tokens without KV are computed. Runs no forward and reads no KV.
        """
        return None

    def attended(
        self, context: Sequence[Segment], target: Encoded, start: int, *, tally: PrefillCost | None = None
    ) -> AttendedKV:
        """Run `prefill` in the background and return its attention too, from which mergeable slots are chosen.

        Raises:
            EngineFailed: the model could not be run.
            UnsupportedModel: an engine that does not expose its attention.

        Cost: a forward over ``target`` that also computes its attention weights, in blocks.
        """
        raise UnsupportedModel(f"the {self.spec.name} engine does not expose its attention, so it cannot merge chunks")

    def check_hold(self, sampling: Sampling) -> None:
        """Raise UnsupportedModel where it cannot answer with less than all of the KV, as `Sampling.hold` and its kin say."""
        if sampling.hold < 1:
            raise UnsupportedModel(f"the {self.spec.name} engine keeps all tokens: hold must be 1, got {sampling.hold}")

    @property
    def busy(self) -> bool:
        """True while a caller waits for this engine; background work then yields."""
        return False

    @property
    def idle_s(self) -> float:
        """Seconds since a caller last waited for it."""
        return 0.0 if self.busy else math.inf

    @property
    def shared(self) -> object:
        """Object common to the engines that share a running model; the engine itself where it shares none."""
        return self

    @property
    def tenant(self) -> str:
        """Tenant of this engine where several share a model; "" for none."""
        return ""

    @abstractmethod
    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids."""

    @abstractmethod
    def embed(self, key: str) -> torch.Tensor:
        """Return stored vision embeddings ``[tokens, hidden * (1 + D)]``; raise ChunkUnavailable where they are gone.

        D is the number of decoder layers after which a model adds vision features (Qwen3-VL); 0 for others.
        """

    @abstractmethod
    def close(self) -> None:
        """Release the engine and everything it started. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
