"""Train one decoder: everything equal but the input interface.

    python train.py --input=binary                                  a laptop CPU, minutes (preset smoke)
    torchrun --standalone --nproc_per_node=2 train.py               the paper's run on two GPUs (preset paper)
    torchrun --nnodes=4 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=HOST:29500 train.py --micro_batch=4
    python train.py --preset=paper --input=gf2 --dry_run            parameters, memory, FLOPs and time; no data needed
    python train.py --sweep="input=learned,binary;seed=1,2,3"       every combination, one run after the other
    python train.py --input=binary --resume                         continue, bit for bit, where the last checkpoint is

The training data are a pure function: window w of stream s depends on (seed, s, w) and nothing else, so a resume, another
number of processes, another micro-batch or more evaluations cannot change what is learned from. The number of streams
(two, as in the paper) belongs to the experiment, the number of processes to the machine.

SIGTERM, SIGINT and SIGUSR1 end a run after the current update, with a checkpoint and exit code 75: --resume continues it. Under
torchrun give the save time (--shutdown_timeout=600) and pass SIGUSR1 on (--signals_to_handle=SIGTERM,SIGINT,SIGUSR1).
Exit codes: 0 done, 1 wrong data or a failure, 2 a wrong flag, 75 stopped by a signal.

Reads data/NAME (made by prepare.py, which runs first). Writes out/PRESET-INPUT-sSEED: config.json, log.jsonl, tokenizer.json
and step-*.pt. Units: losses in nats per target; a target is one predicted token; a step is one update of the weights.
"""

import argparse
import contextlib
import ctypes
import datetime
import errno
import fcntl
import hashlib
import itertools
import json
import math
import os
import resource
import signal
import subprocess
import sys
import time
import traceback
import weakref
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint import state_dict as full_state
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from model import INIT_STD, INPUTS, SHA256_MARK, Decoder, FixedCodes, ModelConfig, hash_tensors, list_checkpoints, read_checkpoint
from prepare import load_tokenizer, open_shards, read_meta, token_bytes, write_whole

# Each preset with its result as measured, or "not run".
PRESETS = {
    # 2.4M parameters, 2M targets, 2.5 minutes on 2 CPU cores: held-out loss 4.12 for binary (interpolated bigram: 4.35).
    "smoke": dict(
        data="data/stdlib", vocab_size=3072, block_size=256, n_layer=4, n_head=4, n_embd=192, n_ffn=512,
        tokens_per_step=2048, micro_batch=8, max_lr=4e-3, min_lr=4e-4, warmup_steps=50, decay_steps=0, max_targets=2_000_000,
        eval_windows=64, eval_every=200, save_every=200, log_every=20, checkpoint_activations="none"),
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
    # One id per UTF-16 code unit, 3,500 targets/s on 2 CPU cores: python prepare.py --tokenizer=utf16 --out=data/stdlib-utf16
    "predecessor-smoke": dict(
        data="data/stdlib-utf16", vocab_size=65_536, block_size=256, n_layer=4, n_head=4, n_embd=128, n_ffn=512, ffn="gelu",
        tokens_per_step=4096, micro_batch=16, max_lr=3e-3, min_lr=3e-4, warmup_steps=50, decay_steps=0, max_targets=1_000_000,
        eval_windows=64, eval_every=100, save_every=250, log_every=10, checkpoint_activations="none"),
}
BETAS, EPS, WEIGHT_DECAY, GRAD_CLIP = (0.9, 0.95), 1e-8, 0.01, 1.0  # the paper, "Training"
STOPPED = 75  # exit code after a signal (EX_TEMPFAIL of sysexits.h: try again)
DENSE_BF16_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "RTX 4090": 165e12}  # data sheets


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
    """Return this process's part of the fixed validation windows, (inputs, targets, bytes of text per target); None if there
    are none. They depend on the data alone, not on the seed, so the losses of any two runs can be compared."""
    shards = [shard for shard in open_shards(args.data, "val") if shard.longest > args.block_size]
    if not shards:
        say(f"no evaluation: {args.data} has no validation document of more than {args.block_size} tokens")
        return None
    sampler = WindowSampler(shards, args.block_size, seed=0, windows_per_visit=-(-args.eval_windows // len(shards)))
    inputs, targets = sampler.batch([(0, w) for w in range(args.eval_windows)])
    sizes = token_bytes(load_tokenizer(Path(args.data) / "tokenizer.json"))
    bytes_per_target = sizes[targets.numpy()].mean().item()
    # Equal shares, for a sharded model runs everywhere or nowhere: rows that fill up are not counted.
    rows = torch.arange(rank, -(-len(inputs) // world_size) * world_size, world_size)
    return inputs[rows % len(inputs)], targets[rows % len(inputs)].where(rows[:, None] < len(inputs), -1), bytes_per_target


@torch.no_grad()
def evaluate(model, inputs, targets, micro_batch, autocast):
    """Return the mean loss over the windows that all processes hold, in nats per target: a sum over a count, not a mean of
    means, so that it is the same for any split of the windows."""
    device = model.lm_head.weight.device
    total = torch.tensor([0.0, (targets >= 0).sum().item()], dtype=torch.float64, device=device)
    model.eval()
    for x, y in zip(inputs.split(micro_batch), targets.split(micro_batch)):
        with autocast:
            total[0] += model(x.to(device), y.to(device))[1].double() * (y >= 0).sum().item()
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

def save_checkpoint(out, step, keep, keep_every=0, **state):
    """Write out/step-STEP.pt aside, fsync, rename; then delete older ones but the newest `keep` and multiples of keep_every.

    Raises OSError or RuntimeError (torch's writer) where that fails; nothing is deleted then but the unfinished file.
    """
    path = Path(out) / f"step-{step:08d}.pt"
    aside = path.with_suffix(".tmp")
    try:
        with open(aside, "w+b") as file:
            torch.save({"step": step, **state}, file)
            file.write(SHA256_MARK)
            file.seek(0)
            file.write(hashlib.file_digest(file, "sha256").digest())
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except (OSError, RuntimeError):
        aside.unlink(missing_ok=True)
        raise
    directory = os.open(out, os.O_RDONLY)
    os.fsync(directory)  # the new name is on the disk before an old one goes
    os.close(directory)
    done = [old for old in list_checkpoints(out) if old <= path]  # newer ones are damaged: they must not crowd out a good one
    for old in done[keep:]:
        if not keep_every or int(old.stem[5:]) % keep_every:
            old.unlink()


def gather_state(model, optimizer):
    """Return {"model", "optimizer"}: whole CPU tensors by the parameters' plain names on rank 0, nothing elsewhere. All
    processes take part; the result is the same for ddp, fsdp and any number of processes."""
    options = full_state.StateDictOptions(full_state_dict=True, cpu_offload=True)
    return dict(model=full_state.get_model_state_dict(model, options=options),
                optimizer=full_state.get_optimizer_state_dict(model, optimizer, options=options))


def scatter_state(model, optimizer, state):
    """Load what gather_state returned, from rank 0's copy (the others pass {}): one process reads the file.

    Raises ValueError, naming them, for weights that are missing or that the model does not have.
    """
    if state and (differing := sorted(state["model"].keys() ^ model.state_dict().keys())):
        raise ValueError(f"the checkpoint and the model differ in {', '.join(differing)}")
    options = full_state.StateDictOptions(full_state_dict=True, broadcast_from_rank0=dist.is_initialized())
    full_state.set_model_state_dict(model, state.get("model", {}), options=options)
    full_state.set_optimizer_state_dict(model, optimizer, state.get("optimizer", {}), options=options)


def check_same_experiment(there, here):
    """Raise ValueError, listing the fields, if a resumed run's configuration is another experiment."""
    differing = [f"{key} {there.get(key)} -> {here[key]}" for key in here
                 if key not in FREE_ON_RESUME and there.get(key) != here[key]]  # data_fingerprint among them
    if differing:
        raise ValueError(f"--resume with another configuration ({', '.join(differing)}); give the first run's flags, or another --out")


def claim_run(out):
    """Return out/log.jsonl, open for appending and locked while this process lives: one run writes to a directory.

    Raises ValueError if another process holds it.
    """
    Path(out).mkdir(parents=True, exist_ok=True)
    log = open(Path(out) / "log.jsonl", "ab", buffering=0)
    try:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"{out} is in use by another run; wait for it or give another --out") from None
    return log


def read_log(out):
    """Return the whole rows of a run's log; none where there is no log."""
    path = Path(out) / "log.jsonl"
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith(b"}\n")]


def cut_log(log, step):
    """Drop the open log's rows after `step` updates, and a row cut short, so that a resumed run logs each step once."""
    end = 0
    for line in Path(log.name).read_bytes().splitlines(keepends=True):
        row = json.loads(line) if line.endswith(b"}\n") else {"step": math.inf}
        # An evaluation at `step` comes after the checkpoint and is done again.
        if row["step"] > step or (row["step"] == step and "loss" not in row):
            break
        end += len(line)
    log.truncate(end)


def write_row(log, row):
    """Append a row to the open log. Raises OSError, without leaving half a row, where that fails."""
    line, end = json.dumps(row).encode() + b"\n", os.fstat(log.fileno()).st_size
    try:
        if log.write(line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), log.name)
    except OSError:
        log.truncate(end)
        raise


def data_fingerprint(meta):
    """Return the sha256 of what a run learns from: the tokenizer and every shard's contents."""
    facts = [meta["tokenizer"]["sha256"], [[entry["train"], entry["val"]] for entry in meta["shards"]]]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


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


def compile_model(model):
    """Compile the blocks, one program for all, the last norm and the loss. In place: names stay plain, and gradients come
    block by block."""
    for block in model.model.layers:
        block.compile()
    model.model.norm.compile()
    model.loss = torch.compile(model.loss)


def parallelize(model, args, device):
    """Return what runs the training steps: model itself, or DDP around it. With fsdp model's own parameters become shards."""
    if args.compile:
        compile_model(model)
    if not dist.is_initialized():
        return model.to(device)
    if args.parallel == "ddp":  # codes are constants that every process made alike: no buffer to broadcast
        return DistributedDataParallel(model.to(device), forward_sync_buffers=False, gradient_as_bucket_view=True)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if args.dtype == "bfloat16" else None,
                                  reduce_dtype=torch.float32, cast_forward_inputs=False)  # the residual stream stays float32
    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    return model.to(device)


# ----------------------------------------------------------------------------------------------------------------------
# What a run costs, before it runs

def print_model(config, say):
    """Print what the model is made of; return its FLOPs per target. Needs no memory for the weights."""
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
    return matmul + attention


class LiveBytes(TorchDispatchMode):
    """Follows the bytes of the tensors that operations make while they live, by kind; kind(tensor) names it. Views of what
    was there before, such as a parameter's transpose, are not made here and do not count.

    peak holds the bytes by kind at the moment when their sum was greatest.
    """

    def __init__(self, kind):
        super().__init__()
        self.kind, self.live, self.bytes, self.peak = kind, {}, {}, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            if (key := storage._cdata) not in given and key not in self.live:
                kind = self.live[key] = self.kind(tensor)
                self.bytes[kind] = self.bytes.get(kind, 0) + storage.nbytes()
                weakref.finalize(storage, self.free, key, storage.nbytes())
        if sum(self.bytes.values()) > sum(self.peak.values()):
            self.peak = dict(self.bytes)
        return result

    def free(self, key, nbytes):
        self.bytes[self.live.pop(key)] -= nbytes


def estimate_memory(config, micro_batch, dtype, checkpoint_activations, accumulation=1, parallel="ddp", world_size=1,
                    device="cpu"):
    """Return {part: bytes} of a process at its fullest: parameters, gradients, optimizer, activations, logits.

    Runs forward and backward on fake tensors, which have shapes and no contents, so it takes seconds for any size. Describes
    the eager run; a compiled one needs less. The machine's own (CUDA's context, Python and torch on a CPU) comes on top.
    """
    # A GPU's BF16 is float16 here: as many bytes, and not the attention that is written for a CPU's BF16.
    half = torch.bfloat16 if device == "cpu" else torch.float16
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = Decoder(config)
        model.checkpoint_activations = checkpoint_activations
        n = sum(p.numel() for p in model.parameters())
        shapes = {p.shape for p in model.parameters()}

        def kind(tensor):
            if tensor.shape[-1:] == (config.vocab_size,):
                return "logits"
            return "gradients" if tensor.shape in shapes and tensor.dtype == torch.float32 else "activations"
        idx = torch.zeros(micro_batch, config.block_size, dtype=torch.int64)
        with LiveBytes(kind) as live:
            for _ in range(2 if accumulation > 1 or world_size > 1 else 1):  # gradients stay from one micro-batch to the next
                with torch.autocast("cpu", half, enabled=dtype == "bfloat16", cache_enabled=False):
                    loss = model(idx, idx)[1]
                loss.backward()
                del loss
    parts = {"parameters": 4 * n, "gradients": 0, "optimizer": 8 * n, "activations": 0, "logits": 0} | live.peak
    if parallel == "fsdp" and world_size > 1:
        # A share of everything; and whole, as they multiply, the head, a table, the block at work and the next one.
        size = {group: sum(p.numel() for _, p in members) for group, members in model.group_parameters().items()}
        whole = (2 if dtype == "bfloat16" else 4) * (size["input"] + size["head"] + 2 * size["body"] / config.n_layer)
        parts |= {"parameters": 4 * n / world_size + whole, "gradients": 4 * n / world_size + whole}
        parts["optimizer"] /= world_size
    return parts


def print_costs(args, config, flops, say):
    """Print the memory of a process and the time of the run."""
    world_size = int(os.environ["WORLD_SIZE"]) if dist.is_torchelastic_launched() else 1
    accumulation = split_update(args, world_size)
    parts = estimate_memory(config, args.micro_batch, args.dtype, args.checkpoint_activations, accumulation, args.parallel,
                            world_size, args.device)
    rest = "" if args.device.startswith("cuda") else f"; Python and torch themselves {peak_memory_gb(torch.device('cpu')):.2f}"
    say(f"memory of each of {world_size} processes ({args.parallel}), micro_batch {args.micro_batch}, {args.dtype}, "
        f"checkpoint_activations={args.checkpoint_activations}: {sum(parts.values()) / 1e9:.2f} GB = "
        + " + ".join(f"{part} {size / 1e9:.2f}" for part, size in parts.items()) + rest)
    rates = [row.get("targets_per_second", 0) for row in read_log(args.out)]
    if args.targets_per_second:
        rate, source = args.targets_per_second, "--targets_per_second"
    elif any(rates):
        rate, source = np.median([rate for rate in rates if rate]), f"as measured in {args.out}"
    else:
        rate, source = world_size * 0.4 * DENSE_BF16_FLOPS["H200"] / flops, f"assuming {world_size} H200 at 40 % of its peak"
    hours = args.max_targets / rate / 3600
    say(f"time for {args.max_targets:,} targets, {args.max_targets * flops:.3g} FLOPs: {hours:,.1f} hours, "
        f"{hours * world_size:,.1f} device-hours, at {rate:,.0f} targets/s ({source})")


# ----------------------------------------------------------------------------------------------------------------------
# Command line

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
        preset=(tuple(PRESETS), None, "sizes and recipe; paper where CUDA is present, else smoke"),
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
# What may change when a run is resumed: where and how it runs, what it reports, when it stops. All else is the experiment.
FREE_ON_RESUME = {*FLAGS["machine"], *FLAGS["reports"], "preset", "data", "out", "max_targets", "resume", "dry_run",
                  "targets_per_second"}


def parse_args(argv=None):
    """Return the whole configuration: flags over the preset over FLAGS' defaults."""
    parser = argparse.ArgumentParser(description=__doc__, usage=argparse.SUPPRESS, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter, argument_default=argparse.SUPPRESS)
    for title, flags in FLAGS.items():
        group = parser.add_argument_group(title)
        for name, (kind, default, text) in flags.items():
            how = (dict(type=boolean, nargs="?", const=True) if kind is bool else dict(action="append") if kind is list
                   else dict(choices=kind) if isinstance(kind, tuple) else dict(type=kind))
            stated = default if default is not None else "the preset's" if name in PRESETS["paper"] else None
            shown = text if stated in (None, []) else f"{text} (default: {stated})"
            group.add_argument(f"--{name}", help=shown, **how)
    given = vars(parser.parse_args(argv))
    cuda = torch.cuda.is_available()
    reason = "--preset" if "preset" in given else "CUDA is present" if cuda else "there is no CUDA device"
    preset = given.setdefault("preset", "paper" if cuda else "smoke")
    values = {name: default for flags in FLAGS.values() for name, (_, default, _) in flags.items()} | PRESETS[preset] | given
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


# ----------------------------------------------------------------------------------------------------------------------
# The run

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


def open_data(args, rank, world_size, say):
    """Return (meta, sampler, load_validation(...)) and print what an update is made of.

    Raises ValueError: what can be wrong with the data shows before anything is built or written.
    """
    meta = read_meta(args.data)
    if (found := meta["tokenizer"]["vocab_size"]) != args.vocab_size:
        raise ValueError(f"vocab_size={args.vocab_size}, but {args.data} has {found}; give --vocab_size={found} or another --data")
    accumulation = split_update(args, world_size)
    shards = open_shards(args.data, "train")
    sampler = WindowSampler(shards, args.block_size, args.seed, args.windows_per_visit)
    validation = load_validation(args, rank, world_size, say)
    entropy = unigram_entropy(shards, args.vocab_size)
    say(f"data {args.data}: {sum(s.documents for s in shards):,} documents, {sum(s.tokens for s in shards):,} tokens in "
        f"{len(shards)} shards; unigram entropy {entropy:.4f} nats, uniform {math.log(args.vocab_size):.4f}")
    say(f"update: micro_batch {args.micro_batch} x context {args.block_size} x accumulation {accumulation} x processes "
        f"{world_size} = {args.tokens_per_step:,} targets; {args.steps:,} updates = {args.steps * args.tokens_per_step:,} targets")
    return meta, sampler, validation


def load_run(args, experiment, say):
    """Return the checkpoint to continue from, or {} for a new run. Raises ValueError rather than mix two experiments."""
    out = Path(args.out)
    if not args.resume:
        if list_checkpoints(out) or (out / "log.jsonl").stat().st_size:
            raise ValueError(f"{out} already holds a run; --resume continues it, another --out starts a new one")
        return {}
    for unfinished in out.glob("step-*.tmp"):  # of a save that was killed
        unfinished.unlink()
    for path in list_checkpoints(out):
        try:
            state = read_checkpoint(path)
        except ValueError as error:
            say(f"skipped: {error}")
        else:
            check_same_experiment(state["config"], experiment)
            return state
    say(f"no checkpoint in {out}: starting from the first update")
    return {}


def update(step_model, optimizer, batch, micro_batch, autocast, number, bad):
    """Do update `number` of the weights on this process's rows. Return the mean loss of all rows and the gradient norm before
    clipping, on the device: nothing here waits for it.

    Args:
        step_model: the model, or DDP around it.
        batch: (inputs, targets), int64 (accumulation x micro_batch, T) each, on the device.
        bad: float64 [3] on the device: number, loss and norm of the first update in which one was not finite, 0 if none was.
            From that update on the optimizer changes nothing.
    """
    total_loss = torch.zeros((), device=bad.device)
    micro_batches = list(zip(*(part.split(micro_batch) for part in batch)))
    for i, (x, y) in enumerate(micro_batches):
        # DDP decides in the forward pass whether this backward pass will reduce, so no_sync covers both. FSDP reduces each
        # time, for whole gradients would be kept in between.
        waits = isinstance(step_model, DistributedDataParallel) and i < len(micro_batches) - 1
        with step_model.no_sync() if waits else contextlib.nullcontext():
            with autocast:
                loss = step_model(x, y)[1] / len(micro_batches)
            loss.backward()
        total_loss += loss.detach()
    norm = torch.nn.utils.clip_grad_norm_(step_model.parameters(), GRAD_CLIP)  # once, of the mean gradient of all processes
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    if dist.is_initialized():
        dist.all_reduce(total_loss)
        total_loss /= dist.get_world_size()
    now = torch.stack((torch.full_like(total_loss, number), total_loss, norm)).double()
    bad.copy_(now.where((bad[0] == 0) & ~now.isfinite().all(), bad))
    optimizer.found_inf = (bad[0] > 0).float()  # AdamW's fused kernel skips the update where this is 1
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return total_loss, norm


def check_finite(bad, out):
    """Raise FloatingPointError if an update was not finite; waits for the device."""
    number, loss, norm = bad.tolist()
    if number:
        raise FloatingPointError(f"update {int(number):,}: loss {loss}, gradient norm {norm}; stopped before this update; "
                                 f"last good checkpoint: {(list_checkpoints(out) or ['none'])[0]}")


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
        losses = [row["val_loss"] for row in read_log(out) if "val_loss" in row]
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
    say = print if not dist.is_torchelastic_launched() or os.environ["RANK"] == "0" else lambda *_, **__: None
    say(f"preset {args.preset} ({args.preset_reason}), seed {args.seed}, {args.out}")
    flops = print_model(config, say)
    if args.dry_run:
        return print_costs(args, config, flops, say)
    rank, world_size, device = start_processes(args)

    meta, sampler, validation = open_data(args, rank, world_size, say)
    windows_per_step = args.tokens_per_step // args.block_size
    out, state = Path(args.out), {}
    experiment = experiment_of(args)
    experiment["data_fingerprint"] = data_fingerprint(meta)
    if rank == 0:
        log_file = claim_run(out)
        state = load_run(args, experiment, say)
        writer = open_tensorboard(out) if args.tensorboard else None
    model = Decoder(config, args.seed)
    model.checkpoint_activations = args.checkpoint_activations
    experiment["initial_body_sha256"] = hash_tensors(model.group_parameters()["body"])  # the same for every interface
    experiment["parameters"] = model.count()
    experiment["code_report"] = model.model.embed_tokens.report() if isinstance(model.model.embed_tokens, FixedCodes) else None
    say(f"initial body sha256 {experiment['initial_body_sha256'][:16]}; {device}, {args.dtype}, "
        f"{torch.get_num_threads()} threads")
    step_model = parallelize(model, args, device)
    optimizer = build_optimizer(model, args.max_lr)
    step = all_reduce_max(state.get("step", 0))  # rank 0's: the others have no state
    if step:
        scatter_state(model, optimizer, state)
        say(f"resumed after update {step:,}")
    del state
    if rank == 0:
        write_whole(out / "config.json", json.dumps(experiment, indent=1).encode())
        write_whole(out / "tokenizer.json", (Path(args.data) / "tokenizer.json").read_bytes())
        cut_log(log_file, step)

    def log(**row):
        """Append a row to log.jsonl, once for all processes."""
        if rank == 0:
            try:
                write_row(log_file, row)
            except OSError as error:  # a full disk costs the row, not the run
                print(f"step {row['step']}: log row not written: {error}", file=sys.stderr)
            if writer:
                for key, value in row.items():
                    writer.add_scalar(key, value, row["step"])
                writer.flush()

    def save():
        """Save a checkpoint; return whether that failed. The last good one stays then, and training goes on."""
        state = gather_state(model, optimizer)
        try:
            if rank == 0:
                save_checkpoint(out, step, args.keep, args.keep_every, **state, config=experiment,
                                model_config=asdict(config), data=args.data, tokenizer_sha256=meta["tokenizer"]["sha256"],
                                eot_id=meta["tokenizer"]["eot_id"])
        except (OSError, RuntimeError) as error:
            last = (list_checkpoints(out) or ["none"])[0]
            print(f"step {step}: checkpoint not saved: {error}; last good one: {last}", file=sys.stderr)
            return True
        return False

    # Without the cache autocast's BF16 copies of the weights, each used once, go as soon as they have been used.
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.dtype == "bfloat16", cache_enabled=False)
    bad = torch.zeros(3, dtype=torch.float64, device=device)
    signals = catch_signals()
    profiler = start_profiler(out) if args.profile and rank == 0 else None
    since, timed_steps = time.perf_counter(), 0  # of the stretch whose rate is being taken: no evaluation or save in it
    while True:
        if validation and (step % args.eval_every == 0 or step == args.steps):
            inputs, targets, bytes_per_target = validation
            loss = evaluate(model, inputs, targets, args.micro_batch, autocast)
            bits_per_byte = loss / math.log(2) / bytes_per_target
            say(f"step {step:6,}  held-out loss {loss:.4f}  bits per byte {bits_per_byte:.4f}")
            log(step=step, targets=step * args.tokens_per_step, val_loss=loss, val_bits_per_byte=bits_per_byte)
            since, timed_steps = time.perf_counter(), 0
        if step == args.steps:
            break

        lr = learning_rate(step + 1, args.max_lr, args.min_lr, args.warmup_steps, args.decay_steps)
        for group in optimizer.param_groups:
            group["lr"] = lr
        batch = sampler.batch(rank_rows(step, windows_per_step, args.streams, rank, world_size))
        if device.type == "cuda":
            batch = [part.pin_memory().to(device, non_blocking=True) for part in batch]
        loss, norm = update(step_model, optimizer, batch, args.micro_batch, autocast, step + 1, bad)
        step, timed_steps = step + 1, timed_steps + 1
        if profiler:
            profiler.step()

        stop = all_reduce_max(bool(signals))
        due = step == args.steps or stop
        if due or step % args.log_every == 0 or step % args.save_every == 0:
            check_finite(bad, out)
        if due or step % args.log_every == 0:
            rate = timed_steps * args.tokens_per_step / (time.perf_counter() - since)
            left, memory = int((args.steps - step) * args.tokens_per_step / rate), peak_memory_gb(device)
            mfu = f"MFU {rate * flops / world_size / peak:.1%}  " if (peak := peak_flops(device)) else ""
            say(f"step {step:6,}  targets {step * args.tokens_per_step:,}  loss {loss:.4f}  lr {lr:.3e}  norm {norm:.3f}  "
                f"{rate:,.0f} targets/s  {mfu}ETA {left // 3600}:{left // 60 % 60:02}:{left % 60:02}  {memory:.2f} GB")
            log(step=step, targets=step * args.tokens_per_step, loss=loss.item(), lr=lr, grad_norm=norm.item(),
                targets_per_second=rate, memory_gb=memory)
            since, timed_steps = time.perf_counter(), 0
        if due or step % args.save_every == 0:
            failed = save()
            if due and all_reduce_max(failed):  # nobody leaves before the file is there
                return 1
            since, timed_steps = time.perf_counter(), 0
        if stop and step < args.steps:
            say(f"stopped after update {step:,} by {' '.join(signals) or 'a signal to another process'}; --resume continues")
            return STOPPED
    return 0


if __name__ == "__main__":
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
        os._exit(code)  # freeing a process group can wait for its own thread for ever (seen with gloo and DDP)
    sys.exit(code)
