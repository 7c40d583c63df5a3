"""Settings: three sources, their order, and the names of what is wrong."""

from pathlib import Path

import msgspec
import pytest

from umbel.daemon.config import (
    SETTINGS,
    ModelSettings,
    Setting,
    Settings,
    default_socket,
    is_loopback,
    load,
)
from umbel.daemon.errors import ConfigError


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    path = tmp_path / "umbel.toml"
    path.write_text('model = "from-file"\nprefill_chunk = 64\nmax_waiting = 3\n')
    return path


def test_order_of_sources(toml: Path) -> None:
    """The file is weakest, then the environment, then flags; defaults fill the rest."""
    settings = load(
        {"max_waiting": 9, "host": None},
        file=toml,
        environment={"UMBEL_MAX_WAITING": "5", "UMBEL_PREFILL_CHUNK": "128"},
    )
    keys = str(toml.with_name("keys.json"))
    assert settings == Settings(model="from-file", prefill_chunk=128, max_waiting=9, keys_file=keys)


def test_file_with_a_key(toml: Path) -> None:
    """Others may not change it, and a daemon warns if they can read it."""
    toml.chmod(0o666)
    assert load({}, file=toml).public_file is None
    with toml.open("a") as file:
        file.write('api_key = "secret"\n')
    with pytest.raises(ConfigError, match=r"other users can write to .*umbel\.toml .*, and it has"):
        load({}, file=toml)
    assert load({}, file=toml, serves=False).api_key == "secret"
    toml.chmod(0o644)
    assert load({}, file=toml).public_file == str(toml)
    toml.chmod(0o640)
    assert load({}, file=toml).public_file is None


def test_file_named_in_the_environment(toml: Path) -> None:
    """A flag is stronger than UMBEL_CONFIG."""
    assert load({}, environment={"UMBEL_CONFIG": str(toml)}).model == "from-file"
    missing = {"UMBEL_CONFIG": "/nowhere.toml"}
    assert load({}, file=toml, environment=missing).model == "from-file"
    with pytest.raises(ConfigError, match=r"no configuration file /nowhere\.toml"):
        load({}, environment=missing)


def test_missing_default_file_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert load({}, environment={}) == Settings()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("modle = 'x'", "unknown key 'modle'; did you mean model? umbel serve --help and docs/"),
        ("[model.x]\nmodel = 'y'", "model: tables of models are named [models.x]"),
        ("model = smollm2", "; text stands between quotes"),
        ("[models.small]\nmodel = 'o/n'\npinned = 1", "models.small: pinned must be true or false"),
        (
            "[models.small]\nmodell = 'o/n'",
            "models.small: unknown key 'modell'; did you mean model?",
        ),
        ("[tenants.a]\nweight = -1", "tenants.a: weight must be a number over 0"),
        ("[tenants.a]\nmodels = 3", "tenants.a: models must be a list, and is a whole number"),
        (
            "model = 'coder'\n[models.small]\nmodel = 'org/name'",
            "model: there is no model 'coder'; it may be one of the tables [models.small]",
        ),
        ("cache-bytes = 1", "unknown key 'cache-bytes'; did you mean cache_bytes?"),
        ("xyzzy = 1", "unknown key 'xyzzy'; umbel serve --help and docs/settings.md have them"),
        ("port = 99999", "port is '99999'; it must be a whole number, 0 to 65535"),
        ("port = '80'", "port is '80'; it must be a whole number"),
        ("prefill_chunk = 0", "prefill_chunk is '0'; it must be a whole number of tokens, 1 to"),
        ("keepalive = -1", "keepalive is '-1'; it must be a number of seconds, over 0"),
        ("keepalive = nan", "keepalive is 'nan'; it must be a number of seconds, over 0"),
        ("exact = 'yes'", "exact is 'yes'; it must be true or false"),
        ("log_format = 'xml'", "log_format is 'xml'; it must be json or text"),
        ("warmup = 'slow'", "warmup is 'slow'; it must be none or quick"),
        ("cors_origins = 'x'", "cors_origins is 'x'; it must be a list of strings"),
        ("models = 3", "unknown key 'models'; did you mean model? umbel serve"),
        (
            "[models]\nalias = {}",
            "unknown key 'models.alias'; did you mean models.aliases? umbel serve",
        ),
        (
            "[aliases]\na = 'default'",
            "unknown key 'aliases'; did you mean models.aliases? umbel serve",
        ),
        ("[models]\naliases = 'a'", "models.aliases is 'a'; it must be a table of strings"),
        ("[models.aliases]\na = 3", "models.aliases is '{'a': 3}'; it must be a table of strings"),
    ],
)
def test_bad_file(toml: Path, text: str, words: str) -> None:
    """The message names file and key."""
    toml.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load({}, file=toml, environment={})
    assert str(toml) in str(caught.value)
    assert words in str(caught.value)


@pytest.mark.parametrize("text", [b"not toml", b"model = '\xff'"])
def test_unreadable_file(toml: Path, text: bytes) -> None:
    toml.write_bytes(text)
    with pytest.raises(ConfigError, match=f"cannot read {toml}: "):
        load({}, file=toml, environment={})


@pytest.mark.parametrize("size", ["8 gigs", "8GBB", "8gb", "", "-5", "1.5GiB"])
def test_bad_size(toml: Path, size: str) -> None:
    """The message describes a size, and names the flag, variable or key."""
    wrong = f" is '{size}'; it must be a size: 8GiB, 500MB, or a whole number of bytes"
    toml.write_text(f"disk_bytes = '{size}'")
    for flags, environment, file, place in (
        ({"cache_bytes": size}, {}, None, "--cache-bytes"),
        ({}, {"UMBEL_CACHE_BYTES": size}, None, "UMBEL_CACHE_BYTES"),
        ({}, {}, toml, f"{toml}: disk_bytes"),
    ):
        with pytest.raises(ConfigError) as caught:
            load(flags, file=file, environment=environment)
        assert str(caught.value) == place + wrong


def test_sizes(toml: Path) -> None:
    """In the file, a size may be a number."""
    toml.write_text("disk_bytes = 4096")
    sizes = load({"cache_bytes": "500 MB"}, file=toml, environment={"UMBEL_BODY_BYTES": "8GiB"})
    assert (sizes.cache_budget, sizes.disk_budget) == (500_000_000, 4096)
    assert sizes.body_budget == 8 << 30


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_words_of_a_setting(setting: Setting) -> None:
    assert setting.about.does.endswith(".")
    assert setting.values
    assert bool(setting.about.unset) is (setting.default in (None, [], {}))
    assert msgspec.convert(setting.default, setting.kind) == getattr(Settings(), setting.name)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        (
            "UMBEL_PRT",
            "80",
            "unknown environment variable 'UMBEL_PRT'; did you mean UMBEL_PORT? umbel serve --help",
        ),
        ("UMBEL_XYZZY", "1", "'UMBEL_XYZZY'; umbel serve --help and docs/settings.md have them"),
        ("UMBEL_CONFIGS", "x", "did you mean UMBEL_CONFIG?"),
        ("UMBEL_PORT", "http", "UMBEL_PORT is 'http'; it must be a whole number, 0 to 65535"),
        ("UMBEL_STOP_GRACE", "-1", "UMBEL_STOP_GRACE is '-1'; it must be a number of seconds, at"),
        ("UMBEL_BODY_BYTES", "5", "UMBEL_BODY_BYTES: it must be at least 1048576 bytes (1MiB)"),
        ("UMBEL_HOST", "127.0.0.1", "UMBEL_HOST: it needs a port too"),
    ],
)
def test_bad_environment(name: str, value: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load({}, environment={name: value})
    assert words in str(caught.value)


def test_bad_flag() -> None:
    with pytest.raises(ConfigError, match="--port is '70000'; it must be a whole number, 0 to"):
        load({"port": "70000"}, environment={})


def test_key_is_never_shown(toml: Path) -> None:
    """Logs keep messages."""
    toml.write_text("api_key = 12345")
    with pytest.raises(ConfigError) as caught:
        load({}, file=toml, environment={})
    assert str(caught.value) == f"{toml}: api_key must be a non-empty string"


def test_tcp_beyond_loopback_needs_a_key() -> None:
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
    with pytest.raises(ConfigError) as caught:
        load({"aliases": words}, environment={})
    assert message in str(caught.value)


def test_longest_alias() -> None:
    assert load({"aliases": ["a" * 255]}, environment={}).aliases == {"a" * 255: "default"}


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
    """No browser sends them, so they would never match."""
    with pytest.raises(ConfigError) as caught:
        load({"cors_origins": [origin]}, environment={})
    assert words in str(caught.value)


def test_table_without_a_model(toml: Path) -> None:
    """The embedded model's name and a repo's are places; other names are not."""
    toml.write_text("[models.smollm2]\npinned = true\n[models.'org/name']\npinned = true\n")
    models = load({"model": "o/n"}, file=toml, environment={}).models
    assert models == dict.fromkeys(("smollm2", "org/name"), ModelSettings(pinned=True))
    toml.write_text("[models.small]\npinned = true\n")
    with pytest.raises(ConfigError, match=r"models\.small: it has no model; .* 'smollm2'"):
        load({}, file=toml, environment={})


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
    assert is_loopback(host) is expected


def test_default_socket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In the session's runtime folder, else below the home: never in a shared folder."""
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert default_socket() == tmp_path / "umbel" / "umbel.sock"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert default_socket() == tmp_path / "state" / "umbel" / "umbel.sock"
