"""The processes of a training run: start, agreement, signs of life, exit codes. For train.py."""

import concurrent.futures
import datetime
import os
import sys
import traceback

import torch
import torch.distributed as dist

from machinery.errors import (
    INSTALL,
    ElsewhereError,
    explain,
    first_line,
    is_lost_process,
    is_out_of_memory,
    replace_in_console,
    say_at_once,
    warn,
)
from machinery.files import HELD, HeldError
from machinery.machine import tune_allocator

WORKING, DONE, FAILED = 0, 1, 2
SWEEPS = "starts processes itself: leave torchrun out, or start each run under torchrun"
MAY_DIFFER = {"data", "out", "timeout"}  # from process to process: places and patience


def launched_processes():
    """Return how many processes torchrun has started; 1 without it. A stray RANK or WORLD_SIZE in
    the environment is not torchrun."""
    return int(os.environ["WORLD_SIZE"]) if dist.is_torchelastic_launched() else 1


def process_number():
    return int(os.environ["RANK"]) if dist.is_torchelastic_launched() else 0


def say_nothing(*_):
    """Take the place of say in all processes but the first."""


def speaker():
    """Return what prints a line in the first process, and nothing in the others."""
    return say_nothing if process_number() else say_at_once


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


def in_all(work):
    """Return work() if it went well in every process; where it did not, all stop.

    Raises ValueError in the first process, with each different message once; ElsewhereError in the
    others.
    """
    if not dist.is_initialized():
        return work()
    result, message = None, None
    try:
        result = work()
    except (ValueError, OSError, MemoryError) as error:
        message = explain(error)
    messages = [None] * dist.get_world_size()
    dist.all_gather_object(messages, message)
    failed = {text: rank for rank, text in reversed(list(enumerate(messages))) if text}
    if not failed:
        return result
    if dist.get_rank():
        raise ElsewhereError
    raise ValueError("; ".join(f"process {rank}: {text}" if rank else text
                               for text, rank in sorted(failed.items(), key=lambda item: item[1])))


def in_first(work, otherwise):
    """Do work() in the first process, however long it takes; return its result, `otherwise` in the
    other processes.

    The processes exchange a sign of life each second, so that a slow disk does not look like a lost
    process, whose time-out ends a run. Raises what work raises, and ElsewhereError in the others.
    """
    if not dist.is_initialized():
        return work()
    if dist.get_rank():
        state = WORKING
        while state == WORKING:
            state = all_reduce_max(WORKING)
        if state == FAILED:
            raise ElsewhereError
        return otherwise
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        future, state = pool.submit(work), WORKING
        while state == WORKING:
            concurrent.futures.wait([future], timeout=1)
            if future.done():
                state = FAILED if future.exception() else DONE
            all_reduce_max(state)
    return future.result()


def check_same_everywhere(facts):
    """Stop all processes, as in_all does, with the fields of a dict in which they differ."""
    if not dist.is_initialized():
        return
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, facts)
    differing = []
    for name in facts:
        found = [str(other.get(name)) for other in everywhere]
        if name not in MAY_DIFFER and len(set(found)) > 1:
            differing.append(f"{name}: " + ", ".join(
                f"{value} in {found.count(value)}" for value in sorted(set(found))))

    def refuse():
        if differing:
            raise ValueError(f"the {len(everywhere)} processes differ in {'; '.join(differing)}; "
                             "start them all with the same flags, data and code")

    in_all(refuse)


def refuse_under_torchrun(what, why=SWEEPS):
    """Stop if there are processes of torchrun: each would do the work of all."""
    if dist.is_torchelastic_launched():
        if process_number():
            raise ElsewhereError
        raise ValueError(f"{what} {why}")


def reason(error):
    """Return an exception as one line, if it can be foreseen; None for a mistake of ours."""
    if isinstance(error, RuntimeError) and is_out_of_memory(error):
        return (f"not enough memory ({first_line(error)}); a smaller --micro_batch, "
                "--checkpoint_activations=block or --parallel=fsdp needs less")
    if is_lost_process(error):
        return (f"another process is lost or stuck ({first_line(error)}); --resume continues from "
                "the last checkpoint")
    if type(error).__module__.startswith(("torch._inductor", "torch._dynamo")):
        return (f"--compile does not work here ({first_line(error)}); leave it out, or install a "
                "C++ compiler")
    if isinstance(error, ImportError):
        return f"{first_line(error)}; {INSTALL}"
    if isinstance(error, (ValueError, OSError, MemoryError)):
        return explain(error)
    return None


def exit_with(main):
    """Run train.py's main and leave with its exit code: a user's mistake is one line, ours a
    traceback."""
    code = 1
    replace_in_console()
    try:
        code = main()
    except ElsewhereError:
        pass
    except HeldError as error:
        code = HELD
        warn(f"train.py: {error}")
    except FloatingPointError as error:  # the same in all processes
        if process_number() == 0:
            warn(f"train.py: {error}")
    except KeyboardInterrupt:
        code = 130  # as a shell says it: 128 + SIGINT
        warn("train.py: interrupted; --resume continues from the last checkpoint")
    except Exception as error:
        line = reason(error)
        if line is None:
            traceback.print_exc()
        else:
            where = f"process {process_number()}: " if process_number() else ""
            warn(f"train.py: {where}{line}")
    if dist.is_initialized():
        os._exit(code)  # freeing a group can wait for its own thread for ever (seen: gloo, DDP)
    sys.exit(code)
