"""Fixtures: a tiny seeded target with a real tokenizer, made once per test run; no network."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: its threads spin otherwise
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Before triton is imported: its kernels run as Python, so that a CPU can try them.
os.environ.setdefault("TRITON_INTERPRET", "1")

import signal
import socket
from pathlib import Path

import pytest
import torch
from tiny_models import make_tokenizer, save_tiny

torch.set_num_threads(1)  # tiny tensors; xdist brings the parallelism


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Every connection that leaves this machine fails."""
    real = socket.socket.connect

    def connect(self, address):
        host = address[0] if isinstance(address, tuple) else "local"
        if host not in ("127.0.0.1", "::1", "localhost", "local"):
            raise OSError(f"network is blocked in tests: {address}")
        return real(self, address)

    monkeypatch.setattr(socket.socket, "connect", connect)


@pytest.fixture
def bare_environment(monkeypatch):
    """Neither a proxy nor a key from the machine that the tests run on."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.fixture
def ctrl_c_interrupts():
    """SIGINT interrupts this process and those it starts, also where our own parent ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory, tokenizer) -> Path:
    """Folder of the tiny target."""
    return save_tiny(tmp_path_factory.mktemp("target") / "tiny", tokenizer)


@pytest.fixture(scope="session")
def whole(tmp_path_factory, tokenizer):
    """A target whose lm_head has a row for each token and no more, untied, other rotary base."""
    from spectrain.core.target import Target

    folder = save_tiny(
        tmp_path_factory.mktemp("target") / "whole",
        tokenizer,
        seed=3,
        vocab_size=len(tokenizer),
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 700.0},
    )
    return Target.load(str(folder), pack_weights=False)


@pytest.fixture(scope="session")
def tiny(tiny_path):
    """The tiny target, loaded (weights not packed)."""
    from spectrain.core.target import Target

    return Target.load(str(tiny_path), pack_weights=False)
