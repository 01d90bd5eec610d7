"""Settings of the small draft model: what a user may choose, and what is saved with it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from spectrain.heads.base import HeadConfig

# It goes on as long as one likes; the bound is that of the evaluation.
LONGEST_DRAFT = 64
DEFAULT_STEPS = 4
DEFAULT_LAYERS = 2
# Logits (rows × D) that exist at one time in training; more are computed part by part.
CHUNK = 1 << 24


class DraftOptions(BaseModel):
    """What a user may choose when a draft is made (`head:` in a config, `--set head.layers=4`)."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    model: str | None = Field(
        None, description="causal LM to start from (folder or name); default: the target's layers"
    )
    layers: int | None = Field(
        None, ge=1, description="layers of the target to start from; default 2"
    )
    loss: Literal["kl", "tv"] = Field(
        "kl", description="distance to the target's distribution: forward KL or total variation"
    )
    train_embeddings: bool = Field(
        False, description="false keeps the embedding and the output layer as they are"
    )
    steps: int = Field(
        DEFAULT_STEPS, ge=1, le=LONGEST_DRAFT, description="tokens drafted when nothing is said"
    )

    @model_validator(mode="after")
    def _one_start(self) -> DraftOptions:
        if self.model is not None and self.layers is not None:
            raise ValueError("model and layers exclude each other")
        return self


class DraftConfig(HeadConfig):
    """The head's config.json."""

    family: Literal["draft"] = "draft"
    model: dict[str, Any] = Field(description="config of the model, as transformers writes it")
    tokens: int = Field(ge=1, description="tokens of the tokenizer shared with the target")
    loss: Literal["kl", "tv"] = "kl"
    train_embeddings: bool = False
