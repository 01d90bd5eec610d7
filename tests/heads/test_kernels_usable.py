"""Where the Triton kernels run: what a GPU's compiler takes, and what happens without one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from spectrain.heads import kernels

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton is made for Linux alone")


def test_never_on_a_cpu():
    assert not kernels.usable(torch.zeros(1))


def test_where_triton_fails_torchs_way_is_taken_and_that_is_said(monkeypatch, capsys):
    works, device = kernels._works.__wrapped__, torch.device("cpu")
    assert works(device)

    def broken(*_):
        raise RuntimeError("no C compiler\nlook here and there")

    with monkeypatch.context() as patch:
        patch.setattr(kernels, "log_norm", broken)
        assert not works(device)
    assert capsys.readouterr().err == (
        "the loss is computed without Triton, slower: RuntimeError: no C compiler\n"
    )
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "find_spec", lambda name: None)
        assert not works(device)
    monkeypatch.setenv("SPECTRAIN_KERNELS", "0")
    assert not works(device)
    assert not capsys.readouterr().err


COMPILE = """
import sys
import triton.language as tl
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from spectrain.heads import kernels, row_kernels

POINTERS = {"losses": "*fp32", "choices": "*i64", "keep": "*i1"}
TAUGHT = {"logits": {"norms": "*fp32", "place": "*i64"}, "shares": {}, "labels": {}}

def build(function, types, fixed, capability):
    types = {name: types.get(name, "constexpr") for name in function.arg_names}
    fixed = {name: fixed.get(name) for name, kind in types.items() if kind == "constexpr"}
    place = function.arg_names.index
    source = ASTSource(function, types, {(place(name),): value for name, value in fixed.items()})
    made = compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 8})
    assert made.asm["cubin"]
    print(function.__name__, capability, fixed)

for capability, kind, wide in ((80, "bf16", "fp32"), (90, "fp64", "fp64")):
    sizes = {"D": 32001, "BLOCK": kernels.BLOCK}
    sizes["WIDE"] = tl.float64 if wide == "fp64" else tl.float32
    types = {"logits": "*" + kind, "norms": "*" + wide}
    build(row_kernels.log_norms, types, sizes, capability)
    for taught, more in TAUGHT.items():
        what = {"logits": "*" + kind, "shares": "*fp32", "labels": "*i64"}[taught]
        types = POINTERS | more | {"logits": "*" + kind, "taught": what}
        build(row_kernels.row_losses, types, sizes | {"KIND": taught}, capability)
"""


def test_they_compile_for_gpus(tmp_path):
    """What Python runs the compiler may still refuse; it needs no GPU for that."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 2 * 4


def test_without_a_gpu_triton_is_not_imported():
    code = "import sys, spectrain.heads.linear_loss; print('triton' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
