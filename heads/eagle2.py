"""EAGLE-2 (arXiv 2406.16858): weights and training of EAGLE-1, and a tree grown at run time.

The paper changes drafting alone: the tree is not fixed but grown from the draft's own confidences.
What this family adds is the published shape of the tree in its config (`head.tree`): the generator
grows that tree unless it is told otherwise (generator/tree.py). It can do so with any other family.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import BaseModel, Field

from spectrain.heads.base import HeadConfig
from spectrain.heads.eagle1 import Eagle1Config, Eagle1Head, Eagle1Options
from spectrain.heads.tree import TreeDefaults


class Eagle2Options(Eagle1Options):
    """EAGLE-1's options and the tree."""

    tree: TreeDefaults = Field(
        TreeDefaults(), description="shape of the tree that is grown when drafting"
    )


class Eagle2Config(Eagle1Config):
    """The head's config.json."""

    family: Literal["eagle2"] = "eagle2"
    tree: TreeDefaults = TreeDefaults()


class Eagle2Head(Eagle1Head):
    """An EAGLE-1 head that names the tree it drafts."""

    family: ClassVar[str] = "eagle2"
    Config: ClassVar[type[HeadConfig]] = Eagle2Config
    Options: ClassVar[type[BaseModel]] = Eagle2Options
    config: Eagle2Config

    @property
    def tree(self) -> TreeDefaults:
        return self.config.tree
