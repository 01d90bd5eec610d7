"""Reads every hostile checkpoint, each from a copy of the head in sys.argv[1]; prints by how many
bytes the peak memory has grown since a sound one was read."""

from __future__ import annotations

import resource
import shutil
import sys
from pathlib import Path

import hostile

from spectrain.core.errors import SpectrainError
from spectrain.export.found import Found
from spectrain.heads.io import load_head

CLAIMS = (
    *("10 GB header", "10 GB tensor", "huge shape", "memory in a pickle", "packed archive"),
    *("expanded tensor", "tensor beyond its file", "10 GB of config", "wide beyond memory"),
)


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    sound = Path(sys.argv[1])
    for sound_too in ("pytorch_model.bin", None):  # what reading loads, once, is not counted
        work = sound.with_name("work")
        shutil.copytree(sound, work)
        if sound_too:
            hostile.of_torch(lambda folder: hostile.load_file(folder / hostile.WEIGHTS))(work)
        Found.open(work)
        load_head(sound)
        shutil.rmtree(work)
    for name in CLAIMS:
        shutil.copytree(sound, work)
        hostile.FAULTS[name][0](work)
        before = peak()
        for read in (Found.open, load_head):
            try:
                read(work)
            except SpectrainError:
                continue
        print(name, peak() - before)
        shutil.rmtree(work)


main()
