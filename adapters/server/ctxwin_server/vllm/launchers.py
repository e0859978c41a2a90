"""Names of vLLM's HTTP servers that have moved between minor versions."""

from typing import Any

from ctxwin.engines import vllm_support as versions


def _before_0_33() -> bool:
    build_and_version = versions.installed()
    return build_and_version is not None and versions.minor_of(build_and_version[1]) == "0.32"


def set_environment() -> None:
    """Set the environment variables that vLLM's own command line sets before it starts a server."""
    if _before_0_33():
        from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    else:
        from vllm.entrypoints.common.startup import cli_env_setup
    cli_env_setup()


def server_parser(program: str) -> Any:
    """Return vLLM's parser of ``vllm serve``'s arguments, under the name ``program``."""
    if _before_0_33():
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
    else:
        from vllm.entrypoints.common.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return make_arg_parser(FlexibleArgumentParser(prog=program))


def validate_arguments(args: Any) -> None:
    """Raise what vLLM's own command line raises for arguments that contradict each other."""
    if _before_0_33():
        from vllm.entrypoints.launchers.cli_args import validate_parsed_serve_args
    else:
        from vllm.entrypoints.common.cli_args import validate_parsed_serve_args
    validate_parsed_serve_args(args)
