"""A short form of `benchmarks/compiled_steps.py`: steps are compiled in every second run alone."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))  # scripts, and no package

import compiled_steps
import shapes

from umbel.models.load.device import GPU

from .shared import TINY


def test_both_ways_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, and run on the CPU; without the warm-up, which takes longer here."""
    device = replace(GPU, fp32=True, compiles=False, warms_up=False)
    monkeypatch.setattr(shapes, "device_policy", lambda: device)
    monkeypatch.setitem(shapes.SHAPES, "small", TINY)
    monkeypatch.setattr(compiled_steps, "warm_up", lambda *_: None)
    sizes = ["--agents", "3", "--turns", "2", "--shared", "60", "--answer", "16", "--rounds", "1"]
    out = tmp_path / "found.json"
    found = compiled_steps.main(["--shape", "small", *sizes, "--out", str(out)])
    assert [(one.compiled, one.traced > 0) for one in found] == [(True, True), (False, False)]
    for one in found:
        assert 0 < one.gap_ms <= one.slow_gap_ms <= one.longest_gap_ms
        assert one.steps >= 2 * 16
        assert one.wall_s > 0 < one.step_ms
    assert [each["traced"] for each in json.loads(out.read_text())] == [one.traced for one in found]
