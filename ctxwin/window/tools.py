"""Questions that offer tools or libraries, asked in a branch whose system prompt shows them as the chat template does.

The branch is kept for the tools that were offered last, so that its chunks are conditioned behind that system prompt once and
every later question finds their KV, as it would in a window that was opened with the tools.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ctxwin.errors import UnsupportedModel
from ctxwin.window import edits, lookups
from ctxwin.window.answer import Answer, amend
from ctxwin.window.lookups import LookUps
from ctxwin.window.sync import sync
from ctxwin.window.toolcalls import is_plain_text, learn, template_of

if TYPE_CHECKING:
    from ctxwin.window.ask import OnToken, Question
    from ctxwin.window.lookups import AskableWindow


class ToolBranch:
    """The branch of a window that offers tools."""

    def __init__(self) -> None:
        self._key = ""
        self._branch: AskableWindow | None = None

    def ask(
        self, window: AskableWindow, question: Question, on_token: OnToken | None, stopped: Callable[[], bool]
    ) -> Answer:
        """Answer as `Window.answer` does; the answer's calls are read out of its text.

        Raises UnsupportedModel where the chat template takes no tools, or writes calls in a form that cannot be read.
        """
        tools = (*question.tools, *([lookups.tool(question.libraries)] if question.libraries else []))
        session = LookUps(question, learn(window.core.engine), dict(window.core.state.libraries))
        with window.core.writing(edit=bool(question.remember), stopped=stopped) as state:
            branch = self._synced_branch(window, tools)
            answer, chunks = session.answer(branch, on_token, stopped)
            window.core.audits.due = branch.core.audits.due
            if question.remember is True or (question.remember and question.remember(answer.text)):
                count = len(state.placed)
                for chunk in chunks:
                    state = edits.append(state, window.core.place(state, chunk))
                ids = [entry.id for entry in state.placed[count:]]
                window.core.commit(state.replace(libraries=session.versions), "append", ids)
                amend(answer, remembered=ids[-1])
        return answer

    def close(self) -> None:
        """Close the branch. Idempotent."""
        branch, self._branch, self._key = self._branch, None, ""
        if branch is not None:
            branch.close()

    def _synced_branch(self, window: AskableWindow, tools: Sequence[Mapping[str, Any]]) -> AskableWindow:
        """Return the branch, with the chunks that ``window`` has now."""
        own_prompt, definitions = window.core.state.system_prompt, [_validate_tool(tool) for tool in tools]
        key = json.dumps([own_prompt, definitions])
        if self._branch is None or self._key != key:
            self.close()
            system_prompt = template_of(window.core.engine).system(own_prompt, json.loads(key)[1])
            if not is_plain_text(window.core.engine, system_prompt):
                raise UnsupportedModel("the chat template has special tokens for tools, which no system prompt holds")
            self._branch, self._key = window.fork(system_prompt), key
            with self._branch.core.writing() as state:
                for entry in state.placed.pending:  # it follows the window, which may take its lazy edits back
                    state = edits.update_entry(state, entry.id, pending={})
                self._branch.core.commit(state)
        sync(self._branch.core, [entry.chunk for entry in window.core.state.placed])
        names = {}
        for own_entry, entry in zip(self._branch.core.state.placed, window.core.state.placed, strict=True):
            self._branch.toggle(own_entry.id, conditioned=entry.conditioned)
            names[own_entry.id] = entry.id
        self._branch.core.audits.answer_for(window.core.audits, names)
        return self._branch


def _validate_tool(tool: Any) -> dict[str, Any]:
    """Return a tool in OpenAI's form; a bare function is accepted, too. Raises ValueError."""
    definition = dict(tool) if isinstance(tool, Mapping) else {}
    function = definition.get("function") if definition.get("type") == "function" else definition
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise ValueError(
            'tools must be like {"type": "function", "function": {"name": ..., "description": ..., "parameters": {...}}}, '
            f"got {str(tool)[:120]}"
        )
    return {"type": "function", "function": dict(function)}
