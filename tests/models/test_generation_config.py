"""What a model's files say of how tokens are chosen."""

import json
from pathlib import Path
from typing import Any

import pytest

from umbel.models.load.tokenizer import sampling_defaults


@pytest.mark.parametrize(
    ("told", "found"),
    [
        (
            {"temperature": 0.7, "top_p": 0.8, "top_k": 20},
            {"temperature": 0.7, "top_p": 0.8, "top_k": 20},
        ),
        (
            {"do_sample": True, "min_p": 0.05, "repetition_penalty": 1.05},
            {"min_p": 0.05, "repetition_penalty": 1.05},
        ),
        ({"do_sample": False, "temperature": 0.7}, {}),
        ({"temperature": None, "top_p": 0.9, "eos_token_id": [1, 2]}, {"top_p": 0.9}),
        ({"temperature": 3, "top_p": "0.9", "top_k": -1, "min_p": True}, {}),
        ([1, 2], {}),
    ],
)
def test_what_is_told_is_found(tmp_path: Path, told: Any, found: dict[str, float]) -> None:
    """As far as it is of use."""
    (tmp_path / "generation_config.json").write_text(json.dumps(told))
    assert sampling_defaults(tmp_path) == found


@pytest.mark.parametrize("text", [None, "", "{", "\xff"])
def test_a_file_of_no_use_says_nothing(tmp_path: Path, text: str | None) -> None:
    """Nor does one that is not there, or a model that is one file."""
    file = tmp_path / "generation_config.json"
    if text is not None:
        file.write_bytes(text.encode("latin-1"))
    assert sampling_defaults(tmp_path) == {}
    assert sampling_defaults(file) == {}
