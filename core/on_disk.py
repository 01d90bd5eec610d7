"""A target whose decoder layers stay on the disk: one is in memory at a time.

Its tables (embedding, lm_head, final norm, whatever lies outside the layers) are loaded as ever. A
layer is read when it is asked for, or when it computes; the one before is then given up. So a head
can be made, bound, compared and written for a target that this machine could not hold: it has the
fingerprint and the states of the whole one to the last bit, and each `forward` reads every layer.

Checkpoint names and the model's are brought together by the library, as when it loads a model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils.logging import disable_progress_bar

from spectrain.core import adapter, attention, models
from spectrain.core.checkpoint import Checkpoint
from spectrain.core.errors import SpectrainError
from spectrain.core.fingerprint import fingerprint_of
from spectrain.core.pretrained import accepted_config, generation_of
from spectrain.core.target import Target, placed


def load(name: str, *, dtype: str = "auto", device: str = "auto") -> Target:
    """`Target.load(name, pack_weights=False)` with its layers on the disk, and not checked: for
    what a head is compared and written with, not for decoding.

    Whole and checked where its layers cannot be read one by one: an adapter, which is merged into
    its base, and a quantised checkpoint.
    """
    made = _by_layer(name, *placed(dtype, device))
    return made or Target.load(name, dtype=dtype, device=device, pack_weights=False)


class TargetOnDisk(Target):
    """See above. Of `decoder.layers` only the one that was asked for last holds values."""

    def __init__(self, model: nn.Module, layers: Layers, tokenizer, name: str) -> None:
        fingerprint = fingerprint_of(model, tokenizer, _State(model, layers))
        super().__init__(model, tokenizer, name, fingerprint)
        self._layers = layers

    def layer(self, index: int) -> nn.Module:
        return self._layers.read(range(self.num_layers)[index])


class Layers:
    """The decoder layers of `model`, and all else of its checkpoint, which is read at once."""

    def __init__(self, model: nn.Module, checkpoint: Checkpoint, dtype: torch.dtype, device: str):
        """Raises Incomplete where the checkpoint lacks what lies outside the layers."""
        self._model, self._checkpoint = model, checkpoint
        self._layers = model.get_decoder().layers
        named = {module: name for name, module in model.named_modules()}
        self.prefix = f"{named[self._layers]}."
        self._config = LoadStateDictConfig(
            device_map={"": device},
            dtype=dtype,
            dtype_plan=model._get_dtype_plan(dtype),
            weight_mapping=get_model_conversion_mapping(model),
        )
        self._names = self._by_layer()
        self._held: int | None = None
        missing = self._fill(self._names.get(None, ()))
        model.tie_weights(missing_keys=missing, recompute_mapping=False)
        _require_none(name for name in missing if self.index(name) is None)
        for module in model.modules():  # what is computed, not stored, is here already
            for name, value in module._buffers.items():
                module._buffers[name] = None if value is None else value.to(device)
        for index, layer in enumerate(self._layers):
            layer.register_forward_pre_hook(lambda _module, _inputs, i=index: self._hold(i))

    def index(self, name: str) -> int | None:
        """The layer that a tensor of the model belongs to; None where to none."""
        place = name.removeprefix(self.prefix).partition(".")[0]
        return int(place) if name.startswith(self.prefix) and place.isdigit() else None

    def read(self, index: int) -> nn.Module:
        """Layer `index` with its values; they are gone when another one is read. Raises Incomplete
        where the checkpoint lacks one."""
        self._hold(index)
        return self._layers[index]

    def _hold(self, index: int) -> None:
        if index == self._held:
            return
        if self._held is not None:
            _give_up(self._layers[self._held])
        self._held = index
        missing = self._fill(self._names.get(index, ()))
        _require_none(name for name in missing if self.index(name) == index)

    def _by_layer(self) -> dict[int | None, list[str]]:
        """Names in the checkpoint by the layer that they are read for, None for no layer."""
        mapping, state = self._config.weight_mapping, self._model.state_dict()
        renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
        converters = [one for one in mapping if isinstance(one, WeightConverter)]
        found: dict[int | None, list[str]] = {}
        for name in self._checkpoint.entries:
            prefix = self._model.base_model_prefix
            own, _ = rename_source_key(name, renamings, converters, prefix, state)
            if own not in state and name in state:
                own = name
            found.setdefault(self.index(own), []).append(name)
        return found

    def _fill(self, names: Iterable[str]) -> set[str]:
        """Read these tensors of the checkpoint into the model; returns what of it was not read."""
        late = {name: _Late(self._checkpoint, name) for name in names}
        told, _ = convert_and_load_state_dict_in_model(self._model, late, self._config)
        self._model.requires_grad_(False)
        return told.missing_and_mismatched() | set(told.conversion_errors)


class Incomplete(Exception):
    """A checkpoint without values for some tensor of its model."""


class _Late:
    """A tensor of a checkpoint that is read when its values are asked for."""

    def __init__(self, checkpoint: Checkpoint, name: str) -> None:
        self._checkpoint, self._name = checkpoint, name

    def __getitem__(self, _every: Any) -> Tensor:
        return self._checkpoint.read(self._name)


class _State(Mapping):
    """The state of a model whose layers are on the disk; in the order of its names each is read
    once."""

    def __init__(self, model: nn.Module, layers: Layers) -> None:
        self._model, self._layers, self._names = model, layers, list(model.state_dict())

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, name: str) -> Tensor:
        index = self._layers.index(name)
        if index is not None:
            self._layers.read(index)
        owner, _, own = name.rpartition(".")
        return getattr(self._model.get_submodule(owner), own)


def _by_layer(name: str, dtype: torch.dtype | str, device: str) -> TargetOnDisk | None:
    """None where it has to be loaded whole."""
    source = models.resolve(name)
    if adapter.is_adapter(source):
        return None
    disable_progress_bar()
    with models.load_errors(name):
        config = accepted_config(source, name)
        dtype = config.dtype if dtype == "auto" else dtype
        if dtype is None or hasattr(config, "quantization_config"):
            return None
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(
                config, attn_implementation=attention.NAME, dtype=dtype, trust_remote_code=False
            )
        model.generation_config = generation_of(source, config)
        if not hasattr(model.get_decoder(), "layers"):
            return None
        try:
            checkpoint = Checkpoint(models.weights_of(source))
            layers = Layers(model.eval(), checkpoint, dtype, device)
            return TargetOnDisk(model, layers, tokenizer, name)
        except (SpectrainError, Incomplete):
            return None  # loading it whole tells what is wrong, or goes another way


def _give_up(layer: nn.Module) -> None:
    for module in layer.modules():
        for name, value in module._parameters.items():
            if value is not None:
                empty = torch.empty_like(value, device="meta")
                module._parameters[name] = nn.Parameter(empty, requires_grad=False)


def _require_none(missing: Iterable[str]) -> None:
    if names := sorted(missing):
        raise Incomplete(names[0])
