"""Reading MTP layers out of a whole checkpoint, in every layout that heads/mtp_names.py knows.

Engines hand the state after the module's norm to the next step, whatever the layout (vLLM 0.33,
SGLang 0.5.23, transformers 5.24), so that is what a head that is read does. Where they use the only
module again and again, so does it: `mtp_steps` of the config, which our writers leave, tells how
many steps it was trained for.

N target layers, K modules, H hidden.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from transformers import AutoConfig

from spectrain.core.errors import SpectrainError
from spectrain.core.target import Target
from spectrain.export import numbers
from spectrain.export.found import Found
from spectrain.export.layout import Finding, Reader, Suspect, compare_names
from spectrain.heads.mtp_module import LayerBuilder, LayerKind, MtpModule
from spectrain.heads.mtp_names import LAYOUTS, Layout, Names, swap
from spectrain.heads.mtp_sequential import (
    MtpSequentialConfig,
    MtpSequentialHead,
    MtpSequentialOptions,
)

STEPS = "mtp_steps"  # of a module that is used again and again
COUNTS = ("num_nextn_predict_layers", "num_mtp_layers")
_TYPES = ("F32", "F16", "BF16")
# Keys that no layer is computed by: what is compared elsewhere, and what is of training, of
# tokens, of files.
_IDLE = {
    *COUNTS, STEPS, "mtp_layer_types", "mtp_mlp_layer_types", "rope_parameters", "rope_theta",
    "rope_scaling", "max_position_embeddings", "tie_word_embeddings", "attention_dropout",
    "initializer_range", "use_cache", "bos_token_id", "eos_token_id", "pad_token_id",
    "architectures", "auto_map", "dtype", "torch_dtype", "model_type", "transformers_version",
    "quantization_config",
}  # fmt: skip
_EMBEDDING, _OUTPUT = "model.embed_tokens.weight", "lm_head.weight"


class MtpReader(Reader):
    """A checkpoint whose config is the target's, with MTP layers in one layout."""

    layout: ClassVar[Layout]
    reused: ClassVar[bool] = True  # engines take all steps with the only module

    def recognises(self, found: Found) -> bool:
        layers = found.config.get("num_hidden_layers")
        if type(layers) is not int or "family" in found.config:
            return False
        first = (one for one in LAYOUTS.values() if Names(one, layers, found.shapes).count)
        return next(first, None) is self.layout

    def findings(self, found: Found, target: Target) -> Iterator[Finding]:
        names, config = self._names(found), found.config
        if wrong := list(numbers.findings(config)):
            yield from wrong
            return
        sizes = {
            "num_hidden_layers": target.num_layers,
            "hidden_size": target.hidden_size,
            "vocab_size": target.vocab_size,
        }
        for key, own in sizes.items():
            if config.get(key) != own:
                text = f"{key} is {config.get(key)}, the target's {own}"
                yield Finding("target", "fail", text, "name the target that the layers are for")
                return
        count = names.count
        yield from self._promises(config, count)
        if self.layout.name == "qwen3-next" and count > 1:
            yield Finding(
                "layers", "fail", f"{count} layers behind one mtp.fc are not supported", "keep one"
            )
            return
        try:
            builder = LayerBuilder(LayerKind.of(target.config))
        except SpectrainError as error:
            yield Finding("layers", "fail", error.what, error.fix or "")
            return
        yield from _config(config, builder, target)
        # Shapes alone are wanted.
        with torch.device("meta"):
            modules = [MtpModule(builder, index) for index in range(count)]
        expected = names.shapes(modules)
        mine = set(expected) | set(names.unknown(modules))
        yield from compare_names(found, expected, found.shapes.keys() - mine)
        for name in sorted(expected.keys() & found.dtypes.keys()):
            if found.dtypes[name] not in _TYPES:
                text = f"{name} is stored as {found.dtypes[name]}"
                yield Finding("types", "fail", text, "dequantise the checkpoint first")
        yield from _copies(found, names, count, target)

    def build(self, found: Found, target: Target) -> MtpSequentialHead:
        names, options = self._names(found), MtpSequentialOptions()
        count = names.count
        reused = self.reused and count == 1
        head = MtpSequentialHead(
            MtpSequentialConfig(
                steps=_steps(found.config) if reused else count,
                shared=reused,
                native=None,
                pass_on="after_norm",
                loss=options.loss,
                lambda_first=options.lambda_first,
                lambda_then=options.lambda_then,
                lambda_switch=options.lambda_switch,
                **MtpSequentialHead.sizes(None, target),
            )
        )
        names.fill(head.chain, found.read)
        return head

    def suspects(self, found: Found, target: Target) -> Iterator[Suspect]:
        names = self._names(found)
        projections = [
            names.of(self.layout.own["eh_proj"], index) + ".weight" for index in range(names.count)
        ]
        yield Suspect(
            "the halves of the projection are in the other order",
            "swap the first H columns of each projection with the last H",
            found.edited(tensors={name: swap(found.read(name)) for name in projections}),
        )

    def called(self, found: Found, name: str) -> str:
        return self._names(found).called(name)

    def _names(self, found: Found) -> Names:
        return Names(self.layout, found.config["num_hidden_layers"], found.shapes)

    def _promises(self, config: Any, count: int) -> Iterator[Finding]:
        told = {key: config[key] for key in COUNTS if key in config}
        for key, value in told.items():
            if value != count:
                text = f"the config says {key} = {value}, there are {count}"
                yield Finding("layers", "fail", text, f"set {key} to {count}")
        if not told and self.layout.name != "qwen3-next":
            text = f"the config does not say that there are {count} MTP layers"
            yield Finding("layers", "warn", text, f"engines look for {' or '.join(COUNTS)}")
        if config.get(STEPS, 1) != _steps(config):
            text = f"{STEPS} is {config[STEPS]!r}, which is not 1 to 16"
            yield Finding("layers", "warn", text, f"set {STEPS} to the steps it was trained for")
        yield Finding("layers", "ok", f"{count} MTP layers in the layout {self.layout.name}")
        if count > 1:
            text = "the state after the norm is handed on, as engines do"
            yield Finding("norm", "note", text, "authors who hand it on before mean another head")


def _steps(config: Any) -> int:
    value = config.get(STEPS, 1)
    return value if type(value) is int and 1 <= value <= 16 else 1


def _config(config: Any, builder: LayerBuilder, target: Target) -> Iterator[Finding]:
    """Whether the config makes the target's layers: engines build theirs from it, we from the
    target's own."""
    values = {key: value for key, value in config.items() if key != "model_type"}
    said, turns = values, None
    try:
        own = AutoConfig.for_model(config["model_type"], **values).get_text_config(decoder=True)
        said = json.loads(own.to_json_string(use_diff=False))
        theirs = LayerBuilder(LayerKind.of(own)).rotary()
        like, positions = torch.zeros(1), torch.arange(0, 4096, 97)[None]
        turns = all(
            torch.allclose(left, right, atol=1e-5)
            for left, right in zip(
                theirs(like, positions), builder.rotary()(like, positions), strict=True
            )
        )
    except Exception as error:  # whatever a strange config makes the library raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
        yield Finding("rope", "note", f"not compared: the config cannot be read ({reason})")
    if turns is False:
        text = "positions turn otherwise than the target's"
        yield Finding("rope", "fail", text, "take the target's rope_parameters or rope_theta")
    elif turns:
        yield Finding("rope", "ok", "positions turn as the target's do")
    yield from _keys(said, LayerKind.of(target.config).config)


def _keys(said: Mapping[str, Any], own: Mapping[str, Any]) -> Iterator[Finding]:
    """Keys of the file's config [said] beside those of the target's."""
    keys = [key for key in said if key not in _IDLE and not key.startswith("_")]
    other = [key for key in keys if key in own and said[key] != own[key]]
    for key in other:
        text = f"{key} is {reprlib.repr(said[key])}, the target's {reprlib.repr(own[key])}"
        fix = f"set {key} to the target's, unless the layers are for another target"
        yield Finding("config", "fail", f"{text}: another layer than the target's", fix)
    if more := [key for key in keys if key not in own and said[key] is not None]:
        text = f"keys that the target's config lacks: {', '.join(sorted(more)[:8])}"
        yield Finding("config", "note", text, "see that none of them changes how a layer computes")
    if not other:
        yield Finding("config", "ok", "says of the layers what the target's says")


def _copies(found: Found, names: Names, count: int, target: Target) -> Iterator[Finding]:
    """What repeats the target's embeddings and output layer has to be equal to them."""
    readout = target.readout
    own = {"embedding": readout.embedding.weight, "output": readout.weight}
    copies = [(kind, name) for index in range(count) for kind, name in names.copies(index)]
    model = [("embedding", _EMBEDDING), ("output", _OUTPUT)]
    for group, verdict in ((copies, "fail"), (model, "warn")):
        for kind, name in group:
            if name not in found.shapes:
                continue
            if found.dtypes[name] not in _TYPES:
                yield Finding("embeddings", "note", f"{name} is {found.dtypes[name]}, not compared")
            elif found.shapes[name] != tuple(own[kind].shape) or not torch.equal(
                own[kind].cpu(), found.read(name).to(own[kind].dtype)
            ):
                text = f"{name} is not the target's own {kind}, which the head shares"
                yield Finding("embeddings", verdict, text, "name the target the layers are for")
            else:
                yield Finding("embeddings", "ok", f"{name} is the target's own {kind}")


class DeepseekReader(MtpReader):
    name: ClassVar[str] = "mtp-deepseek"
    layout = LAYOUTS["deepseek"]


class MimoReader(MtpReader):
    name: ClassVar[str] = "mtp-mimo"
    layout = LAYOUTS["mimo"]


class QwenNextReader(MtpReader):
    name: ClassVar[str] = "mtp-qwen3next"
    layout = LAYOUTS["qwen3-next"]


class TransformersReader(MtpReader):
    name: ClassVar[str] = "mtp-transformers"
    layout = LAYOUTS["transformers"]
    reused: ClassVar[bool] = False
