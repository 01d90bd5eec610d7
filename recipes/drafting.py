"""How to draft and how to choose tokens: the settings that every decoding command shares."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from spectrain.core.config import Config, as_list
from spectrain.core.errors import SpectrainError
from spectrain.core.packing import pack
from spectrain.core.quantise import quantise
from spectrain.core.target import Target
from spectrain.generator.rules import Typical
from spectrain.generator.sampling import Sampling
from spectrain.generator.saved_plan import Choice, SavedPlan
from spectrain.generator.shapes import best_tree, sparse_default
from spectrain.generator.speculate import Generator
from spectrain.generator.tree import shape_for
from spectrain.heads.base import DraftHead
from spectrain.heads.io import find_head
from spectrain.heads.tree import TreeDefaults, TreeShape
from spectrain.recipes.given_head import given_head

DRAFT_TOKENS = 3
STATIC_NODES = 16


class DraftingConfig(Config):
    """Target, head, and the way to draft."""

    target: str = Field("smollm2-135m", description="target: embedded name, folder or hub id")
    head: Path | None = Field(None, description="folder of the trained head; none: plain decoding")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="number type of target and head; auto: float32 on a CPU"
    )
    quantize: str | None = Field(
        None,
        description="keep the target's weights as int8 or int4: faster, and another target (int4 "
        "may be a much worse one)",
    )
    draft_tokens: int | None = Field(
        None,
        ge=1,
        description="tokens drafted per step; how many pay depends on the acceptance; default: 3, "
        "or as many as the head can",
    )
    tree: str | None = Field(
        None,
        description="how to draft: chain; static, the best tree of tree_nodes for the acceptance "
        "that `plan` measured; grown, from the head's probabilities; or the JSON file of a static "
        "tree; default, unless draft_tokens is given: what `spectrain plan` chose for "
        "this head and machine; else grown for a head that names a tree; else chain",
    )
    tree_top_k: int | None = Field(
        None, ge=1, description="nodes of a grown tree expanded at each depth, children of each; "
        "default of the three: the head's own tree, else 4, the steps it learnt, 16"
    )  # fmt: skip
    tree_depth: int | None = Field(None, ge=1, le=16, description="levels of a grown tree")
    tree_nodes: int | None = Field(
        None, ge=1, description="nodes of a static or a grown tree, which the target reads"
    )
    lookup: int | None = Field(
        None,
        ge=1,
        description="prompt lookup, no head: draft what followed the same last tokens, so many or "
        "fewer, earlier in the text",
    )
    proposal: Literal["top-k", "drawn"] | None = Field(
        None,
        description="what is drafted when sampling: the head's likeliest tokens (a seed then gives "
        "the text of plain decoding), or tokens drawn from its distribution; both are lossless; "
        "default: drawn for a chain, top-k for a tree and for what is planned",
    )
    typical: bool = Field(
        False,
        description="LOSSY: typical acceptance, accept whatever the target finds likely enough; "
        "changes the output",
    )
    typical_epsilon: float = Field(0.09, gt=0, le=1, description="hard threshold of typical")
    typical_delta: float = Field(0.3, gt=0, le=1, description="entropy threshold of typical")

    @model_validator(mode="after")
    def _one_way_to_draft(self) -> DraftingConfig:
        given = [name for name, value in self.tree_shape.items() if value is not None]
        if self.tree == "static" and given == ["nodes"]:
            given = []
        grown = self.tree == "grown" or bool(given)
        if self.tree not in (None, "chain") and self.draft_tokens is not None:
            raise ValueError("--draft-tokens is of a chain, not of a tree")
        if given and (self.tree not in (None, "grown") or self.draft_tokens is not None):
            raise ValueError(f"tree_{given[0]} is of a grown tree, not of a chain or a static one")
        if self.lookup is not None and (self.head or self.tree or grown):
            raise ValueError("--lookup drafts chains and needs no --head and no --tree")
        if self.head is None and (grown or self.tree not in (None, "chain")):
            raise ValueError("a tree needs a --head")
        if self.head is None and self.lookup is None and (self.typical or self.draft_tokens):
            given = "--typical" if self.typical else "--draft-tokens"
            raise ValueError(f"{given} is about drafts: give a --head or --lookup")
        if self.head is None and self.proposal == "drawn":
            raise ValueError("--proposal drawn needs a --head to draw from")
        if self.proposal == "drawn" and grown:
            raise ValueError("nodes of a grown tree cannot be drawn: use a chain or a static tree")
        return self

    @property
    def tree_shape(self) -> dict[str, int | None]:
        """What is asked of a grown tree."""
        return {"top_k": self.tree_top_k, "depth": self.tree_depth, "nodes": self.tree_nodes}

    def way(self, target: Target, head: DraftHead | None, rows: int = 1) -> Way:
        """How to draft for so many rows at a time: as asked, as planned, or as is usual."""
        if self.lookup is not None:
            return Way({"lookup": self.lookup, "draft_tokens": self.draft_tokens or DRAFT_TOKENS})
        if head is None:
            return Way({})
        asked = any(self.tree_shape.values())
        if self.draft_tokens is None and self.tree is None and not asked:
            planned = self._planned(target, rows)
            if planned is not None:
                tree = planned.tree or TreeShape.chain(0)
                return Way(
                    {"tree": tree}, planned=True, promised=(planned.speedup, planned.formula)
                )
            if head.tree is not None:
                return Way({"tree": shape_for(head)})
        if self.tree == "static":
            return Way({"tree": self._static(target, head)})
        if self.tree == "grown" or asked:
            return Way({"tree": shape_for(head, **self.tree_shape)})
        if self.tree not in (None, "chain"):
            return Way({"tree": _tree_of(Path(self.tree))})
        return Way({"draft_tokens": self.draft_tokens or min(DRAFT_TOKENS, head.longest_draft)})

    def _planned(self, target: Target, rows: int) -> Choice | None:
        """The choice of `spectrain plan` for this head, if there is one that holds here."""
        plan = SavedPlan.beside(find_head(self.head), target)
        if plan is None:
            print("how much to draft is a guess: `spectrain plan` measures it", file=sys.stderr)
            return None
        reason = plan.unfit(target)
        if reason is not None:
            print(f"{reason}; drafting as without one", file=sys.stderr)
            return None
        return plan.for_batch(rows)

    def _static(self, target: Target, head: DraftHead) -> TreeShape:
        """The tree of tree_nodes nodes that promises most tokens a forward: by what `plan` measured
        of this head, else by an assumption."""
        nodes, deepest = self.tree_nodes or STATIC_NODES, min(head.config.steps, head.longest_draft)
        plan = SavedPlan.beside(find_head(self.head), target)
        if plan is not None and plan.target == target.fingerprint:
            return best_tree(plan.accepted[: head.longest_draft], nodes)
        print(
            "the tree is a guess, each choice half as often right as the one before it: "
            "`spectrain plan` measures it",
            file=sys.stderr,
        )
        return sparse_default(deepest, min(10, head.config.draft_vocab_size), nodes)

    def load(self) -> tuple[Target, DraftHead | None]:
        """The target, and the head bound to it."""
        head = given_head(self.head, self.target) if self.head else None
        target = Target.load(self.target, dtype=self.dtype, quantize=self.quantize)
        if head is not None:
            head.check_target(target, str(self.head))
            make_ready(head, target)
        return target, head

    def generator(self, target: Target, head: DraftHead | None, way: Way) -> Generator:
        typical = Typical(self.typical_epsilon, self.typical_delta) if self.typical else None
        # What is planned depends on the batch; the likeliest children give the same text with all.
        proposal = self.proposal or ("top-k" if way.planned else None)
        return Generator(target, head, proposal=proposal, typical=typical, **way.options)

    def rule(self, generator: Generator) -> str | None:
        """The acceptance rule, in the words that measured numbers are named with."""
        if not generator.gamma:
            return None
        if self.temperature == 0:
            return "greedy (typical acceptance is exact match here)" if self.typical else "greedy"
        if self.typical:
            return f"typical, LOSSY (ε {self.typical_epsilon:g}, δ {self.typical_delta:g})"
        return f"sampling, {'drawn' if generator.drawn else 'top-k'}"


def make_ready(head: DraftHead, target: Target) -> None:
    """Bind the head to its target and lay its layers out for decoding. With a quantised target they
    become int8, too: drafting must stay cheap beside it, and a guess may be rounded."""
    head.bind(target.readout).to(target.device, target.dtype)
    if target.quantisation:
        quantise(head, "int8")
    else:
        pack(head)


class SamplingConfig(Config):
    """How the target's tokens are chosen, and what ends a reply."""

    temperature: float = Field(0.0, ge=0, description="0: greedy")
    top_k: int = Field(0, ge=0, description="only the k most likely tokens; 0: all")
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus; 1: everything")
    min_p: float = Field(
        0.0, ge=0, le=1, description="only tokens at least so probable as this times the likeliest"
    )
    repetition_penalty: float = Field(
        1.0, gt=0, description="above 1 makes tokens of the prompt and the reply less likely"
    )
    min_new_tokens: int = Field(0, ge=0, description="no stop token before so many new tokens")
    max_new_tokens: int = Field(128, ge=0, description="longest reply in tokens")
    suppress: tuple[int, ...] = Field((), description="token ids that are never chosen")
    stop: tuple[str, ...] = Field((), description="texts that end a reply, and are no part of it")
    stop_ids: tuple[int, ...] = Field(
        (), description="token ids that end a reply, beside the target's own"
    )
    seed: int = Field(0, ge=0, description="of everything random")

    _lists = field_validator("suppress", "stop", "stop_ids", mode="before")(as_list)

    def sampling(self) -> Sampling:
        return Sampling(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            min_new_tokens=self.min_new_tokens,
            suppress=self.suppress,
            stop_ids=self.stop_ids,
            stop_strings=self.stop,
            seed=self.seed,
        )

    @model_validator(mode="after")
    def _lengths(self) -> SamplingConfig:
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError("min_new_tokens is more than max_new_tokens")
        return self


@dataclass(frozen=True)
class Way:
    """A way to draft: `Generator`'s draft_tokens, tree or lookup.

    planned: chosen by `plan` · promised: its speed over plain decoding, as predicted from what was
    measured and by the usual formula (chains only)
    """

    options: dict[str, Any]
    planned: bool = False
    promised: tuple[float, float | None] | None = None

    def __str__(self) -> str:
        planned = ", as planned" if self.planned else ""
        return f"{self._shape()}{planned}"

    def _shape(self) -> str:
        tree, tokens = self.options.get("tree"), self.options.get("draft_tokens", 0)
        if isinstance(tree, TreeDefaults):
            shape = tree.model_dump()
            return "grown tree: top {top_k}, depth {depth}, {nodes} nodes".format(**shape)
        if tree is not None and not tree.is_chain:
            return f"static tree: {tree.nodes} nodes, depth {tree.depth}"
        if "lookup" in self.options:
            return f"prompt lookup: up to {tokens} drafted a step"
        tokens = tokens if tree is None else tree.nodes
        return f"{tokens} drafted a step" if tokens else "plain decoding"


def _tree_of(path: Path) -> TreeShape:
    try:
        return TreeShape.from_json(path.read_text())
    except OSError as error:
        raise SpectrainError(
            f"no such tree ({error.strerror})",
            where=str(path),
            fix="chain, static, grown, or the JSON file of a static tree",
        ) from None
    except ValidationError as error:
        reason = error.errors()[0]["msg"]
        raise SpectrainError(f"no static tree: {reason}", where=str(path)) from None
