"""A run's directory: its lock and log, what it records, and what may change on resume.

Used by train.py, evaluate.py and compare.py. Free of torch.
"""

import errno
import hashlib
import json
import math
import os
from pathlib import Path

from machinery.files import only_process_in, sha256_of, write_whole

# What may change when a run is resumed: where and how it runs, what it reports, when it stops. All
# else is the experiment.
FREE_ON_RESUME = {
    "device", "micro_batch", "parallel", "checkpoint_activations", "compile", "timeout",
    "log_every", "eval_every", "eval_windows", "save_every", "keep", "keep_every", "profile",
    "tensorboard", "trackio", "wandb", "preset", "data", "out", "max_targets", "resume", "dry_run",
    "targets_per_second", "init_from"}
# Fields that the earliest runs do not record, and what they were trained with.
ADDED = {"code_width": 0, "input_std": 0.02, "base": 16, "rank": 16, "inner_width": 128,
         "hashes": 2, "buckets": 1024, "positions": 32, "norm_eps": 1e-5, "rope_theta": 10_000.0,
         "init_from": None, "init_from_sha256": None}
NOT_RECORDED = {"steps", "accumulation", "preset_reason", "sweep"}  # follow from the others


def list_checkpoints(run):
    """Return the checkpoint files of a run directory, the newest first."""
    return sorted(Path(run).glob("step-*.pt"), reverse=True)


def run_directory(path):
    """Return the run directory that is meant by it or by one of its files."""
    return Path(path) if Path(path).is_dir() else Path(path).parent


def experiment_of(args):
    """Return the arguments that config.json and the checkpoints record."""
    return {key: value for key, value in vars(args).items() if key not in NOT_RECORDED}


def data_fingerprint(meta):
    """Return the sha256 of what a run learns from: the tokenizer and every shard's contents."""
    shards = [[entry["train"], entry["val"]] for entry in meta["shards"]]
    facts = json.dumps([meta["tokenizer"]["sha256"], shards], sort_keys=True)
    return hashlib.sha256(facts.encode()).hexdigest()


def code_fingerprint():
    """Return the sha256 of the code that trains: what all processes of a run have to share."""
    root = Path(__file__).parents[1]
    return sha256_of(*sorted([*root.glob("*.py"), *root.glob("machinery/*.py")]))


def check_resumable(there, here):
    """Raise ValueError, listing the fields, if a run's configuration is another experiment."""
    there = ADDED | there
    differing = [f"{key} {there.get(key)} -> {here[key]}" for key in here
                 if key not in FREE_ON_RESUME and there.get(key) != here[key]]
    if differing:
        raise ValueError(f"--resume with another configuration ({', '.join(differing)}); "
                         "give the first run's flags, or another --out")


def claim_run(out):
    """Return out/log.jsonl, open for appending. No other run writes to the directory while this
    file object lives.

    Raises HeldError if another process is at it.
    """
    Path(out).mkdir(parents=True, exist_ok=True)
    claim = only_process_in(out, "run")
    claim.__enter__()
    log = open(Path(out) / "log.jsonl", "ab", buffering=0)
    log.claim = claim  # ends with it
    return log


def record_run(args, experiment, log, step):
    """Write config.json, and a copy of the tokenizer, into a run's directory; cut its open log."""
    out, tokenizer = Path(args.out), Path(args.data) / "tokenizer.json"
    write_whole(out / "config.json", json.dumps(experiment, indent=1).encode())
    write_whole(out / "tokenizer.json", tokenizer.read_bytes())
    cut_log(log, step)


def read_log(out):
    """Return the whole rows of a run's log; none where there is no log."""
    path = Path(out) / "log.jsonl"
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [row for row in map(read_row, lines) if row]


def read_row(line):
    """Return a line of a log as a dict; None for what a crash has left of one."""
    try:
        row = json.loads(line) if line.endswith(b"}\n") else None
    except ValueError:
        return None
    return row if isinstance(row, dict) and "step" in row else None


def cut_log(log, step):
    """Drop the open log's rows after `step` updates, and a row cut short, so that a resumed run
    logs each step once."""
    end = 0
    for line in Path(log.name).read_bytes().splitlines(keepends=True):
        row = read_row(line) or {"step": math.inf}
        # An evaluation at `step` comes after the checkpoint and is done again.
        if row["step"] > step or (row["step"] == step and "loss" not in row):
            break
        end += len(line)
    log.truncate(end)


def write_row(log, row):
    """Append a row to the open log. Raises OSError, without leaving half a row, where that fails.
    """
    line = json.dumps(row).encode() + b"\n"
    end = os.fstat(log.fileno()).st_size
    try:
        if log.write(line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), log.name)
    except OSError:
        log.truncate(end)
        raise
