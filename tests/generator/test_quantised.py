"""A quantised target behind the engine: the head changes the speed, not the tokens."""

from __future__ import annotations

import pytest
import torch
from tiny_models import make_head

from spectrain.core.quantise import MANY_ROWS
from spectrain.core.target import Target
from spectrain.generator.speculate import Generator


@pytest.fixture(scope="module")
def quantised(tiny_path):
    return Target.load(str(tiny_path), quantize="int8")


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
def test_greedy_is_the_quantised_target_s_own(quantised, tiny, gamma):
    """By a head made for the plain target. The texts stay below MANY_ROWS, where rounding does not
    depend on how many rows are read; attention's own is far below the gaps between logits."""
    head = make_head(tiny, steps=4, wild=False)
    head.check_target(quantised, "a head of the plain target")
    generator = Generator(quantised, head.bind(quantised.readout), gamma)
    seeded = torch.Generator().manual_seed(1)
    differs, accepted = 0, 0
    for size in torch.randint(1, 30, (10,), generator=seeded).tolist():
        prompt = torch.randint(3, 380, (size,), generator=seeded)
        got = generator.generate([prompt], 24)[0]
        assert size + 24 < MANY_ROWS
        assert got.tokens == by_hand(quantised, prompt, 24)
        differs += got.tokens != by_hand(tiny, prompt, 24)
        accepted += sum(run * times for run, times in got.runs.items())
    assert accepted > 0, "nothing was ever accepted: the accepting path was not tested"
    assert differs > 0, "the plain target says the same everywhere: nothing was shown"
