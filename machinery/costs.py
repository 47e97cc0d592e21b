"""What a run costs, before it runs: parameters, FLOPs, memory, time (train.py --dry_run)."""

import weakref

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from inputs import INIT_STD, FixedCodes
from machinery.machine import DENSE_BF16_FLOPS, peak_memory_gb
from machinery.runs import read_log
from model import Decoder


def count_parameters(model):
    """Return the numbers of values of a Decoder by group.

    Keys: input, body, head (trainable), buffers; trainable, stored, decayed, and matmul (matrices
    used as such: not a table, which is looked up).
    """
    n = dict(input=0, body=0, head=0, decayed=0, matmul=0)
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    for name, role in model.roles().items():
        n[role.group] += sizes[name]
        n["decayed"] += sizes[name] * role.decays
        n["matmul"] += sizes[name] * role.multiplies
    trainable, buffers = sum(sizes.values()), sum(b.numel() for b in model.buffers())
    return n | {"buffers": buffers, "trainable": trainable, "stored": trainable + buffers}


def flops_per_target(model):
    """Return training FLOPs per target without recomputation: (matmuls 6N, causal attention).

    Attention is 12 L C T if every query met every key (PaLM, arXiv 2204.02311, appendix B); half is
    masked.
    """
    c = model.config
    return 6 * count_parameters(model)["matmul"], 6 * c.n_layer * c.n_embd * c.block_size


def print_model(config, weight_decay, say):
    """Print what the model is made of; return its FLOPs per target. Needs no memory for the
    weights."""
    with torch.device("meta"):
        model = Decoder(config)
    n = count_parameters(model)
    matmul, attention = flops_per_target(model)
    say(f"input {config.input}: {config.n_layer} layers x {config.n_embd}, {config.n_head} heads, "
        f"FFN {config.n_ffn}, context {config.block_size}, vocabulary {config.vocab_size:,}")
    if isinstance(model.model.embed_tokens, FixedCodes):
        print_codes(config, model.model.embed_tokens, say)
    elif n["input"]:
        say(f"  its input vectors start with a root mean square of {config.input_std:g}")
    say(f"  trainable {n['trainable']:,} = input {n['input']:,} + body {n['body']:,} + head "
        f"{n['head']:,}; fixed buffers {n['buffers']:,}; stored {n['stored']:,}")
    say(f"  AdamW: weight decay {weight_decay} on {n['decayed']:,} (matrices), none on "
        f"{n['trainable'] - n['decayed']:,}; float32 parameters, gradients and two moments "
        f"{16 * n['trainable'] / 1e9:,.2f} GB")
    say(f"  training FLOPs per target: {matmul / 1e9:.4g} G in matrices + {attention / 1e9:.4g} G "
        "in causal attention")
    return matmul + attention


def print_codes(config, codes, say):
    """Print what an id's fixed input vector is, and its size beside a learned one's."""
    norm = codes.report()["squared_norms"]["mean"]
    recoding = ""
    if config.input == "gf2":
        recoding = f"; A of seed {config.code_seed}, b {config.code_offset}"
    say(f"  each id is {config.n_code} fixed numbers, {config.lift}d "
        f"{config.n_embd // config.n_code} times; no trainable input value; values "
        f"{config.code_values}, scale {codes.scale:.6g}, mean squared norm {norm:.6g} (a learned "
        f"row at the start: {INIT_STD**2 * config.n_embd:.6g}){recoding}")


class LiveBytes(TorchDispatchMode):
    """Follows the bytes of the tensors that operations make while they live, by kind; kind(tensor)
    names it. Views of what was there before, such as a parameter's transpose, are not made here and
    do not count.

    peak holds the bytes by kind at the moment when their sum was greatest.
    """

    def __init__(self, kind):
        super().__init__()
        self.kind, self.live, self.bytes, self.peak = kind, {}, {}, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        given = {tensor.untyped_storage()._cdata for tensor in inputs}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in given:
                self.follow(leaf)
        if sum(self.bytes.values()) > sum(self.peak.values()):
            self.peak = dict(self.bytes)
        return result

    def follow(self, tensor):
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        if key not in self.live:
            kind = self.live[key] = self.kind(tensor)
            self.bytes[kind] = self.bytes.get(kind, 0) + nbytes
            weakref.finalize(storage, self.free, key, nbytes)

    def free(self, key, nbytes):
        self.bytes[self.live.pop(key)] -= nbytes


def estimate_memory(config, micro_batch, dtype, checkpoint_activations, accumulation=1,
                    parallel="ddp", world_size=1, device="cpu"):
    """Return {part: bytes} of a process at its fullest: parameters, gradients, optimizer,
    activations, logits.

    Runs forward and backward on fake tensors, which have shapes and no contents, so it takes
    seconds for any size. Describes the eager run; in a compiled one the whole logits exist, which
    whole_logits counts. The machine's own (CUDA's context, Python and torch on a CPU) comes on top.
    """
    # A GPU's BF16 is float16 here: as many bytes, and not the attention of a CPU's BF16.
    half = torch.bfloat16 if device == "cpu" else torch.float16
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = Decoder(config)
        model.checkpoint_activations = checkpoint_activations
        n = sum(p.numel() for p in model.parameters())
        shapes = {p.shape for p in model.parameters()}

        def kind(tensor):
            if tensor.shape[-1:] == (config.vocab_size,):
                return "logits"
            gradient = tensor.shape in shapes and tensor.dtype == torch.float32
            return "gradients" if gradient else "activations"

        idx = torch.zeros(micro_batch, config.block_size, dtype=torch.int64)
        autocast = torch.autocast("cpu", half, enabled=dtype == "bfloat16", cache_enabled=False)
        again = accumulation > 1 or world_size > 1  # gradients stay for the next micro-batch
        with LiveBytes(kind) as live:
            for _ in range(2 if again else 1):
                with autocast:
                    loss = model(idx, idx)[1]
                loss.backward()
                del loss
    parts = {"parameters": 4 * n, "gradients": 0, "optimizer": 8 * n, "activations": 0, "logits": 0}
    parts |= live.peak
    if parallel == "fsdp" and world_size > 1:
        whole = whole_under_fsdp(model, dtype)
        parts["parameters"] = parts["gradients"] = 4 * n / world_size + whole
        parts["optimizer"] /= world_size
    return parts


def whole_under_fsdp(model, dtype):
    """Return the bytes of the parameters that are whole at one time, as they multiply: the head, a
    table, the block at work and the next one. Of the rest a process holds its share."""
    n = count_parameters(model)
    two_blocks = 2 * n["body"] / model.config.n_layer
    return (2 if dtype == "bfloat16" else 4) * (n["input"] + n["head"] + two_blocks)


def whole_logits(config, micro_batch):
    """Return the bytes of a micro-batch's logits in float32 with their gradient."""
    return 2 * 4 * micro_batch * config.block_size * config.vocab_size


def print_costs(args, world_size, config, flops, say):
    """Print the memory of each of world_size processes and the time of the run."""
    parts = estimate_memory(config, args.micro_batch, args.dtype, args.checkpoint_activations,
                            args.accumulation, args.parallel, world_size, args.device)
    now, itself = peak_memory_gb(torch.device("cpu")), ""
    if args.device == "cpu" and now:
        itself = f"; Python and torch themselves {now:.2f}"
    say(f"memory of each of {world_size} processes ({args.parallel}), micro_batch "
        f"{args.micro_batch}, {args.dtype}, checkpoint_activations={args.checkpoint_activations}: "
        f"{sum(parts.values()) / 1e9:.2f} GB = "
        + " + ".join(f"{part} {size / 1e9:.2f}" for part, size in parts.items()) + itself)
    if args.compile:
        say("  compiled, the activations take less, and the logits exist whole: up to "
            f"{whole_logits(config, args.micro_batch) / 1e9:.2f} GB more")
    rate, source = expected_rate(args, world_size, flops)
    hours = args.max_targets / rate / 3600
    say(f"time for {args.max_targets:,} targets, {args.max_targets * flops:.3g} FLOPs: "
        f"{hours:,.1f} hours, {hours * world_size:,.1f} device-hours, at {rate:,.0f} targets/s "
        f"({source})")


def expected_rate(args, world_size, flops):
    """Return (targets per second of all processes, where that is from)."""
    if args.targets_per_second:
        return args.targets_per_second, "--targets_per_second"
    measured = [row["targets_per_second"] for row in read_log(args.out)
                if row.get("targets_per_second")]
    if measured:
        return np.median(measured), f"as measured in {args.out}"
    rate = world_size * 0.4 * DENSE_BF16_FLOPS["NVIDIA H200"] / flops
    return rate, f"assuming {world_size} H200 at 40 % of its peak"
