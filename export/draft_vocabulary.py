"""Whether the map from a head's draft vocabulary to its target's tokens can be right.

d2t [D] holds offsets (target id = i + d2t[i]), t2d [V] says which target tokens are in. The worst
mistake is silent: a map of absolute ids turns every guess into another token.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from spectrain.core.target import Target
from spectrain.export.layout import Finding
from spectrain.heads.vocab import check_maps

CHECK = "draft vocabulary"
_OFFSETS = "store offsets (target id - draft id) in d2t"


def offsets_of(d2t: Tensor) -> Tensor | None:
    """The offsets, where d2t holds ascending target ids themselves; None where it cannot."""
    absolute = d2t.long()
    ascending = bool((absolute[1:] > absolute[:-1]).all()) and bool((absolute >= 0).all())
    return absolute - torch.arange(len(absolute)) if ascending else None


def findings(
    d2t: Tensor | None, t2d: Tensor | None, size: int, target: Target
) -> Iterator[Finding]:
    """size: D. The maps as they are stored, None for one that is not there."""
    if size > target.vocab_size:
        text = f"{size} draft tokens, the target has {target.vocab_size}"
        yield Finding(CHECK, "fail", text, "check draft_vocab_size in config.json")
    elif size == target.vocab_size:
        yield _whole(d2t)
    elif d2t is None:
        text = f"{size} of {target.vocab_size} tokens and no map d2t that says which"
        yield Finding(CHECK, "fail", text, "take d2t from the training that made the head")
    else:
        problem = _reduced(d2t, t2d, target)
        if problem:
            yield problem
        else:
            yield from _content(d2t, t2d, target)


def _whole(d2t: Tensor | None) -> Finding:
    if d2t is None or not d2t.any():
        return Finding(CHECK, "ok", "all of the target's tokens")
    if torch.equal(d2t.long(), torch.arange(len(d2t))):
        text = "d2t holds 0, 1, 2 … as ids: read as offsets they double every id"
        return Finding(CHECK, "fail", text, "leave d2t and t2d out")
    text = "d2t permutes a draft vocabulary that holds every token"
    return Finding(
        CHECK, "fail", text, "leave d2t and t2d out and put lm_head in the target's order"
    )


def _reduced(d2t: Tensor, t2d: Tensor | None, target: Target) -> Finding | None:
    """What is wrong with a map of fewer tokens."""
    ids = d2t.long() + torch.arange(len(d2t))
    inside = bool(((ids >= 0) & (ids < target.vocab_size)).all())
    ascending = bool((ids[1:] > ids[:-1]).all())
    agree = t2d is None or torch.equal(t2d.nonzero().flatten(), ids)
    if inside and ascending and agree:
        return None
    absolute = offsets_of(d2t) is not None and bool((d2t < target.vocab_size).all())
    if absolute and (t2d is None or torch.equal(t2d.nonzero().flatten(), d2t.long())):
        return Finding(CHECK, "fail", "d2t holds absolute target ids, not offsets", _OFFSETS)
    if not inside:
        text = f"d2t leads out of the target's {target.vocab_size} tokens"
    elif not ascending:
        text = "d2t does not lead to ascending target ids, each once"
    else:
        text = "d2t and t2d do not describe the same tokens"
    return Finding(CHECK, "fail", text, _OFFSETS)


def _content(d2t: Tensor, t2d: Tensor | None, target: Target) -> Iterator[Finding]:
    """A map that can be right: what is in it."""
    ids, usable = d2t.long() + torch.arange(len(d2t)), target.readout.usable
    known = set(ids.tolist())
    yield Finding(CHECK, "ok", f"{len(ids)} of {target.vocab_size} tokens, d2t holds offsets")
    if t2d is None:
        grows = len(d2t) > 2 and bool((d2t[1:] > d2t[:-1]).all())
        verdict = "warn" if grows else "note"
        text = "no t2d to check d2t by" + (": it may hold absolute ids" if grows else "")
        fix = "write t2d beside d2t: true for each id i + d2t[i]" if grows else ""
        yield Finding(CHECK, verdict, text, fix)
    if not d2t.any() and len(ids) < usable:
        text = f"d2t is all zeros: the draft vocabulary is the first {len(ids)} ids"
        yield Finding(CHECK, "warn", text, "take d2t from the training that made the head")
    if int(ids[-1]) >= usable:
        text = "rows beyond the tokenizer are guessed"
        yield Finding(CHECK, "warn", text, f"leave ids from {usable} on out of d2t and lm_head")
    if missing := sorted(set(target.stop_ids) - known):
        text = f"stop tokens {missing[:5]} are missing: no draft ends a reply"
        yield Finding(CHECK, "warn", text, "train with a draft vocabulary that holds them")
    special = {i for i in target.tokenizer.all_special_ids if i < usable}
    if missing := sorted(special - known - set(target.stop_ids)):
        yield Finding(CHECK, "note", f"special tokens {missing[:5]} are missing")


def tensors(d2t: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """The two maps of a head, from offsets that were found right."""
    d2t = d2t.long()
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[d2t + torch.arange(len(d2t))] = True
    check_maps(d2t, t2d, CHECK)
    return {"d2t": d2t, "t2d": t2d}
