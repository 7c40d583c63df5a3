"""OpenAI's own client over the Unix socket, against SmolLM2."""

import asyncio
import subprocess
import sys
import textwrap

import httpx2
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from ..daemon.running import RunningDaemon

QUESTION: list[ChatCompletionMessageParam] = [
    {"role": "user", "content": "What is the capital of France?"}
]


def sync_client(daemon: RunningDaemon) -> openai.OpenAI:
    """The client as docs/quickstart.md shows it."""
    transport = httpx2.HTTPTransport(uds=str(daemon.socket))
    return openai.OpenAI(
        base_url="http://localhost/v1",
        api_key="unused",
        max_retries=0,
        http_client=openai.DefaultHttpxClient(transport=transport),
    )


def async_client(daemon: RunningDaemon) -> openai.AsyncOpenAI:
    """The asynchronous client as docs/quickstart.md shows it."""
    transport = httpx2.AsyncHTTPTransport(uds=str(daemon.socket))
    return openai.AsyncOpenAI(
        base_url="http://localhost/v1",
        api_key="unused",
        max_retries=0,
        http_client=openai.DefaultAsyncHttpxClient(transport=transport),
    )


def test_sync_answer(smollm2_daemon: RunningDaemon) -> None:
    """A whole answer, with its usage and its finish reason."""
    with sync_client(smollm2_daemon) as client:
        answer = client.chat.completions.create(
            model="smollm2", messages=QUESTION, temperature=0, max_tokens=16
        )
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens > 10
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens is not None


def test_sync_stream(smollm2_daemon: RunningDaemon) -> None:
    """The same answer in pieces; the last chunk carries the usage."""
    with sync_client(smollm2_daemon) as client:
        chunks = list(
            client.chat.completions.create(
                model="default",
                messages=QUESTION,
                temperature=0,
                max_tokens=16,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert "Paris" in text
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens >= len(text.split())


async def test_async_answer_and_stream(smollm2_daemon: RunningDaemon) -> None:
    """The asynchronous client, whole and streamed, both at once."""

    async def streamed(client: openai.AsyncOpenAI) -> str:
        stream = await client.chat.completions.create(
            model="smollm2", messages=QUESTION, temperature=0, max_tokens=16, stream=True
        )
        return "".join([c.choices[0].delta.content or "" async for c in stream])

    async with async_client(smollm2_daemon) as client:
        whole, text = await asyncio.gather(
            client.chat.completions.create(
                model="smollm2", messages=QUESTION, temperature=0, max_tokens=16
            ),
            streamed(client),
        )
    assert whole.choices[0].message.content == text
    assert "Paris" in text


def test_text_completion(smollm2_daemon: RunningDaemon) -> None:
    """`/v1/completions` continues plain text, whole and streamed alike."""
    with sync_client(smollm2_daemon) as client:
        whole = client.completions.create(
            model="smollm2", prompt="The capital of France is", temperature=0, max_tokens=8
        )
        stream = client.completions.create(
            model="smollm2",
            prompt="The capital of France is",
            temperature=0,
            max_tokens=8,
            stream=True,
        )
        text = "".join(chunk.choices[0].text for chunk in stream if chunk.choices)
    assert "Paris" in text
    assert whole.choices[0].text == text
    assert whole.choices[0].finish_reason == "length"


def test_models(smollm2_daemon: RunningDaemon) -> None:
    """The list of models, and one of them."""
    with sync_client(smollm2_daemon) as client:
        (model,) = client.models.list().data
        assert model.id == "smollm2"
        assert client.models.retrieve("smollm2").id == "smollm2"
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("gpt-99")


def test_stop_sequence(smollm2_daemon: RunningDaemon) -> None:
    """The answer ends before the stop sequence, and says that it stopped."""
    with sync_client(smollm2_daemon) as client:
        answer = client.chat.completions.create(
            model="smollm2", messages=QUESTION, temperature=0, max_tokens=32, stop=[" France"]
        )
    assert answer.choices[0].message.content == "The capital of"
    assert answer.choices[0].finish_reason == "stop"


def test_seed_repeats(smollm2_daemon: RunningDaemon) -> None:
    """The same seed gives the same answer, another seed another one."""
    with sync_client(smollm2_daemon) as client:
        answers = [
            client.chat.completions.create(
                model="smollm2", messages=QUESTION, temperature=1.5, max_tokens=12, seed=seed
            )
            .choices[0]
            .message.content
            for seed in (7, 7, 8)
        ]
    assert answers[0] == answers[1] != answers[2]


def test_errors_are_the_clients_own(tiny_daemon: RunningDaemon) -> None:
    """Refusals arrive as the client's typed exceptions, with the message to act on."""
    with sync_client(tiny_daemon) as client:
        with pytest.raises(openai.BadRequestError, match="the model has 384 tokens"):
            client.chat.completions.create(
                model="tiny", messages=QUESTION, extra_body={"top_k": 1000000}
            )
        with pytest.raises(openai.NotFoundError, match="this daemon serves 'tiny'"):
            client.chat.completions.create(model="gpt-99", messages=QUESTION)


def test_two_processes_at_once(smollm2_daemon: RunningDaemon) -> None:
    """Two client processes talk at the same time, and each gets its own answer."""
    program = textwrap.dedent("""
        import sys, httpx2, openai
        http = openai.DefaultHttpxClient(transport=httpx2.HTTPTransport(uds=sys.argv[1]))
        client = openai.OpenAI(base_url="http://localhost/v1", api_key="-", http_client=http)
        for chunk in client.chat.completions.create(
            model="smollm2", temperature=0, max_tokens=16, stream=True,
            messages=[{"role": "user", "content": sys.argv[2]}],
        ):
            print(chunk.choices[0].delta.content or "", end="")
    """)
    questions = {
        "What is the capital of France?": "Paris",
        "What is the capital of Japan?": "Tokyo",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(smollm2_daemon.socket), question],
            stdout=subprocess.PIPE,
            text=True,
        )
        for question in questions
    ]
    for process, word in zip(processes, questions.values(), strict=True):
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        assert word in output
