"""langchain-openai over the Unix socket: chat, stream, tools and structured output."""

import json
import os
import sys
from typing import Any

from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from pydantic import BaseModel

TASKS = json.loads(sys.argv[1])
RECIPE: dict[str, Any] = {}
exec(os.environ["RECIPE"], RECIPE)


class Weather(BaseModel):
    """Answer of the structured task."""

    city: str
    degrees: int


@tool
def get_weather(city: str) -> str:
    """Tell the weather of a city."""
    return f"21 degrees in {city}"


model = RECIPE["model"]
messages = [HumanMessage(TASKS["tools"])]
with_tools = model.bind_tools([get_weather])
while calls := (answer := with_tools.invoke(messages)).tool_calls:
    messages += [answer, *[get_weather.invoke(call) for call in calls]]
result = {
    "chat": model.invoke(TASKS["chat"]).text,
    "stream": [chunk.text for chunk in model.stream(TASKS["chat"]) if chunk.text],
    "tools": answer.text,
    "structured": model.with_structured_output(Weather).invoke(TASKS["structured"]).model_dump(),
}
print(json.dumps(result))
