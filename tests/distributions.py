"""The distributions, by what each is imported as."""

from __future__ import annotations

import ctxwin
import ctxwin_chats
import ctxwin_client
import ctxwin_evals
import ctxwin_ray
import ctxwin_server
import ctxwin_vllm
import langchain_ctxwin

DISTRIBUTIONS = (
    ctxwin,
    ctxwin_chats,
    ctxwin_client,
    ctxwin_evals,
    ctxwin_ray,
    ctxwin_server,
    ctxwin_vllm,
    langchain_ctxwin,
)
