"""train.py's flags, their parsing and their checks."""

import argparse

import torch

from machinery.machine import pick_dtype
from model import INPUTS, ModelConfig


def count(text):
    """Parse a whole number, also as 3e6."""
    if not (value := float(text)).is_integer():  # as inf and nan are not
        raise ValueError
    return int(value)


def boolean(text):
    """Parse true, false, 1 or 0."""
    if text.lower() not in ("true", "1", "false", "0"):
        raise ValueError
    return text.lower() in ("true", "1")


# Each flag: its type or choices, its default (None: the preset's, or as the text says), what it is.
FLAGS = {
    "run": dict(
        preset=(("smoke", "paper", "predecessor", "predecessor-smoke"), None, "sizes and recipe; paper where CUDA is present, else smoke"),
        input=(INPUTS, "binary", "the input interface"),
        seed=(int, 1, "of the weights and of the windows"),
        data=(str, None, "prepared data directory"),
        out=(str, None, "run directory; out/PRESET-INPUT-sSEED"),
        sweep=(list, [], 'run every combination of "NAME=VALUE,VALUE;NAME=...", each in a directory of its own below --out (out/sweep); '
                         "several --sweep for several grids"),
        resume=(bool, False, "continue the run in --out from its newest intact checkpoint"),
        dry_run=(bool, False, "print parameters, memory, FLOPs and time, and stop"),
        targets_per_second=(float, 0.0, "dry_run: the rate; 0 for the one in --out's log, else 40 %% of an H200's peak")),
    "model": dict(
        vocab_size=(int, None, "V"),
        block_size=(int, None, "T, context length"),
        n_layer=(int, None, "blocks"),
        n_head=(int, None, "attention heads"),
        n_embd=(int, None, "C, width"),
        n_ffn=(int, None, "inner width of the feed-forward network"),
        ffn=(("swiglu", "gelu"), ModelConfig.ffn, "its kind; gelu in the predecessor"),
        code_seed=(int, ModelConfig.code_seed, "gf2: which matrix A; random: which codes"),
        code_offset=(str, ModelConfig.code_offset, "gf2: b as 0, random or hexadecimal"),
        code_values=(str, ModelConfig.code_values, "binary, gf2: bits as 01, or pm1 for -1 and 1"),
        code_scale=(str, ModelConfig.code_scale, "fixed codes: a factor, or matched for a learned row's norm at the start"),
        lift=(str, ModelConfig.lift, "how K numbers fill the width: tile or interleave"),
        table_free=(bool, ModelConfig.table_free, "binary, gf2: compute the codes from the ids, keep no codebook")),
    "recipe": dict(
        tokens_per_step=(count, None, "targets of one update"),
        max_targets=(count, None, "stop at the update that reaches these"),
        max_lr=(float, None, "peak learning rate"),
        min_lr=(float, None, "learning rate after the decay"),
        warmup_steps=(int, None, "updates of linear warm-up"),
        decay_steps=(int, None, "update at which the cosine ends; 0 for the last one"),
        streams=(int, 2, "data streams, two in the paper"),
        windows_per_visit=(int, 8192, "windows a stream draws of a shard, 8192 in the paper"),
        dtype=(("bfloat16", "float32"), None, "autocast, parameters are float32; bfloat16 where it is fast")),
    "machine": dict(
        device=(str, "cuda" if torch.cuda.is_available() else "cpu", "cpu, cuda or cuda:N"),
        micro_batch=(int, None, "windows a forward pass, at most; trades memory only"),
        parallel=(("ddp", "fsdp"), "ddp", "under torchrun: each process holds a copy of the model, or a share of it"),
        checkpoint_activations=(("none", "block", "selective"), None, "recompute in the backward pass nothing, whole blocks, or "
                                "what is cheap in them"),
        compile=(bool, False, "torch.compile the blocks and the loss"),
        timeout=(int, 600, "seconds after which a lost process ends the others")),
    "reports": dict(
        log_every=(int, None, "updates between log lines"),
        eval_every=(int, None, "updates between evaluations"),
        eval_windows=(int, None, "fixed validation windows"),
        save_every=(int, None, "updates between checkpoints"),
        keep=(int, 2, "newest checkpoints kept"),
        keep_every=(int, 0, "also keep the checkpoints at multiples of this; 0 for none"),
        profile=(bool, False, "write trace.json, the third to fifth update of this launch, for chrome://tracing"),
        tensorboard=(bool, False, "write TensorBoard's event files too (needs the package tensorboard)")),
}


def parse_args(presets, description, argv=None):
    """Return the whole configuration: flags over the preset over FLAGS' defaults."""
    parser = argparse.ArgumentParser(description=description, usage=argparse.SUPPRESS, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter, argument_default=argparse.SUPPRESS)
    for title, flags in FLAGS.items():
        group = parser.add_argument_group(title)
        for name, (kind, default, text) in flags.items():
            how = (dict(type=boolean, nargs="?", const=True) if kind is bool else dict(action="append") if kind is list
                   else dict(choices=kind) if isinstance(kind, tuple) else dict(type=kind))
            stated = default if default is not None else "the preset's" if name in presets["paper"] else None
            shown = text if stated in (None, []) else f"{text} (default: {stated})"
            group.add_argument(f"--{name}", help=shown, **how)
    given = vars(parser.parse_args(argv))
    cuda = torch.cuda.is_available()
    reason = "--preset" if "preset" in given else "CUDA is present" if cuda else "there is no CUDA device"
    preset = given.setdefault("preset", "paper" if cuda else "smoke")
    values = {name: default for flags in FLAGS.values() for name, (_, default, _) in flags.items()} | presets[preset] | given
    args = argparse.Namespace(**values, preset_reason=reason)
    args.out = args.out or ("out/sweep" if args.sweep else f"out/{preset}-{args.input}-s{args.seed}")
    args.dtype = args.dtype or pick_dtype(args.device)
    try:
        check_args(args)
    except ValueError as error:
        parser.error(str(error))
    return args


def check_args(args):
    """Raise ValueError for values that cannot go together; set what follows from the others (steps, decay_steps)."""
    model_config(args)
    for name in ("tokens_per_step", "micro_batch", "max_targets", "streams", "windows_per_visit", "log_every", "eval_every",
                 "eval_windows", "save_every", "keep", "timeout"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name}={getattr(args, name)}: expected 1 or more")
    for name in ("seed", "warmup_steps", "decay_steps", "keep_every", "targets_per_second"):
        if getattr(args, name) < 0:
            raise ValueError(f"--{name}={getattr(args, name)}: expected 0 or more")
    if not 0 <= args.min_lr <= args.max_lr:
        raise ValueError(f"--min_lr={args.min_lr}, --max_lr={args.max_lr}: expected 0 <= min_lr <= max_lr")
    args.steps = -(-args.max_targets // args.tokens_per_step)
    args.decay_steps = args.decay_steps or max(args.steps, args.warmup_steps)
    if args.warmup_steps > args.decay_steps:
        raise ValueError(f"--warmup_steps={args.warmup_steps}: expected at most decay_steps={args.decay_steps}")
    if args.tokens_per_step % (args.block_size * args.streams):
        raise ValueError(f"--tokens_per_step={args.tokens_per_step}: expected a multiple of block_size x streams = "
                         f"{args.block_size * args.streams}")
    device_type = args.device.split(":")[0]
    if device_type not in ("cpu", "cuda") or (device_type == "cuda" and not torch.cuda.is_available()):
        raise ValueError(f"--device={args.device}: expected cpu" + (" or cuda[:N]" if torch.cuda.is_available() else
                                                                     " (there is no CUDA device here)"))


def model_config(args):
    """Return the ModelConfig among the arguments. Raises ValueError for sizes that cannot be."""
    return ModelConfig(args.input, **{name: getattr(args, name) for name in FLAGS["model"]})


def split_update(args, world_size):
    """Cut args.micro_batch to a process's share of an update; return how many micro-batches a process accumulates.

    Raises ValueError if an update's windows do not divide.
    """
    windows = args.tokens_per_step // args.block_size
    args.micro_batch = min(args.micro_batch, max(windows // world_size, 1))
    accumulation, rest = divmod(windows, world_size * args.micro_batch)
    if rest:
        raise ValueError(f"{windows} windows an update do not divide by {world_size} processes x micro_batch {args.micro_batch}; "
                         "change --micro_batch or --tokens_per_step")
    return accumulation
