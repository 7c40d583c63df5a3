"""Other spellings of the routes below `/v1`, as clients make them of a base URL.

`//v1/models`, `/v1//models`, `/v1/models/`, `/v1/v1/models` and `/models` are `/v1/models`.
"""

import re

from aiohttp import web

_V1 = "/v1/"
_LEAD = "/{lead:/*(?:v1/+)*}"
_TAIL = "{tail:/*}"
_NAME = "{name:[^/].*[^/]|[^/]}"  # of a model: `org/name`
_SPELLED = re.compile(r"/+(?:v1/+)*")


def add_spellings(app: web.Application) -> None:
    """Serve every route below `/v1` under its other spellings, too."""
    routes = [
        (route.method, route.resource.canonical, route.handler)
        for resource in app.router.resources()
        for route in resource
        if route.resource is not None and route.resource.canonical.startswith(_V1)
    ]
    added: dict[str, web.Resource] = {}
    for method, path, handler in routes:
        if path not in added:
            added[path] = app.router.add_resource(_pattern(path))
        added[path].add_route(method, handler)


def below_v1(path: str) -> str:
    """Name what a path leads to below `/v1`, however that is spelled: `chat/completions`."""
    return re.sub("/+", "/", _SPELLED.sub("", path, count=1)).removesuffix("/")


def _pattern(path: str) -> str:
    """Write a path with everything that may be spelled in another way as a pattern."""
    first, *others = path.removeprefix(_V1).split("/")
    others = [each.replace("{name}", _NAME) for each in others]
    gaps = (f"{{gap{number}:/+}}{segment}" for number, segment in enumerate(others))
    return _LEAD + first + "".join(gaps) + _TAIL
