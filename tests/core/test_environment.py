"""What `settle` does to the process."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sys

import pytest

# Pages taken anew by the second half of twenty rounds of four tensors of 24 MB.
PROGRAM = """
import resource
from spectrain.core.environment import settle
settle()
import torch
torch.set_num_threads(1)
counts = []
for _ in range(20):
    four = [torch.empty(6_000_000).fill_(1) for _ in range(4)]
    del four
    counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
print(counts[-1] - counts[9])
"""


def faults(**more: str) -> int:
    own = {key: value for key, value in os.environ.items() if not key.startswith("MALLOC_")}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=own | more)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is glibc that is told")
def test_freed_memory_is_used_again_without_the_system():
    each = 10 * 4 * 24_000_000 / resource.getpagesize()
    assert faults() < 0.1 * each
    # Somebody who has set glibc up is left alone: here with every block straight from the system.
    assert faults(MALLOC_MMAP_THRESHOLD_="1000000") > 0.9 * each
