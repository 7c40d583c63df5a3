"""`umbel models list` and `recommend`: models on this machine, models that fit, and their sizes."""

from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
from huggingface_hub import CachedRepoInfo, CachedRevisionInfo, CacheNotFound, scan_cache_dir

from ... import models
from ...models.errors import ModelError
from ...models.estimate.config import ModelConfig
from ...models.estimate.facts import EMBEDDED, ModelFacts, Weights, read_facts
from ...models.load import embedded_file
from ..config import Settings
from ..errors import ClientError
from ..quoting import amount
from .fit import Fit, Machine, agents, fit, machine_of

SHARED = 4096
"""Tokens of the prompt that agents share, as recommendations assume."""

_GB = 10**9


class ListedModel(msgspec.Struct, frozen=True):
    """A model on this machine.

    Attributes:
        name: as `--model` takes it.
        source: `embedded`, `folder` or `Hugging Face cache`.
        disk_bytes: its size on disk.
        fit: None if its files do not tell.
        problem: the reason if it cannot be served.
    """

    name: str
    source: str
    disk_bytes: int
    fit: Fit | None = None
    problem: str = ""


class ModelList(msgspec.Struct, frozen=True):
    """All models on this machine.

    Attributes:
        machine: for the daemon.
        models: by name.
        served: the models of the daemon on the socket, each with its state; None without a daemon.
    """

    machine: Machine
    models: list[ListedModel]
    served: dict[str, str] | None


async def report(
    memory: str | None, device: str | None, settings: Settings, *, json: bool
) -> list[str]:
    """Describe the models on this machine, in lines.

    Args:
        memory: see `machine_of`.
        device: see `machine_of`.
        settings: of the daemon: its model, its budgets, its socket.
        json: in JSON.

    Raises:
        FlagError: as from `machine_of`.
    """
    machine = machine_of(memory, device)
    found = [*_embedded(), *_folders(settings), *_cached()]
    fitted = [
        model
        if facts is None
        else msgspec.structs.replace(model, fit=fit(facts, machine, settings))
        for model, facts in found
    ]
    listed = ModelList(machine, fitted, await _served(settings.socket_path))
    return _json(listed) if json else list(_list_lines(listed, settings))


_Found = tuple[ListedModel, ModelFacts | None]


def _embedded() -> Iterator[_Found]:
    file, is_here = embedded_file.FILE, embedded_file.FILE.has_size(embedded_file.path())
    problem = "" if is_here else "fetched at its first start"
    size = file.nbytes if is_here else 0
    yield ListedModel(embedded_file.NAME, "embedded", size, problem=problem), EMBEDDED


def _folders(settings: Settings) -> Iterator[_Found]:
    """Describe the folders in the configuration."""
    for name in dict.fromkeys([settings.model, *settings.models]):
        folder = Path(settings.source_of(name))
        if folder.is_dir():
            size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
            yield _described(name, "folder", size, folder)


def _cached() -> Iterator[_Found]:
    """Describe the models in Hugging Face's cache, also incomplete ones."""
    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        return
    for repo in sorted(repos, key=lambda repo: repo.repo_id):
        revision = _served_revision(repo)
        if revision is not None and repo.repo_type == "model":
            parts = (repo.repo_path / "blobs").glob("*.partial")
            size = int(repo.size_on_disk) + sum(path.stat().st_size for path in parts)
            yield _described(repo.repo_id, "Hugging Face cache", size, revision.snapshot_path)


def _served_revision(repo: CachedRepoInfo) -> CachedRevisionInfo | None:
    """Choose the revision that a daemon would serve; None if none is a model's."""
    named = [each for each in repo.revisions if "main" in each.refs]
    others = sorted(repo.revisions, key=lambda each: each.last_modified, reverse=True)
    for revision in [*named, *others]:
        if any(file.file_name == "config.json" for file in revision.files):
            return revision
    return None


def _described(name: str, source: str, size: int, folder: Path) -> _Found:
    try:
        return ListedModel(name, source, size), read_facts(folder)
    except ModelError as error:
        problem = str(error)
        if source != "folder":
            problem = f"not wholly here; `umbel models pull {name}` gets the rest"
        return ListedModel(name, source, size, problem=problem), None


async def _served(socket: Path) -> dict[str, str] | None:
    if not socket.exists():
        return None
    from ..cli.client import Client  # noqa: PLC0415  (without a socket it is not needed)

    try:
        async with Client(socket) as client:
            slots = (await client.get("/status")).get("models", [])
    except ClientError:
        return None
    return {slot["name"]: slot["state"] for slot in slots}


def _list_lines(listed: ModelList, settings: Settings) -> Iterator[str]:
    width = max(len(model.name) for model in listed.models)
    yield f"{'model':{width}}  {'on disk':>10}  {'in memory':>10}  {'context':>8}  where"
    for model in listed.models:
        in_memory, context = "?", "?"
        if model.fit is not None:
            in_memory = amount(model.fit.weight_bytes)
            context = str(model.fit.context) if model.fit.fits else "too big"
        on_disk = amount(model.disk_bytes)
        yield f"{model.name:{width}}  {on_disk:>10}  {in_memory:>10}  {context:>8}  {model.source}"
        if model.problem:
            yield f"{'':{width}}  {model.problem}"
    yield _about(listed.machine, settings)
    yield "Sizes in memory and contexts are estimated from the models' files."
    if listed.served:
        named = ", ".join(f"{name} ({state})" for name, state in listed.served.items())
        yield f"The daemon on {settings.socket_path} serves {named}."


def _about(machine: Machine, settings: Settings) -> str:
    memory = machine.memory
    state = "" if settings.cache_budget is None else f", and state {amount(settings.cache_budget)}"
    return (
        f"For {amount(memory.total)} of {memory.name}: weights and state may take "
        f"{amount(memory.usable)}{state}."
    )


def _json(answer: msgspec.Struct) -> list[str]:
    return [msgspec.json.format(msgspec.json.encode(answer), indent=2).decode()]


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model of the table of recommendations.

    Attributes:
        repo: on Hugging Face.
        quantisation: of its weights.
        weight_bytes: of its weights as stored: the size of the download.
        numbers: of its weights.
        good_for: its uses, in a few words.
        config: the parts of its `config.json` that its size depends on.
    """

    repo: str
    quantisation: str
    weight_bytes: int
    numbers: int
    good_for: str
    config: dict[str, Any]

    @property
    def facts(self) -> ModelFacts:
        """The facts that memory depends on."""
        width = 2
        weights = Weights(self.weight_bytes, 4 * self.numbers, width)
        return ModelFacts(ModelConfig(self.config), weights)


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The table that umbel ships: the day of its last check, and models from small to large."""

    checked: str
    models: list[Entry]


class Advice(msgspec.Struct, frozen=True):
    """A recommended model; `agents` are its conversations in memory at a time."""

    repo: str
    quantisation: str
    download_bytes: int
    good_for: str
    fits: bool
    fit: Fit
    agents: int


class Recommendation(msgspec.Struct, frozen=True):
    """All recommendations for a machine.

    Attributes:
        machine: for the daemon.
        checked: the day of the table.
        history: tokens of each conversation, after the prompt that all share.
        shared: tokens of that prompt.
        models: first those that fit with an agent at least, from large to small, then the others.
    """

    machine: Machine
    checked: str
    history: int
    shared: int
    models: list[Advice]


@cache
def table() -> Table:
    """Read the table."""
    raw = files(models).joinpath("recommended.json").read_bytes()
    return msgspec.json.decode(raw, type=Table)


def recommend(
    machine: Machine, settings: Settings, *, history: int, everything: bool, json: bool
) -> list[str]:
    """Recommend models, in lines.

    Args:
        machine: for the daemon.
        settings: of the daemon.
        history: tokens of each agent's conversation.
        everything: list also models that do not fit, or with no agent.
        json: in JSON.
    """
    advice = [_advice(entry, machine, settings, history) for entry in table().models]
    advice.sort(key=lambda each: (not each.fits, each.agents == 0, -each.download_bytes))
    answer = Recommendation(machine, table().checked, history, SHARED, advice)
    return _json(answer) if json else list(_lines(answer, settings, everything=everything))


def _advice(entry: Entry, machine: Machine, settings: Settings, history: int) -> Advice:
    how = fit(entry.facts, machine, settings)
    return Advice(
        entry.repo,
        entry.quantisation,
        entry.weight_bytes,
        entry.good_for,
        how.fits,
        how,
        agents(entry.facts, machine, settings, shared=SHARED, own=history),
    )


def _lines(answer: Recommendation, settings: Settings, *, everything: bool) -> Iterator[str]:
    yield _about(answer.machine, settings)
    listed = [each for each in answer.models if everything or (each.fits and each.agents)]
    if listed:
        width = max(len(each.repo) for each in listed)
        yield f"{'model':{width}}  {'download':>9}  {'context':>8}  {'agents':>6}  good for"
        for each in listed:
            size = f"{each.download_bytes / _GB:.1f} GB"
            fit = f"{each.fit.context:>8}  {each.agents:>6}" if each.fits else f"{'too large':>16}"
            yield f"{each.repo:{width}}  {size:>9}  {fit}  {each.good_for}"
        yield (
            f"agents: conversations of {answer.history} tokens that fit in memory at a time, after "
            f"a shared prompt of {answer.shared}; others wait on disk."
        )
    if left := len(answer.models) - len(listed):
        yield f"{left} more do not fit, or not with such a conversation; --all lists them."
    yield f"Estimated; the table is of {answer.checked}. mlx-lm loads many other models too."
