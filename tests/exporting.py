"""A head written in a format and read back."""

from __future__ import annotations

from spectrain.export.formats import reader_of, writer
from spectrain.export.found import Found
from spectrain.export.layout import Reference, load
from spectrain.export.write import write


def round_trip(head, target, format, folder):
    """The head as the format gives it back."""
    made = writer(format, head.family)
    reference = Reference(target, target.name)
    assert made.refusals(head, reference) == []
    folder.mkdir()
    write(made.encode(head, reference), folder)
    found = Found.open(folder)
    reader = reader_of(found)
    assert reader is made.reader or type(reader) is type(made.reader)
    return load(reader, found, target)
