"""The tensors of a target trained along: which optimiser has them, what may change, saving."""

from __future__ import annotations

import pytest
import torch
from joint_heads import joint

from spectrain.core.errors import RunFailed
from spectrain.core.target import Target
from spectrain.trainer import optim
from spectrain.trainer.changes import digests, require_changes
from spectrain.trainer.settings import TrainerSettings


@pytest.mark.parametrize("name", ["tiny", "whole"])
def test_tables_of_the_trunk_are_not_muon_s_and_its_rates_are_its_own(request, name):
    path = request.getfixturevalue(name).name
    made = joint(path, mode="full", lr=1e-4)
    settings = TrainerSettings(optimizer="muon", lr=1e-3, trunk=made.settings)
    parts = optim.build(made, settings, {made.config.vocab_size, made.config.draft_vocab_size})
    assert {kind: (part.lr, part.rests) for kind, part in parts.items()} == {
        "trunk-muon": (pytest.approx(0.002), 0.25),
        "trunk-adamw": (pytest.approx(1e-4), 0.25),
        "muon": (0.02, 0.0),
        "adamw": (1e-3, 0.0),
    }
    where = {name: kind for kind, part in parts.items() for name in part.names}
    assert set(where) == {name for name, _ in made.named_parameters()}
    assert where["trunk.model.embed_tokens.weight"] == "trunk-adamw"
    assert where.get("trunk.lm_head.weight", "trunk-adamw") == "trunk-adamw"
    assert where["trunk.model.layers.0.mlp.up_proj.weight"] == "trunk-muon"
    assert where["trunk.model.norm.weight"] == "trunk-adamw"
    assert where["head.heads.0.0.linear.weight"] == "muon"
    assert where["head.heads.0.1.weight"] == "adamw"


def test_a_frozen_tensor_of_the_trunk_that_moves_is_found(tiny_path):
    made = joint(tiny_path, mode="lora")
    before = digests(made.everything())
    assert set(digests(made)) < set(before)
    with torch.no_grad():
        for value in made.parameters():
            if value.requires_grad:
                value += 0.1
    require_changes(made.everything(), before, "run")
    with torch.no_grad():
        made.trunk.get_input_embeddings().weight[0, 0] += 1
    with pytest.raises(RunFailed, match=r"frozen but changed: trunk\.model\.embed_tokens\.weight"):
        require_changes(made.everything(), before, "run")


def test_the_trunk_has_no_dropout_while_it_is_trained(tiny_path):
    made = joint(tiny_path, mode="full").train()
    assert made.head.training
    assert not any(module.training for module in made.trunk.modules())


@pytest.mark.parametrize("name", ["tiny", "whole"])
def test_a_saved_trunk_loads_as_it_was(request, name, tmp_path):
    """Tied embeddings (tiny) and untied ones; generation settings and tokenizer go along."""
    original = request.getfixturevalue(name)
    made = joint(original.name, mode="full")
    folder = made.save_trunk(tmp_path, original.name)
    again = Target.load(str(folder), pack_weights=False)
    tokens = torch.randint(3, 380, (1, 9))
    logits = again.logits(again.forward(tokens).last)
    torch.testing.assert_close(logits, made.trunk(input_ids=tokens).logits, atol=1e-5, rtol=1e-5)
    assert made.config.target.fingerprint == again.fingerprint != original.fingerprint
    assert again.stop_ids == original.stop_ids
    assert again.tokenizer.chat_template == original.tokenizer.chat_template
    tied = again.model.get_input_embeddings().weight is again.readout.weight
    assert tied == (name == "tiny")
