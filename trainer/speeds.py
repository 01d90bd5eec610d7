"""How fast this machine is at the products, attention and passes that a training is made of.

Each distinct shape of a `Work` is run a few times on random values, by the code that training runs,
forward and backward. Large shapes are cut down to what is as fast and takes a fraction of a second.

R rows, I inputs, O outputs, T places, Q query heads, G kv heads, d head size.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import cache, partial

import torch
import torch.nn.functional as F

from spectrain.core.fast_linear import Weight, fast_linear
from spectrain.heads.layers import RMSNorm
from spectrain.heads.linear_loss import CPU_CHUNK, GPU_CHUNK
from spectrain.heads.ttt_attention import Anchors, ttt_attention
from spectrain.heads.work import NORM, Attention, Product, Work

_ROWS, _WEIGHT, _PLACES = 1024, 1 << 25, 1024  # beyond these a machine gets no faster
_STREAM = 1 << 24  # numbers, more than a cache holds
_TIMES = 3


class Speeds:
    """Seconds of a `Work` here. clock: wall time, or `time.process_time` on a loaded machine."""

    def __init__(
        self,
        device: torch.device | str,
        bf16: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.device, self.bf16, self.clock = torch.device(device), bf16, clock
        self._product, self._attention = cache(self._product), cache(self._attention)
        for name in ("_pass", "_scores", "_stream"):
            setattr(self, name, cache(getattr(self, name)))

    def seconds(self, work: Work) -> float:
        return sum(self.by_part(work).values())

    def by_part(self, work: Work) -> dict[str, float]:
        """`elementwise` beside the parts of the work's products."""
        found: dict[str, float] = {}
        for one in work.products:
            if one.flops:
                speed = self._of(one)
                found[one.part] = found.get(one.part, 0.0) + one.flops / speed
        passes = work.numbers / self._pass() + work.scored / self._scores()
        found["elementwise"] = passes + work.streamed / self._stream()
        return found

    def product(self) -> float:
        """FLOPs a second of a large product."""
        return self._product(_ROWS, 2048, 2048, 3)

    def _of(self, one: Product | Attention) -> float:
        if isinstance(one, Product):
            rows = _power(min(_ROWS, one.rows / one.calls))
            inputs = min(1 << 14, one.inputs)
            outputs = min(max(1, _WEIGHT // inputs), one.outputs)
            return self._product(rows, inputs, outputs, one.passes, one.plain, one.laid)
        sizes = one.heads, one.groups, one.key, one.value, min(_PLACES, max(16, one.length))
        return self._attention(*sizes, one.own, one.passes)

    # ── measurements, each a rate ────────────────────────────────────────────

    def _product(
        self,
        rows: int,
        inputs: int,
        outputs: int,
        passes: int,
        plain: bool = False,
        laid: bool = False,
    ) -> float:
        x = torch.randn(rows, inputs, device=self.device, requires_grad=passes > 1)
        weight = torch.randn(outputs, inputs, device=self.device, requires_grad=passes > 2)
        above = torch.randn(rows, outputs, device=self.device)
        product = F.linear if plain else partial(fast_linear, kept=Weight(weight) if laid else None)

        def run() -> None:
            with torch.set_grad_enabled(passes > 1), self._autocast():
                out = product(x, weight)
            if passes > 1:
                wanted = [x, weight] if passes > 2 else [x]
                torch.autograd.grad(out, wanted, above.to(out.dtype))

        return 2.0 * rows * inputs * outputs * min(passes, 3) / self._timed(run)

    def _attention(
        self, heads: int, groups: int, key: int, value: int, places: int, own: bool, passes: int
    ) -> float:
        """Queries at all places; the pairs that count are the causal half."""
        kind = torch.bfloat16 if self.bf16 else torch.float32
        made = {"device": self.device, "dtype": kind, "requires_grad": passes > 1}
        query = torch.randn(1, places, heads, key, **made)
        keys = torch.randn(1, places, groups, key, **made)
        values = torch.randn(1, places, groups, value, **made)
        anchors = Anchors.of(torch.ones(1, places, dtype=torch.bool, device=self.device))

        def run() -> None:
            with torch.set_grad_enabled(passes > 1):
                if own:
                    out = ttt_attention(query[0], keys, values, [], [], anchors, key**-0.5)
                else:
                    parts = (part.transpose(1, 2) for part in (query, keys, values))
                    out = F.scaled_dot_product_attention(
                        *parts, is_causal=True, enable_gqa=heads > groups
                    )
            if passes > 1:
                torch.autograd.grad(out.sum(), [query, keys, values])

        flops = places * (places + 1) * heads * (key + value) * passes
        return flops / self._timed(run)

    def _pass(self) -> float:
        """Numbers a second through elementwise operations: of a norm, which layers are full of."""
        norm = RMSNorm(1024).to(self.device)
        x = torch.randn(_ROWS, 1024, device=self.device, requires_grad=True)
        above = torch.randn_like(x)

        def run() -> None:
            torch.autograd.grad(norm(x), [x, norm.weight], above)

        return NORM * x.numel() / self._timed(run)

    def _scores(self) -> float:
        """Numbers a second through what a loss does with a chunk of logits."""
        numbers = CPU_CHUNK if self.device.type == "cpu" else GPU_CHUNK
        logits = torch.randn(numbers >> 13, 1 << 13, device=self.device)
        kept = torch.ones(len(logits), 1, dtype=torch.bool, device=self.device)

        @torch.no_grad()
        def run() -> None:
            logits.argmax(-1)
            own, teacher = logits.log_softmax(-1), logits.softmax(-1)
            torch.where(kept, (teacher * own).sum(-1, keepdim=True), 0).sum()
            own.exp_().sub_(teacher).masked_fill_(~kept, 0)

        return 16 * logits.numel() / self._timed(run)

    def _stream(self) -> float:
        """Numbers a second from and to memory: large tensors added to a new one, which a CPU's
        system has to hand out and clear."""
        total, part = torch.zeros(2, _STREAM, device=self.device).unbind()
        return 3 * _STREAM / self._timed(lambda: total + part)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16)

    def _timed(self, run: Callable[[], None]) -> float:
        """The fastest of a few: what disturbs it only ever slows it down."""
        run()
        found = []
        for _ in range(_TIMES):
            self._wait()
            start = self.clock()
            run()
            self._wait()
            found.append(self.clock() - start)
        return max(min(found), 1e-9)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _power(rows: float) -> int:
    """The nearest power of two: few sizes are measured."""
    return 1 << max(0, round(math.log2(max(1.0, rows))))
