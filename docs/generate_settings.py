#!/usr/bin/env python3
"""Writes docs/settings.md from `umbel.daemon.config.SETTINGS`.

`python docs/generate_settings.py` prints the page; `--write` puts it in its place.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from umbel.daemon.config import SETTINGS, Setting

PAGE = Path(__file__).with_name("settings.md")

_INTRODUCTION = """\
# Settings

Written by `docs/generate_settings.py`; do not edit it by hand.

A setting is a key of the configuration file, an environment variable and, for most, a flag of
`umbel serve`. A flag is stronger than the variable, and the variable stronger than the file.
An unknown key, an unknown variable that begins with `UMBEL_` and a value out of bounds keep the
daemon from starting; the message says where it was given, and what there could be instead.

The file is TOML. It is named by `--config` or `UMBEL_CONFIG`, or else it is `umbel.toml` in the
user's configuration folder: `~/.config/umbel/` on Linux,
`~/Library/Application Support/umbel/` on macOS. A file that is named must exist.

```toml
model = "smollm2"
port = 8080
stop_grace = 60

[models.aliases]
gpt-4o = "default"
```

SIGHUP makes a running daemon [read them again](operations.md#reload). Where the column says so, a
new value is in force from then on; the others need a restart.

| key | variable | flag | value | default | reload | what it does |
|---|---|---|---|---|---|---|
"""

_NOTES = """
`socket` unset means `umbel.sock` in the user's runtime folder, or, on a Linux session without
`XDG_RUNTIME_DIR`, in `~/.local/state/umbel/`. `umbel serve` logs the path. `~` is expanded.

`models.aliases` maps other names to the served model: to its name, or to `default`, which is
whatever is served. Many tools ask for a model of their own choice; an alias answers to that name,
and [the list of models](http-api.md#models) has it. As a variable, aliases are separated by commas,
and as a flag, each has its own `--alias`: `NAME`, or `NAME=MODEL`. What is given in one place
replaces what a weaker one has. An alias has 1 to 255 characters, all printable.

Tables `[models.NAME]` are [further models](several-models.md); `memory_bytes` is what they share.

Tables `[tenants.NAME]` say [what is set for a tenant](tenants.md#what-is-set-for-a-tenant), and a
reload puts them in force. `keys_file` is the file of `umbel keys`.

`cors_origins` names the origins of web pages that may use the daemon, as browsers write them:
`https://app.example`, `http://localhost:3000`. As a variable they are separated by commas, and as a
flag, each has its own `--cors-origin`. `*` is refused: any page that the user opens could then ask
the model and read the answers. Where a key is asked for, such a page must send one too. What else
browsers are told is in [http-api.md](http-api.md#web-pages).

`host` needs `port`. A `host` that can be reached from outside needs `api_key`, or a key that
`umbel keys` made.

`cache_bytes` is a whole number, or one with a unit: `KiB`, `MiB`, `GiB` and `TiB` are powers of
1024, `KB`, `MB`, `GB` and `TB` powers of 1000. In the file a number with a unit is a string. It
covers all state, that of running requests too; a budget that holds no request, 0 above all, keeps
the daemon from starting. [memory.md](memory.md#the-budget) has the default,
[cache.md](cache.md#tuning) says when to change it.

[operations.md](operations.md#warm-up) says what `warmup` runs before the first
request, and for how long at most. `quick` runs nothing on a CPU, which compiles nothing.

`disk_dir` unset means `state` in the user's cache folder: `~/.cache/umbel/` on Linux,
`~/Library/Caches/umbel/` on macOS. `disk_bytes` is written as `cache_bytes` is. With `no_cache`,
or a `disk_bytes` of 0, there is no state on disk either.
"""


def render() -> str:
    """Write the whole page."""
    return _INTRODUCTION + "".join(f"| {' | '.join(row)} |\n" for row in _rows()) + _NOTES


def _rows() -> Iterator[tuple[str, ...]]:
    for setting in SETTINGS.values():
        yield (
            f"`{setting.key}`",
            f"`{setting.variable}`",
            f"`{setting.flag}`" if setting.flag else "none",
            setting.values,
            _default(setting),
            "yes" if setting.about.reload else "",
            setting.about.does,
        )


def _default(setting: Setting) -> str:
    if setting.about.unset:
        return f"unset: {setting.about.unset}"
    if isinstance(setting.default, bool):
        return f"`{str(setting.default).lower()}`"
    return f"`{setting.default}`"


def main() -> None:
    """Print the page, or write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write docs/settings.md")
    if parser.parse_args().write:
        PAGE.write_text(render(), encoding="utf-8")
    else:
        sys.stdout.write(render())


if __name__ == "__main__":
    main()
