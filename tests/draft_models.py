"""Small causal models in folders, as draft models."""

from __future__ import annotations

from tiny_models import save_tiny

from spectrain.generator.speculate import Generator


def folder_of(tmp_path, tokenizer, name="draft", **changes):
    """A one-layer model in the layout of transformers, of other sizes than the targets'."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 40} | changes
    return save_tiny(tmp_path / name, tokenizer, **sizes)


def plain(target, prompts, new):
    return [c.tokens for c in Generator(target).generate(prompts, new)]
