"""The process's surroundings: settings that must precede torch, and facts for reports."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import sys
from pathlib import Path
from typing import Any

# Set before torch is imported, unless the user has set them.
DEFAULTS = {
    # GNU OpenMP threads spin while they wait; beside any other process on the machine that can
    # make a small two-thread operation a hundred times slower.
    "OMP_WAIT_POLICY": "PASSIVE",
    # But they spin for some microseconds before they sleep: waking them costs more than most waits
    # last, a fifth of a training step's time on two cores (docs/LOG.md).
    "GOMP_SPINCOUNT": "500",
    # Tokenizers' own threads fight with torch's, and it warns about every fork.
    "TOKENIZERS_PARALLELISM": "false",
    # Only errors: load reports and advice of transformers would bury our own lines.
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    # Unreachable hub: say so once, after seconds; not five warnings and a minute later.
    "HF_HUB_VERBOSITY": "error",
    "HF_HUB_ETAG_TIMEOUT": "5",
}

# mallopt(3): blocks up to this size (the most it takes) come from the heap, and so much of it may
# lie idle at its end. Larger ones go back to the system at once, or the heap would fall to pieces.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_BLOCK, _IDLE = 32 << 20, 512 << 20


def settle() -> None:
    """Set the DEFAULTS that the user has not set. No effect on a torch that is already imported."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    _keep_freed_memory()


def _keep_freed_memory() -> None:
    """glibc hands freed blocks back early, and the system clears every page that is taken anew: a
    third of the time that sampling 128 rows takes (docs/LOG.md)."""
    if any(name.startswith("MALLOC_") for name in os.environ):  # the user has settings of their own
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # another C library
        return
    mallopt(_M_MMAP_THRESHOLD, _LARGEST_BLOCK)
    mallopt(_M_TRIM_THRESHOLD, _IDLE)


def cpu_model() -> str:
    """The processor's name as the system tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def cpu_cores() -> int:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def describe(device: Any = "cpu") -> dict[str, Any]:
    """The machine and libraries that a measurement was made with; `device` is torch's."""
    import torch

    device = torch.device(device)
    on_cuda = device.type == "cuda"
    return {
        "cpu": cpu_model(),
        "cores": cpu_cores(),
        "threads": torch.get_num_threads(),
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY"),
        "device": torch.cuda.get_device_name(device) if on_cuda else str(device),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


def free_memory(device: Any = "cpu") -> int:
    """Bytes that a process may still take: of a GPU, or of the machine within the limit that a
    container sets."""
    import psutil
    import torch

    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = psutil.virtual_memory().available
    try:
        folder = Path("/sys/fs/cgroup")
        limit, used = (int((folder / f"memory.{part}").read_text()) for part in ("max", "current"))
    except (OSError, ValueError):  # no such control, or "max": no limit
        return free
    return min(free, max(0, limit - used))


def peak_rss_mb() -> float:
    """The most memory this process ever held resident, in MB (10^6 bytes)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB on Linux
    return peak * unit / 1e6
