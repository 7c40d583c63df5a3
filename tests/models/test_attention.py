"""Attention over segments equals attention over one piece."""

import umbel.models  # noqa: F401  (before mlx.core)

import mlx.core as mx  # isort: skip
import pytest
from mlx_lm.models.cache import KVCache, make_prompt_cache

from umbel.models.attention import binding as module
from umbel.models.attention.binding import over_segments
from umbel.models.backends import choose
from umbel.models.backends.base import METAL, Backend
from umbel.models.backends.prepare import prepare
from umbel.models.kv.token_layer import TokenLayerCache

from .. import zoo


def random_segments(lengths: list[int], kv_heads: int) -> list[tuple[mx.array, mx.array]]:
    """Keys of size 16 and values of size 24 for each length."""
    return [
        (mx.random.normal((1, kv_heads, n, 16)), mx.random.normal((1, kv_heads, n, 24)))
        for n in lengths
    ]


HERE = choose()


@pytest.mark.parametrize("device", [HERE, METAL], ids=["here", "gpu"])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("lengths", [[1], [7, 1], [100, 3, 40, 1]])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 2), (6, 1)])
def test_over_segments(
    heads: int, kv_heads: int, lengths: list[int], device: Backend, *, sinks: bool
) -> None:
    """Multi-head, grouped and multi-query attention, with and without sinks."""
    mx.random.seed(1)
    segments = random_segments(lengths, kv_heads)
    queries = mx.random.normal((1, heads, 1, 16))
    extra = mx.random.normal((heads,)) if sinks else None
    keys, values = (mx.concatenate(list(part), axis=2) for part in zip(*segments, strict=True))
    expected = _reference(queries, keys, values, 0.3, extra)
    result = over_segments(queries, segments, 0.3, extra, device)
    assert result.shape == expected.shape
    assert mx.allclose(result, expected, rtol=0, atol=1e-5)


def _reference(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, sinks: mx.array | None
) -> mx.array:
    """Plain attention, one head at a time."""
    outputs = []
    group = queries.shape[1] // keys.shape[1]
    for head in range(queries.shape[1]):
        scores = (queries[0, head] @ keys[0, head // group].T) * scale
        if sinks is not None:
            scores = mx.concatenate([sinks[head].reshape(1, 1), scores], axis=1)
        shares = mx.softmax(scores, axis=-1)
        outputs.append(shares[:, int(sinks is not None) :] @ values[0, head // group])
    return mx.stack(outputs)[None]


def test_prefix_is_read_where_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token that decodes over a prefix never has prefix and suffix joined."""
    model = zoo.make("llama")
    prepare(model, HERE)
    calls: list[int] = []
    real = module.over_segments

    def spy(*args: object) -> mx.array:
        calls.append(1)
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "over_segments", spy)
    prefix = random_prefix(model)
    caches = [TokenLayerCache(KVCache(), [segment]) for segment in prefix]
    mx.eval(model(mx.array([[1]]), cache=caches))
    assert len(calls) == len(caches)
    mx.eval(model(mx.array([[2, 3]]), cache=caches))
    assert len(calls) == len(caches), "several tokens attend through mlx-lm's own function"


def random_prefix(model: object) -> list[tuple[mx.array, mx.array]]:
    """Keys and values of each layer after a prefill of 20 tokens."""
    caches = make_prompt_cache(model)
    model(mx.array([list(range(20))]), cache=caches)  # type: ignore[operator]
    return [cache.keys_and_values() for cache in caches]


def test_writes_stay_in_place() -> None:
    """The hook lets go of what it was given, so that a decode step copies no tail."""
    model = zoo.make("llama")
    prepare(model, HERE)
    caches = [TokenLayerCache(KVCache(), [segment]) for segment in random_prefix(model)]
    tail = 200
    mx.eval(model(mx.array([[5] * tail]), cache=caches), [c.state for c in caches])
    held = sum(cache.suffix.nbytes for cache in caches)
    for _ in range(3):
        mx.eval(model(mx.array([[6]]), cache=caches), [c.state for c in caches])
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(model(mx.array([[7]]), cache=caches), [c.state for c in caches])
    assert mx.get_peak_memory() - before < held / 2
