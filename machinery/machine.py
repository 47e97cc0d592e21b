"""The machine under train.py: allocator, device facts, processes, signals and exit codes."""

import contextlib
import ctypes
import datetime
import os
import resource
import signal
import sys
import traceback

import torch
import torch.distributed as dist

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


def launched_processes():
    """Return how many processes torchrun has started; 1 without it. A stray RANK or WORLD_SIZE in
    the environment is not torchrun."""
    return int(os.environ["WORLD_SIZE"]) if dist.is_torchelastic_launched() else 1


def speaker():
    """Return print in the first process, and in the others what takes the same and is silent."""
    if dist.is_torchelastic_launched() and os.environ["RANK"] != "0":
        return lambda *_, **__: None
    return print


def start_processes(args):
    """Return (rank, world_size, device) and join the process group: nccl on GPUs, gloo on CPUs,
    none without torchrun."""
    distributed = dist.is_torchelastic_launched()
    device = torch.device(args.device)
    if device.type == "cuda":
        index = int(os.environ["LOCAL_RANK"]) if distributed else device.index or 0
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("highest")  # what is not BF16 is FP32, never TF32
    else:
        tune_allocator()
    if not distributed:
        return 0, 1, device
    # gloo beside nccl: the processes agree on a stop without waiting for the GPUs. A lost one ends
    # the others at the time-out.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=args.timeout))
    return dist.get_rank(), dist.get_world_size(), device


def all_reduce_max(value):
    """Return the greatest of all processes' whole numbers or truths; all take part, and each waits
    for the last."""
    if not dist.is_initialized():
        return int(value)
    value = torch.tensor(int(value))
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return value.item()


def catch_signals():
    """Return a list that receives the names of the signals that ask for an orderly stop."""
    received = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, lambda number, _: received.append(signal.Signals(number).name))
    return received


def exit_with(main):
    """Run train.py's main and leave with its exit code: a user's mistake is one line of the first
    process, ours a traceback."""
    code = 1
    try:
        code = main()
    except (ValueError, OSError, FloatingPointError) as error:
        if not dist.is_torchelastic_launched() or os.environ["LOCAL_RANK"] == "0":
            print(f"train.py: {error}", file=sys.stderr)
    except Exception:  # our own mistake, or another process is gone
        traceback.print_exc()
    sys.stdout.flush()
    if dist.is_initialized():
        os._exit(code)  # freeing a group can wait for its own thread for ever (seen: gloo, DDP)
    sys.exit(code)
