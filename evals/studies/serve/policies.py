"""The four ways to serve a session: windows, and the three users of vLLM's prefix cache of `ctxwin.baselines.policies`.

Users who trim keep a looked-back frame until they trim it, and swap two frames where they hold them. All four have one
budget, one vLLM, a prefix-cache space of their own, and stored vision embeddings: a picture is seen once, when it
arrives, whoever looks at it again. Users of the prefix cache send plain requests, straight to vLLM, with whatever
can be cached of a picture cached.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, cast

from ctxwin.baselines.policies import POLICIES as PREFIX_POLICIES
from ctxwin.baselines.policies import Policy as PrefixPolicy
from ctxwin.baselines.policies import PrefixUser
from ctxwin.engines.base import Engine
from ctxwin.evals.bench.moves import make_chunk
from ctxwin.fidelity import Fidelity
from ctxwin.hashing import digest
from ctxwin.window.ask import Question
from ctxwin.window.window import Window

from .requests import Plain, Served
from .trace import QUESTIONS, REACH, Mix, Turn

if TYPE_CHECKING:
    from ctxwin.chunk import Chunk
    from ctxwin.engines.vllm.engine import VLLMEngine
    from ctxwin.window.answer import Answer

POLICIES = ("ctxwin", *PREFIX_POLICIES)
SYSTEM_PROMPT = "You watch a camera."
WARMING = 8
"""Sessions that are made ready at a time."""


class Film:
    """The frames of all sessions, made before anything is timed.

    Args:
        engine: counts tokens; its vision embeddings are not shared with the engines that are measured.
        mix: what the sessions do.
        tokens: of every frame.
        seed: of the trace and of the pixels.
    """

    def __init__(self, engine: Engine, mix: Mix, tokens: int, seed: int) -> None:
        self.engine, self.mix = engine, mix
        self._tokens, self._seed = tokens, seed
        self._made: list[list[Chunk]] = [[] for _ in range(mix.sessions)]

    def past(self, session: int) -> int:
        """Frames before the session's first turn."""
        return self.mix.past(session, self._seed)

    def shoot(self, seen: dict[int, int]) -> None:
        """Makes what is missing of the first ``seen[session]`` frames of every session."""
        for session, count in seen.items():
            made = self._made[session]
            made += [self._frame(session, number) for number in range(len(made), count)]

    def frame(self, session: int, number: int) -> Chunk:
        """One frame of one session."""
        return self._made[session][number]

    def _frame(self, session: int, number: int) -> Chunk:
        return make_chunk(self.engine, self._tokens, int(digest("film", self._seed, session, number)[:12], 16))


class Policy(ABC):
    """One way to serve. Sessions may be served at the same time, each by one thread.

    Args:
        engine: a view of its own of the vLLM that all policies share.
        film: what the sessions see.
        budget: most tokens of a prompt and its answer.
        answer: tokens to generate.
    """

    name: str

    def __init__(self, engine: VLLMEngine, film: Film, budget: int, answer: int) -> None:
        self.engine, self.film, self.budget, self.answer = engine, film, budget, answer
        self.mix = film.mix

    def begin(self, before: Sequence[Turn] = (), on_progress: Callable[[int], None] = lambda _: None) -> None:
        """Makes every session what it is behind the turns ``before``, its prompt in the prefix cache.

        Those turns are not asked; what the policy holds behind them is what counts. ``on_progress`` is called with each session.
        """
        self.end()
        own: dict[int, list[Turn]] = {session: [] for session in range(self.mix.sessions)}
        for turn in before:
            own[turn.session].append(turn)

        def ready(session: int) -> None:
            self.open(session, own[session])
            on_progress(session)

        with ThreadPoolExecutor(WARMING) as pool:
            for _ in pool.map(ready, range(self.mix.sessions)):
                pass

    @abstractmethod
    def open(self, session: int, before: Sequence[Turn]) -> None:
        """Makes one session ready, see `begin`."""

    @abstractmethod
    def serve(self, turn: Turn, on_token: Callable[[], None]) -> Served:
        """Serves one turn; ``on_token`` is called at each token of the answer."""

    @abstractmethod
    def end(self) -> None:
        """Forgets all sessions."""

    def close(self) -> None:
        """Forgets all sessions and gives the engine's view back."""
        self.end()
        self.engine.close()


class Windows(Policy):
    """Each session is a window."""

    name = "ctxwin"

    def __init__(
        self, engine: VLLMEngine, film: Film, budget: int, answer: int, fidelity: Fidelity | None = None
    ) -> None:
        super().__init__(engine, film, budget, answer)
        self.fidelity = fidelity or Fidelity("patched")
        self._open: dict[int, tuple[Window, dict[int, str]]] = {}

    def open(self, session: int, before: Sequence[Turn]) -> None:
        window = Window(self.engine, system_prompt=SYSTEM_PROMPT, budget=self.budget, fidelity=self.fidelity)
        ids: dict[int, str] = {}
        seen = self.film.past(session) + sum(turn.kind == "now" for turn in before)
        # What left longer ago is not looked back at.
        for number in range(max(0, seen - self.mix.frames - REACH), seen):
            self._arrive(window, ids, session, number)
            window.ask(QUESTIONS[0], max_tokens=1)
        self._open[session] = (window, ids)

    def _arrive(self, window: Window, ids: dict[int, str], session: int, number: int) -> None:
        ids[number] = window.append(self.film.frame(session, number))
        window.slide(max(0, len(window.ids) - self.mix.frames))

    def serve(self, turn: Turn, on_token: Callable[[], None]) -> Served:
        window, ids = self._open[turn.session]
        if turn.kind == "now":
            self._arrive(window, ids, turn.session, turn.frame)
            return self._ask(window, turn, on_token)
        if turn.kind == "back":
            window.recall(ids[turn.frame])
            try:
                return self._ask(window, turn, on_token)
            finally:
                window.evict(ids[turn.frame])
        with window.fork() as branch:
            if turn.kind == "reorder":
                branch.reorder([ids[n] for n in turn.placed])
            return self._ask(branch, turn, on_token)

    def _ask(self, window: Window, turn: Turn, on_token: Callable[[], None]) -> Served:
        def each(*_: object) -> bool:
            on_token()
            return True

        answer: Answer = window.answer(Question.of(turn.query, self.answer), on_token=each)
        usage = answer.usage
        return Served(
            token_ids=answer.token_ids,
            prompt=usage.prompt_tokens,
            computed=usage.computed_tokens,
            cached=usage.cached_tokens,
            loaded=usage.bytes_loaded,
            lanes=dict(usage.reused_tokens),
            misses=usage.misses,
            fallbacks=usage.fallbacks,
        )

    def end(self) -> None:
        for window, _ in self._open.values():
            window.close()
        self._open.clear()


class Prompts(Policy):
    """A user of vLLM's prefix cache. Holds frame numbers, in prompt order, for each session."""

    def __init__(self, policy: PrefixPolicy, engine: VLLMEngine, film: Film, budget: int, answer: int) -> None:
        super().__init__(engine, film, budget, answer)
        self.name = self.policy = policy
        self.plain = Plain(engine)
        self._users: dict[int, PrefixUser[int]] = {}
        system_prompt = engine.encode_system_prompt(SYSTEM_PROMPT)
        self._system_prompt = system_prompt
        self._reserved = system_prompt.tokens + answer + max(engine.encode_query(q).tokens for q in QUESTIONS)

    def held(self, session: int) -> tuple[int, ...]:
        """Frame numbers in prompt order."""
        return tuple(self._users[session].held)

    def open(self, session: int, before: Sequence[Turn]) -> None:
        seen = self.film.past(session)
        self._users[session] = PrefixUser(self.policy)
        for number in range(seen):
            self._arrive(session, number)
        for turn in before:
            self.prompt(turn)
            seen += turn.kind == "now"
        held = self._users[session].held if self.policy != "naive" else range(seen - self.mix.frames, seen)
        self._ask(session, held, QUESTIONS[0], 1, lambda: None)

    def serve(self, turn: Turn, on_token: Callable[[], None]) -> Served:
        return self._ask(turn.session, self.prompt(turn), turn.query, self.answer, on_token)

    def prompt(self, turn: Turn) -> list[int]:
        """The frames that this user sends for a turn; what it holds then is remembered."""
        if self.policy == "naive":
            return list(turn.placed)
        if turn.kind == "now":
            self._arrive(turn.session, turn.frame)
        elif turn.kind == "back":
            later = turn.placed[turn.placed.index(turn.frame) + 1 :]
            self._arrive(turn.session, turn.frame, later if self.policy == "trim" else ())
        user = self._users[turn.session]
        if turn.kind == "reorder":  # in a branch
            user = user.copy()
            last, before = turn.placed[-2:]
            if last in user.held and before in user.held:
                i, k = user.held.index(last), user.held.index(before)
                user.held[i], user.held[k] = before, last
        return list(user.held)

    def _arrive(self, session: int, number: int, before: Sequence[int] = ()) -> None:
        def fits(numbers: Sequence[int]) -> bool:
            return self._reserved + self._tokens(session, numbers) <= self.budget

        self._users[session].arrive(number, fits, before=before)

    def _tokens(self, session: int, numbers: Iterable[int]) -> int:
        return sum(self.engine.encode(self.film.frame(session, n)).tokens for n in numbers)

    def _ask(
        self, session: int, numbers: Sequence[int], query: str, answer: int, on_token: Callable[[], None]
    ) -> Served:
        frames = [self.engine.encode(self.film.frame(session, n)) for n in numbers]
        return self.plain.ask([self._system_prompt, *frames, self.engine.encode_query(query)], answer, on_token)

    def end(self) -> None:
        self._users.clear()


def make_policy(name: str, engine: VLLMEngine, film: Film, budget: int, answer: int, fidelity: Fidelity) -> Policy:
    """The policy of a name in `POLICIES`, on a view of ``engine`` that is its own."""
    view = engine.view(f"bench-{name}")
    if name == Windows.name:
        return Windows(view, film, budget, answer, fidelity)
    return Prompts(cast("PrefixPolicy", name), view, film, budget, answer)


def budget_of(engine: Engine, mix: Mix, tokens: int, answer: int) -> int:
    """Tokens of a prompt that holds all frames of a session and a looked-back one, and its answer.

    Raises ValueError where that is more than the model takes.
    """
    query = max(engine.encode_query(q).tokens for q in QUESTIONS)
    budget = engine.encode_system_prompt(SYSTEM_PROMPT).tokens + (mix.frames + 1) * tokens + query + answer
    if budget > engine.spec.max_tokens:
        raise ValueError(
            f"{mix.frames} frames and a looked-back one of {tokens} tokens must fit the {engine.spec.max_tokens} that the "
            f"model takes, got {budget}; lower --frames or --tokens"
        )
    return budget
