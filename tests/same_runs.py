"""Two runs that should have learnt the same, to rounding."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file

from spectrain.trainer.metrics import read_metrics


def require_same(one, two, *, atol=2e-5):
    """Rounding of other orders of sums, which a step of Adam at the rate 1e-3 makes larger where a
    gradient is next to 0: 2 % of what it moves a value by."""
    expected, rows = read_metrics(one), read_metrics(two)
    for key, rel in (("loss", 1e-5), ("grad_norm", 1e-4)):  # None where a step was skipped
        told = [
            [-1 if row[key] is None else row[key] for row in found] for found in (rows, expected)
        ]
        assert told[0] == pytest.approx(told[1], rel=rel), key
    assert [r["seen"] for r in rows] == [r["seen"] for r in expected]
    names = [sorted(str(p.relative_to(o)) for p in o.rglob("*") if p.is_file()) for o in (one, two)]
    assert names[0] == names[1]
    for name in (name for name in names[0] if name.endswith(".safetensors")):
        left, right = load_file(one / name), load_file(two / name)
        assert {k: (v.shape, v.dtype) for k, v in left.items()} == {
            k: (v.shape, v.dtype) for k, v in right.items()
        }
        for key, value in left.items():
            assert (value.double() - right[key].double()).abs().max() <= atol, (name, key)
