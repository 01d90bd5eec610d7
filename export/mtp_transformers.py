"""MTP layers for transformers' own `MtpModel`: generate(use_mtp=True), since transformers 5.20.

MtpModel runs K modules, one for each step, and hands on the state after the module's norm. It makes
them of the target's decoder layer and norm, and finds their tensors by patterns that the target's
class has under `_keys_to_ignore_on_load_unexpected`. A class without such a pattern is given one
before it loads the model: a line of Python, which goes with the export.

N target layers, K modules.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import transformers
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM

from spectrain.export.layout import Encoded, Launch, Reference, Writer
from spectrain.export.mtp_engines import names_for, norm_refusals, shared_refusals
from spectrain.export.mtp_layouts import MtpReader, TransformersReader
from spectrain.export.mtp_target import Stock
from spectrain.heads.mtp_sequential import MtpSequentialHead

try:
    from transformers.modeling_layers import MtpModel
except ImportError:  # before 5.20
    MtpModel = None

COUNT = "num_mtp_layers"
PATTERN = r"^mtp\."
_PARTS = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "norm": "post_norm"}


class TransformersWriter(Writer):
    """K modules beside any target that MtpModel can be made for."""

    reader: ClassVar[MtpReader] = TransformersReader()

    def refusals(self, head: MtpSequentialHead, reference: Reference) -> list[str]:
        if MtpModel is None:
            return [
                f"transformers {transformers.__version__} has no MtpModel to check the layers "
                "against: install 5.20 or newer"
            ]
        found = shared_refusals(head, reference)
        if head.config.shared and head.config.steps > 1:
            found.append(
                f"the head's only module takes all {head.config.steps} steps: transformers takes "
                "one step with each module; train it with --set head.shared=false, or with --set "
                "head.steps=1"
            )
        found += norm_refusals(head)
        return found or _model_refusals(head, Stock.of(reference.target.name))

    def encode(self, head: MtpSequentialHead, reference: Reference) -> Encoded:
        stock = Stock.of(reference.target.name)
        tensors = names_for(self.reader.layout, head, stock).tensors(head.chain)
        return stock.with_layers(tensors, *_changes(head, stock))

    def launch(self, head: MtpSequentialHead, reference: Reference) -> list[Launch]:
        kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(_config(Stock.of(reference.target.name).config))]
        steps, model, known = len(head.chain), kind.__name__, _looks_for_layers(kind)
        more = "" if known else f", {model}"
        lines = [f"from transformers import AutoModelForCausalLM, AutoTokenizer{more}", ""]
        if not known:
            lines += [f'{model}._keys_to_ignore_on_load_unexpected = [r"{PATTERN}"]']
        lines += [
            'tokenizer = AutoTokenizer.from_pretrained("{folder}")',
            'model = AutoModelForCausalLM.from_pretrained("{folder}")',
            'text = "Here is a recipe for a soup that warms you on a cold evening:"',
            'inputs = tokenizer(text, return_tensors="pt")',
            "tokens = model.generate(**inputs, use_mtp=True, do_sample=False, max_new_tokens=64)",
            "print(tokenizer.decode(tokens[0]))",
        ]
        note = (
            f"one prompt at a time, of more than {steps} tokens (shorter ones raise in "
            f"transformers 5.24), {steps} drafted tokens a step"
        )
        if not known:
            note += f"; without the line about {model} no MTP layers are found"
        made = [Launch("transformers 5.20", "\n".join(lines), "python", note)]
        if known and steps == 1:
            made.append(
                Launch(
                    "vLLM 0.33.0",
                    "vllm serve {folder} --model-impl transformers --speculative-config "
                    """'{"method": "mtp", "num_speculative_tokens": 1}'""",
                )
            )
        return made


def _changes(head: MtpSequentialHead, stock: Stock) -> tuple[dict[str, Any], str]:
    """Keys that the config gets, and one that it loses."""
    config = _config(stock.config)
    count, source = len(head.chain), head.config.layer.source
    # Some classes keep the number under the older name; both at once would be ambiguous.
    spelled = config.attribute_map.get(COUNT, COUNT)
    changes: dict[str, Any] = {spelled: count}
    for key in ("layer_types", "mlp_layer_types"):
        if types := getattr(config, key, None):
            changes[f"mtp_{key}"] = [types[source]] * count
    return changes, COUNT if spelled != COUNT else ""


def _looks_for_layers(kind: type) -> bool:
    patterns = kind._keys_to_ignore_on_load_unexpected or ()
    return any(re.search(pattern, "mtp.layers.0.enorm.weight") for pattern in patterns)


def _config(values: Mapping[str, Any]) -> Any:
    values = copy.deepcopy(dict(values))
    return AutoConfig.for_model(values.pop("model_type"), **values)


def _model_refusals(head: MtpSequentialHead, stock: Stock) -> list[str]:
    """MtpModel is made, without weights, and compared with the head's modules."""
    config = _config(stock.config)
    if getattr(config, "sliding_window", None) and not getattr(config, "layer_types", None):
        return [
            f"the head's layers look at a window of {config.sliding_window} tokens, MtpModel's at "
            "everything where the config has no layer_types"
        ]
    changes, gone = _changes(head, stock)
    values = {key: value for key, value in stock.config.items() if key != gone}
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                _config({**values, **changes}), trust_remote_code=False
            )
            theirs = MtpModel(model, len(head.chain))
    except (ValueError, KeyError, TypeError, AttributeError, StopIteration) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
        return [f"MtpModel cannot be made for this target ({reason})"]
    expected = {
        name: (tuple(value.shape), type(_owner(theirs, name)))
        for name, value in theirs.state_dict().items()
        if not name.startswith(("embed_tokens.", "shared_head."))
    }
    mine = {}
    for index, module in enumerate(head.chain):
        for name, value in module.state_dict().items():
            owner, _, rest = name.partition(".")
            place = f"layers.{index}.{_PARTS.get(owner, 'mtp_block')}.{rest}"
            mine[place] = tuple(value.shape), type(_owner(module, name))
    names = mine.keys() | expected.keys()
    other = sorted(name for name in names if not _alike(mine.get(name), expected.get(name)))
    if not other:
        return []
    return [
        f"MtpModel has other parts for this target than the head ({', '.join(other[:3])}"
        f"{' …' if len(other) > 3 else ''})"
    ]


def _owner(module: nn.Module, name: str) -> nn.Module:
    return module.get_submodule(name.rpartition(".")[0])


def _alike(mine: tuple | None, theirs: tuple | None) -> bool:
    """(shape, class of the module) of both; our linear layers are torch's, only faster."""
    if mine is None or theirs is None:
        return False
    return mine[0] == theirs[0] and issubclass(mine[1], theirs[1])
