"""Web pages that may use the daemon: their origins, as browsers write them."""

from collections.abc import Iterable

from yarl import URL

from ..errors import ConfigError
from ..quoting import quote


def check_origins(origins: Iterable[str]) -> None:
    """Refuse what no browser sends as the origin of a page.

    `*` is refused too: any page that the user opens could then ask the model, and read answers.

    Raises:
        ConfigError: saying how an origin is written.
    """
    for origin in origins:
        if origin == "*":
            raise ConfigError(
                "cors_origins: '*' would let every web page use this daemon; name the pages' "
                "origins, such as https://app.example or http://localhost:3000"
            )
        if _origin(origin) != origin:
            raise ConfigError(
                f"cors_origins: {quote(origin)} is no origin; write scheme, host, and port if it "
                "is not the scheme's own, in lower case and with nothing behind, such as "
                "https://app.example or http://localhost:3000"
            )


def _origin(text: str) -> str | None:
    """Write an origin as a browser does; None if there is none in the text."""
    try:
        url = URL(text)
        whole = url.scheme and url.host and not any(map(str.isspace, text))
        return str(url.origin()) if whole else None
    except ValueError:
        return None
