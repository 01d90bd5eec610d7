"""A target's checkpoint with MTP layers put beside its own: what MTP formats write.

Nothing of the target is rewritten: its files are named by path, one more file holds the new layers,
and an index covers both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from spectrain.core.checkpoint import INDEX, SINGLE, Checkpoint
from spectrain.core.embedded import SOURCE_FILE
from spectrain.core.errors import SpectrainError
from spectrain.core.files import read_json
from spectrain.export.layout import CONFIG, Encoded
from spectrain.heads.mtp_names import LAYOUTS, Names
from spectrain.heads.mtp_native import folder_of

# The library reads a file of the name SINGLE without looking for an index.
TARGET, LAYERS = "model-target.safetensors", "model-mtp.safetensors"
# Tokenizer, chat template, generation settings, licence.
_KEPT = (".json", ".jinja", ".model", ".tiktoken", ".txt")


@dataclass(frozen=True)
class Stock:
    """A target's folder: its config as it is written, and its tensors."""

    folder: Path
    config: Mapping[str, Any]
    checkpoint: Checkpoint

    @classmethod
    def of(cls, name: str) -> Stock:
        """By the target's name. Raises SpectrainError where it is no plain checkpoint of one
        language model."""
        folder = folder_of(name)
        checkpoint, config = Checkpoint(folder), read_json(folder / CONFIG)
        if not isinstance(config, dict) or "num_hidden_layers" not in config:
            raise SpectrainError(
                "the config does not say how many layers the language model has",
                where=str(folder / CONFIG),
                fix="MTP layers can be put beside a plain language model only",
            )
        return cls(folder, config, checkpoint)

    def own_layers(self) -> int:
        """MTP layers that it has already."""
        count, known = self.config["num_hidden_layers"], self.checkpoint.entries
        return max(Names(layout, count, known).count for layout in LAYOUTS.values())

    def layer(self, index: int) -> dict[str, tuple[int, ...]]:
        """Shapes of a decoder layer's tensors, by what follows the layer's number."""
        start = f"model.layers.{index}."
        return {
            name.removeprefix(start): entry.shape
            for name, entry in self.checkpoint.entries.items()
            if name.startswith(start) and not name.endswith("rotary_emb.inv_freq")
        }

    def with_layers(
        self, tensors: Mapping[str, Tensor], changes: Mapping[str, Any], gone: str = ""
    ) -> Encoded:
        """The checkpoint with these tensors beside its own and these keys in its config; gone: a
        key that is left out."""
        places = {name: entry.path.name for name, entry in self.checkpoint.entries.items()}
        renamed = {file: TARGET if file == SINGLE else file for file in set(places.values())}
        beside: dict[str, Path | Mapping[str, Any]] = {
            new: self.folder / file for file, new in sorted(renamed.items())
        }
        beside |= {
            path.name: path
            for path in sorted(self.folder.iterdir())
            if path.is_file()
            and path.name not in (CONFIG, SOURCE_FILE)
            and not path.name.endswith(".index.json")
            and (path.suffix in _KEPT or path.name.startswith("LICENSE"))
        }
        weights = {name: renamed[file] for name, file in places.items()}
        weights |= dict.fromkeys(tensors, LAYERS)
        beside[INDEX] = {"metadata": {}, "weight_map": dict(sorted(weights.items()))}
        config = {key: value for key, value in self.config.items() if key != gone}
        return Encoded({**config, **changes}, tensors, beside, LAYERS, own_config=False)
