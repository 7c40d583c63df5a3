"""Several models in one daemon: loaded when asked for, unloaded when idle or for another."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ..tiny import tiny_model_dir
from . import command
from .running import RunningDaemon, eventually, running

MIB = 1 << 20
CHAT = "/v1/chat/completions"


def ask(model: str | None, text: str = "hello", **more: Any) -> dict[str, Any]:
    """A request for a few greedy tokens."""
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 6, "temperature": 0}
    return {**body, **({} if model is None else {"model": model}), **more}


def said(daemon: RunningDaemon, model: str | None, text: str = "hello") -> tuple[str, str]:
    """A model's answer, and its name there."""
    reply = daemon.post(ask(model, text))
    assert reply.status == 200, reply.body
    answer = reply.json()
    return answer["model"], answer["choices"][0]["message"]["content"]


def slots(daemon: RunningDaemon) -> dict[str, Any]:
    """Each model in `/status`."""
    return {slot["name"]: slot for slot in daemon.status()["models"]}


def states(daemon: RunningDaemon) -> dict[str, str]:
    """Where each model is."""
    return {name: slot["state"] for name, slot in slots(daemon).items()}


def umbel(daemon: RunningDaemon, *words: str) -> tuple[int, str]:
    """Run a command about a daemon; its exit status, and what it says."""
    done = command.umbel(*words, "--socket", str(daemon.socket), folder=daemon.folder)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three models that answer differently."""
    folder = tmp_path_factory.mktemp("several")
    return [tiny_model_dir(folder / name, seed=n) for n, name in enumerate(("one", "two", "three"))]


def configured(folder: Path, models: list[Path], text: str = "", **tables: str) -> dict[str, str]:
    """Write a configuration with a table for each further model; what names it."""
    lines = [text]
    for path in models[1:]:
        lines += [f"[models.{path.name}]", f"model = '{path}'", tables.get(path.name, "")]
    file = folder / "umbel.toml"
    file.write_text("\n".join(lines))
    return {"UMBEL_CONFIG": str(file)}


@pytest.fixture
def folder(short_path: Path) -> Path:
    """A folder whose path is short enough for a socket."""
    return short_path


def test_each_answers_under_its_names(folder: Path, models: list[Path]) -> None:
    """A model is loaded when it is first asked for; names, aliases and the default lead to it."""
    tables = {"two": 'aliases = ["deux"]', "three": "context = 200"}
    env = configured(folder, models, "[models.aliases]\ntrois = 'three'", **tables)
    with running(folder, models[0], env=env) as daemon:
        assert states(daemon) == {"one": "loaded", "two": "unloaded", "three": "unloaded"}
        listed = daemon.request("GET", "/v1/models").json()["data"]
        assert [model["id"] for model in listed] == ["one", "two", "deux", "three", "trois"]
        assert ["context_length" in model for model in listed] == [True, *[False] * 4]
        body, soon = msgspec.json.encode(ask("two")), {"X-Umbel-Timeout": "0.001"}
        late = daemon.request("POST", CHAT, body, soon)
        assert (late.status, "two was not loaded in time" in late.body.decode()) == (504, True)
        answers = {name: said(daemon, name) for name in ("one", "two", "deux", "three", "trois")}
        assert {name: model for name, (model, _) in answers.items()} == {
            "one": "one",
            "two": "two",
            "deux": "two",
            "three": "three",
            "trois": "three",
        }
        assert said(daemon, None) == said(daemon, "default") == answers["one"]
        assert answers["two"] == answers["deux"]
        assert len({text for _, text in answers.values()}) == 3
        assert set(states(daemon).values()) == {"loaded"}
        assert slots(daemon)["three"]["context_length"] == 200
        refused = daemon.post(ask("four"))
        assert refused.status == 404
        assert "'one', 'two', 'three'" in refused.json()["error"]["message"]
        told = daemon.request("GET", "/metrics").body.decode()
        assert 'umbel_requests_total{model="two",outcome="length"} 2.0' in told
        assert daemon.request("GET", "/cache?model=two").json()["nodes"] > 0
        assert daemon.request("GET", "/cache?model=unknown").status == 404


def test_status_tells_of_each_what_it_does(folder: Path, models: list[Path]) -> None:
    env = configured(folder, models)
    with running(folder, models[0], "--max-batch", "1", env=env) as daemon:
        clients = [daemon.send(ask("two", max_tokens=1900)) for _ in range(2)]

        def one_runs() -> Any:
            told = slots(daemon)["two"]
            return told["queued"] == 1 and told["engine"]["running"] and told

        told = eventually(one_runs)
        (row,) = told["engine"]["running"]
        assert row["prompt_tokens"] > 0
        assert told["using"] == 2
        assert told["budget_bytes"] > 0
        assert told["disk"]["state"] == "on"
        status = daemon.status()
        others = {slot["name"]: slot for slot in status["models"]}
        assert others["one"]["engine"] == status["engine"]
        assert (others["one"]["engine"]["running"], others["one"]["queued"]) == ([], 0)
        asleep = [others["three"][each] for each in ("engine", "disk", "budget_bytes")]
        assert asleep == [None, None, None]
        for client in clients:
            client.close()
        eventually(lambda: not slots(daemon)["two"]["using"])
        said(daemon, "two")
        cache = eventually(
            lambda: (held := slots(daemon)["two"]["engine"]["cache"])["nodes"] and held
        )
        assert cache["span_bytes"] > 0
        listed = umbel(daemon, "models")[1]
        assert f"{daemon.socket} serves one (loaded), two (loaded), three (unloaded)." in listed
        assert slots(daemon)["one"]["engine"]["cache"]["nodes"] == 0


def test_who_waits_for_a_model_has_a_row(folder: Path, models: list[Path]) -> None:
    """In `/status` and `umbel ps`, with the time of it; and the log says so."""
    env = configured(folder, models[:2])
    with running(folder, models[0], env=env) as daemon:
        body = ask("two")
        named = {"X-Umbel-Conversation": "early"}
        thread = threading.Thread(
            target=daemon.request, args=("POST", CHAT, msgspec.json.encode(body), named)
        )
        thread.start()
        loading = [["early", "two", "model"]]
        keys = ("conversation", "model", "activity")

        def rows() -> Any:
            told = daemon.status()["arriving"]
            return [[row[key] for key in keys] for row in told] == loading and told

        (row,) = eventually(rows)
        assert row["seconds"].keys() >= {"model"}
        assert row["tenant"].startswith("uid:")
        thread.join()
        assert daemon.status()["arriving"] == []
        line = eventually(lambda: [x for x in daemon.log().splitlines() if "=early" in x])[0]
        assert " waited_for=model " in line


def test_the_commands_for_the_cache_take_a_model(folder: Path, models: list[Path]) -> None:
    """`umbel cache` asks about the default model, or about the one that is named."""
    env = configured(folder, models[:2], two='aliases = ["deux"]\npinned = true')
    with running(folder, models[0], env=env) as daemon:
        said(daemon, "two", "of ferns")

        def cache(*words: str) -> tuple[int, str]:
            return umbel(daemon, "cache", *words)

        assert "ferns" not in cache("ls")[1]
        assert "ferns" in cache("ls", "--model", "two")[1]
        assert not cache("stats", "--model", "deux")[1].startswith("0 tokens")
        assert cache("clear", "--model", "two")[1] != "0 tokens forgotten\n"
        assert "ferns" not in cache("ls", "--model", "two")[1]
        status, text = cache("verify", "--model", "four")
        assert (status, "four" in text) == (1, True)


def test_an_idle_one_is_unloaded_and_comes_back_with_its_state(
    folder: Path, models: list[Path]
) -> None:
    """Its memory is given back; what it had computed is read from disk."""
    env = configured(folder, models[:2], two="unload_after = 0.3")
    long = "once upon a time " * 20
    with running(folder, models[0], env=env) as daemon:
        before = daemon.status()["memory"]["active"]
        answer = said(daemon, "two", long)
        assert daemon.status()["memory"]["active"] > before
        eventually(lambda: states(daemon)["two"] == "unloaded")
        assert daemon.status()["memory"]["active"] <= before
        refused = daemon.request("GET", "/cache?model=two")
        assert (refused.status, refused.json()["error"]["message"]) == (503, "two is not loaded")
        again = daemon.post(ask("two", long)).json()
        assert again["choices"][0]["message"]["content"] == answer[1]
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert states(daemon)["one"] == "loaded"


def test_a_pinned_one_stays(folder: Path, models: list[Path]) -> None:
    """It is there from the start, and no idle time counts."""
    env = configured(folder, models[:2], two="pinned = true\nunload_after = 0.1")
    with running(folder, models[0], env=env) as daemon:
        assert states(daemon) == {"one": "loaded", "two": "loaded"}
        assert said(daemon, "two")[0] == "two"
        eventually(lambda: slots(daemon)["two"]["idle_seconds"] > 1)
        assert states(daemon)["two"] == "loaded"


def test_one_that_cannot_be_loaded_harms_no_other(folder: Path, models: list[Path]) -> None:
    """Each who asks for it hears why; it is not tried again for each."""
    broken = folder / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{")
    env = configured(folder, [models[0], broken])
    with running(folder, models[0], env=env) as daemon:
        with ThreadPoolExecutor(4) as pool:
            replies = list(pool.map(daemon.post, [ask("broken")] * 8))
        assert {reply.status for reply in replies} == {503}
        assert "broken cannot be loaded" in replies[0].json()["error"]["message"]
        said(daemon, None)
        assert "cannot load" in slots(daemon)["broken"]["failure"]
        assert daemon.log().count("event=loading model=" + str(broken)) == 1


def test_a_stream_hears_that_its_model_is_loading(folder: Path, models: list[Path]) -> None:
    """Comments come until the answer does, in each protocol; an error then is an event."""
    env = configured(folder, models[:2], "keepalive = 0.01")
    with running(folder, models[0], env=env) as daemon:
        replies = [daemon.post(ask("two", stream=True)), daemon.post(ask("two", stream=True))]
        texts = [reply.body.decode() for reply in replies]
    assert ": loading two\n\n" in texts[0]
    assert texts[0].endswith("data: [DONE]\n\n")
    assert ": loading" not in texts[1]


def test_a_tenants_bounds_hold_for_all_models_together(
    folder: Path, models: list[Path], long_tiny_dir: Path
) -> None:
    pair = [long_tiny_dir, models[1]]
    bounds = "keepalive = 0.1\n[tenants.default]\nrunning = 1\nwaiting = 2"
    env = configured(folder, pair, bounds)
    with running(folder, long_tiny_dir, env=env) as daemon:
        assert said(daemon, "two")[0] == "two"
        long = ask(None, "Once", max_tokens=6000)
        first, streamed = daemon.stream(long)
        assert streamed.status == 200
        streamed.readline()
        others = [daemon.stream(ask("two", f"again {number}")) for number in range(2)]

        def waits() -> list[str]:
            return [each["activity"] for each in slots(daemon)["two"]["requests"]]

        eventually(lambda: waits() == ["tenant", "tenant"])
        for model in (None, "two"):
            refused = daemon.post(ask(model, "more"))
            assert refused.status == 429, refused.body
            assert b"2 requests of tenant uid" in refused.body
        first.close()
        for connection, response in others:
            assert response.read().endswith(b"data: [DONE]\n\n")
            connection.close()
        said(daemon, None)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_three_in_memory_for_two(folder: Path, tmp_path: Path) -> None:
    """200 mixed requests to two tiny models and the embedded one: all right, never over budget."""
    wide = {"hidden_size": 512, "intermediate_size": 24_000, "num_hidden_layers": 2}
    big = [tiny_model_dir(tmp_path / name, seed=n, **wide) for n, name in enumerate(("one", "two"))]
    tables = "".join(f"[models.{path.name}]\nmodel = '{path}'\n" for path in big)
    budget = 1000 * MIB
    file = folder / "umbel.toml"
    file.write_text(f"memory_bytes = '{budget}'\ncache_bytes = '160MiB'\n{tables}")
    names = ["smollm2", "one", "two"]
    with running(folder, "smollm2", env={"UMBEL_CONFIG": str(file)}) as daemon:
        asks = [(name, f"Number {number}, please.") for name in names for number in range(4)]
        expected = {each: said(daemon, *each) for each in asks}
        most, over = [0], threading.Event()

        def watch() -> None:
            while not over.wait(0.02):
                most[0] = max(most[0], daemon.status()["memory"]["active"])

        watcher = threading.Thread(target=watch)
        watcher.start()
        chosen = random.Random(7).choices(asks, k=200)  # noqa: S311
        try:
            with ThreadPoolExecutor(48) as pool:
                answers = list(pool.map(lambda each: said(daemon, *each), chosen))
        finally:
            over.set()
            watcher.join()
        assert answers == [expected[each] for each in chosen]
        assert sorted(states(daemon).values()).count("loaded") <= 2
        assert daemon.log().count("event=unloaded") > 1
        assert most[0] <= budget


def test_a_model_answers_as_its_makers_say(folder: Path, tmp_path: Path) -> None:
    """Where a request says nothing; what it says is stronger, in each protocol."""
    greedy = tiny_model_dir(tmp_path / "greedy")
    (greedy / "generation_config.json").write_text('{"temperature": 0.0}')
    env = configured(folder, [greedy])
    hello = [{"role": "user", "content": "hello"}]
    asked: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": hello, "max_tokens": 8},
        "/v1/responses": {"input": "hello", "max_output_tokens": 8},
        "/v1/messages": {"messages": hello, "max_tokens": 8},
    }
    with running(folder, greedy, env=env) as daemon:
        for path, body in asked.items():
            texts = [
                words(daemon.post({**body, **more}, path).json())
                for more in ({}, {"temperature": 2})
                for _ in range(3)
            ]
            assert len(set(texts[:3])) == 1, path
            assert len(set(texts[3:])) > 1, path


def words(answer: dict[str, Any]) -> str:
    """Text of an answer of any protocol."""
    if "choices" in answer:
        return str(answer["choices"][0]["message"]["content"])
    if "output" in answer:
        return str(answer["output"][0]["content"][0]["text"])
    return str(answer["content"][0]["text"])
