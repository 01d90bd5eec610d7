"""Checkpoints that are damaged, or made to do harm: each a change of a sound head's folder.

FAULTS: name → (change, words of the one line that tells it). TOUCHED is the file that pickles with
code in them would make.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED, TOUCHED = "pytorch_model.bin", "touched"
SOUND = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def with_header(content: bytes | dict, body: bytes = bytes(8), length: int | None = None):
    """The weights' file with this header and body; length: what it claims to be long."""
    raw = content if isinstance(content, bytes) else json.dumps(content).encode()

    def change(folder: Path) -> None:
        claimed = struct.pack("<Q", len(raw) if length is None else length)
        (folder / WEIGHTS).write_bytes(claimed + raw + body)

    return change


def entry(**changes) -> Callable[[Path], None]:
    return with_header({"a": SOUND | changes})


def tensors(edit: Callable[[dict], object]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        found = load_file(folder / WEIGHTS)
        edit(found)
        save_file(found, folder / WEIGHTS)

    return change


def first(found: dict) -> str:
    return min(name for name, value in found.items() if value.is_floating_point())


def shards(edit: Callable[[Path, dict[str, str]], object]) -> Callable[[Path], None]:
    """The weights in two files with an index, which `edit` (folder, weight_map) damages."""

    def change(folder: Path) -> None:
        found = load_file(folder / WEIGHTS)
        (folder / WEIGHTS).unlink()
        places = {}
        for number, names in enumerate((sorted(found)[::2], sorted(found)[1::2])):
            save_file({name: found[name] for name in names}, folder / f"m{number}.safetensors")
            places |= dict.fromkeys(names, f"m{number}.safetensors")
        edit(folder, places)
        (folder / INDEX).write_text(json.dumps({"weight_map": places}))

    return change


def also_in_the_other(folder: Path, places: dict[str, str]) -> None:
    found = load_file(folder / "m0.safetensors")
    save_file(load_file(folder / "m1.safetensors") | found, folder / "m1.safetensors")


def of_torch(make: Callable[[Path], object]) -> Callable[[Path], None]:
    """The weights as what torch.save makes of `make` (folder)."""

    def change(folder: Path) -> None:
        content = make(folder)
        (folder / WEIGHTS).unlink()
        torch.save(content, folder / PICKLED)

    return change


class Touch:
    """Whoever unpickles it makes a file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder / TOUCHED),)


class Grab:
    """Whoever unpickles it takes ten gigabytes, with a function that torch itself allows."""

    def __reduce__(self):
        return bytearray, (10**10,)


def plain_pickle(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / PICKLED).write_bytes(pickle.dumps({"a": Touch(folder)}))


def packed(folder: Path) -> None:
    """A zip of which a member unpacks to a thousand times its size."""
    of_torch(lambda _: {"a": torch.zeros(10_000_000)})(folder)
    rewritten(folder, lambda name, content: content, zipfile.ZIP_DEFLATED)


def expanded(folder: Path) -> dict:
    """One number that claims to be a tensor of 4 terabytes."""
    return {"a": torch.zeros(1).expand(1 << 40)}


def rewritten(folder: Path, edit: Callable[[str, bytes], bytes], how: int) -> None:
    """The archive with members changed by `edit` (name, content), their checksums right."""
    with zipfile.ZipFile(folder / PICKLED) as archive:
        members = {one.filename: archive.read(one) for one in archive.infolist()}
    with zipfile.ZipFile(folder / PICKLED, "w", how) as archive:
        for name, content in members.items():
            archive.writestr(name, edit(name, content))


def beyond(folder: Path) -> None:
    """A tensor of 77 numbers whose pickle says that it is one of 255, as its storage."""
    of_torch(lambda _: {"a": torch.zeros(77)})(folder)
    larger = {"data.pkl": lambda content: content.replace(b"K\x4d", b"K\xff")}
    rewritten(
        folder, lambda name, content: larger.get(name[-8:], bytes)(content), zipfile.ZIP_STORED
    )


def cut(name: str, keep: int) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        if name == PICKLED:
            of_torch(lambda folder: load_file(folder / WEIGHTS))(folder)
        (folder / name).write_bytes((folder / name).read_bytes()[:keep])

    return change


def config(**changes) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        content = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(content | changes))

    return change


def only(*kept: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        for path in folder.iterdir():
            if path.name not in kept:
                path.unlink()

    return change


def folder_for_file(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).mkdir()


def plain_model(folder: Path) -> None:
    """A small language model, and no head."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shutil.rmtree(folder)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 8}
    model = LlamaForCausalLM(LlamaConfig(num_attention_heads=1, **sizes))
    model.save_pretrained(folder)


def code_for(kind: str) -> Callable[[Path], None]:
    """A model's folder whose tokenizer, or configuration and model, is said to be code beside it,
    which makes a file when it is imported."""

    def change(folder: Path) -> None:
        name, own = {
            "tokenizer": ("tokenizer_config.json", {"tokenizer_class": "Harm"}),
            "model": ("config.json", {"model_type": "harm"}),
        }[kind]
        places = {"AutoTokenizer": ["harm.Harm", "harm.Harm"]} if kind == "tokenizer" else {
            "AutoConfig": "harm.Harm", "AutoModelForCausalLM": "harm.Harm",
        }  # fmt: skip
        content = json.loads((folder / name).read_text()) | own | {"auto_map": places}
        (folder / name).write_text(json.dumps(content))
        touched = str(folder / TOUCHED)
        (folder / "harm.py").write_text(f"import os\nos.mkdir({touched!r})\nclass Harm: pass\n")

    return change


def to(value: object) -> Callable[[Path, dict[str, str]], None]:
    return lambda folder, places: places.update({min(places): value})


HUGE = {"steps": 10**9}
DEEP = b'{"a":' + b"[" * 100_000
FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    # a safetensors file
    "empty file": (cut(WEIGHTS, 0), "not a whole safetensors file"),
    "cut in the length": (cut(WEIGHTS, 4), "not a whole safetensors file"),
    "cut in the header": (cut(WEIGHTS, 60), "it ends within the header"),
    "cut in the tensors": (cut(WEIGHTS, -9), "bytes long, its header tells of"),
    "10 GB header": (with_header(b"{}", length=10**10), "header claims to be 10,000,000,000 bytes"),
    "10 GB tensor": (
        entry(shape=[10**10 // 4], data_offsets=[0, 10**10]),
        "bytes long, its header tells of 10,000,000",
    ),
    "negative header": (with_header(b"{}", length=2**64 - 1), "header claims"),
    "no JSON": (with_header(b"nonsense"), "not a whole safetensors file"),
    "no object": (with_header(b"[1]"), "no JSON object"),
    "too deep": (with_header(DEEP), "not a whole safetensors file"),
    "endless number": (with_header(b'{"a":' + b"9" * 5000 + b"}"), "not a whole safetensors file"),
    "not UTF-8": (with_header(b'{"\xff": 1}'), "not a whole safetensors file"),
    "name twice": (with_header(b'{"a": 1, "a": 2}'), "'a' is there twice"),
    "name of two lines": (with_header({"a\nb": SOUND}), r"the name 'a\\nb' of a tensor is none"),
    "negative shape": (entry(shape=[-2]), "the shape of a is none"),
    "huge shape": (entry(shape=[2**40, 2**40, 0]), "beyond any memory"),
    "shape of fractions": (entry(shape=[2.0]), "the shape of a is none"),
    "shape against bytes": (entry(shape=[3]), "the bytes of a are not F32"),
    "negative offset": (entry(data_offsets=[-8, 0]), "the bytes of a are not"),
    "reversed offsets": (entry(data_offsets=[8, 0]), "the bytes of a are not"),
    "no offsets": (entry(data_offsets=None), "a has no two offsets"),
    "unknown type": (entry(dtype="F99"), "a has the unknown type 'F99'"),
    "no fields": (with_header({"a": 3}), "a has no type, shape and offsets"),
    "overlap": (with_header({"a": SOUND, "b": SOUND}), "b overlaps another tensor"),
    "gap": (
        with_header({"a": SOUND, "b": SOUND | {"data_offsets": [9, 17]}}, bytes(17)),
        "b overlaps another tensor or lies behind a gap",
    ),
    "more bytes": (with_header({"a": SOUND}, bytes(9)), "bytes long, its header tells of"),
    # its tensors
    "missing key": (tensors(lambda t: t.pop(first(t))), "missing "),
    "extra key": (tensors(lambda t: t.update(more=torch.ones(2))), "unknown more"),
    "wrong shape": (tensors(lambda t: t.update({first(t): torch.ones(3)})), "has shape"),
    "whole numbers": (
        tensors(lambda t: t.update({first(t): t[first(t)].long()})),
        "is stored as I64",
    ),
    "float8": (
        tensors(lambda t: t.update({first(t): t[first(t)].to(torch.float8_e4m3fn)})),
        "is stored as F8_E4M3",
    ),
    "double": (tensors(lambda t: t.update({first(t): t[first(t)].double()})), "stored as F64"),
    "fractions as a map": (tensors(lambda t: t.update(d2t=t["d2t"].float())), "d2t is stored as"),
    # several files
    "missing shard": (shards(lambda f, p: (f / "m1.safetensors").unlink()), "is missing"),
    "shard without it": (shards(lambda f, p: p.update(ghost="m0.safetensors")), "not hold 'ghost'"),
    "in another shard": (shards(to("m1.safetensors")), "m1.safetensors does not hold"),
    "in two shards": (shards(also_in_the_other), "is in m0.safetensors, too"),
    "a file beside them": (
        shards(lambda f, p: shutil.copy(f / "m0.safetensors", f / WEIGHTS)),
        f"{WEIGHTS} and {INDEX}, which does not name it",
    ),
    "shard above": (shards(to("../m0.safetensors")), "is not the name of a safetensors file"),
    "absolute shard": (shards(to("/etc/passwd")), "is not the name of a safetensors file"),
    "backslash": (shards(to("..\\m0.safetensors")), "is not the name of a safetensors file"),
    "shard with a zero": (shards(to("m0\0.safetensors")), "is not the name of a safetensors file"),
    "number as a shard": (shards(to(3)), "no weight_map"),
    "two files, no index": (
        lambda f: (shutil.copy(f / WEIGHTS, f / "x.safetensors"),
                   (f / WEIGHTS).rename(f / "y.safetensors")),
        "2 files of weights and no index",
    ),
    # a file of torch.save
    "code in a pickle": (
        of_torch(lambda f: load_file(f / WEIGHTS) | {"x": Touch(f)}),
        "asks for '[a-z]+.mkdir'",
    ),
    "memory in a pickle": (of_torch(lambda f: {"x": Grab()}), "asks for '[a-z_]+.bytearray'"),
    "plain pickle": (plain_pickle, "not a whole file of torch.save"),
    "packed archive": (packed, "a packed archive"),
    "expanded tensor": (of_torch(expanded), "a claims to be larger than the file"),
    "tensor beyond its file": (beyond, "no tensors can be read from it|larger than the file"),
    "cut archive": (cut(PICKLED, 2000), "not a whole file of torch.save"),
    "pickle of a number": (of_torch(lambda f: 3), "no dictionary of tensors"),
    "optimizer's numbers": (of_torch(lambda f: {"a": {"b": [3]}}), "a is no plain tensor"),
    "sparse tensor": (of_torch(lambda f: {"a": torch.eye(2).to_sparse()}), "asks for 'torch"),
    "number beside tensors": (
        of_torch(lambda f: load_file(f / WEIGHTS) | {"epoch": 3}),
        "epoch is no plain tensor",
    ),
    "double in a pickle": (
        of_torch(lambda f: {n: v.double() for n, v in load_file(f / WEIGHTS).items()}),
        "stored as FLOAT64",
    ),
    "nested in order": (of_torch(lambda f: OrderedDict(a=OrderedDict())), "a is no plain tensor"),
    # a config
    "config of a list": (lambda f: (f / "config.json").write_text("[1]"), "not a JSON object"),
    "config too deep": (lambda f: (f / "config.json").write_bytes(DEEP), "not valid JSON"),
    "config cut": (lambda f: (f / "config.json").write_text('{"family": '), "not valid JSON"),
    "10 GB of config": (
        lambda f: os.truncate(f / "config.json", 10**10),
        "more than 10,000,000 bytes",
    ),
    "unknown config key": (config(surprise=1), "surprise"),
    "a billion heads": (config(steps=10**9), "1000000000 is more than"),
    "wide beyond memory": (config(hidden_size=10**12), "has shape|no head can be made"),
    "wide beyond numbers": (config(hidden_size=10**30), "no head can be made of this config"),
    "negative width": (config(hidden_size=-1), "no head can be made of this config"),
    # a folder
    "empty folder": (only(), "no weights here"),
    "no weights": (only("config.json"), "no weights here"),
    "no config": (only(WEIGHTS), "no known layout"),
    "adapter": (
        lambda f: (f / WEIGHTS).rename(f / "adapter_model.safetensors"),
        "no weights here",
    ),
    "folder for a file": (folder_for_file, "a folder in the place of a file"),
    "a model, no draft": (plain_model, "the folder has no tokenizer"),
}  # fmt: skip
