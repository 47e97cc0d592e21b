"""What a run costs, before it runs: parameters, FLOPs, memory, time."""

import os
import weakref

import numpy as np
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from machinery.machine import DENSE_BF16_FLOPS, peak_memory_gb
from machinery.runs import read_log
from machinery.settings import split_update
from model import INIT_STD, Decoder, FixedCodes


def count_parameters(model):
    """Return the numbers of values of a Decoder by group.

    Keys: input, body, head (trainable), buffers; trainable, stored, decayed (matrices), matmul
    (matrices used as such: all but a learned table, which is looked up).
    """
    n = {}
    for group, members in model.group_parameters().items():
        n[group] = sum(p.numel() for _, p in members)
    trainable = sum(n.values())
    buffers = sum(b.numel() for b in model.buffers())
    decayed = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    return n | {"buffers": buffers, "trainable": trainable, "stored": trainable + buffers,
                "decayed": decayed, "matmul": decayed - n["input"]}


def flops_per_target(model):
    """Return training FLOPs per target without recomputation: (matmuls 6N, causal attention).

    Attention is 12 L C T if every query met every key (PaLM, arXiv 2204.02311, appendix B); half is
    masked.
    """
    c = model.config
    return 6 * count_parameters(model)["matmul"], 6 * c.n_layer * c.n_embd * c.block_size


def print_model(config, weight_decay, say):
    """Print what the model is made of; return its FLOPs per target. Needs no memory for the weights."""
    with torch.device("meta"):
        model = Decoder(config)
    n = count_parameters(model)
    matmul, attention = flops_per_target(model)
    say(f"input {config.input}: {config.n_layer} layers x {config.n_embd}, {config.n_head} heads, FFN {config.n_ffn}, "
        f"context {config.block_size}, vocabulary {config.vocab_size:,}")
    if isinstance(codes := model.model.embed_tokens, FixedCodes):
        norm = codes.report()["squared_norms"]["mean"]
        say(f"  each id is {config.n_bits} fixed numbers, {config.lift}d {config.n_embd // config.n_bits} times; no trainable input value; "
            f"values {config.code_values}, scale {codes.scale:.6g}, mean squared norm {norm:.6g} (a learned row at the start: "
            f"{INIT_STD**2 * config.n_embd:.6g})" + (f"; A of seed {config.code_seed}, b {config.code_offset}" if config.input == "gf2" else ""))
    say(f"  trainable {n['trainable']:,} = input {n['input']:,} + body {n['body']:,} + head {n['head']:,}; "
        f"fixed buffers {n['buffers']:,}; stored {n['stored']:,}")
    say(f"  AdamW: weight decay {weight_decay} on {n['decayed']:,} (matrices), none on {n['trainable'] - n['decayed']:,}; "
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
