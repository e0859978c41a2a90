"""What importing costs: no framework before it is used."""

from __future__ import annotations

import subprocess
import sys


def test_adapters_load_no_langchain() -> None:
    code = (
        "import sys, ctxwin, langchain_ctxwin as lc, ctxwin.window.sync\n"
        "heavy = [m for m in ('langchain', 'langchain_core', 'langgraph', 'torch', 'vllm') if m in sys.modules]\n"
        "assert not heavy, heavy\n"
        "assert all(getattr(lc, name) is not None for name in lc.__all__)\n"
        "assert 'langchain_core' in sys.modules and 'vllm' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
