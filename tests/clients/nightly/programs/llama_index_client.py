"""llama-index over TCP: chat, stream, a tool of an agent and structured output."""

import asyncio
import json
import os
import sys

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

TASKS = json.loads(sys.argv[1])
CITIES: list[str] = []


class Weather(BaseModel):
    """The type of structured output."""

    city: str
    degrees: int


def get_weather(city: str) -> str:
    """Tell the weather of a city."""
    CITIES.append(city)
    return f"21 degrees in {city}"


def user(task: str) -> list[ChatMessage]:
    """Make a conversation of one message."""
    return [ChatMessage(role="user", content=TASKS[task])]


async def main() -> None:
    """Do all tasks and print their results."""
    model = OpenAILike(
        model="default",
        api_base=f"{os.environ['URL']}/v1",
        api_key="unused",
        context_window=32_768,
        is_chat_model=True,
        is_function_calling_model=True,
    )
    agent = FunctionAgent(tools=[get_weather], llm=model)
    pieces = [piece.delta for piece in model.stream_chat(user("chat")) if piece.delta]
    result = {
        "chat": model.chat(user("chat")).message.content,
        "stream": pieces,
        "tools": str(await agent.run(TASKS["tools"])),
        "cities": CITIES,
        "call": model.as_structured_llm(Weather).chat(user("call")).raw.model_dump(),
    }
    print(json.dumps(result))


asyncio.run(main())
