"""Errors that a user can mend: one line that says what, where and how; never a traceback."""

from __future__ import annotations


class SpectrainError(Exception):
    """Bad input. The command line prints it as one line and exits with 2.

    what:  what is wrong, with the value that was given
    where: the file, line, key or row it was found at
    fix:   what the user can do about it
    """

    exit_code = 2

    def __init__(self, what: str, *, where: str | None = None, fix: str | None = None) -> None:
        self.what, self.where, self.fix = what, where, fix
        line = what if where is None else f"{where}: {what}"
        super().__init__(line if fix is None else f"{line}; {fix}")


class RunFailed(SpectrainError):
    """The input was fine, the work could not be finished (disk full, loss not finite): exit 1."""

    exit_code = 1


class Terminated(KeyboardInterrupt):
    """Interrupted by SIGTERM instead of Ctrl-C: exit 143 instead of 130."""
