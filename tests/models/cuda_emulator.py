"""Runs the source of a CUDA kernel on the CPU, where no CUDA is.

The C++ compiler that MLX needs on a CPU builds the source with the signature that MLX gives it. The
threads of a block are threads of the host; those of a warp exchange values behind a barrier. Only
fp32, whole warps, and one dimension of threads: what the kernels here use.
"""

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import umbel.models  # noqa: F401  (before mlx.core)

import mlx.core as mx  # isort: skip
import numpy as np
import pytest

from umbel.models import gated_delta

_WARP = 32
_TYPES = {mx.float32: "float", mx.bool_: "bool"}
_CODE = """
#include <array>
#include <barrier>
#include <cstddef>
#include <thread>
#include <vector>
struct Dim {{ int x, y, z; }};
static thread_local Dim threadIdx, blockIdx;
static Dim blockDim;
struct Warp {{
  std::barrier<> all{{{warp}}};
  float values[{warp}];
}};
static thread_local Warp* warp;
static float __shfl_xor_sync(unsigned, float value, int other) {{
  const int lane = threadIdx.x % {warp};
  warp->values[lane] = value;
  warp->all.arrive_and_wait();
  const float found = warp->values[lane ^ other];
  warp->all.arrive_and_wait();
  return found;
}}
using Shape = std::array<int, 8>;
static void kernel({parameters}) {{
{constants}
{source}
}}
extern "C" void run(int blocks, int rows, int threads, {signature}) {{
  blockDim = {{threads, 1, 1}};
  for (int block = 0; block < blocks; ++block) {{
    for (int row = 0; row < rows; ++row) {{
      std::vector<Warp> warps(threads / {warp});
      std::vector<std::thread> all;
      for (int thread = 0; thread < threads; ++thread) {{
        all.emplace_back([&, thread] {{
          threadIdx = {{thread, 0, 0}};
          blockIdx = {{block, row, 0}};
          warp = &warps[thread / {warp}];
          kernel({arguments});
        }});
      }}
      for (auto& one : all) {{
        one.join();
      }}
    }}
  }}
}}
"""


class EmulatedKernel:
    """What `mx.fast.cuda_kernel` returns, on the CPU.

    Args:
        folder: for what is compiled.
        name: of the kernel.
        input_names: of its parameters.
        output_names: likewise.
        source: of its body.
    """

    def __init__(
        self,
        folder: Path,
        *,
        name: str,
        input_names: list[str],
        output_names: list[str],
        source: str,
    ) -> None:
        self._folder = folder
        self._name = name
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
        """Compile and run it; as MLX does, with inputs in one piece."""
        assert grid[2] == 1
        assert threadgroup[1:] == (1, 1)
        assert threadgroup[0] % _WARP == 0
        self.launches += 1
        arrays = [np.array(array, order="C") for array in inputs]
        assert set(output_dtypes) == {mx.float32}
        outputs = [np.full(shape, np.nan, np.float32) for shape in output_shapes]
        library = self._compiled([_TYPES[a.dtype] for a in inputs], template)
        shapes = ctypes.c_int * 8
        arguments: list[Any] = []
        for name, array in zip(self._inputs, arrays, strict=True):
            arguments.append(ctypes.c_void_p(array.ctypes.data))
            if f"{name}_shape" in self._source:
                arguments.append(shapes(*array.shape))
        arguments += [ctypes.c_void_p(array.ctypes.data) for array in outputs]
        blocks = -(-grid[0] // threadgroup[0])
        library.run(blocks, grid[1], threadgroup[0], *arguments)
        return [mx.array(array) for array in outputs]

    def _compiled(self, types: list[str], template: list[tuple[str, Any]]) -> ctypes.CDLL:
        parameters, signature, arguments = [], [], []
        for name, kind in zip(self._inputs, types, strict=True):
            parameters.append(f"const {kind}* {name}")
            signature.append(f"const {kind}* {name}")
            arguments.append(name)
            if f"{name}_shape" in self._source:
                parameters.append(f"const Shape& {name}_shape")
                signature.append(f"const Shape* {name}_shape")
                arguments.append(f"*{name}_shape")
        for name in self._outputs:
            parameters.append(f"float* {name}")
            signature.append(f"float* {name}")
            arguments.append(name)
        code = _CODE.format(
            warp=_WARP,
            parameters=", ".join(parameters),
            constants="\n".join(_constant(*each) for each in template),
            source=self._source,
            signature=", ".join(signature),
            arguments=", ".join(arguments),
        )
        file = self._folder / f"{self._name}{abs(hash(code))}.cpp"
        library = file.with_suffix(".so")
        if not library.exists():
            file.write_text(code)
            options = ["-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", "-Wno-unknown-pragmas"]
            subprocess.run(["g++", *options, str(file), "-o", str(library)], check=True)
        return ctypes.CDLL(str(library))


@contextmanager
def emulated(folder: Path) -> Iterator[list[EmulatedKernel]]:
    """Have CUDA kernels run on the CPU; gives those that are made.

    Args:
        folder: for what is compiled.
    """
    if shutil.which("g++") is None:
        pytest.skip("there is no C++ compiler")
    made: list[EmulatedKernel] = []

    def make(**arguments: Any) -> EmulatedKernel:
        made.append(EmulatedKernel(folder, **arguments))
        return made[-1]

    gated_delta.kernel.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mx.fast, "cuda_kernel", make, raising=False)
        yield made
    gated_delta.kernel.cache_clear()


def _constant(name: str, value: Any) -> str:
    """Say a template argument as MLX does."""
    if isinstance(value, mx.Dtype):
        return f"  using {name} = {_TYPES[value]};"
    kind = "bool" if isinstance(value, bool) else "int"
    return f"  constexpr {kind} {name} = {str(value).lower()};"
