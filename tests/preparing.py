"""Prompts for tests of `prepare`, and the bytes of a store."""

import json
from pathlib import Path


def write(path: Path, rows: list) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def prompt(text: str, **more) -> dict:
    return {"messages": [{"role": "user", "content": text}], "domain": "chat", **more}


def talk(*texts: str, **more) -> dict:
    roles = ("user", "assistant")
    messages = [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]
    return {"messages": messages, **more}


PROMPTS = [prompt(f"How many apples are left of {n}?" + " Please." * (n % 4)) for n in range(16)]


def content(store: Path) -> dict[str, bytes]:
    return {str(f.relative_to(store)): f.read_bytes() for f in store.rglob("*") if f.is_file()}
