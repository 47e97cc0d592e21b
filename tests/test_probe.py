"""evaluate.py probe finds what is in the residual stream, and only that."""

import dataclasses
import json
import math
import shutil
import sys

import numpy as np
import pytest
import torch

import evaluate
from codes import binary_codes
from inputs import INPUTS
from machinery.probe import full_windows, probe, window_losses
from machinery.readouts import (
    PROPERTIES,
    area_under_roc,
    ask,
    hold_out_ids,
    lexical_columns,
    read_classes,
    read_values,
)
from machinery.tokenizer import load_tokenizer
from model import Decoder, ModelConfig

SIZES = dict(vocab_size=300, block_size=32, n_layer=2, n_head=2, n_embd=36, n_ffn=48)


@pytest.fixture(scope="module")
def tokenizer(data_dir):
    return load_tokenizer(data_dir / "tokenizer.json")


def look(data_dir, tokenizer, change=None, positions=4096, **config):
    """Return the probe of a fresh model, after change(model)."""
    model = Decoder(ModelConfig(**SIZES, **config)).eval()
    if change is not None:
        with torch.no_grad():
            change(model)
    return probe(model, tokenizer, data_dir, positions)


# --- readouts

def test_discriminant_and_ridge_are_their_textbook_forms():
    generator = torch.Generator().manual_seed(0)
    classes = torch.tensor([0, 0, 0, 1, 1, 2]).repeat(1000)
    mixing = torch.tensor([[1, 0.5, 0], [0, 1, 0.3], [0, 0, 1]]).double()
    means = torch.tensor([[0, 0, 0], [1, -0.5, 0.2], [3, 2, 1]]).double()
    x = torch.randn(6000, 3, generator=generator).double() @ mixing + means[classes]
    targets = (x @ torch.tensor([2.0, -1, 0.5]).double() + 3)[:, None]
    test = torch.arange(6000) >= 4500
    found = read_classes(x, classes, ~test, test)
    read = read_values(x, targets, ~test, test)
    assert read == pytest.approx(targets[test], abs=0.03)  # the shrinkage of RIDGE
    fit, y = x[~test].numpy(), classes[~test].numpy()
    share = np.bincount(y) / len(y)
    centres = np.stack([fit[y == c].mean(0) for c in range(3)])
    spread = sum(share[c] * np.cov(fit[y == c].T, bias=True) for c in range(3))
    directions = np.linalg.inv(spread) @ centres.T
    scores = x[test].numpy() @ directions + np.log(share) - np.diag(centres @ directions) / 2
    # RIDGE moves the boundaries by that much.
    assert (scores.argmax(1) == found.numpy()).mean() > 0.998
    assert 0.6 < (found == classes[test]).double().mean() < 0.99


def test_positions_without_a_class_do_not_teach_one():
    x = torch.randn(600, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    classes = (x[:, 0] > 0).long()
    test = torch.arange(600) >= 400
    blurred = torch.where(torch.arange(600) % 2 == 0, classes, -1)
    unknown = (blurred < 0) & ~test
    for inputs in (x, torch.where(unknown[:, None], x.flip(0), x)):
        found = read_classes(inputs, blurred, ~test, test)
        assert (found == classes[test]).double().mean() > 0.9


def test_area_under_roc():
    truth = np.array([False, True, False, True])
    for scores, area in (([1, 2, 3, 4], 0.75), ([0, 1, 0, 1], 1), ([5] * 4, 0.5)):
        assert area_under_roc(scores, truth) == area
    assert math.isnan(area_under_roc([1, 2], np.array([True, True])))


# --- windows

def test_windows_take_turns_between_documents(data_dir):
    windows, documents = full_windows(data_dir, 32, 10**9)
    assert windows.shape[1] == 33 and len(windows) == len(documents)
    starts = np.flatnonzero(np.diff(documents) <= 0) + 1  # where a new round begins
    rounds = np.split(documents, starts)
    assert all(len(set(r)) == len(r) for r in rounds)
    assert all(set(later) <= set(earlier) for earlier, later in zip(rounds, rounds[1:]))
    few, owners = full_windows(data_dir, 32, 32 * 12)
    assert len(few) == 12 and torch.equal(few, windows[:12]) and len(set(owners)) == 12
    with pytest.raises(ValueError, match="a probe needs 4"):
        full_windows(data_dir, 100_000, 4096)


def test_losses_are_the_models(data_dir):
    model = Decoder(ModelConfig(**SIZES)).eval()
    windows, _ = full_windows(data_dir, 32, 32 * 37)
    losses = window_losses(model, windows)
    expected = model(windows[:, :-1], windows[:, 1:])[1].item()
    assert len(losses) == 37 and losses.mean() == pytest.approx(expected, abs=1e-5)


# --- the probe finds what is there

@pytest.mark.parametrize("config", [
    {"input": "binary"}, {"input": "gf2"}, {"input": "gf2", "table_free": True},
    {"input": "gf2", "code_seed": 5, "code_offset": "random"},
    {"input": "binary", "code_values": "pm1", "lift": "interleave"}])
def test_fixed_codes_are_perfectly_readable_at_the_input(data_dir, tokenizer, config):
    result = look(data_dir, tokenizer, **config)
    assert result["code"] == "own" and len(result["depths"]) == 3
    assert len(result["skipped"]) == len(result["swapped"]) == 2
    at_input, chance = result["depths"][0], result["chance"]
    assert (at_input["identity"], at_input["code"], at_input["bit"]) == (1, 1, 1)
    assert 0 < chance["identity"] < 0.3 and 0.5 <= chance["bit"] < 1 and chance["code"] < 0.3


def test_other_codes_bits_are_not_readable_from_recoded_ones(data_dir, tokenizer):
    """A bit of the id is a parity of several bits of its recoding, which no line reads."""
    own = look(data_dir, tokenizer, input="gf2")["depths"][0]
    windows, documents = full_windows(data_dir, 32, 4096)
    ids = windows[:, :-1].flatten()
    test = torch.from_numpy(documents % 2 == 1).repeat_interleave(32)
    model = Decoder(ModelConfig(**SIZES, input="gf2"))
    x = model.model.embed_tokens.codebook[ids].double()
    bits = torch.from_numpy(binary_codes(300)).double()[ids]
    read = read_values(x, bits, ~test, test)
    right = (read > 0.5) == (bits[test] > 0.5)
    assert own["bit"] == 1 > right.double().mean().item()


def test_a_learned_table_tells_the_identity_and_a_constant_one_nothing(data_dir, tokenizer):
    def blind(model):
        model.model.embed_tokens.weight.zero_()

    result = look(data_dir, tokenizer, input="learned")
    assert result["depths"][0]["identity"] == 1 and result["code"] == "binary"
    result = look(data_dir, tokenizer, blind, input="learned")
    chance = result["chance"]
    for depth in result["depths"]:
        assert depth["identity"] == pytest.approx(chance["identity"])
        assert depth["bit"] <= chance["bit"] + 1e-9
        assert depth["space first"] == 0.5 and abs(depth["bytes"]) < 0.05


def test_a_property_written_into_the_table_is_read(data_dir, tokenizer):
    """One coordinate of 36 holds it, the others noise: the readout finds it, in its own property
    alone."""
    spaces = torch.tensor([tokenizer.decode([i]).startswith(" ") for i in range(300)])

    def write(model):
        model.model.embed_tokens.weight.zero_()
        model.model.embed_tokens.weight[:, 7] = spaces.float()

    at_input = look(data_dir, tokenizer, write, input="learned")["depths"][0]
    assert at_input["space first"] == 1 and at_input["identity"] < 0.9


def test_ids_are_held_out_evenly(tokenizer):
    """Every other id of each kind, by frequency: no id's text is both fitted and scored."""
    lexical = lexical_columns(tokenizer)
    counts = torch.arange(len(lexical)).flip(0)
    held_out = hold_out_ids(lexical, counts)
    for i in range(len(PROPERTIES)):
        kind = lexical[:, i] > 0
        assert abs(int(held_out[kind].sum()) - int((~held_out[kind]).sum())) <= 2
    seen = counts > 150
    fitted, scored = counts[seen & ~held_out].sum(), counts[seen & held_out].sum()
    assert 0.8 < fitted / scored < 1.25


def test_memorised_ids_are_not_taken_for_properties():
    """A table of random rows knows no property of a token: its ids are told apart, and what was
    learned of one says nothing of another."""
    generator = torch.Generator().manual_seed(0)
    V, C, N = 1000, 200, 20_000
    ids = torch.randint(0, V, (N,), generator=generator)
    table = torch.randn(V, C, generator=generator)
    lexical = torch.randint(0, 2, (V, 4), generator=generator)
    test, nowhere = torch.arange(N) % 2 == 1, torch.zeros(N, dtype=torch.bool)
    codes = torch.from_numpy(binary_codes(V))
    classes = torch.full_like(ids, -1)
    questions = ask(ids, test, classes, codes, lexical, torch.bincount(ids, minlength=V))
    scores = questions.answer(table[ids])
    by_heart = dataclasses.replace(questions, held_out=nowhere)
    seen = read_values(table[ids].double(), by_heart.lexical, ~test, test)
    assert scores["bit"] > 0.6  # of ids that it has seen, and the same for any labels
    for i, name in enumerate(PROPERTIES):
        assert 0.4 < scores[name] < 0.6
        assert area_under_roc(seen[:, i].numpy(), questions.lexical[test, i].numpy() > 0) > 0.7
    assert scores["bytes"] < 0.05


def test_random_labels_tell_what_is_had_by_heart(data_dir, tokenizer):
    result = look(data_dir, tokenizer, input="learned")
    at_input, random_labels = result["depths"][0], result["random_labels"][0]
    assert result["untrained"] == result["depths"]  # of a fresh model
    assert at_input["bit"] == pytest.approx(random_labels["bit"], abs=0.03)
    assert random_labels["bit"] > result["chance"]["bit"] and math.isnan(random_labels["identity"])
    fixed = look(data_dir, tokenizer, input="binary")
    assert fixed["depths"][0]["bit"] == 1 > fixed["random_labels"][0]["bit"]


def test_the_untrained_model_is_of_the_same_seed(data_dir, tokenizer):
    torch.manual_seed(0)
    model = Decoder(ModelConfig(**SIZES, input="learned"), seed=5).eval()
    with torch.no_grad():
        first = probe(model, tokenizer, data_dir, 2048, seed=5)
        model.model.embed_tokens.weight.zero_()
        second = probe(model, tokenizer, data_dir, 2048, seed=5)
    assert first["untrained"] == first["depths"] == second["untrained"] != second["depths"]


def test_blocks_that_add_nothing_can_be_skipped_and_swapped(data_dir, tokenizer):
    def mute(model):
        first, second = model.model.layers
        second.self_attn.o_proj.weight.zero_()
        second.mlp.down_proj.weight.zero_()
        first.mlp.down_proj.weight.mul_(300)  # at the start a block adds little

    result = look(data_dir, tokenizer, mute, input="binary")
    assert result["skipped"][1] == result["swapped"][1] == 0
    assert abs(result["skipped"][0]) > 1e-5 < abs(result["swapped"][0])


def test_a_block_that_adds_the_same_everywhere_can_be_swapped_but_not_skipped(data_dir, tokenizer):
    added = 5 * torch.linspace(-1, 1, 36)

    def constant(model):  # before the probe's own hook
        block = model.model.layers[0]
        block.register_forward_hook(lambda _, inputs, output: inputs[0] + added)

    result = look(data_dir, tokenizer, constant, input="binary")
    assert abs(result["swapped"][0]) < 1e-5 < 1e-3 < abs(result["skipped"][0])


@pytest.mark.parametrize("input", INPUTS)
def test_hooks_are_gone_afterwards_and_every_interface_works(data_dir, tokenizer, input):
    model = Decoder(ModelConfig(**SIZES, input=input)).eval()
    result = probe(model, tokenizer, data_dir, 1024)
    again = probe(model, tokenizer, data_dir, 1024)
    assert json.dumps(result) == json.dumps(again)
    for module in model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks


# --- the command

def test_command_prints_and_writes_what_it_found(data_dir, tmp_path, monkeypatch, capsys):
    config = ModelConfig(**SIZES, input="gf2")
    torch.save({"step": 10, "model": Decoder(config).state_dict(), "data": str(data_dir),
                "eot_id": 0, "model_config": dataclasses.asdict(config)},
               tmp_path / "step-00000010.pt")
    shutil.copy(data_dir / "tokenizer.json", tmp_path)
    monkeypatch.setattr(sys, "argv", ["evaluate.py", "probe", str(tmp_path), "--positions=2048",
                                      "--device=cpu"])
    evaluate.main()
    text = capsys.readouterr().out
    result = json.loads((tmp_path / "probe-00000010.json").read_text(encoding="utf-8"))
    assert f"{result['loss']:.4f}" in text and "chance" in text
    assert f"block 2     skipped {result['skipped'][1]:+.4f}" in text
    assert "untrained, seed 1" in text and "random labels" in text
    assert (tmp_path / "probe-00000010.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
