"""Measurements are taken once and kept."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from umbel.models.backends.base import METAL, Backend
from umbel.models.backends.cpu import CPU
from umbel.models.kv.layout import CacheLayout
from umbel.models.load import memory_probe
from umbel.models.load.measured import Figures, key_of, measured_once
from umbel.models.memory_profile import Transients
from umbel.models.runner import ModelRunner

from .. import zoo

NAMES = {"a", "b"}
ONE, TWO = {"a": 1, "b": 2.5}, {"a": 3, "b": 4}


def counting(*figures: Figures) -> tuple[list[Figures], Callable[[], Figures]]:
    left, taken = list(figures), []

    def measure() -> Figures:
        taken.append(left.pop(0))
        return taken[-1]

    return taken, measure


def test_the_first_figures_stay(tmp_path: Path) -> None:
    taken, measure = counting(ONE, TWO)
    folder = tmp_path / "new" / "folder"
    assert measured_once(folder, "key", NAMES, measure) == ONE
    assert measured_once(folder, "key", NAMES, measure) == ONE
    assert len(taken) == 1
    assert measured_once(folder, "other", NAMES, measure) == TWO
    assert sorted(path.name for path in folder.iterdir()) == ["key.json", "other.json"]


def test_first_process_measures_for_all(tmp_path: Path) -> None:
    def slowly() -> Figures:
        measured_once(tmp_path, "key", NAMES, lambda: ONE)
        return TWO

    assert measured_once(tmp_path, "key", NAMES, slowly) == ONE


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "{}", "\x00", '{"a": 1}', '{"a": 1, "b": 1, "c": 1}'),
        *('{"a": 1, "b": -1}', '{"a": 1, "b": NaN}', '{"a": 1, "b": "1"}', '{"a": 1, "b": true}'),
    ],
)
def test_invalid_file_is_replaced(tmp_path: Path, text: str) -> None:
    (tmp_path / "key.json").write_text(text)
    assert measured_once(tmp_path, "key", NAMES, lambda: ONE) == ONE
    assert json.loads((tmp_path / "key.json").read_text()) == ONE


def test_unusable_folder_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert measured_once(tmp_path / "file", "key", NAMES, lambda: ONE) == ONE


def test_keys_differ_by_each_fact() -> None:
    keys = {
        key_of("a", CPU, True),
        key_of("b", CPU, True),
        key_of("a", METAL, True),
        key_of("a", CPU),
    }
    assert len(keys) == 4
    assert key_of("a", CPU, True) in keys


def started(
    net: Any, folder: Path, *, fingerprint: str = "a", device: Backend = CPU, **more: Any
) -> ModelRunner:
    text = SimpleNamespace(vocab_size=zoo.VOCAB_SIZE)
    loaded = SimpleNamespace(
        model=net, layout=CacheLayout(net), text=text, backend=device, fingerprint=fingerprint
    )
    return ModelRunner(cast("Any", loaded), measured=folder, **more)


def test_every_start_promises_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = zoo.make("llama")
    measured: list[Transients] = []

    def noisy(*_: Any, **__: Any) -> Transients:
        base = 1e5 + 7e4 * (len(measured) % 4)
        peaks = tuple(base + 150 * tokens for tokens in (33, 128, 256, 512))
        measured.append(Transients((33, 128, 256, 512), peaks, peaks, 1024))
        return measured[-1]

    monkeypatch.setattr(memory_probe, "measure_transients", noisy)

    def start(fingerprint: str) -> ModelRunner:
        return started(net, tmp_path, fingerprint=fingerprint)

    first, second = start("a"), start("a")
    assert len(measured) == 1
    lengths = {runner.profile.longest_context(8 << 20) for runner in (first, second)}
    assert len(lengths) == 1
    start("b")
    assert len(measured) == 2


class StoppedError(Exception):
    """The daemon is stopped."""


def test_stop_does_not_wait_for_the_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_probe, "_TIMES", 2)  # or else as often as their peaks differ
    net = zoo.make("llama")
    calls = 0

    def start(folder: Path, last: float) -> ModelRunner:
        nonlocal calls
        calls = 0

        def go_on() -> None:
            nonlocal calls
            calls += 1
            if calls == last + 1:
                raise StoppedError

        return started(net, folder, go_on=go_on)

    whole = start(tmp_path / "whole", math.inf)
    files = {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}
    (probed,) = (name for name, text in files.items() if b"batches" in text)
    assert len(files) == 2
    every = calls
    for last in (*range(30), every // 2, every - 1):  # the first ones try out batches
        folder = tmp_path / str(last)
        with pytest.raises(StoppedError):
            start(folder, last)
        assert calls == last + 1
        kept = {path.name: path.read_bytes() for path in folder.glob("*")}
        assert kept in ({}, {probed: files[probed]})
        if last > 30 or kept:
            assert start(folder, math.inf).rules == whole.rules
            assert {path.name for path in folder.iterdir()} == set(files)
