"""EAGLE-3 heads that are normed in other places than ours: tried where drafts are not accepted.

vLLM's `norm_before_residual` makes the normed state the layer's residual, and `norm_output` (SGLang
has it, too) feeds a step the output behind the final norm. No tensor tells of either, so a config
that lost the key, or says it of a head that was not trained so, raises nothing. Heads here are
trained in neither way; they are computed so for the trial alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from spectrain.export.found import Found
from spectrain.export.layout import Reader, Suspect
from spectrain.heads.base import DraftHead
from spectrain.heads.eagle3 import Eagle3Head
from spectrain.heads.recurrent import Attend

Mend = Callable[[DraftHead], None]


class _NormedResidual(Eagle3Head):
    def enter(self, embedding: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return self.midlayer.hidden_norm(hidden), self.midlayer.merge(embedding, hidden)


class _NormedOutput(Eagle3Head):
    def _top(self, residual: Tensor, x: Tensor, attend: Attend) -> Tensor:
        return self.norm(super()._top(residual, x, attend))

    def logits(self, hidden: Tensor, step: int) -> Tensor:
        return self.lm_head(hidden)


@dataclass(frozen=True)
class _Placement:
    """key: of config.json · text: what it does · engines: that read it · kind: a head that does it
    position: the first one of a draft that it changes
    """

    key: str
    text: str
    engines: str
    kind: type[Eagle3Head]
    position: int

    def become(self, head: DraftHead) -> None:
        head.__class__ = self.kind


_PLACEMENTS = (
    _Placement(
        "norm_before_residual",
        "the normed state as the layer's residual",
        "vLLM",
        _NormedResidual,
        1,
    ),
    _Placement(
        "norm_output",
        "the output behind the final norm fed back",
        "vLLM and SGLang",
        _NormedOutput,
        2,
    ),
)


def said(found: Found, reader: Reader) -> Iterator[tuple[Suspect, Mend]]:
    """Each placement that the config says, taken back; and what makes a head of that again what
    the config says."""
    for one in _PLACEMENTS:
        if reader.norm_keys and found.config.get(one.key) is True:
            fix = f'in config.json, set "{one.key}": false'
            edited = found.edited(config={one.key: False})
            yield Suspect(f"without {one.key}", fix, edited, one.position), one.become


def mends(head: DraftHead, reader: Reader) -> Iterator[tuple[str, str, Mend, int]]:
    """Placements that a head may have lost: name, fix, what to do with another copy of it, and the
    first position that this changes."""
    if not isinstance(head, Eagle3Head):
        return
    for one in _PLACEMENTS:
        where = "config.json" if reader.norm_keys else "config.json of its files for engines"
        fix = f'in {where}, set "{one.key}": true, for {one.engines}; heads here do not compute it'
        yield one.text, fix, one.become, one.position
