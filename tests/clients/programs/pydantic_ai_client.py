"""pydantic-ai over the Unix socket: chat, stream, tools and structured output."""

import asyncio
import json
import os
import sys
from typing import Any

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIResponsesModel

TASKS = json.loads(sys.argv[1])
RECIPE: dict[str, Any] = {}
exec(os.environ["RECIPE"], RECIPE)


class Weather(BaseModel):
    """Answer of the structured task."""

    city: str
    degrees: int


def get_weather(city: str) -> str:
    """Tell the weather of a city."""
    return f"21 degrees in {city}"


async def main() -> None:
    """Do all tasks and print what came of them."""
    chat = RECIPE["model"]
    agent = Agent(chat, tools=[get_weather])
    said = await Agent(chat).run(TASKS["chat"])
    async with Agent(chat).run_stream(TASKS["chat"]) as stream:
        pieces = [piece async for piece in stream.stream_text(delta=True, debounce_by=None)]
    used = await agent.run(TASKS["tools"])
    typed = await Agent(chat, output_type=NativeOutput(Weather)).run(TASKS["structured"])
    through_a_tool = await Agent(chat, output_type=Weather).run(TASKS["final_result"])
    other_model = OpenAIResponsesModel("default", provider=RECIPE["provider"])
    responses = Agent(other_model, tools=[get_weather])
    answered = await responses.run(TASKS["tools"])
    result = {
        "chat": said.output,
        "stream": pieces,
        "tools": used.output,
        "structured": typed.output.model_dump(),
        "final_result": through_a_tool.output.model_dump(),
        "responses": answered.output,
    }
    print(json.dumps(result))


asyncio.run(main())
