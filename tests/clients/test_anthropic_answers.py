"""Anthropic's own client over the Unix socket and TCP."""

import asyncio
from typing import Any

import anthropic
import httpx2
import pytest
from anthropic.types import Message, MessageParam

from ..daemon.running import RunningDaemon

QUESTION: list[MessageParam] = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY: dict[str, Any] = {"temperature": 0}
"""The client has no argument for it any more."""


def sync_client(daemon: RunningDaemon) -> anthropic.Anthropic:
    """The client over the socket."""
    transport = httpx2.HTTPTransport(uds=str(daemon.socket))
    return anthropic.Anthropic(
        base_url="http://localhost",
        api_key="unused",
        max_retries=0,
        http_client=anthropic.DefaultHttpxClient(transport=transport),
    )


def async_client(daemon: RunningDaemon) -> anthropic.AsyncAnthropic:
    """The asynchronous client over the socket."""
    transport = httpx2.AsyncHTTPTransport(uds=str(daemon.socket))
    return anthropic.AsyncAnthropic(
        base_url="http://localhost",
        api_key="unused",
        max_retries=0,
        http_client=anthropic.DefaultAsyncHttpxClient(transport=transport),
    )


def text_of(message: Message) -> str:
    """The text of an answer that is nothing else."""
    (block,) = message.content
    assert block.type == "text"
    return block.text


def test_sync_answer(smollm2_daemon: RunningDaemon) -> None:
    """A whole answer, with its usage and its stop reason; the count is that of the prompt."""
    with sync_client(smollm2_daemon) as client:
        answer = client.messages.create(
            model="smollm2", max_tokens=16, messages=QUESTION, extra_body=GREEDY
        )
        counted = client.messages.count_tokens(model="smollm2", messages=QUESTION)
    assert "Paris" in text_of(answer)
    assert answer.stop_reason == "end_turn"
    cached = answer.usage.cache_read_input_tokens
    assert cached is not None
    assert answer.usage.input_tokens + cached == counted.input_tokens
    assert answer.usage.output_tokens_details is not None
    assert answer.usage.output_tokens_details.thinking_tokens == 0


def test_sync_stream(smollm2_daemon: RunningDaemon) -> None:
    """The helper's text and its final message."""
    with (
        sync_client(smollm2_daemon) as client,
        client.messages.stream(
            model="smollm2",
            max_tokens=16,
            system="You answer in one sentence.",
            messages=QUESTION,
            extra_body=GREEDY,
        ) as stream,
    ):
        text = "".join(stream.text_stream)
        message = stream.get_final_message()
    assert "Paris" in text
    assert text_of(message) == text
    assert message.stop_reason == "end_turn"
    assert message.usage.output_tokens > 0


def test_raw_events(smollm2_daemon: RunningDaemon) -> None:
    """`stream=True` gives the events themselves, in their order."""
    with sync_client(smollm2_daemon) as client:
        stream = client.messages.create(
            model="smollm2", max_tokens=16, messages=QUESTION, extra_body=GREEDY, stream=True
        )
        kinds = [event.type for event in stream]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


async def test_async_answer_and_stream(smollm2_daemon: RunningDaemon) -> None:
    """The asynchronous client, whole and streamed, both at once; the beta route is the same."""

    async def streamed(client: anthropic.AsyncAnthropic) -> str:
        async with client.messages.stream(
            model="smollm2", max_tokens=16, messages=QUESTION, extra_body=GREEDY
        ) as stream:
            return text_of(await stream.get_final_message())

    async with async_client(smollm2_daemon) as client:
        whole, text = await asyncio.gather(
            client.beta.messages.create(
                model="smollm2",
                max_tokens=16,
                messages=[{"role": "user", "content": "What is the capital of France?"}],
                betas=["context-management-2025-06-27"],
                context_management={"edits": [{"type": "clear_thinking_20251015"}]},
                extra_body=GREEDY,
            ),
            streamed(client),
        )
    (block,) = whole.content
    assert block.type == "text"
    assert block.text == text
    assert "Paris" in text


def test_a_stop_sequence(smollm2_daemon: RunningDaemon) -> None:
    """The answer ends before it, and says which it was."""
    with sync_client(smollm2_daemon) as client:
        answer = client.messages.create(
            model="smollm2",
            max_tokens=32,
            messages=QUESTION,
            stop_sequences=["never", " France"],
            extra_body=GREEDY,
        )
    assert text_of(answer) == "The capital of"
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", " France")


def test_errors_are_the_clients_own(tiny_daemon: RunningDaemon) -> None:
    """Refusals arrive as the client's typed exceptions, with the message to act on."""
    with sync_client(tiny_daemon) as client:
        with pytest.raises(anthropic.BadRequestError, match="the model has 384 tokens") as refused:
            client.messages.create(
                model="tiny", max_tokens=4, messages=QUESTION, extra_body={"top_k": 1000000}
            )
        assert refused.value.type == "invalid_request_error"
        assert refused.value.request_id == refused.value.response.headers["x-request-id"]
        with pytest.raises(anthropic.NotFoundError, match="this daemon serves 'tiny'") as unknown:
            client.messages.create(model="claude-99", max_tokens=4, messages=QUESTION)
        assert unknown.value.type == "not_found_error"
        with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > "):
            client.messages.create(
                model="tiny",
                max_tokens=4,
                messages=[{"role": "user", "content": "word " * 9000}],
            )


@pytest.mark.parametrize(
    ("key", "headers", "served"),
    [
        ("secret", {}, True),
        ("wrong", {"Authorization": anthropic.Omit(), "x-api-key": "secret"}, True),
        ("wrong", {}, False),
    ],
)
def test_over_tcp_with_a_key(
    locked_daemon: RunningDaemon, key: str, headers: Any, *, served: bool
) -> None:
    """The key goes into either header."""
    with anthropic.Anthropic(
        base_url=f"http://127.0.0.1:{locked_daemon.tcp_port()}",
        api_key=key,
        default_headers=headers,
        max_retries=0,
    ) as client:
        if served:
            answer = client.messages.create(
                model="tiny", max_tokens=2, messages=QUESTION, extra_body=GREEDY
            )
            assert answer.usage.output_tokens == 2
            return
        with pytest.raises(anthropic.AuthenticationError, match="needs its API key"):
            client.messages.create(model="tiny", max_tokens=2, messages=QUESTION)
