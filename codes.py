"""Integers to codes: the fixed token codes that replace a trainable input embedding table.

V = 49,152 token ids need only K = ceil(log2 V) = 16 bits, and 16 x 128 = 2048 is the model's width.
So a token id t can enter the decoder as its own binary code, repeated 128 times, with nothing to
train (the paper, section "Method"):

    binary    c_j(t) = floor(t / 2^j) mod 2     j = 0..K-1, little-endian: column 0 is the low bit
    gf2       g(t)   = A c(t) + b  (mod 2)      A invertible K x K over GF(2), b = 0 by default

Both are injective, so no two tokens are ever confused; A only changes which tokens look alike. Two
controls that the paper asks for are continuous: random and sinusoid codes of the same K numbers, no
two ids closer than MIN_DISTANCE.

A codebook is one integer array [V, K], so that no cast of the model can change it. FIXED names the
functions that make them; a new interface is one more function there.

Usage:
    python codes.py --vocab_size=49152 --code_seed=12345

Reads and writes nothing; arrays of bits are uint8, values {0, 1}. V = vocab_size, K = n_bits.
"""

import argparse

import numpy as np

MAX_VOCAB_SIZE = 65_536  # token ids are stored as uint16
CODE_SEED = 12345        # the paper's recoding matrix
MIN_WEIGHT = 4           # every row and column of A has at least this many ones (the paper)
MIN_DISTANCE = 0.1       # between any two continuous codes, after rounding to bfloat16
FRACTION_BITS = 12       # continuous codes are int32 multiples of 2^-12: +-8, in steps of 0.00024
MAX_DRAWS = 100_000      # of them are accepted, at K = 16 one in five, at K = 8 one in 600


# --- Binary codes

def min_bits(vocab_size):
    """Return K = ceil(log2 V), the fewest bits that give every id of a vocabulary its own code.

    Raises ValueError unless 2 <= vocab_size <= 65,536.
    """
    if not 2 <= vocab_size <= MAX_VOCAB_SIZE:
        raise ValueError(f"vocab_size={vocab_size}: expected 2 to {MAX_VOCAB_SIZE:,} "
                         "(ids are stored as uint16)")
    return (vocab_size - 1).bit_length()


def binary_codes(vocab_size, n_bits=None):
    """Return the little-endian binary code of every id: uint8 [V, n_bits], min_bits unless given.

    >>> binary_codes(6)[[1, 2, 5]]
    array([[1, 0, 0],
           [0, 1, 0],
           [1, 0, 1]], dtype=uint8)

    Raises ValueError if n_bits is too small to tell the ids apart.
    """
    fewest = min_bits(vocab_size)
    n_bits = fewest if n_bits is None else n_bits
    if n_bits < fewest:
        raise ValueError(f"n_bits={n_bits}: vocab_size={vocab_size} needs at least {fewest}")
    ids = np.arange(vocab_size, dtype=np.int64)
    shifted = ids[:, None] >> np.arange(n_bits)
    return (shifted & 1).astype(np.uint8)


def codes_to_ids(codes):
    """Return the integers whose little-endian codes are the rows of codes [..., K]: int64 [...]."""
    powers = 1 << np.arange(codes.shape[-1], dtype=np.int64)
    return codes.astype(np.int64) @ powers


# --- Linear algebra over GF(2): addition is XOR, so everything stays in integers

def gf2_eliminate(matrix):
    """Bring a 0/1 matrix [n, m] to reduced row echelon form over GF(2).

    Returns: (uint8 [n, m], rank). Real-number rank is not rank modulo 2: [[1,1,0],[0,1,1],[1,0,1]]
    has determinant 2 and GF(2) rank 2.
    """
    rows = np.array(matrix, dtype=np.uint8) & 1
    rank = 0
    for column in range(rows.shape[1]):
        pivots = np.flatnonzero(rows[rank:, column])
        if pivots.size == 0:
            continue
        pivot = rank + pivots[0]
        rows[[rank, pivot]] = rows[[pivot, rank]]
        others = np.flatnonzero(rows[:, column])
        rows[others[others != rank]] ^= rows[rank]
        rank += 1
    return rows, rank


def gf2_rank(matrix):
    """Return the rank over GF(2) of a 0/1 matrix [n, m]."""
    return gf2_eliminate(matrix)[1]


def gf2_inverse(matrix):
    """Return the inverse over GF(2) of a 0/1 matrix: uint8 [K, K].

    Raises ValueError if it is singular or not square.
    """
    matrix = check_matrix(matrix)
    K = len(matrix)
    beside_identity = np.hstack([matrix, np.eye(K, dtype=np.uint8)])
    reduced, _ = gf2_eliminate(beside_identity)
    return reduced[:, K:]


def check_matrix(matrix, n_bits=None):
    """Return matrix as uint8 [K, K].

    Raises ValueError unless it is square, 0/1, invertible and, if that is given, n_bits wide.
    """
    matrix = np.asarray(matrix)
    K = matrix.shape[0] if n_bits is None else n_bits
    if matrix.shape != (K, K):
        raise ValueError(f"recoding matrix has shape {matrix.shape}: expected ({K}, {K})")
    if not np.isin(matrix, (0, 1)).all():
        raise ValueError("recoding matrix has entries other than 0 and 1")
    rank = gf2_rank(matrix)
    if rank < K:
        raise ValueError(f"recoding matrix is singular over GF(2): rank {rank}, expected {K}; "
                         "two tokens would share a code")
    return matrix.astype(np.uint8)


# --- Recoding: g(t) = A c(t) + b

def draw_recoding(n_bits, code_seed=CODE_SEED, code_offset="0"):
    """Draw the paper's recoding: A until it has full rank and no light row or column, then b.

    Args:
        n_bits: K.
        code_seed: seed of numpy's frozen legacy stream, so that a seed names one matrix on every
            machine and version.
        code_offset: b as "0", as "random" (drawn after A from the same stream), or as the
            hexadecimal number whose bit j is b_j.
    Returns: (A uint8 [K, K], b uint8 [K]).
    Raises ValueError for a seed that cannot be, if no matrix is accepted in MAX_DRAWS draws, or b
    does not fit in K bits.
    """
    check_seed(code_seed)
    stream = np.random.RandomState(code_seed)
    for _ in range(MAX_DRAWS):
        matrix = stream.randint(0, 2, (n_bits, n_bits)).astype(np.uint8)
        lightest = min(matrix.sum(0).min(), matrix.sum(1).min())
        if lightest >= MIN_WEIGHT and gf2_rank(matrix) == n_bits:
            break
    else:
        raise ValueError(f"no invertible {n_bits} x {n_bits} matrix with all row and column "
                         f"weights >= {MIN_WEIGHT} in {MAX_DRAWS:,} draws: below 5 bits there "
                         "is none, at 5 it may take another --code_seed; a vocabulary of more than "
                         "32 ids has 6")
    if code_offset == "random":
        return matrix, stream.randint(0, 2, n_bits).astype(np.uint8)
    return matrix, parse_offset(code_offset, n_bits)


def check_seed(code_seed):
    """Raise ValueError unless numpy's legacy stream takes the seed."""
    if not 0 <= code_seed < 1 << 32:
        raise ValueError(f"code_seed={code_seed}: expected 0 to {(1 << 32) - 1}")


def parse_offset(code_offset, n_bits):
    """Return b, uint8 [K], of a hexadecimal number whose bit j is b_j."""
    try:
        number = int(code_offset, 16)
    except ValueError:
        number = -1
    if not 0 <= number < 1 << n_bits:
        raise ValueError(f"code_offset={code_offset}: expected 'random' or a hexadecimal number "
                         f"below {1 << n_bits:#x}")
    return ((number >> np.arange(n_bits)) & 1).astype(np.uint8)


def recode(codes, matrix, offset):
    """Return A c + b over GF(2) for every row c of codes: uint8 [V, K]. Row i of A makes bit i.

    Raises ValueError if matrix is singular, or its shape or the offset's does not fit the codes.
    """
    K = codes.shape[1]
    matrix, offset = check_matrix(matrix, K), np.asarray(offset)
    if offset.shape != (K,) or not np.isin(offset, (0, 1)).all():
        raise ValueError(f"code offset has shape {offset.shape}: expected ({K},) of zeros and ones")
    sums = codes.astype(np.int64) @ matrix.T + offset
    return (sums & 1).astype(np.uint8)


# --- Continuous controls: K real numbers an id, as int32 multiples of 2^-12

def to_fixed_point(values):
    """Return float values [V, K] as int32 [V, K] in units of 2^-12, clipped to +-8.

    Not int16: processes cannot broadcast that.

    Raises ValueError if two rows are then closer than MIN_DISTANCE after rounding to bfloat16, the
    coarsest dtype of use.
    """
    codes = np.clip(np.rint(values * 2**FRACTION_BITS), -2**15, 2**15 - 1).astype(np.int32)
    used = to_bfloat16(codes * np.float32(2**-FRACTION_BITS))
    nearest = min_distance(used, MIN_DISTANCE)
    if nearest < MIN_DISTANCE:
        raise ValueError(f"two ids have codes {nearest:.3f} apart: expected at least "
                         f"{MIN_DISTANCE}; another --code_seed or a smaller vocabulary would do")
    return codes


def to_bfloat16(values):
    """Return float32 values rounded to the nearest bfloat16 (ties to even), as float32."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    odd = (bits >> 16) & 1  # the lowest bit that stays
    rounded = (bits + 0x7FFF + odd) & 0xFFFF_0000
    return rounded.astype(np.uint32).view(np.float32)


def min_distance(values, limit):
    """Return the smallest distance between two rows of [V, K], or limit if none is below it."""
    from scipy.spatial import KDTree  # here, because the bits need none of its second of loading
    distances, _ = KDTree(values).query(values, k=2, distance_upper_bound=limit)
    return float(min(distances[:, 1].min(), limit))  # column 0 is the row itself


# --- The fixed interfaces: (V, seed, offset) -> {"codebook": integers [V, K], what else to store};
# those that can be of more than ceil(log2 V) numbers take code_width too

def fixed_binary(vocab_size, code_seed, code_offset, code_width=0):
    """The id's own bits (the paper); up to code_width, if that is more, tosses of code_seed."""
    bits = binary_codes(vocab_size)
    check_seed(code_seed)
    more = max(0, code_width - bits.shape[1])
    tosses = np.random.RandomState(code_seed).randint(0, 2, (vocab_size, more))
    return {"codebook": np.hstack((bits, tosses.astype(np.uint8)))}


def fixed_gf2(vocab_size, code_seed, code_offset):
    """The bits recoded by A and b (the paper)."""
    matrix, offset = draw_recoding(min_bits(vocab_size), code_seed, code_offset)
    codebook = recode(binary_codes(vocab_size), matrix, offset)
    return {"codebook": codebook, "matrix": matrix, "offset": offset}


def fixed_random(vocab_size, code_seed, code_offset, code_width=0):
    """K standard normal numbers: as many dimensions as the bits, without their structure."""
    check_seed(code_seed)
    shape = vocab_size, code_width or min_bits(vocab_size)
    return {"codebook": to_fixed_point(np.random.RandomState(code_seed).standard_normal(shape))}


def fixed_sinusoid(vocab_size, code_seed, code_offset, code_width=0):
    """Sines and cosines of the id at frequencies V^(-2i/K), i = 0..K/2-1 (arXiv 1706.03762)."""
    K = code_width or min_bits(vocab_size)
    frequencies = float(vocab_size) ** (-2 * np.arange((K + 1) // 2) / K)
    angles = np.arange(vocab_size)[:, None] * frequencies
    return {"codebook": to_fixed_point(np.hstack((np.sin(angles), np.cos(angles)))[:, :K])}


FIXED = dict(binary=fixed_binary, gf2=fixed_gf2, random=fixed_random, sinusoid=fixed_sinusoid)


# --- Which rows of a shared table an id adds up (inputs.py)

def digit_rows(vocab_size, base):
    """Return i base + digit_i(t) for the M digits of every id, the lowest first: int64 [V, M].

    >>> digit_rows(5, 3)[[2, 4]]
    array([[2, 3],
           [1, 4]])

    Raises ValueError unless 2 <= base <= vocab_size.
    """
    if not 2 <= base <= vocab_size:
        raise ValueError(f"base={base}: expected 2 to vocab_size={vocab_size}")
    left, columns = np.arange(vocab_size), []
    largest = vocab_size - 1
    while largest:
        columns.append(len(columns) * base + left % base)
        left, largest = left // base, largest // base
    return np.stack(columns, axis=1)


def hash_rows(vocab_size, hashes, buckets, code_seed):
    """Return `hashes` rows below `buckets` of every id, drawn from code_seed: int64 [V, hashes]."""
    check_seed(code_seed)
    return np.random.RandomState(code_seed).randint(0, buckets, (vocab_size, hashes))


def spelling_codes(spellings, positions):
    """Return (the first bytes of every token, int32 [V, positions], -1 after its end; how many
    tokens are spelt there as an earlier one).

    Those get at the last position the first byte that makes them another: long tokens cut alike,
    and what stands for nothing, such as an unused id.

    Raises ValueError if 256 bytes are not enough for that.
    """
    codes = np.full((len(spellings), positions), -1, np.int32)
    taken, alike = set(), 0
    for t, spelling in enumerate(spellings):
        cut = spelling[:positions]
        codes[t, :len(cut)] = list(cut)
        byte, repeated = 0, tuple(codes[t]) in taken
        while tuple(codes[t]) in taken:
            if byte == 256:
                raise ValueError(f"positions={positions}: more than 256 tokens begin with "
                                 f"{cut[:positions - 1]!r}; give more positions")
            codes[t, -1], byte = byte, byte + 1
        taken.add(tuple(codes[t]))
        alike += repeated
    return codes, alike


# --- Checks

def check_codebook(name, made, vocab_size, width):
    """Return what an interface of FIXED returned; raise ValueError unless it can be an input.

    It can be with a codebook [vocab_size, width] of uint8 bits, or of int32 from to_fixed_point, in
    which no two ids are alike, and with nothing but NumPy arrays beside it.
    """
    expected = f"expected {{'codebook': integers [{vocab_size}, {width}]}}"
    if not isinstance(made, dict):
        kind = "an array" if isinstance(made, np.ndarray) else f"a {type(made).__name__}"
        raise ValueError(f"input={name}: its function returned {kind}: {expected}")
    if "codebook" not in made:
        raise ValueError(f"input={name}: its function returned the keys {', '.join(made)}: "
                         "expected codebook among them")
    for key, array in made.items():
        if not isinstance(array, np.ndarray):
            raise ValueError(f"input={name}: its {key} is a {type(array).__name__}: expected a "
                             "NumPy array")
    codes = made["codebook"]
    found = f"input={name}: its codebook is {codes.dtype} {list(codes.shape)}"
    if codes.dtype not in (np.uint8, np.int32):
        raise ValueError(f"{found}: expected uint8 for bits, or int32 as to_fixed_point returns")
    if codes.shape != (vocab_size, width):
        raise ValueError(f"{found}: expected [{vocab_size}, {width}]")
    if codes.dtype == np.uint8 and codes.max() > 1:
        raise ValueError(f"input={name}: its codebook has bits other than 0 and 1, such as "
                         f"{codes.max()}")
    _, first, code = np.unique(codes, axis=0, return_index=True, return_inverse=True)
    twins = np.flatnonzero(first[code.ravel()] != np.arange(vocab_size))
    if twins.size:
        raise ValueError(f"{found} and ids {first[code.ravel()[twins[0]]]} and {twins[0]} have one "
                         f"code ({twins.size} such ids): a model could not tell them apart")
    return made


def code_report(codes):
    """Return the facts of a codebook uint8 [V, K] that the paper reports, as plain Python values.

    Keys: vocab_size, n_bits, injective (bool), zero_ids (whose code is all zero; so is their input
    vector, with bits as 0 and 1), weight_histogram (ids by Hamming weight 0..K), weight_mean,
    weight_variance, bit_counts (ids in which bit j is set), distance_histogram (pairs of ids by
    Hamming distance 0..K; not of codes longer than an id needs).
    """
    V, K = codes.shape
    weights = codes.sum(1, dtype=np.int64)
    facts = {
        "vocab_size": V,
        "n_bits": K,
        "injective": len(np.unique(codes, axis=0)) == V,
        "zero_ids": np.flatnonzero(weights == 0).tolist(),
        "weight_histogram": np.bincount(weights, minlength=K + 1).tolist(),
        "weight_mean": weights.mean().item(),
        "weight_variance": weights.var().item(),
        "bit_counts": codes.sum(0, dtype=np.int64).tolist(),
    }
    if 1 << K <= MAX_VOCAB_SIZE:
        facts["distance_histogram"] = distance_histogram(codes)
    return facts


def distance_histogram(codes):
    """Return how many unordered pairs of ids have codes of Hamming distance 0..K.

    All V^2 / 2 pairs at once, by a Walsh-Hadamard transform WHT of size 2^K: where present[c] is 1
    for a code c that an id has, else 0, #{(s, t): c(s) XOR c(t) = d} = WHT(WHT(present)^2)[d] / 2^K
    """
    K = codes.shape[1]
    present = np.bincount(codes_to_ids(codes), minlength=1 << K).astype(np.int64)
    pairs = walsh_hadamard(walsh_hadamard(present, K) ** 2, K) >> K  # ordered pairs, by their XOR
    pairs[0] -= len(codes)  # each id with itself
    weight = binary_codes(1 << K).sum(1)
    return [int(pairs[weight == h].sum()) // 2 for h in range(K + 1)]


def walsh_hadamard(a, n_bits):
    for _ in range(n_bits):  # transform the index's lowest bit, which then becomes its highest
        a = np.concatenate((a[::2] + a[1::2], a[::2] - a[1::2]))
    return a


def print_report(name, codes):
    """Print code_report(codes) for a person, under the interface's name."""
    facts = code_report(codes)
    V = facts["vocab_size"]
    zero = ", ".join(map(str, facts["zero_ids"])) or "none"
    weights = [f"{h}:{n}" for h, n in enumerate(facts["weight_histogram"]) if n]
    shares = [f"{j}:{n / V:.4f}" for j, n in enumerate(facts["bit_counts"])]
    print(f"{name}: {V:,} codes of {facts['n_bits']} bits, injective: "
          f"{'yes' if facts['injective'] else 'NO'}, all-zero code: id {zero}")
    print(f"  Hamming weight: mean {facts['weight_mean']:.6f}, "
          f"variance {facts['weight_variance']:.6f}")
    print(f"  ids by weight:  {' '.join(weights)}")
    print(f"  bit is set in:  {' '.join(shares)} of the ids")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, usage=argparse.SUPPRESS, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab_size", type=int, default=49_152,
                        help="V, 2 to 65,536 (default: %(default)s, the paper's)")
    parser.add_argument("--code_seed", type=int, default=CODE_SEED,
                        help="which recoding matrix (default: %(default)s)")
    parser.add_argument("--code_offset", default="0",
                        help="b: 0, random, or hexadecimal (default: %(default)s)")
    args = parser.parse_args()
    try:
        codes = binary_codes(args.vocab_size)
        K = codes.shape[1]
        matrix, offset = draw_recoding(K, args.code_seed, args.code_offset)
    except ValueError as error:
        parser.error(str(error))
    print_report("binary", codes)
    print()
    print_report("gf2", recode(codes, matrix, offset))
    product = matrix.astype(int) @ gf2_inverse(matrix) & 1
    print(f"\nA of seed {args.code_seed}: rank {gf2_rank(matrix)} of {K}, {matrix.sum()} ones, "
          f"A A^-1 = I: {'yes' if (product == np.eye(K)).all() else 'NO'}")
    for i, row in enumerate(matrix):
        bits, hexadecimal = "".join(map(str, row)), f"{codes_to_ids(row):0{(K + 3) // 4}x}"
        print(f"  row {i:2d}  {bits}  weight {row.sum():2d}  hex {hexadecimal}")
    print("  column weights  " + " ".join(map(str, matrix.sum(0))))
    print("b               " + "".join(map(str, offset)))


if __name__ == "__main__":
    main()
