"""langchain-anthropic over TCP: chat, stream, a tool and structured output."""

import json
import os
import sys

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from pydantic import BaseModel

TASKS = json.loads(sys.argv[1])
CITIES: list[str] = []


class Weather(BaseModel):
    """The type of structured output."""

    city: str
    degrees: int


@tool
def get_weather(city: str) -> str:
    """Tell the weather of a city."""
    CITIES.append(city)
    return f"21 degrees in {city}"


model = ChatAnthropic(model="default", base_url=os.environ["URL"], api_key="unused", max_tokens=200)
messages = [HumanMessage(TASKS["tools"])]
with_tools = model.bind_tools([get_weather])
while calls := (answer := with_tools.invoke(messages)).tool_calls:
    messages += [answer, *[get_weather.invoke(call) for call in calls]]
by_call = model.with_structured_output(Weather)
by_schema = model.with_structured_output(Weather, method="json_schema")
result = {
    "chat": model.invoke(TASKS["chat"]).text,
    "stream": [chunk.text for chunk in model.stream(TASKS["chat"]) if chunk.text],
    "tools": answer.text,
    "cities": CITIES,
    "call": by_call.invoke(TASKS["call"]).model_dump(),
    "structured": by_schema.invoke(TASKS["structured"]).model_dump(),
}
print(json.dumps(result))
