"""`/tokenize` and `/detokenize`, and the small routes around them."""

from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import pytest

from .fixtures import TINY_CONTEXT
from .running import RunningDaemon

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "héllo 👩 世"}]
BEYOND = 65_536


def test_version(tiny_daemon: RunningDaemon) -> None:
    """The version that is installed."""
    assert tiny_daemon.request("GET", "/version").json() == {"version": version("umbel")}


def test_ready_has_two_names(tiny_daemon: RunningDaemon) -> None:
    """Some probes ask below /health."""
    for route in ("/ready", "/health/ready"):
        reply = tiny_daemon.request("GET", route)
        assert (reply.status, reply.json()) == (200, {"status": "ready"})


def test_text_there_and_back(tiny_daemon: RunningDaemon) -> None:
    """A text's tokens write the text; their number and the context's length stand beside them."""
    text = "the agent reads\n\tthe plan 👩 世界 é <|im_end|> 1234 \\u0000"
    answer = tiny_daemon.post({"prompt": text}, "/tokenize").json()
    assert answer["count"] == len(answer["tokens"]) > 10
    assert answer["max_model_len"] == TINY_CONTEXT
    back = tiny_daemon.post({"tokens": answer["tokens"]}, "/detokenize").json()
    assert back == {"prompt": text}


def test_tokens_are_those_of_completions(tiny_daemon: RunningDaemon) -> None:
    counted = tiny_daemon.post({"messages": MESSAGES}, "/tokenize").json()["count"]
    chat = tiny_daemon.post({"messages": MESSAGES, "max_tokens": 1}).json()
    assert chat["usage"]["prompt_tokens"] == counted
    counted = tiny_daemon.post({"prompt": "hello"}, "/tokenize").json()["count"]
    text = tiny_daemon.post({"prompt": "hello", "max_tokens": 1}, "/v1/completions").json()
    assert text["usage"]["prompt_tokens"] == counted


def test_special_tokens(smollm2_daemon: RunningDaemon) -> None:
    """SmolLM2's template writes its own marks, and they are tokens of their own."""
    answer = smollm2_daemon.post({"messages": MESSAGES}, "/tokenize").json()
    written = smollm2_daemon.post({"tokens": answer["tokens"]}, "/detokenize").json()["prompt"]
    assert written.startswith("<|im_start|>system\nBe brief.<|im_end|>\n")
    assert written.endswith("<|im_end|>\n<|im_start|>assistant\n")
    plain = smollm2_daemon.post({"prompt": written, "add_special_tokens": False}, "/tokenize")
    assert plain.json()["tokens"] == answer["tokens"]


def test_nothing_is_no_error(tiny_daemon: RunningDaemon) -> None:
    """An empty text has no tokens, and no tokens write an empty text."""
    assert tiny_daemon.post({"prompt": ""}, "/tokenize").json()["tokens"] == []
    assert tiny_daemon.post({"tokens": []}, "/detokenize").json() == {"prompt": ""}


def test_beyond_the_context(tiny_daemon: RunningDaemon) -> None:
    """A prompt that is too long is still counted, up to a bound."""
    most = TINY_CONTEXT + BEYOND
    reply = tiny_daemon.post({"tokens": [5] * most}, "/detokenize")
    assert reply.status == 200
    too_many = tiny_daemon.post({"tokens": [5] * (most + 1)}, "/detokenize")
    assert (too_many.status, too_many.json()["error"]["param"]) == (400, "tokens")
    counted = tiny_daemon.post({"prompt": "\U0001f479" * 10_000}, "/tokenize").json()["count"]
    assert TINY_CONTEXT < counted <= most
    reply = tiny_daemon.post({"prompt": "\U0001f479" * 40_000}, "/tokenize")
    assert (reply.status, reply.json()["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize(
    ("route", "body", "status", "words"),
    [
        ("/tokenize", {}, 400, "send either prompt or messages"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, 400, "send either prompt or messages"),
        ("/tokenize", {"prompt": 5}, 400, "prompt: Expected `str`, got `int`"),
        ("/tokenize", {"prompt": ["a"]}, 400, "prompt: Expected `str`, got `array`"),
        ("/tokenize", {"prompt": "a", "model": "x"}, 404, "there is no model 'x'"),
        ("/tokenize", {"messages": []}, 400, "messages: Expected `array` of length >= 1"),
        ("/tokenize", {"messages": [{}]}, 400, "messages[0]: Object missing required field"),
        ("/tokenize", {"messages": MESSAGES, "tools": [{"type": "x"}]}, 400, "send functions only"),
        ("/tokenize", {"prompt": "a", "return_token_strs": True}, 400, "return_token_strs"),
        ("/tokenize", {"messages": MESSAGES, "add_special_tokens": True}, 400, "template writes"),
        ("/tokenize", {"messages": MESSAGES, "add_generation_prompt": False}, 400, "not supported"),
        ("/tokenize", {"messages": MESSAGES, "continue_final_message": True}, 400, "leave it out"),
        ("/tokenize", {"prompt": "x" * (9 << 20)}, 413, "prompt has over 8 MiB"),
        ("/tokenize", {"prompt": "word " * 1_000_000}, 400, "maximum context length is 8192"),
        ("/detokenize", {}, 400, "missing required field `tokens`"),
        ("/detokenize", {"tokens": "a"}, 400, "tokens: Expected `array`, got `str`"),
        ("/detokenize", {"tokens": [1.5]}, 400, "Expected `int`, got `float`"),
        ("/detokenize", {"tokens": [1, 384]}, 400, "token 384 does not exist; there are 0 to 383"),
        ("/detokenize", {"tokens": [-1]}, 400, "token -1 does not exist"),
        ("/detokenize", {"tokens": [10**30]}, 400, "does not exist"),
        ("/detokenize", {"tokens": [], "model": "x"}, 404, "there is no model 'x'"),
    ],
)
def test_bad_bodies(
    tiny_daemon: RunningDaemon, route: str, body: Any, status: int, words: str
) -> None:
    """Each is refused in words, and the next is served."""
    reply = tiny_daemon.post(body, route)
    assert reply.status == status, reply.body
    assert words in reply.json()["error"]["message"]
    assert tiny_daemon.post({"prompt": "hello"}, "/tokenize").status == 200


def test_the_description_is_served(tiny_daemon: RunningDaemon) -> None:
    """Byte for byte as it lies beside the code."""
    reply = tiny_daemon.request("GET", "/openapi.yaml")
    page = Path(__file__).parents[2] / "daemon" / "openapi.yaml"
    assert (reply.status, reply.body) == (200, page.read_bytes())
    assert reply.headers["Content-Type"] == "application/yaml"
    described = msgspec.yaml.decode(reply.body, type=dict[str, Any])
    assert described["openapi"].startswith("3.")
