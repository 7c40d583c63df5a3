"""Log-probabilities as OpenAI's own client reads them, against logits computed here."""

from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from openai.types.chat import ChatCompletion, ChatCompletionTokenLogprob
from openai.types.completion_choice import Logprobs

from umbel.models.load.loader import LoadedModel, load
from umbel.models.text.codec import TextCodec
from umbel.models.text.conversation import Conversation, Message

import mlx.core as mx  # isort: skip  (after umbel.models)

from ..daemon.running import RunningDaemon
from .test_openai import QUESTION, sync_client

TOLERANCE = 1e-3
"""Of a log-probability: the daemon computes in other pieces, and rounds otherwise."""

FANCY: dict[str, Any] = {
    "temperature": 1.7,
    "presence_penalty": 1.0,
    "frequency_penalty": 1.0,
    "seed": 3,
    "max_tokens": 24,
    "extra_body": {"repetition_penalty": 1.5, "top_k": 200},
}
ASKED = Conversation(messages=[Message(role="user", content=str(QUESTION[0]["content"]))])
CONTINUED = "The capital of France is"

Reference = NDArray[np.float32]


@pytest.fixture(scope="module")
def long_tiny(long_tiny_dir: Path) -> LoadedModel:
    """Load the tiny daemon's model here."""
    return load(str(long_tiny_dir))


def logprobs_of(model: LoadedModel, prompt: list[int], answer: list[int]) -> Reference:
    """Compute the log-softmax of the plain logits before each token of an answer."""
    logits = model.model(mx.array([[*prompt, *answer]]))[0, len(prompt) - 1 : -1]
    logits = logits[:, : model.text.vocab_size].astype(mx.float32)
    return np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True), np.float32)


@cache
def tokens_of(codec: TextCodec) -> dict[bytes | None, int]:
    """Map what is written to the one token that writes it."""
    return {codec.read_token(token, first=False).data: token for token in range(codec.vocab_size)}


def token_of(codec: TextCodec, data: Iterable[int]) -> int:
    """Find the token that writes just these bytes."""
    return tokens_of(codec)[bytes(data)]


def content_of(answer: ChatCompletion) -> list[ChatCompletionTokenLogprob]:
    """Take the tokens out of a whole answer."""
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.content is not None
    return answer.choices[0].logprobs.content


def raw(content: Sequence[ChatCompletionTokenLogprob]) -> bytes:
    """Join the tokens' bytes."""
    return b"".join(bytes(entry.bytes or []) for entry in content)


def check_values(
    model: LoadedModel, prompt: list[int], content: list[ChatCompletionTokenLogprob]
) -> None:
    """Compare every number with the model's own."""
    answer = [token_of(model.text, entry.bytes or []) for entry in content]
    reference = logprobs_of(model, prompt, answer)
    for row, token, entry in zip(reference, answer, content, strict=True):
        assert entry.logprob == pytest.approx(row[token], abs=TOLERANCE)
        told = [likely.logprob for likely in entry.top_logprobs]
        assert told == sorted(told, reverse=True)
        assert told == pytest.approx(sorted(row, reverse=True)[: len(told)], abs=TOLERANCE)
        for likely in entry.top_logprobs:
            if likely.bytes is not None:
                other = token_of(model.text, likely.bytes)
                assert likely.logprob == pytest.approx(row[other], abs=TOLERANCE)
                assert likely.token == bytes(likely.bytes).decode(errors="replace")


def test_chat_tells_the_models_own(smollm2_daemon: RunningDaemon, smollm2: LoadedModel) -> None:
    """A greedy answer: the chosen token is the likeliest, and all numbers are the model's."""
    with sync_client(smollm2_daemon) as client:
        answer = client.chat.completions.create(
            model="smollm2",
            messages=QUESTION,
            temperature=0,
            max_tokens=16,
            logprobs=True,
            top_logprobs=5,
        )
    content = content_of(answer)
    assert answer.usage is not None
    assert len(content) == answer.usage.completion_tokens
    assert raw(content).decode() == answer.choices[0].message.content
    assert all(len(entry.top_logprobs) == 5 for entry in content)
    assert all(entry.token == entry.top_logprobs[0].token for entry in content)
    prompt = smollm2.text.encode_conversation(ASKED)
    check_values(smollm2, prompt, content)


def test_sampling_does_not_change_them(tiny_daemon: RunningDaemon, long_tiny: LoadedModel) -> None:
    """Temperature, penalties, bias and filters choose the token; the numbers stay the model's."""
    with sync_client(tiny_daemon) as client:
        answer = client.chat.completions.create(
            model="tiny",
            messages=QUESTION,
            logprobs=True,
            top_logprobs=20,
            logit_bias={"80": 5, "0": -100, "1": -100, "2": -100},
            **FANCY,
        )
    content = content_of(answer)
    assert len(content) == 24
    assert all(len(entry.top_logprobs) == 20 for entry in content)
    prompt = long_tiny.text.encode_conversation(ASKED)
    check_values(long_tiny, prompt, content)


def test_chat_stream_tells_the_same(tiny_daemon: RunningDaemon) -> None:
    """Each chunk has the tokens of its own text; together they are those of the whole answer."""
    fields: dict[str, Any] = {"messages": QUESTION, "logprobs": True, "top_logprobs": 2, **FANCY}
    with sync_client(tiny_daemon) as client:
        whole = client.chat.completions.create(model="tiny", **fields)
        chunks = list(client.chat.completions.create(model="tiny", stream=True, **fields))
    assert chunks[0].choices[0].logprobs is None
    assert chunks[-1].choices[0].logprobs is None
    content: list[ChatCompletionTokenLogprob] = []
    for chunk in chunks[1:-1]:
        logprobs = chunk.choices[0].logprobs
        assert logprobs is not None
        content += logprobs.content or []
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert len(chunks) > 4
    for mine, theirs in zip(content, content_of(whole), strict=True):
        assert (mine.token, mine.bytes) == (theirs.token, theirs.bytes)
        assert mine.logprob == pytest.approx(theirs.logprob, abs=TOLERANCE)
        assert len(mine.top_logprobs) == 2


def test_only_the_chosen_one(tiny_daemon: RunningDaemon) -> None:
    """Without a number of likeliest tokens the chosen one's log-probability is told alone."""
    with sync_client(tiny_daemon) as client:
        answer = client.chat.completions.create(
            model="tiny", messages=QUESTION, max_tokens=4, logprobs=True
        )
    assert [entry.top_logprobs for entry in content_of(answer)] == [[]] * 4


def test_unasked_there_are_none(tiny_daemon: RunningDaemon) -> None:
    """Answers and chunks carry null if the request does not ask for them."""
    with sync_client(tiny_daemon) as client:
        chat = client.chat.completions.create(
            model="tiny", messages=QUESTION, max_tokens=4, logprobs=False
        )
        stream = list(
            client.chat.completions.create(
                model="tiny", messages=QUESTION, max_tokens=4, stream=True
            )
        )
        text = client.completions.create(model="tiny", prompt="the", max_tokens=4)
    assert chat.choices[0].logprobs is None
    assert all(chunk.choices[0].logprobs is None for chunk in stream)
    assert text.choices[0].logprobs is None


def test_halves_of_characters_have_exact_bytes(
    tiny_daemon: RunningDaemon, long_tiny: LoadedModel
) -> None:
    """The text of half a character is U+FFFD, its bytes are its own; none are forgotten."""
    half = token_of(long_tiny.text, b"\xf0")
    with sync_client(tiny_daemon) as client:
        answer = client.chat.completions.create(
            model="tiny",
            messages=QUESTION,
            temperature=0,
            max_tokens=3,
            logprobs=True,
            logit_bias={str(half): 100},
        )
    assert answer.choices[0].message.content == "\ufffd\ufffd"
    content = content_of(answer)
    assert [(entry.token, entry.bytes) for entry in content] == [("\ufffd", [0xF0])] * 3
    prompt = long_tiny.text.encode_conversation(ASKED)
    check_values(long_tiny, prompt, content)


@pytest.mark.parametrize(
    ("stop", "text", "tokens"),
    [
        (" France", "The capital of", ["The", " capital", " of"]),
        ("apital", "The c", ["The", " capital"]),
    ],
)
def test_stop_sequence_cuts_tokens_away(
    smollm2_daemon: RunningDaemon, stop: str, text: str, tokens: list[str]
) -> None:
    """Tokens behind the cut are not told; one that the cut goes through is."""
    fields: dict[str, Any] = {"messages": QUESTION, "temperature": 0, "max_tokens": 16}
    fields |= {"stop": [stop], "logprobs": True}
    with sync_client(smollm2_daemon) as client:
        whole = client.chat.completions.create(model="smollm2", **fields)
        chunks = list(client.chat.completions.create(model="smollm2", stream=True, **fields))
    assert whole.choices[0].message.content == text
    assert [entry.token for entry in content_of(whole)] == tokens
    streamed = [
        entry.token
        for chunk in chunks
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content or []
    ]
    assert streamed == tokens


def columns(logprobs: Logprobs | None) -> list[tuple[str, float, dict[str, float], int]]:
    """Read a text completion's four lists as rows."""
    assert logprobs is not None
    lists = (logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, logprobs.text_offset)
    return list(zip(*(column or [] for column in lists), strict=True))


def test_text_completion_tells_them_too(
    smollm2_daemon: RunningDaemon, smollm2: LoadedModel
) -> None:
    """The older shape: four lists, whole and streamed alike, with offsets into the text."""
    fields: dict[str, Any] = {"prompt": CONTINUED, "temperature": 0, "max_tokens": 8, "logprobs": 3}
    with sync_client(smollm2_daemon) as client:
        whole = client.completions.create(model="smollm2", **fields)
        chunks = list(client.completions.create(model="smollm2", stream=True, **fields))
    text, rows = whole.choices[0].text, columns(whole.choices[0].logprobs)
    assert "".join(token for token, *_ in rows) == text
    assert all(text.startswith(token, offset) for token, _, _, offset in rows)
    assert [offset for *_, offset in rows] == sorted({offset for *_, offset in rows})
    answer = [token_of(smollm2.text, token.encode()) for token, *_ in rows]
    reference = logprobs_of(smollm2, smollm2.text.encode(CONTINUED), answer)
    for row, token, (_, chosen, top, _) in zip(reference, answer, rows, strict=True):
        assert chosen == pytest.approx(row[token], abs=TOLERANCE)
        best = sorted(row, reverse=True)[:3]
        assert list(top.values()) == pytest.approx(best, abs=TOLERANCE)
    told = [r for c in chunks if c.choices[0].logprobs for r in columns(c.choices[0].logprobs)]
    assert [(token, offset) for token, _, _, offset in told] == [
        (token, offset) for token, _, _, offset in rows
    ]


def test_text_completion_always_tells_the_chosen_one(tiny_daemon: RunningDaemon) -> None:
    """With 0, and where an unlikely token was drawn, the chosen one is among the likeliest."""
    with sync_client(tiny_daemon) as client:
        for count in (0, 2):
            answer = client.completions.create(model="tiny", prompt="the", logprobs=count, **FANCY)
            rows = columns(answer.choices[0].logprobs)
            assert len(rows) == 24
            for token, _, top, _ in rows:
                assert token in top
                assert len(top) <= count + 1
