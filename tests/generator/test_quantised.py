"""A quantised target behind the engine: the head changes the speed, not the tokens."""

from __future__ import annotations

import pytest
import torch
from head_kinds import KINDS as HEADS
from helped_heads import helped
from tiny_models import make_head, save_tiny

from spectrain.core.quantise import KINDS, MANY_ROWS
from spectrain.core.target import Target
from spectrain.generator.speculate import Generator
from spectrain.recipes.drafting import make_ready


@pytest.fixture(scope="module")
def plain_path(tmp_path_factory, tokenizer):
    """A tiny target all of whose layers fit both kinds."""
    return save_tiny(tmp_path_factory.mktemp("target") / "wide", tokenizer, hidden_size=64)


@pytest.fixture(scope="module")
def plain(plain_path):
    return Target.load(str(plain_path), pack_weights=False)


@pytest.fixture(scope="module", params=list(KINDS))
def quantised(plain_path, request):
    return Target.load(str(plain_path), quantize=request.param)


@torch.inference_mode()
def by_hand(target, prompt, new):
    """Greedy decoding that reads everything anew for each token, without a cache."""
    tokens = prompt.tolist()
    while len(tokens) < len(prompt) + new and (
        len(tokens) == len(prompt) or tokens[-1] not in target.stop_ids
    ):
        last = target.forward(torch.tensor([tokens])).last[0, -1]
        tokens.append(int(target.logits(last).argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("gamma", [1, 4])
def test_greedy_is_the_quantised_target_s_own(quantised, plain, gamma):
    """By a head made for the plain target. The texts stay below MANY_ROWS, where rounding does not
    depend on how many rows are read; attention's own is far below the gaps between logits."""
    head = make_head(plain, steps=4, wild=False)
    head.check_target(quantised, "a head of the plain target")
    generator = Generator(quantised, head.bind(quantised.readout), gamma)
    seeded = torch.Generator().manual_seed(1)
    differs, accepted = 0, 0
    for size in torch.randint(1, 30, (10,), generator=seeded).tolist():
        prompt = torch.randint(3, 380, (size,), generator=seeded)
        got = generator.generate([prompt], 24)[0]
        assert size + 24 < MANY_ROWS
        assert got.tokens == by_hand(quantised, prompt, 24)
        differs += got.tokens != by_hand(plain, prompt, 24)
        accepted += sum(run * times for run, times in got.runs.items())
    assert accepted > 0, "nothing was ever accepted: the accepting path was not tested"
    assert differs > 0, "the plain target says the same everywhere: nothing was shown"


@pytest.mark.parametrize("kind", HEADS)
def test_heads_are_quantised_with_their_target(quantised, plain, kind):
    """Every family: its guesses are rounded, the tokens are the target's all the same."""
    seeded = torch.Generator().manual_seed(2)
    prompts = [torch.randint(3, 380, (size,), generator=seeded) for size in (9, 1, 20)]
    head = HEADS[kind](plain, 300)
    head.check_target(quantised, "a head of the plain target")
    make_ready(head, quantised)
    assert any(isinstance(part, KINDS["int8"]) for part in head.modules())
    watched, truths = helped(quantised, head, prompts, 16)
    got = Generator(quantised, watched, min(3, head.longest_draft)).generate(prompts, 16)
    assert [c.tokens for c in got] == truths
    assert sum(c.committed - c.forwards for c in got) > 5
