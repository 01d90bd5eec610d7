"""`spectrain …`, but a signal is sent when a step of the training begins.

python signalled.py STEP SIGNAL WHOM …: at that step (from 0) the process of rank WHOM gets it, or
with "launcher" what started the processes, which are to hear of it before the step goes on.
"""

import os
import signal
import sys
import time

from spectrain.core import environment

environment.settle()

from spectrain import cli  # noqa: E402
from spectrain.trainer import optim  # noqa: E402

step, number, whom = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
del sys.argv[1:4]
rank = os.environ.get("RANK", "0")
factor = optim.factor  # asked once a step, with the step


def send(schedule, now, *more):
    if now == step and rank == whom:
        os.kill(os.getpid(), number)
    elif now == step and whom == "launcher":
        heard, handler = [], signal.getsignal(number)
        signal.signal(number, lambda *about: (heard.append(about), handler(*about)))
        if rank == "0":
            os.kill(os.getppid(), number)
        while not heard:
            time.sleep(0.01)
    return factor(schedule, now, *more)


optim.factor = send
cli.main()
