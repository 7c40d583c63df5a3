"""litellm over TCP: chat, stream, tools and structured output, and tools in another dialect."""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import litellm
from pydantic import BaseModel

TASKS = json.loads(sys.argv[1])
RECIPE: dict[str, Any] = {}
exec(os.environ["RECIPE"], RECIPE)
ask = RECIPE["ask"]

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tell the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


litellm.suppress_debug_info = True  # it would print that it knows no such model


class Weather(BaseModel):
    """Answer of the structured task."""

    city: str
    degrees: int


def ask_anthropic(messages: list[Any], **options: Any) -> Any:
    """Send a conversation in Anthropic's dialect."""
    return litellm.completion(
        model="anthropic/default",
        api_base=os.environ["URL"],
        api_key="unused",
        messages=messages,
        max_tokens=200,
        **options,
    )


def use_tools(ask: Callable[..., Any]) -> str:
    """Call tools until there is an answer."""
    messages = user("tools")
    while calls := (answer := ask(messages, tools=[TOOL]).choices[0].message).tool_calls:
        messages.append(answer)
        for call in calls:
            city = json.loads(call.function.arguments)["city"]
            said = {"role": "tool", "tool_call_id": call.id, "content": f"21 degrees in {city}"}
            messages.append(said)
    return answer.content


def user(task: str) -> list[Any]:
    """Make a conversation of one message."""
    return [{"role": "user", "content": TASKS[task]}]


chunks = ask(user("chat"), stream=True)
pieces = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
typed = ask(user("structured"), response_format=Weather).choices[0].message.content
result = {
    "chat": ask(user("chat")).choices[0].message.content,
    "stream": [piece for piece in pieces if piece],
    "tools": use_tools(ask),
    "messages": use_tools(ask_anthropic),
    "structured": Weather.model_validate_json(typed).model_dump(),
}
print(json.dumps(result))
