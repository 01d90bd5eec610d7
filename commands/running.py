"""How a command runs: build the configuration, call one recipe, print its report."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import typer

from spectrain.core.failures import one_line_errors

GO_ON = ("prepare", "train", "compare")  # verbs that go on where they were interrupted


def run(
    recipe: str,
    verb: str,
    config_class: str,
    given: Mapping[str, Any],
    section: str | None = None,
) -> None:
    """Run `spectrain.recipes.<recipe>`, print and write its report.

    given: the command's parameters by name; None or empty where a flag was not given. section: of a
    configuration file that is read, the verb's own if there is nothing else to say. A report
    that tells of a `failure` is printed and written all the same; then the command fails with it.
    """
    flags = dict(given)
    file, overrides, json = (flags.pop(name) for name in ("config", "set_", "json"))
    kept = verb == "generate" and flags.get("out") and not flags.get("compare")
    with one_line_errors(goes_on=verb in GO_ON or bool(kept)):
        from spectrain.core.config import load_config
        from spectrain.core.errors import RunFailed
        from spectrain.core.files import require_writable

        if json is not None:
            require_writable(json)  # now, not after hours of work
        module = importlib.import_module(f"spectrain.recipes.{recipe}")
        model = getattr(module, config_class)
        report = module.run(load_config(model, section or verb, file, overrides or [], flags))
        finish(report, json, getattr(module, "render", None))
        if report.get("failure"):
            raise RunFailed(report["failure"])


def finish(
    report: dict[str, Any], json: str | None, render: Callable[[dict[str, Any]], Any] | None = None
) -> None:
    """Print the report the recipe's own way, or plainly, and write it to the --json file."""
    from rich.console import Console

    from spectrain.core.files import write_json
    from spectrain.core.progress import main_process
    from spectrain.core.show import WIDTH, show

    if not main_process():
        return
    shown = (render or show)(report)
    if isinstance(shown, str):
        typer.echo(shown)
    else:
        Console(width=WIDTH, highlight=False).print(shown)
    if json is not None:
        write_json(json, report)


def split(texts: list[str] | None) -> list[str] | None:
    """`--temperature 0,1 --temperature 0.5` → three texts; the configuration makes them numbers."""
    if not texts:
        return None
    return [part.strip() for text in texts for part in text.split(",")]
