"""A limit of time for a model's chat template, which is a program."""

import json
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from umbel.models.errors import ModelLoadError
from umbel.models.load import loader
from umbel.models.load.loader import load
from umbel.models.load.time_limit import within

from ..daemon.running import eventually
from ..tiny import tiny_model_dir

LOOP = "{% for a in range(99999) %}"
ENDLESS = f"{LOOP * 4}{{{{ messages[0].role }}}}{'{% endfor %}' * 4}"


def limited() -> int:
    """Threads that run within a limit."""
    return sum(thread.name == "umbel-limited" for thread in threading.enumerate())


def test_work_that_ends_is_not_disturbed() -> None:
    """Its errors are its caller's."""
    done: list[int] = []
    within(30, lambda: done.append(1))
    assert done == [1]
    with pytest.raises(ZeroDivisionError):
        within(30, lambda: 1 / 0)


def test_work_that_does_not_end_is_ended() -> None:
    """Also where it catches what it can."""

    def spin() -> None:
        while True:
            with suppress(Exception):
                sum(range(10))

    with pytest.raises(TimeoutError):
        within(0.05, spin)
    eventually(lambda: limited() == 0)


def test_a_template_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a sentence, and it stops computing."""
    monkeypatch.setattr(loader, "TEMPLATE_LIMIT", 0.3)
    folder = tiny_model_dir(tmp_path / "endless")
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": ENDLESS}))
    with pytest.raises(ModelLoadError, match=r"takes more than 0\.3 seconds"):
        load(str(folder))
    eventually(lambda: limited() == 0)
