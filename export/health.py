"""Checks of a head that was built, whatever its layout: what it guesses, reads and has learnt.

d head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from spectrain.core.errors import SpectrainError
from spectrain.core.target import Target
from spectrain.export import output_rows, rope
from spectrain.export.layout import Finding
from spectrain.export.stored import names_of
from spectrain.export.untouched import judged
from spectrain.heads.base import DraftHead
from spectrain.heads.eagle3_init import rope_parameters
from spectrain.heads.eagle_layer import EagleConfig, sizes_of
from spectrain.heads.layers import RMSNorm, Rotary

Called = Callable[[str], str]  # names of a head's tensors and modules → of the file it came from
_IGNORED = 1e-2  # a part of fc this small beside its largest hardly reads its layer


@torch.no_grad()
def findings(head: DraftHead, target: Target, called: Called = str) -> Iterator[Finding]:
    """Of a head bound to `target`: what it guesses, reads and has learnt."""
    yield _stops(head, target)
    yield from _layers(head, target)
    yield from _rope(head, target)
    yield from _geometry(head, target)
    yield from output_rows.findings(head, target, called)
    yield from _norms(head, called)
    yield from _learnt(head, target, called)


def _stops(head: DraftHead, target: Target) -> Finding:
    wanted = sorted({*target.stop_ids, *target.tokenizer.all_special_ids})
    ids = torch.tensor([i for i in wanted if i < target.readout.usable], device=target.device)
    lacking = ids[~head.guessable(ids)].tolist()
    size = f"{head.config.draft_vocab_size:,} tokens"
    if not lacking:
        return Finding("draft vocabulary", "ok", f"stop and special tokens are in it ({size})")
    names = names_of([repr(target.tokenizer.convert_ids_to_tokens(i)) for i in lacking])
    if any(i in target.stop_ids for i in lacking):
        text = f"the draft vocabulary ({size}) lacks {names}: a reply's end is never drafted"
    else:
        text = f"the draft vocabulary ({size}) lacks the special {names}"
    return Finding(
        "draft vocabulary", "warn", text, "train with a draft vocabulary that holds them"
    )


def _layers(head: DraftHead, target: Target) -> Iterator[Finding]:
    layers = head.needs.aux_layers
    if not layers:
        return
    told = f"reads the outputs of layers {_list(layers)} of 0 … {target.num_layers - 1}"
    if not can_be_fed(head, target):
        fix = "name layers that there are, or give the target that the head was trained for"
        yield Finding("auxiliary layers", "fail", f"{told}: there is no such layer", fix)
        return
    usual = target.default_aux_layers() if target.num_layers > 2 else layers
    also = "the usual ones" if layers == usual else f"usual are {_list(usual)}"
    yield Finding("auxiliary layers", "ok", f"{told}; {also}")


def can_be_fed(head: DraftHead, target: Target) -> bool:
    """Whether the target has the layers that the head reads."""
    return all(0 <= layer < target.num_layers for layer in head.needs.aux_layers)


def target_rotary(head: DraftHead, target: Target) -> dict[str, Rotary]:
    """Rotary positions as the target has them, for each place in the head that has others."""
    try:
        parameters = rope_parameters(target.config)
    except SpectrainError:  # a target that no such head can be made for
        return {}
    found = {}
    for name, own in head.named_modules():
        if isinstance(own, Rotary):
            size = 2 * (len(_turns(own)) - 1)
            theirs = Rotary(size, target.config.max_position_embeddings, parameters)
            if not torch.allclose(_turns(own), _turns(theirs.to(target.device)), rtol=1e-4, atol=0):
                found[name] = theirs
    return found


def _turns(rotary: Rotary) -> Tensor:
    """Angles by which the pairs turn from one position to the next, then the scale: [d/2 + 1]."""
    device = next(rotary.buffers()).device
    cos, sin = (part[0] for part in rotary(torch.ones(1, device=device), torch.float32))
    half = len(cos) // 2
    scale = (cos[:1] ** 2 + sin[:1] ** 2).sqrt()
    return torch.cat([torch.atan2(sin[:half], cos[:half]), scale])


def _rope(head: DraftHead, target: Target) -> Iterator[Finding]:
    own = {name: one for name, one in head.named_modules() if isinstance(one, Rotary)}
    other = target_rotary(head, target)
    if other:
        name, theirs = next(iter(other.items()))
        slowest = [_turns(one)[:-1].min().item() for one in (own[name], theirs)]
        text = (
            "positions turn by other angles than the target's: slowest pair {:.3g} radians a "
            "position, the target's {:.3g}".format(*slowest)
        )
        yield Finding("rope", "warn", text, rope.told(rope_parameters(target.config)))
    elif own:
        turns = _turns(next(iter(own.values())))
        text = f"angles are the target's, {turns[0]:.3g} … {turns[-2]:.3g} radians a position"
        yield Finding("rope", "ok", text)


def _geometry(head: DraftHead, target: Target) -> Iterator[Finding]:
    """Attention heads that are cut otherwise than the target's: where both fit the same weights,
    nothing but the config tells which was meant."""
    if not isinstance(head.config, EagleConfig):
        return
    try:
        theirs = sizes_of(target)
    except (AttributeError, SpectrainError):  # a target that no such head can be made for
        return
    names = ("num_attention_heads", "num_key_value_heads", "head_dim")
    own, other = ([sizes[n] for n in names] for sizes in (head.config.model_dump(), theirs))
    if own == other:
        return
    text = f"{own[0]} heads of {own[2]} ({own[1]} for keys), "
    text += f"the target has {other[0]} of {other[2]} ({other[1]})"
    if [own[0] * own[2], own[1] * own[2]] != [other[0] * other[2], other[1] * other[2]]:
        yield Finding("attention heads", "note", text)
        return
    told = ", ".join(f"{name} to {size}" for name, size in zip(names, other, strict=True))
    fix = f"see how it was trained; if as the target, in config.json, set {told}"
    yield Finding("attention heads", "warn", f"{text}: the weights fit both", fix)


@torch.no_grad()
def mends(
    head: DraftHead, target: Target, called: Called = str
) -> Iterator[tuple[str, str, Callable[[DraftHead], None]]]:
    """What can be mended in a head like this one: name, fix, and what to do with another copy."""
    rotary = target_rotary(head, target)
    if rotary:

        def turn(other: DraftHead) -> None:
            for name, theirs in rotary.items():
                other.set_submodule(name, theirs.to(target.device))

        fix = rope.told(rope_parameters(target.config))
        yield "rotary positions that are not the target's", fix, turn
    yield from output_rows.mends(head, target, called)


def _norms(head: DraftHead, called: Called) -> Iterator[Finding]:
    norms = {n: one.weight for n, one in head.named_modules() if isinstance(one, RMSNorm)}
    zero = [called(name) for name, weight in norms.items() if not weight.any()]
    ones = [called(name) for name, weight in norms.items() if bool((weight == 1).all())]
    if zero:
        text = f"all zeros, so that nothing passes: {names_of(zero)}"
        yield Finding("norms", "fail", text, "the weight was lost; convert the head again")
    if ones:
        text = f"all ones, as where no weight was ever loaded: {names_of(ones)}"
        yield Finding("norms", "warn", text, "see that the weight was not lost in a conversion")
    if norms and not zero and not ones:
        yield Finding("norms", "ok", f"{len(norms)}, neither all zeros nor all ones")


def _learnt(head: DraftHead, target: Target, called: Called) -> Iterator[Finding]:
    beside = judged(head, target)
    if beside.never_trained:
        yield Finding("trained", "fail", "every weight is that of a new head", "train the head")
    elif same := beside.untouched:
        text = f"not trained, as in a new head: {names_of([called(name) for name in same])}"
        # An output layer that is kept as the target's is common, and no layout tells of it.
        yield Finding("trained", "note", text, "see that this was frozen, and not lost")
    else:
        yield Finding("trained", "ok", "no weight is that of a new head")
    yield from _ignored(head, target, called)


def _ignored(head: DraftHead, target: Target, called: Called) -> Iterator[Finding]:
    """An auxiliary layer that the layer joining them hardly reads."""
    count = len(head.needs.aux_layers)
    width = count * target.hidden_size
    for name, module in head.named_modules():
        if count > 1 and isinstance(module, nn.Linear) and module.in_features == width:
            parts = module.weight.float().unflatten(1, (count, -1)).pow(2).mean((0, 2)).sqrt()
            small = (parts < _IGNORED * parts.max()).tolist()
            if any(small):
                layers = [n for n, one in zip(head.needs.aux_layers, small, strict=True) if one]
                text = f"{called(name)} hardly reads layer {_list(layers)}"
                yield Finding(
                    "auxiliary layers", "note", f"{text} (size of its parts: {_sizes(parts)})"
                )


def _sizes(parts: Tensor) -> str:
    return ", ".join(f"{value:.2g}" for value in parts.tolist())


def _list(numbers) -> str:
    return ", ".join(map(str, numbers))
