"""When the Triton load kernel is chosen, that it compiles for the GPUs it is meant for, and a window on it."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from kernel_cases import canonical
from triton_cases import F32, F64, FAMILIES, PACKAGE

from ctxwin.kv.kernels import LoadPlan, SpanSlice, choice, choose

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("poisoned", "kernel")


class TestChoice:
    """`choose` where there is a GPU, which the interpreter plays: its kernel runs on the CPU whatever the device's name."""

    GPU = torch.device("cuda", 0)

    @pytest.fixture(autouse=True)
    def fresh(self, monkeypatch) -> None:
        monkeypatch.setattr(choice, "_good", {})
        monkeypatch.setattr(choice, "_faults", [])
        monkeypatch.delenv(choice.KERNEL, raising=False)

    def at(self, monkeypatch, kernel: Any) -> None:
        """Trials of ``kernel`` run on the CPU."""
        cpu = torch.device("cpu")
        module = sys.modules[f"{PACKAGE}.triton_kernel"]
        monkeypatch.setattr(
            module, "TritonKernel", lambda *args, **options: kernel(*args, **{**options, "device": cpu})
        )

    def test_by_device_argument_and_environment(self, kernel, monkeypatch):
        spec = FAMILIES["partial"]
        assert choose(spec, F32, torch.device("cpu")) == "llvm"
        self.at(monkeypatch, kernel)
        assert choose(spec, F32, self.GPU) == "triton" and not choice.faults()
        assert choose(spec, F32, self.GPU, kernel="reference") == "reference"
        monkeypatch.setenv(choice.KERNEL, "cpu")
        assert choose(spec, F32, self.GPU) == "cpu"
        assert choose(spec, F32, self.GPU, kernel="triton") == "triton"
        monkeypatch.setenv(choice.KERNEL, "cuda")
        with pytest.raises(
            ValueError, match="must be one of cpu, llvm, reference, triton, got 'cuda' in CTXWIN_KERNEL"
        ):
            choose(spec, F32, torch.device("cpu"))

    def test_no_triton(self, monkeypatch):
        monkeypatch.setattr(choice.importlib.util, "find_spec", lambda name: None)
        assert choose(FAMILIES["gqa"], F32, self.GPU) == "cpu" and not choice.faults()

    @pytest.mark.parametrize("wrong", ["keys", "values", "nan", "compiler"])
    def test_a_fault_is_logged_once_and_counted(self, wrong, kernel, monkeypatch, caplog):
        spec = FAMILIES["partial"]

        class Wrong(kernel):
            def layer(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
                k, v = super().layer(i)
                if wrong == "compiler":
                    raise RuntimeError("out of registers")
                if wrong == "nan":
                    v[-1, 0, -1] = torch.nan
                else:
                    (k if wrong == "keys" else v).mul_(1 + 2.0**-10)  # tf32's unit
                return k, v

        self.at(monkeypatch, Wrong)
        with caplog.at_level(logging.WARNING, "ctxwin.engines"):
            assert [choose(spec, F32, self.GPU) for _ in range(2)] == ["cpu", "cpu"]
        assert len(caplog.records) == len(choice.faults()) == 1
        said = {"compiler": "RuntimeError: out of registers", "nan": "values of layer 0 are nan"}.get(wrong, wrong)
        assert f"not used on cuda:0 for torch.float32: {said}" in choice.faults()[0]


def test_a_cpu_needs_the_interpreter(kernel, monkeypatch):
    spec = FAMILIES["gqa"]
    module = sys.modules[f"{PACKAGE}.triton_kernel"]
    monkeypatch.setattr(module, "interpreted", lambda: False)
    with pytest.raises(ValueError, match="kernel triton must run on a GPU, got device cpu"):
        LoadPlan([SpanSlice(canonical(spec, 2, 0), 0)], spec, dtype=F64, kernel="triton")


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("factors", ["bf16", "fp32"])
def test_compiles_for_gpus(capability, factors):
    """To machine code, without a GPU: a patched paged load of bfloat16 with heads of 128, all of which turns, or a quarter.
    Factors of 16 bits are multiplied by matrix units; those of 32 are not, which would be in tf32."""
    narrow = factors == "bf16"
    code = f"""
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from ctxwin.kv.kernels.fused import FIELDS, TARGETS, load_layers, read_layers
fixed = dict(FIELDS=FIELDS, TARGETS=TARGETS, HEADS=4, K_DIM=128, V_DIM=128, WIDTH=1024, STEP=1,
             TASKS=3, PATCHED=True, FRAMED=True, PAGED=True, NARROW={narrow}, ALIGNMENT=16, PART_ALIGNMENT=16,
             BLOCK_SIZE=16, COMPUTE=tl.float32, STORED=tl.bfloat16, OUT=tl.bfloat16, BLOCK_T=16, BLOCK_V=64, BLOCK_R=16)
whole = dict(HALF=64, OFFSET=64, REST=0, BLOCK_HALF=64, BLOCK_REST=16)
quarter = dict(HALF=16, OFFSET=16, REST=96, BLOCK_HALF=16, BLOCK_REST=128)
types = ["*{factors}"] + ["*i64"] * 3 + ["*fp32"] * 2 + ["*i64"] + ["i32"] * 13
names = load_layers.arg_names
for turning in (whole, quarter):
    constants = fixed | turning
    signature = dict(zip(names, types)) | dict.fromkeys(constants, "constexpr")
    assert set(signature) == set(names)
    source = ASTSource(load_layers, {{name: signature[name] for name in names}}, constants)
    built = triton.compile(source, target=GPUTarget("cuda", {capability}, 32))
    code = built.asm["ptx"]
    assert built.asm["cubin"] and "fma.rn.f32" in code and ("mma" in code) == {narrow} and "tf32" not in code
layout = dict(LAYERS=28, HEADS=4, K_DIM=128, V_DIM=128, ALIGNMENT=16, BLOCK_SIZE=16, BLOCK_T=16, BLOCK_D=128)
for number, pointer in ((tl.int16, "*i16"), (tl.int8, "*i8")):
    constants = layout | dict(NUMBER=number)
    signature = dict(zip(read_layers.arg_names, [pointer] * 2 + ["*i64"] + ["i32"] * 12)) | dict.fromkeys(constants, "constexpr")
    source = ASTSource(read_layers, {{name: signature[name] for name in read_layers.arg_names}}, constants)
    assert triton.compile(source, target=GPUTarget("cuda", {capability}, 32)).asm["cubin"]
print("compiled")
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "compiled", done.stderr


WINDOW = """
import json, ctxwin
from ctxwin import Chunk, Fidelity, Window
from ctxwin.kv.kernels import choice
with ctxwin.open_engine("tiny") as engine:
    window = Window(engine, system_prompt="H", budget=400, fidelity=Fidelity(mode="patched", rank=4))
    first, *_ = [window.append(Chunk.text(text)) for text in ("red cube left", "blue ball right", "green cone")]
    window.ask("red?", max_tokens=1)
    window.evict(first)
    answer = window.ask("blue?", max_tokens=1, logprobs=5)
    paged = engine._core.transport.paged
    loads = answer.usage.bytes_loaded, answer.usage.reused_tokens
    print(json.dumps([paged.kernel, paged.direct, choice.faults(), loads, answer.first_token_logprobs]))
"""


@pytest.mark.vllm
@pytest.mark.slow
def test_a_window_on_vllm_answers_as_with_the_cpu_kernel():
    """vLLM's own paged cache, written slot by slot by the kernel: keys of its CPU attention lie transposed there."""
    said = {}
    for name in ("triton", "cpu"):
        env = {**os.environ, "CTXWIN_KERNEL": name, "TRITON_INTERPRET": "1"}
        done = subprocess.run([sys.executable, "-c", WINDOW], capture_output=True, text=True, check=False, env=env)
        assert done.returncode == 0, done.stderr
        said[name] = json.loads(done.stdout.splitlines()[-1])
    assert said["triton"][0] == "triton" and not said["triton"][2]
    loads, logprobs = said["triton"][3:]
    assert loads == said["cpu"][3] and loads[0] > 0 and "survivor" in loads[1]
    assert logprobs.keys() == said["cpu"][4].keys()
    assert all(abs(logprobs[token] - other) < 1e-4 for token, other in said["cpu"][4].items())
