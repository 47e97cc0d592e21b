"""The decoder: a Llama-style language model whose input is a trainable table or a fixed token code.

    idx (B, T) token ids
      -> input interface    learned: a row of a trainable V x C table
                            binary:  the id's K-bit code, tiled C / K times        nothing to train
                            gf2:     the same code recoded by A c + b over GF(2)   nothing to train
                            and the others, all of them in inputs.py
      -> n_layer x Block    x += attention(norm(x));  x += swiglu(norm(x))
      -> norm -> lm_head    logits (B, T, V), an output matrix of its own (untied)

Everything after the first arrow is the same for every interface, down to the initial weights (the
paper, "Method"). Different from nanoGPT: RMSNorm, RoPE, SwiGLU, no biases, a final projection that
shares nothing with the input. kernels.py holds faster forms of two formulae, named where used.

Letters in shapes: B rows, T positions, C n_embd, H heads, D head_dim = C / H, V vocab_size,
K n_code, which is n_bits = ceil(log2 V) unless --code_width says more. Parameters carry the names
of a Hugging Face Llama, so exporting renames nothing.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from codes import CODE_SEED, check_seed, min_bits, parse_offset
from inputs import INIT_STD, INPUTS, LIFTED, ONLY_FOR, build_input
from kernels import NO_FLOAT64, LinearCrossEntropy, attend, selective_contexts

CHOICES = {"input": INPUTS, "ffn": ("swiglu", "gelu"), "code_values": ("01", "pm1"),
           "lift": ("tile", "interleave")}


@dataclass(frozen=True)
class ModelConfig:
    """Every size of the decoder; the defaults are the paper's 1.7B model.

    Raises ValueError for sizes that cannot be.
    """
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
    code_scale: str = "1"       # fixed codes: a factor, or matched: the learned rows' mean norm
    lift: str = "tile"          # how K numbers fill C: tile (the paper), or interleave
    table_free: bool = False    # binary, gf2: compute the codes from the ids, keep no codebook
    code_width: int = 0         # K, numbers an id; 0 is ceil(log2 V), the fewest
    input_std: float = INIT_STD  # trained inputs: root mean square of their vectors at the start
    base: int = 16              # digits: of the numbers that ids are written as
    rank: int = 16              # factored: width of the narrow table
    inner_width: int = 128      # alone: of the network on the code
    hashes: int = 2             # hashed: rows an id adds up
    buckets: int = 1024         # hashed: rows there are
    positions: int = 32         # spelling: bytes of a token that are told apart
    norm_eps: float = 1e-5      # the paper does not state it
    rope_theta: float = 10_000.0

    @property
    def n_bits(self):
        return min_bits(self.vocab_size)

    @property
    def n_code(self):
        """The numbers K of an id's code."""
        return self.code_width or self.n_bits

    def __post_init__(self):
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                listed = ", ".join(choices) if name == "input" else " or ".join(choices)
                one_of = "one of " if name == "input" else ""
                raise ValueError(f"{name}={value}: expected {one_of}{listed}")
        for name, inputs in ONLY_FOR.items():
            value = getattr(self, name)
            if value != getattr(ModelConfig, name) and self.input not in inputs:
                raise ValueError(f"{name}={value} has no meaning for input={self.input}, "
                                 f"only for {', '.join(inputs)}")
        if self.code_scale != "matched" and not positive(self.code_scale):
            raise ValueError(f"code_scale={self.code_scale}: expected matched or a number above 0")
        for name in ("input_std", "norm_eps", "rope_theta"):
            if not positive(getattr(self, name)):
                raise ValueError(f"{name}={getattr(self, name)}: expected a number above 0")
        if self.input == "digits" and not 2 <= self.base <= self.vocab_size:
            raise ValueError(f"base={self.base}: expected 2 to vocab_size={self.vocab_size}")
        check_seed(self.code_seed)
        if self.code_offset != "random":
            parse_offset(self.code_offset, self.n_bits)
        for name in ("block_size", "n_layer", "n_head", "n_embd", "n_ffn", "rank", "inner_width",
                     "hashes", "buckets", "positions"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: expected 1 or more")
        self.check_width()

    def check_width(self):
        """Raise ValueError unless heads get an even width, for RoPE, and codes whole copies."""
        if self.n_code < self.n_bits:
            raise ValueError(f"code_width={self.code_width}: expected at least n_bits="
                             f"{self.n_bits} (vocab_size={self.vocab_size}), or 0 for that")
        if self.code_width and self.table_free:
            raise ValueError(f"code_width={self.code_width}, table_free=True: only the id's own "
                             "bits can be computed from it; leave one out")
        factors = {f"2 x n_head={self.n_head}": 2 * self.n_head}
        of_bits = f"n_bits={self.n_bits} (vocab_size={self.vocab_size})"
        if self.input in LIFTED:
            factors[f"code_width={self.n_code}" if self.code_width else of_bits] = self.n_code
        unit = math.lcm(*factors.values())
        if self.n_embd % unit:
            low = self.n_embd // unit * unit
            fits = " or ".join(str(size) for size in (low, low + unit) if size)
            raise ValueError(f"n_embd={self.n_embd}: expected a multiple of "
                             f"{' and of '.join(factors)}; {fits} would do")


def positive(text):
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False


# --- The parts of a block

class RMSNorm(nn.Module):
    def __init__(self, n_embd, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n_embd))
        self.eps = eps

    def forward(self, x):
        # Cast here, once: autocast would make, and keep for the backward pass, a copy for each
        # projection that reads x.
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(dtype)


def rope_tables(positions, head_dim, theta):
    """Return (cos, sin), float32 [..., D / 2], of the rotary angles at integer positions [...].

    RoFormer, arXiv 2104.09864. Made afresh in each forward, so there is no buffer for a cast to
    bfloat16 to ruin. The angles are float64: at position 2047 float32 would be off by 1e-4. Under a
    millionth of a step's work.
    """
    here = positions.device
    there = torch.device("cpu") if here.type in NO_FLOAT64 else here
    dims = torch.arange(0, head_dim, 2, dtype=torch.float64, device=there)
    angles = positions.to(there).double()[..., None] * theta ** (-dims / head_dim)
    return angles.cos().float().to(here), angles.sin().float().to(here)


def apply_rope(x, cos, sin):
    """Rotate x (B, H, T, D) in float32; the halves of D pair up (Llama's layout)."""
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
        q = self.q_proj(x).view(B, T, -1, self.head_dim).transpose(1, 2)  # (B, H, T, D)
        k = self.k_proj(x).view(B, T, -1, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(B, T, -1, self.head_dim).transpose(1, 2)
        q, k = apply_rope(q, *rope), apply_rope(k, *rope)
        if cache:  # None: no cache; {}: the first call, nothing in it yet
            past = cache["k"].size(2)
            if mask is None:  # is_causal's triangle is top left: wrong with more keys than queries
                mask = torch.ones(T, past + T, dtype=torch.bool, device=x.device).tril(past)
            k, v = torch.cat((cache["k"], k), dim=2), torch.cat((cache["v"], v), dim=2)
        if cache is not None:
            cache.update(k=k, v=v)
        y = attend(q, k, v, mask)  # F.scaled_dot_product_attention, faster on a CPU
        return self.o_proj(y.transpose(1, 2).reshape(B, T, C))


class SwiGLU(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.n_embd, config.n_ffn, bias=False)
        self.up_proj = nn.Linear(config.n_embd, config.n_ffn, bias=False)
        self.down_proj = nn.Linear(config.n_ffn, config.n_embd, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class GELU(nn.Module):
    """The predecessor's feed-forward network."""

    def __init__(self, config):
        super().__init__()
        self.up_proj = nn.Linear(config.n_embd, config.n_ffn, bias=False)
        self.down_proj = nn.Linear(config.n_ffn, config.n_embd, bias=False)

    def forward(self, x):
        return self.down_proj(F.gelu(self.up_proj(x)))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.input_layernorm = RMSNorm(config.n_embd, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.n_embd, config.norm_eps)
        self.mlp = SwiGLU(config) if config.ffn == "swiglu" else GELU(config)

    def forward(self, x, rope, cache=None, mask=None, checkpoint_activations="none"):
        # The reentrant kind needs an input that requires grad. Fixed codes do not, and it would
        # give the body no gradient at all, with only a warning.
        if checkpoint_activations == "block" and torch.is_grad_enabled():
            # Runs this method again, with "none"; training only, so no cache and no mask.
            return checkpoint(self, x, rope, use_reentrant=False)
        if checkpoint_activations == "selective" and torch.is_grad_enabled():
            return checkpoint(self, x, rope, use_reentrant=False, context_fn=selective_contexts)
        x = x + self.self_attn(self.input_layernorm(x), rope, cache, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


# --- The decoder

class Role(NamedTuple):
    """What a parameter is to the model: all that is decided by its name and shape."""
    group: str        # input, body or head
    std: float        # of the normal distribution that it starts from; None: it stays as made
    decays: bool      # matrices do, and gains and biases do not
    multiplies: bool  # a matrix product for each target; rows of a table are looked up


class Decoder(nn.Module):
    """The whole model.

    Weights are drawn from seed on the CPU, the input's last, so that every interface starts from
    the same body and head. spellings: the bytes of each id, for the input made of them.
    """

    def __init__(self, config, seed=1, spellings=None):
        super().__init__()
        self.config = config
        # block: recompute blocks in the backward pass; selective: only what is cheap in them
        self.checkpoint_activations = "none"
        self.model = nn.ModuleDict(dict(
            embed_tokens=build_input(config, spellings),
            layers=nn.ModuleList(Block(config) for _ in range(config.n_layer)),
            norm=RMSNorm(config.n_embd, config.norm_eps)))
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if self.lm_head.weight.device.type != "meta":
            self.check_input()
            self.init_weights(torch.Generator().manual_seed(seed))

    def roles(self):
        """Return {name: Role} of the parameters.

        Matrices start from N(0, 0.02), o_proj and down_proj from N(0, 0.02 / sqrt(2 n_layer)), for
        a block adds twice to the residual stream (GPT-2); the input's as the interface says.
        """
        table, roles = self.model.embed_tokens, {}
        stds, multiplied = getattr(table, "stds", {}), getattr(table, "multiplied", ())
        for name, p in self.named_parameters():
            matrix, own = p.dim() >= 2, name.removeprefix("model.embed_tokens.")
            if own != name:
                group, std = "input", stds.get(own, self.config.input_std)
                multiplies = own in multiplied
            else:
                group, std = "head" if "lm_head" in name else "body", INIT_STD
                multiplies = matrix
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                std = INIT_STD / math.sqrt(2 * self.config.n_layer)
            roles[name] = Role(group, std if matrix else None, matrix, multiplies)
        return roles

    def check_input(self):
        """Raise ValueError unless the input interface gives floats (B, T, C)."""
        x = self.model.embed_tokens(torch.tensor([[0, 1]]), torch.float32, self.lm_head.weight)
        expected = [1, 2, self.config.n_embd]
        if list(x.shape) != expected or x.dtype != torch.float32:
            raise ValueError(f"input={self.config.input}: of ids [1, 2] it makes {x.dtype} "
                             f"{list(x.shape)}: expected torch.float32 {expected}")

    def init_weights(self, generator):
        """Draw what roles names from its normal distribution, the input last."""
        roles, parameters = self.roles(), dict(self.named_parameters())
        for name in sorted(roles, key=lambda name: roles[name].group == "input"):
            if roles[name].std is not None:
                nn.init.normal_(parameters[name], std=roles[name].std, generator=generator)

    def forward(self, idx, targets=None, cache=None, positions=None, mask=None, select=None):
        """Return logits, and the mean loss if there are targets.

        Args:
            idx: int64 (B, T) token ids, T <= block_size counted with what the cache holds.
            targets: int64 (B, T), shifted: targets[b, t] follows idx[b, t]; -1 is not counted.
            cache: from new_cache(); keys and values (B, H, past, D) of the positions that idx
                continues. It grows by T.
            positions: int64 (B, T), where they are not past, past + 1, ... in every row.
            mask: bool (B, 1, T, past + T), true where a query may see a key; causal unless given.
            select: (rows, columns), int64 [n] each: logits (n, V) there only; without targets.
        Returns: (logits (B, T, V), None), or (None, loss) where there are targets: then the logits
            never exist all at once. The loss is float32, nats per target; 0 where none counts.
        """
        B, T = idx.size()
        past = cache[0]["k"].size(2) if cache and cache[0] else 0
        if positions is None:
            block_size = self.config.block_size
            assert past + T <= block_size, f"{past + T} positions: block_size is {block_size}"
            positions = torch.arange(past, past + T, device=idx.device)
        else:
            positions = positions[:, None]  # (B, 1, T): the same for every head
        head_dim = self.config.n_embd // self.config.n_head
        rope = rope_tables(positions, head_dim, self.config.rope_theta)
        # The residual stream is float32 under autocast, else of the parameters' dtype.
        autocast = torch.is_autocast_enabled(idx.device.type)
        dtype = torch.float32 if autocast else self.lm_head.weight.dtype
        x = self.model.embed_tokens(idx, dtype, self.lm_head.weight)
        for i, block in enumerate(self.model.layers):
            x = block(x, rope, cache and cache[i], mask, self.checkpoint_activations)
        x = self.model.norm(x if select is None else x[select])
        if targets is None:
            return self.lm_head(x), None
        return None, self.loss(x.flatten(0, 1), targets.flatten())

    def loss(self, x, targets):
        """Return cross_entropy(lm_head(x).float(), targets, ignore_index=-1), the mean, in either
        form; of hidden states x (N, C) and targets (N). 0 where none counts."""
        # The compiler fuses float32 into the softmax and its gradient.
        if torch.compiler.is_compiling():
            logits = self.lm_head(x).float()
            total = F.cross_entropy(logits, targets, ignore_index=-1, reduction="sum")
            return total / (targets >= 0).sum().clamp(min=1)
        with torch.autocast(x.device.type, enabled=False):  # the same, a few logits at a time
            weight = self.lm_head.weight
            return LinearCrossEntropy.apply(x, weight, targets, torch.is_grad_enabled())

    def new_cache(self):
        """Return an empty key/value cache: a dict for each block."""
        return [{} for _ in self.model.layers]

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, stop_id=None,
                 generator=None, n_ids=None):
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
            if idx.size(1) > T:  # a full window starts again from its last half: positions move
                idx = new = idx[:, -(T // 2 + 1):]
                cache = self.new_cache()


def pick(logits, temperature, top_k, generator):
    """Return the next ids (B, 1) from logits (B, V)."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    if top_k is not None and top_k < logits.size(-1):
        smallest = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, -math.inf)
    # Subtracting the maximum first keeps a tiny temperature finite.
    probs = F.softmax((logits - logits.amax(-1, keepdim=True)) / temperature, dim=-1)
    return torch.multinomial(probs, 1, generator=generator)
