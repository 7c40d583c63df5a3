"""A short form of `benchmarks/conversations.py`: its prompts, its figures, and its failures."""

import json
import subprocess
import sys
import time
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

import umbel.models  # noqa: F401  (before mlx.core)
from umbel.models.load.loader import load
from umbel.models.text.conversation import Conversation, Message

import mlx.core as mx  # isort: skip

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))  # scripts, and no package

import conversations
import loads
from conversations import PRESETS, Result, first_fault, main
from conversations_report import report, report_ended
from model_folders import FOLDERS, write
from recorder import operations
from side_by_side import Turn
from step_trace import kind, summary
from workload import Answer, Texts, Workload, crowd

RECORDER = Path(__file__).parent.parent / "benchmarks" / "recorder.py"
TEMPLATE = 12  # tokens that the tiny model's template adds to a message, at most
SMALL = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size"), 64),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "head_dim"), 32),
    **dict.fromkeys(("num_attention_heads", "linear_num_value_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "linear_num_key_heads"), 2),
}
END = 60.0


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversations, "_UNCHANGED", 0.1)


def test_texts_have_as_many_tokens_as_asked_for(tiny_dir: Path) -> None:
    """The seed decides which."""
    texts = Texts(tiny_dir)
    for count in (12, 61, 400):
        made = [texts.of(count, "1 2:", seed) for seed in range(3)]
        assert [texts.count(text) for text in made] == [count] * 3
        assert len(set(made)) == 3


@pytest.mark.slow
@pytest.mark.parametrize("shape", FOLDERS)
def test_a_folder_of_each_shape_can_be_served(shape: str, tmp_path: Path) -> None:
    """It loads, and has a tokenizer with a template."""
    model = load(str(write(shape, tmp_path, **SMALL)))
    hello = Conversation(messages=[Message(role="user", content="hello")])
    assert model.text.encode_conversation(hello)


def test_what_made_a_server_fail_is_shown() -> None:
    """The end of the first traceback, and what was being done; not what comes of it."""
    frames = [f"  line {number}" for number in range(60)]
    echo = ["Traceback (most recent call last):", "  line", "RuntimeError: died"]
    log = ["started", "ERROR: a thread", "Traceback (most recent call last):", *frames]
    shown = first_fault("\n".join([*log, "MemoryError: no room", *echo]))
    assert shown[0] == "ERROR: a thread"
    assert shown[-1] == "MemoryError: no room"
    assert 10 < len(shown) < 30
    assert first_fault("only\nwords") == ["only", "words"]


def test_turns_before_a_server_failed_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """Those that had ended for all agents."""
    turn = Turn(ttft=0.5, gaps=[0.01, 0.02], prompt=10, cached=4, tokens=3)
    report_ended("mlx_lm", [[Answer(0.0, 1.0, turn, 3)] * 2, [Answer(0.5, 2.0, turn, 3)]])
    failed, *turns = capsys.readouterr().out.splitlines()
    assert failed == "mlx_lm.server failed before all had ended turn 2"
    (first,) = turns
    assert first.startswith("turn 1 had ended: wall, s 2.00; TTFT p50, s 0.50;")
    assert "prompt tokens computed 12" in first


def test_lengths_of_mixed_loads_are_heavy_tailed(tiny_dir: Path) -> None:
    """Most messages are short and a few are long; the same agents ask the same each time."""
    workload = Workload(40, 4, 0, 0, 12, 3, message_max=400, answer_max=8, pause=0.5)
    texts = Texts(tiny_dir)
    agents = crowd(None, workload, texts)
    questions = [question for agent in agents for question in agent.questions]
    lengths = sorted(texts.count(question.text) for question in questions)
    assert lengths[0] >= 12
    assert lengths[len(lengths) // 2] < 30
    assert 200 < lengths[-1] <= 400
    assert {question.answer for question in questions} == set(range(3, 9))
    assert all(question.pause <= 0.5 for question in questions)
    assert [agent.questions for agent in crowd(None, workload, texts)] == [
        agent.questions for agent in agents
    ]


def test_operations_count_until_they_are_evaluated() -> None:
    """Each counts once, whatever the nesting of the arrays that need it."""
    given = mx.zeros((2, 2))
    mx.eval(given)
    first = mx.exp(given)
    second = mx.sin(first)
    assert operations([first, {"second": second}], given) == 2
    mx.eval(first)
    assert operations(second) == 1


def check_lengths(answers: list[dict[str, Any]], workload: Workload) -> None:
    """See that one agent's prompts had what was asked for, and the template's tokens."""
    assert len(answers) == workload.turns
    least = workload.shared + workload.private
    most = least + TEMPLATE  # of the system prompt
    for answer in answers:
        least += workload.message
        most += workload.message + 2 * TEMPLATE  # and of the answer that begins
        assert least <= answer["turn"]["prompt"] <= most
        assert answer["turn"]["tokens"] == workload.answer
        least += min(workload.answer, answer["again"])
        most += max(workload.answer, answer["again"])


def test_both_servers_are_measured(
    tiny_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same questions have whole answers, and every figure is there."""
    path, workload = tmp_path / "found.json", PRESETS["tiny"]
    given = ["--preset", "tiny", "--model", str(tiny_dir), "--json", str(path)]
    assert main([*given, "--operations", "--lockstep"]) == 0
    results = json.loads(path.read_text())["results"]
    assert [result["name"] for result in results] == ["umbel", "mlx_lm"]
    for result in results:
        unseen = set() if sys.platform == "linux" else {"peak memory of the process, MiB"}
        assert {name for name, value in result["whole"].items() if not value} <= unseen
        assert len(result["answers"]) == workload.agents
        for answers in result["answers"]:
            check_lengths(answers, workload)
        turns = list(zip(*result["answers"], strict=True))
        ends = [max(answer["end"] for answer in turn) for turn in turns]
        starts = [min(answer["start"] for answer in turn) for turn in turns]
        assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))
    shown = capsys.readouterr().out
    assert "| wall, s |" in shown
    assert "umbel · mlx_lm.server · ratio" in shown


def test_a_mixed_load_is_measured(
    tiny_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Agents arrive one after another, pause, and have answers of the lengths asked for."""
    path, workload = tmp_path / "found.json", PRESETS["tiny-mixed"]
    given = ["--preset", "tiny-mixed", "--model", str(tiny_dir), "--only", "umbel"]
    assert main([*given, "--json", str(path), "--limit", "300"]) == 0
    (result,) = json.loads(path.read_text())["results"]
    assert result["complete"]
    agents = crowd(None, workload, Texts(tiny_dir))
    begun = min(answers[0]["start"] for answers in result["answers"])
    for agent, answers in zip(agents, result["answers"], strict=True):
        asked = agent.questions[: workload.turns]
        assert [answer["turn"]["tokens"] for answer in answers] == [q.answer for q in asked]
        assert answers[0]["start"] - begun >= 0.9 * asked[0].pause
        for question, before, answer in zip(asked[1:], answers, answers[1:], strict=False):
            assert answer["start"] - before["end"] >= 0.9 * question.pause
            assert answer["turn"]["cached"] >= workload.shared
    assert result["whole"]["answers"] == workload.agents * workload.turns
    assert result["whole"]["ITL p50, ms"] <= result["whole"]["ITL p99, ms"]
    shown = capsys.readouterr().out
    assert "| TTFT p99, s |" in shown
    assert "stopped" not in shown


def test_loads_come_in_one_table(
    tiny_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One row for each preset; the other flags are those of `conversations.py`."""
    path = tmp_path / "found.json"
    given = ["--presets", "tiny", "tiny-mixed", "--model", str(tiny_dir), "--only", "umbel"]
    assert loads.main([*given, "--json", str(path), "--", "--no-disk"]) == 0
    found = json.loads(path.read_text())
    assert [found[name][0]["whole"]["answers"] for name in ("tiny", "tiny-mixed")] == [4, 6]
    shown = capsys.readouterr().out
    assert "| tiny | umbel, process 1 |" in shown
    assert "| tiny-mixed | umbel, process 1 |" in shown


def test_a_limit_ends_a_run(tiny_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The program says how far the server came and fails, even if no answer has ended."""
    given = ["--preset", "tiny-mixed", "--model", str(tiny_dir), "--only", "umbel"]
    assert main([*given, "--limit", "0.001"]) == 1
    assert "0 of 6 answers had ended" in capsys.readouterr().out


def test_what_a_stopped_server_answered_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """Agents may have different numbers of answers; there are no ratios then."""
    turn = Turn(ttft=0.5, gaps=[0.01, 0.02], prompt=10, cached=4, tokens=3)
    record = dict.fromkeys(("device", "mlx", "mlx_lm")) | {"steps": [], "loops": []}
    record |= {"cpu_s": 1.0, "peak_bytes": 0, "held_bytes": 0}
    answer = Answer(0.0, 1.0, turn, 3)
    rest = (100.0, 0.0, record, None, None)
    ours = Result("umbel", 1, 1.0, 4.0, True, *rest, [[answer] * 2, [answer] * 2])
    theirs = Result("mlx_lm", 1, 1.0, 2.0, False, *rest, [[answer] * 1, []])
    report([ours, theirs], 4)
    shown = capsys.readouterr().out.replace("\N{EN DASH}", "-")
    assert "mlx_lm.server, process 1: stopped after 2.0 s, when 1 of 4 answers had ended." in shown
    assert "| wall, s | 4.00 | 2.00 | - |" in shown
    assert "| 2 | 1.00 · - | 0.50 · - |" in shown


def test_steps_are_traced_by_phase(
    tiny_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step has its rows and chunks, the memory it asked for, and the times of its phases.

    An interrupted program prints its results until then, and fails.
    """
    real = conversations.run

    def run(name: str, *others: Any) -> Any:
        if name == "mlx_lm":
            raise KeyboardInterrupt
        return real(name, *others)

    monkeypatch.setattr(conversations, "run", run)
    path = tmp_path / "found.json"
    given = ["--preset", "tiny", "--model", str(tiny_dir), "--json", str(path)]
    state = tmp_path / "state"
    assert main([*given, "--trace", "--state", str(state)]) == 1
    assert list((state / "state-umbel").rglob("*.json")), "the next run finds what was measured"
    written = capsys.readouterr()
    assert "mlx_lm, process 1, was interrupted" in written.err
    assert "| wall, s |" in written.out
    (result,) = json.loads(path.read_text())["results"]
    steps = result["record"]["trace"]
    assert len(steps) == len(result["record"]["steps"])
    computed = sum(a["turn"]["prompt"] - a["turn"]["cached"] for a in chain(*result["answers"]))
    prefilled = sum(sum(step["chunks"]) for step in steps if "chunks" in step)
    assert 0 < prefilled == computed
    for step in steps:
        outer = (step.get(name, 0.0) for name in ("page", "admit", "afford", "decode", "prefill"))
        assert sum(outer) <= step["step"]
    busy = [step for step in steps if step.get("rows")]
    assert all(step["transient"] > 0 < step["launch"] for step in busy)
    assert all(step.get("decode", 0.0) >= step["launch"] for step in busy)
    for step in steps:  # clocks have their own grain
        assert all(0 <= cpu <= step[name] + 0.02 for name, cpu in step["cpus"].items())
    shown = "\n".join(summary(steps, long=0.0))
    assert f"decode: {sum(kind(step) == 'decode' for step in steps)} steps" in shown
    assert shown.count("GiB budget") == len(steps)


def test_a_server_that_does_not_start_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The program says so and fails."""
    assert main(["--preset", "tiny", "--model", str(tmp_path), "--only", "umbel"]) == 1
    said = capsys.readouterr().err
    assert "umbel, process 1, failed" in said
    assert "umbel, process 1, ended with status 1" in said


def test_a_server_ends_when_its_starter_is_gone(tiny_dir: Path, short_path: Path) -> None:
    """However that ended: its end of the pipe is closed."""
    command = [sys.executable, str(RECORDER), "umbel", "serve"]
    command += ["--model", str(tiny_dir), "--socket", str(short_path / "u.sock"), "--no-disk"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + END
            while not (short_path / "u.sock").exists() and time.monotonic() < deadline:
                time.sleep(0.05)
            assert process.poll() is None
            assert process.stdin is not None
            process.stdin.close()
            assert process.wait(END) == 0
        finally:
            process.kill()
