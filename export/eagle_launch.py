"""Command lines that run an EAGLE head, as the engines' sources named here read them."""

from __future__ import annotations

import json
import shlex

import torch

from spectrain.export.layout import Launch, Reference
from spectrain.heads.base import DraftHead
from spectrain.heads.tree import TreeDefaults

_CHAIN = 3  # drafted at least: a head trained for one step goes on from its own output all the same


def steps(head: DraftHead) -> int:
    return max(head.config.steps, _CHAIN)


def vllm(head: DraftHead, reference: Reference, method: str) -> Launch:
    settings = {"method": method, "model": "{folder}", "num_speculative_tokens": steps(head)}
    return Launch(
        "vLLM 0.33.0",
        f"vllm serve {shlex.quote(reference.name)} "
        f"--speculative-config {shlex.quote(json.dumps(settings))}",
        note=_chain_note(head) + _tree_note(head),
    )


def sglang(head: DraftHead, reference: Reference, algorithm: str) -> Launch:
    """A tree where the head names one, else a chain; the verified tokens count the root.

    One --dtype holds for target and draft. Without it each has its own config's, float32 becomes
    float16, and beside a target of bfloat16 the states handed on would be of two types.
    """
    tree = head.tree
    depth, children, nodes = (
        (tree.depth, tree.top_k, tree.nodes) if tree else (steps(head), 1, steps(head))
    )
    return Launch(
        "SGLang 0.5.23",
        f"python -m sglang.launch_server --model-path {shlex.quote(reference.name)} "
        f"--speculative-algorithm {algorithm} --speculative-draft-model-path {{folder}} "
        f"--speculative-num-steps {depth} --speculative-eagle-topk {children} "
        f"--speculative-num-draft-tokens {nodes + 1} --dtype {_half(reference)}",
        note=("The tree is that of the head's config." if tree else _chain_note(head))
        + " --dtype is that of target and head alike: "
        + ("the one" if reference.stored else "name the one")
        + " that the target is stored in"
        + (", float32 rounded to bfloat16." if reference.stored == torch.float32 else "."),
    )


def trtllm(head: DraftHead, reference: Reference, layers: tuple[int, ...]) -> Launch:
    """layers: those to read, () for the engine's default."""
    capture = f"  eagle3_layers_to_capture: {list(layers)}\n" if layers else ""
    return Launch(
        "TensorRT-LLM (main, 2026)",
        "cat > eagle3.yaml <<'EOF'\n"
        "speculative_config:\n"
        "  decoding_type: Eagle3\n"
        f"  max_draft_len: {steps(head)}\n"
        "  speculative_model: {folder}\n"
        f"{capture}"
        "EOF\n"
        f"trtllm-serve {shlex.quote(reference.name)} --config eagle3.yaml",
        note=_chain_note(head)
        + " The loader's source was read, on its main branch; no release was tried. "
        + (
            "It takes the layers to read from eagle3.yaml, not from the checkpoint."
            if layers
            else "The layers that are read are its default."
        ),
    )


def safeai(head: DraftHead, reference: Reference, third: bool) -> Launch:
    """Its depth does not count the first level, its total counts the root."""
    tree = head.tree or TreeDefaults()
    return Launch(
        "SafeAILab EAGLE (cb7e084)",
        "from eagle.model.ea_model import EaModel\n\n"
        "model = EaModel.from_pretrained(\n"
        f"    use_eagle3={third},\n"
        f"    base_model_path={reference.name!r},\n"
        '    ea_model_path="{folder}",\n'
        f"    total_token={tree.nodes + 1},\n"
        f"    depth={tree.depth - 1},\n"
        f"    top_k={tree.top_k},\n"
        ")",
        "python",
        note="It reads the target's embedding through model.safetensors.index.json: a target in "
        "one file has to be saved anew in several (save_pretrained with a small max_shard_size).",
    )


def _half(reference: Reference) -> str:
    """The type that the target is stored in, whatever it was loaded as here; bfloat16 for float32,
    of which SGLang would make float16."""
    kind = reference.stored or reference.target.dtype
    return str(torch.bfloat16 if kind == torch.float32 else kind).removeprefix("torch.")


def _chain_note(head: DraftHead) -> str:
    trained = head.config.steps
    if trained >= _CHAIN:
        return "Drafts a chain."
    return (
        f"Drafts a chain of {_CHAIN} tokens; the head was trained for {trained}, and goes on from "
        "its own output beyond that: try fewer, too."
    )


def _tree_note(head: DraftHead) -> str:
    if head.tree is None:
        return ""
    return " The head's own tree has no place in this layout; it comes back without one."
