"""Options that several commands share: one word for one thing.

A flag is None when it is not given, so that a configuration file can speak first. The default that
a help text shows is that of the recipe's settings, written out: those take torch to load
(tests/test_help.py holds the two equal).
"""

from __future__ import annotations

from typing import Annotated, Any

import typer


def option(
    kind: Any, text: str, *flags: str, metavar: str | None = None, default: str | None = None
) -> Any:
    """The annotation of an option; without `flags` its name is that of the parameter."""
    if default is not None:
        text += f"  [default: {default}]"
    return Annotated[kind | None, typer.Option(*flags, help=text, metavar=metavar)]


def store(default: str | None = None) -> Any:
    return option(str, "Feature store, written by prepare.", metavar="FOLDER", default=default)


def out(default: str | None = None) -> Any:
    return option(str, "Folder to write to.", metavar="FOLDER", default=default)


def prompts(default: str | None = None) -> Any:
    return option(str, "JSONL file, one conversation a line.", metavar="FILE", default=default)


TARGET = "Target model: smollm2-135m, a model folder or a hub id."
BAD_ROW = "At a line that is no conversation."


def sources(default: str | None = None) -> Any:
    text = "JSONL file, one conversation a line; repeat it, or name parquet files or datasets."
    return option(list[str], text, "--prompts", metavar="FILE", default=default)


LIMIT = "Use only so many conversations."
ROWS = "Prompts decoded at the same time."
TEMPERATURE = "Sampling temperature, 0 = greedy."


def temperatures(default: str) -> Any:
    text = "Sampling temperature, 0 = greedy; repeat it or separate by commas."
    return option(list[str], text, metavar="NUMBER", default=default)


def max_new_tokens(default: str) -> Any:
    return option(int, "Longest reply, in tokens.", default=default)


def draft_tokens(default: str) -> Any:
    return option(int, "Tokens drafted before each check by the target.", default=default)


def max_draft(default: str) -> Any:
    return option(int, "Draft positions to measure, from the first.", default=default)


Target = option(str, TARGET, metavar="NAME", default="smollm2-135m")
Limit = option(int, LIMIT, default="all")
OnBadRow = option(str, BAD_ROW, metavar="stop|skip", default="stop")
Seed = option(int, "Seed of everything random.", default="0")
Overwrite = option(bool, "Replace what other settings made there.", "--overwrite")
ConfigFile = option(str, "YAML file, or the name of a shipped one.", "--config", metavar="FILE")
Overrides = option(list[str], "Any other setting; may be repeated.", "--set", metavar="KEY=VALUE")
Json = option(str, "Write the report to this JSON file.", "--json", metavar="FILE")
