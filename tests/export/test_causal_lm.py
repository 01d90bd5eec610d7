"""Drafts as causal language models of transformers: loaded by that library, and read back."""

from __future__ import annotations

import json
import shlex
import shutil

import pytest
import torch
from draft_models import folder_of
from exporting import round_trip
from head_kinds import KINDS, create
from tiny_models import make_batch, random_rows
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from spectrain.export.formats import READERS, _made, reader_of, writer
from spectrain.export.found import Found
from spectrain.export.layout import Reference, load
from spectrain.export.parity import differences
from spectrain.export.write import write
from spectrain.heads.io import load_head


@pytest.fixture
def folder(tiny, tmp_path):
    """A draft of two layers, as exported."""
    path = tmp_path / "out"
    path.mkdir()
    write(writer("hf", "draft").encode(KINDS["draft"](tiny, 0), Reference(tiny, "t")), path)
    return path


def told(folder, target, verdict="fail"):
    found = Found.open(folder)
    return [one.text for one in reader_of(found).findings(found, target) if one.verdict == verdict]


def edit(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("name", ["draft", "draft tv"])
def test_drafts_come_back_the_same(tiny, tmp_path, name):
    head = KINDS[name](tiny, 0)
    again = round_trip(head, tiny, "hf", tmp_path / "out")
    assert differences(head, again, tiny) == []
    assert again.config.steps == head.config.steps
    assert again.config.target == head.config.target


def test_untied_and_of_another_size(whole, tokenizer, tmp_path):
    """A draft that was a checkpoint of its own, with more rows than the target."""
    start = folder_of(tmp_path, tokenizer, tie_word_embeddings=False)
    head = create(whole, "draft", model=str(start), steps=6)
    again = round_trip(head, whole, "hf", tmp_path / "out")
    assert differences(head, again, whole) == []
    assert told(tmp_path / "out", whole, "note") == ["392 rows of tokens, the target has 384"]
    lines = writer("hf", "draft").launch(head, Reference(whole, "some/target"))
    assert [bool(one.note) for one in lines] == [True, True, False]


def test_the_library_says_the_same(tiny, folder):
    """Its own attention and its own loading give the logits that the head gives."""
    head = KINDS["draft"](tiny, 0)
    generator = torch.Generator().manual_seed(0)
    batch = make_batch(tiny, head, *random_rows(generator, rows=1))
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        (unrolled,) = head.unroll(batch, 1)
        ours = head.logits(unrolled.hidden, 0)
        theirs = model(batch.tokens).logits[0][unrolled.anchors + 1]
    torch.testing.assert_close(ours, theirs[:, : ours.shape[-1]], atol=1e-4, rtol=0)


def test_assisted_generation_is_plain_generation(tiny, tiny_path, folder):
    """The library drafts with it: the target's greedy text, K tokens at a time as said."""
    model = AutoModelForCausalLM.from_pretrained(tiny_path).eval()
    draft = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert draft.generation_config.num_assistant_tokens == 4
    inputs = AutoTokenizer.from_pretrained(folder)("def add(a, b):", return_tensors="pt")
    settings = {"max_new_tokens": 12, "do_sample": False}
    plain = model.generate(**inputs, **settings)
    assert torch.equal(model.generate(**inputs, assistant_model=draft, **settings), plain)


def test_launch_lines(tiny):
    """As many tokens as the draft's steps; SGLang's count of those that are verified has the root
    in it."""
    head = create(tiny, "draft", steps=5)
    vllm, sglang, library = writer("hf", "draft").launch(head, Reference(tiny, "org/my model"))
    words = shlex.split(vllm.text)
    assert words[:4] == ["vllm", "serve", "org/my model", "--speculative-config"]
    settings = {"method": "draft_model", "model": "{folder}", "num_speculative_tokens": 5}
    assert json.loads(words[4]) == settings
    words = shlex.split(sglang.text)
    assert dict(zip(words[3::2], words[4::2], strict=True)) == {
        "--model-path": "org/my model",
        "--speculative-algorithm": "STANDALONE",
        "--speculative-draft-model-path": "{folder}",
        "--speculative-num-steps": "5",
        "--speculative-eagle-topk": "1",
        "--speculative-num-draft-tokens": "6",
    }
    compile(library.text, "launch", "exec")


def test_files(tiny, folder):
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors"} < names
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} < names
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert not {"_name_or_path", "dtype", "torch_dtype"} & config.keys()
    assert GenerationConfig.from_pretrained(folder).eos_token_id == list(tiny.stop_ids)


def test_load_head_takes_the_folder_too(tiny, folder):
    """What `--head` loads by itself and what is imported are the same draft."""
    found = Found.open(folder)
    imported = load(reader_of(found), found, tiny)
    loaded = load_head(folder)
    loaded.check_target(tiny, str(folder))
    assert differences(imported, loaded.bind(tiny.readout), tiny) == []


def test_public_files_hold_more_or_less(tiny, folder):
    """The tied output layer a second time, and names without the model's prefix."""
    found = Found.open(folder)
    twice = {**found.shapes, "lm_head.weight": (392, 48)}
    bare = {name.removeprefix("model."): shape for name, shape in found.shapes.items()}
    for shapes in (twice, bare):
        other = Found(found.path, found.config, shapes, {}, found.read)
        failed = [f for f in reader_of(other).findings(other, tiny) if f.verdict == "fail"]
        assert failed == []


def test_faults(tiny, folder, tmp_path):
    cases = {
        "another model": ({"hidden_size": 96}, "has shape"),
        "more layers than tensors": ({"num_hidden_layers": 10**9}, "1000000000 layers"),
        "a missing layer": ({"num_hidden_layers": 3}, "missing model.layers.2"),
        "unknown to the library": ({"model_type": "no-such"}, "cannot build the draft model"),
    }
    for number, (changes, words) in enumerate(cases.values()):
        copy = shutil.copytree(folder, tmp_path / str(number))
        edit(copy, **changes)
        assert any(words in text for text in told(copy, tiny)), words
    (folder / "tokenizer_config.json").unlink()
    assert told(folder, tiny) == ["the folder has no tokenizer"]


def test_another_tokenizer(tiny, folder):
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    path.write_text(json.dumps(content))
    (text,) = told(folder, tiny)
    assert "the tokenizer is not the target's" in text


def test_readers_exclude_each_other(tiny, whole, tmp_path):
    """Of all layouts one at most is recognised, whatever is written."""
    heads = [
        ("spectrain", KINDS["draft"](tiny, 0), tiny),
        ("hf", KINDS["draft"](tiny, 0), tiny),
        ("speculators", KINDS["eagle3"](tiny, 120), tiny),
        ("medusa", create(whole, "medusa", steps=2), whole),
    ]
    for number, (format, head, target) in enumerate(heads):
        path = tmp_path / str(number)
        path.mkdir()
        write(writer(format, head.family).encode(head, Reference(target, "t")), path)
        found = Found.open(path)
        names = [name for name, place in READERS.items() if _made(place).recognises(found)]
        assert names == [format]
