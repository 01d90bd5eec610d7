"""Sequential multi-token prediction (DeepSeek-V3, arXiv 2412.19437): modules that keep the chain.

Row t of module k::

    embeds x[t+1+k]    hidden: what module k−1 said at row t; f[t] at k = 0
    sees rows ≤ t of its own module                        guesses x[t+2+k]

f is the target's state after its final norm, and what a module hands on is its output after its
own norm, as engines do, or before it (`pass_on`). With `shared` one module takes all steps
(mtp_recurrence.py); otherwise there are K of them (mtp_chain.py). Embedding and output layer are
the target's.

B batch, n rows, m nodes, K steps, H hidden, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, Field
from torch import Tensor, nn

from spectrain.core.batch import Batch, Features
from spectrain.core.cache import KVCache
from spectrain.core.errors import SpectrainError
from spectrain.heads import mtp_chain, mtp_recurrence, vocab
from spectrain.heads.base import Unrolled
from spectrain.heads.mtp_chain import ChainState, Modules
from spectrain.heads.mtp_module import (
    LayerBuilder,
    MtpModule,
    check_layer,
    start_from_target,
)
from spectrain.heads.mtp_native import Native, put_back
from spectrain.heads.mtp_recurrence import RecurrentState
from spectrain.heads.mtp_shared import MtpConfig, MtpHead, MtpOptions
from spectrain.heads.work import NORM, Product, Shape, Work, decoder_layer, masked

# A module that feeds itself goes on beyond the steps it learnt; guesses get worse and worse.
LONGEST_DRAFT = 16


class MtpSequentialOptions(MtpOptions):
    """What a user may choose when a head is made."""

    shared: bool = Field(
        False, description="one module takes all steps, fed with its own output, instead of K"
    )
    pass_on: Literal["before_norm", "after_norm"] = Field(
        "after_norm",
        description="which state the next step reads: that before a module's own norm, or after it "
        "(what engines and transformers do)",
    )
    native: bool = Field(
        False, description="start from the checkpoint's own MTP layers (as many as it has)"
    )
    lambda_first: float = Field(0.3, ge=0, description="weight λ at first: each step counts λ/K")
    lambda_then: float = Field(0.1, ge=0, description="weight λ afterwards")
    lambda_switch: float = Field(
        0.67, ge=0, le=1, description="share of the training after which λ changes"
    )


class MtpSequentialConfig(MtpConfig):
    """The head's config.json."""

    family: Literal["mtp-sequential"] = "mtp-sequential"
    shared: bool
    native: str | None
    pass_on: Literal["before_norm", "after_norm"]
    lambda_first: float
    lambda_then: float
    lambda_switch: float


class MtpSequentialHead(MtpHead):
    """K modules, or one that is used K times."""

    family: ClassVar[str] = "mtp-sequential"
    Config: ClassVar[type[MtpSequentialConfig]] = MtpSequentialConfig
    Options: ClassVar[type[BaseModel]] = MtpSequentialOptions
    config: MtpSequentialConfig

    def __init__(self, config: MtpSequentialConfig) -> None:
        super().__init__(config)
        builder = LayerBuilder(config.layer)
        count = 1 if config.shared else config.steps
        self.chain = nn.ModuleList(MtpModule(builder, index) for index in range(count))
        self._parts = Modules(self.chain, builder.rotary(), config.pass_on == "after_norm")
        self._layer_config = builder.config
        self._face = mtp_recurrence if config.shared else mtp_chain

    # ── making one ───────────────────────────────────────────────────────────

    @classmethod
    def create(
        cls, options: MtpSequentialOptions, target: Any, token_counts: Tensor
    ) -> MtpSequentialHead:
        config = cls.configure(options, target)
        kind = config.layer
        ids = vocab.choose(config.draft_vocab_size, target, token_counts)
        check_layer(LayerBuilder(kind), target)
        head = cls(config)
        head.use_vocabulary(ids)
        if options.native:
            Native.of(target).load(head.chain, target.readout)
        elif options.init == "target":
            for index, module in enumerate(head.chain):
                normed = index == 0 or config.pass_on == "after_norm"
                parts = module.layer, module.norm, module.hnorm
                start_from_target(*parts, kind, target, normed=normed)
        head.to(target.device).bind(target.readout)
        return head

    @classmethod
    def configure(cls, options: MtpSequentialOptions, target: Any) -> MtpSequentialConfig:
        native = Native.of(target) if options.native else None
        steps, shared = _steps(options, native)
        return MtpSequentialConfig(
            steps=steps,
            shared=shared,
            native=native.layout.name if native else None,
            pass_on=options.pass_on,
            loss=options.loss,
            lambda_first=options.lambda_first,
            lambda_then=options.lambda_then,
            lambda_switch=options.lambda_switch,
            **cls.sizes(options.draft_vocab_size, target),
        )

    def starts(self, **own: Any) -> list[BaseModel]:
        return super().starts(native=False, **own)

    @property
    def native(self) -> bool:
        return self.config.native is not None

    def put_back(self, checkpoint: Path, out: Path) -> None:
        put_back(self, Path(checkpoint), out)

    @property
    def longest_draft(self) -> int:
        return LONGEST_DRAFT if self.config.shared else self.config.steps

    def norm_of(self, step: int) -> nn.Module:
        return self.chain[0 if self.config.shared else step].norm

    # ── training face ────────────────────────────────────────────────────────

    def unroll(self, batch: Batch, steps: int) -> Iterator[Unrolled]:
        return self._face.unroll(self._parts, self.readout, batch, steps)

    def work(self, shape: Shape) -> Work:
        """Modules of a chain read every row. One that feeds itself reads all rows at step 0, and
        then the anchors, which look at all rows of step 0 and all anchors of later steps."""
        config, result = self.config, self.loss_work(shape)
        hidden, most = config.target.hidden_size, shape.most_anchors
        for step in range(config.steps):
            rows, pairs, keys = shape.tokens, shape.pairs, shape.length
            if config.shared:
                keys += step * most
                rows = shape.rows * most if step else rows
                pairs = rows * keys  # by a mask, which is made for all of them
                result += masked(pairs, self._layer_config)
            module = self.chain[0 if config.shared else step]
            result += decoder_layer(module.layer, self._layer_config, rows, pairs, keys) + Work(
                (Product("eh_proj", rows, 2 * hidden, hidden),),
                numbers=rows * hidden * (2 * NORM - 10),
                kept=rows * hidden * 5,
            )
        return result

    def weights(self, progress: float) -> list[float]:
        config = self.config
        first = progress < config.lambda_switch
        weight = config.lambda_first if first else config.lambda_then
        return [weight / config.steps] * config.steps

    # ── drafting face ────────────────────────────────────────────────────────

    def start(self, rows: int, slots: int) -> ChainState | RecurrentState:
        like = self.norm_of(0).weight
        cache = KVCache(rows, slots, like.device)
        if self.config.shared:
            return RecurrentState(cache, slots)
        return ChainState(cache, slots, like.new_zeros(len(self.chain), rows, 1, len(like)))

    def adopt(self, state: Any, rows: Tensor, other: Any, chosen: Tensor | None = None) -> None:
        super().adopt(state, rows, other, chosen)
        if not self.config.shared:
            state.ends[:, rows] = other.ends if chosen is None else other.ends[:, chosen]

    def extend(
        self, state: Any, tokens: Tensor, features: Features, counts: Tensor, view: int = 0
    ) -> Tensor:
        hidden = self._face.extend(self._parts, self.readout, state, tokens, features, counts, view)
        return self.logits(hidden, 0)

    def expand(self, state: Any, tokens: Tensor, parents: Tensor) -> Tensor:
        hidden = self._face.expand(self._parts, self.readout, state, tokens, parents)
        return self.logits(hidden, state.level)


def _steps(options: MtpSequentialOptions, native: Native | None) -> tuple[int, bool]:
    """Steps, and whether one module takes them all. A checkpoint's only layer is used again and
    again when more steps are asked for than there are layers, as engines do."""
    if native is None:
        return options.steps, options.shared
    count = native.count
    steps = options.steps if "steps" in options.model_fields_set else count
    if count > 1 and (steps > count or options.shared):
        raise SpectrainError(
            f"the checkpoint has {count} MTP layers, each for a step of its own",
            where="head.native",
            fix=f"set head.steps to at most {count} and leave out head.shared",
        )
    return steps, options.shared or steps > count
