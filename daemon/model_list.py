"""`umbel models`: what can be served from here without a download."""

from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import CacheNotFound, scan_cache_dir
from rich.markup import escape

from ..models.errors import ModelNotFoundError
from ..models.load.embedded import NAME, find
from .client import Client, ClientError


async def available(socket: Path) -> list[str]:
    """Describe the embedded model, cached repos that hold weights, and what is served."""
    served = await _served(socket)
    lines = [*_embedded(), *_cached()]
    if served is not None:
        lines.append(f"A daemon on {escape(str(socket))} serves [bold]{escape(served)}[/].")
    return lines


async def _served(socket: Path) -> str | None:
    if not socket.exists():
        return None
    try:
        async with Client(socket) as client:
            model = (await client.get("/status")).get("model")
    except ClientError:
        return None
    return str(model["name"]) if model else None


def _embedded() -> Iterator[str]:
    try:
        size = find().stat().st_size
    except ModelNotFoundError as error:
        yield f"{NAME:40} [yellow]missing[/]: {error}"
    else:
        yield f"{NAME:40} {_size(size)}  embedded"


def _cached() -> Iterator[str]:
    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        return
    for repo in sorted(repos, key=lambda repo: repo.repo_id):
        files = [file.file_name for revision in repo.revisions for file in revision.files]
        if "config.json" in files and any(name.endswith(".safetensors") for name in files):
            yield f"{escape(repo.repo_id):40} {_size(repo.size_on_disk)}  Hugging Face cache"


def _size(size: int) -> str:
    return f"{size / 2**30:6.2f} GiB"
