"""How to draft with a head on the machine that it was measured on: a file in the head's folder,
`plan.json`, or `plan-int8.json` for a target with int8 weights.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from spectrain.core.errors import SpectrainError
from spectrain.core.files import read_json, write_json
from spectrain.core.target import Target
from spectrain.generator.costs import Costs, machine, precision
from spectrain.heads.tree import TreeShape

Share = Annotated[float, Field(ge=0, le=1)]


def plan_name(quantisation: str | None) -> str:
    """The file's name: one for each way to keep the target's weights."""
    return f"plan-{quantisation}.json" if quantisation else "plan.json"


class Choice(BaseModel):
    """What was chosen at one batch size, and the costs that it was chosen by."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    tree: TreeShape | None = Field(description="what to draft; null: nothing, decode plainly")
    speedup: float = Field(gt=0, description="predicted, × plain decoding")
    formula: float | None = Field(None, description="by the usual formula, of chains")
    costs: Costs


class SavedPlan(BaseModel):
    """Choices by batch size, for one target on one machine."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    format: Literal[1] = 1
    target: str = Field(description="fingerprint of the target")
    dtype: str
    device: str
    threads: int
    accepted: tuple[tuple[Share, ...], ...] = Field(
        description="[K][R] how often the r-th choice at position k was the target's token, of "
        "the cases where everything before was right; temperature 0"
    )
    choices: dict[int, Choice] = Field(min_length=1, description="batch size → choice")

    @field_validator("choices")
    @classmethod
    def _batches_are_sizes(cls, choices: dict[int, Choice]) -> dict[int, Choice]:
        for batch, choice in choices.items():
            if batch < 1 or choice.costs.batch != batch:
                raise ValueError(f"the costs at {batch} are of batch {choice.costs.batch}")
        return dict(sorted(choices.items()))

    @model_validator(mode="after")
    def _one_machine(self) -> SavedPlan:
        own = (self.dtype, self.device, self.threads)
        for batch, choice in self.choices.items():
            if (choice.costs.dtype, choice.costs.device, choice.costs.threads) != own:
                raise ValueError(f"the costs at batch {batch} are of another machine or dtype")
        return self

    def for_batch(self, batch: int) -> Choice:
        """What to draft for a batch of that size.

        The choice of the measured size that is nearest as a ratio, of two equally near ones the
        larger: it drafts less, so that what it promises is not undercut by a busier machine.
        """
        nearest = min(self.choices, key=lambda size: (abs(math.log(size / batch)), -size))
        return self.choices[nearest]

    def unfit(self, target: Target) -> str | None:
        """Why the measured costs say nothing about this run; None where they hold.

        Times of another number type, processor or number of threads are other times; who loads the
        plan then drafts as without one, and says so.
        """
        own = {"target": self.target, "dtype": self.dtype, "device": self.device}
        here = {
            "target": target.fingerprint,
            "dtype": precision(target),
            "device": machine(target.device),
        }
        if target.device.type == "cpu":
            own["threads"], here["threads"] = self.threads, torch.get_num_threads()
        other = [
            f"{name} {own[name]}, here {here[name]}" for name in own if own[name] != here[name]
        ]
        return f"the plan was measured with {'; '.join(other)}" if other else None

    def save(self, path: Path) -> None:
        """Write the file in one step."""
        write_json(path, self.model_dump(mode="json"))

    @classmethod
    def load(cls, path: Path) -> SavedPlan:
        """Raises SpectrainError naming the first thing that is wrong."""
        try:
            return cls.model_validate(read_json(path))
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(str(part) for part in first["loc"]) or "plan"
            raise SpectrainError(
                f"{key}: {first['msg']}", where=str(path), fix="make it again: spectrain plan"
            ) from None

    @classmethod
    def beside(cls, head: Path, target: Target) -> SavedPlan | None:
        """The plan for this target in a head's folder (`heads.io.find_head`), or None."""
        path = head / plan_name(target.quantisation)
        return cls.load(path) if path.is_file() else None
