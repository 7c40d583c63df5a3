"""The recipes of docs/clients.md, as the tests run them."""

import re

from ..daemon.running import RunningDaemon
from .outside import ROOT

PAGE = (ROOT / "docs" / "clients.md").read_text(encoding="utf-8")
_PORT = "8080"  # the page's


def recipe(title: str, language: str, daemon: RunningDaemon) -> str:
    """Read the last block of a language in the section of a client, with the daemon's own port."""
    _, _, section = PAGE.partition(f"\n## {title}\n")
    section = section.partition("\n## ")[0]
    blocks = re.findall(rf"^```{language}\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    return str(blocks[-1]).replace(_PORT, str(daemon.tcp_port()))
