"""``ctxwin serve`` up to the point where vLLM would start: which arguments are taken, refused and explained."""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ctxwin.cli.main import app


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["serve", *arguments])
    return result.exit_code, result.output


def test_help_says_that_vllms_arguments_follow() -> None:
    code, text = run("--help")
    assert code == 0 and "every argument of `vllm serve`" in " ".join(text.split())
    for option in ("--store", "--tenants", "--fidelity", "--max-windows", "--window-ttl", "--max-upload-bytes"):
        assert option in text


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("arguments", "is_json"),
    [
        ((), False),
        (("--logging-config.formatter", "plain", "--served-model-name", "json"), False),
        (("--logging-config.formatter", "json"), True),
        (("--logging_config.formatter=json",), True),
        (("--logging-config", '{"formatter": "json"}'), True),
    ],
)
def test_the_parent_logs_in_the_format_that_vllm_is_given(
    arguments: tuple[str, ...], is_json: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, str] = {}
    monkeypatch.setattr(logging, "basicConfig", given.update)
    monkeypatch.setattr("ctxwin_server.process.supervisor.supervise", lambda *_: 0)
    assert run("tiny", *arguments)[0] == 0
    record = logging.LogRecord("ctxwin.serve", logging.ERROR, "", 0, "the engine died", None, None)
    line = logging.Formatter(given["format"]).format(record)
    assert json.loads(line)["message"] == "the engine died" if is_json else line.startswith("ERROR 20")


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("tiny", "--fidelity", "good"), "exact, patched or blind"),
        (("tiny", "--max-upload-bytes", "much"), "a size must be"),
        (("tiny", "--store", "kv"), "a store must be 'memory:'"),
        (("tiny", "--registry", "tiered:memory:"), "a tiered store must be like"),
        (("tiny", "--libraries", f"disk:{__file__}"), "must be a folder, got the file"),
        (("tiny", "--store-bytes", "much"), "a size must be"),
        (("tiny", "--tenants", "/nowhere/tenants.toml"), "/nowhere/tenants.toml"),
    ],
)
def test_bad_options_of_ours_are_one_line(arguments: tuple[str, ...], said: str) -> None:
    code, text = run(*arguments)
    assert code == 2 and said in text and "Traceback" not in text


PROGRAM = """
import json, logging, sys
from ctxwin_server.app.settings import Settings
from ctxwin_server.vllm.server import _load
from ctxwin_server.vllm.arguments import server_keys, parse, prepare
found = {}
for given in json.loads(sys.argv[1]):
    try:
        args = parse(*(("tiny", given) if given[:1] != ["--model"] else (given[0], given[1:])))
        prepare(args, given, False)
        found[" ".join(given)] = [args.model, args.served_model_name, args.kv_transfer_config["kv_connector"],
                                  args.max_model_len, args.disable_log_stats, server_keys(args),
                                  args.enforce_eager, args.max_logprobs, args.plain_max_logprobs,
                                  args.enable_prompt_tokens_details]
    except (Exception, SystemExit) as error:
        found[" ".join(given)] = f"{type(error).__name__}: {error}"
given = ["--logging-config.formatter", "json"]
windows, args = _load("tiny", given, Settings(private_metrics=True, metrics_key_file=sys.argv[2]))
windows.prepare(args, given)
logging.getLogger("ctxwin.serve").info("a line of ours")
windows, args = _load("tiny", [], Settings(private_metrics=True))
try:
    windows.prepare(args, [])
except ValueError as error:
    found["private"] = str(error)
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.vllm
def test_vllms_arguments_are_vllms(tmp_path: Path) -> None:
    """In a process of its own: parsing sets what vLLM wants in the environment."""
    config = tmp_path / "config.yaml"
    config.write_text("max-model-len: 96\n")
    cases = [
        [],
        [
            "--max-model-len",
            "128",
            "--served-model-name",
            "a",
            "b",
            "--api-key",
            "k",
            "--no-enforce-eager",
            "--max-logprobs",
            "5",
        ],
        ["--config", str(config)],
        ["--data-parallel-size", "2"],
        ["--api-server-count", "2"],
        ["--headless"],
        ["--no-enable-prefix-caching"],
        ["--kv-transfer-config", '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}'],
        ["--no-such-argument"],
        ["--chat-template", "{{ messages }}", "--reasoning-parser", "qwen3"],
        ["--no-enable-prompt-tokens-details"],
        ["--no_enable_prompt_tokens_details", "--served-model-name", "c"],
        ["--model", "tiny", "--max-model-len", "128"],
    ]
    (tmp_path / "key").write_text("scrape")
    command = [sys.executable, "-c", PROGRAM, json.dumps(cases), str(tmp_path / "key")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    said = done.stdout.splitlines()
    found = dict(enumerate(json.loads(said[-1]).values()))
    assert found[len(cases)] == (
        "--private-metrics must have a key, got none; give --api-key, --tenants or --metrics-key-file"
    )
    assert any(line.startswith("{") and '"a line of ours"' in line for line in said[:-1])
    assert (
        found[0][1:] == [["tiny"], "CtxwinConnector", None, False, [], True, -1, 20, True]
        and Path(found[0][0]).is_dir()
    )
    assert found[1][1:] == [["a", "b"], "CtxwinConnector", 128, False, ["k"], False, -1, 5, True]
    assert found[2][3] == 96
    assert "data_parallel_size must be 1" in found[3]
    assert "--api-server-count must be 1" in found[4] and "--store redis" in found[4]
    assert "--headless" in found[5]
    assert "enable_prefix_caching must be True" in found[6]
    assert "kv_transfer_config must not be set" in found[7]
    assert found[8] == "SystemExit: 2"
    assert found[9][2] == "CtxwinConnector"
    assert [found[i][-1] for i in (10, 11)] == [False, False]
    assert found[12] == [*found[0][:3], 128, *found[0][4:]]
    assert "--chat-template: for chats only" in done.stderr


def last_line_on(port: str) -> str:
    command = [sys.executable, "-m", "ctxwin", "serve", "tiny", "--host", "127.0.0.1", "--port", port]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    return done.stderr.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.vllm
def test_a_port_that_is_taken_is_one_line() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        last = last_line_on(port)
    assert last.startswith("error:") and port in last and "--port" in last


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize("port", ["70000", "-1"])
def test_a_port_that_is_none_is_one_line(port: str) -> None:
    assert last_line_on(port) == f"error: --port must be 0 to 65535, got {port}"
