"""Requests of all kinds at once: each answer is its own request's, whatever the rest.

`UMBEL_MIXED=1000 pytest -m slow tests/scenario/test_mixed_requests.py` sends so many.
"""

import asyncio
import json
import os
import random
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import jsonschema
import pytest

from ..daemon.running import RunningDaemon, eventually, running

REQUESTS = int(os.environ.get("UMBEL_MIXED", "160"))
AT_ONCE = 16
LONG = 300  # a random model fills JSON with all the blanks it may have
COMPLETE = {"schema", "points", "regex", "choice", "by name", "drawn schema"}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["city", "days", "unit"],
    "additionalProperties": False,
}
POINTS = {"type": "array", "items": {"enum": [1, 2, 3]}, "minItems": 2, "maxItems": 4}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "time", "parameters": {"type": "object"}}},
]


class Kind(NamedTuple):
    """A kind of request.

    Attributes:
        route: where it goes.
        fields: of its body; the rest is drawn.
        prompts: how many different ones there are.
    """

    route: str
    fields: dict[str, Any]
    prompts: int = 3

    def body(self, number: int) -> dict[str, Any]:
        """Write the body with one of the prompts."""
        text = f"word number {number} of the day is " + "sun " * (5 + 7 * number)
        prompt: dict[str, Any] = {"prompt": text}
        if self.route == CHAT:
            system = {"role": "system", "content": "You are brief. " * 8}
            prompt = {"messages": [system, {"role": "user", "content": text}]}
        return {"temperature": 0, "max_tokens": 48, **prompt, **self.fields}


def named(schema: Any) -> dict[str, Any]:
    """Write a schema as `response_format` has it."""
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}


KINDS = {
    "chat": Kind(CHAT, {}),
    "text": Kind(TEXT, {}),
    "penalties": Kind(TEXT, {"repetition_penalty": 1.3, "frequency_penalty": 0.5}),
    "bias": Kind(TEXT, {"logit_bias": {"70": 5, "71": -100}}),
    "stop": Kind(TEXT, {"stop": ["a", "e"]}),
    "logprobs": Kind(CHAT, {"logprobs": True, "top_logprobs": 2, "max_tokens": 8}),
    "several": Kind(CHAT, {"n": 2, "max_tokens": 8}),
    "schema": Kind(CHAT, {"response_format": named(WEATHER), "max_tokens": LONG}),
    "points": Kind(CHAT, {"response_format": named(POINTS), "presence_penalty": 1.0}),
    "object": Kind(CHAT, {"response_format": {"type": "json_object"}}),
    "regex": Kind(TEXT, {"structured_outputs": {"regex": "[a-f]{3,8}-[0-9]{2}"}}),
    "choice": Kind(CHAT, {"structured_outputs": {"choice": ["yes", "no", "perhaps"]}}),
    "required": Kind(CHAT, {"tools": TOOLS[:1], "tool_choice": "required", "max_tokens": LONG}),
    "by name": Kind(
        CHAT,
        {
            "tools": TOOLS,
            "tool_choice": {"type": "function", "function": {"name": "weather"}},
            "parallel_tool_calls": False,
            "max_tokens": LONG,
        },
    ),
    "auto": Kind(CHAT, {"tools": TOOLS}),
    "drawn": Kind(CHAT, {"temperature": 1.2, "top_p": 0.9, "seed": 7, "max_tokens": 16}),
    "drawn schema": Kind(
        CHAT, {"response_format": named(WEATHER), "temperature": 1, "max_tokens": LONG}
    ),
    "left": Kind(CHAT, {"stream": True, "max_tokens": 2000}),
}


def fault(kind: str, body: dict[str, Any], answer: dict[str, Any]) -> str | None:
    """Say what is wrong with an answer for its own request, if something is."""
    for choice in answer["choices"]:
        message = choice.get("message") or {"content": choice.get("text")}
        calls = message.get("tool_calls") or []
        if choice["finish_reason"] == "length":  # its end is missing
            calls = calls[:-1]
            if not calls:
                continue
        try:
            _check(kind, body, message["content"], calls)
        except (AssertionError, jsonschema.ValidationError, ValueError) as error:
            return f"{kind}: {choice}: {error!r}"
    return None


def _check(kind: str, body: dict[str, Any], text: str | None, calls: list[Any]) -> None:
    if kind in ("schema", "drawn schema", "points", "object"):
        schema = {"schema": WEATHER, "drawn schema": WEATHER, "points": POINTS, "object": {}}[kind]
        value = json.loads(text or "")
        jsonschema.validate(value, schema)
        assert kind != "object" or isinstance(value, dict)
    elif kind == "regex":
        assert re.fullmatch("[a-f]{3,8}-[0-9]{2}", text or "")
    elif kind == "choice":
        assert text in ("yes", "no", "perhaps")
    elif kind in ("required", "by name"):
        assert calls
        assert kind == "required" or len(calls) == 1
        for call in calls:
            assert call["function"]["name"] == "weather"
            jsonschema.validate(json.loads(call["function"]["arguments"]), WEATHER)
    elif kind == "stop":
        assert not set(body["stop"]) & set(text or "")


@pytest.fixture(scope="module")
def crowd_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    """A daemon that runs sixteen at once, in fp32."""
    from ..tiny import tiny_model_dir  # noqa: PLC0415  (it imports mlx.core)

    model = tiny_model_dir(tmp_path_factory.mktemp("m") / "tiny", max_position_embeddings=8192)
    with (
        tempfile.TemporaryDirectory(prefix="u") as folder,
        running(Path(folder), model, "--max-batch", str(AT_ONCE)) as daemon,
    ):
        yield daemon


async def ask(session: aiohttp.ClientSession, kind: Kind, number: int) -> dict[str, Any]:
    """Send one request and read its answer."""
    async with session.post(f"http://x{kind.route}", json=kind.body(number)) as reply:
        answer: dict[str, Any] = await reply.json()
        assert reply.status == 200, answer
        return answer


async def leave(session: aiohttp.ClientSession, kind: Kind, number: int, pieces: int) -> None:
    """Begin a stream and go away after some of it."""
    async with session.post(f"http://x{kind.route}", json=kind.body(number)) as reply:
        assert reply.status == 200
        for _ in range(pieces):
            await reply.content.readany()
        reply.close()


def told(answer: dict[str, Any]) -> Any:
    """Parts of an answer that its request alone decides: no drawn ids, no rounded numbers."""
    shown = []
    for choice in answer["choices"]:
        message = choice.get("message", {})
        calls = [call["function"] for call in message.get("tool_calls") or []]
        text = message.get("content", choice.get("text"))
        shown.append((text, message.get("reasoning_content"), calls, choice["finish_reason"]))
    return shown


@pytest.mark.slow
async def test_each_answer_is_its_own(crowd_daemon: RunningDaemon) -> None:
    """Valid for its own request; and if greedy, the same as alone."""
    connector = aiohttp.UnixConnector(path=str(crowd_daemon.socket), limit=AT_ONCE)
    async with aiohttp.ClientSession(connector=connector) as session:
        alone = {
            (name, number): told(await ask(session, kind, number))
            for name, kind in KINDS.items()
            for number in range(kind.prompts)
            if name != "left"
        }
        draw = random.Random(12)  # noqa: S311  (a test that can be run again)
        wanted = [
            (name, draw.randrange(KINDS[name].prompts), draw.randrange(4))
            for name in draw.choices(list(KINDS), k=REQUESTS)
        ]
        gate = asyncio.Semaphore(AT_ONCE)

        async def one(name: str, number: int, pieces: int) -> str | None:
            kind = KINDS[name]
            async with gate:
                if name == "left":
                    await leave(session, kind, number, pieces)
                    return None
                answer = await ask(session, kind, number)
            wrong = fault(name, kind.body(number), answer)
            if wrong is None and not name.startswith("drawn"):
                single = alone[name, number]
                return (
                    None if told(answer) == single else f"{name}: {told(answer)}, alone: {single}"
                )
            return wrong

        faults = await asyncio.gather(*(one(*each) for each in wanted))
    ended = {name for (name, _), choices in alone.items() if all(c[3] != "length" for c in choices)}
    assert ended >= COMPLETE  # so that something was there to validate
    assert all(len(alone["required", number][0][2]) > 1 for number in range(3))
    assert [found for found in faults if found is not None] == []
    eventually(lambda: crowd_daemon.status()["engine"]["running"] == [])
    assert crowd_daemon.request("GET", "/cache/verify").json() == {"problems": []}
