"""Settings: three sources, their order, and the names of what is wrong."""

from pathlib import Path

import pytest

from umbel.daemon.config import Settings, default_socket, is_loopback, load
from umbel.daemon.errors import ConfigError


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    """A configuration file."""
    path = tmp_path / "umbel.toml"
    path.write_text('model = "from-file"\nprefill_chunk = 64\nmax_waiting = 3\n')
    return path


def test_order_of_weight(toml: Path) -> None:
    """The file is weakest, then the environment, then flags; defaults fill the rest."""
    settings = load(
        {"max_waiting": 9, "host": None},
        file=toml,
        environment={"UMBEL_MAX_WAITING": "5", "UMBEL_PREFILL_CHUNK": "128"},
    )
    assert settings == Settings(model="from-file", prefill_chunk=128, max_waiting=9)


def test_file_named_in_the_environment(toml: Path) -> None:
    """UMBEL_CONFIG names the file; a flag names it louder."""
    assert load({}, environment={"UMBEL_CONFIG": str(toml)}).model == "from-file"
    missing = {"UMBEL_CONFIG": "/nowhere.toml"}
    assert load({}, file=toml, environment=missing).model == "from-file"
    with pytest.raises(ConfigError, match=r"no configuration file /nowhere\.toml"):
        load({}, environment=missing)


def test_no_file_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a file all settings have their defaults."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert load({}, environment={}) == Settings()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("modle = 'x'", "unknown key of umbel.toml 'modle'; there are: model"),
        ("port = 99999", "key of umbel.toml port: Expected `int` <= 65535"),
        ("port = 'http'", "key of umbel.toml port: Expected `int"),
        ("prefill_chunk = 0", "prefill_chunk: Expected `int` >= 1"),
        ("keepalive = -1", "keepalive: Expected `float` > 0"),
        ("log_format = 'xml'", "log_format: Invalid enum value 'xml'"),
        ("not toml", "cannot read"),
    ],
)
def test_bad_file(toml: Path, text: str, words: str) -> None:
    """An unknown key or a bad value is refused with the key's name."""
    toml.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load({}, file=toml, environment={})
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("UMBEL_PRT", "80", "unknown environment variable UMBEL_PRT; there are: model"),
        ("UMBEL_PORT", "http", "UMBEL_PORT='http': Expected `int"),
        ("UMBEL_STOP_GRACE", "-1", "UMBEL_STOP_GRACE='-1': Expected `float` >= 0"),
    ],
)
def test_bad_environment(name: str, value: str, words: str) -> None:
    """The same for environment variables, by their own names."""
    with pytest.raises(ConfigError) as caught:
        load({}, environment={name: value})
    assert words in str(caught.value)


def test_bad_flag() -> None:
    """The same for flags."""
    with pytest.raises(ConfigError, match="setting port: Expected `int` <= 65535"):
        load({"port": 70000}, environment={})


def test_tcp_beyond_loopback_needs_a_key() -> None:
    """Nobody exposes a daemon to a network by accident."""
    flags = {"host": "0.0.0.0", "port": 1}  # noqa: S104  (never bound)
    with pytest.raises(ConfigError, match=r"0\.0\.0\.0 can be reached from outside"):
        load(flags, environment={})
    assert load(flags, environment={"UMBEL_API_KEY": "k"}).tcp == (flags["host"], 1)
    with pytest.raises(ConfigError, match="it needs a port too"):
        load({"host": "127.0.0.1"}, environment={})


def test_aliases_of_three_sources(toml: Path) -> None:
    """A table, a variable with commas, a flag given several times: the stronger replaces."""
    toml.write_text("[models.aliases]\ngpt-4o = 'default'\n'a,b=c' = 'smollm2'\n")
    variable = {"UMBEL_ALIASES": "x, y=smollm2,"}
    assert load({}, file=toml, environment={}).aliases == {"gpt-4o": "default", "a,b=c": "smollm2"}
    assert load({}, file=toml, environment=variable).aliases == {"x": "default", "y": "smollm2"}
    flags = {"aliases": ["z", "org/w=default"]}
    settings = load(flags, file=toml, environment=variable)
    assert settings.aliases == {"z": "default", "org/w": "default"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([""], "an alias has no name; write NAME, or NAME=MODEL"),
        (["=smollm2"], "an alias has no name"),
        (["a\x1bb"], r"alias 'a\x1bb' has characters that cannot be printed"),
        (["a" * 256], "has over 255 characters"),
        (["a", "a=smollm2"], "alias 'a' is given twice"),
        (["default"], "alias 'default' is a name of the served model already"),
        (["smollm2"], "alias 'smollm2' is a name of the served model already"),
        (["a=gpt-4o"], "alias 'a' stands for 'gpt-4o', but 'smollm2' is served"),
    ],
)
def test_bad_aliases(words: list[str], message: str) -> None:
    """What no request could use, or leads nowhere, is refused in words."""
    with pytest.raises(ConfigError) as caught:
        load({"aliases": words}, environment={})
    assert message in str(caught.value)


def test_longest_alias() -> None:
    """255 characters are a name."""
    assert load({"aliases": ["a" * 255]}, environment={}).aliases == {"a" * 255: "default"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("models = 3", "unknown key of umbel.toml 'models'; there are: model, models.aliases"),
        ("[models]\nalias = {}", "unknown key of umbel.toml 'models.alias'; there are: model"),
        ("[aliases]\na = 'default'", "unknown key of umbel.toml 'aliases'"),
        ("[models]\naliases = 'a'", "aliases: Expected `object`, got `str`"),
        ("[models.aliases]\na = 3", "aliases[...]: Expected `str`, got `int`"),
    ],
)
def test_bad_table(toml: Path, text: str, words: str) -> None:
    """A table with other keys, or with values that are none, is refused."""
    toml.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load({}, file=toml, environment={})
    assert words in str(caught.value)


def test_origins_of_two_sources() -> None:
    """A variable with commas, a flag given several times."""
    variable = {"UMBEL_CORS_ORIGINS": "https://app.example, http://localhost:3000"}
    origins = ["https://app.example", "http://localhost:3000"]
    assert load({}, environment=variable).cors_origins == origins
    page = ["app://obsidian.md", "http://[::1]:8080", "https://xn--mnchen-3ya.example"]
    assert load({"cors_origins": page}, environment=variable).cors_origins == page


@pytest.mark.parametrize(
    ("origin", "words"),
    [
        ("*", "would let every web page use this daemon"),
        ("null", "is no origin; write scheme, host"),
        ("", "is no origin"),
        ("app.example", "is no origin"),
        ("https://app.example/", "is no origin"),
        ("https://app.example/page", "is no origin"),
        ("https://app.example:443", "is no origin"),
        ("https://App.example", "is no origin"),
        ("https://me@app.example", "is no origin"),
        ("https://a b", "is no origin"),
        ("https://[", "is no origin"),
    ],
)
def test_bad_origins(origin: str, words: str) -> None:
    """What no browser sends as an origin would never match, so it is refused."""
    with pytest.raises(ConfigError) as caught:
        load({"cors_origins": [origin]}, environment={})
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.8.9.1", True),
        ("::1", True),
        ("localhost", True),
        ("192.168.1.2", False),
        ("localhost.evil.example", False),
        ("", False),
    ],
)
def test_is_loopback(host: str, *, expected: bool) -> None:
    """Only what can mean nothing but this machine counts."""
    assert is_loopback(host) is expected


def test_default_socket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In the session's runtime folder, else below the home: never in a shared folder."""
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert default_socket() == tmp_path / "umbel" / "umbel.sock"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert default_socket() == tmp_path / "state" / "umbel" / "umbel.sock"
