"""`umbel models list`: what can be served from here without a download, and whether it fits."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
from huggingface_hub import CachedRepoInfo, CachedRevisionInfo, CacheNotFound, scan_cache_dir

from ...models.errors import ModelError
from ...models.estimate.facts import EMBEDDED, ModelFacts, read_facts
from ...models.load import embedded_file
from ..config import Settings
from ..errors import ClientError
from .fit import Fit, Machine, fit, machine_of
from .machine import Planned


class ListedModel(msgspec.Struct, frozen=True):
    """A model that is here.

    Attributes:
        name: what `--model` takes.
        source: `embedded`, `folder` or `Hugging Face cache`.
        disk_bytes: its size on disk.
        fit: how it fits; None where its files do not tell.
        problem: why it cannot be served; empty where it can.
    """

    name: str
    source: str
    disk_bytes: int
    fit: Fit | None = None
    problem: str = ""


class ModelList(msgspec.Struct, frozen=True):
    """All of them.

    Attributes:
        machine: that they would run on.
        models: by name.
        served: what the daemon on the socket has, each model with where it is; None where no
            daemon is.
    """

    machine: Machine
    models: list[ListedModel]
    served: dict[str, str] | None


async def report(planned: Planned, settings: Settings, *, json: bool) -> list[str]:
    """Describe the models that are here, in lines.

    Args:
        planned: the machine that they would run on.
        settings: of the daemon: its model, its budgets, its socket.
        json: in JSON.
    """
    machine = machine_of(planned)
    models = [*_embedded(), *_folders(settings), *_cached()]
    fitted = [_fitted(model, facts, machine, settings) for model, facts in models]
    listed = ModelList(machine, fitted, await _served(settings.socket_path))
    if json:
        return [msgspec.json.format(msgspec.json.encode(listed), indent=2).decode()]
    return list(_lines(listed, settings))


_Found = tuple[ListedModel, ModelFacts | None]


def _fitted(
    model: ListedModel, facts: ModelFacts | None, machine: Machine, settings: Settings
) -> ListedModel:
    if facts is None:
        return model
    return msgspec.structs.replace(model, fit=fit(facts, machine, settings))


def _embedded() -> Iterator[_Found]:
    file, is_here = embedded_file.FILE, embedded_file.FILE.has_size(embedded_file.path())
    problem = "" if is_here else "fetched at its first start"
    size = file.nbytes if is_here else 0
    yield ListedModel(embedded_file.NAME, "embedded", size, problem=problem), EMBEDDED


def _folders(settings: Settings) -> Iterator[_Found]:
    """Describe the folders that the configuration names."""
    for name in dict.fromkeys([settings.model, *settings.models]):
        folder = Path(settings.source_of(name))
        if folder.is_dir():
            size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
            yield _described(name, "folder", size, folder)


def _cached() -> Iterator[_Found]:
    """Describe what Hugging Face's cache holds of models, whole or in part."""
    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        return
    for repo in sorted(repos, key=lambda repo: repo.repo_id):
        revision = _newest(repo)
        if revision is not None and repo.repo_type == "model":
            source = "Hugging Face cache"
            name, size = repo.repo_id, _size_on_disk(repo)
            yield _described(name, source, size, revision.snapshot_path)


def _newest(repo: CachedRepoInfo) -> CachedRevisionInfo | None:
    """Choose the revision that a daemon would serve; None where none is a model's."""
    named = [each for each in repo.revisions if "main" in each.refs]
    others = sorted(repo.revisions, key=lambda each: each.last_modified, reverse=True)
    for revision in [*named, *others]:
        if any(file.file_name == "config.json" for file in revision.files):
            return revision
    return None


def _size_on_disk(repo: CachedRepoInfo) -> int:
    """Sum what it takes, with what has come in part of files."""
    parts = (repo.repo_path / "blobs").glob("*.partial")
    return int(repo.size_on_disk) + sum(path.stat().st_size for path in parts)


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
    from ..cli.client import Client  # noqa: PLC0415  (where there is nobody to ask)

    try:
        async with Client(socket) as client:
            models = (await client.get("/status")).get("models", [])
    except ClientError:
        return None
    return {model["name"]: model["state"] for model in models}


def _lines(listed: ModelList, settings: Settings) -> Iterator[str]:
    width = max(len(model.name) for model in listed.models)
    yield f"{'model':{width}}  {'on disk':>10}  {'in memory':>10}  {'context':>8}  where"
    for model in listed.models:
        yield f"{model.name:{width}}  {sized(model.disk_bytes):>10}  {_fits(model)}  {model.source}"
        if model.problem:
            yield f"{'':{width}}  {model.problem}"
    yield about(listed.machine, settings)
    yield "What models take in memory, and the context, is estimated from their files."
    if listed.served:
        named = ", ".join(f"{name} ({state})" for name, state in listed.served.items())
        yield f"The daemon on {settings.socket_path} serves {named}."


def _fits(model: ListedModel) -> str:
    if model.fit is None:
        return f"{'?':>10}  {'?':>8}"
    context = str(model.fit.context) if model.fit.fits else "too big"
    return f"{sized(model.fit.weight_bytes):>10}  {context:>8}"


def about(machine: Machine, settings: Settings) -> str:
    """Say in a sentence what the figures are for."""
    memory = machine.memory
    state = "" if settings.cache_budget is None else f", and state {sized(settings.cache_budget)}"
    return (
        f"For {sized(memory.total)} of {memory.name}: weights and state may take "
        f"{sized(memory.usable)}{state}."
    )


def sized(nbytes: int) -> str:
    """Write a number of bytes as people read it."""
    for unit, least in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= least:
            return f"{nbytes / least:.1f} {unit}"
    return f"{nbytes} bytes"
