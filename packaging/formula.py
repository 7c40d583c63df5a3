#!/usr/bin/env python3
"""Write the resources of packaging/umbel.rb, or print the formula of a release.

    .ci/lock --write-uv-lock && python packaging/formula.py --write
    python packaging/formula.py --sdist FILE --url URL --files URL > umbel.rb

The first takes the wheels for Homebrew's Python on Apple silicon from uv.lock, which has the pins
of requirements.lock. The second puts addresses in their places: where the release's sdist is, and
in front of each wheel's path, such as /packages/....
"""

import argparse
import hashlib
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from packaging.markers import Marker
from packaging.tags import Tag, compatible_tags, cpython_tags, mac_platforms
from packaging.utils import parse_wheel_filename

ROOT = Path(__file__).resolve().parent.parent
FORMULA = ROOT / "packaging" / "umbel.rb"
PYTHON = (3, 13)
MACOS = (14, 0)
BEGIN, END = "  # resources\n", "\n  # end of resources\n"
_Package = Mapping[str, Any]


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="write new resources")
    parser.add_argument("--sdist", type=Path, help="the release's sdist")
    parser.add_argument("--url", help="where it is")
    parser.add_argument("--files", help="what comes before the path of each wheel")
    arguments = parser.parse_args()
    if arguments.write:
        lock = tomllib.loads((ROOT / "uv.lock").read_text(encoding="utf-8"))
        FORMULA.write_text(with_resources(FORMULA.read_text(encoding="utf-8"), lock))
    elif arguments.sdist and arguments.url and arguments.files:
        if not arguments.url.endswith(f"/{arguments.sdist.name}"):
            parser.error(
                f"Homebrew reads the version off --url: end it with {arguments.sdist.name}"
            )
        digest = hashlib.sha256(arguments.sdist.read_bytes()).hexdigest()
        places = {"@URL@": arguments.url, "@SHA256@": digest, "@FILES@": arguments.files}
        text = FORMULA.read_text(encoding="utf-8").partition("class ")
        formula = "".join(text[1:])
        for place, value in places.items():
            formula = formula.replace(place, value.rstrip("/"))
        sys.stdout.write(formula)
    else:
        parser.error("give --write, or --sdist, --url and --files")


def with_resources(formula: str, lock: Mapping[str, Any]) -> str:
    """Replace the resources of a formula by those of a uv.lock."""
    before, _, rest = formula.partition(BEGIN)
    after = rest.partition(END)[2]
    blocks = "\n".join(_resource(package) for package in needed(lock))
    return f"{before}{BEGIN}{blocks}{END}{after}"


def environment() -> dict[str, str]:
    """Describe Homebrew's Python on Apple silicon to markers."""
    version = ".".join(map(str, PYTHON))
    return {
        "implementation_name": "cpython",
        "implementation_version": f"{version}.0",
        "os_name": "posix",
        "platform_machine": "arm64",
        "platform_python_implementation": "CPython",
        "platform_release": "",
        "platform_system": "Darwin",
        "platform_version": "",
        "python_full_version": f"{version}.0",
        "python_version": version,
        "sys_platform": "darwin",
    }


def needed(lock: Mapping[str, Any]) -> list[_Package]:
    """List the packages that umbel needs there, by name."""
    packages: dict[str, list[_Package]] = {}
    for package in lock["package"]:
        packages.setdefault(package["name"], []).append(package)
    found: dict[str, _Package] = {}
    to_visit = list(_dependencies(packages["umbel"][0]))
    while to_visit:
        wanted = to_visit.pop()
        package = _chosen(packages[wanted["name"]], wanted)
        if package["name"] not in found:
            found[package["name"]] = package
            to_visit += _dependencies(package)
        for extra in wanted.get("extra", []):
            to_visit += _here(package.get("optional-dependencies", {}).get(extra, []))
    return [found[name] for name in sorted(found)]


def _chosen(versions: list[_Package], wanted: Mapping[str, Any]) -> _Package:
    """Pick the version that is meant where the lock has several."""
    version = wanted.get("version", versions[0]["version"])
    return next(package for package in versions if package["version"] == version)


def _dependencies(package: _Package) -> Iterator[Mapping[str, Any]]:
    return _here(package.get("dependencies", []))


def _here(entries: list[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    described = environment()
    for entry in entries:
        if "marker" not in entry or Marker(entry["marker"]).evaluate(described):
            yield entry


def _resource(package: _Package) -> str:
    """Write the block of the best wheel."""
    ranks = {tag: rank for rank, tag in enumerate(_tags())}
    wheels = []
    for wheel in package.get("wheels", []):
        path = unquote(urlsplit(wheel["url"]).path)
        tags = parse_wheel_filename(path.rpartition("/")[2])[3]
        wheels += [(ranks[tag], path, wheel["hash"]) for tag in tags if tag in ranks]
    if not wheels:
        raise SystemExit(f"{package['name']} {package['version']} has no wheel for Homebrew")
    _, path, digest = min(wheels)
    return (
        f'  resource "{package["name"]}" do\n'
        f'    url "@FILES@{path}", using: :nounzip\n'
        f'    sha256 "{digest.removeprefix("sha256:")}"\n'
        "  end\n"
    )


def _tags() -> list[Tag]:
    """List what Homebrew's Python can install, the best first."""
    platforms = list(mac_platforms(MACOS, "arm64"))
    interpreter = f"cp{PYTHON[0]}{PYTHON[1]}"
    return [
        *cpython_tags(PYTHON, platforms=platforms),
        *compatible_tags(PYTHON, interpreter, platforms),
    ]


if __name__ == "__main__":
    main()
