"""The soak script finds nothing in a short run, and says what it looked at."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "soak.py"


@pytest.mark.slow
def test_a_short_soak_is_clean():
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, SCRIPT, "--requests", "300", "--seed", "5"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    report = json.loads(done.stdout)
    assert report["wrong"] == 0, report["first_wrong"]
    assert done.returncode == int(report["grows"]) == 0, report["growth"]
    counts = report["counts"]
    assert counts["compared"] > 200
    assert counts["accepted"] > 50
    assert {"ended by stop", "ended by string", "ended by length"} <= counts.keys()
