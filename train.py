"""Train one decoder: everything equal but the input interface.

    python train.py --input=binary                                  a laptop CPU, minutes (preset smoke)
    torchrun --nproc_per_node=2 train.py --input=binary             the paper's run on two GPUs (preset paper)
    python train.py --preset=paper --input=gf2 --dry_run            parameters, memory and FLOPs; no data needed
    python train.py --sweep="input=learned,binary;seed=1,2,3"       every combination, one run after the other
    python train.py --input=binary --resume                         continue, bit for bit, where the last checkpoint is

The training data are a pure function: window w of stream s depends on (seed, s, w) and nothing else, so a resume, another
number of processes, another micro-batch or more evaluations cannot change what is learned from. The number of streams
(two, as in the paper) belongs to the experiment, the number of processes to the machine.

Reads data/NAME (made by prepare.py, which runs first). Writes out/PRESET-INPUT-sSEED: config.json, log.jsonl, tokenizer.json
and step-*.pt. Units: losses in nats per target; a target is one predicted token; a step is one update of the weights.
"""

import argparse
import contextlib
import ctypes
import hashlib
import itertools
import json
import math
import os
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, fields
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from model import INIT_STD, INPUTS, Decoder, FixedCodes, ModelConfig, list_checkpoints, read_checkpoint
from prepare import load_tokenizer, open_shards, read_meta, token_bytes

# Each preset with its result as measured, or "not run".
PRESETS = {
    # 2.3M parameters, 3M targets on a laptop CPU
    "smoke": dict(
        data="data/stdlib", vocab_size=3072, block_size=256, n_layer=4, n_head=4, n_embd=192, n_ffn=512,
        tokens_per_step=4096, micro_batch=16, max_lr=3e-3, min_lr=3e-4, warmup_steps=50, decay_steps=0, max_targets=3_000_000,
        eval_windows=64, eval_every=100, save_every=250, log_every=10, checkpoint_activations="none"),
    # The paper: 1.71B trainable parameters (fixed codes), 100B targets, 805 GPU-hours at 40 % of an H200's peak. Not run.
    "paper": dict(
        data="data/fineweb-edu", vocab_size=49_152, block_size=2048, n_layer=24, n_head=32, n_embd=2048, n_ffn=8192,
        tokens_per_step=262_144, micro_batch=8, max_lr=1.5e-4, min_lr=1e-5, warmup_steps=2000, decay_steps=382_500,
        max_targets=100_000_000_000, eval_windows=1024, eval_every=1000, save_every=500, log_every=10,
        checkpoint_activations="block"),
    # The predecessor (arXiv 2605.09751): 536,870,912 values in matrices and table. Its recipe is not public: the paper's here. Not run.
    "predecessor": dict(
        data="data/predecessor", vocab_size=65_536, block_size=1024, n_layer=32, n_head=32, n_embd=1024, n_ffn=4096, ffn="gelu",
        tokens_per_step=262_144, micro_batch=8, max_lr=1.5e-4, min_lr=1e-5, warmup_steps=2000, decay_steps=0,
        max_targets=16_500_000_000, eval_windows=1024, eval_every=1000, save_every=500, log_every=10, checkpoint_activations="block"),
    # One id per UTF-16 code unit: python prepare.py --tokenizer=utf16 --out=data/stdlib-utf16
    "predecessor-smoke": dict(
        data="data/stdlib-utf16", vocab_size=65_536, block_size=256, n_layer=4, n_head=4, n_embd=128, n_ffn=512, ffn="gelu",
        tokens_per_step=4096, micro_batch=16, max_lr=3e-3, min_lr=3e-4, warmup_steps=50, decay_steps=0, max_targets=1_000_000,
        eval_windows=64, eval_every=100, save_every=250, log_every=10, checkpoint_activations="none"),
}
BETAS, EPS, WEIGHT_DECAY, GRAD_CLIP = (0.9, 0.95), 1e-8, 0.01, 1.0  # the paper, "Training"
# What may change when a run is resumed: where and how it runs, what it reports, when it stops. All else is the experiment.
FREE_ON_RESUME = {"preset", "data", "out", "device", "micro_batch", "checkpoint_activations", "compile", "max_targets",
                  "eval_windows", "eval_every", "save_every", "log_every", "keep", "resume", "dry_run"}


# ----------------------------------------------------------------------------------------------------------------------
# Schedule

def learning_rate(step, max_lr, min_lr, warmup_steps, decay_steps):
    """Return the learning rate of update number step (the first is 1): linear warm-up, then a cosine to min_lr, then min_lr.

    >>> learning_rate(1, 1.5e-4, 1e-5, 2000, 382_500)
    7.5e-08
    """
    if step <= warmup_steps:
        return max_lr * step / warmup_steps
    if step >= decay_steps:
        return min_lr
    progress = (step - warmup_steps) / (decay_steps - warmup_steps)
    return min_lr + 0.5 * (1 + math.cos(math.pi * progress)) * (max_lr - min_lr)


# ----------------------------------------------------------------------------------------------------------------------
# Sampler: no state, hence nothing to save and nothing to restore

WINDOWS, SHARD_ORDER = 0, 1  # what a random sequence is for


def uniforms(seed, stream, purpose, index, n):
    """Return n floats, uniform in [0, 1), that depend on these five numbers alone: float64 [n].

    Philox is a counter-based generator: (seed, stream) is its key, (purpose, index) the place in its sequence. Its raw
    output is fixed for all numpy versions (NEP 19); the methods of numpy's Generator are not.
    """
    philox = np.random.Philox(key=np.array([seed, stream], np.uint64), counter=np.array([0, index, purpose, 0], np.uint64))
    return (philox.random_raw(n) >> np.uint64(11)) * 2.0**-53


class WindowSampler:
    """Draws training windows of T + 1 tokens as the paper does ("Data"): a stream visits the shards in turn, in a new order
    each pass, and draws windows_per_visit windows on each visit: a uniform document of more than T tokens, then a uniform
    start in it, with replacement. No window crosses a document.

    Args:
        shards: prepare.Shard list; those without a document of more than T tokens are never visited.
        windows_per_visit: 8192 in the paper (1024 micro-batches of 8).
    Raises ValueError if no document is long enough.
    """

    def __init__(self, shards, block_size, seed, windows_per_visit):
        self.shards = [shard for shard in shards if shard.longest > block_size]
        self.block_size, self.seed, self.windows_per_visit = block_size, seed, windows_per_visit
        self.visits = {}  # stream -> (visit, tokens, starts): each stream keeps one shard mapped
        if not self.shards:
            longest = max((shard.longest for shard in shards), default=0)
            raise ValueError(f"block_size={block_size}: no document has more than {block_size} tokens "
                             f"(the longest of {sum(s.documents for s in shards):,} has {longest:,}); a smaller --block_size would do")

    def visit(self, stream, visit):
        """Return (tokens uint16 [n_tokens], starts int64 [windows_per_visit]) of a stream's visit."""
        if self.visits.get(stream, (None,))[0] != visit:
            n, T = len(self.shards), self.block_size
            order = uniforms(self.seed, stream, SHARD_ORDER, visit // n, n).argsort()
            tokens, starts = self.shards[order[visit % n]].map()  # mapped anew: a long-lived mapping looks like a leak
            lengths = np.diff(starts)
            eligible = np.flatnonzero(lengths > T)
            which, where = uniforms(self.seed, stream, WINDOWS, visit, 2 * self.windows_per_visit).reshape(2, -1)
            documents = eligible[(which * len(eligible)).astype(np.int64)]
            # A document of n tokens has n - T windows, at 0 to n - T - 1; the last target of the last one is its last token.
            self.visits[stream] = visit, tokens, starts[documents] + (where * (lengths[documents] - T)).astype(np.int64)
        return self.visits[stream][1:]

    def batch(self, rows):
        """Return (inputs, targets), int64 (B, T) each, of windows [(stream, w), ...]; targets are shifted by one."""
        windows = np.empty((len(rows), self.block_size + 1), np.int64)
        for i, (stream, w) in enumerate(rows):
            tokens, starts = self.visit(stream, w // self.windows_per_visit)
            start = starts[w % self.windows_per_visit]
            windows[i] = tokens[start:start + self.block_size + 1]
        windows = torch.from_numpy(windows)
        return windows[:, :-1], windows[:, 1:]


def rank_rows(step, windows_per_step, streams, rank, world_size):
    """Return the windows [(stream, w), ...] that a process takes of the update after `step` updates.

    The global batch is the streams one after the other, and is cut into world_size equal parts: with two streams and two
    processes each has its own stream, as in the paper.
    """
    per_stream, per_rank = windows_per_step // streams, windows_per_step // world_size
    return [(row // per_stream, step * per_stream + row % per_stream) for row in range(rank * per_rank, (rank + 1) * per_rank)]


# ----------------------------------------------------------------------------------------------------------------------
# Optimizer and loss

def build_optimizer(model, max_lr):
    """Return AdamW with the paper's two groups: matrices (table and head included) decay, vectors do not."""
    parameters = list(model.parameters())
    return torch.optim.AdamW([
        dict(params=[p for p in parameters if p.dim() >= 2], weight_decay=WEIGHT_DECAY),
        dict(params=[p for p in parameters if p.dim() < 2], weight_decay=0.0),
    ], lr=max_lr, betas=BETAS, eps=EPS, fused=True)


def load_validation(args, rank, world_size, say):
    """Return this process's part of the fixed validation windows, (inputs, targets, bytes of text per target); Nones if there
    are none. They depend on the data alone, not on the seed, so the losses of any two runs can be compared."""
    shards = [shard for shard in open_shards(args.data, "val") if shard.longest > args.block_size]
    if not shards:
        say(f"no evaluation: {args.data} has no validation document of more than {args.block_size} tokens")
        return None, None, None
    sampler = WindowSampler(shards, args.block_size, seed=0, windows_per_visit=-(-args.eval_windows // len(shards)))
    inputs, targets = sampler.batch([(0, w) for w in range(args.eval_windows)])
    sizes = token_bytes(load_tokenizer(Path(args.data) / "tokenizer.json"))
    return inputs[rank::world_size], targets[rank::world_size], sizes[targets.numpy()].mean().item()


@torch.no_grad()
def evaluate(model, inputs, targets, micro_batch, autocast):
    """Return the mean loss over the windows that all processes hold, in nats per target: a sum over a count, not a mean of
    means, so that it is the same for any split of the windows."""
    device = model.lm_head.weight.device
    total = torch.zeros(2, dtype=torch.float64, device=device)
    model.eval()
    for x, y in zip(inputs.split(micro_batch), targets.split(micro_batch)):
        with autocast:
            loss = model(x.to(device), y.to(device))[1]
        total += torch.tensor([loss.double() * y.numel(), y.numel()], dtype=torch.float64, device=device)
    model.train()
    if dist.is_initialized():
        dist.all_reduce(total)
    return (total[0] / total[1]).item()


def unigram_entropy(shards, vocab_size, limit=50_000_000):
    """Return the entropy in nats of the token frequencies in the first `limit` training tokens: what a model reaches that
    knows how often each token occurs and nothing else."""
    counts = np.zeros(vocab_size, np.int64)
    for shard in shards:
        counts += np.bincount(shard.map()[0][:limit - counts.sum()], minlength=vocab_size)[:vocab_size]
        if counts.sum() >= limit:
            break
    p = counts[counts > 0] / counts.sum()
    return -(p * np.log(p)).sum().item()


# ----------------------------------------------------------------------------------------------------------------------
# Checkpoints and logs

def save_checkpoint(out, step, keep, **state):
    """Write out/step-STEP.pt aside, fsync, rename; then delete all but the newest `keep`."""
    path = Path(out) / f"step-{step:08d}.pt"
    aside = path.with_suffix(".tmp")
    with open(aside, "wb") as file:
        torch.save({"step": step, **state}, file)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
    for old in list_checkpoints(out)[keep:]:
        old.unlink()


def newest_checkpoint(out, say):
    """Return the newest undamaged checkpoint of a run as a dict, or None if there is none."""
    for path in list_checkpoints(out):
        try:
            return read_checkpoint(path)
        except ValueError as error:
            say(f"skipped: {error}")
    return None


def check_same_experiment(there, here):
    """Raise ValueError, listing the fields, if a resumed run's configuration is another experiment."""
    differing = [f"{key} {there.get(key)} -> {here[key]}" for key in here
                 if key not in FREE_ON_RESUME and there.get(key) != here[key]]  # data_fingerprint among them
    if differing:
        raise ValueError(f"--resume with another configuration ({', '.join(differing)}); give the first run's flags, or another --out")


def cut_log(path, step):
    """Drop the log's rows after `step` updates, and a row that was cut short, so that a resumed run logs each step once."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            row = json.loads(line)
            # An evaluation at `step` comes after the checkpoint and is done again.
            if row["step"] < step or (row["step"] == step and "loss" in row):
                rows.append(line)
    aside = path.with_suffix(".tmp")
    aside.write_text("".join(row + "\n" for row in rows))
    aside.replace(path)


def data_fingerprint(meta):
    """Return the sha256 of what a run learns from: the tokenizer and every shard's contents."""
    facts = [meta["tokenizer"]["sha256"], [[entry["train"], entry["val"]] for entry in meta["shards"]]]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def body_hash(model):
    """Return the sha256 of the blocks' and the final norm's weights: the same for every interface at the start."""
    sha256 = hashlib.sha256()
    for name, p in model.group_parameters()["body"]:
        sha256.update(name.encode())
        sha256.update(p.detach().contiguous().numpy())
    return sha256.hexdigest()


# ----------------------------------------------------------------------------------------------------------------------
# Machine

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


def print_report(config, say):
    """Print what the model is made of and what it costs; needs no memory for the weights."""
    with torch.device("meta"):
        model = Decoder(config)
    n = model.count()
    matmul, attention = model.flops_per_target()
    say(f"input {config.input}: {config.n_layer} layers x {config.n_embd}, {config.n_head} heads, FFN {config.n_ffn}, "
        f"context {config.block_size}, vocabulary {config.vocab_size:,}")
    if isinstance(codes := model.model.embed_tokens, FixedCodes):
        norm = codes.report()["squared_norms"]["mean"]
        say(f"  each id is {config.n_bits} fixed numbers, {config.lift}d {config.n_embd // config.n_bits} times; no trainable input value; "
            f"values {config.code_values}, scale {codes.scale:.6g}, mean squared norm {norm:.6g} (a learned row at the start: "
            f"{INIT_STD**2 * config.n_embd:.6g})" + (f"; A of seed {config.code_seed}, b {config.code_offset}" if config.input == "gf2" else ""))
    say(f"  trainable {n['trainable']:,} = input {n['input']:,} + body {n['body']:,} + head {n['head']:,}; "
        f"fixed buffers {n['buffers']:,}; stored {n['stored']:,}")
    say(f"  AdamW: weight decay {WEIGHT_DECAY} on {n['decayed']:,} (matrices), none on {n['trainable'] - n['decayed']:,}; "
        f"float32 parameters, gradients and two moments {16 * n['trainable'] / 1e9:,.2f} GB")
    say(f"  training FLOPs per target: {matmul / 1e9:.4g} G in matrices + {attention / 1e9:.4g} G in causal attention")


# ----------------------------------------------------------------------------------------------------------------------

def count(text):
    """Parse a whole number, also as 3e6."""
    if (value := float(text)) != int(value):
        raise ValueError
    return int(value)


def boolean(text):
    """Parse true, false, 1 or 0."""
    if text.lower() not in ("true", "1", "false", "0"):
        raise ValueError
    return text.lower() in ("true", "1")


def parse_args(argv=None):
    """Return the whole configuration: flags over the preset over the defaults below."""
    parser = argparse.ArgumentParser(description=__doc__, usage=argparse.SUPPRESS, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter, argument_default=argparse.SUPPRESS)
    flag, from_preset = parser.add_argument, "(default: the preset's)"
    flag("--preset", choices=PRESETS, help="sizes and recipe (default: paper where CUDA is present, else smoke)")
    flag("--input", choices=INPUTS, default="binary", help="the input interface (default: %(default)s)")
    flag("--seed", type=int, default=1, help="of the weights and of the windows (default: %(default)s)")
    flag("--data", help=f"prepared data directory {from_preset}")
    flag("--out", help="run directory (default: out/PRESET-INPUT-sSEED)")
    flag("--resume", action="store_true", default=False, help="continue the run in --out from its newest checkpoint")
    flag("--dry_run", action="store_true", default=False, help="print parameters, memory and FLOPs, and stop")
    flag("--sweep", action="append", default=[], metavar="SETTINGS", help='run every combination of "NAME=VALUE,VALUE;NAME=...", each in '
         "a directory of its own in --out (default: out/sweep); give it several times for several grids")
    group = parser.add_argument_group("model").add_argument
    for name in ("vocab_size", "block_size", "n_layer", "n_head", "n_embd", "n_ffn"):
        group(f"--{name}", type=int, help=from_preset)
    group("--ffn", choices=("swiglu", "gelu"), help=f"feed-forward network {from_preset}")
    group("--code_seed", type=int, default=ModelConfig.code_seed, help="gf2: which matrix A; random: which codes (default: %(default)s)")
    group("--code_offset", default=ModelConfig.code_offset, help="gf2: b as 0, random or hexadecimal (default: %(default)s)")
    group("--code_values", default=ModelConfig.code_values, help="binary, gf2: bits as 01 or pm1, -1 and 1 (default: %(default)s)")
    group("--code_scale", default=ModelConfig.code_scale, help="fixed codes: a factor, or matched, a learned table's norm (default: %(default)s)")
    group("--lift", default=ModelConfig.lift, help="how K numbers fill the width: tile or interleave (default: %(default)s)")
    group("--table_free", type=boolean, nargs="?", const=True, default=False, help="binary, gf2: compute the codes from the ids, keep no codebook")
    group = parser.add_argument_group("recipe").add_argument
    group("--tokens_per_step", type=count, help=f"targets of one update {from_preset}")
    group("--max_targets", type=count, help=f"stop at the update that reaches these {from_preset}")
    group("--max_lr", type=float, help=f"peak learning rate {from_preset}")
    group("--min_lr", type=float, help=f"learning rate after the decay {from_preset}")
    group("--warmup_steps", type=int, help=f"updates of linear warm-up {from_preset}")
    group("--decay_steps", type=int, help=f"update at which the cosine ends; 0 for the last one {from_preset}")
    group("--streams", type=int, default=2, help="data streams (default: %(default)s, as in the paper)")
    group("--windows_per_visit", type=int, default=8192, help="windows a stream draws of a shard (default: %(default)s, as in the paper)")
    group = parser.add_argument_group("machine").add_argument
    group("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu, cuda or cuda:N (default: %(default)s)")
    group("--dtype", choices=("bfloat16", "float32"), help="autocast; parameters are float32 (default: bfloat16 where it is fast)")
    group("--micro_batch", type=int, help=f"windows a forward pass; trades memory only {from_preset}")
    group("--checkpoint_activations", choices=("none", "block"), help=f"recompute blocks in the backward pass {from_preset}")
    group("--compile", action="store_true", default=False, help="torch.compile the model")
    group = parser.add_argument_group("reports").add_argument
    group("--log_every", type=int, help=f"updates between log lines {from_preset}")
    group("--eval_every", type=int, help=f"updates between evaluations {from_preset}")
    group("--eval_windows", type=int, help=f"fixed validation windows {from_preset}")
    group("--save_every", type=int, help=f"updates between checkpoints {from_preset}")
    group("--keep", type=int, default=2, help="newest checkpoints kept (default: %(default)s)")
    flags = vars(parser.parse_args(argv))
    preset = flags.get("preset", "paper" if torch.cuda.is_available() else "smoke")
    args = argparse.Namespace(**{"preset": preset, "out": "out/sweep" if flags["sweep"] else f"out/{preset}-{flags['input']}-s{flags['seed']}",
                                 "dtype": pick_dtype(flags["device"]), **PRESETS[preset], **flags})
    args.preset_reason = ("--preset" if "preset" in flags else "CUDA is present" if preset == "paper" else "there is no CUDA device")
    try:
        check_args(args)
    except ValueError as error:
        parser.error(str(error))
    return args


def check_args(args):
    """Raise ValueError for values that cannot go together; set what follows from the others (steps, decay_steps)."""
    model_config(args)
    for name in ("tokens_per_step", "micro_batch", "max_targets", "streams", "windows_per_visit", "log_every", "eval_every",
                 "eval_windows", "save_every", "keep"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name}={getattr(args, name)}: expected 1 or more")
    if args.seed < 0 or args.warmup_steps < 0 or args.decay_steps < 0:
        raise ValueError("--seed, --warmup_steps and --decay_steps: expected 0 or more")
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
    return ModelConfig(**{field.name: getattr(args, field.name) for field in fields(ModelConfig) if hasattr(args, field.name)})


def start_processes(args):
    """Return (rank, world_size, device) and join the process group: nccl on GPUs, gloo on CPUs, none without torchrun."""
    distributed = dist.is_torchelastic_launched()  # a stray RANK in the environment is not torchrun
    device = torch.device(args.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if distributed else device
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = False  # what is not BF16 is FP32
    else:
        tune_allocator()
    if distributed:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return (dist.get_rank(), dist.get_world_size(), device) if distributed else (0, 1, device)


def load_run(args, experiment, say):
    """Return the checkpoint to continue from, or None for a new run. Raises ValueError rather than mix two experiments."""
    out = Path(args.out)
    if not args.resume:
        if list_checkpoints(out) or (out / "log.jsonl").exists():
            raise ValueError(f"{out} already holds a run; --resume continues it, another --out starts a new one")
        return None
    state = newest_checkpoint(out, say)
    if state is None:
        say(f"no checkpoint in {out}: starting from the first update")
    else:
        check_same_experiment(state["config"], experiment)
    return state


def update(model, step_model, optimizer, batch, args, accumulation, autocast):
    """Do one update of the weights on this process's rows; return the mean loss of all rows and the gradient norm before
    clipping. Raises FloatingPointError before anything is changed if either is not finite.

    Args:
        batch: (inputs, targets), int64 (accumulation x micro_batch, T) each.
        step_model: model itself, or what runs it (compiled, DDP).
    """
    device = model.lm_head.weight.device
    total_loss = torch.zeros((), device=device)
    for i, (x, y) in enumerate(zip(*(part.split(args.micro_batch) for part in batch))):
        # DDP decides in the forward pass whether this backward pass will reduce, so no_sync covers both.
        reduces = i == accumulation - 1 or not dist.is_initialized()
        with contextlib.nullcontext() if reduces else step_model.no_sync():
            with autocast:
                loss = step_model(x.to(device), y.to(device))[1] / accumulation
            loss.backward()
        total_loss += loss.detach()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), GRAD_CLIP)  # once, of the mean gradient of all processes
    if dist.is_initialized():
        dist.all_reduce(total_loss)
        total_loss /= dist.get_world_size()
    total_loss, norm = total_loss.item(), norm.item()
    if not math.isfinite(total_loss + norm):
        raise FloatingPointError(f"loss {total_loss}, gradient norm {norm}")
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return total_loss, norm


# ----------------------------------------------------------------------------------------------------------------------
# Sweeps: many runs from one command

def parse_sweep(text):
    """Return the flag settings of one --sweep, every combination: "input=binary,gf2;seed=1,2" -> [{"input": "binary", "seed": "1"},
    ...]. Raises ValueError if it does not read so."""
    axes = {}
    for axis in text.split(";"):
        name, equals, values = axis.strip().partition("=")
        if not (name and equals and all(values.split(","))):
            raise ValueError(f"--sweep={text}: expected NAME=VALUE,VALUE;NAME=VALUE,..., as in input=learned,binary;seed=1,2,3")
        axes[name] = values.split(",")
    return [dict(zip(axes, values)) for values in itertools.product(*axes.values())]


def run_sweep(sweeps, flags, root):
    """Run every combination one after the other, each in a directory of its own below root; finished runs are skipped and
    unfinished ones resumed. Returns the number of runs that failed.

    Everything is checked before anything is trained: the flags of each run, and that a directory that is already there holds
    the same experiment.
    """
    runs = {}
    for setting in itertools.chain.from_iterable(map(parse_sweep, sweeps)):
        out = Path(root) / ",".join(f"{name}={value}" for name, value in setting.items())
        command = [*flags, *(f"--{name}={value}" for name, value in setting.items()), f"--out={out}", "--resume"]
        runs[out] = command, parse_args(command)
        if (out / "config.json").exists():
            try:
                check_same_experiment(json.loads((out / "config.json").read_text()), experiment_of(runs[out][1]))
            except ValueError as error:
                raise ValueError(f"{out}: {error}") from None
    width, failed, started, trained = max(len(out.name) for out in runs), 0, time.monotonic(), 0
    print(f"{len(runs)} runs in {root}")
    for number, (out, (command, args)) in enumerate(runs.items(), 1):
        done = list_checkpoints(out)[:1] == [out / f"step-{args.steps:08d}.pt"]
        if not done:
            out.mkdir(parents=True, exist_ok=True)
            with open(out / "console.txt", "a") as console:
                code = subprocess.run([sys.executable, __file__, *command], stdout=console, stderr=subprocess.STDOUT).returncode
            failed, trained = failed + (code != 0), trained + 1
        log = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()] if (out / "log.jsonl").exists() else []
        losses = [row["val_loss"] for row in log if "val_loss" in row]
        left = (time.monotonic() - started) / max(trained, 1) * (len(runs) - number) / 60
        result = "skipped, finished" if done else "trained" if code == 0 else f"FAILED, see {out}/console.txt"
        print(f"{number:4}/{len(runs)}  {out.name:{width}}  held-out {losses[-1] if losses else math.nan:.4f}  {result}"
              + (f"  (about {left:.0f} minutes left)" if trained and number < len(runs) else ""), flush=True)
    return failed


def experiment_of(args):
    """Return the arguments that config.json and the checkpoints record."""
    return {key: value for key, value in vars(args).items() if key not in ("steps", "preset_reason", "sweep")}


def main():
    args = parse_args()
    if args.sweep:
        flags = [flag for flag in sys.argv[1:] if flag.startswith("--") and "=" in flag]
        if len(flags) != len(sys.argv) - 1:
            raise ValueError("--sweep: write every other flag as --NAME=VALUE")
        return 1 if run_sweep(args.sweep, [f for f in flags if not f.startswith(("--sweep=", "--out="))], args.out) else 0
    config = model_config(args)
    say = print if os.environ.get("RANK", "0") == "0" else lambda *_: None
    say(f"preset {args.preset} ({args.preset_reason}), seed {args.seed}, {args.out}")
    print_report(config, say)
    if args.dry_run:
        return
    rank, world_size, device = start_processes(args)

    # What can be wrong with the data shows before anything is built or written.
    meta = read_meta(args.data)
    if (found := meta["tokenizer"]["vocab_size"]) != args.vocab_size:
        raise ValueError(f"vocab_size={args.vocab_size}, but {args.data} has {found}; give --vocab_size={found} or another --data")
    windows_per_step = args.tokens_per_step // args.block_size
    accumulation, rest = divmod(windows_per_step, world_size * args.micro_batch)
    if rest:
        raise ValueError(f"{windows_per_step} windows an update do not divide by {world_size} processes x micro_batch "
                         f"{args.micro_batch}; change --micro_batch or --tokens_per_step")
    shards = open_shards(args.data, "train")
    sampler = WindowSampler(shards, args.block_size, args.seed, args.windows_per_visit)
    val_inputs, val_targets, val_bytes_per_target = load_validation(args, rank, world_size, say)
    say(f"data {args.data}: {sum(s.documents for s in shards):,} documents, {sum(s.tokens for s in shards):,} tokens in "
        f"{len(shards)} shards; unigram entropy {unigram_entropy(shards, args.vocab_size):.4f} nats, uniform {math.log(args.vocab_size):.4f}")
    say(f"update: micro_batch {args.micro_batch} x context {args.block_size} x accumulation {accumulation} x processes {world_size} "
        f"= {args.tokens_per_step:,} targets; {args.steps:,} updates = {args.steps * args.tokens_per_step:,} targets")

    out, step = Path(args.out), 0
    experiment = experiment_of(args)
    experiment["data_fingerprint"] = data_fingerprint(meta)
    state = load_run(args, experiment, say)
    model = Decoder(config, args.seed)
    model.checkpoint_activations = args.checkpoint_activations == "block"
    experiment["initial_body_sha256"] = body_hash(model)
    experiment["parameters"] = model.count()
    experiment["code_report"] = model.model.embed_tokens.report() if isinstance(model.model.embed_tokens, FixedCodes) else None
    say(f"initial body sha256 {experiment['initial_body_sha256'][:16]}; {device}, {args.dtype}, {torch.get_num_threads()} threads")
    optimizer = build_optimizer(model.to(device), args.max_lr)
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
        say(f"resumed after update {step:,}")
    del state
    if rank == 0:
        out.mkdir(parents=True, exist_ok=True)
        (out / "config.json").write_text(json.dumps(experiment, indent=1))
        shutil.copyfile(Path(args.data) / "tokenizer.json", out / "tokenizer.json")
        cut_log(out / "log.jsonl", step)

    def log(**row):
        if rank == 0:
            with open(out / "log.jsonl", "a") as file:
                file.write(json.dumps(row) + "\n")

    step_model = torch.compile(model) if args.compile else model
    if world_size > 1:  # codes are constants that every process made alike: no buffer to broadcast
        step_model = DistributedDataParallel(step_model, broadcast_buffers=False)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.dtype == "bfloat16")
    seconds, timed_steps = 0.0, 0
    while True:
        if val_inputs is not None and (step % args.eval_every == 0 or step == args.steps):
            loss = evaluate(model, val_inputs, val_targets, args.micro_batch, autocast)
            bits_per_byte = loss / math.log(2) / val_bytes_per_target
            say(f"step {step:6,}  held-out loss {loss:.4f}  bits per byte {bits_per_byte:.4f}")
            log(step=step, targets=step * args.tokens_per_step, val_loss=loss, val_bits_per_byte=bits_per_byte)
        if step == args.steps:
            break

        started = time.perf_counter()
        lr = learning_rate(step + 1, args.max_lr, args.min_lr, args.warmup_steps, args.decay_steps)
        for group in optimizer.param_groups:
            group["lr"] = lr
        batch = sampler.batch(rank_rows(step, windows_per_step, args.streams, rank, world_size))
        try:
            loss, norm = update(model, step_model, optimizer, batch, args, accumulation, autocast)
        except FloatingPointError as error:
            good = [*list_checkpoints(out), "none"][0]
            raise FloatingPointError(f"update {step + 1:,}: {error}, learning rate {lr:.3e}; stopped before the update; "
                                     f"last good checkpoint: {good}") from None
        step += 1
        seconds, timed_steps = seconds + time.perf_counter() - started, timed_steps + 1

        if step % args.log_every == 0 or step == args.steps:
            rate = timed_steps * args.tokens_per_step / seconds
            left = int((args.steps - step) * args.tokens_per_step / rate)
            say(f"step {step:6,}  targets {step * args.tokens_per_step:,}  loss {loss:.4f}  lr {lr:.3e}  norm {norm:.3f}  "
                f"{rate:,.0f} targets/s  ETA {left // 3600}:{left // 60 % 60:02}:{left % 60:02}")
            log(step=step, targets=step * args.tokens_per_step, loss=loss, lr=lr, grad_norm=norm, targets_per_second=rate)
            seconds, timed_steps = 0.0, 0
        if rank == 0 and (step % args.save_every == 0 or step == args.steps):
            save_checkpoint(out, step, args.keep, model=model.state_dict(), optimizer=optimizer.state_dict(), config=experiment,
                            model_config=asdict(config), data=args.data, tokenizer_sha256=meta["tokenizer"]["sha256"],
                            eot_id=meta["tokenizer"]["eot_id"])
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ValueError, OSError, FloatingPointError) as error:
        sys.exit(f"train.py: {error}" if os.environ.get("RANK", "0") == "0" else 1)
