"""The pages in docs/ say what the code does."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Container, Iterable, Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints
from unittest.mock import MagicMock

import msgspec
import pytest
import structlog.testing
import typer.main
from msgspec import Meta
from typer.core import TyperGroup

from umbel.daemon.cli import app as cli
from umbel.daemon.config import SETTINGS, Settings, load
from umbel.daemon.http.app import application
from umbel.daemon.http.handlers.entry import Entry
from umbel.daemon.observability.metrics import Metrics
from umbel.daemon.protocols import (
    chat,
    completions,
    messages,
    messages_content,
    openai_fields,
    response_items,
    responses,
    tools,
)
from umbel.daemon.protocols.generation_request import refused_fields
from umbel.daemon.requests.generation import Generation
from umbel.scheduler.errors import DeadlineExceededError
from umbel.scheduler.handoff import Handoff
from umbel.scheduler.queue import ConversationQueue
from umbel.scheduler.request import FinishReason
from umbel.scheduler.statistics import EngineStatistics

from .daemon import measured
from .fakes import make_request

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(
    [
        *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")),
        ROOT / "benchmarks" / "README.md",
        *DOCS.rglob("*.md"),
    ]
)
HTTP = sorted(str(page.relative_to(DOCS)) for page in (DOCS / "http").glob("*.md"))
# Pages for users and operators; the HTTP reference and two tables of everything may be longer.
LONG = {DOCS / "settings.md", DOCS / "operate" / "log-events.md"}
GUIDES = sorted({*DOCS.glob("*.md"), *(DOCS / "operate").glob("*.md")} - LONG)
MOST_WORDS = 1500

_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def _page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def _not_in(pages: str | list[str], names: Iterable[str]) -> list[str]:
    """List the names that no page mentions as code, alone or at the start of it."""
    pages = [pages] if isinstance(pages, str) else pages
    text = "\n".join(_FENCED.sub("", _page(page)) for page in pages)
    spans = re.findall(r"`([^`\n]+)`", text)
    words = {word for span in spans for word in re.split(r"[\s={]", span)}
    return sorted(name for name in set(names) if name not in words and name not in spans)


def _commands() -> TyperGroup:
    group = typer.main.get_command(cli)
    assert isinstance(group, TyperGroup)
    return group


def test_settings_page_is_generated() -> None:
    """docs/settings.md is what its generator prints."""
    printed = subprocess.run(
        [sys.executable, str(DOCS / "generate_settings.py")],
        check=True,
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert printed.stdout == _page("settings.md"), "run docs/generate_settings.py --write"


def test_settings_page_has_every_setting() -> None:
    """Each setting stands there as key and as environment variable."""
    names = [name for setting in SETTINGS.values() for name in (setting.key, setting.variable)]
    assert _not_in("settings.md", names) == []


def test_settings_page_has_every_flag_of_serve() -> None:
    """Each flag of `umbel serve` is mentioned."""
    flags = [flag for param in _commands().commands["serve"].params for flag in param.opts]
    assert "--model" in flags
    assert _not_in("settings.md", flags) == []


def test_http_page_has_every_route() -> None:
    """Each route of the application is mentioned with its method."""
    router = application(Entry(Settings())).router
    routes = [
        f"{route.method} {route.resource.canonical}"
        for route in router.routes()
        if route.resource is not None and route.method != "HEAD"
    ]
    assert "POST /v1/chat/completions" in routes
    assert _not_in("http/README.md", [r for r in routes if "/responses/" not in r]) == []
    assert _not_in(HTTP, routes) == []


def test_http_page_has_no_other_route() -> None:
    """The table of routes names only what the application serves."""
    router = application(Entry(Settings())).router
    served = {(r.method, r.resource.canonical) for r in router.routes() if r.resource is not None}
    text = "\n".join(_page(page) for page in HTTP)
    told = re.findall(r"^\| `([A-Z]+) (/\S*)` \|", text, re.MULTILINE)
    assert set(told) <= served


def _bounds(hint: object) -> list[Meta]:
    """List the bounds in a type, also in the parts of a union or a list."""
    metadata = getattr(hint, "__metadata__", ())
    own = [meta for meta in metadata if isinstance(meta, Meta)]
    return own + [bound for part in get_args(hint) for bound in _bounds(part)]


def _body_fields() -> dict[str, Any]:
    structs = [
        kind
        for module in (
            *(chat, completions, openai_fields, tools),
            *(messages, messages_content, response_items, responses),
        )
        for kind in vars(module).values()
        if isinstance(kind, type)
        and issubclass(kind, msgspec.Struct)
        and kind.__module__ == module.__name__
    ]
    assert {messages.MessagesRequest, chat.ChatRequest, completions.CompletionRequest} <= set(
        structs
    )
    return {
        name: hint
        for kind in structs
        for name, hint in get_type_hints(kind, include_extras=True).items()
        if name in kind.__struct_fields__
    }


def test_http_page_has_every_bounded_field() -> None:
    """Each field of a body that has bounds is mentioned."""
    bounded = [name for name, hint in _body_fields().items() if _bounds(hint)]
    assert {"temperature", "stop", "messages", "logit_bias"} <= set(bounded)
    assert _not_in(HTTP, bounded) == []


def test_http_page_has_every_field() -> None:
    """Each field that is decoded, accepted or refused, is mentioned."""
    assert _not_in(HTTP, _body_fields()) == []


@pytest.mark.parametrize(
    "kind",
    [
        chat.ChatRequest,
        completions.CompletionRequest,
        messages.MessagesRequest,
        responses.ResponsesRequest,
    ],
)
def test_refused_field_is_listed(kind: type[msgspec.Struct]) -> None:
    assert _not_in("http/unsupported-fields.md", refused_fields(kind)) == []


def test_metrics_page_has_every_metric() -> None:
    """Each metric that is exported is in the table, by its exported name."""
    text = measured.page({"model": Metrics(EngineStatistics, lambda: 0, None)}, vllm=True)
    names = re.findall(r"^# TYPE (\S+) ", text, re.MULTILINE)
    assert "umbel_requests_total" in names
    assert "vllm:num_requests_running" in names
    assert _not_in("operate/metrics.md", names) == []


def test_metrics_page_has_types_and_aliases() -> None:
    """Each row names a metric of its type, and each alias stands in one row and has its type."""
    text = measured.page({"model": Metrics(EngineStatistics, lambda: 0, None)}, vllm=True)
    types = dict(re.findall(r"^# TYPE (\S+) (\w+)$", text, re.MULTILINE))
    table = _page("operate/metrics.md")
    rows = re.findall(r"^\| `(umbel_\w+)` \| (\w+) \|.*\|(.*)\|$", table, re.MULTILINE)
    aliases = [(name, kind) for _, kind, also in rows for name in re.findall(r"vllm:\w+", also)]
    told = [(name, kind) for name, kind, _ in rows] + aliases
    assert sorted(told) == sorted(types.items())


def _log_events(least: Container[str]) -> Iterator[str]:
    """Yield the literal events of log calls at some levels."""
    for folder in ("daemon", "models", "cachestore", "scheduler"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                match node:
                    case ast.Call(
                        func=ast.Attribute(value=ast.Name(id="log"), attr=level),
                        args=[ast.Constant(value=str(event)), *_],
                    ) if level in least:
                        yield event


def test_log_page_has_every_event() -> None:
    """Events at info and above are listed, and every listed event is in the code."""
    shown = ("info", "warning", "error", "exception")
    assert _not_in("operate/log-events.md", _log_events(shown)) == []
    sources = "\n".join(
        path.read_text(encoding="utf-8")
        for folder in ("daemon", "models", "cachestore", "scheduler")
        for path in (ROOT / folder).rglob("*.py")
    )
    cells = re.findall(r"^\| (`[^|]+`) \|", _page("operate/log-events.md"), re.MULTILINE)
    listed = [event for cell in cells for event in re.findall(r"`([^`]+)`", cell)]
    assert [event for event in listed if f'"{event}"' not in sources] == []


async def test_log_page_has_every_key_of_the_request_line() -> None:
    """Each key that a request's log line can have is explained."""
    handoff = Handoff(ConversationQueue(1), lambda: None, channel_limit=1)
    metrics = Metrics(EngineStatistics, lambda: 0, None)
    generation = Generation(make_request("req-1"), handoff, MagicMock(), metrics, 0.0)
    with structlog.testing.capture_logs() as lines:
        async with generation:
            generation.fail(DeadlineExceededError("so that there is an error to log"))
    (line,) = lines
    keys = line.keys() - {"log_level"}
    assert {"request", "left", "error"} <= keys
    assert _not_in("operate/log.md", keys) == []


def test_log_page_has_every_finish() -> None:
    """Each reason for which an answer ends is mentioned."""
    assert _not_in("operate/log.md", FinishReason) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """Relative links name existing files, and headings that are in them."""
    for link in _LINK.findall(_FENCED.sub("", page.read_text(encoding="utf-8"))):
        if "://" in link:
            continue
        name, _, heading = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), f"{page.name} links to {link}"
        if heading:
            assert heading in _headings(target), f"{page.name} links to {link}"


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: str(page.relative_to(DOCS)))
def test_guide_is_short(page: Path) -> None:
    """At most 1,500 words, without the generated tables of models."""
    text = page.read_text(encoding="utf-8").partition("<!-- tables -->")[0]
    assert len(text.split()) <= MOST_WORDS


def test_each_package_has_a_page_with_a_picture() -> None:
    packages = [*("daemon", "scheduler", "models", "cachestore"), "README", "batching"]
    for name in packages:
        assert "```\n" in _page(f"internals/{name}.md")


def test_example_of_settings_loads() -> None:
    """docs/umbel.toml is one that the daemon takes, and has only settings that exist."""
    example = DOCS / "umbel.toml"
    settings = load({}, file=example, environment={})
    assert settings.model == "coder"
    assert settings.models.keys() == {"coder", "small"}
    assert {"research", "nightly", "prometheus"} <= settings.tenants.keys()
    text = example.read_text(encoding="utf-8")
    commented = re.findall(r"^# (\w+ = .*)$", text, re.MULTILINE)
    tomllib.loads("\n".join(commented))
    keys = {line.split(" = ")[0] for line in commented} | tomllib.loads(text).keys()
    tables = {"models", "tenants"}
    assert keys - tables <= {setting.key for setting in SETTINGS.values()}


@pytest.mark.parametrize("name", ["eight-agents.md", "several-models.md", "operate/tenants.md"])
def test_settings_in_guides_load(name: str, tmp_path: Path) -> None:
    blocks = re.findall(r"^```toml\n(.*?)^```", _page(name), re.MULTILINE | re.DOTALL)
    assert blocks
    for number, block in enumerate(blocks):
        path = tmp_path / f"{number}.toml"
        path.write_text(block.replace('models = ["small"]\n', ""), encoding="utf-8")
        load({}, file=path, environment={})


def _headings(page: Path) -> set[str]:
    """The anchors that GitHub makes for a page's headings."""
    text = _FENCED.sub("", page.read_text(encoding="utf-8"))
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_page_can_be_found() -> None:
    """Each page is linked from the README or from another page."""
    linked = {
        (page.parent / link.partition("#")[0]).resolve()
        for page in PAGES
        for link in _LINK.findall(page.read_text(encoding="utf-8"))
        if "://" not in link and link.partition("#")[0]
    }
    alone = [
        str(p.relative_to(ROOT)) for p in PAGES if p.resolve() not in linked | {ROOT / "README.md"}
    ]
    assert alone == []


DECISIONS = sorted((DOCS / "decisions").glob("0*.md"))


@pytest.mark.parametrize("page", DECISIONS, ids=lambda page: str(page.stem))
def test_decision_is_short(page: Path) -> None:
    """At most 40 lines of 120 columns, tables' rows aside; and it is listed."""
    lines = page.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 40
    assert max(len(line) for line in lines if not line.startswith("|")) <= 120
    assert f"]({page.name})" in _page("decisions/README.md")


def _readme_command(mark: str) -> str:
    """The command of README's block behind a mark, without what installs uv."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    block = re.search(rf"^<!-- {mark} -->\n```sh\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    assert block is not None
    (line,) = block[1].splitlines()
    start = "pip install uv && uv run "
    assert line.startswith(start)
    return line.removeprefix(start)


def test_readme_demo_command_exists() -> None:
    """The demonstration is one line that names a command of umbel's."""
    program, command = _readme_command("demo").split()[:2]
    assert program == "umbel"
    assert command in _commands().commands


def test_readme_test_command_exists() -> None:
    """The tests are one line that names a tool of the dev group."""
    program = _readme_command("test").split()[0]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    needed = [re.split(r"[^\w-]", need)[0] for need in project["dependency-groups"]["dev"]]
    assert program == "pytest"
    assert program in needed


def test_benchmarks_have_one_table_each() -> None:
    """The newest figures, and no diary."""
    page = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    for section in page.split("\n## ")[1:]:
        assert len(re.findall(r"^\|[ :|-]+\|$", section, re.MULTILINE)) <= 1, section[:40]


def test_pages_have_no_paths_of_one_machine() -> None:
    """Paths in pages are those of any machine."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert not re.search(r"(?<![\w~.])/(work|root|home|Users|tmp)/", text), page.name


def test_rows_about_floods_name_tests_that_exist() -> None:
    rows = re.findall(
        r"^\| .+ \| .+ \| `(tests/[\w/]+\.py)::(\w+)` \|$", _page("operate/floods.md"), re.MULTILINE
    )
    assert len(rows) >= 15
    for file, name in rows:
        source = (ROOT / file).read_text(encoding="utf-8")
        there = re.search(rf"^(async )?(def|class) {name}\b", source, re.MULTILINE)
        assert there, f"{file}::{name}"
