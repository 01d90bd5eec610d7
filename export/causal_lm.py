"""A draft as a causal language model of `transformers`: what every engine loads by itself.

config.json and the tensors as that library writes them, the target's tokenizer beside. How many
tokens to draft is a setting of generation there, `num_assistant_tokens`.

W rows of the draft's tables, V of the target's.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar

import torch

from spectrain.core.errors import SpectrainError
from spectrain.core.files import read_json
from spectrain.core.target import Target
from spectrain.export import numbers
from spectrain.export.causal_lm_files import (
    content,
    folder_of,
    in_file,
    names,
    require_what_is_loaded,
    tokens,
)
from spectrain.export.found import Found
from spectrain.export.layout import (
    Encoded,
    Finding,
    Launch,
    Reader,
    Reference,
    Writer,
)
from spectrain.heads import draft_init
from spectrain.heads.draft_config import DEFAULT_STEPS, LONGEST_DRAFT
from spectrain.heads.draft_model import DraftModelHead

GENERATION, STEPS = "generation_config.json", "num_assistant_tokens"
# Parts of names that heads and MTP layers have, and a model by itself has not.
MARKS = {"fc", "midlayer", "medusa_head", "d2t", "t2d", "eh_proj", "enorm", "hnorm"}


class CausalLmReader(Reader):
    """Known by a `model_type` without anything that a head has."""

    name: ClassVar[str] = "hf"

    def recognises(self, found: Found) -> bool:
        config = found.config
        if "family" in config or "speculators_model_type" in config:
            return False
        parts = {part for name in found.shapes for part in name.split(".")}
        marked = parts & MARKS or any(part.startswith("mtp") for part in parts)
        return isinstance(config.get("model_type"), str) and not marked

    def findings(self, found: Found, target: Target) -> Iterator[Finding]:
        layers = found.config.get("num_hidden_layers", 0)
        if not isinstance(layers, int) or layers > len(found.shapes):
            text = f"config.json says {layers} layers, there are {len(found.shapes)} tensors"
            yield Finding("config", "fail", text, "correct num_hidden_layers in config.json")
            return
        if wrong := list(numbers.findings(found.config)):
            yield from wrong
            return
        try:
            require_what_is_loaded(found)
            with torch.device("meta"):
                model = draft_init.build(content(found.config))
        except SpectrainError as error:
            yield Finding("config", "fail", error.what, error.fix or "")
            return
        yield Finding("config", "ok", f"{type(model).__name__}, {layers} layers")
        yield from names(found, model)
        yield tokens(found, target)
        rows = len(model.get_output_embeddings().weight)
        if rows != target.vocab_size:
            yield Finding(
                "rows", "note", f"{rows} rows of tokens, the target has {target.vocab_size}"
            )

    def build(self, found: Found, target: Target) -> DraftModelHead:
        folder = folder_of(found)
        head = DraftModelHead.load(str(folder), str(folder))
        for parameter in head.parameters():
            # The library maps it from its file, where it may begin at any byte: kernels then add up
            # in another order, and drafts would not be those of the head that was written.
            parameter.data = parameter.data.clone()
        head.check_target(target, str(folder))
        head.config = head.config.model_copy(update={"steps": _steps(folder)})
        return head

    def called(self, found: Found, name: str) -> str:
        """The library puts a name of the model's own in the place of our `decoder`."""
        rest = name.removeprefix("decoder.")
        for ending in ("", ".weight"):
            mine = [one for one in found.shapes if f".{one}".endswith(f".{rest}{ending}")]
            if len(mine) == 1:
                return mine[0].removesuffix(ending)
        return rest


class CausalLmWriter(Writer):
    """The draft with the target's tokenizer."""

    reader = CausalLmReader()

    def refusals(self, head: DraftModelHead, reference: Reference) -> list[str]:
        if "tokenizer.json" not in _tokenizer_files(reference.target):
            return ["the target's tokenizer has no tokenizer.json, which the folder needs"]
        return []

    def encode(self, head: DraftModelHead, reference: Reference) -> Encoded:
        with torch.device("meta"):
            model = draft_init.build(head.config.model)
        model.get_decoder().load_state_dict(head.decoder.state_dict(), assign=True)
        output = model.get_output_embeddings()
        if head.lm_head is None:
            output.weight = model.get_input_embeddings().weight
        else:
            output.load_state_dict(head.lm_head.state_dict(), assign=True)
        target = reference.target
        generation = {
            "bos_token_id": target.tokenizer.bos_token_id,
            "eos_token_id": list(target.stop_ids),
            "pad_token_id": target.tokenizer.pad_token_id,
            STEPS: head.config.steps,
            "num_assistant_tokens_schedule": "constant",
        }
        config = content(head.config.model) | {"architectures": [type(model).__name__]}
        beside = {GENERATION: generation, **_tokenizer_files(target)}
        return Encoded(config, in_file(model), beside)

    def launch(self, head: DraftModelHead, reference: Reference) -> list[Launch]:
        name, steps = shlex.quote(reference.name), head.config.steps
        settings = {"method": "draft_model", "model": "{folder}", "num_speculative_tokens": steps}
        note = ""
        if head.rows != reference.target.vocab_size:
            note = (
                f"refused there: the draft has {head.rows} rows of tokens, the target "
                f"{reference.target.vocab_size}"
            )
        return [
            Launch(
                "vLLM 0.33.0",
                f"vllm serve {name} --speculative-config {shlex.quote(json.dumps(settings))}",
                note=note,
            ),
            Launch(
                "SGLang 0.5.23",
                f"python -m sglang.launch_server --model-path {name} "
                "--speculative-algorithm STANDALONE --speculative-draft-model-path {folder} "
                f"--speculative-num-steps {steps} --speculative-eagle-topk 1 "
                f"--speculative-num-draft-tokens {steps + 1}",
                note=note,
            ),
            Launch(
                "transformers 5.24",
                "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
                f"tokenizer = AutoTokenizer.from_pretrained({reference.name!r})\n"
                f"target = AutoModelForCausalLM.from_pretrained({reference.name!r})\n"
                'draft = AutoModelForCausalLM.from_pretrained("{folder}")\n'
                'inputs = tokenizer("Hello", return_tensors="pt")\n'
                "print(tokenizer.decode(target.generate(**inputs, assistant_model=draft)[0]))",
                "python",
            ),
        ]


def _steps(folder: Path) -> int:
    file = folder / GENERATION
    said = read_json(file) if file.is_file() else {}
    steps = said.get(STEPS) if isinstance(said, dict) else None
    return steps if isinstance(steps, int) and 1 <= steps <= LONGEST_DRAFT else DEFAULT_STEPS


def _tokenizer_files(target: Target) -> dict[str, str]:
    """name → text; tokenizer.json holds all that older, binary files do."""
    with TemporaryDirectory() as folder:
        target.tokenizer.save_pretrained(folder)
        files = sorted(path for path in Path(folder).iterdir() if path.suffix != ".model")
        return {path.name: path.read_text(encoding="utf-8") for path in files}
