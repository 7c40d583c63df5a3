"""A start that fails leaves nothing behind."""

from pathlib import Path

import pytest

from umbel.cachestore.disk.tier import DiskTier
from umbel.daemon.config.settings import Settings
from umbel.daemon.models import assembly
from umbel.daemon.models.memory_budget import MemoryBudget
from umbel.models.runtime import device_memory

from .memory_tools import ServerFixture, zoo_model

BUDGET = 32 << 20


@pytest.mark.parametrize("fails", ["_open_disk", "Pager", "KVCacheManager", "Engine"])
def test_a_start_that_fails_gives_all_back(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool of all models knows no more of it, and the disk's folder is free again."""
    settings = Settings(cache_bytes=BUDGET, disk_dir=str(tmp_path))
    memory = MemoryBudget(settings, device_memory())

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no")

    loaded = zoo_model("llama")
    with monkeypatch.context() as patch:
        patch.setattr(assembly, fails, fail)
        with pytest.raises(RuntimeError, match="no"):
            ServerFixture(loaded, BUDGET, disk=tmp_path, memory=memory)
    assert memory.pool.tries == []
    assert memory.pool.pins == []
    memory.leave(loaded.name)
    for folder in filter(Path.is_dir, tmp_path.iterdir()):
        tier = DiskTier(folder, fingerprint="another", queue_bytes=1 << 20, wake=lambda: None)
        tier.close(10)
    server = ServerFixture(loaded, BUDGET, disk=tmp_path, memory=memory)
    assert len(memory.pool.tries) == len(memory.pool.pins) == 1
    server.close()
