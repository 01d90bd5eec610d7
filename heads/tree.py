"""The draft tree that a head was published with: what a generator may start from."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class TreeDefaults(BaseModel):
    """A tree grown at run time (EAGLE-2, arXiv 2406.16858, section 4)."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    top_k: int = Field(10, ge=1, description="nodes expanded at each depth, children of each")
    depth: int = Field(6, ge=1, le=16, description="levels of the tree; no head drafts further")
    nodes: int = Field(60, ge=1, description="best nodes over all depths that are verified")
