"""A short form of `benchmarks/attention_plans.py`: the same conversations go both ways."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))  # scripts, and no package

import umbel.models  # noqa: F401  (before mlx.core)

import mlx.core as mx  # isort: skip
import attention_plans
import shapes

from umbel.models.backends import prepare as preparing

from .shared import AS_GPU, TINY


def test_both_ways_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA, and run on the CPU: one way attends in fewer shapes than the other."""
    monkeypatch.setattr(shapes, "choose", lambda: AS_GPU)
    monkeypatch.setitem(shapes.SHAPES, "small", TINY)
    seen: list[set[tuple[int, int]]] = []
    real = mx.fast.scaled_dot_product_attention

    def prepare(model: Any, policy: Any) -> None:
        seen.append(set())
        preparing.prepare(model, policy)

    def attend(queries: mx.array, keys: mx.array, values: mx.array, **more: Any) -> mx.array:
        if seen:
            seen[-1].add((queries.shape[2], keys.shape[2]))
        return real(queries, keys, values, **more)

    monkeypatch.setattr(attention_plans, "prepare", prepare)
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", attend)
    sizes = ["--conversations", "2", "--turns", "2", "--most", "300", "--chunk", "64"]
    out = tmp_path / "found.json"
    found = attention_plans.main(["--shape", "small", *sizes, "--out", str(out)])
    assert [one.few for one in found] == [True, False]
    assert 0 < len(seen[0]) < len(seen[1])
    for one in found:
        assert min(one.wall_s, one.chunk_ms, one.first_ms, one.last_ms) > 0
    assert [each["wall_s"] for each in json.loads(out.read_text())] == [o.wall_s for o in found]
