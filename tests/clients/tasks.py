"""The tasks of all clients, and the expected results."""

import json

from pydantic import BaseModel

from .scripted import RESULT, call, plan

SAID = "Good morning, dear agents."
CHAT = plan(SAID)

TOOLS = plan(call("get_weather", city="Paris"), f"It says: {RESULT}.")
USED = "It says: 21 degrees in Paris."

TWO_CALLS = plan(
    [call("get_weather", city="Paris"), call("get_weather", city="Łódź")], f"Also: {RESULT}."
)
USED_TWICE = "Also: 21 degrees in Łódź."

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}


class Weather(BaseModel):
    """The structured output that is asked for."""

    city: str
    degrees: int


WEATHER = Weather(city="Paris", degrees=21)
STRUCTURED = plan(json.dumps(WEATHER.model_dump()))


def get_weather(city: str) -> str:
    """Tell the weather of a city."""
    return f"21 degrees in {city}"
