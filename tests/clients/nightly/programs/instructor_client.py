"""instructor over TCP: chat, stream, a tool and structured output, in two protocols."""

import json
import os
import sys
from typing import Any

import instructor
from openai import OpenAI
from pydantic import BaseModel

TASKS = json.loads(sys.argv[1])
client = OpenAI(base_url=f"{os.environ['URL']}/v1", api_key="unused")


class Weather(BaseModel):
    """The type of structured output."""

    city: str
    degrees: int


def ask(mode: instructor.Mode, task: str, response_model: Any = Weather) -> Any:
    """Do a task in a mode."""
    return instructor.from_openai(client, mode=mode).create(
        model="default",
        response_model=response_model,
        messages=[{"role": "user", "content": TASKS[task]}],
        max_retries=0,
    )


partial = instructor.from_openai(client, mode=instructor.Mode.JSON).create_partial(
    model="default",
    response_model=Weather,
    messages=[{"role": "user", "content": TASKS["structured"]}],
)
chat = ask(instructor.Mode.TOOLS, "chat", None)
result = {
    "chat": chat.choices[0].message.content,
    "stream": [weather.model_dump() for weather in partial],
    "call": ask(instructor.Mode.TOOLS, "call").model_dump(),
    "structured": ask(instructor.Mode.JSON, "structured").model_dump(),
    "schema": ask(instructor.Mode.JSON_SCHEMA, "structured").model_dump(),
    "responses": ask(instructor.Mode.RESPONSES_TOOLS, "call").model_dump(),
}
print(json.dumps(result))
