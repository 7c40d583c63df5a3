"""openai-agents over the Unix socket: chat, stream, tools and structured output."""

import asyncio
import json
import os
import sys
from typing import Any

from agents import Agent, OpenAIResponsesModel, Runner, function_tool
from pydantic import BaseModel

TASKS = json.loads(sys.argv[1])
RECIPE: dict[str, Any] = {}
exec(os.environ["RECIPE"], RECIPE)


class Weather(BaseModel):
    """Answer of the structured task."""

    city: str
    degrees: int


@function_tool
def get_weather(city: str) -> str:
    """Tell the weather of a city."""
    return f"21 degrees in {city}"


async def main() -> None:
    """Do all tasks and print what came of them."""
    chat = RECIPE["model"]
    plain = Agent(name="plain", model=chat)
    agent = Agent(name="tools", model=chat, tools=[get_weather])
    typed = Agent(name="typed", model=chat, output_type=Weather)
    responses = agent.clone(model=OpenAIResponsesModel("default", RECIPE["client"]))
    stream = Runner.run_streamed(plain, TASKS["chat"])
    pieces = [
        event.data.delta
        async for event in stream.stream_events()
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]
    result = {
        "chat": (await Runner.run(plain, TASKS["chat"])).final_output,
        "stream": pieces,
        "tools": (await Runner.run(agent, TASKS["tools"])).final_output,
        "structured": (await Runner.run(typed, TASKS["structured"])).final_output.model_dump(),
        "responses": (await Runner.run(responses, TASKS["tools"])).final_output,
    }
    print(json.dumps(result))


asyncio.run(main())
