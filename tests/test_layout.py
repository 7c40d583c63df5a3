"""The shape of the tree: where code lies, and which part may import which."""

import ast
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from umbel.cachestore.node import TrieNode
from umbel.models.backends import Limits

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("daemon", "scheduler", "cachestore", "models")
DATA = ("systemd", "launchd")  # folders without code that umbel ships

# Parts of umbel that each part may import, itself aside. "" is src/umbel's own modules, of which
# any part may import those that import nothing.
MAY_IMPORT = {
    "": frozenset[str](),
    "daemon": frozenset({"scheduler", "cachestore", "models"}),
    "scheduler": frozenset({"cachestore", "models"}),
    "cachestore": frozenset[str](),
    "models": frozenset[str](),
}
# Libraries that only some modules may touch: a folder ends in a slash.
CONFINED = {
    "mlx": ("models/",),
    "mlx_lm": ("models/",),
    "asyncio": ("daemon/", "scheduler/handoff.py"),
    "llguidance": ("models/text/",),
    "anyio": ("daemon/", "scheduler/handoff.py"),
}
# Modules of cachestore that the disk tier may import: it knows no tries. Its own importers.
OF_DISK = (
    "ownership",
    "cachestore.disk",
    "cachestore.errors",
    "cachestore.record",
)
ON_DISK = ("cachestore/disk/", "cachestore/paging/", "cachestore/pins.py")
# The trie and its own parts, which alone write the nodes' fields, and what a write looks like.
TRIE = ("cachestore/node.py", "cachestore/trie.py")
FIELDS = frozenset(field.name for field in dataclasses.fields(TrieNode))
CHANGES = frozenset({"append", "clear", "extend", "insert", "pop", "popitem", "remove", "update"})
# Words and parts of MLX by which code would ask what computes, or say it; for models/backends only.
DEVICES = frozenset({"cpu", "cuda", "metal"})
OF_DEVICES = frozenset(
    {"cpu", "cuda", "cuda_kernel", "default_device", "Device", "device_info", "gpu", "metal"}
    | {"metal_kernel", "set_default_device"}
)
# Modules outside that may name one, and why.
NAMES_DEVICES = {
    "daemon/config/settings.py": "the values of the setting `backend`",
    "daemon/cli/doctor.py": "`umbel doctor` says what MLX computes on, and what is amiss",
    "daemon/models/fit.py": "machines that a user plans for",
}
# Names of models/backends by their importers: a folder ends in a slash.
BACKENDS = "models.backends"
OF_BACKENDS = {
    "models/": frozenset({"Limits", "Name", "choose", "limits_of"}),
    "scheduler/": frozenset({"Limits"}),
    "daemon/": frozenset({"Limits", "limits_of"}),
}
REPORTS_THE_DEVICE = frozenset(
    {"daemon/observability/daemon_metrics.py", "daemon/cli/doctor.py", "daemon/models/fit.py"}
    | {"daemon/models/loader.py", "daemon/observability/status.py", "models/runtime.py"}
)
# Modules of models/backends that others may import, and which.
NO_BACKENDS = {
    "base": ("models/",),
    "blas": ("models/__init__.py",),
    "environment": ("models/__init__.py",),
    "memory": ("models/runtime.py", "daemon/models/memory_budget.py", "daemon/models/fit.py"),
    "prepare": ("models/",),
}
# The most attributes that an instance has: what a reader must hold of it.
ATTRIBUTES = {
    ("scheduler/engine.py", "Engine"): 12,
    ("scheduler/sequence.py", "Sequence"): 14,
}
# The most lines of a folder's modules together: a reader has to hold them. Raise one only for what
# is worth that.
MOST_LINES = {
    "cachestore": 5_191,
    "daemon/chat": 803,
    "daemon/cli": 1_991,
    "daemon/config": 1_047,
    "daemon/http": 2_606,
    "daemon/identity": 740,
    "daemon/installation": 969,
    "daemon/lifecycle": 1_122,
    "daemon/models": 2_187,
    "daemon/observability": 1_233,
    "daemon/protocols": 3_547,
    "daemon/requests": 1_888,
    "daemon/responses": 791,
    "daemon/terminal": 771,
    "models/attention": 984,
    "models/backends": 1_443,
    "models/estimate": 716,
    "models/kv": 2_582,
    "models/load": 2_304,
    "models/text": 5_260,
    "scheduler": 3_799,
}
# Names that say nothing, and so attract everything.
NAMELESS = frozenset({"utils", "common", "helpers"})


class Import(NamedTuple):
    """One imported module: how many dots it is written with, and its full name."""

    level: int
    name: str


def modules() -> list[str]:
    """List all modules as they lie below `umbel`, as in `daemon/cli.py`."""
    own = [path.name for path in (ROOT / "src/umbel").glob("*.py")]
    real = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    return sorted(own + [path.relative_to(ROOT).as_posix() for path in real])


def read(module: str) -> str:
    """Read the source of a module that `modules` lists."""
    return (ROOT / "src/umbel" / module).read_text()


def imports(module: str, source: str) -> Iterator[Import]:
    """Find all imports, relative ones as absolute names below `umbel`, wherever they stand.

    `from .. import models` may name a module or something in one: it counts as `models`.
    """
    package = module.split("/")[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (Import(0, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package[: len(package) - node.level + 1] if node.level else []
            if node.module:
                yield Import(node.level, ".".join([*parts, node.module]))
            else:
                yield from (Import(node.level, ".".join([*parts, a.name])) for a in node.names)


def import_faults(module: str, source: str) -> list[str]:
    """Say what is wrong with the imports of a module."""
    folder = module.rpartition("/")[0].partition("/")[0]
    allowed = MAY_IMPORT[folder] | {folder}
    if module == "__main__.py":
        allowed |= {"daemon"}
    faults = []
    for level, name in imports(module, source):
        top = name.partition(".")[0]
        if level == 0 and top in {"umbel", *FOLDERS}:
            faults.append(f"{module}: {name} is imported absolutely")
        if level > 0 and top in FOLDERS and top not in allowed:
            faults.append(f"{module}: {folder or 'umbel'} may not import {top}")
        if level == 0 and not module.startswith(CONFINED.get(top, (module,))):
            faults.append(f"{module}: {top} is for {', '.join(CONFINED[top])} only")
    return faults


def disk_faults(module: str, source: str) -> list[str]:
    """Say where tries and disk tier of cachestore know each other."""
    faults = []
    for level, name in imports(module, source):
        if level and module.startswith("cachestore/disk/") and not name.startswith(OF_DISK):
            faults.append(f"{module}: the disk tier may not import {name}")
        if level and name.startswith("cachestore.disk") and not module.startswith(ON_DISK):
            faults.append(f"{module}: only paging and shared import the disk tier")
    return faults


def name_faults(module: str) -> list[str]:
    """Say whether a module, or a folder above it, has a name that says nothing."""
    names = module.removesuffix(".py").split("/")
    return [f"{module}: {name} is no name" for name in names if name in NAMELESS]


def _written(node: ast.AST) -> list[ast.expr]:
    """List what a piece of code assigns to, deletes, or changes by a method or an index."""
    if isinstance(node, ast.Assign | ast.Delete):
        written = node.targets
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        written = [node.target]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        written = [node.func.value] if node.func.attr in CHANGES else []
    else:
        return []
    parts = [part for one in written for part in (getattr(one, "elts", None) or [one])]
    return [part.value if isinstance(part, ast.Subscript) else part for part in parts]


def trie_faults(module: str, source: str) -> list[str]:
    """Say where a field of a trie's node is written that is not in the trie.

    What a module writes of its own objects, by `self`, is no node's.
    """
    if module in TRIE:
        return []
    fields = [
        part
        for node in ast.walk(ast.parse(source))
        for part in _attributes(node)
        if part.attr in FIELDS
    ]
    return [
        f"{module}:{part.lineno}: only the trie writes a node's {part.attr}"
        for part in fields
        if not (isinstance(part.value, ast.Name) and part.value.id == "self")
    ]


def device_faults(module: str, source: str) -> list[str]:
    """Say where a module outside models/backends names a device, or knows more than it may."""
    if module.startswith("models/backends/"):
        return []
    faults = []
    tree = ast.parse(source)
    if module not in NAMES_DEVICES:
        for node in ast.walk(tree):
            named = isinstance(node, ast.Constant) and node.value in DEVICES
            if named or (isinstance(node, ast.Attribute) and node.attr in OF_DEVICES):
                faults.append(f"{module}: {ast.unparse(node)}: only backends name a device")
    if any(part.attr == "__class__" for node in ast.walk(tree) for part in _attributes(node)):
        faults.append(f"{module}: only prepare changes a layer's class")
    package = module.split("/")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            parts = [*package[: len(package) - node.level + 1], *(node.module or "").split(".")]
            source_of = ".".join(parts)
            faults += [
                f"{module}: {source_of} does not give it {alias.name}"
                for alias in node.names
                if not _may_have(module, source_of, alias.name)
            ]
    return faults


def _attributes(node: ast.AST) -> list[ast.Attribute]:
    """List the attributes that a piece of code writes."""
    return [part for part in _written(node) if isinstance(part, ast.Attribute)]


def _may_have(module: str, source: str, name: str) -> bool:
    """Tell whether a module may import a name from a module of umbel's."""
    if source == BACKENDS:
        if name == "device_name":
            return module in REPORTS_THE_DEVICE
        return name in OF_BACKENDS.get(f"{module.partition('/')[0]}/", ())
    if source.startswith(f"{BACKENDS}."):
        return module.startswith(NO_BACKENDS.get(source.removeprefix(f"{BACKENDS}."), ("-",)))
    return True


def attributes(source: str, name: str) -> set[str]:
    """List the attributes that a class gives its instances: whatever it assigns to `self`."""
    (found,) = (
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name == name
    )
    parts = (part for node in ast.walk(found) for part in _written(node))
    return {
        part.attr
        for part in parts
        if isinstance(part, ast.Attribute)
        and isinstance(part.value, ast.Name)
        and part.value.id == "self"
    }


def docstring_faults(module: str, source: str) -> list[str]:
    """Say whether a module lacks its docstring."""
    return [] if ast.get_docstring(ast.parse(source)) else [f"{module}: no docstring"]


@pytest.mark.parametrize("folder", FOLDERS + DATA)
def test_link_is_the_folder(folder: str) -> None:
    """umbel.<folder> is a relative link to the folder at the top."""
    link = ROOT / "src/umbel" / folder
    assert link.is_symlink()
    assert not link.readlink().is_absolute()
    assert (ROOT / folder).is_dir()
    assert not (ROOT / folder).is_symlink()
    assert link.samefile(ROOT / folder)


def test_every_folder_has_modules() -> None:
    """The tests below look at something in each of the four folders and in src/umbel."""
    found = modules()
    assert {"__init__.py", "__main__.py"} < set(found)
    assert all(f"{folder}/__init__.py" in found for folder in FOLDERS)


@pytest.mark.parametrize("folder", MOST_LINES)
def test_folder_does_not_grow(folder: str) -> None:
    """The sum is what a folder came to; what leaves it lowers the bound."""
    inside = [module for module in modules() if module.startswith(f"{folder}/")]
    assert sum(read(module).count("\n") for module in inside) <= MOST_LINES[folder]


@pytest.mark.parametrize("module", modules())
def test_module_keeps_the_rules(module: str) -> None:
    """Imports go one way, libraries stay where they belong, names and docstrings say something."""
    source = read(module)
    faults = import_faults(module, source) + name_faults(module) + docstring_faults(module, source)
    faults += device_faults(module, source)
    if module.startswith("cachestore/"):
        faults += trie_faults(module, source) + disk_faults(module, source)
    assert faults == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("daemon/cli.py", "from umbel.scheduler import queue"),
        ("daemon/cli.py", "import scheduler.queue"),
        ("scheduler/engine.py", "from models.text.codec import TextCodec"),
        ("scheduler/engine.py", "from ..daemon import cli"),
        ("scheduler/engine.py", "from .. import daemon"),
        ("scheduler/engine.py", "if TYPE_CHECKING:\n    from ..daemon.config import Settings"),
        ("scheduler/engine.py", "def step():\n    import mlx.core as mx"),
        ("scheduler/engine.py", "import asyncio"),
        ("scheduler/engine.py", "from anyio import to_thread"),
        ("scheduler/queue/deep.py", "from ...daemon import cli"),
        ("scheduler/queue.py", "import asyncio"),
        ("cachestore/paging/pager.py", "import mlx.core as mx"),
        ("cachestore/trie.py", "from ..models.load.loader import load"),
        ("cachestore/trie.py", "from ..scheduler import engine"),
        ("cachestore/trie.py", "from mlx.utils import tree_flatten"),
        ("cachestore/trie.py", "import numpy, mlx_lm"),
        ("models/loader.py", "from ..cachestore import trie"),
        ("models/loader.py", "from ..scheduler.sequence import Sequence"),
        ("models/loader.py", "import asyncio.queues"),
        ("daemon/cli.py", "import mlx.core as mx"),
        ("scheduler/masks.py", "import llguidance"),
        ("models/sampling.py", "from llguidance import numpy"),
        ("__init__.py", "from .daemon import cli"),
        ("__main__.py", "from .models import loader"),
    ],
)
def test_planted_import_is_found(module: str, source: str) -> None:
    """Each rule about imports finds what breaks it, and finds it once."""
    assert len(import_faults(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("__main__.py", "from .daemon.cli import main"),
        ("daemon/cli.py", "from .. import __version__, models, scheduler"),
        ("daemon/http/app.py", "from ...scheduler.queue import Queue\nimport asyncio"),
        ("daemon/cli.py", "from . import models"),
        ("scheduler/handoff.py", "import asyncio\nfrom ..cachestore.trie import Trie"),
        ("scheduler/engine.py", "from ..models import text\nfrom .sequence import Sequence"),
        ("cachestore/paging/pager.py", "from ..trie import Trie\nfrom ...cachestore import disk"),
        ("models/loader.py", "import mlx_lm, mlx.core\nfrom .runtime import backend"),
    ],
)
def test_allowed_import_is_no_fault(module: str, source: str) -> None:
    """Allowed code is not reported."""
    assert import_faults(module, source) == []


@pytest.mark.parametrize(
    "source",
    [
        "node.ref_count += 1",
        "node.last_used = node.checkpoint_used = tick",
        "resume.span, rest = None, node.span",
        "trie.root.checkpoint = checkpoint",
        "node.writers[job] = node.end",
        "del node.writers[job]",
        "node.writers.pop(job, None)",
        "job.node.extents.append(extent)",
        "node.span: Span = span",
    ],
)
def test_planted_write_of_a_node_is_found(source: str) -> None:
    """Whichever way a node's field is written, it is found, and in the trie it is allowed."""
    assert len({fault.split()[0] for fault in trie_faults("cachestore/pins.py", source)}) == 1
    assert trie_faults("cachestore/trie.py", source) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("cachestore/node.py", "from .disk.index import Record"),
        ("cachestore/trie.py", "from . import disk"),
        ("cachestore/disk/tier.py", "from ..node import Tokens"),
        ("cachestore/disk/recovery.py", "from ..tries import Tries"),
    ],
)
def test_planted_import_of_the_disk_tier_is_found(module: str, source: str) -> None:
    """The tries do without the disk tier's code, and it without theirs."""
    assert len(disk_faults(module, source)) == 1
    assert disk_faults("cachestore/paging/pager.py", "from ..disk.tier import DiskTier") == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("models/runner.py", 'if device == "cpu":\n    pass'),
        ("models/kv/spans.py", "mx.metal.start_capture(path)"),
        ("models/load/loader.py", "mx.default_device()"),
        ("models/sampling.py", "mx.fast.metal_kernel(source)"),
        ("models/runner.py", "layer.__class__ = Faster"),
        ("models/sampling.py", "from .backends.cuda import CUDA"),
        ("models/kv/spans.py", "from ..backends.cuda.gated_delta import update"),
        ("models/kv/spans.py", "from ..backends import device_name"),
        ("scheduler/engine.py", "from ..models.backends import choose"),
        ("scheduler/engine.py", "from ..models.backends.memory import gpu_memory"),
        ("daemon/models/assembly.py", "from ...models.backends import Backend"),
        ("daemon/models/assembly.py", "from ...models.backends.base import METAL"),
    ],
)
def test_planted_device_is_found(module: str, source: str) -> None:
    """Only backends know the device; the scheduler and the daemon see limits."""
    assert len(device_faults(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("models/backends/cuda/__init__.py", 'mx.fast.cuda_kernel(name="cuda")'),
        ("models/runner.py", "from .backends import Limits, choose"),
        ("scheduler/engine.py", "from ..models.backends import Limits"),
        ("daemon/models/assembly.py", "from ...models.backends import Limits, limits_of"),
        ("daemon/observability/status.py", "from ..models.backends import device_name"),
    ],
)
def test_allowed_device_is_no_fault(module: str, source: str) -> None:
    """Backends name devices; others have what the table says."""
    assert device_faults(module, source) == []


def test_limits_are_few() -> None:
    """`Limits` has at most ten fields."""
    assert len(dataclasses.fields(Limits)) <= 10
    assert NAMES_DEVICES.keys() | REPORTS_THE_DEVICE <= set(modules())


@pytest.mark.parametrize(("module", "name"), ATTRIBUTES)
def test_class_has_few_attributes(module: str, name: str) -> None:
    """A value that a class keeps must be held in mind by all who read it."""
    found = attributes(read(module), name)
    assert 0 < len(found) <= ATTRIBUTES[module, name], sorted(found)


def test_attributes_are_found() -> None:
    """Wherever they are assigned to, each once; those of other objects are not counted."""
    source = "class A:\n def f(self):\n  self.a = self.b, other.c = 1, 2\n  self.d.append(1)\n"
    source += "  self.e += 1\n  self.a: int = 3"
    assert attributes(source, "A") == {"a", "b", "d", "e"}


def test_reading_a_node_is_no_fault() -> None:
    """So is what a module writes of its own."""
    source = "end = node.end\nself.start = node.start\nlease.held = 3\nnode.path().pop()"
    assert trie_faults("cachestore/pins.py", source) == []


@pytest.mark.parametrize("module", ["daemon/utils.py", "models/common/rope.py", "helpers.py"])
def test_planted_name_is_found(module: str) -> None:
    """A module or folder whose name says nothing is reported."""
    assert len(name_faults(module)) == 1


def test_planted_lack_of_docstring_is_found() -> None:
    """An empty module and one that starts with a comment both lack a docstring."""
    assert docstring_faults("daemon/__init__.py", "")
    assert docstring_faults("daemon/cli.py", "# The command line.\nimport sys")
    assert not docstring_faults("daemon/cli.py", '"""The command line."""')
