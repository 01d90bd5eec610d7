"""Replies as JSONL, kept as they are finished: an interrupted run goes on where it was.

replies.part.jsonl   first line: fingerprint of everything that shapes the replies; then one
                     finished reply a line, in the order of finishing
replies.jsonl        all of them, in the order of the prompts; the part is removed
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from spectrain.core.errors import SpectrainError
from spectrain.core.files import atomic_write, disk_errors
from spectrain.data.conversations import Conversation
from spectrain.generator.completion import Completion

REPLIES, PART = "replies.jsonl", "replies.part.jsonl"
_FIELDS = ("tokens", "finish", "stopped_by", "forwards")


class ReplyFile:
    """Finished replies of `prompts` under settings that `identity` (JSON) tells apart."""

    def __init__(
        self, folder: Path, identity: Mapping[str, Any], prompts: Sequence[Tensor], overwrite: bool
    ) -> None:
        self.path, self._part = folder / REPLIES, folder / PART
        key = json.dumps([identity, [p.tolist() for p in prompts]], sort_keys=True)
        self._key = hashlib.sha256(key.encode()).hexdigest()[:16]
        self.done: dict[int, Completion] = {}
        if self.path.exists() and not overwrite:
            raise SpectrainError(
                "there are replies already",
                where=str(self.path),
                fix="another --out, or --overwrite",
            )
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            if overwrite:
                self.path.unlink(missing_ok=True)
            if self._part.exists():
                self._read()
            else:
                atomic_write(self._part, json.dumps({"settings": self._key}) + "\n")
            self._file = self._part.open("a", encoding="utf-8")

    def _read(self) -> None:
        """Take over what an earlier run finished; its last line may be cut."""
        head, *lines = self._part.read_text(encoding="utf-8", errors="replace").split("\n")
        try:
            same = json.loads(head)["settings"] == self._key
            rows = [json.loads(line) for line in lines[:-1]]
            for row in rows:
                runs = Counter({int(run): times for run, times in row["runs"].items()})
                done = Completion(**{k: row[k] for k in _FIELDS}, runs=runs)
                self.done[int(row["index"])] = done
        except (ValueError, KeyError, TypeError, AttributeError):
            raise SpectrainError(
                "not what an interrupted run leaves", where=str(self._part), fix="remove the file"
            ) from None
        if not same:
            raise SpectrainError(
                "an interrupted run with other settings or prompts has left replies here",
                where=str(self._part),
                fix="use its settings to go on, or another --out; or remove the file",
            )
        if lines[-1]:  # cut while it was written
            kept = "\n".join([head, *lines[:-1]]) + "\n"
            atomic_write(self._part, kept)

    def add(self, index: int, done: Completion) -> None:
        """Keep a finished reply."""
        self.done[index] = done
        row = {"index": index, **{name: getattr(done, name) for name in _FIELDS}, "runs": done.runs}
        with disk_errors(self._part):
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()

    def finish(
        self, conversations: Sequence[Conversation], texts: Sequence[str], temperature: float
    ) -> None:
        """Write the conversations with their replies (texts), and remove the part."""
        self._file.close()
        lines = [
            json.dumps(
                {
                    "messages": [*conversation.messages, {"role": "assistant", "content": text}],
                    "domain": conversation.domain,
                    "temperature": temperature,
                    "finish_reason": self.done[index].finish,
                },
                ensure_ascii=False,
            )
            for index, (conversation, text) in enumerate(zip(conversations, texts, strict=True))
        ]
        with disk_errors(self.path):
            atomic_write(self.path, "\n".join(lines) + "\n")
            self._part.unlink()
