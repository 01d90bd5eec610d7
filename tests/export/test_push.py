"""Pushing to a model hub: the library itself against a server of our own that answers like one."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
from huggingface_hub import constants

from spectrain.core.errors import RunFailed, SpectrainError
from spectrain.export.push import push, require_token


@pytest.fixture
def hub(monkeypatch, bare_environment):
    """asked: (path, body) of every request; status: what all are answered with."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_fake")
    state = SimpleNamespace(asked=[], status=200)

    class Answers(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers.get("content-length") or 0)).decode()
            state.asked.append((self.path, body))
            content = {"success": True, "commitOid": "a" * 40, "hookOutput": ""}
            content |= {"url": f"{state.url}/me/head", "commitUrl": f"{state.url}/me/head/commit/a"}
            if "/preupload/" in self.path:
                names = [file["path"] for file in json.loads(body)["files"]]
                content["files"] = [
                    {"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names
                ]
            answer = json.dumps(content).encode()
            self.send_response(state.status)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    state.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield state
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "README.md").write_text("---\nlicense: other\n---\ntext")
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def test_everything_is_uploaded_to_a_private_repository(hub, folder):
    assert push(folder, "me/head", True, hub.url) == f"{hub.url}/me/head"
    made = json.loads(hub.asked[0][1])
    assert hub.asked[0][0] == "/api/repos/create"
    assert (made["organization"], made["name"], made["visibility"]) == ("me", "head", "private")
    path, body = hub.asked[-1]
    assert path == "/api/models/me/head/commit/main"
    lines = [json.loads(line) for line in body.splitlines()]
    files = {line["value"]["path"] for line in lines if line["key"] == "file"}
    assert files == {"README.md", "config.json"}


@pytest.mark.parametrize(
    ("status", "words"), [(401, "does not know the token"), (403, "may not write")]
)
def test_a_refusal_is_one_line_and_the_export_stays(hub, folder, status, words):
    hub.status = status
    with pytest.raises(RunFailed, match=words) as failed:
        push(folder, "me/head", True, hub.url)
    assert "\n" not in str(failed.value)
    assert f"hf upload me/head {folder}" in str(failed.value)


def test_no_hub(hub, folder, monkeypatch):
    with pytest.raises(RunFailed, match="cannot be reached"):
        push(folder, "me/head", True, "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(RunFailed, match="cannot be reached"):
        push(folder, "me/head", True, hub.url)


def test_no_token_is_told_before_any_work(hub, monkeypatch):
    require_token()
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(SpectrainError, match="no token"):
        require_token()
