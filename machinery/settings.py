"""train.py's flags: what there is, how it is read, and what cannot go together."""

import argparse
import copy
import dataclasses
import math
from pathlib import Path

import torch

from codes import check_seed, draw_recoding
from inputs import INPUTS
from machinery.errors import explain
from machinery.files import sha256_of
from machinery.machine import pick_dtype
from machinery.options import device, place
from machinery.runs import run_directory
from machinery.shards import read_meta
from machinery.starting import start_settings
from model import ModelConfig


def integer(text):
    """Parse a whole number, also as 3e6."""
    value = float(text)
    if not value.is_integer():  # as inf and nan are not
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
        preset=(str, None,
                "sizes and recipe; paper where CUDA and its data are present, else smoke"),
        input=(INPUTS, "binary", "the input interface"),
        seed=(int, 1, "of the weights and of the windows"),
        data=(place, None, "prepared data directory"),
        out=(place, None, "run directory; out/PRESET-INPUT-sSEED"),
        init_from=(place, None, "start from the weights of this checkpoint, as a new run: body and "
                   "output are kept, the input too unless flags give another; sizes are its own"),
        sweep=(list, [], 'run every combination of "NAME=VALUE,VALUE;NAME=...", each in a '
               "directory of its own below --out (out/sweep); several --sweep for several grids"),
        resume=(bool, False, "continue the run in --out from its newest intact checkpoint"),
        dry_run=(bool, False, "print parameters, memory, FLOPs and time, and stop"),
        targets_per_second=(float, 0.0, "dry_run: the rate; 0 for the one in --out's log, else "
                            "40 %% of an H200's peak")),
    "model": dict(
        vocab_size=(int, None, "V"),
        block_size=(int, None, "T, context length"),
        n_layer=(int, None, "blocks"),
        n_head=(int, None, "attention heads"),
        n_embd=(int, None, "C, width"),
        n_ffn=(int, None, "inner width of the feed-forward network"),
        ffn=(("swiglu", "gelu"), ModelConfig.ffn, "its kind; gelu in the predecessor"),
        norm_eps=(float, ModelConfig.norm_eps, "added to the mean square in RMSNorm"),
        rope_theta=(float, ModelConfig.rope_theta, "base of the rotary angles"),
        code_seed=(int, ModelConfig.code_seed, "gf2: which matrix A; random: which codes"),
        code_offset=(str, ModelConfig.code_offset, "gf2: b as 0, random or hexadecimal"),
        code_values=(str, ModelConfig.code_values,
                     "binary, gf2: bits as 01, or pm1 for -1 and 1"),
        code_scale=(str, ModelConfig.code_scale, "fixed codes: a factor, or matched for a learned "
                    "row's norm at the start"),
        lift=(str, ModelConfig.lift, "how K numbers fill the width: tile or interleave"),
        table_free=(bool, ModelConfig.table_free,
                    "binary, gf2: compute the codes from the ids, keep no codebook"),
        code_width=(int, ModelConfig.code_width, "binary, random, sinusoid, lowdim, projected, "
                    "alone: numbers an id; 0 for ceil(log2 V)"),
        input_std=(float, ModelConfig.input_std,
                   "trained inputs: root mean square of their vectors at the start"),
        base=(int, ModelConfig.base, "digits: the base that ids are written in"),
        rank=(int, ModelConfig.rank, "factored: width of the narrow table"),
        inner_width=(int, ModelConfig.inner_width, "alone: width inside its network"),
        hashes=(int, ModelConfig.hashes, "hashed: rows that an id adds up"),
        buckets=(int, ModelConfig.buckets, "hashed: rows there are"),
        positions=(int, ModelConfig.positions, "spelling: bytes of a token that are told apart")),
    "recipe": dict(
        tokens_per_step=(integer, None, "targets of one update"),
        max_targets=(integer, None, "stop at the update that reaches these"),
        max_lr=(float, None, "peak learning rate"),
        min_lr=(float, None, "learning rate after the decay"),
        warmup_steps=(int, None, "updates of linear warm-up"),
        decay_steps=(int, None, "update at which the cosine ends; 0 for the last one"),
        streams=(int, 2, "data streams, two in the paper"),
        windows_per_visit=(int, 8192, "windows a stream draws of a shard, 8192 in the paper"),
        dtype=(("bfloat16", "float32"), None,
               "autocast, parameters are float32; bfloat16 where it is fast")),
    "machine": dict(
        device=(device, "auto", "cpu, cuda, cuda:N or mps; auto: the fastest kind there is"),
        micro_batch=(int, None, "windows a forward pass, at most; trades memory only"),
        parallel=(("ddp", "fsdp"), "ddp",
                  "under torchrun: each process holds a copy of the model, or a share of it"),
        checkpoint_activations=(("none", "block", "selective"), None, "recompute in the backward "
                                "pass nothing, whole blocks, or what is cheap in them"),
        compile=(bool, False, "torch.compile the blocks and the loss"),
        timeout=(int, 600, "seconds after which a lost process ends the others")),
    "reports": dict(
        log_every=(int, None, "updates between log lines"),
        eval_every=(int, None, "updates between evaluations"),
        eval_windows=(int, None, "fixed validation windows"),
        save_every=(int, None, "updates between checkpoints"),
        keep=(int, 2, "newest checkpoints kept"),
        keep_every=(int, 0, "also keep the checkpoints at multiples of this; 0 for none"),
        profile=(bool, False, "write trace.json, the third to fifth update of this launch, for "
                 "chrome://tracing"),
        tensorboard=(bool, False,
                     "write TensorBoard's event files too (needs the package tensorboard)"),
        trackio=(bool, False, "tell trackio too, on this machine (needs the package trackio)"),
        wandb=(bool, False, "tell Weights & Biases too (needs the package wandb)")),
}
AT_LEAST_1 = ("tokens_per_step", "micro_batch", "max_targets", "streams", "windows_per_visit",
              "log_every", "eval_every", "eval_windows", "save_every", "keep", "timeout")
AT_LEAST_0 = ("seed", "warmup_steps", "decay_steps", "keep_every", "targets_per_second")
FINITE = ("max_lr", "min_lr", "targets_per_second")
LARGEST_SEED, LONGEST_TIMEOUT = 2**64 - 1, 10**7  # 64 bits key the sampler; 116 days


def parse_args(presets, description, argv=None):
    """Return the whole configuration: flags over the preset over FLAGS' defaults.

    A wrong flag ends the process with one line and exit code 2.
    """
    parser = build_parser(presets, description)
    given = vars(parser.parse_args(argv))
    preset, reason = pick_preset(presets, given)
    values = {name: default for name, (_, default, _) in all_flags().items()}
    try:
        start = start_settings(given)
        values |= presets[preset] | start | given
        values |= {"preset": preset, "preset_reason": reason, "init_from": start["init_from"]}
        args = argparse.Namespace(**values)
        args.out = args.out or default_out(args)
        args.device = device(args.device)  # auto becomes what is there
        args.dtype = args.dtype or pick_dtype(args.device)
        check_args(args)
        return with_steps(args)
    except (ValueError, OSError) as error:
        parser.error(explain(error))


def default_out(args):
    """Return the run directory for a command without --out."""
    if args.sweep:
        return "out/sweep"
    name = f"out/{args.preset}-{args.input}-s{args.seed}"
    return f"{name}-from-{run_directory(args.init_from).name}" if args.init_from else name


def all_flags():
    """Return FLAGS without its groups."""
    flags = {}
    for group in FLAGS.values():
        flags |= group
    return flags


def build_parser(presets, description):
    """Return the argument parser; a flag that is not given has no value in what it returns."""
    parser = argparse.ArgumentParser(
        description=description, usage=argparse.SUPPRESS, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter, argument_default=argparse.SUPPRESS)
    for title, flags in FLAGS.items():
        group = parser.add_argument_group(title)
        for name, (kind, default, text) in flags.items():
            if default is None and name in presets["paper"]:
                default = "the preset's"
            if default not in (None, []):
                text = f"{text} (default: {default})"
            kind = tuple(presets) if name == "preset" else kind
            group.add_argument(f"--{name}", help=text, **how_to_parse(kind))
    return parser


def how_to_parse(kind):
    """Return add_argument's parameters for a flag's type or choices."""
    if kind is bool:
        return dict(type=boolean, nargs="?", const=True)
    if kind is list:
        return dict(action="append")
    if isinstance(kind, tuple):
        return dict(choices=kind)
    return dict(type=kind)


def pick_preset(presets, given):
    """Return (name of the preset, why this one) from the flags given.

    The paper's needs more than a GPU: without its data the first command would end in advice.
    """
    if "preset" in given:
        return given["preset"], "--preset"
    if not torch.cuda.is_available():
        return "smoke", "there is no CUDA device"
    data = given.get("data", presets["paper"]["data"])
    try:
        found = read_meta(data)["tokenizer"]["vocab_size"]
    except (ValueError, OSError):
        return "smoke", f"CUDA is present, but {data} is not: the paper's preset trains on it"
    if found != presets["paper"]["vocab_size"]:
        return "smoke", f"CUDA is present, but {data} is not of the paper's vocabulary"
    return "paper", f"CUDA and {data} are present"


def check_args(args):
    """Raise ValueError for values that cannot be, or cannot go together."""
    config = model_config(args)
    if args.input == "gf2":
        draw_recoding(config.n_bits, args.code_seed, args.code_offset)
    check_seed(args.code_seed)
    for name in FINITE:
        if not math.isfinite(getattr(args, name)):
            raise ValueError(f"--{name}={getattr(args, name)}: expected a finite number")
    for name, most in (("seed", LARGEST_SEED), ("timeout", LONGEST_TIMEOUT)):
        if getattr(args, name) > most:
            raise ValueError(f"--{name}={getattr(args, name)}: expected at most {most}")
    for least, names in ((1, AT_LEAST_1), (0, AT_LEAST_0)):
        for name in names:
            if getattr(args, name) < least:
                raise ValueError(f"--{name}={getattr(args, name)}: expected {least} or more")
    if not 0 <= args.min_lr <= args.max_lr:
        raise ValueError(f"--min_lr={args.min_lr}, --max_lr={args.max_lr}: "
                         "expected 0 <= min_lr <= max_lr")
    unit = args.block_size * args.streams
    if args.tokens_per_step % unit:
        raise ValueError(f"--tokens_per_step={args.tokens_per_step}: expected a multiple of "
                         f"block_size x streams = {unit}")


def with_steps(args):
    """Return args with steps, the number of updates, and with decay_steps where it was 0.

    Raises ValueError for a decay that ends before the warm-up.
    """
    args = copy.copy(args)
    args.steps = -(-args.max_targets // args.tokens_per_step)
    args.decay_steps = args.decay_steps or max(args.steps, args.warmup_steps)
    if args.warmup_steps > args.decay_steps:
        raise ValueError(f"--warmup_steps={args.warmup_steps}: "
                         f"expected at most decay_steps={args.decay_steps}")
    return args


def with_micro_batch(args, world_size):
    """Return args with micro_batch at most a process's share of an update, and accumulation: how
    many micro-batches make up that share.

    Raises ValueError if an update's windows do not divide.
    """
    args, asked = copy.copy(args), args
    windows = args.tokens_per_step // args.block_size
    args.micro_batch = min(args.micro_batch, max(windows // world_size, 1))
    args.accumulation, rest = divmod(windows, world_size * args.micro_batch)
    if rest:
        raise ValueError(f"{windows} windows an update do not divide by {world_size} processes x "
                         f"micro_batch {args.micro_batch}; {what_divides(asked, world_size)} would "
                         "do")
    return args


def check_tokenizer(args, meta):
    """Raise ValueError unless prepared data are of a tokenizer that the model's sizes fit, and hold
    it. Its sha256 is what data, checkpoints and scores are matched by."""
    found = meta["tokenizer"]["vocab_size"]
    if found != args.vocab_size:
        advice = f"give --vocab_size={found} or another --data"
        try:
            dataclasses.replace(model_config(args), vocab_size=found)
        except ValueError as error:
            advice = f"give another --data, or --vocab_size={found} with other sizes: {error}"
        raise ValueError(f"vocab_size={args.vocab_size}, but {args.data} has {found}; {advice}")
    path = Path(args.data) / "tokenizer.json"
    if sha256_of(path) != meta["tokenizer"]["sha256"]:
        raise ValueError(f"{path}: its sha256 is not the one in meta.json; run the same prepare.py "
                         "command again to repair it")


def what_divides(args, world_size):
    """Return a flag with a value for which an update's windows divide."""
    windows = args.tokens_per_step // args.block_size
    if windows % world_size == 0:
        sizes = range(1, args.micro_batch + 1)
        fits = max(size for size in sizes if windows // world_size % size == 0)
        return f"--micro_batch={fits}"
    unit = args.block_size * math.lcm(world_size * args.micro_batch, args.streams)
    return f"--tokens_per_step={-(-args.tokens_per_step // unit) * unit}"


def model_config(args):
    """Return the ModelConfig among the arguments. Raises ValueError for sizes that cannot be."""
    return ModelConfig(args.input, **{name: getattr(args, name) for name in FLAGS["model"]})
