"""A target whose template prints the time: when the store is made does not matter."""

import shutil
from datetime import date

import pytest
from preparing import content

from spectrain.core.errors import SpectrainError
from spectrain.data.dates import date_printed
from spectrain.data.store import FeatureStore
from spectrain.generator import answering
from spectrain.recipes import inspect, prepare
from spectrain.recipes.prepare import PrepareConfig


@pytest.fixture
def clock(tiny_path, tmp_path):
    """A tiny target whose every prompt tells the time to the microsecond."""
    folder = shutil.copytree(tiny_path, tmp_path / "clock")
    template = folder / "chat_template.jinja"
    template.write_text("{{ strftime_now('%Y-%m-%d %H:%M:%S.%f') }}\n" + template.read_text())
    return str(folder)


def test_a_rerun_asks_and_captures_nothing(config, clock, monkeypatch):
    first = prepare.run(config(target=clock))
    before = content(config().store)
    monkeypatch.setattr(answering, "complete", None)
    monkeypatch.setattr(prepare, "capture", None)
    again = prepare.run(config(target=clock))
    assert content(config().store) == before
    assert again["kept"]["replies"] == sum(first["counts"]["rows"].values()) > 16
    store = FeatureStore.open(config().store)
    assert store.manifest["settings"]["template_date"] == "2026-01-01"


def test_another_date_is_another_store(config, clock):
    """Case 14, and only where the template prints one."""
    prepare.run(config(target=clock, limit=4))
    with pytest.raises(SpectrainError, match=r"template_date = '2026-01-01', now it is '2027-"):
        prepare.run(config(target=clock, limit=4, template_date="2027-03-04"))
    first = prepare.run(config(limit=4, overwrite=True))
    again = prepare.run(config(limit=4, template_date="2027-03-04"))
    assert again["fingerprint"] == first["fingerprint"]
    assert "template_date" not in FeatureStore.open(config().store).manifest["settings"]


def test_inspect_and_the_estimate_use_the_same_date(config, clock, monkeypatch):
    told = config(target=clock, dry_run=True, template_date="2027-03-04")
    settings = {"prompts": told.prompts, "target": clock, "show": 1}
    for more in ({}, {"template_date": "2027-03-04"}):
        (row,) = inspect.run(inspect.InspectConfig(**settings, **more))["rows"]
        text = "".join(part["text"] for part in row["parts"])
        assert text.startswith(more.get("template_date", "2026-01-01") + " 00:00:00.000000")
    monkeypatch.setattr(prepare, "estimate", lambda config, target, *_: date_printed(tokenizer))
    tokenizer = prepare.Target.load(clock).tokenizer
    assert prepare.run(told) == "2027-03-04"


def test_with_a_server_the_date_is_todays():
    """It renders the prompts itself, by its own clock."""
    before = date.today()
    assert before <= PrepareConfig(server="http://localhost:1/v1").day <= date.today()
    fixed = PrepareConfig(server="http://localhost:1/v1", template_date="2027-03-04")
    assert fixed.day == date(2027, 3, 4)


@pytest.mark.parametrize("wrong", ["today", "2026-13-01", "1.1.2026", ""])
def test_a_date_that_is_none_is_refused(wrong):
    with pytest.raises(ValueError, match="is no date: give YYYY-MM-DD"):
        PrepareConfig(template_date=wrong)
