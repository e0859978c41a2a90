"""Which process of a parallel run gets which tests (pytest-xdist)."""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling, LoadScopeScheduling
from xdist.workermanage import WorkerController

from shared_servers import SERVER_OF


class _CrashProof(LoadScopeScheduling):
    """Goes on behind a process that ended.

    In xdist 3.8 what that process had is handed out again with all that was done already, one file or class for each test that
    ends: whoever gets a finished one runs nothing, so gets nothing more, and the run waits for ever.
    """

    def remove_node(self, node: WorkerController) -> str | None:
        work = self.assigned_work.pop(node)
        left = ((scope, test) for scope, tests in work.items() for test, done in tests.items() if not done)
        scope, ended_in = next(left, ("", None))
        if ended_in is not None:
            work[scope][ended_in] = True  # it is reported as a failure, and may end the next process as well
            self.workqueue.update({scope: tests for scope, tests in work.items() if not all(tests.values())})
            for other in self.assigned_work:
                self._reschedule(other)
        return ended_in

    def _reschedule(self, node: WorkerController) -> None:
        """Hand out work until the process has two tests to run, as it begins none before it knows the next."""
        if node not in self.registered_collections:  # still collecting
            return
        super()._reschedule(node)
        while not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
            super()._reschedule(node)


class FileScheduling(_CrashProof, LoadFileScheduling):
    """A process runs a file, or the files that share a server."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return SERVER_OF.get(file.removeprefix("tests/"), file)


def make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling | None:
    """Return the scheduler for ``--dist loadfile`` and ``loadscope``; None leaves others to xdist."""
    kind = {"loadfile": FileScheduling, "loadscope": _CrashProof}.get(config.getoption("dist"))
    return kind(config, log) if kind else None
