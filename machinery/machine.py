"""The machine: allocator, device facts, process group, signals, profiler, TensorBoard."""

import contextlib
import ctypes
import datetime
import os
import resource
import signal
from pathlib import Path

import torch
import torch.distributed as dist

DENSE_BF16_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "RTX 4090": 165e12}  # data sheets


def tune_allocator():
    """Keep freed activations in the process (glibc only): by default each large tensor is mapped and unmapped anew, and a
    CPU step spends a quarter of its time in page faults."""
    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        for option, value in ((-4, 0), (-1, 2**31 - 1), (-2, 256 << 20)):  # M_MMAP_MAX, M_TRIM_THRESHOLD, M_TOP_PAD
            mallopt(option, value)


def pick_dtype(device):
    """Return the autocast dtype that is fast here: bfloat16 on CUDA and on CPUs with BF16 instructions, else float32."""
    if device.startswith("cuda"):
        return "bfloat16"
    capabilities = torch.cpu.get_capabilities()
    return "bfloat16" if capabilities.get("avx512_bf16") or capabilities.get("amx_bf16") else "float32"


def peak_flops(device):
    """Return a device's dense BF16 FLOP/s, or None where it is not known."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((flops for part, flops in DENSE_BF16_FLOPS.items() if part in name), None)


def peak_memory_gb(device):
    """Return the most memory this process has held, in GB: allocated on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def start_processes(args):
    """Return (rank, world_size, device) and join the process group: nccl on GPUs, gloo on CPUs, none without torchrun."""
    distributed = dist.is_torchelastic_launched()  # a stray RANK in the environment is not torchrun
    device = torch.device(args.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if distributed else device
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("highest")  # what is not BF16 is FP32, never TF32
    else:
        tune_allocator()
    if not distributed:
        return 0, 1, device
    # gloo beside nccl: the processes agree on a stop without waiting for the GPUs. A lost one ends the others at the time-out.
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
                            timeout=datetime.timedelta(seconds=args.timeout))
    return dist.get_rank(), dist.get_world_size(), device


def all_reduce_max(value):
    """Return the greatest of all processes' whole numbers or truths; all take part, and each waits for the last."""
    value = torch.tensor(int(value))
    if dist.is_initialized():
        dist.all_reduce(value, dist.ReduceOp.MAX)
    return value.item()


def catch_signals():
    """Return a list that receives the names of the signals that ask for an orderly stop."""
    received = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, lambda number, frame: received.append(signal.Signals(number).name))
    return received


def start_profiler(out):
    """Return a profiler that is to be told of each update; it writes the third to fifth as out/trace.json."""
    profiler = torch.profiler.profile(schedule=torch.profiler.schedule(skip_first=1, wait=0, warmup=1, active=3, repeat=1),
                                      on_trace_ready=lambda done: done.export_chrome_trace(str(Path(out) / "trace.json")))
    profiler.start()
    return profiler


def open_tensorboard(out):
    """Return a SummaryWriter. Raises ValueError if the package is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError("--tensorboard: the package is not installed; pip install tensorboard") from None
    return SummaryWriter(out)
