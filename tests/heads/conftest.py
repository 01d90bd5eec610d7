"""What several tests of heads share: targets of other architectures, made once."""

from __future__ import annotations

import pytest
import torch
from mtp_checkpoints import save_checkpoint
from mtp_variants import ARCHITECTURES
from transformers import AutoConfig, AutoModelForCausalLM

from spectrain.core.target import Target


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory, tokenizer):
    """kind → (target, folder, its MTP tensors)"""
    made = {}

    def checkpoint(kind):
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind) / "model"
            tensors = save_checkpoint(folder, tokenizer, kind)
            target = Target.load(str(folder), dtype="float32", pack_weights=False)
            made[kind] = target, folder, tensors
        return made[kind]

    return checkpoint


@pytest.fixture(scope="session")
def targets(tmp_path_factory, tokenizer):
    """name of an architecture → a target of it"""
    made = {}

    def target(name) -> Target:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            torch.manual_seed(0)
            config = AutoConfig.for_model(name, **ARCHITECTURES[name])
            AutoModelForCausalLM.from_config(config).save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            made[name] = Target.load(str(folder), pack_weights=False)
        return made[name]

    return target


@pytest.fixture(params=["tied, padded rows", "untied"])
def target(request, tiny, whole):
    """With rows beyond the tokenizer, and without."""
    return tiny if request.param.startswith("tied") else whole
