"""The input interfaces, side by side: how a token id becomes the decoder's first vector.

    x = table[t]                          learned    the control
    x = head[t]                           tied       the output matrix's own row
    x = R u[t]                            lowdim     K learned numbers an id
    x = scale R c(t)                      binary, gf2, random, sinusoid: nothing to train
    x = W c(t) + a                        projected  a learned matrix on the bits
    x = W2 relu(W1 c(t) + a)              alone      a learned network on the bits
    x = E[t] W                            factored   a narrow table, then a learned matrix
    x = sum_i A_i[digit_i(t)]             digits     a learned vector for each digit of the id
    x = sum_i p[t, i] A[h_i(t)]           hashed     k rows of a small table, weighted
    x = sum_i A_i[byte_i(t)] / sqrt(n)    spelling   a learned vector for each byte of the token

R lifts K numbers to C. The last six share trained values among ids, each as somebody has done it
before (the sources are below), so the price of an input is one axis, from nothing to a whole table.

A module takes ids (B, T), the dtype of the residual stream and the output matrix, and returns
(B, T, C). Its matrices start from N(0, input_std), or with the standard deviation that its `stds`
give, so that its vectors start with a root mean square of input_std whatever the formula (tied:
0.02, the output's); its biases start as made. `multiplied` names the matrices that it multiplies
by; rows of the others are looked up and added. A new interface is one more class in TRAINED, or one
more function in codes.FIXED.

Letters in shapes: B rows, T positions, C n_embd, V vocab_size, K n_code.
"""

import math

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

from codes import (
    FIXED,
    FRACTION_BITS,
    check_codebook,
    code_report,
    digit_rows,
    fixed_binary,
    hash_rows,
    spelling_codes,
)

INIT_STD = 0.02  # of every matrix and the learned table, but for the projections into the residual


def lift(x, config):
    """Return K numbers an id (..., K) as C: (0..K-1, 0..K-1, ...), the paper's R, C / K identities.

    interleave, (0,0,..,1,1,..), has the same shape and is another model: each head gets whole bits.
    """
    n_tile = config.n_embd // config.n_code
    if config.lift == "tile":
        return x.repeat(*[1] * (x.dim() - 1), n_tile)
    return x.repeat_interleave(n_tile, -1)


class LearnedTable(nn.Embedding):
    """The control: a trainable table [V, C], N(0, input_std), decayed like every matrix."""

    def __init__(self, config):
        super().__init__(config.vocab_size, config.n_embd)

    def forward(self, idx, dtype, output_matrix):
        return super().forward(idx).to(dtype)


class TiedTable(nn.Module):
    """The output matrix's own row: no value of its own, drawn and decayed as the output is."""

    def __init__(self, config):
        super().__init__()

    def forward(self, idx, dtype, output_matrix):
        return F.embedding(idx, output_matrix).to(dtype)


class LowDimTable(nn.Embedding):
    """Learned numbers [V, K], N(0, input_std), through the codes' lift: as few, free to move."""

    def __init__(self, config):
        super().__init__(config.vocab_size, config.n_code)
        self.config = config

    def forward(self, idx, dtype, output_matrix):
        return lift(super().forward(idx).to(dtype), self.config)


class FixedCodes(nn.Module):
    """Fixed codes, lifted to the model's width: x = scale R c(t) (the paper, "Method": scale 1).

    No trainable value. The codebook is a persistent integer buffer [V, K]: a checkpoint carries its
    own codes, no change of the model's dtype can merge two of them, and the optimizer never sees
    them. With an all-zero code, and bits as 0 and 1, x = 0: hence with an empty context hidden
    states 0, logits 0 and a loss of exactly ln V.
    """

    def __init__(self, config):
        super().__init__()
        self.config = config
        width = [config.code_width] if config.code_width else []
        made = FIXED[config.input](config.vocab_size, config.code_seed, config.code_offset, *width)
        arrays = check_codebook(config.input, made, config.vocab_size, config.n_code)
        codebook = torch.from_numpy(arrays["codebook"])
        self.unit = 2.0**-FRACTION_BITS if codebook.dtype == torch.int32 else 1.0
        self.scale = 1.0
        if config.code_scale == "matched":
            learned = INIT_STD**2 * config.n_embd  # the mean squared norm of its rows at the start
            self.scale = math.sqrt(learned / self.squared_norms(codebook).mean())
        else:
            self.scale = float(config.code_scale)
        for name, array in arrays.items():
            if not (name == "codebook" and config.table_free):
                self.register_buffer(name, torch.from_numpy(array))

    def forward(self, idx, dtype, output_matrix):
        codes = self.compute(idx) if self.config.table_free else self.codebook[idx]  # (B, T, K)
        return lift(self.values(codes).to(dtype), self.config)

    def values(self, codes):
        """Return the numbers that integer codes (..., K) stand for, always in float32."""
        x = codes.float() * self.unit
        if self.config.code_values == "pm1":
            x = 2 * x - 1
        return x * self.scale

    def compute(self, idx):
        """Return the bits (..., K) of ids (...) by shifts, for gf2 parities, not by a look-up."""
        places = torch.arange(self.config.n_bits, device=idx.device)
        if self.config.input == "binary":
            return (idx[..., None] >> places) & 1
        masks = (self.matrix.long() << places).sum(1)  # row i of A as an integer
        x = idx[..., None] & masks  # bit i of A c is the parity of this
        for shift in (8, 4, 2, 1):  # fold the K <= 16 bits to their XOR
            x = x ^ (x >> shift)
        return (x & 1) ^ self.offset.long()

    def squared_norms(self, codes):
        """Return the squared norms of the input vectors of integer codes [V, K]: float32 [V]."""
        return self.values(codes).square().sum(1) * (self.config.n_embd // self.config.n_code)

    def report(self):
        """Return as plain values: codes.code_report for bits, and the squared norms of all ids."""
        ids = torch.arange(self.config.vocab_size)
        codes = self.compute(ids) if self.config.table_free else self.codebook
        squared = self.squared_norms(codes).numpy()
        counts, edges = np.histogram(squared, bins=40)
        facts = code_report(codes.numpy().astype(np.uint8)) if self.unit == 1 else {}
        facts["squared_norms"] = {
            "mean": float(squared.mean()), "min": float(squared.min()), "max": float(squared.max()),
            "histogram": {"edges": edges.tolist(), "counts": counts.tolist()}}
        return facts


# --- The id's bits, -1 and 1, through something learned

class Projected(nn.Module):
    """x = W c(t) + a, with W [C, K] and a [C]: C (K + 1) values, 34,816 at the paper's size.

    W starts from N(0, input_std / sqrt(K)), a at 0. MaskBit's input, arXiv 2409.16211, there for
    the bits of image tokens.
    """
    multiplied = ("weight",)

    def __init__(self, config):
        super().__init__()
        K, C = config.n_code, config.n_embd
        self.register_buffer("codebook", bits_of(config))
        self.weight, self.bias = nn.Parameter(torch.empty(C, K)), nn.Parameter(torch.zeros(C))
        self.stds = {"weight": config.input_std / math.sqrt(K)}

    def forward(self, idx, dtype, output_matrix):
        signs = 2 * self.codebook[idx].to(dtype) - 1  # (B, T, K)
        return F.linear(signs, self.weight, self.bias).to(dtype)


class Alone(nn.Module):
    """x = W2 relu(W1 c(t) + a), with W1 [n, K], a [n] and W2 [C, n], n = inner_width: n (K + 1 + C)
    values, 264,320 at the paper's size and n = 128.

    W1 starts from N(0, 1 / sqrt(K)), a at 0, W2 from N(0, input_std sqrt(2 / n)), for relu halves
    the mean square. After ALONE, arXiv 2004.12073, whose fixed codes are sums of random masks.
    """
    multiplied = ("up", "down")

    def __init__(self, config):
        super().__init__()
        K, n, C = config.n_code, config.inner_width, config.n_embd
        self.register_buffer("codebook", bits_of(config))
        self.up, self.bias = nn.Parameter(torch.empty(n, K)), nn.Parameter(torch.zeros(n))
        self.down = nn.Parameter(torch.empty(C, n))
        self.stds = {"up": 1 / math.sqrt(K), "down": config.input_std * math.sqrt(2 / n)}

    def forward(self, idx, dtype, output_matrix):
        signs = 2 * self.codebook[idx].to(dtype) - 1  # (B, T, K)
        return F.linear(F.relu(F.linear(signs, self.up, self.bias)), self.down).to(dtype)


def bits_of(config):
    """Return the id's bits, and seeded tosses up to code_width: uint8 [V, K]."""
    made = fixed_binary(config.vocab_size, config.code_seed, config.code_offset, config.code_width)
    return torch.from_numpy(made["codebook"])


# --- Learned rows that ids share

class Factored(nn.Module):
    """x = E[t] W, with E [V, r] and W [r, C], r = rank: r (V + C) values, 819,200 at the paper's
    size and r = 16, 6,553,600 at 128.

    E starts from N(0, input_std), W from N(0, 1 / sqrt(r)). ALBERT's, arXiv 1909.11942, without its
    bias.
    """
    multiplied = ("lift",)

    def __init__(self, config):
        super().__init__()
        r = config.rank
        self.weight = nn.Parameter(torch.empty(config.vocab_size, r))
        self.lift = nn.Parameter(torch.empty(r, config.n_embd))
        self.stds = {"lift": 1 / math.sqrt(r)}

    def forward(self, idx, dtype, output_matrix):
        return (F.embedding(idx, self.weight).to(dtype) @ self.lift).to(dtype)


def sum_rows(matrix, rows, weights=None):
    """Return sum_i weights[..., i] matrix[rows[..., i]], (B, T, C), without making (B, T, n, C).

    Args:
        rows, weights: int64 and float (B, T, n); weights are 1 unless given.
    """
    B, T, n = rows.size()
    if weights is not None:
        weights = weights.reshape(-1, n).to(matrix.dtype)
    x = F.embedding_bag(rows.reshape(-1, n), matrix, mode="sum", per_sample_weights=weights)
    return x.view(B, T, -1)


class Digits(nn.Module):
    """x = sum_i A_i[digit_i(t)]: the M = ceil(log_b V) digits of the id, b = base, each with a
    table A_i [b, C] of its own: M b C values, at the paper's size 65,536 (b = 2), 131,072 (16),
    909,312 (222); b = V is the learned table.

    The A_i start from N(0, input_std / sqrt(M)). Compositional codes (arXiv 1711.01068), LightRNN
    (1610.09893) and quotient and remainder (1909.02107) are of this form, with other codes.
    """
    def __init__(self, config):
        super().__init__()
        rows = digit_rows(config.vocab_size, config.base)  # [V, M]
        M = rows.shape[1]
        self.register_buffer("rows", torch.from_numpy(rows))
        self.weight = nn.Parameter(torch.empty(M * config.base, config.n_embd))
        self.stds = {"weight": config.input_std / math.sqrt(M)}

    def forward(self, idx, dtype, output_matrix):
        return sum_rows(self.weight, self.rows[idx]).to(dtype)


class Hashed(nn.Module):
    """x = sum_i p[t, i] A[h_i(t)]: k = hashes drawn rows of one table A [B, C], B = buckets,
    weighted by p [V, k]: k V + B C values, 2,195,456 at the paper's size, k = 2 and B = 1,024.

    A starts from N(0, input_std), p from N(0, 1 / sqrt(k)): p tells ids of the same rows apart from
    the start. Hash embeddings, arXiv 1709.03933 (there p starts near 0). The hashes are drawn with
    code_seed, for multiplicative ones modulo a power of 2 collide all together (CANINE's, arXiv
    2103.06874, give 16,384 codes for 49,152 ids).
    """
    def __init__(self, config):
        super().__init__()
        V, k = config.vocab_size, config.hashes
        rows = hash_rows(V, k, config.buckets, config.code_seed)
        self.register_buffer("rows", torch.from_numpy(rows))
        self.weight = nn.Parameter(torch.empty(config.buckets, config.n_embd))
        self.importance = nn.Parameter(torch.empty(V, k))
        self.stds = {"importance": 1 / math.sqrt(k)}

    def forward(self, idx, dtype, output_matrix):
        return sum_rows(self.weight, self.rows[idx], F.embedding(idx, self.importance)).to(dtype)


class Spelling(nn.Module):
    """x = sum_{i < n} A_i[byte_i(t)] / sqrt(n): the token's n bytes, each with a table A_i
    [256, C] of its position: 256 positions C values, 16,777,216 at the paper's size, 32 positions.

    The A_i start from N(0, input_std). Kronecker embeddings, arXiv 2605.29459: a fixed code,
    one-hot in (position, byte) and normalised, and one learned projection. Longer tokens are cut,
    and told apart by codes.spelling_codes. The codes are a buffer: a checkpoint brings its own.

    Args:
        spellings: the bytes of each id, V of them; without them an id is spelt as its number.
    """
    def __init__(self, config, spellings=None):
        super().__init__()
        spellings = spellings or [b"%d" % t for t in range(config.vocab_size)]
        codes, _ = spelling_codes(spellings, config.positions)  # [V, positions], -1 after the end
        self.register_buffer("codes", torch.from_numpy(codes))
        self.weight = nn.Parameter(torch.empty(256 * config.positions, config.n_embd))

    def forward(self, idx, dtype, output_matrix):
        codes = self.codes[idx]  # (B, T, positions)
        there = codes >= 0
        first_rows = 256 * torch.arange(codes.size(-1), device=idx.device)
        rows = first_rows + codes.clamp(min=0)
        weights = there / there.sum(-1, keepdim=True).sqrt()
        return sum_rows(self.weight, rows, weights).to(dtype)


TRAINED = dict(learned=LearnedTable, tied=TiedTable, lowdim=LowDimTable, projected=Projected,
               alone=Alone, factored=Factored, digits=Digits, hashed=Hashed, spelling=Spelling)
INPUTS = (*TRAINED, *FIXED)
BITS = ("binary", "gf2")  # the fixed codes that consist of bits
LIFTED = ("lowdim", *FIXED)  # whose K numbers are repeated to fill C
# The inputs for which a field of ModelConfig has a meaning.
ONLY_FOR = {"code_values": BITS, "table_free": BITS, "code_offset": ("gf2",),
            "code_scale": tuple(FIXED), "lift": LIFTED,
            "code_width": ("binary", "random", "sinusoid", "lowdim", "projected", "alone"),
            "input_std": tuple(name for name in TRAINED if name != "tied"),
            "base": ("digits",), "rank": ("factored",), "inner_width": ("alone",),
            "hashes": ("hashed",), "buckets": ("hashed",), "positions": ("spelling",)}

INPUT_FIELDS = ("input", "code_seed", *ONLY_FOR)  # all of ModelConfig that an input is made of


def build_input(config, spellings=None):
    """Return the module of config.input; spellings are the bytes of each id, for the one of bytes.

    Raises ValueError for codes that cannot be.
    """
    if config.input == "spelling":
        return Spelling(config, spellings)
    return TRAINED.get(config.input, FixedCodes)(config)
