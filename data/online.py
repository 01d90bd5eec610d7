"""A store whose features the target computes when a batch is asked for: nothing of them on disk.

B batch, T padded length, P predicting positions of the batch, H hidden, A aux width.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from spectrain.core.batch import Batch, predicting
from spectrain.core.target import Target
from spectrain.data.capture import choices, teacher
from spectrain.data.shard import RowInfo
from spectrain.data.store import FeatureStore


class Needs(Protocol):
    """What a head reads, see heads/base.py."""

    @property
    def aux_layers(self) -> tuple[int, ...]: ...
    @property
    def last_everywhere(self) -> bool: ...


def with_features(store: FeatureStore, target: Target, needs: Needs) -> FeatureStore:
    """`store`, or where it holds no features, one that asks `target` for what a head needs.

    Raises SpectrainError when the store holds features, and not these.
    """
    if not store.features:
        return OnlineStore(store, target, needs.aux_layers)
    store.require_features(needs.aux_layers, needs.last_everywhere)
    return store


# Not inference mode: what a head is fed in training is saved for its backward pass.
@torch.no_grad()
def read(target: Target, batch: Batch, aux_layers: tuple[int, ...]) -> Batch:
    """Tokens and replies with what `target` says of them, on its device and in its dtype: `last` at
    every position, `argmax` −1 where no reply token follows."""
    where = predicting(batch.reply).flatten().nonzero().squeeze(1).to(target.device)  # [P]
    batch = batch.to(target.device)
    features = target.forward(batch.tokens, aux_layers=aux_layers, starts=batch.starts)
    argmax = torch.full_like(batch.tokens, -1)
    argmax.view(-1)[where] = choices(target, features.last.flatten(0, 1)[where])
    return replace(batch, aux=features.aux, last=features.last, argmax=argmax)


class OnlineStore(FeatureStore):
    """An opened store, its own features, if it holds any, left alone.

    Batches equal those of a store of the target's dtype to the rounding of other shapes, but for
    the last state, which is there at every position. A row that the target cannot say anything
    finite about is not dropped, as in `prepare`, but comes as it is.
    """

    features, rounded, last_everywhere = True, False, True

    def __init__(
        self, store: FeatureStore, target: Target, aux_layers: tuple[int, ...] = ()
    ) -> None:
        """aux_layers: the layers whose outputs are `aux`. Raises SpectrainError for another target
        than the one that the store was prepared with."""
        store.require_target(target.fingerprint)
        vars(self).update(vars(store))  # the same rows, the same mapped shards
        self.target, self.aux_layers = target, tuple(aux_layers)

    def require_features(self, aux_layers: tuple[int, ...], last_everywhere: bool) -> None:
        """Whatever layers were stored, `aux` is of those that this was made with."""
        assert tuple(aux_layers) in ((), self.aux_layers), "made for another head"

    def packed(self, bins: list[list[RowInfo]], with_aux: bool = True) -> Batch:
        """As of a store, computed now. Without `with_aux` no auxiliary states are kept."""
        batch = self._packed(bins, with_aux=False, with_features=False)
        return read(self.target, batch, self.aux_layers if with_aux else ())

    def teacher(self, row: RowInfo) -> tuple[Tensor, Tensor, Tensor]:
        """As of a store, computed now."""
        batch = self.batch([row], with_aux=False)
        with torch.no_grad():
            facts = teacher(self.target, batch.last[predicting(batch.reply)])
        return facts["argmax"].long(), facts["logprob"], facts["lognorm"]

    def bytes_per_token(self, aux_layers: tuple[int, ...], last_everywhere: bool) -> float:
        """Nothing is read from the disk."""
        return 0.0

    @property
    def hidden_size(self) -> int:
        """H of the target."""
        return self.target.hidden_size
