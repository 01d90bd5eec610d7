"""Published EAGLE-3 trainers, set up for one batch on a CPU: each a `Peer` with `step()` and
`optimizer`. It needs the peer it sets up and nothing of ours.

B rows, T tokens, H hidden size, V vocabulary, D draft vocabulary.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

DECAY = 0.8  # of the loss from draft step to draft step


class Peer:
    """A peer's model with the optimiser that all trainers get here; `backward()` is one batch."""

    def __init__(self, model, backward: Callable[[], None]) -> None:
        import torch

        learnt = [value for value in model.parameters() if value.requires_grad]
        self.optimizer = torch.optim.AdamW(learnt, lr=1e-4)
        self.backward = backward
        for value in learnt:  # the optimiser's own tensors are made in its first step
            value.grad = torch.zeros_like(value)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class Inputs:
    """Random rows of T + 1 tokens: one peer drops the first of each.

    tokens, reply [B, T + 1] int64; aux [B, T + 1, 3 H]; last [B, T + 1, H]; embedding [V, H];
    config: the target's; t2d [V] bool, d2t [D] int64 offsets: a draft vocabulary that has the
    target's choice at every position.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        import torch
        from safetensors.torch import load_file
        from transformers import LlamaConfig

        torch.manual_seed(0)
        torch.set_num_threads(options.threads)
        self.config = LlamaConfig.from_pretrained(
            options.target, num_hidden_layers=1, tie_word_embeddings=False
        )
        file = Path(options.target) / "model.safetensors"
        self.embedding = load_file(file)["model.embed_tokens.weight"].float()
        vocab, hidden = self.embedding.shape
        shape = options.batch, options.length + 1
        self.tokens = torch.randint(0, vocab, shape)
        self.reply = torch.zeros(shape, dtype=torch.int64)
        self.reply[:, shape[1] - round(options.share * options.length) :] = 1
        self.aux, self.last = torch.randn(*shape, 3 * hidden), torch.randn(*shape, hidden)
        chosen = torch.zeros(vocab, dtype=torch.int64)
        for row in self.last:
            chosen[(row @ self.embedding.T).argmax(-1)] = 1
        if int(chosen.sum()) > options.draft_vocab:
            raise SystemExit(f"{int(chosen.sum())} tokens are chosen, --draft-vocab is too small")
        order = chosen.argsort(descending=True, stable=True)  # then the lowest ids
        ids = order[: options.draft_vocab].sort().values
        self.t2d = torch.zeros(vocab, dtype=torch.bool)
        self.t2d[ids] = True
        self.d2t = ids - torch.arange(options.draft_vocab)


def speculators(options: argparse.Namespace) -> Peer:
    """Attention by sdpa (flex attention has no backward pass on a CPU), losses in plain torch (the
    others are Triton's), the output layer unfrozen. It takes one row at a time: gradients add up,
    which needs less memory than rows packed into one."""
    import torch
    from speculators.models.eagle3 import Eagle3DraftModel

    work = Inputs(options)
    model = Eagle3DraftModel.from_training_args(
        work.config,
        t2d=work.t2d,
        d2t=work.d2t,
        draft_vocab_size=options.draft_vocab,
        norm_before_residual=False,
        ttt_steps=options.steps,
        verifier_name_or_path=options.target,
        draft_attn_impl="sdpa",
    )
    model = model.float().train()
    model.lm_head.weight.requires_grad_(True)
    arguments, _ = Eagle3DraftModel.get_trainer_kwargs(
        loss_fn="kl_div",
        loss_implementation="eager",
        ttt_steps=options.steps,
        ttt_step_loss_decay=DECAY,
    )
    rows = [  # token t + 1 beside the target's states at t, as its own loader shifts them
        {
            "input_ids": work.tokens[row : row + 1, 1:],
            "hidden_states": work.aux[row : row + 1, :-1],
            "verifier_last_hidden_states": work.last[row : row + 1, 1:],
            "loss_mask": work.reply[row : row + 1, 1:],
            "position_ids": torch.arange(1, options.length + 1)[None],
            "document_ids": torch.zeros(1, options.length, dtype=torch.int64),
        }
        for row in range(options.batch)
    ]

    def backward() -> None:
        for row in rows:
            _, loss, _ = model(**row, **arguments)
            (loss / len(rows)).backward()

    return Peer(model, backward)


def specforge(options: argparse.Namespace) -> Peer:
    """Attention by sdpa. Its loss is a Triton kernel; the plain version beside it in the same file,
    which it compiles, takes its place. The target's output layer is filled here: its own loader
    asks for an index file and an untied layer, and rounds to bfloat16."""
    import torch

    loss = _specforge_loss()
    import specforge.algorithms.eagle3.model as training
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
    from specforge.modeling.target.target_head import TargetHead
    from specforge.runtime.contracts import TrainBatch
    from specforge.training.strategies.base import Eagle3TrainStrategy

    training.LogSoftmaxLoss = SimpleNamespace(apply=loss)
    work = Inputs(options)
    work.config.draft_vocab_size = options.draft_vocab
    work.config.target_hidden_size = work.config.hidden_size
    draft = LlamaForCausalLMEagle3(work.config, attention_backend="sdpa").float()
    draft.load_embedding(options.target)
    draft.freeze_embedding()
    draft.t2d.copy_(work.t2d)
    draft.d2t.copy_(work.d2t)
    model = training.OnlineEagle3Model(draft, length=options.steps, attention_backend="sdpa")
    head = TargetHead(options.target).float().eval()
    head.freeze_weights()
    with torch.no_grad():
        head.fc.weight.copy_(work.embedding)
    del work.embedding
    strategy = Eagle3TrainStrategy(
        model.train(),
        target_head=head,
        ploss_decay=DECAY,
        compact_teacher=options.trainer == "specforge-compact",
    )
    batch = TrainBatch(
        sample_ids=[str(row) for row in range(options.batch)],
        strategy="eagle3",
        tensors={
            "input_ids": work.tokens[:, 1:],
            "attention_mask": torch.ones(options.batch, options.length, dtype=torch.int64),
            "loss_mask": work.reply[:, 1:],
            "hidden_state": work.aux[:, 1:],
            "target": work.last[:, 1:],
        },
        metadata={"target_repr": "hidden_state"},
    )
    return Peer(model, lambda: strategy.forward_loss(batch).loss.backward())


def _specforge_loss() -> Callable:
    """The plain loss of specforge. Its module defines Triton kernels: where there is no Triton, an
    empty stand-in has the name while the module is imported, and only then, or torch's compiler
    would take it for the real one. So torch is asked first."""
    import torch
    import torch._inductor.compile_fx
    import torch._inductor.runtime.triton_compat
    from torch.utils._triton import has_triton_package

    torch.compile(abs)
    missing = [] if has_triton_package() else ["triton", "triton.language"]
    for name in missing:
        sys.modules[name] = MagicMock()
    try:
        from specforge.core import loss
    finally:
        for name in missing:
            del sys.modules[name]
    return loss._compute_loss
