"""The target model behind one adapter: a stock `transformers` model, checked when it is loaded.

B batch, n tokens, H hidden size, A = 3·H, V rows of lm_head.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.utils.logging import disable_progress_bar

from spectrain.core import attention, models
from spectrain.core.batch import Features, positions_of
from spectrain.core.cache import KVCache, visible_slots
from spectrain.core.errors import SpectrainError
from spectrain.core.fingerprint import fingerprint_of
from spectrain.core.packing import pack
from spectrain.core.pretrained import pretrained, stop_ids_of
from spectrain.core.quantise import quantise, require
from spectrain.core.readout import Readout

# Two float32 routes through the same model may differ by this much of the largest logit.
_CHECK_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 6e-2}


class Target:
    """A causal language model: features, logits and a cache, the same for every architecture."""

    def __init__(
        self, model: nn.Module, tokenizer, name: str, fingerprint: str | None = None
    ) -> None:
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.name = name
        self.quantisation: str | None = None  # how the weights are kept: as loaded, or a kind
        self.config = model.config.get_text_config(decoder=True)
        self.decoder = model.get_decoder()
        if not hasattr(self.decoder, "layers"):
            raise SpectrainError(
                f"the architecture {type(model).__name__} is not supported: its decoder does not "
                "name its layers as Llama's family does",
                where=name,
                fix="use a model of the families in the README",
            )
        self.num_layers = len(self.decoder.layers)
        self.hidden_size = self.config.hidden_size
        self.device, self.dtype = model.device, model.dtype
        self.readout = Readout.of(model, self.config, tokenizer)
        self.vocab_size = self.readout.vocab_size
        self.readable = len(self.readout.embedding.weight)  # ids that may stand in a prompt
        self.max_length = int(self.config.max_position_embeddings)
        # Drafts may reach beyond a table of learned positions; they are read and never accepted.
        table = self.decoder.get_input_embeddings()
        modules = self.decoder.modules()
        learned = any(isinstance(m, nn.Embedding) and m is not table for m in modules)
        self._last_position = self.max_length - 1 if learned else None
        self.stop_ids = stop_ids_of(model.generation_config, tokenizer)
        self.fingerprint = fingerprint or fingerprint_of(model, tokenizer)

    @classmethod
    def load(
        cls,
        name: str,
        *,
        dtype: str = "auto",
        device: str = "auto",
        pack_weights: bool = True,
        quantize: str | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
    ) -> Target:
        """Load `name` (the embedded default, a folder or a hub id) and check it. The folder of a
        LoRA adapter stands for its base model with the adapter merged in.

        dtype "auto": the checkpoint's own on a GPU, float32 on a CPU. pack_weights lays the linear
        layers out for the CPU kernels (inference only). quantize "int8" or "int4" keeps them so
        (inference only): what the target says is then that of the rounded weights, heads of the
        unrounded one fit it. Raises SpectrainError when the model cannot be had or does not behave
        as this adapter assumes.
        """
        wanted, device = placed(dtype, device)
        if quantize is not None:
            require(quantize, device, wanted)
        source = models.resolve(name)
        disable_progress_bar()  # the library's own; loading takes seconds
        with models.load_errors(name):
            model, tokenizer, fingerprint = pretrained(
                source, name, wanted, device, revision, trust_remote_code
            )
        target = cls(model, tokenizer, name, fingerprint)
        target.check()
        if quantize is not None:
            target.quantise(quantize)
        if pack_weights and device == "cpu":
            pack(target.decoder)
            target.readout.pack()
        return target

    def quantise(self, kind: str) -> None:
        """Round the weights of the decoder's linear layers and of lm_head; the fingerprint stays
        that of the weights before. Raises SpectrainError when nothing can be."""
        if not quantise(self.decoder, kind):
            raise SpectrainError(
                f"no linear layer of the target can be kept as {kind}",
                where=f"target {self.name} ({type(self.model).__name__})",
                fix="leave out the quantisation",
            )
        self.readout.quantise()
        self.quantisation = kind

    # ── features and logits ──────────────────────────────────────────────────

    def forward(
        self,
        tokens: Tensor,
        *,
        aux_layers: tuple[int, ...] = (),
        cache: KVCache | None = None,
        view: int | None = None,
        depths: Tensor | None = None,
        ancestors: Tensor | None = None,
        starts: Tensor | None = None,
    ) -> Features:
        """Read tokens [B, n] and return what the target says at each.

        Without a cache: right-padded rows from position 0; `starts` [B, n] where a row has several
        documents (see Batch), each is then read as if it were alone. With one: the tokens are
        written behind the committed prefix of each row (commit them with `cache.commit`). `view`
        bounds the slots that are looked at (≥ longest prefix + n). A tree gives `depths` [n] or
        [B, n] (0 for the first level) and `ancestors` [n, n] or [B, n, n]; without them the tokens
        are a chain.
        aux_layers: 0-based decoder layers whose outputs are returned side by side.
        """
        batch, count = tokens.shape
        if cache is None:
            plan = attention.Plan(positions_of(tokens, starts), starts=starts)
        else:
            assert starts is None, "a cache holds one document a row"
            start = cache.lengths[:, None]
            offset = torch.arange(count, device=tokens.device).expand(batch, count)
            positions = start + (offset if depths is None else depths)
            view = view or cache.slots
            cache.reserve(view)
            visible = visible_slots(cache.lengths, count, view, ancestors)
            plan = attention.Plan(positions, cache, start + offset, visible)
            cache.place(plan.slots, positions)
        kept: dict[int, Tensor] = {}
        hooks = [
            self.decoder.layers[layer].register_forward_hook(_keep(kept, layer))
            for layer in set(aux_layers)
        ]
        try:
            last = self.decoder(
                input_ids=tokens,
                position_ids=self._within_table(plan.positions),
                # Four-dimensional, so that the library takes it as it is and builds no mask.
                attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=tokens.device),
                use_cache=False,
                plan=plan,
            ).last_hidden_state
        finally:
            for hook in hooks:
                hook.remove()
        aux = torch.cat([kept[layer] for layer in aux_layers], dim=-1) if aux_layers else None
        return Features(last, aux)

    def _within_table(self, positions: Tensor) -> Tensor:
        if self._last_position is None:
            return positions
        return positions.clamp(max=self._last_position)

    def logits(self, last: Tensor) -> Tensor:
        """[..., H] → [..., V], equal to the stock model's logits."""
        return self.readout.logits(last)

    def layer(self, index: int) -> nn.Module:
        """A decoder layer with its weights, to be read or called; −1 the last. Of a target on the
        disk they are gone when another layer is asked for."""
        return self.decoder.layers[index]

    def new_cache(self, rows: int, slots: int) -> KVCache:
        return KVCache(rows, slots, self.device)

    def default_aux_layers(self) -> tuple[int, int, int]:
        """Three distinct layers low→high, as outputs, counted from 0 (EAGLE-3: 1, N/2−1, N−4)."""
        count = self.num_layers
        layers = (1, count // 2 - 1, count - 4)
        if not layers[0] < layers[1] < layers[2]:
            layers = (0, count // 2, count - 1) if count < 5 else (1, count // 2, count - 2)
        if not layers[0] < layers[1] < layers[2]:
            raise SpectrainError(
                f"the target has {count} layers, EAGLE-3 needs three different ones",
                where=self.name,
                fix="use a target with at least 3 layers",
            )
        return layers

    # ── the adapter's check of itself ────────────────────────────────────────

    @torch.inference_mode()
    def check(self) -> None:
        """Refuse a model for which our assumptions do not hold; each is tried, none is looked up.

        1. lm_head(last) are the model's logits (pre- or post-norm, soft caps, scales).
        2. Our attention equals the library's eager one (sinks, caps, windows, biases).
        3. Reading in two pieces with our cache equals reading at once (recurrent layers fail).
        """
        generator = torch.Generator().manual_seed(0)
        usable = min(self.vocab_size, len(self.tokenizer))
        tokens = torch.randint(0, usable, (1, 12), generator=generator).to(self.device)
        features = self.forward(tokens)
        ours = self.logits(features.last)
        stock = self.model(input_ids=tokens, use_cache=False).logits
        self.require_close("lm_head(last hidden state) and the model's own logits", ours, stock)

        self.model.set_attn_implementation("eager")
        eager = self.model(input_ids=tokens, use_cache=False).logits
        self.model.set_attn_implementation(attention.NAME)
        self.require_close("our attention and the library's eager attention", ours, eager)

        cache = self.new_cache(1, 12)
        pieces = []
        for piece in (tokens[:, :7], tokens[:, 7:]):
            pieces.append(self.forward(piece, cache=cache).last)
            cache.commit(torch.tensor([piece.shape[1]], device=self.device))
        self.require_close(
            "reading in two pieces and at once (a state that our cache does not hold)",
            self.logits(torch.cat(pieces, dim=1)),
            ours,
        )

    def require_close(self, what: str, left: Tensor, right: Tensor) -> None:
        """Refuse logits that two routes through the model give and that differ beyond rounding."""
        gap = (left.float() - right.float()).abs().max().item()
        size = right.float().abs().max().item()
        if not gap <= _CHECK_TOLERANCE[self.dtype] * max(size, 1e-6):
            raise SpectrainError(
                f"{what} differ by {gap:.3g} (largest logit {size:.3g})",
                where=f"target {self.name} ({type(self.model).__name__})",
                fix="this architecture is not supported",
            )


def _keep(kept: dict[int, Tensor], layer: int):
    def hook(_module, _inputs, output):
        kept[layer] = output if isinstance(output, Tensor) else output[0]

    return hook


def placed(dtype: str, device: str) -> tuple[torch.dtype | str, str]:
    """Type and device of a target, of what was asked for: see `Target.load`."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return "auto" if dtype == "auto" and device != "cpu" else _dtype(dtype), device


def _dtype(name: str) -> torch.dtype:
    known = {
        "auto": torch.float32,
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
    }
    if name not in known:
        raise SpectrainError(f"unknown dtype {name!r}", fix=f"choose one of {', '.join(known)}")
    return known[name]
