"""The indexes that uv is told of are pip's too."""

from pathlib import Path

import pytest

from umbel.models.load.index_file import pip_variables

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
def test_variables(environment: dict[str, str], expected: dict[str, str]) -> None:
    """The default index of uv replaces pip's, and further ones come after pip's own."""
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
def test_a_file(tmp_path: Path, text: str, expected: dict[str, str]) -> None:
    """uv.toml counts where uv finds it: named, or in the user's folder."""
    file = tmp_path / "uv" / "uv.toml"
    file.parent.mkdir()
    file.write_text(text)
    nowhere = str(tmp_path / "nowhere")
    assert pip_variables({"UV_CONFIG_FILE": str(file)}) == expected
    folders = {"XDG_CONFIG_HOME": str(tmp_path), "XDG_CONFIG_DIRS": nowhere}
    assert pip_variables(folders) == expected
    assert pip_variables(folders | {"UV_NO_CONFIG": "1"}) == {}


def test_a_variable_is_stronger_than_a_file(tmp_path: Path) -> None:
    """As it is for uv; further indexes of both count."""
    file = tmp_path / "uv.toml"
    file.write_text(f'index-url = "{ONE}"\nextra-index-url = ["{TWO}"]')
    environment = {"UV_CONFIG_FILE": str(file), "UV_DEFAULT_INDEX": THREE, "UV_INDEX": ONE}
    assert pip_variables(environment) == {
        "PIP_INDEX_URL": THREE,
        "PIP_EXTRA_INDEX_URL": f"{ONE} {TWO}",
    }
