"""Several answers of one request: over one prefill, each its own, all or none."""

import re
from typing import Any

import msgspec
import pytest

from .running import RunningDaemon

TEXT = "/v1/completions"
PROMPT = "the capital of france is a city " * 8
MESSAGES = [{"role": "user", "content": PROMPT}]


def prefilled(daemon: RunningDaemon) -> float:
    """Return how many tokens the daemon has computed for prompts."""
    found = re.search(
        r"^umbel_prefill_tokens_total (\S+)$",
        daemon.request("GET", "/metrics").body.decode(),
        re.MULTILINE,
    )
    assert found
    return float(found[1])


def events(body: bytes) -> list[Any]:
    lines = [line[6:] for line in body.split(b"\n") if line.startswith(b"data: ")]
    assert lines[-1] == b"[DONE]"
    return [msgspec.json.decode(line) for line in lines[:-1]]


def solo(daemon: RunningDaemon, prompt: Any, **fields: Any) -> str:
    answer = daemon.post({"prompt": prompt, **fields}, TEXT).json()
    text: str = answer["choices"][0]["text"]
    return text


def test_answers_share_one_prefill(tiny_daemon: RunningDaemon) -> None:
    """Three answers compute their prompt once, and count it once."""
    before = prefilled(tiny_daemon)
    body = {"messages": MESSAGES, "n": 3, "seed": 5, "max_tokens": 6}
    answer = tiny_daemon.post(body).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    usage = answer["usage"]
    assert usage["completion_tokens"] <= 18
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    computed = prefilled(tiny_daemon) - before
    assert computed < 1.2 * usage["prompt_tokens"]


def test_each_answer_has_a_seed_of_its_own(tiny_daemon: RunningDaemon) -> None:
    """Answer i of seed s is the answer of seed s + i."""
    fields = {"max_tokens": 8, "temperature": 1.5}
    body = {"prompt": PROMPT, "n": 3, "seed": 11, **fields}
    choices = tiny_daemon.post(body, TEXT).json()["choices"]
    alone = [solo(tiny_daemon, PROMPT, seed=11 + i, **fields) for i in range(3)]
    assert [choice["text"] for choice in choices] == alone
    assert len(set(alone)) == 3


def test_second_answer_has_a_conversation_that_no_client_can_name(
    tiny_daemon: RunningDaemon,
) -> None:
    """So neither waits for a client's request."""
    body = {"messages": MESSAGES, "conversation": "the-n-test", "n": 2, "max_tokens": 2}
    assert tiny_daemon.post(body).status == 200
    told = [line for line in tiny_daemon.log().splitlines() if "the-n-test" in line]
    assert len(told) == 2
    assert sum(r"the-n-test\xa01 " in line for line in told) == 1


def test_stopped_answer_is_not_computed_further(tiny_daemon: RunningDaemon) -> None:
    """Other answers of the request go on."""
    fields = {"prompt": PROMPT, "temperature": 0, "max_tokens": 400}
    stop = solo(tiny_daemon, **fields)[4:12]
    before = tiny_daemon.status()["engine"]["generation_tokens"]
    choices = tiny_daemon.post({**fields, "n": 2, "stop": stop}, TEXT).json()["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["stop", "stop"]
    assert tiny_daemon.status()["engine"]["generation_tokens"] - before < 300


def test_prompts_are_answered_in_their_order(tiny_daemon: RunningDaemon) -> None:
    prompts = ["one two three", "the sea is blue", "a"]
    fields = {"max_tokens": 5, "temperature": 0}
    choices = tiny_daemon.post({"prompt": prompts, "n": 2, **fields}, TEXT).json()["choices"]
    alone = [solo(tiny_daemon, prompt, **fields) for prompt in prompts]
    assert [choice["text"] for choice in choices] == [text for text in alone for _ in range(2)]
    tokens = tiny_daemon.post({"prompt": [[5, 6, 7], [8, 9]], **fields}, TEXT).json()["choices"]
    assert [c["text"] for c in tokens] == [
        solo(tiny_daemon, ids, **fields) for ids in ([5, 6, 7], [8, 9])
    ]


@pytest.mark.parametrize("route", ["/v1/chat/completions", TEXT])
def test_streamed_answers_are_told_apart(tiny_daemon: RunningDaemon, route: str) -> None:
    """Chunks name their choice; joined they are the whole answers; each ends once."""
    wanted = {"messages": MESSAGES} if route != TEXT else {"prompt": PROMPT}
    body = {**wanted, "n": 3, "seed": 3, "max_tokens": 6}
    whole = tiny_daemon.post(body, route).json()["choices"]
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = events(tiny_daemon.post({**body, **usage}, route).body)
    texts, ends = ["", "", ""], []
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        part = choice["text"] if route == TEXT else choice["delta"].get("content", "")
        texts[choice["index"]] += part
        if choice["finish_reason"]:
            ends.append((choice["index"], choice["finish_reason"]))
    expected = [c["text"] if route == TEXT else c["message"]["content"] for c in whole]
    assert texts == expected
    assert sorted(ends) == [(c["index"], c["finish_reason"]) for c in whole]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] > 0


def test_one_bad_prompt_refuses_all(tiny_daemon: RunningDaemon) -> None:
    """Nothing is computed for the others."""
    before = prefilled(tiny_daemon)
    reply = tiny_daemon.post({"prompt": ["hello", ""], "max_tokens": 2}, TEXT)
    assert reply.status == 400
    assert "empty" in reply.json()["error"]["message"]
    assert prefilled(tiny_daemon) == before
    assert tiny_daemon.status()["engine"]["running"] == []
