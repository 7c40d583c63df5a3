"""State of another form than the model's is refused as it is read, and never restored."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import umbel.models  # noqa: F401  (before mlx.core)

import mlx.core as mx  # isort: skip
import pytest

from umbel.models.errors import StoredStateError
from umbel.models.kv.disk_format import DiskCodec, Exported, HostArray

from .. import zoo
from ..scenario.bench import Ask, Bench, words
from .test_stored import Stored, write

_QUICK = ("llama", "gemma3_text")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=() if n in _QUICK or n in zoo.TWINS else pytest.mark.slow)
        for n in zoo.NAMES
    ],
)
def test_state_of_the_model_has_its_form(name: str) -> None:
    """Of short and long prompts and answers, computed alone or in company, cut and joined."""
    bench = Bench(name, budget=1 << 30)
    form = bench.runner.state_form()
    system = words(80, "system")
    bench.run_together([Ask(system, 3)])
    bench.run_together([Ask([*system, *words(3 + 9 * n, str(n))], 40) for n in range(4)])
    bench.run_together([Ask([*system, *words(3, "0"), *words(7, "again")], 3)])
    seen = 0
    for trie in bench.cache.tries:
        for node in trie.nodes():
            stored: Any = node
            if stored.span is not None:
                form.check_span(stored.span)
                seen += 1
            if stored.checkpoint is not None:
                form.check_checkpoint(stored.checkpoint)
                seen += 1
    assert seen > 4


def _arrays(change: Callable[[HostArray], HostArray]) -> Callable[[Exported], Exported]:
    def changed(exported: Exported) -> Exported:
        return exported._replace(tensors={n: change(t) for n, t in exported.tensors.items()})

    return changed


def _reshaped(shape: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Callable[..., Exported]:
    return _arrays(lambda array: array._replace(shape=shape(array.shape)))


def _other_type(array: HostArray) -> HostArray:
    return array._replace(dtype="I32")


def _places(change: Callable[[Any], Any]) -> Callable[[Exported], Exported]:
    def changed(exported: Exported) -> Exported:
        places = change(json.loads(exported.metadata["places"]))
        return exported._replace(metadata={**exported.metadata, "places": json.dumps(places)})

    return changed


def _records(**fields: Any) -> Callable[[Exported], Exported]:
    def changed(exported: Exported) -> Exported:
        records = [record | fields for record in json.loads(exported.metadata["records"])]
        return exported._replace(metadata={**exported.metadata, "records": json.dumps(records)})

    return changed


OF_BOTH: dict[str, Callable[[Exported], Exported]] = {
    "heads": _reshaped(lambda s: (s[0], s[1] * 2, *s[2:-1], s[-1] // 2)),
    "type": _arrays(_other_type),
    "no places": _places(lambda _: []),
    "one layer less": _places(lambda places: places[1:]),
    "array that is not there": _places(lambda places: [[[99, 0]] * len(p) for p in places]),
    "row before the first": _places(lambda places: [[[n, -1] for n, _ in p] for p in places]),
    "row after the last": _places(lambda places: [[[n, 999] for n, _ in p] for p in places]),
    "no arrays": lambda exported: exported._replace(tensors={}),
}
OF_SPANS: dict[str, Callable[[Exported], Exported]] = {
    "size": _reshaped(lambda s: (s[0], s[1] // 2 or 1, s[2], s[3] * 2)),
    **OF_BOTH,
}
OF_CHECKPOINTS: dict[str, Callable[[Exported], Exported]] = {
    "other offset": _records(offset=3),
    "other kind": _records(kind="Chunk", chunk_size=8, start=0),
    "no records": lambda e: e._replace(metadata={**e.metadata, "records": "[]"}),
    **OF_BOTH,
}


@pytest.mark.parametrize("change", OF_SPANS)
def test_span_of_another_form_is_refused(change: str, tmp_path: Path) -> None:
    """The file is what was written, by its checksum, and not this model's state."""
    state = Stored("llama", mx.float32)
    assert state.span is not None
    codec = DiskCodec(host_reads=True, form=Bench("llama").runner.state_form())
    exported = codec.export_span(state.span, 0, 30)
    assert codec.load_span([(write(tmp_path, "s.safetensors", exported), 0, 30)]).length == 30
    path = write(tmp_path, "x.safetensors", OF_SPANS[change](exported))
    with pytest.raises((StoredStateError, IndexError)):
        codec.load_span([(path, 0, 30)])


@pytest.mark.parametrize("name", ["gemma3_text", "qwen3_next", "llama4"])
@pytest.mark.parametrize("change", OF_CHECKPOINTS)
def test_whole_state_of_another_form_is_refused(name: str, change: str, tmp_path: Path) -> None:
    """So is one that is not the state of its offset."""
    state = Stored(name, mx.float32)
    assert state.checkpoint is not None
    codec = DiskCodec(host_reads=True, form=Bench(name).runner.state_form())
    exported = codec.export_checkpoint(state.checkpoint)
    path = write(tmp_path, "c.safetensors", exported)
    assert codec.load_checkpoint(path).offset == state.checkpoint.offset
    path = write(tmp_path, "x.safetensors", OF_CHECKPOINTS[change](exported))
    with pytest.raises(StoredStateError):
        codec.load_checkpoint(path)
