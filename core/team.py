"""This process among those of a launch: who it is, and how it waits for the others."""

from __future__ import annotations

import os
from datetime import timedelta

# One rank may answer prompts for hours while the others have nothing left to do.
_PATIENCE = timedelta(days=30)


class Team:
    """The processes that `accelerate launch` or `torchrun` started; alone without a launcher."""

    def __init__(self, device: str = "auto") -> None:
        """device: what the user asked for; "auto" and "cuda" become the GPU of this process."""
        self.rank, self.world, self.device = 0, 1, device
        self._state = None
        if int(os.environ.get("WORLD_SIZE") or 1) > 1:
            import torch
            from accelerate import PartialState

            cpu = device == "cpu" or not torch.cuda.is_available()
            self._state = PartialState(cpu=cpu, timeout=_PATIENCE)
            self.rank, self.world = self._state.process_index, self._state.num_processes
            if device in ("auto", "cuda"):
                self.device = str(self._state.device)

    @property
    def main(self) -> bool:
        return self.rank == 0

    def mine(self, number: int) -> bool:
        """Whether a numbered piece of work is this process's."""
        return number % self.world == self.rank

    def wait(self) -> None:
        """Come back when all processes have called this."""
        if self._state is not None:
            self._state.wait_for_everyone()

    def leave(self) -> None:
        """Say goodbye, so that the launcher sees an orderly end."""
        if self._state is not None:
            self._state.destroy_process_group()
