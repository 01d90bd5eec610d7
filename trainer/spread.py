"""Loading a target that no single device holds: whole on the CPU of the first process, from there
into the pieces of all (trainer/sharding.py). No other process ever has the whole of it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from spectrain.core import attention
from spectrain.core.errors import SpectrainError
from spectrain.core.readout import Readout
from spectrain.core.target import Target
from spectrain.heads.base import DraftHead
from spectrain.trainer import sharding

_PATIENCE = timedelta(days=1)


def wanted(choice: bool | str, asked_for: bool, kept: bool, accelerator: Accelerator) -> bool:
    """Whether to spread the target, told on stderr where it was asked for.

    choice: the setting; asked_for: what the launcher says; kept: whether training asks the target.
    """
    on, count = asked_for if choice == "auto" else bool(choice), accelerator.num_processes
    if on and accelerator.is_main_process:
        text = f"the target's layers are spread over {count} processes"
        if not kept:
            text = "the features are stored: no process keeps the target's layers"
        if count == 1:
            text = "nothing is spread: there is one process"
        print(text, file=sys.stderr)
    return on and count > 1


def target_and_head(
    make: Callable[[str], tuple[Target, DraftHead]], accelerator: Accelerator, trained: bool
) -> tuple[Target | None, DraftHead]:
    """The target, spread, where it is trained along (else None: it was asked for its readout), and
    a head bound to it. make: both, on the device told, called by the first process alone."""
    source, head = first(accelerator, lambda: make("cpu")) or (None, None)
    kind, config = tell((type(head), head.config) if head is not None else None)
    head = (kind(config).float() if head is None else head).to(accelerator.device)
    fill(head.state_dict(), None if source is None else head.state_dict())
    target = spread(source, accelerator, trained) if trained else None
    head.bind(target.readout if trained else _readout(source, accelerator.device))
    # What is drawn from here on is what the first process draws.
    torch.set_rng_state(tell(torch.get_rng_state()))
    return target, head


def loaded(load: Callable[..., Target], accelerator: Accelerator) -> Target:
    """A frozen target, spread. load: the whole one, on the device told."""
    return spread(first(accelerator, lambda: load(device="cpu")), accelerator, False)


def spread(source: Target | None, accelerator: Accelerator, trained: bool) -> Target:
    """A target whose layers are cut over the processes; source: the whole one, in the first."""
    model, tensors, facts = _outline(source)
    bf16 = trained and accelerator.mixed_precision == "bf16"
    device = accelerator.device
    sharding.shard(model.get_decoder(), device, torch.bfloat16 if bf16 else None)
    model.to_empty(device=device)
    model.tie_weights()
    fill(_tensors(model), tensors)
    target = Target(model, *facts)
    if trained:
        # FSDP settles the types of gradients in the first forward and by what asks for one then; a
        # trunk that rests at first would be left without.
        model.requires_grad_(True)
        with torch.no_grad(), accelerator.autocast():
            target.forward(torch.zeros(1, 1, dtype=torch.long, device=device))
        model.requires_grad_(False)
    return target


def first(accelerator: Accelerator, make: Callable[[], Any]) -> Any:
    """What `make` gives in the first process, None in the others. An error that tells of the input
    is raised in all: none of them waits for it."""
    made = error = None
    if accelerator.is_main_process:
        try:
            made = make()
        except SpectrainError as caught:
            error = caught
    # A group of its own: the others wait as long as loading takes, and NCCL's patience is short.
    patient = dist.new_group(backend="gloo", timeout=_PATIENCE)
    error = tell(error, patient)
    dist.destroy_process_group(patient)
    if error is not None:
        raise error
    return made


def tell(value: Any, group: dist.ProcessGroup | None = None) -> Any:
    """The first process's value, in all of them."""
    box = [value]
    dist.broadcast_object_list(box, 0, group)
    return box[0]


def fill(tensors: Mapping[str, Tensor], source: Mapping[str, Tensor] | None) -> None:
    """Fill tensors, or pieces of them, from whole ones of the same names in the first process; one
    whole tensor at a time is on a device."""
    for name, value in tensors.items():
        if source is None:
            full = torch.empty(value.shape, dtype=value.dtype, device=value.device)
        else:
            full = source[name].detach().to(value.device).contiguous()
        dist.broadcast(full, 0)
        sharding.put(value, full)


def _outline(source: Target | None) -> tuple[nn.Module, dict[str, Tensor] | None, tuple]:
    """A model of the source's shape without values, the source's tensors, and what else makes a
    Target of it. Raises SpectrainError where the shape does not follow from the configuration."""
    own = facts = None
    if source is not None:
        own, model = _tensors(source.model), source.model
        kinds = {name: (value.shape, value.dtype) for name, value in own.items()}
        parts = (model.config, model.generation_config, model.dtype, kinds)
        facts = (parts, (source.tokenizer, source.name, source.fingerprint))
    (config, generation, dtype, kinds), rest = tell(facts)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation=attention.NAME, dtype=dtype, trust_remote_code=False
        )
    model.generation_config = generation
    made = {name: (value.shape, value.dtype) for name, value in _tensors(model).items()}
    if odd := sorted({name for name, _ in made.items() ^ kinds.items()}):
        raise SpectrainError(
            f"the target cannot be spread over processes: {odd[0]} does not follow from its "
            "configuration",
            where=rest[1],
            fix="leave out shard and --use_fsdp",
        )
    return model, own, rest


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """All tensors, each once, those that are not saved included."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _readout(source: Target | None, device: torch.device) -> Readout:
    """The readout of a target of which nothing else is needed, in every process."""
    model, tensors, (tokenizer, *_) = _outline(source)
    for table in (model.get_input_embeddings(), model.get_output_embeddings()):
        table.to_empty(device=device)
    model.tie_weights()
    filled = {name: value for name, value in _tensors(model).items() if not value.is_meta}
    fill(filled, tensors)
    model.requires_grad_(False)
    return Readout.of(model, model.config.get_text_config(decoder=True), tokenizer)
