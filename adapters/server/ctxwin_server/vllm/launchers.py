"""Names of vLLM's HTTP servers that have moved between minor versions."""

from collections.abc import Callable
from typing import Any

from ctxwin.engines import vllm_support as versions


def command_line() -> tuple[Callable[[], None], Callable[[Any], Any], Callable[[Any], None]]:
    """Return the steps of vLLM's own command line before it starts a server.

    They set environment variables, add the arguments of ``vllm serve`` to a parser, and raise for those that contradict each
    other.
    """
    build_and_version = versions.installed()
    if build_and_version is not None and versions.minor_of(build_and_version[1]) == "0.32":
        from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
        from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    else:
        from vllm.entrypoints.common.cli_args import make_arg_parser, validate_parsed_serve_args
        from vllm.entrypoints.common.startup import cli_env_setup
    return cli_env_setup, make_arg_parser, validate_parsed_serve_args
