"""Part 6 of gpu_validate.py: the kernels of the training loss against torch, and times of both.

R rows, U teacher rows, D columns.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from gpu.scene import Scene
from gpu.times import bandwidth, median
from torch import Tensor

from spectrain.heads import kernels

KINDS = ("logits", "shares", "labels")
TYPES = (torch.float32, torch.bfloat16, torch.float16)
# One column; one block and one less; several with a rest; what 16-byte loads suit and do not.
COLUMNS = (1, 1000, 4095, 4096, 9001, 32000, 128256)
# R, D: a chunk of EAGLE-3's reduced vocabulary and one of a whole vocabulary.
SIZES = ((2048, 32000), (512, 128256))


def losses(scene: Scene) -> dict[str, Any]:
    """Fails where the kernels do not run, or differ by more than rounding."""
    if not scene.rehearse and not kernels.usable(torch.zeros(1, device=scene.device)):
        return {"verdict": "fail", "says": "the kernels do not run here"}
    columns = (1, 1000) if scene.rehearse else COLUMNS
    checks = [
        _check(scene, kind, dtype, width)
        for width in columns
        for dtype in TYPES
        for kind in KINDS
        if scene.time_for(f"{kind}, {dtype}, {width} columns")
    ]
    sizes = ((2, 1000),) if scene.rehearse else SIZES
    speed = bandwidth(scene)
    taken = [
        _time(scene, kind, dtype, *size, speed)
        for size in sizes
        for dtype in (torch.float32, torch.bfloat16)
        for kind in KINDS
        if scene.time_for(f"times of {kind}, {dtype}, {size}")
    ]
    right = sum(check["right"] for check in checks)
    first = taken[0] if taken else {"torch_over_kernel": 0.0}
    return {
        "verdict": "pass" if right == len(checks) else "fail",
        "says": f"{right} of {len(checks)} cases as torch in float64; "
        f"{first['torch_over_kernel']:.2f} times as fast as torch at the first size",
        "checks": checks,
        "times": taken,
    }


def _check(scene: Scene, kind: str, dtype: torch.dtype, columns: int) -> dict[str, Any]:
    """Losses, first choices and gradients of some rows, a few of them left out and infinite."""
    rows = 9 if scene.rehearse else 67
    logits, taught, place = _inputs(scene, kind, dtype, rows, columns)
    column = torch.arange(columns, device=scene.device)
    keep = torch.arange(rows, device=scene.device) % 5 != 2
    # Equals, blocks apart: the lowest is the choice.
    logits[3, columns // 2] = logits[3, -1] = logits[3].max() + 1
    logits[~keep] = float("inf")
    exact, shares = logits.double(), _shares(kind, taught, place, columns)
    first = torch.where(exact == exact.amax(-1, keepdim=True), column, columns).amin(-1)
    loss = F.cross_entropy(exact, shares, reduction="none").masked_fill_(~keep, 0)
    mine = exact.softmax(-1)
    wanted = (mine - shares).masked_fill_(~keep[:, None], 0)
    # Two roundings of the type that is written, those of exponentials, and what float16 loses.
    slack = 2 * torch.finfo(dtype).eps * wanted.abs() + 1e-5 * (mine + shares) + 6e-8
    got, choices = _kernel(logits, kind, taught, place, keep)
    off = {
        "loss": float((got - loss).abs().div(1 + loss).max()),
        "gradient": float(((logits.double() - wanted).abs() / slack)[keep].max()),
        "left_out": int(logits[~keep].count_nonzero()),
        "choices": int((choices != first)[keep].sum()),
    }
    right = off["loss"] < 1e-5 and off["gradient"] < 1 and not off["left_out"] + off["choices"]
    return {"taught": kind, "logits": str(dtype), "columns": columns, "right": right, **off}


def _time(
    scene: Scene, kind: str, dtype: torch.dtype, rows: int, columns: int, speed: float
) -> dict[str, Any]:
    """Milliseconds, the teacher's own normaliser or softmax included. The floor: logits are read
    twice and written once, what is taught is read twice, at the bandwidth of a copy."""
    logits, taught, place = _inputs(scene, kind, dtype, rows, columns)
    keep = torch.ones(rows, dtype=torch.bool, device=scene.device)
    kernel = median(scene, lambda: _kernel(logits, kind, taught, place, keep))
    plain = median(scene, lambda: _torch(logits, kind, taught, place))
    return {
        "logits": f"{rows} × {columns} {str(dtype).removeprefix('torch.')}",
        "taught": kind,
        "kernel_ms": kernel,
        "torch_ms": plain,
        "floor_ms": 1e3 * (3 * logits.nbytes + 2 * taught.nbytes) / speed,
        "torch_over_kernel": plain / kernel,
    }


def _draw(scene: Scene, rows: int, columns: int, seed: int) -> Tensor:
    generator = torch.Generator(scene.device).manual_seed(seed)
    return 4 * torch.randn(rows, columns, generator=generator, device=scene.device)


def _inputs(
    scene: Scene, kind: str, dtype: torch.dtype, rows: int, columns: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [R, D], what is taught, and place [R]: five rows share a row of teacher logits."""
    logits = _draw(scene, rows, columns, 0).to(dtype)
    row = torch.arange(rows, device=scene.device)
    if kind == "labels":
        return logits, row * 7919 % columns, row
    if kind == "shares":
        return logits, _draw(scene, rows, columns, 1).softmax(-1), row
    return logits, _draw(scene, rows // 5 + 1, columns, 1).to(dtype), row // 5


def _shares(kind: str, taught: Tensor, place: Tensor, columns: int) -> Tensor:
    """[R, D] in float64"""
    if kind == "labels":
        return F.one_hot(taught, columns).double()
    return taught.double() if kind == "shares" else taught.double().softmax(-1)[place]


def _kernel(
    logits: Tensor, kind: str, taught: Tensor, place: Tensor, keep: Tensor
) -> tuple[Tensor, Tensor]:
    if kind == "logits":
        norm = kernels.log_norm(taught)
        return kernels.soft_cross_entropy_(logits, taught, norm, place, keep)
    return kernels.cross_entropy_(logits, taught, keep)


def _torch(logits: Tensor, kind: str, taught: Tensor, place: Tensor) -> tuple[Tensor, ...]:
    """The same operations as where there is no kernel."""
    exact = logits.float()
    choice = exact.argmax(-1)
    log_q = exact.log_softmax(-1)
    if kind == "labels":
        loss = log_q.gather(1, taught[:, None])
        grad = log_q.exp_().scatter_add_(1, taught[:, None], torch.full_like(loss, -1))
    else:
        shares = taught if kind == "shares" else taught.float().softmax(-1)[place]
        loss = (shares * log_q).sum(-1)
        grad = log_q.exp_().sub_(shares)
    return loss, choice, grad.to(logits.dtype)
