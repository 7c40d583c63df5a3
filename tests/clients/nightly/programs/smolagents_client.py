"""smolagents over TCP: chat, stream, tools of two kinds of agent and structured output."""

import json
import os
import sys
from typing import Any

from smolagents import ChatMessage, CodeAgent, LogLevel, OpenAIModel, ToolCallingAgent, tool

TASKS = json.loads(sys.argv[1])
CITIES: list[str] = []
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "degrees": {"type": "integer"}},
    "required": ["city", "degrees"],
    "additionalProperties": False,
}


@tool
def get_weather(city: str) -> str:
    """Tell the weather of a city.

    Args:
        city: its name.
    """
    CITIES.append(city)
    return f"21 degrees in {city}"


def user(task: str) -> list[ChatMessage]:
    """Make a conversation of one message."""
    return [ChatMessage(role="user", content=TASKS[task])]


model = OpenAIModel("default", api_base=f"{os.environ['URL']}/v1", api_key="unused")
quiet: dict[str, Any] = {"model": model, "verbosity_level": LogLevel.OFF, "max_steps": 3}
agent = ToolCallingAgent(tools=[get_weather], **quiet)
coder = CodeAgent(tools=[get_weather], **quiet)
schema = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA}}
typed = model.generate(user("structured"), response_format=schema)
result = {
    "chat": model.generate(user("chat")).content,
    "stream": [piece.content for piece in model.generate_stream(user("chat")) if piece.content],
    "tools": agent.run(TASKS["final_answer"]),
    "observed": agent.memory.steps[1].observations,
    "code": coder.run(TASKS["code"]),
    "cities": CITIES,
    "structured": json.loads(typed.content),
}
print(json.dumps(result))
