"""Checkpoint files: write, read, load a model, gather and scatter the state of many processes.

Used by train.py and evaluate.py.
"""

import contextlib
import errno
import hashlib
import os
import pickle
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict as full_state

from inputs import FixedCodes
from machinery.costs import count_parameters
from machinery.errors import explained, first_line, is_out_of_memory, warn
from machinery.files import sync
from machinery.processes import in_first
from machinery.runs import check_resumable, claim_run, list_checkpoints
from model import Decoder, ModelConfig

SHA256_MARK = b"sha256:"  # and the digest of all before it end a file; torch.load does not mind
DIGEST_SIZE = len(SHA256_MARK) + 32
FACTS = ("initial_body_sha256", "parameters", "code_report")


def hash_tensors(named):
    """Return the sha256, hexadecimal, of (name, tensor) pairs: the names and the tensors' bytes."""
    digest = hashlib.sha256()
    for name, tensor in named:
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def facts_of(model, state=None):
    """Return what config.json records of a fresh model: the sha256 of the body's weights, the same
    for every interface, the numbers of parameters and the code report. A run that goes on from a
    checkpoint's state has them there."""
    if state:
        return {name: state["config"].get(name) for name in FACTS}
    codes, roles = model.model.embed_tokens, model.roles()
    body = [(name, p) for name, p in model.named_parameters() if roles[name].group == "body"]
    report = codes.report() if isinstance(codes, FixedCodes) else None
    return dict(zip(FACTS, (hash_tensors(body), count_parameters(model), report)))


def read_checkpoint(path, facts_only=False):
    """Return a checkpoint file's dict of tensors (on the CPU) and plain values; it holds no code
    (weights_only).

    Args:
        facts_only: leave the tensors' contents, and the sha256 of all, unread.
    Raises ValueError if the file is cut, or if its contents do not have the sha256 at its end.
    Raises OSError where it cannot be read, which says nothing about what it holds: no permission,
    no memory, a disk or a file system that fails.
    """
    whole = None if facts_only else has_its_digest(path)
    if whole is False:
        raise ValueError(damaged(path, "its sha256 differs"))
    try:
        with warnings.catch_warnings(action="ignore"):  # of what else the file may be
            return torch.load(path, map_location="cpu", weights_only=True, mmap=facts_only)
    except MemoryError:
        raise OSError(f"{path}: cannot be read: not enough memory") from None
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        raise ValueError(damaged(path, "it is cut short")) from None  # a seek before its start
    except (RuntimeError, ValueError, EOFError, KeyError, pickle.UnpicklingError) as error:
        if whole or is_out_of_memory(error):
            raise OSError(f"{path}: cannot be read: {first_line(error)}") from None
        why = first_line(error)
        if "weights_only" in str(error):  # it goes on with how to run the code in a file
            why = "it holds more than tensors and plain values"
        raise ValueError(damaged(path, why)) from None


def damaged(path, why):
    return f"{path}: damaged checkpoint, or none of train.py's ({why}); use another of the run"


def check_is_ours(path, state, keys):
    """Raise ValueError unless what a file holds is a checkpoint with these keys."""
    there = state if isinstance(state, dict) else {}
    missing = [key for key in keys if key not in there]
    hint = ""
    if "model_config" in there:  # of evaluate.py import
        hint = f", or to start from its weights --init_from={path}"
    if missing:
        raise ValueError(f"{path}: not a checkpoint of a training run (it has no "
                         f"{', '.join(missing)}); expected a step-*.pt that train.py wrote{hint}")


def has_its_digest(path):
    """Return whether a file ends in the sha256 of all before it; None if it ends in none."""
    digest, left = hashlib.sha256(), os.path.getsize(path) - DIGEST_SIZE
    with open(path, "rb") as file:
        while left > 0:
            block = file.read(min(left, 1 << 20))
            if not block:
                break
            digest.update(block)
            left -= len(block)
        end = file.read()
    if not end.startswith(SHA256_MARK):
        return None
    digest.update(SHA256_MARK)
    return digest.digest() == end[len(SHA256_MARK):]


def checkpoint_file(path):
    """Return a checkpoint file's path: a run directory's newest one. Raises FileNotFoundError where
    there is none."""
    if not Path(path).is_dir():
        return Path(path)
    files = list_checkpoints(path)
    if not files:
        raise FileNotFoundError(f"{path}: no checkpoint (step-*.pt) in this directory; train one "
                                f"with train.py --out={path}")
    return files[0]


def file_sha256(path):
    """Return the sha256, hexadecimal, that a checkpoint ends in, or of an older one as a whole."""
    with open(path, "rb") as file:
        file.seek(max(os.path.getsize(path) - DIGEST_SIZE, 0))
        end = file.read()
        if end.startswith(SHA256_MARK):
            return end[len(SHA256_MARK):].hex()
        file.seek(0)
        return hashlib.file_digest(file, "sha256").hexdigest()


def load_model(path, device="cpu"):
    """Return (model, checkpoint dict without its weights) from a checkpoint file or a run
    directory's newest one.

    The stored codebook, A and b replace those of the seed. Raises FileNotFoundError where there is
    no checkpoint, ValueError for a file of something else, and where the weights do not fit the
    configuration, naming the missing and unexpected keys.
    """
    path = checkpoint_file(path)
    state = read_checkpoint(path)
    check_is_ours(path, state, ("step", "model", "model_config"))
    with explained(str(path), "expected a checkpoint of train.py"):
        model = Decoder(ModelConfig(**state["model_config"]))
    try:
        model.load_state_dict(state.pop("model"))
    except (RuntimeError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: {error}") from None
    return model.to(device).eval(), state


def open_run(args, experiment, say):
    """Return (open log, checkpoint to continue from; None for a new run) of the run in args.out,
    which is this process's from now on.

    Raises ValueError rather than mix two experiments or start over, and OSError for a checkpoint
    that cannot be read now. Until it returns nothing in the directory has changed.
    """
    out, log = Path(args.out), claim_run(args.out)
    files = list_checkpoints(out)
    if not args.resume:
        if files or (out / "log.jsonl").stat().st_size:
            raise ValueError(f"{out} already holds a run; --resume continues it, another --out "
                             "starts a new one")
        return log, None
    state = read_newest(files, say)
    if state is not None:
        check_resumable(state["config"], experiment)
        if state["step"] > args.steps:
            done = state["step"] * args.tokens_per_step
            raise ValueError(f"--max_targets={args.max_targets} is {args.steps:,} updates, but "
                             f"{out} has done {state['step']:,}; give --max_targets={done} or "
                             "more, or another --out")
    else:
        say(f"no checkpoint in {out}: starting from the first update")
    for unfinished in out.glob("step-*.tmp"):  # of a save that was killed
        unfinished.unlink()
    return log, state


def read_newest(files, say):
    """Return the first checkpoint that is whole, None if there are no files.

    Raises ValueError if all are damaged, or that one is not of a training run.
    """
    for path in files:
        try:
            state = read_checkpoint(path)
        except ValueError as error:
            say(f"skipped: {error}")
            continue
        check_is_ours(path, state, ("step", "model", "optimizer", "config"))
        return state
    if files:
        raise ValueError(f"{files[0].parent}: none of its {len(files)} checkpoints is whole; "
                         "give another --out to start anew")
    return None


def scatter_state(model, optimizer, state):
    """Load what gather_state returned, from the first process's copy: one process reads the file,
    the others pass None.

    Raises ValueError, naming them, for weights that are missing or that the model does not have.
    """
    state = state or {"model": {}, "optimizer": {}}
    weights, here = state["model"], model.state_dict()
    if weights:
        differing = sorted(weights.keys() ^ here.keys())
        if differing:
            raise ValueError(f"the checkpoint and the model differ in {', '.join(differing)}")
        # Earlier codebooks were int16, which cannot be broadcast.
        weights = {name: tensor.to(here[name].dtype) for name, tensor in weights.items()}
    options = full_state.StateDictOptions(full_state_dict=True,
                                          broadcast_from_rank0=dist.is_initialized())
    full_state.set_model_state_dict(model, weights, options=options)
    full_state.set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)


def gather_state(model, optimizer):
    """Return {"model", "optimizer"}: whole CPU tensors by the parameters' plain names in the first
    process, nothing in the others. All processes take part; the result is the same for ddp, fsdp
    and any number of processes."""
    options = full_state.StateDictOptions(full_state_dict=True, cpu_offload=True)
    return dict(model=full_state.get_model_state_dict(model, options=options),
                optimizer=full_state.get_optimizer_state_dict(model, optimizer, options=options))


def save_run(args, step, model, optimizer, facts):
    """Save a checkpoint with the facts {name: plain value}; return whether that failed: the last
    good one stays then, and training can go on. All processes take part."""
    state = gather_state(model, optimizer)

    def write():
        try:
            save_checkpoint(args.out, step, args.keep, args.keep_every, **state, **facts)
        except (OSError, RuntimeError) as error:
            last = (list_checkpoints(args.out) or ["none"])[0]
            warn(f"step {step}: checkpoint not saved: {error}; last good one: {last}")
            return True
        return False

    return in_first(write, otherwise=False)


def sync_directory(path):
    """Wait until the names in a directory are on the disk, where the system can tell."""
    with contextlib.suppress(OSError):  # Windows opens no directory, some file systems sync none
        directory = os.open(path, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def save_checkpoint(out, step, keep, keep_every=0, **state):
    """Write out/step-STEP.pt aside, fsync, rename; then delete older ones but the newest `keep` and
    multiples of keep_every.

    Raises OSError or RuntimeError (torch's writer) where that fails; nothing is deleted then but
    the unfinished file.
    """
    path = Path(out) / f"step-{step:08d}.pt"
    aside = path.with_suffix(".tmp")
    try:
        with open(aside, "w+b") as file:
            torch.save({"step": step, **state}, file)
            file.write(SHA256_MARK)
            file.seek(0)
            file.write(hashlib.file_digest(file, "sha256").digest())
            sync(file)
        aside.replace(path)
    except (OSError, RuntimeError):
        aside.unlink(missing_ok=True)
        raise
    sync_directory(out)  # the new name is on the disk before an old one goes
    # Newer ones are damaged: they must not crowd out a good one.
    done = [old for old in list_checkpoints(out) if old <= path]
    for old in done[keep:]:
        if not keep_every or int(old.stem[5:]) % keep_every:
            old.unlink()
