"""The recipe's figures, the sampler's distribution, and whole runs: the same for any number of
processes and any micro-batch. Without random state there is none to save, so a resume is exact by
design; tests/test_runs.py has what a resume and a fault can do to a run."""

import doctest
import json
import math
import os
import shutil
import subprocess
import sys
import time
import types
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from training import (
    ROOT,
    TINY,  # noqa: F401  of other test files
    UPDATES,
    FirstUpdate,
    Forks,
    assert_near,
    assert_same_run,
    fake_cuda,
    final,
    flags,
    furthest,
    rows,
    run_here,
    values,
)

import model as model_file
import train
from codes import FIXED
from inputs import INPUTS
from machinery import machine, reports, settings
from machinery.arguments import parse_prepare_args
from machinery.checkpoints import load_model, read_checkpoint
from machinery.costs import count_parameters
from machinery.runs import list_checkpoints
from machinery.shards import open_shards
from machinery.tokenizer import SMOLLM2
from model import Decoder, ModelConfig
from train import WindowSampler, learning_rate, rank_rows, uniforms


@pytest.fixture(scope="module")
def forks(tmp_path_factory):
    forks = Forks(tmp_path_factory.mktemp("forks"))
    yield forks
    forks.close()


@pytest.fixture(scope="module")
def straight(data_dir, forks, tmp_path_factory):
    """An undisturbed run of 20 updates of binary."""
    out = tmp_path_factory.mktemp("straight") / "run"
    assert forks.run(flags(data_dir, out, keep=10)) == [0], forks.output()
    return out


# --- the recipe

PAPER = (1.5e-4, 1e-5, 2000, 382_500)


def test_docstring_examples():
    assert doctest.testmod(train).failed == 0


@pytest.mark.parametrize("step, lr", [
    (1, 7.5e-8), (100, 7.5e-6), (1000, 7.5e-5), (1999, 1.49925e-4), (2000, 1.5e-4),
    (10_000, 1.498473557e-4), (50_000, 1.445743822e-4), (97_125, 1.294974747e-4),
    (192_250, 8.0e-5), (300_000, 2.562100590e-5), (381_470, 1.000253122e-5), (382_500, 1e-5),
    (400_000, 1e-5)])
def test_learning_rates_of_the_paper(step, lr):
    assert learning_rate(step, *PAPER) == pytest.approx(lr, rel=1e-9)


@pytest.mark.parametrize("warmup, total", [(100, 100), (0, 10), (0, 1), (1, 1), (5, 20)])
def test_schedule_has_no_jump_and_one_peak(warmup, total):
    lrs = [learning_rate(step, 1.0, 0.1, warmup, total) for step in range(1, total + 4)]
    assert all(0 < lr <= 1 for lr in lrs) and lrs[total:] == [0.1] * 3
    if warmup:
        assert lrs[:warmup] == [step / warmup for step in range(1, warmup + 1)]
        assert lrs.count(1.0) == 1
    if warmup < total:  # no drop larger than the cosine's steepest step
        falls = [a - b for a, b in zip(lrs[max(warmup - 1, 0):], lrs[max(warmup, 1):])]
        assert max(falls) < 0.9 * math.pi / 2 / (total - warmup) + 1e-9


def parse_args(argv):
    return settings.parse_args(train.PRESETS, train.__doc__, argv)


def test_recipe_of_the_paper():
    args = parse_args(["--preset=paper", "--device=cpu"])
    assert args.tokens_per_step == 2 * 8 * 8 * 2048 == 262_144
    # The update that reaches 100e9.
    assert args.steps == 381_470 and args.steps * args.tokens_per_step == 100_000_071_680
    assert (args.max_lr, args.min_lr, args.warmup_steps, args.decay_steps) == PAPER
    assert (args.streams, args.windows_per_visit) == (2, 1024 * 8)
    visit = args.streams * args.windows_per_visit * 2048
    assert (visit, visit // args.tokens_per_step) == (2 * 16_777_216, 128)
    assert settings.model_config(args) == ModelConfig()
    recipe = train.BETAS, train.EPS, train.WEIGHT_DECAY, train.GRAD_CLIP
    assert recipe == ((0.9, 0.95), 1e-8, 0.01, 1.0)


def test_flags_override_the_preset_and_both_spellings_work():
    assert parse_args(["--preset", "smoke", "--n_layer", "3", "--max_targets=1e5"]).n_layer == 3
    args = parse_args(["--preset=smoke", "--max_targets=1e6", "--input=gf2", "--seed=3"])
    assert (args.max_targets, args.out) == (1_000_000, "out/smoke-gf2-s3")
    assert args.n_embd == train.PRESETS["smoke"]["n_embd"]
    assert args.decay_steps == args.steps == -(-1_000_000 // args.tokens_per_step)


def test_what_settings_work_out_is_a_new_value():
    args = parse_args(["--preset=smoke", "--device=cpu"])
    before = dict(vars(args))
    two = settings.with_micro_batch(args, world_size=2)
    assert (two.micro_batch, two.accumulation) == (4, 1) and vars(args) == before


@pytest.mark.parametrize("input", INPUTS)
def test_matrices_decay_and_vectors_do_not(input):
    model = Decoder(ModelConfig(input=input, vocab_size=100, block_size=8, n_layer=2, n_head=2,
                                n_embd=28, n_ffn=40))
    decayed, plain = train.build_optimizer(model, 1e-3).param_groups
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.01, 0.0)
    assert sum(p.numel() for p in decayed["params"]) == count_parameters(model)["decayed"]
    grouped = [*decayed["params"], *plain["params"]]
    assert {id(p) for p in grouped} == {id(p) for p in model.parameters()}
    assert len(grouped) == len(list(model.parameters()))
    assert all(p.dim() == 1 for p in plain["params"])


# --- the sampler

class FakeShard:
    """Documents of given lengths; the ids count up through the shard, so a window tells where it is
    from."""

    def __init__(self, *lengths, base=0):
        self.starts = np.concatenate(([0], np.cumsum(lengths)))
        self.ids = (base + np.arange(self.starts[-1])).astype(np.uint16)
        self.ids.flags.writeable = False
        self.longest, self.documents, self.tokens = max(lengths), len(lengths), sum(lengths)

    def map(self):
        return self.ids, self.starts

    def verify(self):
        pass


def draw(sampler, n, stream=0):
    return sampler.batch([(stream, w) for w in range(n)])


def test_uniforms_are_a_function_of_their_five_arguments():
    a = uniforms(1, 0, train.WINDOWS, 5, 1000)
    assert (a == uniforms(1, 0, train.WINDOWS, 5, 1000)).all() and (0 <= a).all() and (a < 1).all()
    for other in ((2, 0, train.WINDOWS, 5), (1, 1, train.WINDOWS, 5),
                  (1, 0, train.SHARD_ORDER, 5), (1, 0, train.WINDOWS, 6)):
        assert not np.isin(a, uniforms(*other, 1000)).any()
    for_ever = [0.3035680343067586, 0.8487087496857769]
    assert uniforms(1, 0, train.WINDOWS, 0, 2).tolist() == for_ever


def test_ends_of_documents():
    """T + 1 tokens give one window, T + 2 two, T none; the last target is the last token."""
    T = 8
    sampler = WindowSampler([FakeShard(T, T + 1, T + 2, 3)], T, seed=1, windows_per_visit=1000)
    first = Counter(draw(sampler, 1000)[0][:, 0].tolist())
    # Each document alike, then each start alike.
    assert set(first) == {T, 2 * T + 1, 2 * T + 2}
    assert abs(first[T] - 500) < 80 and abs(first[2 * T + 1] - 250) < 70
    inputs, targets = draw(sampler, 1000)
    assert (targets == inputs + 1).all() and inputs.shape == targets.shape == (1000, T)
    assert targets[:, -1].max() == 3 * T + 2  # the last token of the last eligible document


def test_documents_are_uniform_whatever_their_length():
    shard = FakeShard(9, 12, 100, 2000, 8, 40)
    inputs = draw(WindowSampler([shard], 8, seed=3, windows_per_visit=20_000), 20_000)[0]
    document = np.searchsorted(shard.starts, inputs[:, 0].numpy(), side="right") - 1
    counts = np.bincount(document, minlength=6)
    assert counts[4] == 0
    expected = 20_000 / 5
    # Chi-square, 4 degrees of freedom: p = 5e-4.
    assert ((counts[counts > 0] - expected) ** 2 / expected).sum() < 20
    # Inside a document every start is alike (91 degrees of freedom), and no window leaves it.
    starts = inputs[document == 2][:, 0].numpy() - shard.starts[2]
    histogram, each = np.bincount(starts, minlength=92), len(starts) / 92
    assert len(histogram) == 92 and ((histogram - each) ** 2 / each).sum() < 150
    ends = inputs[:, -1].numpy() + 1
    assert (np.searchsorted(shard.starts, ends, side="right") - 1 == document).all()


def test_a_stream_visits_every_shard_once_a_pass_in_a_new_order():
    """Shards of any size alike; one without a long document is left out."""
    shards = [FakeShard(20, *[30] * i, base=1000 * i) for i in range(5)] + [FakeShard(3, 3)]
    sampler = WindowSampler(shards, 8, seed=1, windows_per_visit=4)
    visits = (draw(sampler, 4 * 5 * 20)[0][:, 0].numpy() // 1000).reshape(-1, 4)
    assert (visits == visits[:, :1]).all()
    passes = visits[:, 0].reshape(20, 5).tolist()
    assert all(sorted(p) == [0, 1, 2, 3, 4] for p in passes) and len(set(map(tuple, passes))) > 1
    assert (draw(sampler, 80, stream=1)[0] != draw(sampler, 80, stream=0)[0]).any()
    assert len(sampler.batch(rank_rows(10**6, 4, 2, 0, 1))[0]) == 4  # as long as one likes


def test_windows_do_not_depend_on_when_they_are_asked_for():
    shards = [FakeShard(20, 50, base=1000 * i) for i in range(3)]

    def sampler(seed=5):
        return WindowSampler(shards, 8, seed=seed, windows_per_visit=4)

    straight = draw(sampler(), 60)[0]
    backwards = sampler().batch([(0, w) for w in reversed(range(60))])[0].flip(0)
    alone = torch.cat([sampler().batch([(0, w)])[0] for w in range(60)])
    assert torch.equal(straight, backwards) and torch.equal(straight, alone)
    assert not torch.equal(straight, draw(sampler(seed=6), 60)[0])


@pytest.mark.parametrize("world_size", [1, 2, 4, 8, 16])
def test_processes_share_one_global_batch(world_size):
    for step in (0, 1, 17):
        parts = [rank_rows(step, 16, 2, rank, world_size) for rank in range(world_size)]
        together = sum(parts, [])
        assert together == rank_rows(step, 16, 2, 0, 1) and len(set(together)) == 16
        first = [(0, w) for w in range(8 * step, 8 * step + 8)]
        assert sorted(together) == first + [(1, w) for _, w in first]
    if world_size == 2:  # the paper: a stream each
        assert [{stream for stream, _ in part} for part in parts] == [{0}, {1}]


@pytest.mark.filterwarnings("error")
def test_large_ids_stay_positive_and_the_batch_is_its_own():
    shard = FakeShard(5)
    shard.ids = np.array([0, 32_767, 32_768, 49_151, 65_535], np.uint16)
    inputs, targets = WindowSampler([shard], 4, 1, 1).batch([(0, 0)])
    assert inputs.dtype == torch.int64 and inputs.tolist() == [[0, 32_767, 32_768, 49_151]]
    assert targets[0, -1] == 65_535
    inputs += 1
    assert shard.ids[0] == 0


def test_no_long_document_is_refused():
    message = "block_size=8: no document has more than 8 tokens .*the longest of 2 has 8"
    with pytest.raises(ValueError, match=message):
        WindowSampler([FakeShard(8, 5)], 8, 1, 1)


def test_a_stream_keeps_one_shard_mapped(data_dir):
    """A mapping that stays looks like a leak: the pages it has touched count as the process's."""
    sampler = WindowSampler(open_shards(data_dir, "train"), 32, seed=1, windows_per_visit=2)
    visited = set()
    for w in range(0, 40, 2):
        for stream in (0, 1):
            visited.add(sampler.tokens_and_starts(stream, w // 2)[0].filename)
        mapped = Path("/proc/self/maps").read_text().count(f"{data_dir}/train/")
        assert mapped <= 2
    assert len(visited) == 3


def test_no_float64_on_the_models_device(monkeypatch):
    """Apple's GPUs have none: the evaluation and what watches over an update do without."""
    class Refuse(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            for tensor in tree_leaves(result):
                if isinstance(tensor, torch.Tensor) and tensor.device.type == "meta":
                    assert tensor.dtype != torch.float64, func
            return result

    class Ones(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.lm_head = torch.nn.Linear(4, 1, device="meta")

        def forward(self, x, y):
            return None, self.lm_head(x.unsqueeze(-1).expand(-1, -1, 4).float()).mean()

    to_cpu = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda self: torch.ones(self.shape)
                        if self.device.type == "meta" else to_cpu(self))
    x, autocast = torch.zeros(5, 3, dtype=torch.int64), torch.autocast("cpu", enabled=False)
    with Refuse():
        assert train.evaluate(Ones(), x, x, 2, autocast) == 1.0
        model, bad = Ones(), torch.zeros(3, device="meta")
        optimizer = types.SimpleNamespace(step=lambda: None, zero_grad=lambda **_: None)
        train.update(model, optimizer, (x.to("meta"), x.to("meta")), 2, autocast, 1, bad)


def test_rotary_angles_without_float64_on_the_models_device(monkeypatch):
    """They are made on the CPU then, in float64 all the same."""
    class Refuse(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.device.type == "cuda":
                assert result.dtype != torch.float64, func
            return result

    monkeypatch.setattr(model_file, "NO_FLOAT64", ("cuda",))
    with FakeTensorMode(), Refuse():
        positions = torch.arange(4, device="cuda")
        cos, sin = model_file.rope_tables(positions, 8, 10_000.0)
    assert cos.device.type == sin.device.type == "cuda" and cos.shape == (4, 4)
    assert cos.dtype == torch.float32


def validation(data_dir, rank=0, world_size=1, **changes):
    values = dict(data=data_dir, block_size=32, eval_windows=5, micro_batch=8) | changes
    return train.load_validation(types.SimpleNamespace(**values), rank, world_size, print)


def test_validation_windows_are_the_first_of_one_sequence(data_dir):
    """However many there are, and whatever the processes and micro-batches; of every shard alike.
    """
    many = validation(data_dir, eval_windows=30)[0][:30]
    for n in (1, 5, 16):
        assert torch.equal(validation(data_dir, eval_windows=n)[0][:n], many[:n])
    for world_size, micro_batch in ((1, 1), (2, 3), (4, 8)):
        parts = [validation(data_dir, rank, world_size, micro_batch=micro_batch)
                 for rank in range(world_size)]
        inputs = torch.stack([part[0] for part in parts], 1).flatten(0, 1)
        targets = torch.stack([part[1] for part in parts], 1).flatten(0, 1)
        assert torch.equal(inputs[:5], many[:5]) and torch.equal(targets[:5, :-1], many[:5, 1:])
        assert (targets[5:] == -1).all()
        # One shape, for a compiled model: another would make its training graphs dynamic.
        assert all(len(part[0]) == len(parts[0][0]) for part in parts)
        assert len(parts[0][0]) % micro_batch == 0 and len(targets) < 5 + world_size * micro_batch


def test_evaluation_weighs_targets_not_batches():
    """Windows of loss 1, 1, 1, 1, 6 in batches of 2 have a mean of 2, with one that fills up."""
    class Constant(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.lm_head = torch.nn.Linear(1, 1)

        def forward(self, x, y):
            return None, x[y >= 0].float().mean() if (y >= 0).any() else torch.zeros(())
    inputs = torch.tensor([1, 1, 1, 1, 6, 99])[:, None].expand(6, 3)
    targets = torch.tensor([0, 0, 0, 0, 0, -1])[:, None].expand(6, 3)
    autocast = torch.autocast("cpu", enabled=False)
    assert train.evaluate(Constant(), inputs, targets, 2, autocast) == 2.0


def test_from_a_loss_that_is_not_finite_on_no_update_changes_anything():
    """The optimizer skips it on the device; nobody waits to see whether it has to."""
    model = Decoder(ModelConfig(vocab_size=100, block_size=8, n_layer=1, n_head=1, n_embd=14,
                                n_ffn=16))
    optimizer, bad = train.build_optimizer(model, 0.1), torch.zeros(3)
    x = torch.arange(16).view(2, 8)
    plain, autocast = model.loss, torch.autocast("cpu", enabled=False)
    states = []
    for number, factor in ((1, 1.0), (2, math.nan), (3, 1.0)):
        model.loss = lambda *args, factor=factor: plain(*args) * factor
        train.update(model, optimizer, (x, x + 1), 1, autocast, number, bad)
        states.append({name: p.detach().clone() for name, p in model.named_parameters()})
    assert furthest(states[0], states[1]) == furthest(states[0], states[2]) == 0
    assert bad[0] == 2 and bad[1].isnan()
    with pytest.raises(FloatingPointError, match="update 2: loss nan.*last good checkpoint: none"):
        train.check_finite(bad, "nowhere")


# --- every interface

@pytest.fixture(scope="module")
def trained(data_dir, tmp_path_factory):
    """20 updates of every interface in this process: {input: (out, checkpoint)}."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        return {input: (folder / input, run_here(patch, data_dir, folder / input, input=input))
                for input in INPUTS}


@pytest.mark.parametrize("input", INPUTS)
def test_all_interfaces_learn(trained, input):
    out, state = trained[input]
    log, heldout = rows(out), rows(out, "val_loss")
    assert [row["step"] for row in log] == list(range(1, UPDATES + 1))
    assert [row["step"] for row in heldout] == [0, 10, 20]
    assert all(row["lr"] == learning_rate(row["step"], 3e-3, 3e-4, 5, UPDATES) for row in log)
    assert heldout[0]["val_loss"] == pytest.approx(math.log(300), abs=0.05)
    assert heldout[-1]["val_loss"] < 0.95 * heldout[0]["val_loss"]
    assert [p.name for p in list_checkpoints(out)] == ["step-00000020.pt", "step-00000015.pt"]
    assert state["step"] == torch.load(list_checkpoints(out)[0], weights_only=True)["step"] == 20
    for name, tensor in state["model"].items():
        assert tensor.isfinite().all() and "_orig_mod" not in name


def test_fixed_codes_are_bit_identical_after_training(trained):
    for input in FIXED:
        state = trained[input][1]
        fresh = Decoder(ModelConfig(**state["model_config"]))
        for name, buffer in fresh.named_buffers():
            assert torch.equal(state["model"][name], buffer)
        assert not any("embed_tokens" in name for name, _ in fresh.named_parameters())


def test_interfaces_see_the_same_windows_and_start_from_the_same_body(data_dir, tmp_path,
                                                                      monkeypatch):
    seen, original = {}, WindowSampler.batch
    for input in INPUTS:
        batches = seen[input] = []

        def batch(self, rows, batches=batches):
            batches.append(original(self, rows))
            return batches[-1]

        with monkeypatch.context() as patch:
            patch.setattr(WindowSampler, "batch", batch)
            run_here(patch, data_dir, tmp_path / input, input=input, max_targets=3000, seed=4)
    for batches in zip(*seen.values(), strict=True):
        for inputs, targets in batches:
            assert torch.equal(batches[0][0], inputs) and torch.equal(batches[0][1], targets)
    configs = [json.loads((tmp_path / input / "config.json").read_text()) for input in INPUTS]
    hashes = {config["initial_body_sha256"] for config in configs}
    assert len(hashes) == 1 and len(hashes.pop()) == 64


def test_the_readmes_new_interface_trains(data_dir, tmp_path):
    blocks = (ROOT / "README.md").read_text().split("```python\n")[1:]
    example = next(block for block in blocks if "fixed_gray" in block).split("```")[0]
    assert len(example.splitlines()) < 15
    for name in ("inputs.py", "kernels.py", "model.py", "train.py"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "machinery", tmp_path / "machinery")
    (tmp_path / "codes.py").write_text((ROOT / "codes.py").read_text() + "\n\n" + example)
    argv = flags(data_dir, tmp_path / "out", input="gray", max_targets=1024)
    result = subprocess.run([sys.executable, tmp_path / "train.py", *argv], capture_output=True,
                            text=True)
    assert result.returncode == 0, result.stderr
    state = read_checkpoint(list_checkpoints(tmp_path / "out")[0])
    codes = state["model"]["model.embed_tokens.codebook"].int()
    assert codes.shape == (300, 9) and ((codes[1:] - codes[:-1]).abs().sum(1) == 1).all()


# --- the first commands, on the machines that readers have

def test_the_preset_is_the_papers_only_where_its_data_are_too(data_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert settings.pick_preset(train.PRESETS, {}) == ("smoke", "there is no CUDA device")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    preset, why = settings.pick_preset(train.PRESETS, {})
    assert preset == "smoke" and why.startswith("CUDA is present, but data/fineweb-edu is not")
    preset, why = settings.pick_preset(train.PRESETS, {"data": str(data_dir)})
    assert preset == "smoke" and "is not of the paper's vocabulary" in why
    meta = json.loads((data_dir / "meta.json").read_text())
    meta["tokenizer"]["vocab_size"] = 49_152
    (tmp_path / "data" / "fineweb-edu").mkdir(parents=True)
    (tmp_path / "data" / "fineweb-edu" / "meta.json").write_text(json.dumps(meta))
    assert settings.pick_preset(train.PRESETS, {})[0] == "paper"
    assert settings.pick_preset(train.PRESETS, {"preset": "smoke"}) == ("smoke", "--preset")


@pytest.mark.parametrize("preset", train.PRESETS)
def test_the_advice_on_missing_data_makes_data_of_the_presets_vocabulary(tmp_path, monkeypatch,
                                                                         preset):
    args = parse_args([f"--preset={preset}", "--device=cpu", f"--data={tmp_path}/new"])
    with pytest.raises(FileNotFoundError, match="no prepared data here") as missing:
        train.open_data(args, 0, 1, print)
    command = str(missing.value).split("; run python ")[1].split(" (or")[0].split()
    monkeypatch.setattr(sys, "argv", command)
    wanted = parse_prepare_args("")
    sizes = {"train:3072": 3072, "utf16": 65_536, SMOLLM2: 49_152}
    assert wanted.out == f"{tmp_path}/new" and sizes[wanted.tokenizer] == args.vocab_size


def test_the_device_is_the_fastest_there_is(monkeypatch):
    def parsed(*argv):
        args = parse_args(["--preset=smoke", *argv])
        return args.device, args.dtype

    assert parsed("--dtype=float32") == parsed("--device=auto", "--dtype=float32")
    assert parsed()[0] == "cpu"
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert parsed() == parsed("--device=mps") == ("mps", "float32")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert parsed() == ("cuda", "bfloat16") and parsed("--device=cuda:1")[0] == "cuda:1"


@pytest.mark.parametrize("name, tflops", [
    ("NVIDIA H200", 989), ("NVIDIA H200 NVL", 836), ("NVIDIA H100 80GB HBM3", 989),
    ("NVIDIA H100 PCIe", 756), ("NVIDIA H100 NVL", 835), ("NVIDIA GeForce RTX 4090", 165),
    ("NVIDIA GeForce RTX 4090 Laptop GPU", None), ("NVIDIA L40", None)])
def test_a_gpus_peak_is_of_its_whole_name(monkeypatch, name, tflops):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    found = machine.peak_flops(torch.device("cuda", 0))
    assert found == (tflops and tflops * 1e12) and machine.peak_flops(torch.device("cpu")) is None


def test_peak_memory_in_each_systems_unit(monkeypatch):
    cpu, usage = torch.device("cpu"), types.SimpleNamespace(ru_maxrss=400_000)
    fake = types.SimpleNamespace(RUSAGE_SELF=0, getrusage=lambda who: usage)
    monkeypatch.setattr(machine, "resource", fake)
    monkeypatch.setattr(sys, "platform", "linux")
    assert machine.peak_memory_gb(cpu) == pytest.approx(0.4096)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert machine.peak_memory_gb(cpu) == pytest.approx(0.0004)
    monkeypatch.setattr(machine, "resource", None)  # Windows
    assert machine.peak_memory_gb(cpu) is None


def test_a_run_that_will_not_read_every_shard_says_so(data_dir, tmp_path, monkeypatch, capsys):
    run_here(monkeypatch, data_dir, tmp_path / "a", max_targets=1024)
    advice = "each of 2 streams will read 1 of 3 shards; --windows_per_visit=5 would reach all"
    assert advice in capsys.readouterr().out
    run_here(monkeypatch, data_dir, tmp_path / "b", max_targets=1024, windows_per_visit=5)
    assert "streams will read" not in capsys.readouterr().out


def test_what_to_expect_is_said_of_a_presets_own_run():
    def said(*argv):
        args = parse_args(["--preset=smoke", "--device=cpu", *argv])
        return reports.expectation(args, train.PRESETS, {("smoke", "binary"): {200: 4.961}})

    assert said() == "expected, as measured: validation loss 4.96 after 200 updates"
    assert said("--micro_batch=2", "--eval_every=7", "--seed=3", "--data=x") == said()
    for other in ("--input=gf2", "--n_layer=2", "--max_lr=1e-2", "--max_targets=4096",
                  "--decay_steps=100", "--code_width=192", "--code_values=pm1"):
        assert "nothing is known" in said(other), other
    for preset, input in train.MILESTONES:
        assert preset in train.PRESETS and input in INPUTS


# --- the same run on any machine

@pytest.mark.parametrize("processes, changes", [
    (1, dict(micro_batch=1)), (1, dict(micro_batch=16)), (2, dict(micro_batch=16)),
    (4, dict(micro_batch=2)), (1, dict(eval_every=3, log_every=7)),
    (2, dict(parallel="fsdp", checkpoint_activations="block")),
    (4, dict(parallel="fsdp", micro_batch=2, checkpoint_activations="selective")),
], ids=str)
def test_any_split_of_the_work_is_the_same_run(data_dir, forks, straight, tmp_path, processes,
                                               changes):
    """Rows, losses, norms and evaluations do not depend on the split, nor does what is learned on
    what is reported; one process speaks."""
    argv = flags(data_dir, tmp_path / "run", **changes)
    assert forks.run(argv, processes=processes) == [0] * processes, forks.output()
    assert forks.output().count("preset smoke") == 1
    for key in ("loss", "grad_norm", "val_loss"):
        expected = {row["step"]: row[key] for row in rows(straight, key)}
        common = [row for row in rows(tmp_path / "run", key) if row["step"] in expected]
        fewer = {"val_loss": 2}.get(key, 3) if "log_every" in changes else len(expected)
        assert len(common) == fewer
        assert_near([row[key] for row in common], [expected[row["step"]] for row in common])
    assert furthest(final(straight)["model"], final(tmp_path / "run")["model"]) < 1e-5


def test_two_processes_are_bitwise_one_process_with_two_micro_batches(data_dir, forks, straight,
                                                                      tmp_path):
    assert forks.run(flags(data_dir, tmp_path / "run", keep=10), processes=2) == [0, 0]
    assert furthest(final(straight)["model"], final(tmp_path / "run")["model"]) == 0


@pytest.mark.parametrize("kind", ["block", "selective"])
def test_checkpointing_activations_is_bitwise_the_same_run(data_dir, forks, straight, tmp_path,
                                                           kind):
    """Every parameter trains, also below fixed codes, which need no gradient."""
    argv = flags(data_dir, tmp_path / "run", checkpoint_activations=kind)
    assert forks.run(argv) == [0], forks.output()
    assert_same_run(straight, tmp_path / "run")


def test_a_compiled_run_is_the_same_and_its_checkpoint_has_plain_names(data_dir, forks, straight,
                                                                       tmp_path):
    """In both directions: compiled for 10 updates, then not."""
    quick = ("import functools; "  # no C++ compiler
             "torch.compile = functools.partial(torch.compile, backend='aot_eager')")
    argv = flags(data_dir, tmp_path / "run", compile=True, max_targets=512 * 10)
    assert forks.run(argv, quick) == [0], forks.output()
    expected = read_checkpoint(straight / "step-00000010.pt")["model"]
    assert furthest(expected, load_model(tmp_path / "run")[0].state_dict()) < 1e-5
    assert forks.run(flags(data_dir, tmp_path / "run", resume=True)) == [0]
    assert_near(values(tmp_path / "run"), values(straight))


def test_bfloat16_fsdp_follows_ddp(data_dir, forks, tmp_path):
    """BF16 weights on the wire, float32 masters: within BF16's rounding of autocast's curve."""
    for parallel in ("ddp", "fsdp"):
        argv = flags(data_dir, tmp_path / parallel, parallel=parallel, dtype="bfloat16",
                     max_targets=512 * 10)
        assert forks.run(argv, processes=2) == [0, 0], forks.output()
    assert_near(values(tmp_path / "fsdp"), values(tmp_path / "ddp"), 2e-3)
    moments = load_model(tmp_path / "fsdp")[1]["optimizer"]["state"]["lm_head.weight"]
    assert moments["exp_avg"].dtype == torch.float32


def test_logged_gradient_norm_is_before_clipping_and_clipping_is_once(data_dir, tmp_path,
                                                                      monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(train, "GRAD_CLIP", 0.05)
        four, whole = (
            run_here(patch, data_dir, tmp_path / str(n), max_targets=5120, micro_batch=n)
            for n in (4, 16))
    assert furthest(four["model"], whole["model"]) < 1e-5
    assert min(values(tmp_path / "4", "grad_norm")) > 0.05


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize("input", INPUTS)
def test_every_interface_starts_and_resumes_under_torchrun(data_dir, forks, tmp_path, input,
                                                           parallel):
    """What is broadcast between processes has to be of a kind that can be: parameters, buffers."""
    for updates in (1, 2):
        argv = flags(data_dir, tmp_path / "run", input=input, parallel=parallel, resume=True,
                     max_targets=512 * updates, eval_every=100, micro_batch=16)
        assert forks.run(argv, processes=2) == [0, 0], forks.output()
    assert "resumed after update 1" in forks.output()


def test_torchrun_passes_a_signal_on_and_all_ranks_leave_together(data_dir, straight, tmp_path):
    """One checkpoint at the step where all stopped, long before the save interval; nothing is off
    until there."""
    out, log = tmp_path / "run", tmp_path / "log"
    argv = flags(data_dir, out, save_every=1000, max_targets=512 * 100_000)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
               "train.py", *argv]
    with open(log, "w") as file:
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file,
                                   env=os.environ | {"OMP_NUM_THREADS": "1"})
    while not (out / "log.jsonl").exists() or len(rows(out)) < 7:
        time.sleep(0.05)
        assert process.poll() is None, log.read_text()
    process.terminate()
    assert process.wait(timeout=60) != 0
    stopped = rows(out)[-1]["step"]
    assert [int(path.stem[5:]) for path in list_checkpoints(out)] == [stopped], log.read_text()
    assert "SIGTERM; --resume continues" in log.read_text()
    assert_near(values(out)[:UPDATES], values(straight)[:stopped])


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_all_before_the_first_update_works_on_a_gpu(data_dir, tmp_path, monkeypatch, device):
    """One process, without torchrun, whose device has no number unless the user gives one."""
    def look(step_model, optimizer, batch, micro_batch, autocast, number, bad):
        tensors = [*step_model.parameters(), *step_model.buffers(), *batch, bad]
        expected = torch.device("cuda", 1 if device == "cuda:1" else 0)
        assert {tensor.device for tensor in tensors} == {expected} and number == 1
        assert len(optimizer.param_groups) == 2

    fake_cuda(monkeypatch, look)
    with pytest.raises(FirstUpdate):
        run_here(monkeypatch, data_dir, tmp_path / "run", preset="smoke", device=device,
                 dtype="bfloat16")


@pytest.mark.parametrize("case", ["binary block", "learned selective"])
def test_the_gpu_bench_comes_to_its_first_update(monkeypatch, case):
    monkeypatch.syspath_prepend(ROOT / "tests" / "bench")
    import bench_gpu

    def look(model, optimizer, batch, *_):
        assert {tensor.device.type for tensor in (*model.parameters(), *batch)} == {"cuda"}

    fake_cuda(monkeypatch, look)
    small = {name: value for name, value in bench_gpu.TINY.items()}
    monkeypatch.setattr(bench_gpu, "ModelConfig", lambda input: ModelConfig(input=input, **small))
    with pytest.raises(FirstUpdate):
        bench_gpu.measure(case, dry_run=False, steps=1)


# --- beside a run

def test_profile_writes_a_trace(data_dir, forks, tmp_path):
    argv = flags(data_dir, tmp_path / "run", profile=True, max_targets=512 * 8)
    assert forks.run(argv) == [0], forks.output()
    trace = json.loads((tmp_path / "run" / "trace.json").read_text())
    names = {event.get("name") for event in trace["traceEvents"]}
    assert {"ProfilerStep#2", "ProfilerStep#3", "ProfilerStep#4"} <= names


def test_tensorboard_without_the_package_is_one_line(data_dir, forks, tmp_path):
    fault = "sys.modules['torch.utils.tensorboard'] = None"
    argv = flags(data_dir, tmp_path / "run", tensorboard=True)
    assert "pip install tensorboard" in forks.refused(argv, fault)


def test_no_validation_documents_means_no_evaluation(data_dir, tmp_path, monkeypatch, capsys):
    data = shutil.copytree(data_dir, tmp_path / "data")
    meta = json.loads((data / "meta.json").read_text())
    for entry in meta["shards"]:
        entry["val"].update(documents=0, tokens=0, longest=0)
    (data / "meta.json").write_text(json.dumps(meta))
    run_here(monkeypatch, data, tmp_path / "out", max_targets=1024)
    assert "no evaluation" in capsys.readouterr().out and not rows(tmp_path / "out", "val_loss")
