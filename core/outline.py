"""A target as shapes alone: what its config.json says, no weight read, none allocated.

Its tensors lie on the meta device. It can be asked for sizes and handed to `DraftHead.outline`;
a forward through it gives shapes and no values.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from spectrain.core import adapter, attention, models
from spectrain.core.target import Target

UNREAD = "shapes alone"  # in the place of a fingerprint, which is made of the weights


class NoTokenizer:
    """Stands in where a folder holds a configuration and no tokenizer: every row is a token."""

    eos_token_id, all_special_ids = None, ()

    def __init__(self, rows: int) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return self._rows


def outline(name: str, dtype: torch.dtype | None = None) -> Target:
    """The shapes of target `name`: an embedded name, a hub id, or a folder in which a config.json
    is enough. An adapter has those of its base. Raises SpectrainError when there is none, or of an
    architecture that is not supported. dtype: None for the checkpoint's own."""
    source = models.resolve(name)
    if adapter.is_adapter(source):
        return outline(adapter.base_name(Path(source)), dtype)
    with models.load_errors(name):
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        return outline_of(config, name, _tokenizer(source), dtype)


def outline_of(
    config: Any, name: str, tokenizer: Any = None, dtype: torch.dtype | None = None
) -> Target:
    """The shapes of the model that a configuration of `transformers` describes."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config,
            attn_implementation=attention.NAME,
            dtype=dtype or config.dtype,
            trust_remote_code=False,
        )
    rows = config.get_text_config(decoder=True).vocab_size
    return Target(model, tokenizer or NoTokenizer(rows), name, UNREAD)


def _tokenizer(source: str) -> Any:
    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError):
        return None
