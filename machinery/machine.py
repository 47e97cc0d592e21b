"""The machine under train.py: allocator, dtypes, what a device can do and how much it holds."""

import contextlib
import ctypes
import resource

import torch

# Dense BF16 FLOP/s, from the data sheets.
DENSE_BF16_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12,
                    "RTX 4090": 165e12}
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
    capabilities = torch.cpu.get_capabilities()
    fast = capabilities.get("avx512_bf16") or capabilities.get("amx_bf16")
    return "bfloat16" if fast else "float32"


def peak_flops(device):
    """Return a device's dense BF16 FLOP/s, or None where it is not known."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    for part, flops in DENSE_BF16_FLOPS.items():
        if part in name:
            return flops
    return None


def peak_memory_gb(device):
    """Return the most memory this process has held, in GB: allocated on a GPU, resident on a CPU.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
