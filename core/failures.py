"""How a command fails: one line on stderr and an exit code, a traceback only on request."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from spectrain.core.errors import SpectrainError, Terminated


@contextmanager
def one_line_errors(goes_on: bool = False) -> Iterator[None]:
    """Turn what is raised inside into SystemExit: 2 bad input, 1 failed, 130 interrupted (143 by
    SIGTERM).

    goes_on: whether the same command, run again, goes on where this one was interrupted.

    `SPECTRAIN_DEBUG=1` shows the traceback of an error that nobody foresaw.
    """
    try:
        yield
    except SpectrainError as error:
        _fail(str(error), error.exit_code)
    except KeyboardInterrupt as stop:
        code = 143 if isinstance(stop, Terminated) else 130
        _fail("interrupted" + "; the same command goes on where it was" * goes_on, code)
    except BrokenPipeError:
        raise  # the reader of our output has left: Typer ends quietly
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            where = f" at {error.filename}" if error.filename else ""
            _fail(f"disk full{where}; free some space and run the same command again", 1)
        if os.environ.get("SPECTRAIN_DEBUG") == "1":
            traceback.print_exc()
            raise SystemExit(1) from None
        text = " ".join(str(error).split())
        _fail(f"{type(error).__name__}: {text} (SPECTRAIN_DEBUG=1 shows the traceback)", 1)


def _fail(line: str, code: int) -> NoReturn:
    print(f"error: {line}", file=sys.stderr)
    raise SystemExit(code) from None
