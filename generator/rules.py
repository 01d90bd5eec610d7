"""How tokens are chosen, the same for every row of a call.

V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from spectrain.core.errors import SpectrainError
from spectrain.generator.randomness import OWN, uniform
from spectrain.generator.sampling import Sampling, pick


@dataclass(frozen=True)
class Typical:
    """Typical acceptance (Medusa, arXiv 2401.10774, 2.3.1): LOSSY, for it accepts whatever the
    target finds likely enough, p > min(ε, δ · exp(−entropy)); the target's own tokens are its
    likeliest."""

    epsilon: float = 0.09
    delta: float = 0.3

    def __post_init__(self) -> None:
        for name in ("epsilon", "delta"):
            if not 0 < getattr(self, name) <= 1:
                raise SpectrainError(f"{name} {getattr(self, name)} is not in (0, 1]")


@dataclass(frozen=True)
class Rules:
    """typical: None is lossless."""

    sampling: Sampling = field(default_factory=Sampling)
    typical: Typical | None = None

    def choose(self, logits: Tensor, keys: Tensor, number: Tensor) -> Tensor:
        """The target's own tokens: logits [B, …, V], keys [B], number [B, …] of each among the new
        tokens → [B, …].

        A row's token of some number is drawn with the same random number whatever was drafted, so a
        tree of the draft's first choices changes nothing: a seed gives the same text with it and
        without.
        """
        if self.sampling.greedy or self.typical:
            return logits.argmax(-1)
        return pick(self.sampling.warp(logits), uniform(keys, OWN, number))
