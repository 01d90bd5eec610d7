"""Files of tensors are read like the library reads them, and whatever a byte of them becomes, the
outcome is one line or the very same tensors."""

from __future__ import annotations

import shutil
import struct
import zipfile

import hostile
import pytest
import safetensors.torch
import torch
from head_kinds import create
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spectrain.core import pickled
from spectrain.core.checkpoint import Checkpoint, read_by_the_library, require_one
from spectrain.core.errors import SpectrainError
from spectrain.core.pickled import load_pickled
from spectrain.core.tensor_files import TYPES, header, overwrite, read
from spectrain.heads.io import load_head, save_head

FUZZ = settings(
    deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def some(dtype, shape):
    values = torch.arange(max(1, torch.Size(shape).numel())).reshape(-1)
    return values[: torch.Size(shape).numel()].reshape(shape).to(dtype)


def every_type():
    shapes = [(), (3,), (2, 5), (0, 4), (1, 1, 2)]
    return {f"{n}{i}": some(t, s) for n, t in TYPES.items() for i, s in enumerate(shapes)}


def same(left, right):
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert value.dtype == right[name].dtype, name
        assert torch.equal(value, right[name]), name
    return True


def test_read_as_the_library_reads(tmp_path):
    """The reference is safetensors itself, for each type, a number, and an empty tensor."""
    tensors = every_type()
    safetensors.torch.save_file(tensors, tmp_path / "a.safetensors", metadata={"format": "pt"})
    entries = header(tmp_path / "a.safetensors")
    same({name: read(name, entry) for name, entry in entries.items()}, tensors)


@pytest.mark.parametrize("wrapped", [None, "state_dict", "model"])
def test_pickles_read_as_torch_reads(tmp_path, wrapped):
    """Parameters, transposed and shared tensors included; each in memory of its own."""
    tensors = every_type()
    tensors["turned"] = torch.arange(6.0).reshape(2, 3).T
    tensors["part"] = tensors["F321"][1:]
    content = {**tensors, "parameter": torch.nn.Parameter(torch.ones(2))}
    torch.save({wrapped: content, "epoch": 3} if wrapped else content, tmp_path / "a.pt")
    checkpoint = Checkpoint(tmp_path)
    found = {name: checkpoint.read(name) for name in checkpoint.entries}
    same(found, {**tensors, "parameter": torch.ones(2)})
    assert not any(value.requires_grad for value in found.values())
    found["part"].zero_()
    assert torch.equal(checkpoint.read("part"), tensors["part"])


def test_overwrite_changes_its_tensors_and_nothing_else(tmp_path):
    path = tmp_path / "a.safetensors"
    safetensors.torch.save_file(every_type(), path)
    new = {"F321": torch.ones(3), "BF162": torch.ones(2, 5)}
    overwrite(header(path), new)
    expected = every_type() | {"F321": torch.ones(3), "BF162": torch.ones(2, 5).bfloat16()}
    same(safetensors.torch.load_file(path), expected)


@pytest.fixture(scope="module")
def sound(tiny, tmp_path_factory):
    """A head, its folder, and the length of all that comes before the tensors' bytes."""
    head = create(tiny, "medusa", steps=1, draft_vocab_size=40)
    folder = tmp_path_factory.mktemp("sound") / "head"
    save_head(head, folder)
    content = (folder / "model.safetensors").read_bytes()
    return head, folder, 8 + struct.unpack("<Q", content[:8])[0]


@given(st.data())
@FUZZ
def test_a_header_with_changed_bytes(sound, tmp_path, data):
    """Names, types, shapes and offsets are each held against something else: what the head
    needs, the file's size, one another. So no change can pass for another head."""
    head, folder, length = sound
    work = tmp_path / "work"
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(folder, work)
    content = bytearray((work / "model.safetensors").read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, length - 1))] = data.draw(
            st.integers(0, 255) | st.sampled_from(list(b'0123456789"{}[],:FBI'))
        )
    (work / "model.safetensors").write_bytes(content)
    again = outcome(load_head, work)
    assert again is None or same(again.state_dict(), head.state_dict())


@given(keep=st.floats(0, 1, exclude_max=True))
@FUZZ
def test_a_file_that_is_cut_anywhere(sound, tmp_path, keep):
    _, folder, _ = sound
    content = (folder / "model.safetensors").read_bytes()
    (tmp_path / "a.safetensors").write_bytes(content[: int(keep * len(content))])
    with pytest.raises(SpectrainError, match="not a whole safetensors file"):
        header(tmp_path / "a.safetensors")


@pytest.mark.parametrize("inside", [False, True])
@given(data=st.data())
@FUZZ
def test_a_pickle_with_changed_bytes(tmp_path, inside, data):
    """Of the archive, or of the pickle in it with a checksum that is right again: an error of ours
    or tensors that can be read, never another exception."""

    def changed(content):
        content = bytearray(content)
        for _ in range(data.draw(st.integers(1, 3))):
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
        return bytes(content)

    path = tmp_path / hostile.PICKLED
    torch.save({"a": torch.arange(8.0), "b": torch.ones(2, 3, dtype=torch.bfloat16)}, path)
    if inside:
        kept = {"data.pkl": changed}
        hostile.rewritten(
            tmp_path, lambda name, content: kept.get(name[-8:], bytes)(content), zipfile.ZIP_STORED
        )
    else:
        path.write_bytes(changed(path.read_bytes()))
    found = outcome(load_pickled, path) or {}
    assert sum(value.clone().numel() for value in found.values()) <= 2 * path.stat().st_size


# Pickles that ask for os.mkdir, or for what an extension's number stands for, without the words in
# which torch.save asks for its functions.
ASKING = {
    "STACK_GLOBAL": b"\x80\x04\x8c\x02os\x8c\x05mkdir\x93\x8c\x01x\x85R.",
    "EXT1": b"\x80\x02\x82\x01.",
    "EXT2": b"\x80\x02\x83\x01\x00.",
    "EXT4": b"\x80\x02\x84\x01\x00\x00\x00.",
}


def with_pickle(folder, pickle):
    """An archive of torch.save with another pickle in it."""
    torch.save({"a": torch.ones(2)}, folder / hostile.PICKLED)
    kept = {"data.pkl": pickle}
    hostile.rewritten(
        folder, lambda name, content: kept.get(name[-8:], content), zipfile.ZIP_STORED
    )
    return folder / hostile.PICKLED


@pytest.mark.parametrize("opcode", ASKING)
def test_a_pickle_that_asks_in_other_words(tmp_path, monkeypatch, opcode):
    """Refused by our own look at it: torch is not asked, whatever it would say."""
    path = with_pickle(tmp_path, ASKING[opcode])
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("must not be opened"))
    with pytest.raises(SpectrainError, match=f"a pickle that asks for '{opcode}'"):
        load_pickled(path)


def test_a_pickle_of_any_length_is_not_read(tmp_path, monkeypatch):
    """It would be in memory whole; one just as long as the bound is read."""
    path = with_pickle(tmp_path, b"\x80\x02}.")
    size = zipfile.ZipFile(path).getinfo(f"{path.stem}/data.pkl").file_size
    monkeypatch.setattr(pickled, "LONGEST_HEADER", size)
    with pytest.raises(SpectrainError, match="no dictionary of tensors"):
        load_pickled(path)
    monkeypatch.setattr(pickled, "LONGEST_HEADER", size - 1)
    with pytest.raises(SpectrainError, match="a packed archive"):
        load_pickled(path)


def outcome(read, path):
    """What `read` gives, None for an error of ours in one line."""
    try:
        return read(path)
    except SpectrainError as error:
        lines = str(error).splitlines()
    assert len(lines) == 1
    return None


def test_a_pickle_beside_safetensors_is_read_by_nobody(tmp_path):
    safe, index = "model.safetensors", "model.safetensors.index.json"
    pickled = "pytorch_model.bin", "pytorch_model.bin.index.json"
    for name in pickled:
        (tmp_path / name).write_text("nonsense")
    (tmp_path / index).write_text('{"weight_map": {"a": "m0.safetensors"}}')
    require_one(tmp_path)
    assert read_by_the_library(tmp_path) == {"m0.safetensors"}
    (tmp_path / index).rename(tmp_path / safe)
    require_one(tmp_path)
    assert read_by_the_library(tmp_path) == {safe}
    (tmp_path / safe).unlink()
    assert read_by_the_library(tmp_path) == {pickled[0]}
    (tmp_path / pickled[1]).write_text('{"weight_map": {"a": "m0.bin"}}')
    with pytest.raises(SpectrainError, match="does not name it"):
        require_one(tmp_path)
