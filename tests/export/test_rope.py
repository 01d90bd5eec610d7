"""Rotary positions: what engines compute otherwise is refused, and both spellings mean the same.

d head size.
"""

from __future__ import annotations

import pytest
import torch
from eagle_files import ROPES, head_of, refusals, target_of
from transformers import LlamaConfig

from spectrain.export import rope
from spectrain.export.formats import WRITERS

BASE = {"rope_theta": 10000.0}
LONG = {
    **BASE,
    **{"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 128},
    **{"short_factor": [1.0] * 6, "long_factor": [2.0] * 6},
}
DYNAMIC = {**BASE, "rope_type": "dynamic", "factor": 2.0}
YARN = ROPES["yarn"]
OTHERWISE = [
    ("sglang", DYNAMIC, "at every length"),
    ("sglang", {**YARN, "attention_factor": 1.3}, "the head has attention_factor"),
    ("sglang", {**YARN, "attn_factor": 1.3}, "the head has attn_factor"),
    ("sglang", LONG, "for a whole batch"),
    ("vllm", LONG, "at every position"),
    ("trtllm", DYNAMIC, "asks for an alpha"),
    ("vllm", DYNAMIC, ""),
    ("vllm", {**YARN, "attention_factor": 1.3}, ""),
    *((engine, kind, "") for engine in ("vllm", "sglang") for kind in ROPES.values()),
]


@pytest.mark.parametrize(("engine", "rotary", "reason"), OTHERWISE)
def test_positions_that_an_engine_computes_otherwise(engine, rotary, reason):
    """At other frequencies every draft is off, and nothing says so. Speculators' files are vLLM's
    as well."""
    target = target_of(padded=0)
    tried = [(engine, family) for family in ("eagle1", "eagle3") if family in WRITERS[engine]]
    for format, family in tried + [("speculators", "eagle3")] * (engine == "vllm"):
        head = head_of(target, family)
        head.config = head.config.model_copy(update={"rope_parameters": rotary})
        said = refusals(head, target, format)
        assert reason in said if reason else said == ""


@pytest.mark.parametrize("kind", ROPES)
def test_the_old_keys_alone_mean_the_same(kind):
    """An engine with an older library sees rope_theta and rope_scaling only. d = 12."""
    keys = rope.keys(ROPES[kind])
    old = LlamaConfig(
        hidden_size=48,
        num_attention_heads=4,
        max_position_embeddings=512,
        rope_theta=keys["rope_theta"],
        rope_scaling=keys["rope_scaling"],
    )
    read = rope.effective(old.rope_parameters, 12, 512)
    assert torch.equal(read, rope.effective(ROPES[kind], 12, 512))


SCALED = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
FACTOR = {**YARN, "attention_factor": 1.3}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({**BASE, "rope_type": "default"}, {"rope_type": "default", "rope_theta": 10010.0}),
        ({**BASE, "rope_type": "default"}, DYNAMIC),
        (LONG, {**LONG, "long_factor": [3.0] * 6}),
        (YARN, FACTOR),
    ],
    ids=["base", "dynamic", "long factors", "attention factor"],
)
def test_positions_that_differ_a_little_or_far_away(one, other):
    """A base one in a thousand off, what changes beyond the longest text alone, or nothing but the
    scale of the attention: each is another head. d = 12."""
    left, right = (rope.effective(each, 12, 512) for each in (one, other))
    assert rope.same(left, rope.effective(dict(one), 12, 512))
    assert not rope.same(left, right)


def test_where_spellings_differ():
    """Which row and which column of the comparison hold what the test above is about."""
    plain = rope.effective({**BASE, "rope_type": "default"}, 12, 512)
    far = rope.effective(DYNAMIC, 12, 512)
    assert torch.equal(plain[0], far[0])
    assert not torch.equal(plain[1], far[1])
    yarn, factor = (rope.effective(each, 12, 512) for each in (YARN, FACTOR))
    assert torch.equal(yarn[:, :-1], factor[:, :-1])
    assert (factor[:, -1] == torch.tensor(1.3)).all()


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_an_original_length_beside_the_scaling(key):
    """Some configs keep it at the top, for scaled positions; what the scaling says goes before."""
    top, within = ({"original_max_position_embeddings": length} for length in (128, 64))
    (found,) = rope.spellings({**top, key: {**BASE, **SCALED}})
    whole = {**BASE, **SCALED, **top}
    assert found == whole
    other = rope.effective({**whole, **within}, 12, 512)
    assert not rope.same(rope.effective(found, 12, 512), other)
    assert rope.spellings({**top, key: {**BASE, **SCALED, **within}}) == [{**whole, **within}]
    (plain,) = rope.spellings({**top, **BASE})
    assert plain == {**BASE, "rope_type": "default"}
