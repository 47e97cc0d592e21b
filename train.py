"""Train one decoder: everything equal but the input interface.

    python train.py --input=binary                              a laptop CPU, minutes (preset smoke)
    torchrun --standalone --nproc_per_node=2 train.py           the paper's run (preset paper)
    python train.py --preset=paper --input=gf2 --dry_run        its memory, FLOPs and time; no data
    python train.py --sweep="input=learned,binary;seed=1,2,3"   every combination, one by one
    python train.py --input=binary --resume                     continue the last checkpoint exactly
    python train.py --init_from=out/RUN --input=binary          its body and output, a new input

The training data are a pure function: window w of stream s depends on (seed, s, w) and nothing
else, so a resume, another number of processes, another micro-batch or more evaluations cannot
change what is learned from. The number of streams (two, as in the paper) belongs to the experiment,
the number of processes to the machine.

SIGTERM, SIGINT, SIGUSR1 and SIGHUP end a run after the current update, with a checkpoint: --resume
continues it. Under torchrun give the save time (--shutdown_timeout=600) and pass them on
(--signals_to_handle=SIGTERM,SIGINT,SIGUSR1,SIGHUP). Exit codes: 0 done, 1 wrong data or a failure,
2 a wrong flag, 69 another process is at the run, 75 stopped by a signal.

Reads data/NAME (made by prepare.py, which runs first). Writes out/PRESET-INPUT-sSEED: config.json,
log.jsonl, tokenizer.json and step-*.pt. Units: losses in nats per target; a target is one predicted
token; a step is one update of the weights.
"""

import contextlib
import functools
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from machinery.checkpoints import facts_of, open_run, save_run, scatter_state
from machinery.costs import print_costs, print_model
from machinery.machine import autocast_of, compile_model
from machinery.processes import (
    all_reduce_max,
    check_same_everywhere,
    exit_with,
    in_all,
    in_first,
    launched_processes,
    refuse_under_torchrun,
    speaker,
    start_processes,
)
from machinery.reports import Reporter, expectation
from machinery.runs import (
    code_fingerprint,
    data_fingerprint,
    experiment_of,
    list_checkpoints,
    record_run,
)
from machinery.settings import check_tokenizer, model_config, parse_args, with_micro_batch
from machinery.shards import open_shards, read_meta
from machinery.signals import STOPPED, catch_signals, stop_soon
from machinery.starting import new_model
from machinery.sweep import run_sweep
from machinery.tokenizer import load_tokenizer, token_bytes

# Each preset with its result as measured, or "not run". The other flags and their defaults are in
# machinery/settings.py, and what follows: steps = ceil(max_targets / tokens_per_step) updates, and
# tokens_per_step = block_size x micro_batch x accumulation x processes.
PRESETS = {
    # The paper: 1.71B trainable parameters (fixed codes), 100B targets, 763 GPU-hours at 40 % of an
    # H200's peak (by --dry_run). Not run.
    "paper": dict(
        data="data/fineweb-edu", vocab_size=49_152, block_size=2048, n_layer=24, n_head=32,
        n_embd=2048, n_ffn=8192, tokens_per_step=262_144, micro_batch=8,
        max_targets=100_000_000_000,
        max_lr=1.5e-4, min_lr=1e-5, warmup_steps=2000,
        decay_steps=382_500,  # the paper's; 1,030 updates after the last one
        eval_windows=1024, eval_every=1000, save_every=500, log_every=10,
        checkpoint_activations="block"),
    # 2.4M parameters, 2M targets, 3 minutes on 2 CPU cores: 4.11 for binary over all held-out
    # documents (evaluate.py; interpolated bigram: 4.35).
    "smoke": dict(
        data="data/stdlib", vocab_size=3072, block_size=256, n_layer=4, n_head=4, n_embd=192,
        n_ffn=512, tokens_per_step=2048, micro_batch=8, max_targets=2_000_000,
        max_lr=4e-3, min_lr=4e-4, warmup_steps=50, decay_steps=0,  # the last update
        eval_windows=64, eval_every=200, save_every=200, log_every=20,
        checkpoint_activations="none"),
    # The predecessor (arXiv 2605.09751): 536,870,912 values in matrices and table. Its recipe is
    # not public: the paper's here. Not run.
    "predecessor": dict(
        data="data/predecessor", vocab_size=65_536, block_size=1024, n_layer=32, n_head=32,
        n_embd=1024, n_ffn=4096, ffn="gelu", tokens_per_step=262_144, micro_batch=8,
        max_targets=16_500_000_000,
        max_lr=1.5e-4, min_lr=1e-5, warmup_steps=2000, decay_steps=0,  # the last update
        eval_windows=1024, eval_every=1000, save_every=500, log_every=10,
        checkpoint_activations="block"),
    # One id per UTF-16 code unit, 3,500 targets/s on 2 CPU cores; loss not recorded.
    "predecessor-smoke": dict(
        data="data/stdlib-utf16", vocab_size=65_536, block_size=256, n_layer=4, n_head=4,
        n_embd=128, n_ffn=512, ffn="gelu", tokens_per_step=4096, micro_batch=16,
        max_targets=1_000_000,
        max_lr=3e-3, min_lr=3e-4, warmup_steps=50, decay_steps=0,  # the last update
        eval_windows=64, eval_every=100, save_every=250, log_every=10,
        checkpoint_activations="none"),
}
# What python prepare.py needs to make a preset's data.
PREPARE = {"smoke": "", "paper": "--source=fineweb-edu ",
           "predecessor": "--source=fineweb-edu --tokenizer=utf16 ",
           "predecessor-smoke": "--tokenizer=utf16 "}
# (preset, input): {updates: validation loss of seed 1}, measured on a CPU in BF16.
MILESTONES = {
    ("smoke", "learned"): {200: 4.50, 400: 3.85, 600: 3.55, 977: 3.31},
    ("smoke", "binary"): {200: 4.96, 400: 4.21, 600: 3.87, 977: 3.56},
    ("smoke", "gf2"): {200: 5.02, 400: 4.24, 600: 3.92, 977: 3.63},
}
BETAS, EPS, WEIGHT_DECAY, GRAD_CLIP = (0.9, 0.95), 1e-8, 0.01, 1.0  # the paper, "Training"


def learning_rate(number, max_lr, min_lr, warmup_steps, decay_steps):
    """Return the learning rate of update `number`, the first of which is 1: linear warm-up, then a
    cosine to min_lr, then min_lr. With n, W and D for number, warmup_steps and decay_steps:

        max_lr n / W                                                               n <= W
        min_lr + (max_lr - min_lr) (1 + cos(pi (n - W) / (D - W))) / 2         W < n < D
        min_lr                                                                     n >= D

    settings.with_steps has put the last update for a decay_steps of 0.

    >>> learning_rate(1, 1.5e-4, 1e-5, 2000, 382_500)
    7.5e-08
    """
    if number <= warmup_steps:
        return max_lr * number / warmup_steps
    if number >= decay_steps:
        return min_lr
    progress = (number - warmup_steps) / (decay_steps - warmup_steps)
    return min_lr + 0.5 * (1 + math.cos(math.pi * progress)) * (max_lr - min_lr)


# --- The sampler: no state, hence nothing to save and nothing to restore

WINDOWS, SHARD_ORDER = 0, 1  # what a random sequence is for


def uniforms(seed, stream, purpose, index, n):
    """Return n floats, uniform in [0, 1), that depend on the first four alone: float64 [n].

    Philox is a counter-based generator: (seed, stream) is its key, (purpose, index) the place in
    its sequence. Its raw output is fixed for all numpy versions (NEP 19); the methods of numpy's
    Generator are not.
    """
    key, counter = np.array([seed, stream], np.uint64), np.array([0, index, purpose, 0], np.uint64)
    bits = np.random.Philox(key=key, counter=counter).random_raw(n)
    return (bits >> np.uint64(11)) * 2.0**-53


class WindowSampler:
    """Draws training windows of T + 1 tokens as the paper does ("Data"): a stream visits the shards
    in turn, in a new order each pass, and draws windows_per_visit windows on each visit: a uniform
    document of more than T tokens, then a uniform start in it, with replacement. No window crosses
    a document.

    Args:
        shards: list of shards.Shard; one without a document of more than T tokens is never visited.
        windows_per_visit: 8192 in the paper (1024 micro-batches of 8).
    Raises ValueError if no document is long enough.
    """

    def __init__(self, shards, block_size, seed, windows_per_visit):
        self.shards = [shard for shard in shards if shard.longest > block_size]
        self.block_size, self.seed = block_size, seed
        self.windows_per_visit = windows_per_visit
        # stream -> (visit, tokens, starts), a visit counted from 0: each keeps one shard mapped
        self.latest = {}
        self.verified = set()
        if not self.shards:
            documents = sum(shard.documents for shard in shards)
            longest = max((shard.longest for shard in shards), default=0)
            raise ValueError(f"block_size={block_size}: no document has more than {block_size} "
                             f"tokens (the longest of {documents:,} has {longest:,}); a smaller "
                             "--block_size would do")

    def tokens_and_starts(self, stream, visit):
        """Return (tokens uint16 [n_tokens], starts int64 [windows_per_visit]) of a visit."""
        latest, tokens, starts = self.latest.get(stream, (None, None, None))
        if latest != visit:
            tokens, starts = self.open_visit(stream, visit)
            self.latest[stream] = visit, tokens, starts
        return tokens, starts

    def open_visit(self, stream, visit):
        n, T = len(self.shards), self.block_size
        order = uniforms(self.seed, stream, SHARD_ORDER, visit // n, n).argsort()
        shard = self.shards[order[visit % n]]
        if shard not in self.verified:  # once: its sha256 is what the experiment is known by
            shard.verify()
            self.verified.add(shard)
        # Mapped anew: a long-lived mapping looks like a leak.
        tokens, document_starts = shard.map()
        lengths = np.diff(document_starts)
        eligible = np.flatnonzero(lengths > T)
        draws = uniforms(self.seed, stream, WINDOWS, visit, 2 * self.windows_per_visit)
        which, where = draws.reshape(2, -1)
        documents = eligible[(which * len(eligible)).astype(np.int64)]
        # A document of n tokens has n - T windows, at 0 to n - T - 1; the last target of the last
        # one is its last token.
        offsets = (where * (lengths[documents] - T)).astype(np.int64)
        return tokens, document_starts[documents] + offsets

    def batch(self, windows):
        """Return (inputs, targets), int64 (B, T) each, of windows [(stream, w), ...]; targets are
        shifted by one."""
        rows = np.empty((len(windows), self.block_size + 1), np.int64)
        for i, (stream, w) in enumerate(windows):
            tokens, starts = self.tokens_and_starts(stream, w // self.windows_per_visit)
            start = starts[w % self.windows_per_visit]
            rows[i] = tokens[start:start + self.block_size + 1]
        rows = torch.from_numpy(rows)
        return rows[:, :-1], rows[:, 1:]


def to_device(batch, device):
    """Return a batch on the device; a copy to CUDA runs beside the work that is under way there."""
    if device.type != "cuda":
        return [part.to(device) for part in batch]
    return [part.pin_memory().to(device, non_blocking=True) for part in batch]


def rank_rows(step, windows_per_step, streams, rank, world_size):
    """Return the windows [(stream, w), ...] that a process takes of the update after `step`.

    The global batch is the streams one after the other, and is cut into world_size equal parts:
    with two streams and two processes each has its own stream, as in the paper.
    """
    per_stream, per_rank = windows_per_step // streams, windows_per_step // world_size
    rows = range(rank * per_rank, (rank + 1) * per_rank)
    return [(row // per_stream, step * per_stream + row % per_stream) for row in rows]


# --- The data of a run, and the validation loss

class Validation(NamedTuple):
    """One process's part of the fixed validation windows."""
    inputs: torch.Tensor   # int64 (B, T)
    targets: torch.Tensor  # int64 (B, T); -1 is not counted
    bytes_per_target: float  # of text, the mean over all windows


def open_data(args, rank, world_size, say):
    """Return (meta, sampler, load_validation(...)) and print what an update is made of.

    Raises ValueError: what can be wrong with the data shows before anything is built or written.
    """
    try:
        meta = read_meta(args.data)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{args.data}: no prepared data here; run python prepare.py {PREPARE[args.preset]}"
            f"--out={args.data} (or give --data=DIR)") from None
    check_tokenizer(args, meta)
    shards = open_shards(args.data, "train")
    sampler = WindowSampler(shards, args.block_size, args.seed, args.windows_per_visit)
    validation = load_validation(args, rank, world_size, say)
    documents, tokens = sum(s.documents for s in shards), sum(s.tokens for s in shards)
    say(f"data {args.data}: {documents:,} documents, {tokens:,} tokens in {len(shards)} shards; "
        f"unigram entropy {unigram_entropy(shards, args.vocab_size):.4f} nats, "
        f"uniform {math.log(args.vocab_size):.4f}")
    say(f"update: micro_batch {args.micro_batch} x context {args.block_size} x accumulation "
        f"{args.accumulation} x processes {world_size} = {args.tokens_per_step:,} targets; "
        f"{args.steps:,} updates = {args.steps * args.tokens_per_step:,} targets")
    n, windows = len(sampler.shards), args.steps * args.tokens_per_step // args.block_size
    visits = math.ceil(windows / (args.streams * args.windows_per_visit))
    if visits < n:
        say(f"each of {args.streams} streams will read {visits} of {n} shards; "
            f"--windows_per_visit={max(windows // args.streams // n, 1)} would reach all")
    return meta, sampler, validation


def unigram_entropy(shards, vocab_size, limit=50_000_000):
    """Return the entropy in nats of the token frequencies in the first `limit` training tokens:
    what a model reaches that knows how often each token occurs and nothing else."""
    counts = np.zeros(vocab_size, np.int64)
    for shard in shards:
        tokens = shard.map()[0][:limit - counts.sum()]
        counts += np.bincount(tokens, minlength=vocab_size)[:vocab_size]
        if counts.sum() >= limit:
            break
    p = counts[counts > 0] / counts.sum()
    return -(p * np.log(p)).sum().item()


def load_validation(args, rank, world_size, say):
    """Return this process's Validation; None if there are no validation windows.

    They are the first eval_windows of one sequence that depends on the data and block_size alone,
    not on the seed, so the losses of any two runs can be compared.
    """
    shards = [shard for shard in open_shards(args.data, "val") if shard.longest > args.block_size]
    if not shards:
        say(f"no evaluation: {args.data} has no validation document of more than "
            f"{args.block_size} tokens")
        return None
    sampler = WindowSampler(shards, args.block_size, seed=0, windows_per_visit=1)
    inputs, targets = sampler.batch([(0, w) for w in range(args.eval_windows)])
    sizes = token_bytes(load_tokenizer(Path(args.data) / "tokenizer.json"))
    bytes_per_target = sizes[targets.numpy()].mean().item()
    # Equal shares, for a sharded model runs everywhere or nowhere, and whole micro-batches, so that
    # a compiled one sees one shape: rows that fill up do not count.
    n, unit = len(inputs), world_size * args.micro_batch
    rows = torch.arange(rank, math.ceil(n / unit) * unit, world_size)
    counts = (rows < n)[:, None]
    return Validation(inputs[rows % n], targets[rows % n].where(counts, -1), bytes_per_target)


@torch.no_grad()
def evaluate(model, inputs, targets, micro_batch, autocast):
    """Return the mean loss over the windows that all processes hold, in nats per target: a sum over
    a count, not a mean of means, so that it is the same for any split of the windows."""
    device = model.lm_head.weight.device
    losses, counts = [], []
    model.eval()
    for x, y in zip(inputs.split(micro_batch), targets.split(micro_batch)):
        with autocast:
            losses.append(model(x.to(device), y.to(device))[1])
        counts.append((y >= 0).sum())
    model.train()
    # In float64 on the CPU: not every device has it.
    losses, counts = torch.stack(losses).cpu().double(), torch.stack(counts)
    total = torch.stack(((losses * counts).sum(), counts.sum()))
    if dist.is_initialized():
        dist.all_reduce(total)
    return (total[0] / total[1]).item()


# --- The optimizer, the processes, and one update of the weights

def build_optimizer(model, max_lr):
    """Return AdamW with the paper's two groups: matrices (table and head included) decay, vectors
    do not."""
    roles = model.roles()
    matrices = [p for name, p in model.named_parameters() if roles[name].decays]
    vectors = [p for name, p in model.named_parameters() if not roles[name].decays]
    groups = [dict(params=matrices, weight_decay=WEIGHT_DECAY),
              dict(params=vectors, weight_decay=0.0)]
    return torch.optim.AdamW(groups, lr=max_lr, betas=BETAS, eps=EPS, fused=True)


def parallelize(model, args, device):
    """Return what runs the training steps: model itself, or DDP around it. With fsdp model's own
    parameters become shards."""
    if args.compile:
        compile_model(model)
    if not dist.is_initialized():
        return model.to(device)
    if args.parallel == "ddp":  # every process made the same codes: no buffer to broadcast
        return DistributedDataParallel(model.to(device), forward_sync_buffers=False,
                                       gradient_as_bucket_view=True)
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if args.dtype == "bfloat16" else None,
        reduce_dtype=torch.float32, cast_forward_inputs=False)  # the residual stream stays float32
    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    return model.to(device)


def update(step_model, optimizer, batch, micro_batch, autocast, number, bad):
    """Do update `number` on this process's rows of a batch: theta <- AdamW(theta, g), where g is
    the gradient of the mean loss over the windows of all processes, clipped to norm 1.0.

    Return that loss and the norm before clipping, on the device: nothing here waits for it.

    Args:
        step_model: the model, or DDP around it.
        batch: (inputs, targets), int64 (accumulation x micro_batch, T) each, on the device.
        bad: float32 [3] on the device: number, loss and norm of the first update in which one was
            not finite, 0 if none was. From that update on the optimizer changes nothing.
    """
    inputs, targets = batch
    micro_batches = list(zip(inputs.split(micro_batch), targets.split(micro_batch)))
    is_ddp = isinstance(step_model, DistributedDataParallel)
    total_loss = torch.zeros((), device=bad.device)
    for i, (x, y) in enumerate(micro_batches):
        # DDP decides in the forward pass whether this backward pass will reduce, so no_sync covers
        # both. FSDP reduces each time, for whole gradients would be kept in between.
        waits = is_ddp and i < len(micro_batches) - 1
        with step_model.no_sync() if waits else contextlib.nullcontext():
            with autocast:
                loss = step_model(x, y)[1] / len(micro_batches)
            loss.backward()
        total_loss += loss.detach()
    # Once, of the mean gradient of all processes.
    norm = torch.nn.utils.clip_grad_norm_(step_model.parameters(), GRAD_CLIP)
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    if dist.is_initialized():
        dist.all_reduce(total_loss)
        total_loss /= dist.get_world_size()
    now = torch.stack((torch.full_like(total_loss, number), total_loss, norm))
    bad.copy_(now.where((bad[0] == 0) & ~now.isfinite().all(), bad))  # keeps the first bad update
    # Read by AdamW(fused=True), which skips the update where it is 1; GradScaler would set it.
    optimizer.found_inf = (bad[0] > 0).float()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return total_loss, norm


def check_finite(bad, out):
    """Raise FloatingPointError if an update was not finite; waits for the device."""
    number, loss, norm = bad.tolist()
    if number:
        last = (list_checkpoints(out) or ["none"])[0]
        raise FloatingPointError(f"update {int(number):,}: loss {loss}, gradient norm {norm}; "
                                 f"stopped before this update; last good checkpoint: {last}")


def main():
    parse = functools.partial(parse_args, PRESETS, __doc__)
    args = parse()
    if args.sweep:
        refuse_under_torchrun("--sweep")
        return run_sweep(args, sys.argv[1:], parse, __file__)
    config, say = model_config(args), speaker()
    say(f"preset {args.preset} ({args.preset_reason}), seed {args.seed}, {args.out}")
    flops_per_target = print_model(config, WEIGHT_DECAY, say)
    if args.dry_run:
        args = with_micro_batch(args, launched_processes())
        return print_costs(args, launched_processes(), config, flops_per_target, say)

    rank, world_size, device = start_processes(args)
    args = in_all(functools.partial(with_micro_batch, args, world_size))
    meta, sampler, validation = in_all(lambda: open_data(args, rank, world_size, say))
    say(expectation(args, PRESETS, MILESTONES))
    experiment = experiment_of(args) | {"data_fingerprint": data_fingerprint(meta)}
    check_same_everywhere(experiment | {"code": code_fingerprint()})
    log_file, state = in_first(lambda: open_run(args, experiment, say), otherwise=(None, None))
    report = Reporter(args, log_file, flops_per_target / world_size, device, say)
    step = all_reduce_max(state["step"] if state else 0)
    model = in_all(lambda: new_model(args, config, step, say))
    model.checkpoint_activations = args.checkpoint_activations
    experiment |= facts_of(model, state)
    say(f"initial body sha256 {experiment['initial_body_sha256'][:16]}; {device}, {args.dtype}, "
        f"{torch.get_num_threads()} threads")
    step_model = parallelize(model, args, device)
    optimizer = build_optimizer(model, args.max_lr)
    if step:
        scatter_state(model, optimizer, state)
        say(f"resumed after update {step:,}")
    state = None  # as large as the weights and moments themselves
    in_first(lambda: record_run(args, experiment, log_file, step), otherwise=None)
    provenance = dict(
        config=experiment, model_config=asdict(config), data=args.data,
        tokenizer_sha256=meta["tokenizer"]["sha256"], eot_id=meta["tokenizer"]["eot_id"])

    autocast = autocast_of(args.dtype, device)
    bad = torch.zeros(3, device=device)
    windows_per_step = args.tokens_per_step // args.block_size
    with catch_signals(stop_soon()) as signals, report:
        report.start()
        while True:
            if validation and (step % args.eval_every == 0 or step >= args.steps):
                loss = evaluate(model, validation.inputs, validation.targets, args.micro_batch,
                                autocast)
                report.validation(step, loss, validation.bytes_per_target)
            if step >= args.steps:
                return 0

            lr = learning_rate(step + 1, args.max_lr, args.min_lr, args.warmup_steps,
                               args.decay_steps)
            for group in optimizer.param_groups:
                group["lr"] = lr
            rows = rank_rows(step, windows_per_step, args.streams, rank, world_size)
            batch = to_device(sampler.batch(rows), device)
            step += 1
            loss, norm = update(step_model, optimizer, batch, args.micro_batch, autocast, step, bad)
            report.after_update()

            stop = all_reduce_max(bool(signals))
            last = step >= args.steps or stop
            log_now = last or step % args.log_every == 0
            save_now = last or step % args.save_every == 0
            if log_now or save_now:
                check_finite(bad, args.out)
            if log_now:
                report.training(step, loss, lr, norm)
            if save_now:
                failed = save_run(args, step, model, optimizer, provenance)
                if last and all_reduce_max(failed):  # nobody leaves before the file is there
                    return 1
                report.start_clock()
            if stop and step < args.steps:
                cause = " ".join(signals) or "a signal to another process"
                say(f"stopped after update {step:,} by {cause}; --resume continues")
                return STOPPED


if __name__ == "__main__":
    exit_with(main)
