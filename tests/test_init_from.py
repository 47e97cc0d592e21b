"""train.py --init_from: a new run from a checkpoint's weights, also with another input."""

import json
import shutil

import pytest
import torch
from training import Forks, flags

from machinery import huggingface
from machinery.checkpoints import read_checkpoint
from machinery.tokenizer import load_tokenizer, train_tokenizer

INPUT = "model.embed_tokens."


@pytest.fixture(scope="module")
def forks(tmp_path_factory):
    forks = Forks(tmp_path_factory.mktemp("forks"))
    yield forks
    forks.close()


def start_of(data, out, source, forks, **changes):
    """Start a run of one update from a checkpoint; return its weights after it, at a learning rate
    that moves none of them."""
    still = dict(max_lr=1e-30, min_lr=1e-30, max_targets=512, decay_steps=0, warmup_steps=1)
    codes = forks.run(flags(data, out, init_from=source, **still | changes))
    assert codes == [0], forks.output()
    return read_checkpoint(final_path(out))


def final_path(out):
    return sorted(out.glob("step-*.pt"))[-1]


@pytest.fixture(scope="module")
def trained(data_dir, forks, tmp_path_factory):
    """A run of input=learned after 20 updates."""
    out = tmp_path_factory.mktemp("init") / "learned"
    assert forks.run(flags(data_dir, out, input="learned")) == [0], forks.output()
    return out


def same(ours, theirs, names):
    return all(torch.equal(ours[name], theirs[name]) for name in names)


@pytest.mark.parametrize("input", ("binary", "spelling", "tied", "factored"))
def test_body_and_output_are_kept_and_the_input_is_new(data_dir, forks, trained, tmp_path, input):
    theirs = read_checkpoint(final_path(trained))["model"]
    state = start_of(data_dir, tmp_path / "run", trained, forks, input=input)
    told = " ".join(forks.output().split())
    kept = [name for name in theirs if not name.startswith(INPUT)]
    assert same(state["model"], theirs, kept)
    values = sum(theirs[name].numel() for name in kept)
    assert f"after 20 updates; body and output kept, {values:,} values; input {input} new, " \
           "in place of learned" in told
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["init_from"].endswith("learned/step-00000020.pt") and config["input"] == input
    assert len(config["init_from_sha256"]) == 64
    moments = state["optimizer"]["state"]
    assert all(float(value["step"]) == 1 for value in moments.values())


def test_without_a_flag_the_input_is_kept_too(data_dir, forks, trained, tmp_path):
    theirs = read_checkpoint(final_path(trained))["model"]
    state = start_of(data_dir, tmp_path / "run", trained, forks)
    assert state["model_config"]["input"] == "learned"
    assert same(state["model"], theirs, theirs) and state["model"].keys() == theirs.keys()
    assert "input learned kept" in forks.output()


def test_two_processes_start_from_the_same_weights(data_dir, forks, trained, tmp_path):
    asked = dict(input="binary", init_from=trained, max_targets=1024, decay_steps=0)
    assert forks.run(flags(data_dir, tmp_path / "one", **asked)) == [0], forks.output()
    assert forks.run(flags(data_dir, tmp_path / "two", **asked), processes=2) == [0, 0]
    one, two = (read_checkpoint(final_path(tmp_path / name))["model"] for name in ("one", "two"))
    for name, value in one.items():  # sums of gradients in another order
        torch.testing.assert_close(two[name], value, atol=1e-6, rtol=1e-5)


def test_resume_needs_the_checkpoint_no_longer(data_dir, forks, trained, tmp_path):
    """And gives the same bits; a resume from another start than the run's is refused."""
    source, whole, halves = tmp_path / "source", tmp_path / "whole", tmp_path / "halves"
    shutil.copytree(trained, source)
    asked = dict(input="binary", init_from=source, keep=10)
    assert forks.run(flags(data_dir, whole, **asked)) == [0], forks.output()
    assert forks.run(flags(data_dir, halves, **asked | {"max_targets": 512 * 10})) == [0]
    shutil.rmtree(source)
    assert forks.run(flags(data_dir, halves, resume=True, **asked)) == [0], forks.output()
    ours, theirs = (read_checkpoint(final_path(out))["model"] for out in (whole, halves))
    assert same(ours, theirs, ours)
    configs = [json.loads((out / "config.json").read_text()) for out in (whole, halves)]
    for name in ("init_from", "init_from_sha256", "initial_body_sha256"):
        assert configs[0][name] == configs[1][name] is not None
    line = forks.refused(flags(data_dir, halves, resume=True, input="binary"))
    assert "init_from_sha256" in line


@pytest.mark.parametrize("changes, said", [
    ({"n_layer": 3}, "--n_layer=3, but the weights of"),
    ({"vocab_size": 301}, "--vocab_size=301, but the weights of"),
    ({"init_from": "none.pt"}, "none.pt"), ({"init_from": "README.md"}, "README.md")])
def test_a_start_that_does_not_fit_is_refused(data_dir, forks, trained, tmp_path, changes, said):
    asked = {"init_from": trained, "input": "binary"} | changes
    assert said in forks.refused(flags(data_dir, tmp_path / "run", **asked))
    assert not list(tmp_path.glob("run/step-*"))


def test_a_start_of_another_tokenizer_is_refused(data_dir, forks, trained, tmp_path):
    """Of the same size: every row would mean another token."""
    other = tmp_path / "other"
    shutil.copytree(trained, other)
    size = load_tokenizer(data_dir / "tokenizer.json").get_vocab_size()
    text = "quite other words than those before, and some more of them " * 50
    (other / "tokenizer.json").write_text(train_tokenizer([text], size).to_str())
    state = torch.load(final_path(other), weights_only=True)
    state.pop("tokenizer_sha256", None)
    torch.save(state, final_path(other))
    line = forks.refused(flags(data_dir, tmp_path / "run", init_from=other, input="binary"))
    assert "tokenizer" in line


def test_weights_that_are_not_finite_are_no_start(data_dir, forks, trained, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(trained, other)
    state = torch.load(final_path(other), weights_only=True)
    state["model"]["lm_head.weight"][0, 0] = float("nan")
    torch.save(state, final_path(other))
    line = forks.refused(flags(data_dir, tmp_path / "run", init_from=other, input="binary"))
    assert "not finite" in line


def test_an_imported_llama_is_a_start(data_dir, forks, trained, tmp_path):
    """Its weights, its eps and its angles; and --resume of it tells of --init_from."""
    folder, run = tmp_path / "hf", tmp_path / "imported"
    huggingface.export_checkpoint(trained, folder)
    settings = json.loads((folder / "config.json").read_text())
    settings.pop("nanobit")
    settings["rms_norm_eps"] = 1e-3
    (folder / "config.json").write_text(json.dumps(settings))
    theirs = read_checkpoint(huggingface.import_folder(folder, run))
    state = start_of(data_dir, tmp_path / "run", run, forks, input="binary")
    assert state["model_config"]["norm_eps"] == theirs["model_config"]["norm_eps"] == 1e-3
    kept = [name for name in theirs["model"] if not name.startswith(INPUT)]
    assert same(state["model"], theirs["model"], kept)
    line = forks.refused(flags(data_dir, run, resume=True))
    assert "--init_from" in line
