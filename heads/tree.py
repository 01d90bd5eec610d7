"""Draft trees as settings: the one a head was published with, and a static one.

Nodes are numbered level by level; node 0 is the root, the token the target chose last. M = nodes+1.
"""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, field_validator


class TreeDefaults(BaseModel):
    """A tree grown at run time (EAGLE-2, arXiv 2406.16858, section 4)."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    top_k: int = Field(10, ge=1, description="nodes expanded at each depth, children of each")
    depth: int = Field(6, ge=1, le=16, description="levels of the tree; no head drafts further")
    nodes: int = Field(60, ge=1, description="best nodes over all depths that are verified")


class TreeShape(BaseModel):
    """A static tree: which choices of the head are verified (Medusa, arXiv 2401.10774, 2.1.2).

    A path holds ranks from the root: (0,) is the head's first choice for the next token, (0, 2) its
    third choice for the token after that one. The empty tree is the root alone: plain decoding.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    paths: tuple[tuple[int, ...], ...] = Field(
        description="every node but the root by its ranks; kept sorted by depth, then by ranks"
    )

    @field_validator("paths")
    @classmethod
    def _a_tree(cls, paths: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
        known = {(), *paths}
        for path in paths:
            if not path or min(path) < 0:
                raise ValueError(f"{list(path)} is no path: one or more ranks, each 0 or more")
            if path[:-1] not in known:
                raise ValueError(f"{list(path)} has no parent: {list(path[:-1])} is missing")
        if len(known) <= len(paths):
            raise ValueError("a path is given twice")
        return tuple(sorted(paths, key=lambda path: (len(path), path)))

    @classmethod
    def chain(cls, gamma: int) -> Self:
        """γ first choices in a row; 0: the root alone."""
        return cls(paths=tuple((0,) * depth for depth in range(1, gamma + 1)))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Raises pydantic.ValidationError."""
        return cls.model_validate_json(text)

    def to_json(self) -> str:
        return self.model_dump_json()

    @property
    def nodes(self) -> int:
        """Without the root."""
        return len(self.paths)

    @property
    def depth(self) -> int:
        """Levels below the root."""
        return len(self.paths[-1]) if self.paths else 0

    @property
    def parents(self) -> tuple[int, ...]:
        """[M] node numbers, each less than its child's; the root is its own."""
        number = {path: node for node, path in enumerate(((), *self.paths))}
        return (0, *(number[path[:-1]] for path in self.paths))

    @property
    def ranks(self) -> tuple[int, ...]:
        """[M] which choice of its parent a node is; 0 for the root."""
        return (0, *(path[-1] for path in self.paths))

    @property
    def depths(self) -> tuple[int, ...]:
        """[M]"""
        return (0, *map(len, self.paths))

    @property
    def levels(self) -> tuple[tuple[int, ...], ...]:
        """Nodes of depth 0 (the root) … depth."""
        depths = self.depths
        return tuple(
            tuple(node for node, own in enumerate(depths) if own == depth)
            for depth in range(self.depth + 1)
        )

    @property
    def frontiers(self) -> tuple[tuple[int, ...], ...]:
        """Of each level but the last the nodes that have children: what the head expands."""
        inner = set(self.parents)
        return tuple(tuple(node for node in level if node in inner) for level in self.levels[:-1])

    @property
    def most_children(self) -> int:
        """Children of the node that has most of them."""
        above = self.parents[1:]
        return max((above.count(parent) for parent in set(above)), default=0)

    @property
    def choices(self) -> int:
        """How many of the head's choices are looked at: the highest rank + 1."""
        return max(self.ranks[1:], default=-1) + 1

    @property
    def is_chain(self) -> bool:
        """First choices in a row."""
        return self.choices <= 1
