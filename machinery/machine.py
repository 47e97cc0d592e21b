"""The machine under train.py: allocator, dtypes, compiler, what a device can do and how much it
holds."""

import contextlib
import ctypes
import sys

import torch

try:
    import resource
except ImportError:  # Windows
    resource = None

# Dense BF16 FLOP/s by what CUDA calls the device: forms of one name differ by a quarter and more.
# From the data sheets.
DENSE_BF16_FLOPS = {
    "NVIDIA H200": 989e12, "NVIDIA H200 NVL": 836e12, "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 PCIe": 756e12, "NVIDIA H100 NVL": 835e12, "NVIDIA GH200 480GB": 989e12,
    "NVIDIA A100-SXM4-40GB": 312e12, "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12, "NVIDIA A100 80GB PCIe": 312e12, "NVIDIA L40S": 362e12,
    "NVIDIA GeForce RTX 4090": 165e12}
# From glibc's malloc.h: M_MMAP_MAX, M_TRIM_THRESHOLD, M_TOP_PAD, and the values to give them.
MALLOPT = ((-4, 0), (-1, 2**31 - 1), (-2, 256 << 20))


def tune_allocator():
    """Keep freed activations in the process (glibc only): by default each large tensor is mapped
    and unmapped anew, and a CPU step spends a quarter of its time in page faults."""
    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        for option, value in MALLOPT:
            mallopt(option, value)


def pick_dtype(device):
    """Return the autocast dtype that is fast here: bfloat16 on CUDA and on CPUs with BF16
    instructions, else float32."""
    if device.startswith("cuda"):
        return "bfloat16"
    if device != "cpu":  # Apple's GPUs: unverified
        return "float32"
    capabilities = torch.cpu.get_capabilities()
    fast = capabilities.get("avx512_bf16") or capabilities.get("amx_bf16")
    return "bfloat16" if fast else "float32"


def autocast_of(dtype, device):
    """Return autocast's context for a run's --dtype. Without its cache the BF16 copies of the
    weights, each used once, go as soon as they have been used."""
    return torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16",
                          cache_enabled=False)


def compile_model(model):
    """Compile the blocks, one program for all, the last norm and the loss. In place: names stay
    plain, and gradients come block by block."""
    for block in model.model.layers:
        block.compile()
    model.model.norm.compile()
    model.loss = torch.compile(model.loss)


def peak_flops(device):
    """Return a device's dense BF16 FLOP/s, or None where it is not known."""
    if device.type != "cuda":
        return None
    return DENSE_BF16_FLOPS.get(torch.cuda.get_device_name(device))


def peak_memory_gb(device):
    """Return the most memory this process has held, in GB: allocated on a GPU, else resident. None
    where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    if resource is None:
        return None
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux kilobytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9
