"""Panics of a library in Rust end one request, in words, and are logged and counted."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from umbel.daemon.errors import PanicError, panics_as_errors

from .running import START, eventually, is_ready, spawn


def chat(text: str) -> dict[str, Any]:
    """Make the body of a short chat."""
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 2}


ROUTES: dict[str, Callable[[str], dict[str, Any]]] = {
    "/v1/chat/completions": chat,
    "/v1/messages": chat,
    "/v1/completions": lambda text: {"prompt": text, "max_tokens": 2},
    "/tokenize": lambda text: {"prompt": text},
}


class Panic(BaseException):
    """Like a panic, no `Exception`."""


def test_a_panic_is_an_error() -> None:
    with pytest.raises(PanicError, match="Panic: index out of bounds") as caught:
        fail(Panic("index out of bounds"))
    assert isinstance(caught.value.__cause__, Panic)
    for error in (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit, ValueError):
        with pytest.raises(error):
            fail(error())


def fail(error: BaseException) -> None:
    """Raise an error where panics are looked for."""
    with panics_as_errors():
        raise error


def test_a_tokenizer_that_panics(short_path: Path, tmp_path: Path) -> None:
    """Each route that needs it answers 500, and texts that it can read are answered as before."""
    from ..tiny import tiny_model_dir  # noqa: PLC0415  (it imports mlx.core)

    model = tiny_model_dir(tmp_path / "tiny")
    catastrophic(model / "tokenizer.json")
    bad, good = "a" * 40 + "b", "hello"
    daemon = spawn(short_path, model)
    try:
        eventually(lambda: is_ready(daemon), START)
        for route, body_of in ROUTES.items():
            reply = daemon.post(body_of(bad), route)
            assert reply.status == 500, (route, reply.body)
            assert "its log has the details" in reply.json()["error"]["message"]
            assert daemon.post(body_of(good), route).status == 200
        assert daemon.log().count("PanicError: PanicException: ") == len(ROUTES)
        counted = daemon.request("GET", "/metrics").body.decode()
        assert f'umbel_refusals_total{{reason="internal_error"}} {len(ROUTES)}.0' in counted
    finally:
        assert daemon.terminate() == 0


def catastrophic(path: Path) -> None:
    """Let a tokenizer split its text by a pattern that takes for ever on some."""
    tokenizer = json.loads(path.read_text())
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated"}
    tokenizer["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [{**split, "invert": False}, tokenizer["pre_tokenizer"]],
    }
    path.write_text(json.dumps(tokenizer))
