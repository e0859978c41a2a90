"""Answers kept for nodes that run again: the same operation of the same task gives the same answer, computed once."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from ctxwin.adapters.langgraph import manifest
from ctxwin.hashing import digest
from ctxwin.window.answer import Answer, Usage

if TYPE_CHECKING:
    from ctxwin.store.spans import SpanRepository
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
        """Of everything random in a session: placement ids, ids of new windows and forks."""
        return digest("session", self.checkpoint, self.task, self.name)

    def key(self, index: int) -> str:
        """For people and for consumers that drop repeated events."""
        return ":".join(filter(None, [self.checkpoint, self.task, self.name, str(index)]))


class Journal:
    """The answers of one execution, in the engine's store under ``journal/``."""

    def __init__(self, repo: SpanRepository, operation: Operation) -> None:
        self._repo = repo
        self._operation = operation

    def key(self, index: int, state: State, question: Question) -> str:
        """Of an ask: who asks, the version it asks, and what."""
        sampling = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(question.sampling).items()}
        asked = [question.query, bool(question.remember), list(question.stop), sampling]
        base = manifest.describe(self._repo, state).digest
        return "journal/" + digest("ask", self._operation.seed, index, base, asked)

    def get(self, key: str) -> tuple[Answer, State] | None:
        """The answer and the state it left; None where there is none, or the state cannot be had in full."""
        record = self._repo.get_json(key)
        if record is None:
            return None
        found = manifest.read(self._repo, record["manifest"])
        if found is None or found[1] or found[2]:
            return None
        made = record["answer"]
        try:
            logprobs = {int(k): -math.inf if v is None else v for k, v in made["first_token_logprobs"].items()}
            made |= {"usage": Usage(**made["usage"]), "token_ids": tuple(made["token_ids"])}
            return Answer(**{**made, "first_token_logprobs": logprobs}), found[0]
        except (KeyError, TypeError):  # of a version that wrote other fields: a miss
            return None

    def put(self, key: str, answer: Answer, state: State) -> None:
        made = answer.to_json()
        logprobs = made["first_token_logprobs"]
        made["first_token_logprobs"] = {str(k): v if math.isfinite(v) else None for k, v in logprobs.items()}
        self._repo.put_json(key, {"answer": made, "manifest": manifest.write(self._repo, state)})
