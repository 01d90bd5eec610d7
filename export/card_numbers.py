"""The numbers on the page of a head: acceptance as it was measured, speed as it was predicted, each
with its definition, rule, temperature and counts.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from spectrain.export.markdown import code, listed, plain, table
from spectrain.export.measured import AtTemperature, Heldout, Interval, Known, Numbers
from spectrain.generator.saved_plan import Choice, SavedPlan


def acceptance(known: Known, target: str) -> Iterator[str]:
    """target: what our own commands call it."""
    if known.alpha is None and known.heldout is None:
        yield "Not measured. To measure it:"
        yield code(
            f"spectrain eval-alpha --target {shlex.quote(target)} --store STORE --head RUN "
            "--temperature 0,1 --json RUN/eval-alpha.json",
            "bash",
        )
        return
    if known.alpha is None:
        yield from _on_the_way(known.heldout)
        return
    rows = "held-out" if known.alpha.split == "heldout" else "training"
    for one in known.alpha.temperatures:
        yield f"### Temperature {one.temperature:g}"
        yield from _numbers(one, rows)
    yield "What the words mean:"
    left_out = ("ranks (in --json)",)
    words = {n: text for n, text in known.alpha.definitions.items() if n not in left_out}
    yield listed(({"tau": "τ"}.get(name, name), text) for name, text in words.items())


def _numbers(one: AtTemperature, rows: str) -> Iterator[str]:
    rule = "greedy" if one.temperature == 0 else "lossless sampling of a drawn chain"
    yield (
        f"Rule: {rule}. {one.conversations:,} {rows} conversations, {one.tokens:,} reply tokens."
    )
    if one.note:
        yield f"Note: {plain(one.note)}."
    yield table(
        ("draft position", "α, conditional", "95 %", "α, marginal", "95 %", "reached", "anchors"),
        (
            (
                f"{row.position}",
                *valued(row.conditional, 3),
                *valued(row.marginal, 3),
                f"{row.reached:,.0f}",
                f"{row.anchors:,}",
            )
            for row in one.positions
        ),
    )
    yield table(
        ("draft length γ", "τ, tokens per target forward", "95 %", "target forwards"),
        ((f"{row.draft}", *valued(row, 3), f"{row.forwards:,.0f}") for row in one.tau),
    )
    if len(one.domains) > 1:
        yield table(
            (
                "domain",
                "conversations",
                "tokens",
                "α at position 1",
                f"τ at γ = {one.tau[-1].draft}",
            ),
            (_domain(name, numbers) for name, numbers in one.domains.items()),
        )


def _domain(name: str, one: Numbers) -> tuple[str, ...]:
    first, last = one.positions[0].marginal, one.tau[-1]
    told = (valued(value, 2) for value in (first, last))
    alpha, tau = (f"{value} ({interval})" if interval else value for value, interval in told)
    return name, f"{one.conversations:,}", f"{one.tokens:,}", alpha, tau


def valued(one: Interval, digits: int) -> tuple[str, str]:
    """The value and its interval."""
    value = "–" if one.value is None else f"{one.value:.{digits}f}"
    known = one.low is not None and one.high is not None
    return value, f"{one.low:.{digits}f}–{one.high:.{digits}f}" if known else ""


def _on_the_way(found: Heldout) -> Iterator[str]:
    """What the training itself measured."""
    tau = "–" if found.tau is None else f"{found.tau:.3f}"
    yield (
        f"Measured by the training itself, of these weights (step {found.step:,}), on "
        f"{found.rows:,} held-out conversations, {found.tokens:,} reply tokens; temperature 0, "
        "rule greedy, no intervals. "
        f"τ = {tau} tokens per target forward, the target's own included, at a draft of "
        f"{found.draft}."
    )
    yield table(
        ("draft position", "α, conditional", "α, marginal"),
        (
            (str(k), *("–" if v is None else f"{v:.3f}" for v in pair))
            for k, pair in enumerate(zip(found.conditional, found.marginal, strict=True), 1)
        ),
    )


def speed(plan: SavedPlan | None) -> str:
    if plan is None:
        return (
            "Not measured. `spectrain plan` measures the costs and predicts it, "
            "`spectrain generate --compare` measures it."
        )
    lines = [
        "Predicted by `spectrain plan` from acceptance at temperature 0 and times measured with "
        f"spectrain on {plain(plan.device)}, {plan.threads} threads, {plain(plan.dtype)}. The "
        "baseline is plain decoding with spectrain: the same kernels, without a head. Other "
        "engines and machines: not measured.",
        table(
            ("batch", "drafted a step", "× plain decoding"),
            ((n, _drafted(one), f"{one.speedup:.2f}") for n, one in plan.choices.items()),
        ),
    ]
    return "\n\n".join(lines)


def _drafted(choice: Choice) -> str:
    tree = choice.tree
    if tree is None or not tree.nodes:
        return "nothing: plain decoding is faster"
    if tree.is_chain:
        return f"chain of {tree.nodes}"
    return f"tree of {tree.nodes} nodes, depth {tree.depth}"
