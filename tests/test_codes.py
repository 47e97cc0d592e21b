"""Every figure of the paper about its codes, and the laws of GF(2) that the recoding rests on."""

import doctest
import hashlib
import subprocess
import sys
from math import comb
from pathlib import Path

import numpy as np
import pytest

import codes
import train
from codes import (
    FIXED,
    binary_codes,
    check_codebook,
    code_report,
    codes_to_ids,
    distance_histogram,
    draw_recoding,
    gf2_inverse,
    gf2_rank,
    min_bits,
    min_distance,
    recode,
    to_bfloat16,
    to_fixed_point,
)
from machinery import settings
from model import Decoder, ModelConfig

ROOT = Path(__file__).parents[1]
V = 49_152
ROWS = "69ae 2991 1e6b ce69 e607 16b7 7ba2 a3ed 1d2d db08 7956 111d 5344 e7ea 8ac1 b4ee"


def run(*flags):
    words = [sys.executable, "codes.py", *flags]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True)


# --- binary codes

def test_docstring_examples():
    assert doctest.testmod(codes).failed == 0


@pytest.mark.parametrize("vocab_size, bits", [
    (2, 1), (3, 2), (4, 2), (5, 3), (33, 6), (3072, 12), (49_152, 16), (65_536, 16)])
def test_min_bits(vocab_size, bits):
    assert min_bits(vocab_size) == bits
    assert binary_codes(vocab_size).shape == (vocab_size, bits)


@pytest.mark.parametrize("vocab_size", [-1, 0, 1, 65_537])
def test_vocabulary_out_of_range_is_refused(vocab_size):
    with pytest.raises(ValueError, match="65,536"):
        min_bits(vocab_size)


def test_any_sufficient_width_works_and_a_smaller_one_is_refused():
    assert binary_codes(20, 5).shape == (20, 5)
    assert (binary_codes(20, 9)[:, 5:] == 0).all()
    with pytest.raises(ValueError, match="at least 6"):
        binary_codes(33, 5)


@pytest.mark.parametrize("i, bits", [
    (1, [0]), (2, [1]), (256, [8]), (32_768, [15]), (12345, [0, 3, 4, 5, 12, 13]),
    (49_151, [j for j in range(16) if j != 14])])
def test_little_endian(i, bits):
    assert np.flatnonzero(binary_codes(65_536)[i]).tolist() == bits


def test_codes_of_all_ids_by_arithmetic_and_back():
    ids = np.arange(65_536)
    table = binary_codes(65_536)
    assert all((table[:, j] == ids // 2**j % 2).all() for j in range(16))
    assert (codes_to_ids(table) == ids).all()


def test_weights_of_the_papers_vocabulary():
    facts = code_report(binary_codes(V))
    histogram = facts["weight_histogram"]
    for h in range(1, 16):  # bits 0 to 13 free; of bits 14 and 15 none, the one or the other
        assert histogram[h] == comb(14, h) + 2 * comb(14, h - 1)
    assert histogram[:4] == [1, 16, 119, 546] and histogram[15:] == [2, 0]
    assert facts["weight_mean"] == pytest.approx(23 / 3, abs=1e-12)
    assert facts["weight_variance"] == pytest.approx(67 / 18, abs=1e-12)
    assert facts["bit_counts"] == [V // 2] * 14 + [V // 3] * 2
    assert facts["injective"] and facts["zero_ids"] == [0]


# --- GF(2)

def test_rank_is_taken_modulo_2():
    singular = [[1, 1, 0], [0, 1, 1], [1, 0, 1]]  # determinant 2 over the integers
    assert np.linalg.matrix_rank(singular) == 3 and gf2_rank(singular) == 2
    assert gf2_rank(np.eye(16)) == 16 and gf2_rank(np.triu(np.ones((16, 16)))) == 16
    assert gf2_rank(np.zeros((4, 4))) == 0
    with pytest.raises(ValueError, match="singular"):
        gf2_inverse(singular)


def test_inverse_of_random_matrices():
    stream, found = np.random.RandomState(0), 0
    for _ in range(200):
        matrix = stream.randint(0, 2, (16, 16))
        if gf2_rank(matrix) == 16:
            found += 1
            inverse = gf2_inverse(matrix).astype(int)
            assert (matrix @ inverse % 2 == np.eye(16)).all()
            assert (inverse @ matrix % 2 == np.eye(16)).all()
    # P(invertible) = prod (1 - 2^-i) = 0.2887925; 200 draws have a standard deviation of 0.032.
    assert abs(found / 200 - 0.2887925) < 0.1


def test_probability_of_the_weight_rule():
    draws = np.random.RandomState(1).randint(0, 2, (20_000, 16, 16), dtype=np.uint8)
    rule = (np.minimum(draws.sum(1).min(1), draws.sum(2).min(1)) >= codes.MIN_WEIGHT).mean()
    assert abs(rule - 0.7187152) < 4 * np.sqrt(0.7187 * 0.2813 / 20_000)


# --- the paper's recoding

def test_matrix_of_seed_12345():
    matrix, offset = draw_recoding(16, 12345)
    assert hashlib.sha256(matrix.tobytes()).hexdigest().startswith("8b4738f3261b84fa")
    assert [f"{i:04x}" for i in codes_to_ids(matrix)] == ROWS.split()
    assert "".join(map(str, matrix[0])) == "0111010110010110"
    assert matrix.sum(1).tolist() == [9, 6, 9, 9, 8, 9, 9, 10, 8, 7, 9, 6, 6, 11, 6, 10]
    assert matrix.sum(0).tolist() == [9, 8, 9, 9, 4, 9, 8, 8, 10, 10, 7, 9, 9, 8, 8, 7]
    assert matrix.sum() == 132 and gf2_rank(matrix) == 16 and not offset.any()


def test_it_is_the_third_draw_of_the_frozen_stream():
    stream = np.random.RandomState(12345)
    third = [stream.randint(0, 2, (16, 16)) for _ in range(3)][2]
    assert (draw_recoding(16, 12345)[0] == third).all()
    # b comes next from the same stream.
    assert (draw_recoding(16, 12345, "random")[1] == stream.randint(0, 2, 16)).all()


def test_it_is_torchs_stream_too():
    import torch
    generator = torch.Generator().manual_seed(12345)
    third = [torch.randint(0, 2, (16, 16), generator=generator) for _ in range(3)][2]
    assert (third.numpy() == draw_recoding(16, 12345)[0]).all()


def test_images_of_the_papers_recoding():
    images = codes_to_ids(recode(binary_codes(V), *draw_recoding(16, 12345)))
    assert images[[0, 1, 2, 3, 4, 49_151]].tolist() == [0, 18878, 42101, 60875, 40369, 4148]
    matrix, offset = draw_recoding(16, 12345)
    transposed = codes_to_ids(recode(binary_codes(V), matrix.T, offset))
    assert transposed[1] == 27054  # what a transposed load would give


def test_weights_of_the_papers_recoding():
    facts = code_report(recode(binary_codes(V), *draw_recoding(16, 12345)))
    assert facts["weight_histogram"] == [
        1, 15, 99, 441, 1393, 3255, 5915, 8521, 9675, 8629, 6065, 3315, 1347, 389, 81, 11, 0]
    assert facts["injective"] and facts["zero_ids"] == [0]


@pytest.mark.parametrize("seed", [0, 1, 12345, 99])
def test_every_recoding_balances_every_bit(seed):
    matrix, offset = draw_recoding(16, seed, "random")
    assert gf2_rank(matrix) == 16 and min(matrix.sum(0).min(), matrix.sum(1).min()) >= 4
    recoded = recode(binary_codes(V), matrix, offset)
    facts = code_report(recoded)
    assert facts["bit_counts"] == [V // 2] * 16 and facts["weight_mean"] == 8
    assert facts["injective"]
    # Undoing b and A gives the ids back.
    back = recode(recoded ^ offset, gf2_inverse(matrix), np.zeros(16, int))
    assert (codes_to_ids(back) == np.arange(V)).all()


def test_offset_as_hexadecimal():
    offset = draw_recoding(16, 12345, "8001")[1]
    assert np.flatnonzero(offset).tolist() == [0, 15]
    matrix = draw_recoding(16)[0]
    # The id with A c = b has the zero code.
    zero = codes_to_ids(recode(offset[None], gf2_inverse(matrix), np.zeros(16, int)))[0]
    assert code_report(recode(binary_codes(65_536), matrix, offset))["zero_ids"] == [zero]
    for wrong in ("10000", "-1", "xyz", ""):
        with pytest.raises(ValueError, match="code_offset"):
            draw_recoding(16, 12345, wrong)


def test_impossible_weight_rule_ends():
    with pytest.raises(ValueError, match="100,000 draws"):
        draw_recoding(4)


@pytest.mark.parametrize("matrix, message", [
    (np.zeros((16, 16)), "singular"), (np.eye(15), r"\(15, 15\)"),
    (2 * np.eye(16), "other than 0 and 1"), (np.ones(16), "shape")])
def test_wrong_matrices_are_refused(matrix, message):
    with pytest.raises(ValueError, match=message):
        recode(binary_codes(V), matrix, np.zeros(16))


@pytest.mark.parametrize("offset", [np.zeros(15), np.full(16, 2)])
def test_wrong_offsets_are_refused(offset):
    with pytest.raises(ValueError, match="offset"):
        recode(binary_codes(V), np.eye(16), offset)


# --- distances and continuous codes

@pytest.mark.parametrize("vocab_size", [2, 5, 100, 300])
def test_distance_histogram_counts_every_pair(vocab_size):
    K, binary = min_bits(vocab_size), binary_codes(vocab_size)
    for table in (binary, recode(binary, np.eye(K, dtype=np.uint8), np.ones(K, np.uint8))):
        distances = (table[:, None] ^ table[None]).sum(2)[np.triu_indices(vocab_size, 1)]
        assert distance_histogram(table) == np.bincount(distances, minlength=K + 1).tolist()


def test_bfloat16_rounding_is_torchs():
    import torch
    values = np.random.RandomState(0).standard_normal(10_000).astype(np.float32) * np.float32(3)
    assert (to_bfloat16(values) == torch.from_numpy(values).bfloat16().float().numpy()).all()


def test_min_distance_is_the_smallest_of_all_pairs():
    values = np.random.RandomState(0).standard_normal((500, 3)).astype(np.float32)
    distances = np.sqrt(((values[:, None] - values[None]) ** 2).sum(2))[np.triu_indices(500, 1)]
    assert min_distance(values, 1.0) == pytest.approx(distances.min(), rel=1e-3)
    limit = distances.min() / 2  # none is closer
    assert min_distance(values, limit) == pytest.approx(limit)


@pytest.mark.parametrize("name", ["random", "sinusoid"])
@pytest.mark.parametrize("vocab_size", [100, 3072, 49_152])
def test_continuous_codes_keep_their_distance(name, vocab_size):
    table = FIXED[name](vocab_size, 12345, "0")["codebook"]
    assert table.shape == (vocab_size, min_bits(vocab_size)) and table.dtype == np.int32
    values = table / 4096
    assert len(np.unique(to_bfloat16(values.astype(np.float32)), axis=0)) == vocab_size
    if name == "sinusoid":  # sines and cosines of one angle
        K = table.shape[1] // 2
        if table.shape[1] % 2 == 0:
            assert np.allclose(values[:, :K]**2 + values[:, K:]**2, 1, atol=1e-3)
        assert np.allclose(values[:, 0], np.sin(np.arange(vocab_size)), atol=2**-12)
    else:
        assert abs(values.mean()) < 0.1 and values.std() == pytest.approx(1, abs=0.1)
        assert (table != FIXED[name](vocab_size, 1, "0")["codebook"]).any()


def test_ids_too_close_are_refused():
    with pytest.raises(ValueError, match="expected at least 0.1"):
        to_fixed_point(np.array([[0.0, 1.0], [0.0, 1.05], [3.0, 3.0]]))


# --- codes of more numbers than an id needs

def test_wide_binary_codes_are_the_bits_and_then_tosses():
    table = FIXED["binary"](3072, 5, "0", 192)["codebook"]
    assert table.shape == (3072, 192) and table.dtype == np.uint8
    assert (table[:, :12] == binary_codes(3072)).all()
    tosses = table[:, 12:]
    assert set(np.unique(tosses)) == {0, 1} and abs(tosses.mean() - 0.5) < 0.003
    # Columns and ids are independent: no correlation beyond chance, 1 / sqrt(3072).
    correlations = np.corrcoef(tosses.T) - np.eye(180)
    assert np.abs(correlations).max() < 5 / np.sqrt(3072)
    assert (table == FIXED["binary"](3072, 5, "0", 192)["codebook"]).all()
    assert (tosses != FIXED["binary"](3072, 6, "0", 192)["codebook"][:, 12:]).any()


@pytest.mark.parametrize("width", [12, 48, 192])
def test_wide_continuous_codes(width):
    table = FIXED["random"](3072, 5, "0", width)["codebook"]
    numbers = np.random.RandomState(5).standard_normal((3072, width))
    assert np.abs(table / 4096 - numbers).max() < 2**-12
    waves = FIXED["sinusoid"](3072, 5, "0", width)["codebook"] / 4096
    half, ids = width // 2, np.arange(3072)
    assert np.allclose(waves[:, 0], np.sin(ids), atol=2**-12)
    assert np.allclose(waves[:, half + 3], np.cos(ids * 3072.0 ** (-6 / width)), atol=2**-12)


def test_report_of_wide_codes():
    """What takes a table of 2^K codes is left out; the rest is there."""
    facts = code_report(FIXED["binary"](3072, 5, "0", 192)["codebook"])
    assert facts["injective"] and facts["n_bits"] == 192 and len(facts["bit_counts"]) == 192
    assert "distance_histogram" not in facts
    twins = FIXED["binary"](300, 5, "0", 48)["codebook"]
    twins[7] = twins[100]
    assert not code_report(twins)["injective"]


# --- an interface of one's own

BITS = binary_codes(100)
TWINS = BITS.copy()
TWINS[[40, 71]] = TWINS[3]


@pytest.mark.parametrize("made, said", [
    (BITS, "returned an array: expected {'codebook': integers"),
    (None, "returned a NoneType: expected {'codebook': integers"),
    ({"code": BITS}, "returned the keys code: expected codebook"),
    ({"codebook": BITS.tolist()}, "codebook is a list: expected a NumPy array"),
    ({"codebook": BITS.astype(float)}, r"codebook is float64 \[100, 7\]: expected uint8 for bits"),
    ({"codebook": BITS.astype(np.int64)}, r"codebook is int64 \[100, 7\]: expected uint8 for bits"),
    ({"codebook": BITS.astype(bool)}, r"codebook is bool \[100, 7\]: expected uint8 for bits"),
    ({"codebook": BITS[:90]}, r"codebook is uint8 \[90, 7\]: expected \[100, 7\]"),
    ({"codebook": BITS.T}, r"codebook is uint8 \[7, 100\]: expected \[100, 7\]"),
    ({"codebook": BITS[:, 0]}, r"codebook is uint8 \[100\]: expected \[100, 7\]"),
    ({"codebook": np.hstack((BITS, BITS))}, r"uint8 \[100, 14\]: expected \[100, 7\]"),
    ({"codebook": 2 * BITS}, "codebook has bits other than 0 and 1, such as 2"),
    ({"codebook": TWINS}, r"uint8 \[100, 7\] and ids 3 and 40 have one code \(2 such ids\)"),
    ({"codebook": np.zeros((100, 7), np.int32)}, r"ids 0 and 1 have one code \(99 such ids\)"),
    ({"codebook": BITS, "extra": [1]}, "extra is a list: expected a NumPy array")])
def test_an_interface_that_returns_something_else_is_refused(made, said):
    """In one line with its name, what came, and what should come."""
    with pytest.raises(ValueError, match=said) as error:
        check_codebook("mine", made, 100, 7)
    assert str(error.value).startswith("input=mine: ") and "\n" not in str(error.value)


@pytest.mark.parametrize("name", FIXED)
def test_the_interfaces_here_are_accepted(name):
    made = FIXED[name](100, 1, "0")
    assert check_codebook(name, made, 100, 7) is made


def test_no_model_is_built_with_such_an_interface(monkeypatch):
    monkeypatch.setitem(FIXED, "binary", lambda *_: {"codebook": TWINS})
    with pytest.raises(ValueError, match="input=binary: .*3 and 40"):
        Decoder(ModelConfig("binary", 100, 16, 1, 1, 14, 8))


def test_every_option_of_an_input_is_a_flag():
    flags = ["--preset=smoke", "--input=lowdim", "--input_std=0.5", "--code_width=48"]
    config = settings.model_config(settings.parse_args(train.PRESETS, "", flags))
    assert config.input_std == 0.5 and config.code_width == 48


# --- command line

def test_command_line_prints_the_matrix_and_its_checks():
    result = run("--vocab_size=49152", "--code_seed=12345")
    assert result.returncode == 0, result.stderr
    for expected in ("0111010110010110", "69ae", "rank 16 of 16", "132 ones", "mean 7.666667",
                     "variance 3.722222", "mean 8.000000", "injective: yes",
                     "9 8 9 9 4 9 8 8 10 10 7 9 9 8 8 7", "15:2", "14:0.3333"):
        assert expected in result.stdout


@pytest.mark.parametrize("flag, said", [
    ("--vocab_size=65537", "vocab_size=65537"), ("--vocab_size=10", "a vocabulary of more than"),
    ("--code_offset=zz", "code_offset=zz"), ("--code_offset=10000", "code_offset=10000"),
    ("--code_seed=-1", "code_seed=-1"), ("--code_seed=4294967296", "code_seed=4294967296"),
    ("--nonsense", "--nonsense")])
def test_command_line_errors_are_one_line(flag, said):
    result = run(flag)
    assert result.returncode == 2 and len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("codes.py: error: ") and result.stdout == ""
    assert said in result.stderr


@pytest.mark.parametrize("flags", [
    ["--input=gf2", "--code_seed=-1"], ["--input=random", "--code_seed=4294967296"],
    ["--input=gf2", "--code_offset=zz"], ["--input=gf2", "--code_offset=-2"]])
def test_training_refuses_a_wrong_code_as_a_flag(flags, capsys):
    with pytest.raises(SystemExit) as error:
        settings.parse_args(train.PRESETS, "", ["--preset=smoke", *flags])
    said = capsys.readouterr().err
    assert error.value.code == 2 and said.count("\n") == 1
    assert flags[1].split("=")[0][2:] in said
