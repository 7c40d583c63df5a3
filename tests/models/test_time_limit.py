"""A time limit for a model's chat template, which is a program."""

import asyncio
import json
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from umbel.daemon.http.failures import as_api_error
from umbel.daemon.requests.workers import Workers
from umbel.models.errors import ModelLoadError, TemplateTimeoutError
from umbel.models.load import loader
from umbel.models.load.loader import load
from umbel.models.load.time_limit import within
from umbel.models.text import codec
from umbel.models.text.conversation import Conversation, Message
from umbel.scheduler.tenants import TenantUse, Terms

from ..daemon.running import eventually
from ..tiny import tiny_model_dir

LOOP = "{% for a in range(99999) %}"
ENDLESS = f"{LOOP * 4}{{{{ messages[0].role }}}}{'{% endfor %}' * 4}"


def limited() -> int:
    return sum(thread.name == "umbel-limited" for thread in threading.enumerate())


def test_work_that_ends_is_not_disturbed() -> None:
    assert within(30, lambda: 1) == 1

    def slow() -> int:
        time.sleep(0.05)
        return 2

    assert within(30, lambda: within(0, slow)) == 2
    with pytest.raises(ZeroDivisionError):
        within(30, lambda: 1 / 0)


def test_work_that_does_not_end_is_ended() -> None:
    def spin() -> None:
        while True:
            with suppress(Exception):
                sum(range(10))

    with pytest.raises(TimeoutError):
        within(0.05, spin)
    eventually(lambda: limited() == 0)


def with_template(folder: Path, template: str) -> Path:
    tiny_model_dir(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    return folder


def test_a_template_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "TEMPLATE_LIMIT", 0.3)
    folder = with_template(tmp_path / "endless", ENDLESS)
    with pytest.raises(ModelLoadError, match=r"takes more than 0\.3 seconds"):
        load(str(folder))
    eventually(lambda: limited() == 0)


def test_a_request_that_a_template_does_not_end_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    folder = with_template(
        tmp_path / "loops",
        f"{{% if 'loop' in messages[-1].content %}}{ENDLESS}{{% endif %}}{shown}",
    )
    text = load(str(folder)).text
    monkeypatch.setattr(codec, "TEMPLATE_LIMIT", 0.5)

    def render(content: str) -> list[int]:
        return text.encode_conversation(
            Conversation(messages=[Message(role="user", content=content)])
        )

    async def check() -> None:
        workers = Workers(100, 60, TenantUse(lambda _: Terms()))
        ending = [
            asyncio.create_task(workers.run(lambda _: render("loop"), 10, tenant))
            for tenant in "aab"
        ]
        answers = [workers.run(lambda _: render("hi"), 10, tenant) for tenant in "abc"]
        expected = text.encode("user: hi\n", special_tokens=False)
        assert await asyncio.gather(*answers) == [expected] * 3
        for ended in await asyncio.gather(*ending, return_exceptions=True):
            assert isinstance(ended, TemplateTimeoutError)
            error = as_api_error(ended)
            assert (error.status, error.code) == (500, "template_timeout")
            assert "chat template takes more than 0.5 seconds" in error.message
        workers.close()

    asyncio.run(check())
    eventually(lambda: limited() == 0)
