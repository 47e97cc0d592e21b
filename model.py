"""The decoder: a Llama-style language model whose input is either a trainable table or a fixed minimal token code.

    idx (B, T) token ids
      -> input interface    learned: a row of a trainable V x C table
                            binary:  the id's K-bit code, tiled C / K times          no trainable value
                            gf2:     the same code recoded by A c + b over GF(2)     no trainable value
                            random, sinusoid: fixed continuous codes; lowdim: K learned numbers an id; tied: the output's row
      -> n_layer x Block    x += attention(norm(x));  x += swiglu(norm(x))
      -> norm -> lm_head    logits (B, T, V), an output matrix of its own (untied)

Everything after the first arrow is the same for every interface, down to the initial weights (the paper, "Method").
Different from nanoGPT: RMSNorm, RoPE, SwiGLU, no biases, a final projection that shares nothing with the input.

Letters in shapes: B rows, T positions, C n_embd, H heads, D head_dim = C / H, V vocab_size, K n_bits = ceil(log2 V).
Parameters carry the names of a Hugging Face Llama, so exporting renames nothing.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from codes import CODE_SEED, FIXED, FRACTION_BITS, code_report, min_bits
from torch.utils.checkpoint import checkpoint

from kernels import LinearCrossEntropy, attend, selective_contexts

INPUTS = ("learned", "tied", "lowdim", *FIXED)
BITS = ("binary", "gf2")  # the codes that consist of bits
INIT_STD = 0.02  # every matrix and the learned table; the projections back into the residual stream are scaled down


@dataclass(frozen=True)
class ModelConfig:
    """Every size of the decoder; the defaults are the paper's 1.7B model. Raises ValueError for sizes that cannot be."""
    input: str = "binary"
    vocab_size: int = 49_152
    block_size: int = 2048
    n_layer: int = 24
    n_head: int = 32
    n_embd: int = 2048
    n_ffn: int = 8192
    ffn: str = "swiglu"         # or gelu, the predecessor's (arXiv 2605.09751)
    code_seed: int = CODE_SEED  # gf2: which matrix A; random: which numbers
    code_offset: str = "0"      # gf2: b, as codes.draw_recoding takes it
    code_values: str = "01"     # binary, gf2: bits as 0 and 1 (the paper), or pm1: -1 and 1
    code_scale: str = "1"       # fixed codes: a factor, or matched: the learned table's mean squared norm at the start
    lift: str = "tile"          # how K numbers fill C: tile (the paper), or interleave
    table_free: bool = False    # binary, gf2: compute the codes from the ids, keep no codebook
    norm_eps: float = 1e-5      # the paper does not state it
    rope_theta: float = 10_000.0

    def __post_init__(self):
        if self.input not in INPUTS:
            raise ValueError(f"input={self.input}: expected one of {', '.join(INPUTS)}")
        for name, choices in (("ffn", ("swiglu", "gelu")), ("code_values", ("01", "pm1")), ("lift", ("tile", "interleave"))):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}={getattr(self, name)}: expected {' or '.join(choices)}")
        for name, inputs in (("code_values", BITS), ("table_free", BITS), ("code_offset", ("gf2",)), ("code_scale", tuple(FIXED)),
                             ("lift", (*FIXED, "lowdim"))):
            if getattr(self, name) != getattr(ModelConfig, name) and self.input not in inputs:
                raise ValueError(f"{name}={getattr(self, name)} has no meaning for input={self.input}, only for {', '.join(inputs)}")
        if self.code_scale != "matched" and not positive(self.code_scale):
            raise ValueError(f"code_scale={self.code_scale}: expected matched or a number above 0")
        for name in ("block_size", "n_layer", "n_head", "n_embd", "n_ffn"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: expected 1 or more")
        factors = {f"2 x n_head={self.n_head}": 2 * self.n_head}  # heads need an even width each for RoPE
        if self.input not in ("learned", "tied"):  # codes need a whole number of copies
            factors[f"n_bits={self.n_bits} (vocab_size={self.vocab_size})"] = self.n_bits
        if self.n_embd % (unit := math.lcm(*factors.values())):
            low = self.n_embd // unit * unit
            fits = " or ".join(str(size) for size in (low, low + unit) if size)
            raise ValueError(f"n_embd={self.n_embd}: expected a multiple of {' and of '.join(factors)}; {fits} would do")

    @property
    def n_bits(self):
        return min_bits(self.vocab_size)


def positive(text):
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False


# ----------------------------------------------------------------------------------------------------------------------
# The input interfaces, side by side: (B, T) token ids -> (B, T, C) input vectors

def lift(x, config):
    """Return K numbers an id (..., K) as C: (0..K-1, 0..K-1, ...), the paper's R, a stack of C / K identity blocks.

    interleave, (0,0,..,1,1,..), has the same shape and is another model: it gives a bit to each head whole.
    """
    n_tile = config.n_embd // config.n_bits
    return x.repeat(*[1] * (x.dim() - 1), n_tile) if config.lift == "tile" else x.repeat_interleave(n_tile, -1)


class FixedCodes(nn.Module):
    """Fixed codes, lifted to the model's width: x = scale R c(t) (the paper, "Method": scale 1). No trainable value.

    The codebook is a persistent integer buffer [V, K]: a checkpoint carries its own codes, no change of the model's dtype
    can merge two of them, and the optimizer never sees them. With an all-zero code x = 0, hence with an empty context
    hidden states 0, logits 0 and a loss of exactly ln V.
    """

    def __init__(self, config):
        super().__init__()
        self.config = config
        arrays = FIXED[config.input](config.vocab_size, config.code_seed, config.code_offset)
        self.unit = 2.0**-FRACTION_BITS if arrays["codebook"].dtype == "int16" else 1.0
        self.scale = 1.0 if config.code_scale == "matched" else float(config.code_scale)
        if config.code_scale == "matched":
            self.scale = math.sqrt(INIT_STD**2 * config.n_embd / self.squared_norms(torch.from_numpy(arrays["codebook"])).mean())
        for name, array in arrays.items():
            if not (name == "codebook" and config.table_free):
                self.register_buffer(name, torch.from_numpy(array))

    def values(self, codes):
        """Return the numbers that integer codes (..., K) stand for, in float32 whatever the model's dtype."""
        x = codes.float() * self.unit
        return (2 * x - 1 if self.config.code_values == "pm1" else x) * self.scale

    def compute(self, idx):
        """Return the bits (..., K) of ids (...) by shifts, and for gf2 parities, instead of looking them up."""
        places = torch.arange(self.config.n_bits, device=idx.device)
        if self.config.input == "binary":
            return idx[..., None] >> places & 1
        masks = (self.matrix.long() << places).sum(1)  # row i of A as an integer: bit i of A c is the parity of mask AND id
        x = idx[..., None] & masks
        for shift in (8, 4, 2, 1):
            x = x ^ x >> shift
        return x & 1 ^ self.offset.long()

    def forward(self, idx, dtype, head):
        codes = self.compute(idx) if self.config.table_free else self.codebook[idx]
        return lift(self.values(codes).to(dtype), self.config)

    def squared_norms(self, codes):
        """Return the squared norms of the input vectors of integer codes [V, K]: float32 [V]."""
        return self.values(codes).square().sum(1) * (self.config.n_embd // self.config.n_bits)

    def report(self):
        """Return the facts of these codes as plain values: codes.code_report for bits, and the squared norms of all ids."""
        V = self.config.vocab_size
        codes = self.compute(torch.arange(V)) if self.config.table_free else self.codebook
        squared = self.squared_norms(codes).numpy()
        counts, edges = np.histogram(squared, bins=40)
        facts = code_report(codes.numpy().astype(np.uint8)) if self.unit == 1 else {}
        return {**facts, "squared_norms": {"mean": float(squared.mean()), "min": float(squared.min()), "max": float(squared.max()),
                                           "histogram": {"edges": edges.tolist(), "counts": counts.tolist()}}}


class LearnedTable(nn.Embedding):
    """The control: a trainable table [V, C], N(0, 0.02), decayed like every matrix."""

    def __init__(self, config):
        super().__init__(config.vocab_size, config.n_embd)

    def forward(self, idx, dtype, head):
        return super().forward(idx).to(dtype)


class LowDimTable(nn.Embedding):
    """Learned coordinates [V, K], N(0, 0.02), through the codes' lift: as few dimensions, but free to move."""

    def __init__(self, config):
        super().__init__(config.vocab_size, config.n_bits)
        self.config = config

    def forward(self, idx, dtype, head):
        return lift(super().forward(idx).to(dtype), self.config)


class TiedTable(nn.Module):
    """The output matrix's own row: no value of its own, N(0, 0.02) at the start and decayed once, as the output matrix is."""

    def __init__(self, config):
        super().__init__()

    def forward(self, idx, dtype, head):
        return F.embedding(idx, head).to(dtype)


def build_input(config):
    """Return the module that turns ids (B, T), a dtype and the head's matrix (V, C) into input vectors (B, T, C)."""
    return {"learned": LearnedTable, "lowdim": LowDimTable, "tied": TiedTable}.get(config.input, FixedCodes)(config)


# ----------------------------------------------------------------------------------------------------------------------
# The parts of a block

class RMSNorm(nn.Module):
    def __init__(self, n_embd, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n_embd))
        self.eps = eps

    def forward(self, x):
        # Cast here, once: autocast would make, and keep for the backward pass, a copy for each projection that reads x.
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(dtype)


def rope_tables(positions, head_dim, theta):
    """Return (cos, sin), float32 [..., D / 2], of the rotary angles at integer positions [...] (RoFormer, arXiv 2104.09864).

    Made afresh in each forward, so there is no buffer for a cast to bfloat16 to ruin. The angles are float64: at position
    2047 float32 would be off by 1e-4. Under a millionth of a step's work.
    """
    frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device) / head_dim)
    angles = positions.double()[..., None] * frequencies
    return angles.cos().float(), angles.sin().float()


def apply_rope(x, cos, sin):
    """Rotate x (B, H, T, D) by position in float32; the halves of D pair up (the Llama layout, not even and odd)."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat(((a * cos - b * sin).type_as(x), (b * cos + a * sin).type_as(x)), dim=-1)


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        C = config.n_embd
        self.head_dim = C // config.n_head
        self.q_proj = nn.Linear(C, C, bias=False)
        self.k_proj = nn.Linear(C, C, bias=False)
        self.v_proj = nn.Linear(C, C, bias=False)
        self.o_proj = nn.Linear(C, C, bias=False)

    def forward(self, x, rope, cache=None, mask=None):
        B, T, C = x.size()
        q, k, v = (proj(x).view(B, T, -1, self.head_dim).transpose(1, 2)  # (B, H, T, D)
                   for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k = apply_rope(q, *rope), apply_rope(k, *rope)
        if cache:
            if mask is None:  # is_causal aligns its triangle top left, which is wrong once there are more keys than queries
                mask = torch.ones(T, cache["k"].size(2) + T, dtype=torch.bool, device=x.device).tril(cache["k"].size(2))
            k, v = torch.cat((cache["k"], k), dim=2), torch.cat((cache["v"], v), dim=2)
        if cache is not None:
            cache.update(k=k, v=v)
        return self.o_proj(attend(q, k, v, mask).transpose(1, 2).reshape(B, T, C))


class GELU(nn.Module):
    """The predecessor's feed-forward network."""

    def __init__(self, config):
        super().__init__()
        self.up_proj = nn.Linear(config.n_embd, config.n_ffn, bias=False)
        self.down_proj = nn.Linear(config.n_ffn, config.n_embd, bias=False)

    def forward(self, x):
        return self.down_proj(F.gelu(self.up_proj(x)))


class SwiGLU(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.n_embd, config.n_ffn, bias=False)
        self.up_proj = nn.Linear(config.n_embd, config.n_ffn, bias=False)
        self.down_proj = nn.Linear(config.n_ffn, config.n_embd, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.input_layernorm = RMSNorm(config.n_embd, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.n_embd, config.norm_eps)
        self.mlp = SwiGLU(config) if config.ffn == "swiglu" else GELU(config)

    def forward(self, x, rope, cache=None, mask=None, checkpoint_activations="none"):
        if checkpoint_activations != "none" and torch.is_grad_enabled():
            # The reentrant kind needs an input that requires grad. Fixed codes do not, and it would give the body no
            # gradient at all, with only a warning.
            selective = dict(context_fn=selective_contexts) if checkpoint_activations == "selective" else {}
            return checkpoint(self, x, rope, use_reentrant=False, **selective)
        x = x + self.self_attn(self.input_layernorm(x), rope, cache, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


# ----------------------------------------------------------------------------------------------------------------------
# The decoder

class Decoder(nn.Module):
    """The whole model. Weights are drawn from seed on the CPU, the input table last, so that every interface starts from
    the same body and head."""

    def __init__(self, config, seed=1):
        super().__init__()
        self.config = config
        self.checkpoint_activations = "none"  # block: recompute blocks in the backward pass, selective: what is cheap in them
        self.model = nn.ModuleDict(dict(
            embed_tokens=build_input(config),
            layers=nn.ModuleList(Block(config) for _ in range(config.n_layer)),
            norm=RMSNorm(config.n_embd, config.norm_eps)))
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if self.lm_head.weight.device.type != "meta":
            self.init_weights(torch.Generator().manual_seed(seed))

    def init_weights(self, generator):
        """Draw every matrix from N(0, 0.02), o_proj and down_proj from N(0, 0.02 / sqrt(2 n_layer)); norm gains stay 1."""
        residual_std = INIT_STD / math.sqrt(2 * self.config.n_layer)  # two additions to the stream a block (GPT-2)
        for name, p in sorted(self.named_parameters(), key=lambda item: "embed_tokens" in item[0]):
            if p.dim() == 2:
                std = residual_std if name.endswith(("o_proj.weight", "down_proj.weight")) else INIT_STD
                nn.init.normal_(p, std=std, generator=generator)

    def forward(self, idx, targets=None, cache=None, positions=None, mask=None, select=None):
        """Return logits, and the mean loss if there are targets.

        Args:
            idx: int64 (B, T) token ids, T <= block_size counted with what the cache holds.
            targets: int64 (B, T), already shifted: targets[b, t] follows idx[b, t]; -1 is not counted.
            cache: from new_cache(); keys and values (B, H, past, D) of the positions that idx continues. It grows by T.
            positions: int64 (B, T), where they are not past, past + 1, ... in every row.
            mask: bool (B, 1, T, past + T), true where a query may see a key; causal unless given.
            select: (rows, columns), int64 [n] each: logits are made at these places only, (n, V).
        Returns: (logits (B, T, V), None), or (None, loss) where there are targets: then the logits never exist all at once.
            The loss is float32, nats per target; 0 where no target counts.
        """
        B, T = idx.size()
        past = cache[0]["k"].size(2) if cache and cache[0] else 0
        if positions is None:
            assert past + T <= self.config.block_size, f"{past + T} positions: block_size is {self.config.block_size}"
            positions = torch.arange(past, past + T, device=idx.device)
        else:
            positions = positions[:, None]  # (B, 1, T): the same for every head
        rope = rope_tables(positions, self.config.n_embd // self.config.n_head, self.config.rope_theta)
        # The residual stream is float32 under autocast, else of the parameters' dtype, for every interface.
        dtype = torch.float32 if torch.is_autocast_enabled(idx.device.type) else self.lm_head.weight.dtype
        x = self.model.embed_tokens(idx, dtype, self.lm_head.weight)
        for i, block in enumerate(self.model.layers):
            x = block(x, rope, None if cache is None else cache[i], mask, self.checkpoint_activations)
        x = self.model.norm(x if select is None else x[select])
        if targets is None:
            return self.lm_head(x), None
        return None, self.loss(x.flatten(0, 1), targets.flatten())

    def loss(self, x, targets):
        """Return the mean loss of final hidden states (N, C) against targets (N); -1 is not counted."""
        if torch.compiler.is_compiling():  # the compiler fuses float32 into the softmax and its gradient
            total = F.cross_entropy(self.lm_head(x).float(), targets, ignore_index=-1, reduction="sum")
            return total / (targets >= 0).sum().clamp(min=1)
        with torch.autocast(x.device.type, enabled=False):
            return LinearCrossEntropy.apply(x, self.lm_head.weight, targets, torch.is_grad_enabled())

    def new_cache(self):
        """Return an empty key/value cache: a dict for each block."""
        return [{} for _ in self.model.layers]

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, stop_id=None, generator=None, n_ids=None):
        """Yield the ids that continue a prompt, int64 (1, T), one by one.

        Args:
            temperature: 0 takes the most probable id; above 0 divides the logits before sampling.
            top_k: sample among the k most probable ids only.
            stop_id: end after yielding this id.
            generator: torch.Generator on the model's device, for a repeatable sample.
            n_ids: take ids below it only: a head may have more rows than the tokenizer has tokens.
        Raises ValueError for a negative temperature, top_k below 1 or an empty prompt.
        """
        if temperature < 0 or (top_k is not None and top_k < 1) or idx.size(1) == 0:
            raise ValueError(f"temperature={temperature}, top_k={top_k}, {idx.size(1)} prompt ids: "
                             "expected temperature >= 0, top_k >= 1 and a prompt")
        T = self.config.block_size
        idx = new = idx[:, -T:]
        cache = self.new_cache()
        for _ in range(max_new_tokens):
            logits = self(new, cache=cache)[0][:, -1, :n_ids].float()
            new = pick(logits, temperature, top_k, generator)
            yield new.item()
            if new.item() == stop_id:
                return
            idx = torch.cat((idx, new), dim=1)
            if idx.size(1) > T:  # a full window starts again from its last half: its positions have to move
                idx = new = idx[:, -(T + 1) // 2:]
                cache = self.new_cache()

    def group_parameters(self):
        """Return {"input": ..., "body": ..., "head": ...}: the parameters [(name, tensor), ...] by their place."""
        groups = {"input": [], "body": [], "head": []}
        for name, p in self.named_parameters():
            groups["input" if "embed_tokens" in name else "head" if "lm_head" in name else "body"].append((name, p))
        return groups

    def count(self):
        """Return the numbers of values by group: input, body, head (trainable), buffers; trainable, stored, decayed
        (matrices), matmul (matrices used as such: all but a learned table, which is looked up)."""
        sizes = {group: sum(p.numel() for _, p in members) for group, members in self.group_parameters().items()}
        buffers = sum(b.numel() for b in self.buffers())
        trainable = sum(sizes.values())
        decayed = sum(p.numel() for p in self.parameters() if p.dim() == 2)
        return sizes | {"buffers": buffers, "trainable": trainable, "stored": trainable + buffers,
                        "decayed": decayed, "matmul": decayed - sizes["input"]}

    def flops_per_target(self):
        """Return training FLOPs per target, forward and backward without recomputation: (matmuls 6N, causal attention).

        Attention is 12 L C T if every query met every key (PaLM, arXiv 2204.02311, appendix B); half is masked.
        """
        c = self.config
        return 6 * self.count()["matmul"], 6 * c.n_layer * c.n_embd * c.block_size


def pick(logits, temperature, top_k, generator):
    """Return the next ids (B, 1) from logits (B, V)."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    if top_k is not None and top_k < logits.size(-1):
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -math.inf)
    # Subtracting the maximum first keeps a tiny temperature finite.
    probs = F.softmax((logits - logits.amax(-1, keepdim=True)) / temperature, dim=-1)
    return torch.multinomial(probs, 1, generator=generator)


# ----------------------------------------------------------------------------------------------------------------------
# Checkpoints: out/RUN/step-00000250.pt, written by train.py. The number is the updates done.
