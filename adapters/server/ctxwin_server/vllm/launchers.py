"""Names of vLLM's HTTP servers that have moved between minor versions."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ctxwin.engines import vllm_support as versions


def _entrypoints(module: str, before_0_33: str) -> Any:
    """Return a module of vLLM's servers, by its name now and that before 0.33."""
    build_and_version = versions.installed()
    old = build_and_version is not None and versions.minor_of(build_and_version[1]) == "0.32"
    return import_module(f"vllm.entrypoints.{before_0_33 if old else module}")


def _arguments() -> Any:
    return _entrypoints("common.cli_args", "launchers.cli_args")


def set_environment() -> None:
    """Set the environment variables that vLLM's own command line sets before it starts a server."""
    _entrypoints("common.startup", "serve.utils.api_utils").cli_env_setup()


def server_parser(program: str) -> Any:
    """Return vLLM's parser of ``vllm serve``'s arguments, under the name ``program``."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return _arguments().make_arg_parser(FlexibleArgumentParser(prog=program))


def validate_arguments(args: Any) -> None:
    """Raise what vLLM's own command line raises for arguments that contradict each other."""
    _arguments().validate_parsed_serve_args(args)
