"""What a head is trained on: token rows with the target's features, and which positions count.

B batch, T padded length, H target hidden size, A = 3·H auxiliary width.

Position by position (SPEC of alignments; t is the anchor, k the draft step)::

    tokens   x[t]   x[t+1]      x[t+2]      …  x[t+1+k]        x[t+2+k]
    features f[t]                              teacher row      label of step k
             a[t]   fed at 0    fed at 1       fed at step k
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass
class Features:
    """What the target says at each position it has read.

    last [B, n, H] state after the final norm: lm_head(last) are the logits of the next token
    aux  [B, n, A] outputs of the chosen layers side by side, low→high, or None when not asked for
    """

    last: Tensor
    aux: Tensor | None

    def __getitem__(self, index) -> Features:
        return Features(self.last[index], None if self.aux is None else self.aux[index])

    def at(self, places: Tensor) -> Features:
        """Other positions of each row: places [B, m]."""

        def pick(rows: Tensor) -> Tensor:
            return rows.gather(1, places[..., None].expand(-1, -1, rows.shape[-1]))

        return Features(pick(self.last), None if self.aux is None else pick(self.aux))


@dataclass
class Batch:
    """Rows padded on the right with token 0 and reply 0.

    Several documents (conversations) may share a row. Nothing crosses from one to another when
    their replies have different numbers and the first token of each, which nobody in its document
    predicts, has reply 0; then all that is built on `reply` holds as it is.

    tokens [B, T] int64
    reply  [B, T] int64, n ≥ 1 inside the n-th assistant reply of the row (its end-of-turn token
           included), 0 elsewhere
    aux    [B, T, A] the target's auxiliary states low→mid→high, or None when not captured
    last   [B, T, H] the target's last state after the final norm, zeros where it was not kept
    argmax [B, T] int64, the target's own argmax for x[t+1] over the whole vocabulary; −1: unknown
    stored [B, T] the same as the store has it, where `argmax` is that of a target that is trained
           along: it decides which rows are taught, so that they are known before the forward
    starts [B, T] int64, the place in its row where the document of each position begins; padding
           begins anew at every place. None: every row is one document
    """

    tokens: Tensor
    reply: Tensor
    aux: Tensor | None
    last: Tensor | None
    argmax: Tensor
    stored: Tensor | None = None
    starts: Tensor | None = None

    @property
    def positions(self) -> Tensor:
        """Places counted from the start of each document, [B, T]."""
        return positions_of(self.tokens, self.starts)

    @property
    def deciding(self) -> Tensor:
        """The argmax that decides which rows a reduced vocabulary leaves out."""
        return self.argmax if self.stored is None else self.stored

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Batch:
        """Move every tensor; features also change to `dtype` when given."""

        def move(name: str, value: Tensor | None) -> Tensor | None:
            if value is None:
                return None
            wanted = dtype if name in ("aux", "last") else None
            return value.to(device=device, dtype=wanted, non_blocking=True)

        return Batch(**{f.name: move(f.name, getattr(self, f.name)) for f in fields(self)})

    def pin(self) -> Batch:
        """In memory that a GPU copies from while it computes."""
        held = {f.name: getattr(self, f.name) for f in fields(self)}
        return Batch(
            **{n: None if value is None else value.pin_memory() for n, value in held.items()}
        )


def positions_of(tokens: Tensor, starts: Tensor | None) -> Tensor:
    """Places of tokens [B, T] in their documents, that begin at `starts` (see Batch): [B, T]."""
    places = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
    return places if starts is None else places - starts


def counted(reply: Tensor, step: int) -> Tensor:
    """Which anchors count at draft step `step`: [B, T] bool.

    Anchor t counts iff x[t+1] … x[t+2+step] all lie in one reply of one document: every token the
    draft is fed and the token it has to guess were produced by the target itself.
    """
    length = reply.shape[-1]
    result = torch.zeros_like(reply, dtype=torch.bool)
    usable = length - 2 - step
    if usable <= 0:
        return result
    first = reply[..., 1 : 1 + usable]
    same = first > 0
    for offset in range(2, 3 + step):
        same = same & (reply[..., offset : offset + usable] == first)
    result[..., :usable] = same
    return result


def predicting(reply: Tensor) -> Tensor:
    """Positions t whose next token lies in a reply: [B, T] bool.

    These are the rows where the target's last state is kept: every anchor and every teacher row is
    one of them.
    """
    result = torch.zeros_like(reply, dtype=torch.bool)
    result[..., :-1] = reply[..., 1:] > 0
    return result
