"""Questions that offer tools or libraries, asked in a branch whose system prompt shows them as the chat template does.

The branch is kept for the tools that were offered last, so that its chunks are conditioned behind that system prompt once and
every later question finds their KV, as it would in a window that was opened with the tools.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ctxwin.errors import UnsupportedModel
from ctxwin.window import edits, lookups
from ctxwin.window.answer import Answer
from ctxwin.window.lookups import LookUps
from ctxwin.window.sync import sync
from ctxwin.window.toolcalls import learn, spelled, template_of

if TYPE_CHECKING:
    from ctxwin.window.ask import OnToken, Question
    from ctxwin.window.window import Window


class Offered:
    """The branch of a window that offers tools."""

    def __init__(self) -> None:
        self._key = ""
        self._branch: Window | None = None

    def ask(self, window: Window, question: Question, on_token: OnToken | None, stopped: Callable[[], bool]) -> Answer:
        """As `Window.answer`; the answer's calls are read out of its text.

        Raises UnsupportedModel where the chat template takes no tools, or writes calls in a form that cannot be read.
        """
        tools = (*question.tools, *([lookups.tool(question.libraries)] if question.libraries else []))
        found = LookUps(question, learn(window.engine), dict(window.core.state.libraries))
        with window.core.writing(edit=bool(question.remember)) as state:
            answer, chunks = found.answer(self._brought(window, tools), on_token, stopped)
            if question.remember is True or (question.remember and question.remember(answer.text)):
                before = len(state.placed)
                for chunk in chunks:
                    state = edits.appended(state, window.core.place(state, chunk))
                ids = [placed.id for placed in state.placed[before:]]
                window.core.commit(state.replace(libraries=found.versions), "append", ids)
                answer = replace(answer, remembered=ids[-1])
        return answer

    def close(self) -> None:
        """Gives back what the branch holds. Idempotent."""
        branch, self._branch, self._key = self._branch, None, ""
        if branch is not None:
            branch.close()

    def _brought(self, window: Window, tools: Sequence[Mapping[str, Any]]) -> Window:
        """The branch, with the chunks that ``window`` has now."""
        shown = json.dumps([_checked(tool) for tool in tools])
        if self._branch is None or self._key != shown:
            self.close()
            system_prompt = template_of(window.engine).system(window.system_prompt, json.loads(shown))
            if not spelled(window.engine, system_prompt):
                raise UnsupportedModel(
                    "the chat template shows tools with special tokens, which system prompts cannot hold"
                )
            self._branch, self._key = window.fork(system_prompt), shown
        sync(self._branch, [placed.chunk for placed in window.core.state.placed])
        for mine, there in zip(self._branch.core.state.placed, window.core.state.placed, strict=True):
            self._branch.toggle(mine.id, conditioned=there.conditioned)
        return self._branch


def _checked(tool: Any) -> dict[str, Any]:
    """A tool in OpenAI's form; a bare function is taken, too. Raises ValueError."""
    given = dict(tool) if isinstance(tool, Mapping) else {}
    function = given.get("function") if given.get("type") == "function" else given
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise ValueError(
            'tools must be like {"type": "function", "function": {"name": ..., "description": ..., "parameters": {...}}}, '
            f"got {str(tool)[:120]}"
        )
    return {"type": "function", "function": dict(function)}
