"""A load that fails closes all that it has opened, so that the next one finds it free."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from umbel.daemon.config import ModelSettings, Settings
from umbel.daemon.identity.tenants import TenantTerms
from umbel.daemon.models import loader as model_loader
from umbel.daemon.models.assembly import open_folders
from umbel.daemon.models.loader import ModelLoader
from umbel.daemon.models.memory_budget import MemoryBudget
from umbel.daemon.models.pressure import PressureWatch
from umbel.daemon.models.slot import ModelSlot
from umbel.daemon.requests.workers import Workers
from umbel.models.runtime import release_thread
from umbel.scheduler.thread import MLXThread


@asynccontextmanager
async def loader_of(folder: Path) -> AsyncIterator[ModelLoader]:
    """A loader whose models keep state in a folder."""
    settings = Settings(disk_dir=str(folder), cache_bytes="256MiB")
    thread, terms = MLXThread(release_thread), TenantTerms(lambda: settings)
    workers = Workers(10, 60, terms.use)
    folders = open_folders(settings, ["tiny"])
    assert folders is not None
    thread.start()
    pressure = PressureWatch(None, lambda _: None)
    try:
        yield ModelLoader(thread, lambda: settings, workers, pressure, terms, folders)
    finally:
        workers.close()
        thread.stop(60)
        folders.close()


async def load(loader: ModelLoader, slot: ModelSlot) -> None:
    """Load a model as `Residency` does."""
    try:
        await loader.open(slot, lambda _: None, lambda _: None)
        slot.resident = await loader.load(slot, lambda _: None)
    except Exception:
        await loader.drop(slot)
        raise


def of_disk() -> set[str]:
    """The threads of disk tiers."""
    return {each.name for each in threading.enumerate() if "disk" in each.name}


@pytest.mark.parametrize(
    ("owner", "name"),
    [(model_loader, "share_prompts"), (MemoryBudget, "built"), (MLXThread, "attach")],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_failed_load_leaves_nothing_open(
    short_path: Path,
    long_tiny_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
) -> None:
    """No thread, no lock and no step of its engine is left, and the next load has a disk tier."""

    def fail(*_: object) -> None:
        raise RuntimeError("broken")

    async def check() -> None:
        slot = ModelSlot("tiny", ModelSettings(model=str(long_tiny_dir)))
        async with loader_of(short_path / "disk") as loader:
            before = of_disk()
            with monkeypatch.context() as patch:
                patch.setattr(owner, name, fail)
                with pytest.raises(RuntimeError, match="broken"):
                    await load(loader, slot)
            assert of_disk() == before
            assert loader._thread._workers == {}
            assert loader.memory.pool.pins == []
            assert loader.memory.pool.tries == []
            await load(loader, slot)
            assert slot.resident is not None
            assert slot.resident.assembly.disk is not None
            assert of_disk() > before
            await loader.unload(slot)
            assert of_disk() == before

    asyncio.run(check())
