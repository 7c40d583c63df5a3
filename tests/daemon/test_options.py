"""Options of commands: made of the settings, named as ever, and quick to read about."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from typer import Typer
from typer.testing import CliRunner

from umbel.daemon.cli import app
from umbel.daemon.cli.options import takes_settings
from umbel.daemon.config import SETTINGS, Settings

# Scripts and service files have these names. Each has here what help says holds without it.
FLAGS_OF_SERVE = {
    "--model": "smollm2",
    "--alias": "none",
    "--socket": "umbel.sock in the user's runtime folder",
    "--host": "127.0.0.1",
    "--port": "no TCP",
    "--keys-file": "keys.json beside the configuration file",
    "--cors-origin": "no page",
    "--shared-prompt": "none",
    "--prefill-chunk": "2048 on a GPU, else 512; with exact or little memory 512",
    "--cache-bytes": "what the device has left",
    "--no-cache": "off",
    "--disk-dir": "state in the user's cache folder",
    "--disk-bytes": "a quarter of what is free",
    "--no-disk": "off",
    "--checkpoint-interval": "8192",
    "--checkpoints-kept": "4",
    "--kv-bits": "as computed",
    "--kv-group-size": "64",
    "--max-batch": "32",
    "--max-stall-ms": "200 on a GPU, else 400",
    "--warmup": "quick",
    "--exact": "off",
    "--max-waiting": "1024",
    "--request-timeout": "3600",
    "--stop-grace": "30",
    "--log-format": "text",
    "--log-level": "info",
    "--log-file": "standard error",
    "--config": "umbel.toml in the user's configuration folder",
}


def help_lines(*command: str) -> list[str]:
    """Return a command's help without the frame."""
    wide = {"COLUMNS": "200", "TERM": "dumb"}
    done = CliRunner().invoke(app, [*command, "--help"], env=wide)
    assert done.exit_code == 0, done.output
    return [line.strip("│ ") for line in done.output.splitlines()]


def test_help_of_serve() -> None:
    """Each flag stands in its group, with its setting's words and default."""
    lines = help_lines("serve")
    options = {line.split()[0]: line for line in lines if line.startswith("--")}
    assert options.keys() == {*FLAGS_OF_SERVE, "--help"}
    for flag, default in FLAGS_OF_SERVE.items():
        assert options[flag].endswith(f" [default: {default}]")
    said = {setting.flag: setting.about.does for setting in SETTINGS.values() if setting.flag}
    assert all(text in options[flag] for flag, text in said.items())
    groups = [line.split()[1] for line in lines if line.startswith("╭")]
    assert groups == ["Options", "Model", "Network", "Cache", "Limits", "Log"]
    begins = [lines.index(line) for line in lines if line.startswith("╭")]
    ungrouped = [line.split()[0] for line in lines[: begins[1]] if line.startswith("--")]
    assert ungrouped == ["--config", "--help"]


@pytest.mark.parametrize("command", ["", "serve", "chat", "cache pin", "service install"])
def test_switches_show_no_type(command: str) -> None:
    assert not [line for line in help_lines(*command.split()) if "<bool>" in line]


@pytest.mark.parametrize("command", ["chat", "doctor", "models", "cache stats", "cache pin"])
def test_other_commands_share_options(command: str) -> None:
    expected = {line for line in help_lines("serve") if line.startswith(("--socket", "--config"))}
    assert {" ".join(line.split()) for line in expected} <= {
        " ".join(line.split()) for line in help_lines(*command.split())
    }


def settings_after(*words: str) -> Settings:
    """Return the settings that a command gets."""
    given: list[Settings] = []
    command = Typer()

    @command.command()
    @takes_settings()
    def serve(*, settings: Settings) -> None:
        given.append(settings)

    CliRunner().invoke(command, words, catch_exceptions=False)
    (settings,) = given
    return settings


def test_each_flag_is_its_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = (
        "--model m --alias a --alias b=m --socket s --host ::1 --port 1 --keys-file k "
        "--cors-origin http://[::1] --shared-prompt a.txt "
        "--prefill-chunk 2 --cache-bytes 3KiB --no-cache --disk-dir d --disk-bytes 4 --no-disk "
        "--checkpoint-interval 5 --checkpoints-kept 6 --kv-bits 4 --kv-group-size 32 --max-batch 7 "
        "--max-stall-ms 8.5 --warmup none --exact "
        "--max-waiting 9 --request-timeout 10 --stop-grace 11 --log-format json "
        "--log-level debug --log-file l"
    )
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert settings_after(*words.split()) == Settings(
        model="m",
        aliases={"a": "default", "b": "m"},
        socket="s",
        host="::1",
        port=1,
        keys_file="k",
        cors_origins=["http://[::1]"],
        shared_prompts=["a.txt"],
        prefill_chunk=2,
        cache_bytes="3KiB",
        no_cache=True,
        disk_dir="d",
        disk_bytes="4",
        no_disk=True,
        checkpoint_interval=5,
        checkpoints_kept=6,
        kv_bits=4,
        kv_group_size=32,
        max_batch=7,
        max_stall_ms=8.5,
        warmup="none",
        exact=True,
        max_waiting=9,
        request_timeout=10.0,
        stop_grace=11.0,
        log_format="json",
        log_level="debug",
        log_file="l",
    )


def test_absent_flag_leaves_the_file_its_say(tmp_path: Path) -> None:
    """An empty word is a value."""
    file = tmp_path / "umbel.toml"
    file.write_text("no_cache = true\nsocket = 's'\n[models.aliases]\na = 'default'")
    config = ("--config", str(file))
    keys = str(tmp_path / "keys.json")
    of_file = Settings(no_cache=True, socket="s", aliases={"a": "default"}, keys_file=keys)
    assert settings_after(*config) == of_file
    assert settings_after("--socket", "", *config) == msgspec.structs.replace(of_file, socket="")


@pytest.mark.parametrize(
    ("command", "needed"),
    [
        ("doctor", {"mlx", "aiohttp", "numpy", "structlog"}),
        ("models", {"mlx"}),
        ("cache stats", {"aiohttp"}),
    ],
)
def test_command_loads_only_its_needs(command: str, needed: set[str], tmp_path: Path) -> None:
    """No command imports mlx-lm, transformers or the HTTP server."""
    program = f"""
import sys
from umbel.daemon.cli import app
try:
    app({[*command.split(), "--socket", str(tmp_path / "none")]!r}, standalone_mode=False)
except BaseException:
    pass
print("loaded:", *sorted(sys.modules))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    modules = done.stdout.splitlines()[-1].split()
    heavy = {"mlx", "mlx_lm", "transformers", "tokenizers", "aiohttp", "numpy", "prompt_toolkit"}
    heavy |= {"structlog", "umbel.models.load.download"}
    assert heavy & set(modules) <= needed
    assert needed <= set(modules)
    assert "aiohttp.web" not in modules


def test_help_loads_nothing_that_computes() -> None:
    """Help waits neither for MLX nor for the server."""
    program = """
import sys
from umbel.daemon.cli import app
for words in "", "serve", "chat", "top", "cache pin":
    app([*words.split(), "--help"], standalone_mode=False)
print("loaded:", *sorted({name.partition(".")[0] for name in sys.modules}))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    loaded = done.stdout.splitlines()[-1].split()
    assert {"umbel", "typer", "msgspec"} <= set(loaded)
    assert not {
        "mlx",
        "mlx_lm",
        "numpy",
        "transformers",
        "aiohttp",
        "sqlite3",
        "prompt_toolkit",
    } & set(loaded)
