"""Which models a tenant sees, by all their names."""

import pytest

from umbel.daemon.config import ModelSettings
from umbel.daemon.http.failures import APIError
from umbel.daemon.models.pool import find, names, visible
from umbel.daemon.models.slot import ModelSlot

ALIASES = {"gpt": "default", "eins": "one", "deux": "two"}


def slots() -> list[ModelSlot]:
    """Two models, the second one with an alias of its own."""
    return [
        ModelSlot("one", ModelSettings(model="/one")),
        ModelSlot("two", ModelSettings(model="/two", aliases=["zwei"])),
    ]


@pytest.mark.parametrize(
    ("allowed", "seen", "default"),
    [
        (None, ["one", "two", "zwei", "gpt", "eins", "deux"], "one"),
        (["one"], ["one", "gpt", "eins"], "one"),
        (["default"], ["one", "gpt", "eins"], "one"),
        (["gpt"], ["one", "gpt", "eins"], "one"),
        (["two"], ["two", "zwei", "gpt", "deux"], "two"),
        (["zwei", "nothing"], ["two", "zwei", "gpt", "deux"], "two"),
        (["two", "one"], ["one", "two", "zwei", "gpt", "eins", "deux"], "one"),
    ],
)
def test_what_is_seen(allowed: list[str] | None, seen: list[str], default: str) -> None:
    """Models are allowed by any of their names; the first is the tenant's default."""
    shown = names(*visible(slots(), ALIASES, allowed))
    assert list(shown) == seen
    assert shown["gpt"].name == default
    for name in (None, "", "default"):
        assert find(*visible(slots(), ALIASES, allowed), name).name == default


@pytest.mark.parametrize("allowed", [[], ["nothing"]])
def test_nothing_is_seen(allowed: list[str]) -> None:
    seen = visible(slots(), ALIASES, allowed)
    assert names(*seen) == {}
    for name in (None, "one", "gpt"):
        with pytest.raises(APIError, match="this tenant may use none") as caught:
            find(*seen, name)
        assert (caught.value.status, caught.value.code) == (404, "model_not_found")
