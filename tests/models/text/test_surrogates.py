r"""Halves of surrogate pairs: the rest of a text stays as it is."""

import json

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from umbel.models.text.json_text import whole_characters

_PIECES = st.sampled_from(
    ["\\ud83d", "\\uDE00", "\\ud83d\\ude00", "\\\\", "\\u0041", "\\n", "ud83d", "a", "\\\\ud83d"]
)


@given(st.lists(_PIECES, max_size=8))
def test_halves_become_replacement_characters(pieces: list[str]) -> None:
    text = f'"{"".join(pieces)}"'.encode()
    mended = whole_characters(text)
    expected = json.loads(text).encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    assert msgspec.json.decode(text if mended is None else mended) == expected
    if mended is None:
        assert msgspec.json.decode(text) == json.loads(text)
