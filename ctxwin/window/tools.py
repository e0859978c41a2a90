"""Questions that offer tools or libraries, asked in a branch whose system prompt shows them as the chat template does.

The branch is kept for the tools that were offered last, so that its chunks are conditioned behind that system prompt once and
every later question finds their KV, as it would in a window that was opened with the tools.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ctxwin.errors import BudgetExceeded, UnsupportedModel
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
            try:
                branch = self._synced_branch(window, tools)
                answer, chunks = session.answer(branch, on_token, stopped)
            except BudgetExceeded as error:
                shown = window.core.engine.encode_system_prompt(_system_prompt(window, tools))
                more = f"{shown.tokens - state.system_prompt_tokens} tokens show the tools (of libraries, too): offer fewer"
                raise BudgetExceeded(f"{error}; {more}", needed=error.needed, budget=error.budget) from error
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
        key = json.dumps([window.core.state.system_prompt, *map(_validate_tool, tools)])
        if self._branch is None or self._key != key:
            self.close()
            self._branch, self._key = window.fork(_system_prompt(window, tools)), key
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


def _system_prompt(window: AskableWindow, tools: Sequence[Mapping[str, Any]]) -> str:
    """Return the window's system prompt with the tools, as the chat template shows them. Raises UnsupportedModel."""
    own_prompt, definitions = window.core.state.system_prompt, json.loads(json.dumps([*map(_validate_tool, tools)]))
    system_prompt = template_of(window.core.engine).system(own_prompt, definitions)
    if not is_plain_text(window.core.engine, system_prompt):
        raise UnsupportedModel("the chat template has special tokens for tools, which no system prompt holds")
    return system_prompt


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
