"""Fixtures shared by all tests, and what their processes have in common.

Nothing here imports MLX before tests are collected: the process that only hands them out to
others does without.
"""

import gc
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from .budget import CpuBudget
from .daemon.fixtures import (
    heard,
    locked_daemon,
    long_tiny_dir,
    plain_daemon,
    short_path,
    smollm2_daemon,
    tiny_daemon,
)

if TYPE_CHECKING:
    from umbel.models.load.loader import LoadedModel

# Here, or the tests of the daemon and those of its clients would each have their own.
__all__ = [
    "heard",
    "locked_daemon",
    "long_tiny_dir",
    "plain_daemon",
    "short_path",
    "smollm2_daemon",
    "tiny_daemon",
]

_DAY = 24 * 3600.0


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that sets the budget."""
    parser.addoption("--write-budget", action="store_true", help="write tests/budget.json")


def pytest_configure(config: pytest.Config) -> None:
    """Set what all processes inherit, those that run tests and those that tests start."""
    config.pluginmanager.register(CpuBudget(config))
    # Tests run on all cores as it is. Threads of every process on all of them wait in turns.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # MLX's thread of the CPU is woken for each operation. In a batch process it then takes no core
    # from another that computes: the same work needs 10 to 30 % less of the processor.
    if hasattr(os, "SCHED_BATCH"):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    # On one core it is not woken on another, where it would find nothing in the caches: a third
    # less again. What a test starts stays on that core, too.
    if (worker := os.environ.get("PYTEST_XDIST_WORKER")) and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) <= int(os.environ["PYTEST_XDIST_WORKER_COUNT"]):  # or some would do nothing
            os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})
    # Daemons keep a model's measurements for later starts: here, and not in the user's folder.
    cache = getattr(config, "cache", None)  # no attribute at all under `-p no:cacheprovider`
    if cache is not None:
        os.environ["XDG_CACHE_HOME"] = str(cache.mkdir("home"))
        if "PYTEST_XDIST_WORKER" not in os.environ:
            _keep_measurements(cache.mkdir("measured"))
            _forget_old(cache.mkdir("kernels"))
    # A process imports a thousand modules: compiling them takes longer than what it is for.
    if os.environ.pop("PYTHONDONTWRITEBYTECODE", None) and cache is not None:
        os.environ.setdefault("PYTHONPYCACHEPREFIX", str(cache.mkdir("bytecode")))


def _keep_measurements(folder: Path) -> None:
    """Share the measurements of tiny models between processes, and with later runs.

    That depends on the code and on what it is installed with. What was kept of other code goes once
    no run can be using it.
    """
    root = Path(__file__).parents[1]
    sources = sorted(
        [*root.glob("models/**/*.py"), root / "tests/zoo.py", root / "tests/shared.py"]
    )
    digest = sha256()
    for path in [*sources, root / "requirements.lock"]:
        digest.update(path.read_bytes())
    kept = folder / digest.hexdigest()
    _forget_old(folder, kept)
    kept.mkdir(exist_ok=True)
    os.environ["MEASURED_OF_TINY_MODELS"] = str(kept)


def _forget_old(folder: Path, kept: Path | None = None) -> None:
    """Remove what no run has used for a day. Other runs may do so, too."""
    for path in folder.iterdir():
        with suppress(FileNotFoundError):
            if path == kept or path.stat().st_mtime >= time.time() - _DAY:
                continue
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()


def pytest_xdist_auto_num_workers() -> int:
    """Two for each core: a fifth of the time is spent waiting for daemons."""
    return 2 * (os.cpu_count() or 1)


def _may_hold_slow_tests(path: Path) -> bool:
    return re.search(rb"\bslow\b|zoo\.params", path.read_bytes()) is not None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no file for the slow tests that holds none: every worker would."""
    if config.option.markexpr != "slow" or not collection_path.name.startswith("test_"):
        return None
    return None if _may_hold_slow_tests(collection_path) else True


def pytest_collectstart() -> None:
    """Choose the BLAS and keep the limit of open files, before any test imports mlx-lm."""
    gc.disable()  # what is imported stays: there is nothing to collect until all is
    from hypothesis import settings  # noqa: PLC0415

    import umbel.models.load.open_files  # noqa: F401, PLC0415

    # No deadline: the machine may be busy.
    settings.register_profile("ci", deadline=None, max_examples=25)
    settings.register_profile("nightly", deadline=None, max_examples=300)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


_SHARED = (
    {"smollm2", "smollm2_daemon", "embedded_daemon"},
    {"scripted_daemon"},
    {"thinking_daemon"},
    {"locked_daemon"},
    {"tiny_daemon"},
)
"""Fixtures of a session that take long to set up, and use the same model."""


def _place(item: pytest.Item) -> int:
    """Return where a test stands among those that need the same daemon or model."""
    if "[smollm2]" in item.name:
        return 0
    needed = set(getattr(item, "fixturenames", ()))
    return next((at for at, fixtures in enumerate(_SHARED) if fixtures & needed), len(_SHARED))


@pytest.hookimpl(tryfirst=True)  # before the markers are read
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests of twins as nightly, unless marked slow; put tests that share daemons first.

    A part of the list goes to each worker, and others take tests from its end. So one worker, and
    not each, loads SmolLM2 and starts the daemons that many tests share.
    """
    from .zoo import TWINS  # noqa: PLC0415

    items.sort(key=_place)
    for item in items:
        parameters = getattr(item, "callspec", None)
        of_a_twin = parameters is not None and parameters.params.get("name") in TWINS
        if of_a_twin and not any(map(item.get_closest_marker, ("slow", "nightly"))):
            item.add_marker(pytest.mark.nightly)
    # Where all files are collected: none of them would be missed where some are.
    for path in {item.path for item in items if item.get_closest_marker("slow")}:
        assert _may_hold_slow_tests(path), f"{path}: `-m slow` would not find its slow tests"


def pytest_collection_finish() -> None:
    """Freeze everything imported: the garbage collector need not look through it."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def prepared_for_this_machine() -> Iterator[None]:
    """Prepare models that stay loaded for this device again, if a test did so for another one."""
    yield
    if "umbel.models.backends.prepare" not in sys.modules:
        return
    from umbel.models.backends import choose  # noqa: PLC0415
    from umbel.models.backends.prepare import prepare  # noqa: PLC0415

    from .shared import kept_models  # noqa: PLC0415

    for model in kept_models:
        if "_prepared_for" in vars(model):
            prepare(model, choose())


@pytest.fixture(scope="session")
def smollm2() -> "LoadedModel":
    """Load the embedded model once; its arrays belong to the main thread."""
    from umbel.models.load.loader import load  # noqa: PLC0415

    return load("smollm2")


@pytest.fixture(scope="session")
def kernel_folder(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where emulated CUDA kernels are compiled: many tests, and processes, run the same ones.

    Each is named by all that it is made of.
    """
    if pytestconfig.cache is None:
        return tmp_path_factory.mktemp("kernels")
    return pytestconfig.cache.mkdir("kernels")


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the tiny random model once; tests must not change the folder."""
    from .tiny import tiny_model_dir  # noqa: PLC0415

    return tiny_model_dir(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tiny(tiny_dir: Path) -> "LoadedModel":
    """Load the tiny random model once; its arrays belong to the main thread."""
    from umbel.models.load.loader import load  # noqa: PLC0415

    return load(str(tiny_dir))
