"""Time that writing state to disk takes of the MLX thread, by the way of copying.

Agents take turns; their state is made of random numbers. Between the pager's steps the thread
multiplies matrices, as if it computed. Each way has a cache and a folder of its own, and they
take turns, so that what else the machine does disturbs all alike.
"""

import argparse
import itertools
import json
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import umbel.models  # noqa: F401  (before mlx.core)

import mlx.core as mx  # isort: skip
import numpy as np

from umbel.cachestore.disk.tier import DiskTier
from umbel.cachestore.ledger import Kind, Size
from umbel.cachestore.node import as_tokens
from umbel.cachestore.paging.pager import Pager
from umbel.cachestore.prefix_cache import PrefixCache
from umbel.cachestore.state import Layout
from umbel.cachestore.tries import Namespace
from umbel.models.backends import device_name
from umbel.models.kv.disk_format import DiskCodec, HostArray
from umbel.models.kv.spans import PackedSpan, pack_suffix

MIB = 1 << 20
BUDGET = 16 << 30
NAMESPACE = Namespace("tenant")


class CopiesAtOnce(DiskCodec):
    """Copies on the thread that hands over, and waits for it: as it was done before.

    Where the host reads what the device wrote, whole storages are not copied.
    """

    def __init__(self) -> None:
        super().__init__(host_reads=False)

    def _hosted(self, arrays: Sequence[mx.array], which: tuple[Any, ...]) -> dict[str, HostArray]:
        hosted = {}
        for number, array in enumerate(arrays):
            own = mx.array(array[which]) if device_name() == "cuda" else mx.contiguous(array[which])
            bits = own.view(mx.uint16)
            mx.eval(bits)
            hosted[str(number)] = HostArray("BF16", tuple(own.shape), [np.asarray(bits)])
        return hosted


class Way:
    """One way of handing over, with what it needs.

    Attributes:
        spent: seconds and bytes, by what for.
        paging: the most bytes that only the writer had.
    """

    def __init__(self, codec: DiskCodec, folder: Path, agents: int) -> None:
        self.spent: dict[str, float] = defaultdict(float)
        self.paging = 0
        self._cache = PrefixCache(Layout(spans=True, checkpoints=False), budget=BUDGET)
        self._tier = DiskTier(folder, fingerprint="model", queue_bytes=BUDGET // 16)
        self._cache.pool.resize(Size(BUDGET, 1 << 30))
        self._pager = Pager(
            self._cache,
            self._tier,
            codec,
            budget=1 << 40,
        )
        self._told = [[agent] for agent in range(agents)]
        self._matrix = mx.random.normal((768, 768))
        mx.eval(self._matrix)

    def turn(self, tokens: int, layers: int, heads: int) -> None:
        """Grow each agent's state, and write it beside a computation."""
        for told in self._told:
            told.extend([1_000_000 + len(told)] * tokens)
            lease = self._cache.begin(NAMESPACE, as_tokens(told))
            span = _state(len(told) - lease.cached, layers, heads)
            self.spent["bytes"] += span.nbytes
            lease.close(as_tokens(told), span)
            self._step()
        while self._step():
            pass

    def _step(self) -> bool:
        """One step of an engine: page, then compute."""
        began, thread, process = time.perf_counter(), time.thread_time(), time.process_time()
        more = self._pager.write_all()
        self.spent["paging_s"] += time.perf_counter() - began
        self.spent["paging_thread_s"] += time.thread_time() - thread
        held = self._cache.ledger.held(Kind.PAGING).nbytes
        self.paging = max(self.paging, held)
        mx.eval(self._matrix @ self._matrix)
        self.spent["all_s"] += time.perf_counter() - began
        self.spent["process_s"] += time.process_time() - process
        return more

    def close(self) -> dict[str, float]:
        """Give the folder up; say what was spent."""
        self._tier.close(60)
        mib = self.spent["bytes"] / MIB
        return {
            "mib": round(mib),
            "paging_ms_per_gib": round(1e3 * 1024 * self.spent["paging_s"] / mib, 2),
            "thread_ms_per_gib": round(1e3 * 1024 * self.spent["paging_thread_s"] / mib, 2),
            "share_of_engine": round(self.spent["paging_s"] / self.spent["all_s"], 4),
            "process_s": round(self.spent["process_s"], 2),
            "most_paging_mib": round(self.paging / MIB),
        }


def _state(tokens: int, layers: int, heads: int) -> PackedSpan:
    shape = (1, heads, tokens, 128)
    kv = [mx.random.normal(shape).astype(mx.bfloat16) for _ in range(2)]
    return pack_suffix([[(kv[0] + layer,), (kv[1] + layer,)] for layer in range(layers)])


def main() -> None:
    """Measure, and print one line of JSON for each way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agents", type=int, default=4)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=300, help="of a turn")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--folder", type=Path, help="on which disk; a new folder is made in it")
    args = parser.parse_args()
    mx.random.seed(0)
    codecs = {"at once": CopiesAtOnce(), "apart": DiskCodec(host_reads=False)}
    if device_name() != "cuda":
        codecs["in place"] = DiskCodec(host_reads=True)
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    try:
        ways = {
            name: Way(codec, folder / name.replace(" ", "-"), args.agents)
            for name, codec in codecs.items()
        }
        order = itertools.cycle(np.roll(list(ways), -shift) for shift in range(len(ways)))
        for names in itertools.islice(order, args.turns):
            for name in names:
                ways[str(name)].turn(args.tokens, args.layers, args.heads)
        for name, way in ways.items():
            print(json.dumps({"way": name, "backend": device_name(), **way.close()}))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
