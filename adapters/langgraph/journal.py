"""Answers kept for nodes that run again: the same operation of the same task gives the same answer, computed once."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from ctxwin.adapters.langgraph import manifest
from ctxwin.hashing import digest
from ctxwin.serve import wire

if TYPE_CHECKING:
    from ctxwin.store.spans import SpanRepository
    from ctxwin.window.answer import Answer
    from ctxwin.window.ask import Question
    from ctxwin.window.state import State


@dataclass(frozen=True)
class Operation:
    """What LangGraph says about this execution of a node.

    Attributes:
        checkpoint, task: ids, the same whenever the node runs again behind this checkpoint (resume, retry, replay).
        name: tells sessions of one node apart.
    """

    checkpoint: str
    task: str
    name: str = ""

    @property
    def seed(self) -> str:
        """Seed of everything random in a session: placement ids, ids of new windows and forks."""
        return digest("session", self.checkpoint, self.task, self.name)

    def key(self, index: int) -> str:
        """Names the session's ``index``-th event, for people and for consumers that drop repeated events."""
        return ":".join(filter(None, [self.checkpoint, self.task, self.name, str(index)]))


class Journal:
    """The answers of one execution, in the engine's store under ``journal/``."""

    def __init__(self, repo: SpanRepository, operation: Operation) -> None:
        self._repo = repo
        self._operation = operation

    def key(self, index: int, state: State, question: Question) -> str:
        """Store key of an ask: who asks, which version, and what."""
        sampling = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(question.sampling).items()}
        asked = [question.query, bool(question.remember), list(question.stop), sampling]
        base = manifest.describe(self._repo, state).digest
        return "journal/" + digest("ask", self._operation.seed, index, base, asked)

    def get(self, key: str) -> tuple[Answer, State] | None:
        """The answer and the state it left; None where there is none, or the state cannot be had in full."""
        record = self._repo.get_json(key)
        found = manifest.read(self._repo, record["manifest"]) if record is not None else None
        if found is None or found[1] or found[2]:
            return None
        with suppress(KeyError, TypeError):  # of a version that wrote other fields: a miss
            return wire.answer_from(record["answer"]), found[0]
        return None

    def put(self, key: str, answer: Answer, state: State) -> None:
        """Keeps an answer, and the state it left."""
        self._repo.put_json(key, {"answer": wire.answer_to(answer), "manifest": manifest.write(self._repo, state)})
