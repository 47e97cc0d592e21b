"""The decoder against the paper's figures, against independent formulas, and against itself."""

import hashlib
import math
from dataclasses import asdict

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from codes import FIXED, binary_codes, draw_recoding, recode
from inputs import INPUTS, FixedCodes
from kernels import LinearCrossEntropy, attend
from machinery.checkpoints import load_model, read_checkpoint
from machinery.costs import count_parameters, flops_per_target, print_model
from machinery.huggingface import describe_table, make_input
from machinery.runs import list_checkpoints
from model import (
    Decoder,
    ModelConfig,
    RMSNorm,
    apply_rope,
    pick,
    rope_tables,
)

TINY = dict(vocab_size=100, block_size=32, n_layer=2, n_head=2, n_embd=28, n_ffn=40)  # K = 7


def tiny(input="binary", seed=1, **sizes):
    return Decoder(ModelConfig(input=input, **{**TINY, **sizes}), seed)


def tokens(*shape, high=100, seed=0):
    return torch.randint(1, high, shape, generator=torch.Generator().manual_seed(seed))


# --- parameters (the paper's figures; no memory is needed on the meta device)

BODY, TABLE = 1_610_713_088, 100_663_296


@pytest.mark.parametrize("input, trainable, stored", [
    ("learned", 1_812_039_680, 1_812_039_680),
    ("binary", 1_711_376_384, 1_712_162_816),
    ("gf2", 1_711_376_384, 1_712_163_088)])
def test_parameters_of_the_papers_models(input, trainable, stored):
    with torch.device("meta"):
        model = Decoder(ModelConfig(input=input))
    n = count_parameters(model)
    assert (n["body"], n["head"], n["input"]) == (BODY, TABLE, TABLE if input == "learned" else 0)
    assert (n["trainable"], n["stored"], n["matmul"]) == (trainable, stored, 1_711_276_032)
    assert n["trainable"] - n["decayed"] == 100_352
    assert n["stored"] == sum(t.numel() for t in model.state_dict().values())
    assert [round(f / 1e9, 3) for f in flops_per_target(model)] == [10.268, 0.604]
    assert round(16 * trainable / 1e9, 2) == (28.99 if input == "learned" else 27.38)


def test_removed_share_of_parameters():
    assert round(100 * TABLE / 1_812_039_680, 4) == 5.5552


def test_count_by_hand():
    C, F_, L, V = 28, 40, 2, 100
    n = count_parameters(tiny("learned"))
    assert n["body"] == L * (4 * C * C + 3 * C * F_ + 2 * C) + C
    assert n["input"] == n["head"] == V * C


# --- input interfaces

def test_binary_input_is_the_code_tiled():
    x = tiny("binary").model.embed_tokens(torch.tensor([[5]]), torch.float32, None)
    assert x.tolist() == [[[1, 0, 1, 0, 0, 0, 0] * 4]]


def test_gf2_input_is_the_recoded_code():
    model = tiny("gf2", code_offset="random")
    expected = np.tile(recode(binary_codes(100), *draw_recoding(7, 12345, "random")), (1, 4))
    x = model.model.embed_tokens(torch.arange(100)[None], torch.float32, None)
    assert (x[0].numpy() == expected).all()


def test_squared_norms_at_the_papers_size():
    codes = FixedCodes(ModelConfig())
    squared = codes(torch.tensor([[0, 1, 32_767, 49_151]]), torch.float32, None).square().sum(-1)
    assert squared.tolist() == [[0, 128, 1920, 1920]]
    assert round(128 * binary_codes(49_152).sum(1).mean(), 3) == 981.333
    assert 128 * recode(binary_codes(49_152), *draw_recoding(16)).sum(1, dtype=int).mean() == 1024
    table = torch.empty(2000, 2048).normal_(std=0.02, generator=torch.Generator().manual_seed(0))
    assert table.square().sum(1).mean().item() == pytest.approx(0.8192, rel=1e-2)


@pytest.mark.parametrize("input", ["binary", "gf2"])
def test_codes_survive_every_dtype(input):
    model = Decoder(ModelConfig(input=input, **{**TINY, "vocab_size": 65_536, "n_embd": 32}))
    before = model.model.embed_tokens.codebook.clone()
    ids = torch.arange(65_536)[None]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = model.to(dtype).model.embed_tokens(ids, dtype, None)
        assert x.dtype == dtype and len(torch.unique(x[0, :, :16].float(), dim=0)) == 65_536
    after = model.model.embed_tokens.codebook
    assert after.dtype == torch.uint8 and (after == before).all()


@pytest.mark.parametrize("input", ["binary", "gf2"])
def test_zero_code_with_an_empty_context_is_uniform(input):
    model = tiny(input, vocab_size=49_152, n_embd=32)
    zeros = torch.zeros(1, 7, dtype=torch.int64)
    assert (model(zeros)[0] == 0).all()
    loss = model(zeros, tokens(1, 7, high=49_152))[1]
    assert loss.item() == np.float32(math.log(49_152))  # 10.8027, to the last bit of float32
    # After a nonzero context a zero-coded token does receive information, through attention.
    logits, _ = model(torch.tensor([[7, 0]]))
    assert (logits[0, 1] != 0).any()


@pytest.mark.parametrize("input, offset", [("learned", "0"), ("gf2", "5")])
def test_other_inputs_are_not_zero(input, offset):
    assert (tiny(input, code_offset=offset)(torch.tensor([[0]]))[0] != 0).any()


def test_every_interface_starts_from_the_same_body_and_head():
    def digest(model):
        return [(name, hashlib.sha256(p.detach().numpy().tobytes()).hexdigest())
                for name, p in model.named_parameters() if "embed_tokens" not in name]
    first = digest(tiny("learned"))
    assert first == digest(tiny("binary")) == digest(tiny("gf2"))
    assert first != digest(tiny("binary", seed=2))


def test_initial_standard_deviations():
    model = tiny("learned", vocab_size=3000, n_embd=96, n_ffn=256, n_layer=6)
    for name, p in model.named_parameters():
        if p.dim() == 2:
            into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            expected = 0.02 / math.sqrt(12) if into_residual else 0.02
            assert p.std().item() == pytest.approx(expected, rel=0.05), name
            assert abs(p.mean().item()) < expected / 20, name
        else:
            assert (p == 1).all()
    assert 0.02 / math.sqrt(2 * 24) == 0.002886751345948129


# --- the laboratory: controls, and options of the codes

def small(input, **fields):
    return Decoder(ModelConfig(**{**TINY, "input": input, **fields}))


def vectors(model, ids):
    return model.model.embed_tokens(ids, torch.float32, model.lm_head.weight).detach()


@pytest.mark.parametrize("input, trainable", [
    ("tied", 0), ("lowdim", 49_152 * 16), ("random", 0), ("sinusoid", 0)])
def test_parameters_of_the_controls_at_the_papers_size(input, trainable):
    with torch.device("meta"):
        n = count_parameters(Decoder(ModelConfig(input=input)))
    assert n["input"] == trainable and n["trainable"] == BODY + TABLE + trainable
    assert n["matmul"] == 1_711_276_032
    assert n["buffers"] == (49_152 * 16 if input in FIXED else 0)


def test_predecessor_counts():
    sizes = dict(vocab_size=65_536, block_size=1024, n_layer=32, n_head=32, n_embd=1024, n_ffn=4096,
                 ffn="gelu")
    with torch.device("meta"):
        learned = count_parameters(Decoder(ModelConfig(input="learned", **sizes)))
        free = count_parameters(Decoder(ModelConfig(input="gf2", table_free=True, **sizes)))
    assert learned["decayed"] == 536_870_912 and learned["input"] / 536_870_912 == 0.125
    assert free["input"] == 0 and free["buffers"] == 16 * 16 + 16
    assert count_parameters(small("binary", table_free=True))["buffers"] == 0


def test_tied_input_is_the_heads_row_and_one_tensor_learns_from_both():
    model, ids = small("tied"), torch.arange(100)[None]
    assert torch.equal(vectors(model, ids)[0], model.lm_head.weight)
    assert not any("embed_tokens" in name for name in model.state_dict())
    model(tokens(2, 9), tokens(2, 9, seed=1))[1].backward()
    tied = model.lm_head.weight.grad.clone()
    untied, row = small("learned"), model.lm_head.weight.detach()
    untied.load_state_dict({**model.state_dict(), "model.embed_tokens.weight": row})
    untied(tokens(2, 9), tokens(2, 9, seed=1))[1].backward()
    both = untied.lm_head.weight.grad + untied.model.embed_tokens.weight.grad
    assert torch.allclose(tied, both, atol=1e-7)


def test_lowdim_is_lifted_as_the_codes_are():
    model, ids = small("lowdim"), torch.arange(100)[None]
    expected = model.model.embed_tokens.weight.detach().repeat(1, 4)
    assert torch.equal(vectors(model, ids)[0], expected)
    assert model.model.embed_tokens.weight.std().item() == pytest.approx(0.02, rel=0.1)


def test_all_inputs_start_from_the_same_body_and_head():
    first = dict(small("learned").named_parameters())
    del first["model.embed_tokens.weight"]
    for input in INPUTS:
        own = dict(small(input).named_parameters())
        assert all(torch.equal(p, own[name]) for name, p in first.items())


@pytest.mark.parametrize("input", ["random", "sinusoid"])
def test_continuous_codes_are_the_codebook_tiled_and_survive_every_dtype(input):
    model, ids = small(input), torch.arange(100)[None]
    expected = FIXED[input](100, 12345, "0")["codebook"] / 4096
    tiled = np.tile(expected, (1, 4)).astype(np.float32)
    assert np.array_equal(vectors(model, ids)[0].numpy(), tiled)
    before = model.model.embed_tokens.codebook.clone()
    assert torch.equal(model.bfloat16().model.embed_tokens.codebook, before)
    x = model.model.embed_tokens(ids, torch.bfloat16, None)[0].float()
    assert len(torch.unique(x, dim=0)) == 100


def test_code_values_scale_and_lift():
    ids, bits = torch.arange(100)[None], binary_codes(100).astype(np.float32)
    for fields, expected in ((dict(code_values="pm1"), np.tile(2 * bits - 1, (1, 4))),
                             (dict(code_scale="0.5"), np.tile(bits / 2, (1, 4))),
                             (dict(lift="interleave"), np.repeat(bits, 4, 1))):
        assert np.array_equal(vectors(small("binary", **fields), ids)[0].numpy(), expected), fields
    for input in FIXED:
        matched = vectors(small(input, code_scale="matched"), ids)[0].square().sum(1).mean()
        assert matched.item() == pytest.approx(0.02**2 * 28, rel=1e-5)  # a learned row's


@pytest.mark.parametrize("vocab_size", [49_152, 65_536])
@pytest.mark.parametrize("fields", [
    dict(input="binary"),
    *(dict(input="gf2", code_seed=seed, code_offset="random") for seed in (1, 2, 12345))])
def test_table_free_codes_equal_the_codebook_for_every_id(vocab_size, fields):
    sizes = dict(vocab_size=vocab_size, block_size=8, n_layer=1, n_head=1, n_embd=16, n_ffn=8)
    ids = torch.arange(vocab_size)
    buffered = Decoder(ModelConfig(**sizes, **fields)).model.embed_tokens
    free = Decoder(ModelConfig(**sizes, **fields, table_free=True)).model.embed_tokens
    assert torch.equal(free.compute(ids), buffered.codebook.long())
    x = free(ids[None], torch.float32, None)
    assert torch.equal(x, buffered(ids[None], torch.float32, None))
    assert "codebook" not in dict(free.named_buffers())


def test_table_free_compiled_and_exported_equals_eager():
    model = small("gf2", code_offset="random", table_free=True).eval()
    codes, ids = model.model.embed_tokens, torch.arange(100)[None]
    assert torch.equal(torch.compile(codes.compute, backend="aot_eager")(ids), codes.compute(ids))
    exported = torch.export.export(model, (ids[:, 30:60],)).module()
    assert torch.allclose(exported(ids[:, 30:60])[0], model(ids[:, 30:60])[0], atol=1e-6)


def test_code_facts_for_the_record():
    facts = small("binary", table_free=True).model.embed_tokens.report()
    norms = facts["squared_norms"]
    assert facts["zero_ids"] == [0] and sum(facts["distance_histogram"]) == 4950
    assert norms["mean"] == pytest.approx(4 * binary_codes(100).sum(1).mean())
    assert sum(norms["histogram"]["counts"]) == 100


@pytest.mark.parametrize("fields, message", [
    (dict(input="learned", code_values="pm1"), "no meaning for input=learned"),
    (dict(input="random", table_free=True), "only for binary, gf2"),
    (dict(input="binary", code_offset="5"), "only for gf2"),
    (dict(input="binary", code_scale="-1"), "a number above 0"),
    (dict(input="binary", lift="stack"), "tile or interleave"),
    (dict(input="tied", lift="interleave"), "no meaning"),
    (dict(input="lowdim", n_embd=30), "n_bits=7"),
    (dict(input="binary", code_width=6), "code_width=6: expected at least n_bits=7"),
    (dict(input="random", code_width=-1), "code_width=-1: expected at least n_bits=7"),
    (dict(input="binary", code_width=32), "a multiple of .* code_width=32; 32 would do"),
    (dict(input="random", code_width=8), "a multiple of .* code_width=8; 24 or 32 would do"),
    (dict(input="gf2", code_width=14), "no meaning for input=gf2, only for binary, random"),
    (dict(input="learned", code_width=14), "no meaning for input=learned"),
    (dict(input="binary", code_width=14, table_free=True), "code_width=14, table_free=True"),
    (dict(input="binary", input_std=1.0), "only for learned, lowdim"),
    (dict(input="tied", input_std=1.0), "no meaning for input=tied"),
    (dict(input="learned", input_std=0.0), "input_std=0.0: expected a number above 0"),
    (dict(input="learned", input_std=math.nan), "input_std=nan: expected a number above 0"),
    (dict(input="lowdim", input_std=math.inf), "input_std=inf: expected a number above 0")])
def test_options_without_meaning_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**{**TINY, **fields})


@pytest.mark.parametrize("fields", [
    dict(input="binary"), dict(input="binary", code_values="pm1", lift="interleave"),
    dict(input="random"), dict(input="random", code_scale="matched"), dict(input="sinusoid"),
    dict(input="lowdim")])
def test_code_width_is_the_numbers_an_id_has(fields):
    """Codes, vectors, copies, the matched norm, the count, a checkpoint, and an export and back."""
    model, ids = small(n_embd=56, code_width=14, **fields), torch.arange(100)[None]
    table = model.model.embed_tokens
    x = vectors(model, ids)[0]
    if fields["input"] == "lowdim":
        numbers = table.weight.detach()
        assert count_parameters(model)["input"] == 100 * 14
    else:
        numbers = table.values(table.codebook)
        assert count_parameters(model)["input"] == 0 and table.codebook.shape == (100, 14)
    if fields.get("lift") == "interleave":
        assert torch.equal(x, numbers.repeat_interleave(4, 1))
    else:
        assert torch.equal(x, numbers.repeat(1, 4))
    assert len(torch.unique(x, dim=0)) == 100
    if fields.get("code_scale") == "matched":
        assert x.square().sum(1).mean().item() == pytest.approx(0.02**2 * 56, rel=1e-5)
    again = Decoder(model.config, seed=2)
    again.load_state_dict(model.state_dict())
    assert torch.equal(vectors(again, ids)[0], x)
    made_of, _ = describe_table(model.config, table)
    assert made_of["code_width"] == 14
    back = make_input(model.config, made_of, x)
    assert torch.equal(back(ids, torch.float32, None)[0], x)


def test_code_width_of_ceil_log2_v_is_the_codes_themselves():
    for input in ("binary", "random", "sinusoid"):
        ids = torch.arange(100)[None]
        wide, plain = small(input, code_width=7), small(input)
        assert torch.equal(vectors(wide, ids), vectors(plain, ids))


@pytest.mark.parametrize("fields, said", [
    (dict(input="learned", input_std=0.5), "start with a root mean square of 0.5"),
    (dict(input="binary", code_width=14), "each id is 14 fixed numbers, tiled 2 times")])
def test_an_estimate_says_what_the_input_is(fields, said):
    lines = []
    print_model(ModelConfig(**TINY | fields), 0.1, lines.append)
    assert any(said in line for line in lines)


@pytest.mark.parametrize("input", ["learned", "lowdim"])
def test_input_std_is_the_tables_at_the_start_and_nothing_elses(input):
    first, wide = small(input), small(input, input_std=1.0)
    weight = "model.embed_tokens.weight"
    assert wide.state_dict()[weight].std().item() == pytest.approx(1, rel=0.1)
    for name, p in wide.state_dict().items():
        expected = first.state_dict()[name]
        assert torch.allclose(p, 50 * expected) if name == weight else torch.equal(p, expected)


# --- parts

def test_rope_angles_hold_at_far_positions_and_low_precision():
    cos, sin = rope_tables(torch.arange(2048), 64, 10_000.0)
    angles = np.arange(2048)[:, None] * 10_000.0 ** (-np.arange(0, 64, 2) / 64)
    assert cos.dtype == torch.float32
    assert np.abs(cos.numpy() - np.cos(angles)).max() < 1e-6
    assert np.abs(sin.numpy() - np.sin(angles)).max() < 1e-6
    with torch.autocast("cpu", torch.bfloat16):
        assert (rope_tables(torch.arange(2048), 64, 10_000.0)[0] == cos).all()
    assert len({tuple(row.tolist()) for row in cos[256:259]}) == 3


def test_rope_is_a_rotation_of_llamas_pairs_and_relative():
    x = torch.randn(1, 1, 6, 8, generator=torch.Generator().manual_seed(0))
    cos, sin = rope_tables(torch.arange(6), 8, 10_000.0)
    rotated = apply_rope(x, cos, sin)
    # Dimension i turns with i + D / 2.
    pairs = torch.complex(x[..., :4], x[..., 4:]) * torch.complex(cos, sin)
    assert torch.allclose(rotated, torch.cat((pairs.real, pairs.imag), -1), atol=1e-6)
    q, k = x[..., :1, :].expand(1, 1, 6, 8), x[..., 1:2, :].expand(1, 1, 6, 8)
    scores = apply_rope(q, cos, sin) @ apply_rope(k, cos, sin).transpose(-1, -2)
    for d in range(-3, 4):
        assert torch.diagonal(scores[0, 0], d).std() < 1e-5


@pytest.mark.parametrize("T", [1, 127, 128, 129, 300])
def test_attention_in_bfloat16_on_a_cpu(T):
    """Values and gradients against float64; no query sees a later key, whatever it is."""
    generator = torch.Generator().manual_seed(T)
    values = torch.randn(4, 2, T, 3, 16, generator=generator).bfloat16()
    q, k, v, g = values.transpose(2, 3)
    ours = [x.clone().requires_grad_() for x in (q, k, v)]
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    with torch.autocast("cpu", torch.bfloat16):
        y = attend(*ours)
    scores = (exact[0] @ exact[1].mT / 4).masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf)
    expected = scores.softmax(-1) @ exact[2]
    y.backward(g)
    expected.backward(g.double())
    assert y.dtype == torch.bfloat16
    pairs = [(y, expected), *((a.grad, b.grad) for a, b in zip(ours, exact))]
    for a, b in pairs:  # a value passes two or three roundings
        assert (a.double() - b).norm() < 2**-7 * max(b.norm(), 2**-7)
    k[:, :, T // 2:], v[:, :, T // 2:] = 100, -100
    assert torch.equal(attend(q, k, v)[:, :, :T // 2], y[:, :, :T // 2])


@pytest.mark.parametrize("spread", [0.1, 1, 2, 4, 16])  # of the scores before their softmax
def test_attention_in_bfloat16_is_as_near_as_torchs(spread):
    """Values and gradients of attend are at most twice as far from float64 as torch's kernel's."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(4, 2, 256, 4, 48, generator=generator).transpose(2, 3)
    values[:2] *= math.sqrt(spread)
    q, k, v, g = values.bfloat16()

    def values_and_gradients(way, dtype):
        given = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        y = way(*given)
        return [x.double() for x in (y, *torch.autograd.grad(y, given, g.to(dtype)))]

    def torchs(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    exact = values_and_gradients(torchs, torch.float64)
    theirs = values_and_gradients(torchs, torch.bfloat16)
    ours = values_and_gradients(attend, torch.bfloat16)
    for name, a, b, c in zip(("y", "dq", "dk", "dv"), ours, theirs, exact):
        assert (a - c).norm() < 2 * (b - c).norm(), name


def test_rms_norm_is_computed_in_float32():
    x = torch.randn(3, 28, generator=torch.Generator().manual_seed(0))
    norm = RMSNorm(28, 1e-5)
    expected = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt()
    assert torch.allclose(norm(x).double(), expected, atol=1e-6)
    x = (x * 100).bfloat16()
    expected = x.float() / x.float().square().mean(-1, keepdim=True).sqrt()
    assert torch.allclose(norm(x).float(), expected, rtol=2**-8)


def test_forward_against_a_plain_implementation():
    """The whole decoder once more, in float64 numpy-like steps with attention written out."""
    model = tiny("gf2").double()
    idx = tokens(2, 9)
    w = model.state_dict()
    x = w["model.embed_tokens.codebook"][idx].double().repeat(1, 1, 4)
    cos, sin = (t.double() for t in rope_tables(torch.arange(9), 14, 10_000.0))

    def norm(x, gain):
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gain

    def rotate(t):
        a, b = t[..., :7], t[..., 7:]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    for i in range(2):
        prefix = f"model.layers.{i}."
        layer = {name.removeprefix(prefix): t for name, t in w.items() if name.startswith(prefix)}
        h = norm(x, layer["input_layernorm.weight"])
        q, k, v = (h @ layer[f"self_attn.{n}_proj.weight"].T for n in "qkv")
        q, k, v = (t.view(2, 9, 2, 14).transpose(1, 2) for t in (q, k, v))
        scores = rotate(q) @ rotate(k).transpose(-1, -2) / math.sqrt(14)
        scores = scores.masked_fill(torch.ones(9, 9).triu(1).bool(), -math.inf)
        y = (scores.softmax(-1) @ v).transpose(1, 2).reshape(2, 9, 28)
        x = x + y @ layer["self_attn.o_proj.weight"].T
        h = norm(x, layer["post_attention_layernorm.weight"])
        gate = h @ layer["mlp.gate_proj.weight"].T
        h = gate * gate.sigmoid() * (h @ layer["mlp.up_proj.weight"].T)
        x = x + h @ layer["mlp.down_proj.weight"].T
    logits = norm(x, w["model.norm.weight"]) @ w["lm_head.weight"].T
    # The norms and the rotation are float32 by design.
    assert torch.allclose(model(idx)[0], logits, atol=2e-6)


def test_no_position_sees_the_future():
    model, idx = tiny(), tokens(1, 12)
    changed = idx.clone()
    changed[0, 8:] = 99
    assert (model(idx)[0][:, :8] == model(changed)[0][:, :8]).all()


# --- loss

def test_loss_takes_shifted_targets_and_leaves_out_minus_one():
    model, idx, targets = tiny(), tokens(2, 6), tokens(2, 6, seed=1)
    logits, loss = model(idx)[0], model(idx, targets)[1]
    nats = -F.log_softmax(logits.double(), -1).gather(-1, targets[..., None])[..., 0]
    assert loss.item() == pytest.approx(nats.mean().item(), abs=1e-6)  # no second shift inside
    targets[0, :4] = -1
    expected = nats[targets >= 0].mean().item()
    assert model(idx, targets)[1].item() == pytest.approx(expected, abs=1e-6)


def test_loss_is_float32_under_autocast():
    model = tiny("learned", vocab_size=3000)
    idx = tokens(2, 32, high=3000)
    exact = model(idx, idx)[1]
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(idx, idx)[1]
    assert loss.dtype == torch.float32 and abs(loss - exact) < 0.01
    assert abs(exact.item() - math.log(3000)) < 0.05
    loss = model.bfloat16()(idx, idx)[1]  # in bfloat16 it would move in steps of 1/32
    assert loss.dtype == torch.float32 and abs(loss - exact) < 0.01


@pytest.mark.parametrize("vocab_size", [3072, 49_152])
def test_loss_of_bfloat16_hidden_states_is_nearer_than_torchs_own(vocab_size):
    """Why kernels.py has a loss of its own: torch's is rounded to bfloat16."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(512, 192, generator=generator).bfloat16()
    weight = 0.02 * torch.randn(vocab_size, 192, generator=generator)
    targets = torch.randint(vocab_size, (512,), generator=generator)
    exact = F.cross_entropy(x.double() @ weight.double().T, targets)
    ours = LinearCrossEntropy.apply(x, weight, targets, False)
    theirs = F.linear_cross_entropy(x, weight.bfloat16(), targets)
    assert ours.dtype == torch.float32 and (ours - exact).abs() < 0.0001
    assert (theirs - exact).abs() > (ours - exact).abs()


# --- gradients and activation checkpointing

@pytest.mark.parametrize("input", INPUTS)
def test_checkpointing_gives_every_parameter_its_gradient(input):
    model, idx, targets = tiny(input), tokens(2, 16), tokens(2, 16, seed=1)
    model(idx, targets)[1].backward()
    plain = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model.checkpoint_activations = "block"
    model(idx, targets)[1].backward()
    for name, p in model.named_parameters():
        assert p.grad is not None and p.grad.abs().sum() > 0, name
        assert torch.equal(p.grad, plain[name]), name


# --- generation

@pytest.mark.parametrize("cuts", [[7] + [1] * 20, [5, 2, 20], [27]])
def test_cached_logits_equal_uncached_ones(cuts):
    model, idx = tiny("learned"), tokens(2, sum(cuts))
    cache = model.new_cache()
    parts = [model(part, cache=cache)[0] for part in idx.split(cuts, dim=1)]
    assert torch.allclose(torch.cat(parts, 1), model(idx)[0], atol=1e-5)


def test_generate_greedily_equals_argmax_without_a_cache():
    model, idx = tiny("learned"), tokens(1, 5)
    ids = list(model.generate(idx, 20, temperature=0))
    for i in ids:
        assert i == model(idx)[0][0, -1].argmax().item()
        idx = torch.cat((idx, torch.tensor([[i]])), 1)


def test_generate_continues_beyond_the_context():
    model = tiny("learned")
    ids = list(model.generate(tokens(1, 40), 60, temperature=0))  # block_size 32
    assert len(ids) == 60
    assert ids == list(model.generate(tokens(1, 40), 60, temperature=0))


def test_sampling_options():
    logits = torch.tensor([[1.0, 3.0, 2.0, -1.0]])

    def draw(temperature=1.0, top_k=None, n=400):
        generators = [torch.Generator().manual_seed(i) for i in range(n)]
        return [pick(logits, temperature, top_k, generator).item() for generator in generators]

    assert set(draw()) == {0, 1, 2, 3}
    assert set(draw(top_k=2)) == {1, 2} and set(draw(top_k=9)) == {0, 1, 2, 3}
    assert set(draw(temperature=0)) == set(draw(temperature=1e-8)) == {1}
    frequency = draw(temperature=2.0, n=4000).count(1) / 4000
    assert frequency == pytest.approx((logits / 2).softmax(-1)[0, 1].item(), abs=0.03)


def test_sampling_stops_at_an_id_and_refuses_nonsense():
    model = tiny("learned")
    first = next(model.generate(tokens(1, 5), 1, temperature=0))
    assert list(model.generate(tokens(1, 5), 50, temperature=0, stop_id=first)) == [first]
    for wrong in (dict(temperature=-1), dict(top_k=0)):
        with pytest.raises(ValueError, match="expected"):
            list(model.generate(tokens(1, 5), 1, **wrong))
    with pytest.raises(ValueError, match="prompt"):
        list(model.generate(tokens(1, 0), 1))


# --- configuration

@pytest.mark.parametrize("change, message", [
    (dict(input="onehot"), "expected one of learned, tied, lowdim, projected, alone"),
    (dict(vocab_size=70_000), "65,536"),
    (dict(n_layer=0), "n_layer=0"),
    (dict(n_embd=30), "n_bits=7 .*; 28 or 56 would do"),
    (dict(n_embd=6), "28 would do"),
    (dict(input="learned", n_embd=30), "28 or 32 would do")])
def test_impossible_sizes_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**{**TINY, **change})


def test_too_long_an_input_is_refused():
    with pytest.raises(AssertionError, match="block_size"):
        tiny()(tokens(1, 33))


# --- checkpoints

def save(path, model):
    torch.save({"step": 3, "model": model.state_dict(), "model_config": asdict(model.config)}, path)


def test_stored_codes_win_over_the_seed(tmp_path):
    model = tiny("gf2", code_seed=7)
    state = {name: t.clone() for name, t in tiny("gf2", code_seed=8).state_dict().items()}
    model.load_state_dict(state)
    save(tmp_path / "step-00000003.pt", model)
    loaded, rest = load_model(tmp_path)
    assert rest["step"] == 3 and "model" not in rest
    assert all(torch.equal(t, state[name]) for name, t in loaded.state_dict().items())


def test_newest_checkpoint_of_a_run_is_loaded(tmp_path):
    for step, seed in ((3, 1), (20, 2)):
        save(tmp_path / f"step-{step:08d}.pt", tiny(seed=seed))
    names = [path.name for path in list_checkpoints(tmp_path)]
    assert names == ["step-00000020.pt", "step-00000003.pt"]
    assert torch.equal(load_model(tmp_path)[0].lm_head.weight, tiny(seed=2).lm_head.weight)


def test_strict_about_weights(tmp_path):
    for change in ("missing", "renamed", "added"):
        model = tiny()
        state = model.state_dict()
        if change != "added":
            tensor = state.pop("model.norm.weight")
        if change != "missing":
            state["model.extra.weight"] = torch.ones(28) if change == "added" else tensor
        checkpoint = {"step": 3, "model": state, "model_config": {**TINY, "input": "binary"}}
        torch.save(checkpoint, tmp_path / "step-00000003.pt")
        named = "model.extra.weight" if change == "added" else "model.norm.weight"
        with pytest.raises(ValueError, match=named):
            load_model(tmp_path)


def test_damaged_checkpoints_are_refused(tmp_path):
    path = tmp_path / "step-00000003.pt"
    save(path, tiny())
    good = path.read_bytes()
    # A changed byte: tests/test_train.py.
    for bad in (good[:len(good) // 2], good[:-20], good[:100], b"", b"\x80\x02"):
        path.write_bytes(bad)
        with pytest.raises(ValueError, match="damaged checkpoint"):
            read_checkpoint(path)
    path.write_bytes(good)
    assert read_checkpoint(path)["step"] == 3


def test_no_checkpoint_says_what_to_type(tmp_path):
    with pytest.raises(FileNotFoundError, match="train.py --out"):
        load_model(tmp_path)
    with pytest.raises(FileNotFoundError):
        load_model(tmp_path / "step-00000001.pt")
