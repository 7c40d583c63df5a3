"""A short form of `benchmarks/paging.py`: each way writes the same."""

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))  # scripts, and no package

from paging import main


def test_each_way_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one run, on a folder of its own that is gone afterwards."""
    sizes = ["--agents", "2", "--turns", "2", "--tokens", "300", "--layers", "2", "--heads", "2"]
    monkeypatch.setattr(sys, "argv", ["paging.py", *sizes, "--folder", str(tmp_path)])
    main()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    ways = {line["way"]: line for line in map(json.loads, lines)}
    assert {"at once", "apart"} <= ways.keys()
    assert len({way["mib"] for way in ways.values()}) == 1
    for way in ways.values():
        assert way["paging_ms_per_gib"] >= way["thread_ms_per_gib"] * 0.9 > 0
        assert 0 < way["share_of_engine"] < 1
    assert list(tmp_path.iterdir()) == []
