"""trainer/estimate.py: steps are cut as the loop cuts them, memory and work follow from shapes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from work_kinds import KINDS, batch_of, counted, head_of, target_of

from spectrain.core import fast_linear
from spectrain.core.outline import outline_of
from spectrain.heads import work as works
from spectrain.heads.registry import family
from spectrain.heads.work import Attention, Product, Shape, Work, trained
from spectrain.trainer import estimate, optim, order, speeds
from spectrain.trainer.ema import Ema
from spectrain.trainer.optim import head_tables
from spectrain.trainer.settings import TrainerSettings
from spectrain.trainer.speeds import Speeds
from spectrain.trainer.trunk import JointHead

SIZES = (128, 320, 4, 2, 32, 2000)


def outlined(shapes, kind="medusa", **options):
    made = family(kind)
    return made.outline(made.Options(**options), shapes)


# ── a trunk ──────────────────────────────────────────────────────────────────

TRUNKS = {
    "full": ({"mode": "full"}, "medusa", False),
    "on text": ({"mode": "full", "loss": "text"}, "mtp-sequential", False),
    "lora": ({"mode": "lora"}, "medusa", False),
    "resting": ({"mode": "lora"}, "medusa", True),
}


@pytest.mark.parametrize("name", TRUNKS)
def test_a_trunk_takes_what_is_told(name):
    """The products exactly, but for attention's scores, made anew in its backward pass (7 products
    where 6 are told), and the first layer of an adapted or resting trunk, which reads embeddings
    that ask for no gradient: at most one of a few layers. The rest as in tests/heads/test_work.py.
    """
    trunk, kind, resting = TRUNKS[name]
    target = target_of(SIZES)
    settings = TrainerSettings(trunk=trunk).trunk
    shapes = outline_of(target.model.config, "shapes")
    told = JointHead(outlined(shapes, kind, **KINDS[kind][1]), shapes, settings)
    joint = JointHead(head_of(target, kind), target, settings).train()
    batch = batch_of(target, joint, 3, 256, 0.6)
    for key, value in joint.named_parameters():
        if resting and key.startswith("trunk."):
            value.requires_grad_(False)
    scale = torch.ones(len(joint.weights(0)))
    joint(batch, scale).total.backward()
    joint.zero_grad(set_to_none=True)
    with counted() as counter:
        joint(batch, scale).total.backward()
        shape = Shape.of_reply(batch.reply)
        work = told.resting_work(shape) if resting else told.work(shape)
    scores = sum(w.flops for w in work.products if isinstance(w, Attention) and w.passes == 3) / 6
    flops = sum(work.flops.values()) + scores
    assert counter.flops == pytest.approx(flops, rel=1e-9 if name in ("full", "on text") else 0.03)
    assert work.numbers + work.scored + work.streamed == pytest.approx(counter.numbers, rel=1 / 3)
    peak = 4 * (work.kept + work.moment + work.early)
    assert peak == pytest.approx(counter.peak, rel=1 / 4)


def test_a_trunk_has_its_parameters_without_weights():
    target = target_of(SIZES)
    settings = TrainerSettings(trunk={"mode": "lora"}).trunk
    shapes = outline_of(target.model.config, "shapes")
    told = JointHead(outlined(shapes), shapes, settings)
    real = JointHead(head_of(target, "medusa without blocks"), target, settings)
    own = {k: v.shape for k, v in real.named_parameters() if k.startswith("trunk.")}
    assert own == {k: v.shape for k, v in told.named_parameters() if k.startswith("trunk.")}


# ── steps ────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("pack", [0, 90])
@pytest.mark.parametrize("world", [1, 2])
def test_steps_are_cut_as_the_loop_cuts_them(pack, world):
    """The first one is step 0 of the loop, and the last holds the longest conversations."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(8, 60, (40,), generator=generator).tolist()
    settings = TrainerSettings(batch_size=8, micro_batch=2, pack_length=pack, seed=3)
    steps = estimate.steps_of([(n, n // 2) for n in tokens], settings, world, "cpu")
    chosen = order.Order(tokens, 8, 3).batch(0)
    parts = order.share(chosen, tokens, 0, world, 2, pack)
    assert [(shape.rows, shape.length) for shape in steps[0].shapes] == [
        (len(part), max(sum(tokens[i] for i in row) for row in part)) for part in parts
    ]
    assert sum(n for n, _ in steps[0].lengths) == sum(tokens[i] for i in chosen[::world]) or pack
    longest = sorted(tokens)[-8:]
    assert max(n for n, _ in steps[-1].lengths) in longest
    most = max(shape.tokens for step in steps for shape in step.shapes)
    assert max(shape.tokens for shape in steps[-1].shapes) == most or pack


def test_more_micro_batches_are_the_same_products_and_less_memory():
    """What is learnt from does not change, only how it is cut (rows are all of one length)."""
    head = outlined(outline_of(target_of(SIZES).model.config, "shapes"))
    lengths = [(64, 40)] * 16
    found = []
    for size in (8, 2):
        settings = TrainerSettings(batch_size=8, micro_batch=size)
        steps = estimate.steps_of(lengths, settings, 1, "cpu")
        memory = estimate.memory_of(head, steps, settings)
        found.append((sum(estimate.step_work(head, steps[0], settings).flops.values()), memory))
    (whole, more), (parts, less) = found
    assert whole == pytest.approx(parts)
    assert less.step < more.step
    assert less.batch * 4 == more.batch
    fixed = ("parameters", "shared", "gradients", "optimizer")
    assert all(getattr(less, name) == getattr(more, name) for name in fixed)


# ── memory ───────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["eagle1", "eagle3"])
@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("ema", [None, 0.9])
def test_the_optimiser_holds_what_is_told(kind, name, ema):
    """Tables and vectors are adamw's under muon, too; the running mean is told with it."""
    target = target_of(SIZES)
    head = head_of(target, name)
    settings = TrainerSettings(optimizer=kind, ema=ema)
    parts = optim.build(head, settings, head_tables(head))
    for value in head.parameters():
        value.grad = torch.zeros_like(value)
    for part in parts.values():
        part.optimizer.step()
    states = [
        value
        for part in parts.values()
        for memory in part.optimizer.state.values()
        for value in memory.values()
        if torch.is_tensor(value) and value.ndim
    ]
    states += Ema(head, ema).means.values()
    steps = estimate.steps_of([(32, 16)] * 8, settings, 1, "cpu")
    memory = estimate.memory_of(head, steps, settings)
    assert memory.optimizer == pytest.approx(estimate.bytes_of(states), rel=0.01)
    assert memory.gradients == 4 * trained(head)
    assert memory.parameters == estimate.bytes_of(head.parameters())
    assert memory.peak - memory.beyond == memory.parameters + memory.shared


def test_a_shortage_is_told_in_one_line(monkeypatch):
    head = head_of(target_of(SIZES), "medusa")
    rows, settings = [(64, 40)] * 8, TrainerSettings()
    place = "cpu"
    monkeypatch.setattr(estimate, "free_memory", lambda device: 1 << 50)
    assert estimate.shortage(head, rows, settings, 1, torch.device(place)) is None
    monkeypatch.setattr(estimate, "free_memory", lambda device: 1 << 20)
    told = estimate.shortage(head, rows, settings, 1, torch.device(place))
    assert told.startswith("note: a step will need about")
    assert "\n" not in told


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_layouts_are_held_in_float32_alone(monkeypatch, precision):
    """Products of short numbers are torch's own (core/fast_linear.py): nothing is laid out."""
    head = head_of(target_of(SIZES), "eagle3")
    settings = TrainerSettings(mixed_precision=precision)
    steps = estimate.steps_of([(256, 128)] * 8, settings, 1, "cpu")
    found = {}
    for laid in (True, False):
        monkeypatch.setattr(works, "preferred", lambda laid=laid: laid)
        shape = steps[0].shapes[0]
        one = head.work(shape)
        rest = one.kept + one.moment
        found[laid] = estimate.memory_of(head, steps, settings).step, one.laid, rest
    (more, layouts, rest), (less, none, other) = found[True], found[False]
    assert none == 0 < layouts
    size = {"no": 4, "bf16": 3}[precision]
    held = 4 * layouts if precision == "no" else 0
    assert more - less == pytest.approx(held + size * (rest - other))


# ── time ─────────────────────────────────────────────────────────────────────


def test_seconds_follow_the_work():
    """Twice the rows in twice the calls take twice as long: speeds are measured once a shape. A
    clock that counts calls stands in for time: what is measured takes 1 of it."""
    ticks = iter(range(1_000_000))
    speeds = Speeds("cpu", clock=lambda: float(next(ticks)))
    one = Work((Product("a", 32, 16, 8),), numbers=100.0, scored=10.0)
    two = Work((Product("a", 64, 16, 8, calls=2),), numbers=200.0, scored=20.0)
    first = speeds.by_part(one)
    assert set(first) == {"a", "elementwise"}
    used = next(ticks)
    assert speeds.seconds(two) == pytest.approx(2 * speeds.seconds(one))
    assert next(ticks) == used + 1, "nothing was measured again"
    assert speeds._product(32, 16, 8, 3) == Product("a", 32, 16, 8).flops


def test_a_weight_that_is_laid_out_once_is_measured_so(monkeypatch):
    """What many calls share is made once, before the measurement; what each call makes is a part
    of it, for the way there and for the way back."""
    made = []
    for name, stand_in in {
        "preferred": lambda: True,
        "_pack": lambda right: made.append(right) or right,
        "_multiply": lambda left, packed, bias=None: F.linear(left, packed, bias),
    }.items():
        monkeypatch.setattr(fast_linear, name, stand_in)
    found = {}
    for laid in (True, False):
        made.clear()
        Speeds("cpu").seconds(Work((Product("a", 128, 16, 8, passes=2, laid=laid),)))
        found[laid] = len(made)
    assert found == {True: 2, False: 2 * (1 + speeds._TIMES)}


def test_every_kind_of_product_is_measured():
    speeds = Speeds("cpu")
    work = Work(
        (
            *(Product(f"product {n}", 16, 8, 8, n) for n in (1, 2, 3)),
            Attention(100, 4, 2, 8, 8, 16, part="library"),
            Attention(100, 4, 2, 8, 8, 16, own=True, part="own"),
        ),
        numbers=10.0,
    )
    found = speeds.by_part(work)
    assert len(found) == 6
    assert all(0 < seconds < 1 for seconds in found.values())
