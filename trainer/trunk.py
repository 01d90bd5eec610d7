"""Training a head together with its target, the trunk (Medusa-2; MTP modules with their model).

L = L_trunk + λ · L_heads. The target reads the batch with gradients, the head works on these live
features, and what it is scored by (argmax, soft teachers) is what the live target says, detached:
that one will verify its drafts. L_trunk is one more term of the objective, the first one::

    distil   KL(original target ‖ trunk): the original is the store's last states under its lm_head
    text     −log of the trunk's probability for the reply's next token

Both on the rows whose next token lies in a reply. The trunk may join late: until then its tensors
ask for no gradient (trainer/optim.py) and the heads learn alone.

B batch, T length, P predicting rows, H hidden, V vocabulary, K terms of the head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM

from spectrain.core import adapter, attention
from spectrain.core.batch import Batch, predicting
from spectrain.core.files import atomic_folder, give_normal_mode
from spectrain.core.fingerprint import fingerprint_of
from spectrain.core.target import Target
from spectrain.heads.base import DraftHead, HeadConfig, Needs, Objective, TargetFacts
from spectrain.heads.scoring import next_tokens
from spectrain.heads.work import Product, Shape, Work, decoder
from spectrain.trainer import sharding
from spectrain.trainer.settings import TrunkSettings

TARGET = "target"  # folders of the result, beside the head's
ADAPTER = "adapter"
_LOGITS = 1 << 24  # float32 logits that exist at a time: 64 MiB of each kind
# Numbers that the trunk's loss reads and writes for each logit, tests/trainer/test_trunk_work.py.
LOGITS_DISTIL, LOGITS_TEXT = 40, 20


def from_scratch(target: Target) -> Target:
    """A new model of the target's shape with random weights, and the target's tokenizer."""
    config = target.model.config
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation=attention.NAME, trust_remote_code=False
    )
    model.generation_config = target.model.generation_config
    return Target(model.float().to(target.device), target.tokenizer, f"{target.name} from scratch")


class JointHead(nn.Module):
    """A head and its trunk, for the training loop and for checkpoints what a head alone is.

    Its state is the head's and the trunk's trained tensors, each once (tied ones share a name).
    """

    def __init__(self, head: DraftHead, target: Target, settings: TrunkSettings) -> None:
        super().__init__()
        self.settings = settings
        self.loss = settings.loss or ("text" if settings.mode == "scratch" else "distil")
        self._target = target
        output = target.readout
        self._original = (output.weight, output.bias)  # before anything trains it
        if settings.mode == "lora":
            options = settings.rank, settings.alpha, settings.targets
            # In a tuple: its modules are the trunk's, they must not be listed twice.
            self._adapted = (adapter.add(target.model, target.decoder, *options),)
        else:
            if self.loss == "distil":
                self._original = tuple(_frozen_copy(part) for part in self._original)
            target.model.requires_grad_(True)
        self.head, self.trunk = head, target.model
        self._trained = [
            name
            for name, value in self.trunk.named_parameters(prefix="trunk")
            if value.requires_grad
        ]

    # ── what the loop asks of a head ─────────────────────────────────────────

    @property
    def config(self) -> HeadConfig:
        return self.head.config

    @property
    def needs(self) -> Needs:
        """Nothing from the store but the teacher rows: features are made anew."""
        return Needs()

    def counts(self, batch: Batch) -> Tensor:
        """[1 + K]. Where a head leaves out rows by the target's argmax, they are counted by the
        argmax in the store: the live one is not known before the forward."""
        return torch.cat([predicting(batch.reply).sum()[None], self.head.counts(batch)])

    def work(self, shape: Shape) -> Work:
        """The trunk's and the head's, which reads live features. The trunk's logits are made twice
        (`_rows_loss`), and so are the original's where it stays close to these."""
        target, rows = self._target, shape.predicting
        size, hidden = target.vocab_size, target.hidden_size
        learns = target.readout.weight.requires_grad
        loss = (Product("trunk's loss", rows, hidden, size, 3 + learns, _calls(rows, size)),)
        if self.loss == "distil":
            loss += (Product("trunk's loss", rows, hidden, size, 2, _calls(rows, size)),)
        own = Work(
            loss,
            streamed=(LOGITS_DISTIL if self.loss == "distil" else LOGITS_TEXT) * rows * size,
            kept=3 * rows * hidden,
            moment=min(rows * size, _LOGITS) * (5 if self.loss == "distil" else 3.5),
        )
        trunk = decoder(target.decoder, shape, "trunk") + self._adapters_work(shape)
        return trunk + own + self.head.work(replace(shape, live=True))

    def _adapters_work(self, shape: Shape) -> Work:
        """What LoRA matrices add beside their products: a scale and a sum for each layer."""
        sizes = [
            3 * layer.in_features if "lora_A" in name else 9 * layer.out_features
            for name, layer in self._target.decoder.named_modules()
            if isinstance(layer, nn.Linear) and "lora_" in name
        ]
        return Work(numbers=shape.tokens * sum(sizes))

    def resting_work(self, shape: Shape) -> Work:
        """The same while the trunk rests: it is read without a gradient."""
        trunk = decoder(self._target.decoder, shape, "trunk").forward_alone()
        rows, size = shape.predicting, self._target.vocab_size
        loss = Product("trunk's loss", rows, self._target.hidden_size, size, 2, _calls(rows, size))
        own = Work((loss,), streamed=10 * rows * size, moment=min(rows * size, _LOGITS) * 4)
        return trunk + own + self.head.work(shape)

    def weights(self, progress: float) -> list[float]:
        """1 for the trunk, then the head's weights times λ(progress)."""
        settings, weight = self.settings, self.settings.heads_weight
        if weight is None:
            weight = getattr(self.head, "joint_weight", 1.0)
        since = progress - settings.first
        if settings.ramp and since >= 0:
            weight *= min(1.0, since / settings.ramp)
        return [1.0, *(weight * own for own in self.head.weights(progress))]

    def objective(self, batch: Batch) -> Objective:
        return self.forward(batch)

    def forward(self, batch: Batch, scale: Tensor | None = None) -> Objective:
        """The trunk's term and the head's; `last` and `argmax` of the batch are the store's."""
        features = self._target.forward(
            batch.tokens, aux_layers=self.head.needs.aux_layers, starts=batch.starts
        )
        loss, argmax = self._trunk_loss(batch, features.last)
        live = replace(
            batch, aux=features.aux, last=features.last, argmax=argmax, stored=batch.argmax
        )
        # Anew every time: what a head keeps of its target's readout is out of date by now.
        heads = self.head.bind(self._target.readout)(live, None if scale is None else scale[1:])
        zero = torch.zeros_like(heads.seen[:1])  # the trunk drafts nothing
        return Objective(
            loss=torch.cat([loss[None], heads.loss]),
            count=torch.cat([predicting(batch.reply).sum()[None], heads.count]),
            hits=torch.cat([zero, heads.hits]),
            seen=torch.cat([zero, heads.seen]),
            total=None if scale is None else scale[0] * loss + heads.total,
        )

    def train(self, mode: bool = True) -> JointHead:
        """The trunk stays as it will be used: no dropout."""
        super().train(mode)
        self.trunk.eval()
        return self

    # ── the trunk's own loss ─────────────────────────────────────────────────

    def _trunk_loss(self, batch: Batch, last: Tensor) -> tuple[Tensor, Tensor]:
        """Σ over predicting rows, float32, and the live argmax [B, T], −1 on all other rows."""
        rows = predicting(batch.reply).flatten().nonzero().squeeze(1)  # [P]
        states = last.flatten(0, 1)[rows]
        if self.loss == "text":
            goals = next_tokens(batch).flatten()[rows]
        else:
            goals = batch.last.flatten(0, 1)[rows]
        argmax = torch.full_like(batch.tokens, -1)
        loss = (states[:1] * 0).sum().float()
        size = max(1, _LOGITS // self._target.vocab_size)
        parts = zip(rows.split(size), states.split(size), goals.split(size), strict=True)
        for where, part, goal in parts if len(rows) else ():
            # The logits of a part are made once more in the backward pass.
            own, choice = checkpoint(self._rows_loss, part, goal, use_reentrant=False)
            loss = loss + own
            argmax.view(-1)[where] = choice
        return loss, argmax

    def _rows_loss(self, states: Tensor, goals: Tensor) -> tuple[Tensor, Tensor]:
        """states [p, H]; goals [p] token ids or [p, H] the original's states."""
        logits = self._target.logits(states).float()
        choice = logits.detach().argmax(-1)
        if self.loss == "text":
            return F.cross_entropy(logits, goals, reduction="sum"), choice
        with torch.no_grad():
            weight, bias = self._original
            original = F.linear(goals.to(weight.dtype), weight, bias)
            original = self._target.readout.cap(original).float().log_softmax(-1)
        own = logits.log_softmax(-1)
        return F.kl_div(own, original, reduction="sum", log_target=True), choice

    # ── saving ───────────────────────────────────────────────────────────────

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        own = dict(self.trunk.named_parameters(prefix="trunk"))
        state = {f"head.{name}": value for name, value in self.head.state_dict().items()}
        return state | {name: own[name].detach() for name in self._trained}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Tensor], *args: Any, **kwargs: Any) -> None:
        of_head = {n.removeprefix("head."): v for n, v in state_dict.items() if n[:5] == "head."}
        self.head.load_state_dict(of_head, strict=True)
        own = dict(self.trunk.named_parameters(prefix="trunk"))
        for name in self._trained:
            sharding.put(own[name], state_dict[name])

    def check_vocabulary(self, where: str) -> None:
        self.head.check_vocabulary(where)

    def everything(self) -> nn.Module:
        """For trainer/changes.py: this with its frozen tensors, so that they are watched too."""
        return _Everything(self)

    def save_trunk(self, out: Path, base: str, main: bool = True) -> Path:
        """Write the trained target under `out`, as a model that `--target` takes, or (LoRA) as an
        adapter of `base`; from then on the head belongs to it.

        main: whether this process writes; the others give their pieces."""
        target = self._target
        folder = out / (ADAPTER if self.settings.mode == "lora" else TARGET)
        state = {} if self.settings.mode == "lora" else sharding.joined(self.trunk, main)
        if not main:
            return folder
        with atomic_folder(folder) as temporary:
            target.tokenizer.save_pretrained(temporary)
            if self.settings.mode == "lora":
                adapter.save(*self._adapted, temporary, base)
            else:
                self.trunk.save_pretrained(temporary, state_dict=dict(state))  # it drops tied ones
                for file in temporary.glob("*.safetensors"):
                    give_normal_mode(file)
        if self.settings.mode == "lora":
            target.fingerprint = adapter.fingerprint(target.fingerprint, folder)
        else:
            target.fingerprint = fingerprint_of(self.trunk, target.tokenizer, state)
        target.name = str(folder)
        self.head.config = self.head.config.model_copy(update={"target": TargetFacts.of(target)})
        return folder


class _Everything(nn.Module):
    """All tensors of a joint head, each once."""

    def __init__(self, joint: JointHead) -> None:
        super().__init__()
        self.head, self.trunk = joint.head, joint.trunk

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        return {**dict(self.named_parameters()), **dict(self.named_buffers())}


def _calls(rows: int, size: int) -> int:
    """Pieces in which the trunk's loss takes its rows."""
    return max(1, -(-rows // max(1, _LOGITS // size)))


def _frozen_copy(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.detach().clone()
