"""Fixtures shared by all tests."""

import umbel.models  # noqa: F401, I001  (before anything that imports mlx.core)

from typing import TYPE_CHECKING

import pytest

from umbel.models.loader import LoadedModel, load

from . import zoo
from .tiny import tiny_model_dir

if TYPE_CHECKING:
    from pathlib import Path


@pytest.hookimpl(tryfirst=True)  # before the markers are read
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow what is tested with a twin of another architecture."""
    for item in items:
        parameters = getattr(item, "callspec", None)
        if parameters is not None and parameters.params.get("name") in zoo.TWINS:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def smollm2() -> LoadedModel:
    """Load the embedded model once; its arrays belong to the main thread."""
    return load("smollm2")


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> "Path":
    """Write the tiny random model once; tests must not change the folder."""
    return tiny_model_dir(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tiny(tiny_dir: "Path") -> LoadedModel:
    """Load the tiny random model once; its arrays belong to the main thread."""
    return load(str(tiny_dir))
