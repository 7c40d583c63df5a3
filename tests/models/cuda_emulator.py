"""Runs the source of a CUDA kernel on the CPU, where no CUDA is.

The C++ compiler that MLX needs on a CPU builds the source with the signature that MLX gives it. The
threads of a block are run in turn by one thread of the host, each until it waits for others: where
its warp exchanges values, or its block synchronises. A library runs in one thread at a time. Only
types of 32 bits, whole warps, and one dimension of threads: what the kernels here use.
"""

import ctypes
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import umbel.models  # noqa: F401  (before mlx.core)

import mlx.core as mx  # isort: skip
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from umbel.models.backends.base import Backend
from umbel.models.backends.cpu import CPU
from umbel.models.backends.cuda import gated_delta, short_convolution
from umbel.models.backends.prepare import prepare

_WARP = 32
_OPTIONS = ("-std=c++20", "-O1", "-shared", "-fPIC", "-Wno-unknown-pragmas")
_ALIGNED = re.compile(r"alignas\((?:[^()]|\([^()]*\))*\)")
"""Of what is read at once, which a CPU needs not: MLX's memory has 8 bytes there."""
_TYPES = {mx.float32: "float", mx.bool_: "bool", mx.int32: "int", mx.uint32: "unsigned"}
_NOTHING = {"float": np.float32(np.nan), "unsigned": np.uint32(1 << 31)}  # never written
_CODE = """
#include <array>
#include <cmath>
#include <csetjmp>
#include <cstddef>
#include <ucontext.h>
#include <vector>
#define __shared__ static
struct Dim {{ int x, y, z; }};
static Dim threadIdx, blockIdx, blockDim;
enum State {{ RUNS, WAITS, ENDED }};
struct Fiber {{
  jmp_buf place;
  ucontext_t context;
  std::vector<char> stack;
  State state;
  int turn;
}};
static std::vector<Fiber> fibers;
static std::vector<std::array<std::array<float, {warp}>, 2>> warps;
static jmp_buf scheduler;
static int current;
// A context is switched by two system calls, a jump by none: contexts only begin.
__attribute__((noinline)) static void yield() {{
  if (!_setjmp(fibers[current].place)) {{
    _longjmp(scheduler, 1);
  }}
}}
__attribute__((noinline)) static void resume() {{
  if (!_setjmp(scheduler)) {{
    _longjmp(fibers[current].place, 1);
  }}
}}
static void __syncthreads() {{
  fibers[current].state = WAITS;
  yield();
}}
static float __shfl_xor_sync(unsigned, float value, int other) {{
  const int lane = current % {warp};
  auto& values = warps[current / {warp}][fibers[current].turn++ % 2];
  values[lane] = value;
  yield();
  return values[lane ^ other];
}}
using Shape = std::array<int, 8>;
using Strides = std::array<long, 8>;
static void kernel({parameters}) {{
{constants}
{source}
}}
{globals}
static void run_one() {{
  for (;;) {{
    yield();
    kernel({arguments});
    fibers[current].state = ENDED;
  }}
}}
// Has a fiber wait where it begins.
__attribute__((noinline)) static void begin(Fiber& fiber) {{
  if (!_setjmp(scheduler)) {{
    getcontext(&fiber.context);
    fiber.stack.resize(1 << 16);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = fiber.stack.size();
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, run_one, 0);
    setcontext(&fiber.context);
  }}
}}
static void run_block(int threads) {{
  for (current = 0; current < threads; ++current) {{
    fibers[current].state = RUNS;
    fibers[current].turn = 0;
  }}
  for (bool all_wait = false;;) {{
    bool some_run = false, some_wait = false;
    for (current = 0; current < threads; ++current) {{
      Fiber& fiber = fibers[current];
      if (all_wait && fiber.state == WAITS) {{
        fiber.state = RUNS;
      }}
      if (fiber.state == RUNS) {{
        threadIdx = {{current, 0, 0}};
        resume();
      }}
      some_run |= fiber.state == RUNS;
      some_wait |= fiber.state == WAITS;
    }}
    if (!some_run && !some_wait) {{
      return;
    }}
    all_wait = !some_run;
  }}
}}
extern "C" void run(int blocks, int rows, int threads, {signature}) {{
  {assignments}
  blockDim = {{threads, 1, 1}};
  warps.resize(threads / {warp});
  if (fibers.size() != static_cast<std::size_t>(threads)) {{
    fibers = std::vector<Fiber>(threads);
    for (current = 0; current < threads; ++current) {{
      begin(fibers[current]);
    }}
  }}
  for (int block = 0; block < blocks; ++block) {{
    for (int row = 0; row < rows; ++row) {{
      blockIdx = {{block, row, 0}};
      run_block(threads);
    }}
  }}
}}
"""


class EmulatedKernel:
    """A kernel as `mx.fast.cuda_kernel` returns it, on the CPU.

    Attributes:
        launches: how often it was called.

    Args:
        folder: for what is compiled.
        name: of the kernel.
        input_names: of its parameters.
        output_names: likewise.
        source: of its body.
        ensure_row_contiguous: whether inputs are put in one piece before.
    """

    def __init__(
        self,
        folder: Path,
        *,
        name: str,
        input_names: list[str],
        output_names: list[str],
        source: str,
        ensure_row_contiguous: bool = True,
    ) -> None:
        self._in_one_piece = ensure_row_contiguous
        self._folder = folder
        self.name = name
        self._inputs = input_names
        self._outputs = output_names
        self._source = source
        self.launches = 0

    def __call__(
        self,
        *,
        inputs: list[mx.array],
        template: list[tuple[str, Any]],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        output_shapes: list[tuple[int, ...]],
        output_dtypes: list[mx.Dtype],
    ) -> list[mx.array]:
        """Compile and run it, as MLX does."""
        assert grid[2] == 1
        assert threadgroup[1:] == (1, 1)
        assert threadgroup[0] % _WARP == 0
        self.launches += 1
        # The strides of an array that lies as it is may lead to more than its shape says.
        arrays = [np.array(a, order="C") if self._in_one_piece else np.asarray(a) for a in inputs]
        types = [_TYPES[dtype] for dtype in output_dtypes]
        outputs = [
            np.full(shape, _NOTHING[kind]) for shape, kind in zip(output_shapes, types, strict=True)
        ]
        library = self._compiled([_TYPES[a.dtype] for a in inputs], types, template)
        shapes = ctypes.c_int * 8
        arguments: list[Any] = []
        for name, array in zip(self._inputs, arrays, strict=True):
            arguments.append(ctypes.c_void_p(array.ctypes.data))
            if f"{name}_shape" in self._source:
                arguments.append(shapes(*array.shape))
            if f"{name}_strides" in self._source:
                steps = [step // array.itemsize for step in array.strides]
                arguments.append((ctypes.c_long * 8)(*steps))
        arguments += [ctypes.c_void_p(array.ctypes.data) for array in outputs]
        blocks = -(-grid[0] // threadgroup[0])
        library.run(blocks, grid[1], threadgroup[0], *arguments)
        return [mx.array(array) for array in outputs]

    def _compiled(
        self, types: list[str], written: list[str], template: list[tuple[str, Any]]
    ) -> ctypes.CDLL:
        given = [*_parameters(self._inputs, types, self._source)]
        given += [
            (name, f"{kind}*", f"{kind}*", f"${name}")
            for name, kind in zip(self._outputs, written, strict=True)
        ]
        code = _CODE.format(
            warp=_WARP,
            parameters=", ".join(f"{kind} {name}" for name, kind, _, _ in given),
            constants="\n".join(_constant(*each) for each in template),
            source=_ALIGNED.sub("", self._source),
            globals="\n".join(f"static {kind} global_{name};" for name, _, kind, _ in given),
            signature=", ".join(f"{kind} {name}" for name, _, kind, _ in given),
            assignments="\n  ".join(f"global_{name} = {name};" for name, _, _, _ in given),
            arguments=", ".join(as_given.replace("$", "global_") for *_, as_given in given),
        )
        made_of = "\n".join([code, *_OPTIONS, _compiler()])
        library = self._folder / f"{self.name}{sha256(made_of.encode()).hexdigest()[:16]}.so"
        if library.exists():
            library.touch()  # it is in use
        else:
            _build(code, library)
        return ctypes.CDLL(str(library))


@contextmanager
def emulated(folder: Path) -> Iterator[list[EmulatedKernel]]:
    """Run CUDA kernels on the CPU; yields those that are made.

    Args:
        folder: for what is compiled.
    """
    if shutil.which("g++") is None:
        pytest.skip("there is no C++ compiler")
    made: list[EmulatedKernel] = []

    def make(**arguments: Any) -> EmulatedKernel:
        made.append(EmulatedKernel(folder, **arguments))
        return made[-1]

    _forget()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mx.fast, "cuda_kernel", make, raising=False)
        yield made
    _forget()


def check_model(model: Any, device: Backend) -> int:
    """Hold a model's logits to those it has without kernels: of a prompt, and of the token after.

    Args:
        model: mlx-lm's. It stays prepared for the device.
        device: whose kernels are to run.

    Returns:
        How often the model was called with them.
    """
    tokens, after = mx.array([[3, 1, 4, 1, 5]]), mx.array([[9]])

    def logits() -> list[mx.array]:
        cache: Any = make_prompt_cache(model)
        return [model(tokens, cache=cache), model(after, cache=cache)]

    prepare(model, CPU)
    expected = logits()
    mx.eval(expected)
    prepare(model, device)
    found = logits()
    for one, other in zip(found, expected, strict=True):
        assert mx.allclose(one, other, rtol=1e-4, atol=1e-4)
    return len(found)


@cache
def _compiler() -> str:
    return subprocess.run(["g++", "--version"], check=True, capture_output=True, text=True).stdout


def _build(code: str, library: Path) -> None:
    """Compile a kernel. Other processes may, too: each puts it there as a whole."""
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        file, built = Path(folder, "kernel.cpp"), Path(folder, "kernel.so")
        file.write_text(code)
        subprocess.run(["g++", *_OPTIONS, str(file), "-o", str(built)], check=True)
        built.replace(library)


def _forget() -> None:
    """Make kernels again when they are next used."""
    for module in (gated_delta, short_convolution):
        module.kernel.cache_clear()


def _parameters(
    names: list[str], types: list[str], source: str
) -> Iterator[tuple[str, str, str, str]]:
    """Name a kernel's inputs: the parameter, its type, the library's, and how it is passed."""
    for name, kind in zip(names, types, strict=True):
        yield name, f"const {kind}*", f"const {kind}*", f"${name}"
        for what, of in (("shape", "Shape"), ("strides", "Strides")):
            if f"{name}_{what}" in source:
                yield f"{name}_{what}", f"const {of}&", f"const {of}*", f"*${name}_{what}"


def _constant(name: str, value: Any) -> str:
    """Say a template argument as MLX does."""
    if isinstance(value, mx.Dtype):
        return f"  using {name} = {_TYPES[value]};"
    kind = "bool" if isinstance(value, bool) else "int"
    return f"  constexpr {kind} {name} = {str(value).lower()};"
