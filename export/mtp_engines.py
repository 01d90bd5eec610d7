"""MTP layers for engines that know the target's architecture: three formats.

What the engines do was read in vLLM 0.33.0 and SGLang 0.5.23. Both run one module only and take
every further step with it, fed with its own output after its norm; vLLM never runs a second module,
SGLang loads none. vLLM blanks the embedding at position 0, where a head reads the second token.

N target layers, K steps.
"""

from __future__ import annotations

from typing import Any, ClassVar

from spectrain.core.errors import SpectrainError
from spectrain.export.layout import Encoded, Launch, Reference, Writer
from spectrain.export.mtp_layouts import (
    STEPS,
    DeepseekReader,
    MimoReader,
    MtpReader,
    QwenNextReader,
)
from spectrain.export.mtp_target import Stock
from spectrain.heads.mtp_names import LAYOUTS, Layout, Names
from spectrain.heads.mtp_sequential import MtpSequentialHead

_VLLM, _SGLANG = "vLLM 0.33.0", "SGLang 0.5.23"


class MtpWriter(Writer):
    """One module beside a target of one architecture."""

    reader: ClassVar[MtpReader]
    architecture: ClassVar[str]  # model_type of the targets whose layers the engine builds
    changes: ClassVar[dict[str, Any]] = {}  # of the target's config

    def refusals(self, head: MtpSequentialHead, reference: Reference) -> list[str]:
        kind = head.config.layer.model_type
        if kind != self.architecture:
            return [
                f"the engines build a layer of {self.architecture} for this format, the head's "
                f"layers are of {kind}"
            ]
        found = shared_refusals(head, reference)
        found = found or _layer_refusals(head, Stock.of(reference.target.name))
        if len(head.chain) > 1:
            found.append(
                f"the head has {len(head.chain)} modules, each for a step of its own: vLLM runs "
                "the first one at every step, SGLang loads one only; train it with --set "
                "head.shared=true (one module for all steps), or with --set head.steps=1"
            )
        found += norm_refusals(head)
        return found

    def encode(self, head: MtpSequentialHead, reference: Reference) -> Encoded:
        stock = Stock.of(reference.target.name)
        changes: dict[str, Any] = {"num_nextn_predict_layers": 1, **self.changes}
        if head.config.steps > 1:
            changes[STEPS] = head.config.steps
        tensors = names_for(self.reader.layout, head, stock).tensors(head.chain)
        return stock.with_layers(tensors, changes)

    def launch(self, head: MtpSequentialHead, reference: Reference) -> list[Launch]:
        return [_vllm(head.config.steps), _sglang(head.config.steps)]


class DeepseekWriter(MtpWriter):
    reader: ClassVar[MtpReader] = DeepseekReader()
    architecture: ClassVar[str] = "deepseek_v3"
    facts = (("vllm", "DeepSeekMTPModel"), ("sglang", "DeepseekV3ForCausalLMNextN"))


class MimoWriter(MtpWriter):
    """A MiMo is a Qwen2 with MTP layers. Engines choose by the first architecture in the config,
    transformers by its model_type, which stays."""

    reader: ClassVar[MtpReader] = MimoReader()
    architecture: ClassVar[str] = "qwen2"
    changes: ClassVar[dict[str, Any]] = {"architectures": ["MiMoForCausalLM"]}
    facts = (("sglang", "MiMoMTP"),)

    def launch(self, head: MtpSequentialHead, reference: Reference) -> list[Launch]:
        note = (
            "not for vLLM 0.33.0, which hands MiMo's module the state before the target's final "
            "norm; this head reads the state behind it. SGLang's module reads zeros in the place "
            "of the first embedding, which is small"
        )
        return [_sglang(head.config.steps, note)]


class QwenNextWriter(MtpWriter):
    reader: ClassVar[MtpReader] = QwenNextReader()
    architecture: ClassVar[str] = "qwen3_next"
    facts = (("vllm", "Qwen3NextMTP"), ("sglang", "Qwen3NextForCausalLMMTP"))


def shared_refusals(head: MtpSequentialHead, reference: Reference) -> list[str]:
    """What no MTP format can say, and targets that nothing can be put beside."""
    found, config = [], head.config
    usable = head.readout.usable
    if config.draft_vocab_size < usable:
        found.append(
            f"the head guesses {config.draft_vocab_size} of {usable} tokens: MTP layers guess with "
            "the target's whole output layer; train it without head.draft_vocab_size"
        )
    try:
        stock = Stock.of(reference.target.name)
    except SpectrainError as error:
        return [*found, f"the target's checkpoint cannot be extended: {error.what}"]
    if own := stock.own_layers():
        found.append(
            f"the target's checkpoint has {own} MTP layers already, and names may not be there "
            "twice: put the head in their place (put_back, for one made with native)"
        )
    if stock.config["num_hidden_layers"] != config.target.num_layers:
        found.append(
            f"the target has {stock.config['num_hidden_layers']} layers, the head was trained for "
            f"one with {config.target.num_layers}"
        )
    if "quantization_config" in stock.config:
        found.append("the target's checkpoint is quantised, and says so of every layer behind it")
    return found


def norm_refusals(head: MtpSequentialHead) -> list[str]:
    """Only after the norm, where there is a further step to hand a state to."""
    if head.config.steps == 1 or head.config.pass_on == "after_norm":
        return []
    return [
        "the head hands on its state before the norm, engines do so behind it: train it with "
        "--set head.pass_on=after_norm"
    ]


def names_for(layout: Layout, head: MtpSequentialHead, stock: Stock) -> Names:
    """Names of the layout, experts as the target's own layer has them."""
    count, own = stock.config["num_hidden_layers"], stock.layer(head.config.layer.source)
    plain = Names(layout, count, ())
    starts = [plain.of(layout.layer, index) for index in range(len(head.chain))]
    return Names(layout, count, {start + rest for start in starts for rest in own})


def _layer_refusals(head: MtpSequentialHead, stock: Stock) -> list[str]:
    """Engines read a module's layer as one of the target's: it has to have the same tensors."""
    source, module = head.config.layer.source, head.chain[0]
    own, values = stock.layer(source), module.state_dict()
    names = names_for(LAYOUTS["transformers"], head, stock)
    start = names.of(names.layout.layer, 0)
    mine = {
        piece.theirs.removeprefix(start): tuple(values[piece.ours][piece.part].shape)
        for piece in names.pieces(module, 0)
        if piece.ours.startswith("layer.")
    }
    if mine == own:
        return []
    other = sorted(name for name in mine.keys() | own.keys() if mine.get(name) != own.get(name))
    return [
        f"the target's checkpoint has other tensors in layer {source} than the head's layer "
        f"({', '.join(other[:3])}{' …' if len(other) > 3 else ''}): its names are not those of "
        "transformers"
    ]


def _vllm(steps: int) -> Launch:
    return Launch(
        _VLLM,
        "vllm serve {folder} --speculative-config "
        f"""'{{"method": "mtp", "num_speculative_tokens": {steps}}}'""",
    )


def _sglang(steps: int, note: str = "") -> Launch:
    return Launch(
        _SGLANG,
        "python -m sglang.launch_server --model-path {folder} --speculative-algorithm NEXTN "
        f"--speculative-draft-model-path {{folder}} --speculative-num-steps {steps} "
        f"--speculative-eagle-topk 1 --speculative-num-draft-tokens {steps + 1}",
        note=note,
    )
