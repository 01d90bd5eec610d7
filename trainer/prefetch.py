"""The next step's micro-batches are read by one thread while the device works on this step's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from spectrain.core.batch import Batch

Read = Callable[[int], list[Batch]]


@contextmanager
def reading(read: Read, end: int, ahead: bool, pin: bool) -> Iterator[Read]:
    """A function like `read` (step → its micro-batches), to be asked for one step after the other.

    end: no step from here on is read. ahead: whether the step after the one that was asked for is
    read meanwhile; otherwise `read` it is, in the calling thread. pin: what is read ahead lies in
    memory that a GPU copies from while it computes.

    What a reader raises is raised where its step is asked for. Two steps at most are held, if the
    caller lets go of a step before it asks for the next. On the way out the thread is waited for.
    """
    if not ahead:
        yield read
        return
    pool, waiting = ThreadPoolExecutor(1, "prefetch"), dict[int, Future[list[Batch]]]()

    def whole(step: int) -> list[Batch]:
        batches = read(step)
        return [batch.pin() for batch in batches] if pin else batches

    def next_one(step: int) -> list[Batch]:
        found = waiting.pop(step, None) or pool.submit(whole, step)
        batches = found.result()
        if step + 1 < end:
            waiting[step + 1] = pool.submit(whole, step + 1)
        return batches

    try:
        yield next_one
    finally:
        pool.shutdown(cancel_futures=True)
