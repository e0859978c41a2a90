"""The plugin where it is not named, where it is, and where it cannot work; `test_vllm_chats` runs a server with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ctxwin.engines.open import vllm_installed
from ctxwin.tiny import checkpoint_dir
from serve.test_vllm_server import installed_plugin

pytestmark = pytest.mark.skipif(not vllm_installed(), reason="vLLM is not installed")

PROGRAM = """
import json, os, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.plugins import load_endpoint_plugins
from vllm.utils.argparse_utils import FlexibleArgumentParser

def tried(rust, *given):
    sys.argv[1:] = given
    os.environ["VLLM_USE_RUST_FRONTEND"] = rust
    try:
        parser = make_arg_parser(FlexibleArgumentParser())
        args = parser.parse_args([])
        known = any(name.startswith("ctxwin") for name in vars(args))
        args = parser.parse_args(list(given))
        from vllm import AsyncEngineArgs
        made = AsyncEngineArgs.from_cli_args(args)
        plugins = [plugin.name for plugin in load_endpoint_plugins(("generate",))]
        connector = (made.kv_transfer_config or {}).get("kv_connector")
        return [known, connector, made.enforce_eager, args.middleware, args.api_key, plugins]
    except BaseException as error:
        return f"{type(error).__name__}: {error}"

found = [tried(*given) for given in json.loads(sys.argv[1])]
ours = sorted(name for name in sys.modules if name.split(".")[0] == "ctxwin")
print(json.dumps([found, ours]))
"""


def tried(folder: Path, named: str | None, *cases: list[str]) -> tuple[list[Any], list[str]]:
    """What becomes of command lines of vLLM, and which of our modules were loaded.

    Args:
        named: VLLM_PLUGINS.
        cases: whether vLLM's Rust frontend is asked for, then the command line.
    """
    path = os.pathsep.join(filter(None, [str(installed_plugin(folder)), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path}
    environment.pop("VLLM_PLUGINS", None)
    if named is not None:
        environment["VLLM_PLUGINS"] = named
    command = [sys.executable, "-c", PROGRAM, json.dumps(cases)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300, env=environment)
    found, ours = json.loads(done.stdout.splitlines()[-1])
    return found, ours


def test_it_does_nothing_unless_it_is_named(tmp_path: Path) -> None:
    """vLLM loads general plugins that nobody has named: ours must cost nothing then."""
    found, ours = tried(tmp_path, None, ["0", "--model", str(checkpoint_dir())])
    assert found == [[False, None, False, [], None, []]]
    repair = {"ctxwin.engines", "ctxwin.engines.torchvision_repair"}  # of environments that `doctor --fix` has mended
    assert set(ours) - repair == {
        "ctxwin", "ctxwin.serve", "ctxwin.serve.vllm", "ctxwin.serve.vllm.plugin",
    }  # fmt: skip


def test_named_it_brings_arguments_connector_gateway_and_routes(tmp_path: Path) -> None:
    tenants = tmp_path / "tenants.toml"
    tenants.write_text('[[tenant]]\nname = "acme"\nkeys = ["key-acme"]\n')
    found, _ = tried(
        tmp_path, "ctxwin,other",
        ["0", "--model", "tiny", "--ctxwin-fidelity", "good"],
        ["0", "--model", "tiny", "--api-server-count", "2"],
        ["1", "--model", "tiny"],
        ["0", "--model", "tiny", "--kv-transfer-config", '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}'],
        ["0", "--model", "tiny", "--ctxwin-tenants", str(tenants), "--api-key", "key-own", "--no-enforce-eager"],
    )  # fmt: skip
    assert "--fidelity must be auto, exact, patched or blind, got 'good'" in found[0]
    assert "--api-server-count must be 1" in found[1]
    assert "unset VLLM_USE_RUST_FRONTEND" in found[2]  # no gateway would stand in front of it
    assert "kv_transfer_config must not be set" in found[3]
    gateway = "ctxwin.serve.middleware.Gateway"
    assert found[4] == [True, "CtxwinConnector", False, [gateway], ["key-own", "key-acme"], ["ctxwin"]]
