"""Every input interface: its price, its start, its formula by hand, and its way through a run."""

import math

import pytest
import torch
from training import assert_same_run, run_here

import train
from codes import FIXED
from inputs import INPUTS, TRAINED
from machinery import huggingface
from machinery.checkpoints import load_model
from machinery.costs import count_parameters, flops_per_target
from model import Decoder, ModelConfig

TINY = dict(vocab_size=100, block_size=32, n_layer=2, n_head=2, n_embd=28, n_ffn=40)  # K = 7
# 4,096 ids have each bit set in half of them, and enough values to measure a deviation.
WIDE = dict(vocab_size=4096, block_size=32, n_layer=2, n_head=2, n_embd=192, n_ffn=256)
TABLE = 49_152 * 2048


def tiny(input, **fields):
    return Decoder(ModelConfig(**TINY | fields, input=input))


# --- what each has to train at the paper's size

@pytest.mark.parametrize("input, fields, values, multiplied", [
    ("learned", {}, 100_663_296, 0),
    ("tied", {}, 0, 0),
    ("lowdim", {}, 786_432, 0),                       # 49,152 x 16
    *((input, {}, 0, 0) for input in FIXED),
    ("projected", {}, 34_816, 32_768),                # 2,048 x 16, and 2,048
    ("alone", {}, 264_320, 264_192),                  # 128 x 16 and 128 x 2,048, and 128
    ("factored", {}, 819_200, 32_768),                # 16 x 49,152, and 16 x 2,048
    ("factored", {"rank": 128}, 6_553_600, 262_144),
    ("digits", {"base": 2}, 65_536, 0),
    ("digits", {}, 131_072, 0),
    ("digits", {"base": 222}, 909_312, 0),
    ("digits", {"base": 49_152}, TABLE, 0),
    ("hashed", {}, 2_195_456, 0),                     # 2 x 49,152 and 1,024 x 2,048
    ("spelling", {}, 16_777_216, 0)])                 # 256 x 32 x 2,048
def test_trainable_input_values_at_the_papers_size(input, fields, values, multiplied):
    with torch.device("meta"):
        model = Decoder(ModelConfig(input=input, n_layer=1, **fields))
    n = count_parameters(model)
    assert n["input"] == values
    body_and_head = 4 * 2048**2 + 3 * 2048 * 8192 + TABLE
    assert flops_per_target(model)[0] == 6 * (body_and_head + multiplied)


# --- the start: the input's root mean square, and the gradient of the first block

def start(model):
    """Return (root mean square of all input vectors, norm of block 0's gradient)."""
    ids = torch.arange(4096)[None]
    with torch.no_grad():
        x = model.model.embed_tokens(ids, torch.float32, model.lm_head.weight)
    window = torch.randint(4096, (4, 33), generator=torch.Generator().manual_seed(0))
    model(window[:, :-1], window[:, 1:])[1].backward()
    squares = [p.grad.square().sum() for p in model.model.layers[0].parameters()]
    return x.square().mean().sqrt().item(), sum(squares).sqrt().item()


def rms_is_right(rms, stated):
    return abs(rms / stated - 1) < 0.1


def gradient_is_right(norm, stated):
    """Norms hide the input's size from the block, and divide the gradient by about that."""
    low, high = {0.02: (1.7, 2.8)}.get(stated, (0.02, 0.2))
    return low < norm < high


STARTS = [
    *((input, {}, 0.02) for input in TRAINED),
    *((input, {"input_std": 1.0}, 1) for input in TRAINED if input != "tied"),
    *((input, {"code_scale": "matched"}, 0.02) for input in FIXED),
    ("binary", {}, 0.5**0.5), ("gf2", {}, 0.5**0.5), ("sinusoid", {}, 0.5**0.5), ("random", {}, 1)]


@pytest.mark.parametrize("input, fields, stated", STARTS)
def test_the_input_and_the_first_gradient_start_as_stated(input, fields, stated):
    rms, norm = start(Decoder(ModelConfig(**WIDE, input=input, **fields)))
    assert rms_is_right(rms, stated), rms
    assert gradient_is_right(norm, stated), norm


def test_every_interface_has_a_stated_start():
    assert {input for input, _, _ in STARTS} == set(INPUTS)


def test_factors_that_both_start_small_are_found():
    model = Decoder(ModelConfig(**WIDE, input="factored"))
    for p in model.model.embed_tokens.parameters():
        torch.nn.init.normal_(p, std=0.02, generator=torch.Generator().manual_seed(1))
    rms, norm = start(model)
    assert not rms_is_right(rms, 0.02) and not gradient_is_right(norm, 0.02)


# --- the formulas, one id at a time

def signs(t):
    return torch.tensor([1.0 if t >> j & 1 else -1.0 for j in range(7)])


def learned_row(table, head, t):
    return table.weight[t]


def tied_row(table, head, t):
    return head[t]


def lowdim_row(table, head, t):
    return torch.tensor([table.weight[t, c % 7].item() for c in range(28)])


def projected_row(table, head, t):
    return (table.weight * signs(t)).sum(1) + table.bias


def alone_row(table, head, t):
    inner = ((table.up * signs(t)).sum(1) + table.bias).clamp(min=0)
    return (table.down * inner).sum(1)


def factored_row(table, head, t):
    return sum(table.weight[t, i] * table.lift[i] for i in range(3))


def digits_row(table, head, t):  # 100 ids in base 5 have three digits
    return sum(table.weight[5 * i + t // 5**i % 5] for i in range(3))


def hashed_row(table, head, t):
    assert table.rows.shape == (100, 2) and len(table.weight) == 8
    return sum(table.importance[t, i] * table.weight[table.rows[t, i]] for i in range(2))


def spelling_row(table, head, t):  # without a tokenizer an id is spelt as its number
    rows = [table.weight[256 * i + byte] for i, byte in enumerate(str(t).encode())]
    return sum(rows) / math.sqrt(len(rows))


BY_HAND = {
    "learned": (learned_row, {}), "tied": (tied_row, {}), "lowdim": (lowdim_row, {}),
    "projected": (projected_row, {}), "alone": (alone_row, {"inner_width": 5}),
    "factored": (factored_row, {"rank": 3}), "digits": (digits_row, {"base": 5}),
    "hashed": (hashed_row, {"buckets": 8}), "spelling": (spelling_row, {"positions": 4})}


@pytest.mark.parametrize("input", TRAINED)
def test_trained_inputs_are_their_formulas(input):
    row, fields = BY_HAND[input]
    model = tiny(input, input_std=1.0, **fields) if input != "tied" else tiny(input)
    table, head = model.model.embed_tokens, model.lm_head.weight
    with torch.no_grad():
        for name, p in table.named_parameters():
            if name == "bias":
                p.copy_(torch.linspace(-1, 1, len(p)))  # it starts at 0, and would not be seen
        expected = torch.stack([row(table, head, t) for t in range(100)])
        found = table(torch.arange(100).view(4, 25), torch.float32, head).reshape(100, 28)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


# --- roles, and a run that stops, goes on and is exported

ROLES = {  # (decayed, multiplied by) of each parameter of the input
    **{input: {} for input in ("tied", *FIXED)},
    "learned": {"weight": (True, False)}, "lowdim": {"weight": (True, False)},
    "projected": {"weight": (True, True), "bias": (False, False)},
    "alone": {"up": (True, True), "bias": (False, False), "down": (True, True)},
    "factored": {"weight": (True, False), "lift": (True, True)},
    "digits": {"weight": (True, False)}, "spelling": {"weight": (True, False)},
    "hashed": {"weight": (True, False), "importance": (True, False)}}


@pytest.mark.parametrize("input", INPUTS)
def test_roles_of_the_inputs_parameters(input):
    model = tiny(input)
    groups = train.build_optimizer(model, 1e-3).param_groups
    decayed = {id(p) for group in groups if group["weight_decay"] for p in group["params"]}
    roles, found = model.roles(), {}
    for name, p in model.model.embed_tokens.named_parameters():
        role = roles[f"model.embed_tokens.{name}"]
        assert role.group == "input" and role.decays == (id(p) in decayed)
        found[name] = role.decays, role.multiplies
    assert found == ROLES[input]


@pytest.fixture(scope="module")
def straight(data_dir, tmp_path_factory):
    """20 updates of an interface without a stop, each made once."""
    folder = tmp_path_factory.mktemp("straight")

    def run(input):
        if not (folder / input).exists():
            with pytest.MonkeyPatch.context() as patch:
                run_here(patch, data_dir, folder / input, input=input, micro_batch=16)
        return folder / input
    return run


@pytest.mark.parametrize("input", INPUTS)
def test_a_resumed_run_is_bitwise_the_same(data_dir, straight, tmp_path, monkeypatch, capsys,
                                           input):
    for updates in (10, 20):
        run_here(monkeypatch, data_dir, tmp_path / "run", input=input, resume=True, micro_batch=16,
                 max_targets=512 * updates)
    assert "resumed after update 10" in capsys.readouterr().out
    assert_same_run(straight(input), tmp_path / "run")


@pytest.mark.parametrize("input", INPUTS)
def test_an_exported_folder_is_a_plain_llama_of_the_same_logits(straight, tmp_path, input):
    """A decoder with a learned table is a plain Llama: tests/test_evaluate.py has transformers
    agree."""
    from safetensors.torch import load_file
    huggingface.export_checkpoint(straight(input), tmp_path / "hf")
    model = load_model(straight(input))[0].eval()
    c = model.config
    plain = Decoder(ModelConfig(input="learned", vocab_size=300, block_size=32, n_layer=c.n_layer,
                                n_head=c.n_head, n_embd=c.n_embd, n_ffn=c.n_ffn))
    plain.load_state_dict(load_file(tmp_path / "hf" / "model.safetensors"))
    ids = torch.arange(288).view(9, 32)
    with torch.no_grad():
        ours, exported = model(ids)[0], plain(ids)[0]
    assert ours.std() > 0.01
    torch.testing.assert_close(exported, ours, atol=1e-5, rtol=1e-5)
