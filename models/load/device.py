"""What differs by device, in one record that is chosen when a model is loaded."""

from dataclasses import dataclass, replace

from ..runtime import backend


@dataclass(frozen=True)
class DevicePolicy:
    """How a model is run on a kind of device.

    It is handed down as a value, so that tests can run on a CPU what a GPU runs.

    Attributes:
        fp32: weights become fp32: the device has no other fast type.
        fused: attention is MLX's kernels. Without it scores in fp32 are computed block by
            block, and waited for.
        host_gates: numbers of a layer's gates in fp32 from which SiLU's exponentials are NumPy's,
            where attention is not fused. MLX's are slow on x86, but fewer take less time than to
            wait for the gates.
        plans_attention: these kernels are planned for each shape, which takes the host a tenth of a
            second; see `attention/planned.py`.
        compiles: small functions are compiled into one kernel.
        overlaps: the device computes while the host goes on, so that a step is launched before
            the last one's tokens are read.
        warms_up: kernels are compiled or loaded when they are first met, which must be before
            the first request.
        host_reads: the host can read arrays where the device wrote them.
        recurrence_kernel: the gated delta rule is a kernel of ours; mlx-lm has one for Metal alone.
        convolution_kernel: so are short convolutions before it: MLX has cuDNN plan each number of
            rows and tokens, which takes the host a fifth of a second.
        attention_kernels: what follows the products of attention is kernels of ours: launches are
            what a step of a batch takes.
        length_multiple: of tokens for which products are fast; see `kv/alignment.py`.
        launches_layers: prompts and decode steps are launched layer by layer. MLX makes CUDA graphs
            of so many operations, a hundred on Hopper, and it takes 2 to 10 ms to make one that was
            not met yet: so cut, all layers of a kind are one graph.
        prefill_chunk: prompt tokens that are best computed at once.
        max_stall_ms: for how long a call of prompts may keep streams waiting, if the user does not
            say.
        most_freed: bytes of freed buffers that are kept for the next arrays at most. Other programs
            use the memory of a Mac; a card's is free for them. MLX keeps a
            buffer for arrays of nearly its size; a CPU's calls have ever other sizes, and the C
            library gives what is freed to any: so nothing is kept there.
        row_limit: tokens of its own after which a row of a batch is packed; it starts with half
            as many at most.
        row_multiple: of rows for which products are the fastest.
    """

    fp32: bool
    fused: bool
    host_gates: int
    plans_attention: bool
    compiles: bool
    overlaps: bool
    warms_up: bool
    host_reads: bool
    recurrence_kernel: bool
    convolution_kernel: bool
    attention_kernels: bool
    length_multiple: int
    launches_layers: bool
    prefill_chunk: int
    max_stall_ms: float
    most_freed: int
    row_limit: int
    row_multiple: int


# MLX's exponential is slow on x86, and products take all the time: OpenBLAS multiplies 8 rows in
# less time than 6, and 16 in less than 12. To compile is to start a C++ compiler. Beside
# streams 28 tokens of SmolLM2 took 180 ms on two cores, and three such prompts in one call 290.
CPU = DevicePolicy(
    fp32=True,
    fused=False,
    host_gates=4096,
    plans_attention=False,
    compiles=False,
    overlaps=False,
    warms_up=False,
    host_reads=True,
    recurrence_kernel=False,
    convolution_kernel=False,
    attention_kernels=False,
    length_multiple=1,
    launches_layers=False,
    prefill_chunk=512,
    max_stall_ms=400.0,
    most_freed=0,
    row_limit=2048,
    row_multiple=8,
)
# Launches take the time: they take most of a chunk of 512 tokens, too.
GPU = DevicePolicy(
    fp32=False,
    fused=True,
    host_gates=0,
    plans_attention=False,
    compiles=True,
    overlaps=True,
    warms_up=True,
    host_reads=True,
    recurrence_kernel=False,
    convolution_kernel=False,
    attention_kernels=False,
    length_multiple=1,
    launches_layers=False,
    prefill_chunk=2048,
    max_stall_ms=200.0,
    most_freed=1 << 30,
    row_limit=2048,
    row_multiple=1,
)
# What the host reads is moved to the host's memory, for good.
CUDA = replace(
    GPU,
    plans_attention=True,
    host_reads=False,
    recurrence_kernel=True,
    convolution_kernel=True,
    attention_kernels=True,
    length_multiple=8,
    launches_layers=True,
    most_freed=8 << 30,
)


def device_policy() -> DevicePolicy:
    """The policy of this process's default device."""
    return {"cpu": CPU, "metal": GPU, "cuda": CUDA}[backend()]
