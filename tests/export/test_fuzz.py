"""Round trips of random heads through every format: what comes back is the same head, or the writer
has said why it cannot be.

Formats and families are those of the table of writers, so a new one is tried without a word here.
Examples are seeded by the names of format, family and target: each run tries the same ones.
Hypothesis begins with the simplest choice of everything, which every format can carry for some
target, so that none is tested by refusals alone.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from head_kinds import create, wild
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st
from mtp_variants import DEEPSEEK
from tiny_models import SIZES, save_tiny
from transformers import AutoConfig, AutoModelForCausalLM

from spectrain.core.errors import SpectrainError
from spectrain.core.target import Target
from spectrain.export.conformance import problems
from spectrain.export.formats import WRITERS, reader_of, writer
from spectrain.export.found import Found
from spectrain.export.layout import Reference, load
from spectrain.export.parity import differences
from spectrain.export.write import write
from spectrain.heads.layers import Rotary
from spectrain.heads.registry import FAMILIES, family

PAIRS = [(name, one) for name, families in WRITERS.items() for one in families]
# Rows of lm_head beyond the tokenizer, or none; the embedding is the output layer, or not; layers
# with biases, latent attention, experts, gates.
TARGETS: dict[str, dict[str, Any]] = {
    "llama": {},
    "whole": {"vocab_size": 384, "tie_word_embeddings": False, "num_hidden_layers": 8},
    "qwen2": SIZES
    | {"tie_word_embeddings": False, "num_attention_heads": 3, "num_key_value_heads": 1},
    "deepseek_v3": DEEPSEEK | {"tie_word_embeddings": False},
    "qwen3_next": SIZES
    | {"layer_types": ["full_attention"] * 4, "num_experts": 4, "num_experts_per_tok": 2}
    | {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
}
ROPE = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.5},
    {
        **{"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64},
        **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    {"rope_type": "dynamic", "factor": 2.0},
]
steps = st.integers(1, 3)
part = st.sampled_from([None, 120, 384])  # of the vocabulary; 384: all tokens of the tokenizer


def aux_layers(count: int) -> st.SearchStrategy:
    """Up to five of a target's layers, or those that are the default."""
    some = st.sets(st.integers(0, count - 1), min_size=1, max_size=5)
    return st.none() | some.map(lambda found: tuple(sorted(found)))


def eagle1(count: int) -> dict[str, st.SearchStrategy]:
    return {"steps": steps, "draft_vocab_size": part, "fc_bias": st.booleans()}


# Family → choices for its options, by the number of the target's layers.
OPTIONS: dict[str, Any] = {
    "eagle1": eagle1,
    "eagle2": eagle1,
    "eagle3": lambda count: {
        "steps": steps,
        "draft_vocab_size": part,
        "aux_layers": aux_layers(count),
        "layers": st.integers(1, 2),
        "embeddings": st.sampled_from(["target", "own"]),
    },
    "medusa": lambda count: {
        "steps": steps,
        "draft_vocab_size": part,
        "layers": st.integers(0, 2),
    },
    "mtp-parallel": lambda count: {"steps": steps, "draft_vocab_size": part},
    "mtp-sequential": lambda count: {
        "steps": steps,
        "draft_vocab_size": part,
        "pass_on": st.sampled_from(["after_norm", "before_norm"]),
        "shared": st.booleans(),
    },
    "draft": lambda count: {"steps": steps, "layers": st.integers(1, 2)},
}
# What an EAGLE head takes over from its target, and need not have in common with it.
HEADS = ("num_attention_heads", "num_key_value_heads", "head_dim")
SHAPES = {
    # The first one fills the hidden size of 48.
    HEADS: st.sampled_from([(3, 1, 16), (4, 2, 16), (6, 3, 8), (2, 2, 20), (4, 1, 12)]),
    "intermediate_size": st.sampled_from([96, 40]),
    "rms_norm_eps": st.sampled_from([1e-6, 1e-5]),
    "max_position_embeddings": st.sampled_from([512, 1024]),
    "rope_parameters": st.builds(
        lambda kind, theta: {**kind, "rope_theta": theta},
        st.sampled_from(ROPE),
        st.sampled_from([10000.0, 5e5]),
    ),
}


@pytest.fixture(scope="module")
def targets(tmp_path_factory, tokenizer) -> dict[str, Target]:
    made = {}
    for name, sizes in TARGETS.items():
        folder = tmp_path_factory.mktemp("target") / name
        if name in ("llama", "whole"):
            save_tiny(folder, tokenizer, **sizes)
        else:
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **sizes))
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        made[name] = Target.load(str(folder), pack_weights=False)
    return made


def head_of(
    target: Target, name: str, options: dict[str, Any], shapes: dict[str, Any], weights: int
):
    """A random head with these options; of shapes of its own where its family has such."""
    try:
        head = create(target, name, seed=weights, **options)
    except SpectrainError:  # a target that this family cannot draft for, or not with these options
        return None
    shapes = {**shapes, **dict(zip(HEADS, shapes[HEADS], strict=True))}
    del shapes[HEADS]
    if shapes.keys() <= type(head.config).model_fields.keys():
        kind = family(name)
        other = kind(kind.Config(**{**head.config.model_dump(), **shapes}))
        other.use_vocabulary(head.draft_ids)
        head = wild(other.bind(target.readout))
    return head


def check_round_trip(target: Target, format: str, head, folder) -> bool:
    """Whether the head was carried, and if so, unchanged."""
    made, reference = writer(format, head.family), Reference(target, target.name)
    if refused := made.refusals(head, reference):
        assert all(isinstance(one, str) and one for one in refused)
        return False
    folder.mkdir()
    encoded = made.encode(head, reference)
    for facts in made.facts:
        assert problems(encoded, facts) == []
    write(encoded, folder, files="link")
    found = Found.open(folder)
    again = load(reader_of(found), found, target)
    assert differences(head, again, target) == []
    if "rope_parameters" in type(head.config).model_fields:
        assert torch.equal(turns(head.config), turns(again.config))
    return True


def turns(config) -> torch.Tensor:
    """Cosines and sines at near and far positions, beyond the last one too, where some kinds
    change their frequencies."""
    last = config.max_position_embeddings
    rotary = Rotary(config.head_dim, last, dict(config.rope_parameters))
    return torch.cat(rotary(torch.tensor([0, 1, 7, last - 1, 2 * last]), torch.float32))


def fuzz(targets, tmp_path, format: str, name: str, examples: int) -> None:
    """Some heads for each target; at least one of all is carried."""
    number, carried = itertools.count(), []
    for kind in targets:

        @seed(f"{format} {name} {kind}")
        @settings(
            max_examples=examples,
            database=None,
            deadline=None,
            phases=[Phase.generate],  # the first one that fails says enough
        )
        @given(
            kind=st.just(kind),
            options=st.fixed_dictionaries(OPTIONS[name](targets[kind].num_layers)),
            shapes=st.fixed_dictionaries(SHAPES),
            weights=st.integers(0, 99),
        )
        def try_one(kind, options, shapes, weights):
            target = targets[kind]
            head = head_of(target, name, options, shapes, weights)
            if head is not None:
                folder = tmp_path / f"{next(number)}"
                carried.append(check_round_trip(target, format, head, folder))

        try_one()
    assert any(carried), f"all {len(carried)} heads of {name} were refused by {format}"


def test_every_family_has_its_choices():
    assert set(OPTIONS) == set(FAMILIES)


@pytest.mark.parametrize(("format", "name"), PAIRS)
def test_round_trips(targets, tmp_path, format, name):
    fuzz(targets, tmp_path, format, name, examples=3)


@pytest.mark.slow
@pytest.mark.parametrize(("format", "name"), PAIRS)
def test_many_round_trips(targets, tmp_path, format, name):
    fuzz(targets, tmp_path, format, name, examples=20)
