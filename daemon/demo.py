"""`umbel demo`: many agents, one system prompt, and what becomes of it, live."""

import asyncio
import time
from contextlib import AsyncExitStack

import msgspec
from rich.console import Console
from rich.live import Live
from rich.table import Table

from .client import Client
from .errors import ClientError
from .private import private_daemon
from .terminal.keys import without_echo
from .terminal.start_view import StartView

_SYSTEM = """You are one of several agents that work in one small shop for plants. All of you \
follow the same house rules. Answer in one or two short sentences. Use plain words. Name only \
what you know. Never promise a delivery date. Prices are in euros. The shop opens at nine in the \
morning and closes at six in the evening, Monday to Saturday. Water for plants should stand for \
a day before it is used. Herbs like sun; ferns like shade. If a question has nothing to do with \
plants, answer it briefly all the same and be kind about it."""

_TASKS = (
    "What is the capital of France?",
    "When does the shop open?",
    "Where should I put a fern?",
    "Do herbs like sun or shade?",
    "What is the capital of Italy?",
    "What is the capital of Spain?",
    "When does the shop close?",
    "What is the capital of Japan?",
)
_REFRESH = 8  # times a second


class Agent(msgspec.Struct):
    """One agent's figures; times in seconds."""

    name: str
    task: str
    state: str = "waits"
    answer: str = ""
    ttft: float | None = None
    decode: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    out: int = 0

    @property
    def rate(self) -> float | None:
        """Tokens a second after the first."""
        return (self.out - 1) / self.decode if self.decode and self.out > 1 else None


async def demo(*, agents: int, max_tokens: int, model: str) -> bool:
    """Run the demonstration; True when every agent got its answer.

    Raises:
        ClientError: the private daemon did not start.
    """
    console = Console()
    crew = [Agent(f"agent {i + 1}", _TASKS[i % len(_TASKS)]) for i in range(agents)]
    console.print(f"Starting a private daemon with [bold]{model}[/bold] …")
    view = StartView(Console(stderr=True, soft_wrap=True))
    async with AsyncExitStack() as stack:
        stack.callback(view.close)
        client = await stack.enter_async_context(private_daemon(model, view.show))
        view.close()
        console.print(f"{agents} agents share one system prompt and ask at once.\n")
        start = time.perf_counter()
        with (
            without_echo(),  # a ^C would push the table down, and it would be drawn twice
            Live(get_renderable=lambda: _table(crew), refresh_per_second=_REFRESH, console=console),
        ):
            await asyncio.gather(*(_work(agent, client, max_tokens) for agent in crew))
        _summarise(console, crew, time.perf_counter() - start)
    return all(agent.state == "done" for agent in crew)


async def _work(agent: Agent, client: Client, max_tokens: int) -> None:
    messages = [
        {"role": "system", "content": _SYSTEM},
        {"role": "user", "content": agent.task},
    ]
    start = first = time.perf_counter()
    try:
        async for chunk in client.chat(
            messages, conversation=agent.name, max_tokens=max_tokens, temperature=0.0
        ):
            now = time.perf_counter()
            if chunk.text and agent.ttft is None:
                first, agent.ttft, agent.state = now, now - start, "answers"
            if chunk.text:
                agent.answer += chunk.text
                agent.decode = now - first
            if chunk.usage is not None:
                agent.prompt_tokens = chunk.usage["prompt_tokens"]
                agent.cached_tokens = chunk.usage["prompt_tokens_details"]["cached_tokens"]
                agent.out = chunk.usage["completion_tokens"]
    except ClientError as error:
        agent.state, agent.answer = "failed", str(error)
    else:
        agent.state = "done"


def _table(crew: list[Agent]) -> Table:
    table = Table(box=None, pad_edge=False, expand=True, header_style="bold")
    for column in ("agent", "state"):
        table.add_column(column, no_wrap=True)
    for column in ("TTFT", "prompt", "cached", "out", "tok/s"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("answer", overflow="ellipsis", no_wrap=True, ratio=1)
    for agent in crew:
        table.add_row(
            agent.name,
            agent.state,
            "" if agent.ttft is None else f"{agent.ttft:.2f} s",
            _count(agent.prompt_tokens),
            str(agent.cached_tokens) if agent.prompt_tokens else "",
            _count(agent.out),
            "" if agent.rate is None else f"{agent.rate:.1f}",
            " ".join(agent.answer.split()),
        )
    return table


def _count(number: int) -> str:
    return str(number) if number else ""


def _summarise(console: Console, crew: list[Agent], seconds: float) -> None:
    done = sum(agent.state == "done" for agent in crew)
    prompt = sum(agent.prompt_tokens for agent in crew)
    cached = sum(agent.cached_tokens for agent in crew)
    out = sum(agent.out for agent in crew)
    console.print(
        f"\n{done} of {len(crew)} agents answered in {seconds:.1f} s: {prompt} prompt tokens, "
        f"{cached} of them from the cache, {out} tokens out, {out / seconds:.1f} tokens/s in all."
    )
    if prompt > cached > 0:
        console.print(
            f"Without the cache {prompt / (prompt - cached):.1f} times as many prompt tokens would "
            "have been computed: one agent computed the shared prompt, the others waited for it."
        )
    console.print("Next: umbel serve, and then umbel chat; umbel models recommend names models.")
