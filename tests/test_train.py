"""The recipe's figures, the sampler's distribution, and whole runs: the same for any number of processes, any micro-batch and any
interruption."""

import doctest
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

import train
from codes import FIXED
from machinery import runs, settings, sweep
from machinery.checkpoints import read_checkpoint
from machinery.costs import count_parameters
from machinery.runs import list_checkpoints
from model import INPUTS, Decoder, ModelConfig
from train import WindowSampler, learning_rate, rank_rows, uniforms

ROOT = Path(__file__).parents[1]
TINY = ["--vocab_size=300", "--n_layer=2", "--n_head=2", "--n_embd=36", "--n_ffn=48", "--block_size=32", "--dtype=float32", "--device=cpu",
        "--tokens_per_step=512", "--micro_batch=8", "--max_lr=3e-3", "--min_lr=3e-4", "--warmup_steps=5", "--windows_per_visit=24", "--eval_windows=8", "--eval_every=10",
        "--log_every=1", "--save_every=5"]


def command(data, out, *flags, processes=None):
    launcher = [sys.executable] if processes is None else [sys.executable, "-m", "torch.distributed.run", "--standalone",
                                                           f"--nproc_per_node={processes}"]
    return [*launcher, str(ROOT / "train.py"), f"--data={data}", f"--out={out}", *TINY, *flags]


def run(data, out, *flags, processes=None):
    return subprocess.run(command(data, out, *flags, processes=processes), capture_output=True, text=True)


def run_here(monkeypatch, data, out, *flags):
    """The same command in this process: importing torch costs more than training does."""
    monkeypatch.setattr(sys, "argv", command(data, out, *flags)[1:])
    train.main()
    return read_checkpoint(list_checkpoints(out)[0])


def rows(out):
    return [json.loads(line) for line in (Path(out) / "log.jsonl").read_text().splitlines()]


def same(a, b):
    """Whether two checkpoints hold the same weights and optimizer state, bit for bit."""
    flat = lambda state: [*state["model"].values(), *(t for moments in state["optimizer"]["state"].values() for t in moments.values())]
    return a["step"] == b["step"] and all(torch.equal(x, y) for x, y in zip(flat(a), flat(b), strict=True))


# --- schedule

PAPER = (1.5e-4, 1e-5, 2000, 382_500)


def test_docstring_examples():
    assert doctest.testmod(train).failed == 0


@pytest.mark.parametrize("step, lr", [(1, 7.5e-8), (100, 7.5e-6), (1000, 7.5e-5), (1999, 1.49925e-4), (2000, 1.5e-4), (10_000, 1.498473557e-4),
                                      (50_000, 1.445743822e-4), (97_125, 1.294974747e-4), (192_250, 8.0e-5), (300_000, 2.562100590e-5),
                                      (381_470, 1.000253122e-5), (382_500, 1e-5), (400_000, 1e-5)])
def test_learning_rates_of_the_paper(step, lr):
    assert learning_rate(step, *PAPER) == pytest.approx(lr, rel=1e-9)


@pytest.mark.parametrize("warmup, total", [(100, 100), (0, 10), (0, 1), (1, 1), (5, 20)])
def test_schedule_has_no_jump_and_one_peak(warmup, total):
    lrs = [learning_rate(step, 1.0, 0.1, warmup, total) for step in range(1, total + 4)]
    assert all(math.isfinite(lr) and 0 < lr <= 1 for lr in lrs) and lrs[-3:] == [0.1] * 3
    if warmup:
        assert lrs[:warmup] == [step / warmup for step in range(1, warmup + 1)] and lrs.count(1.0) == 1
    if (warmup, total) == (5, 20):
        assert max(a - b for a, b in zip(lrs[4:], lrs[5:])) < 0.1  # no drop larger than a step of the cosine


def parse_args(flags):
    return settings.parse_args(train.PRESETS, train.__doc__, flags)


def paper_args(*flags):
    return parse_args(["--preset=paper", "--device=cpu", *flags])


def test_recipe_of_the_paper():
    args = paper_args()
    assert args.tokens_per_step == 2 * 8 * 8 * 2048 == 262_144
    assert args.steps == 381_470 and args.steps * args.tokens_per_step == 100_000_071_680  # the update that reaches 100e9
    assert (args.max_lr, args.min_lr, args.warmup_steps, args.decay_steps) == PAPER
    assert (args.streams, args.windows_per_visit) == (2, 1024 * 8)
    assert (args.streams * args.windows_per_visit * 2048, args.streams * args.windows_per_visit * 2048 // args.tokens_per_step) == (2 * 16_777_216, 128)
    assert settings.model_config(args) == ModelConfig()
    assert (train.BETAS, train.EPS, train.WEIGHT_DECAY, train.GRAD_CLIP) == ((0.9, 0.95), 1e-8, 0.01, 1.0)


def test_flags_override_the_preset_and_both_spellings_work():
    assert parse_args(["--preset", "smoke", "--n_layer", "3", "--max_targets=1e5"]).n_layer == 3
    args = parse_args(["--preset=smoke", "--max_targets=1e6", "--input=gf2", "--seed=3"])
    assert (args.max_targets, args.out, args.n_embd) == (1_000_000, "out/smoke-gf2-s3", train.PRESETS["smoke"]["n_embd"])
    assert args.decay_steps == args.steps == -(-1_000_000 // args.tokens_per_step)


@pytest.mark.parametrize("input", INPUTS)
def test_matrices_decay_and_vectors_do_not(input):
    model = Decoder(ModelConfig(input=input, vocab_size=100, block_size=8, n_layer=2, n_head=2, n_embd=28, n_ffn=40))
    decayed, plain = train.build_optimizer(model, 1e-3).param_groups
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.01, 0.0)
    assert sum(p.numel() for p in decayed["params"]) == count_parameters(model)["decayed"]
    assert {id(p) for g in (decayed, plain) for p in g["params"]} == {id(p) for p in model.parameters()}
    assert len(decayed["params"]) + len(plain["params"]) == len(list(model.parameters()))
    assert all(p.dim() == 1 for p in plain["params"])


# --- sampler

class FakeShard:
    """Documents of given lengths; the ids count up through the shard, so a window tells where it is from."""
    name = "fake"

    def __init__(self, *lengths, base=0):
        self.starts = np.concatenate(([0], np.cumsum(lengths)))
        self.ids = (base + np.arange(self.starts[-1])).astype(np.uint16)
        self.longest, self.documents, self.tokens = max(lengths), len(lengths), int(self.starts[-1])

    def map(self):
        return self.ids, self.starts


def draw(sampler, n, stream=0):
    return sampler.batch([(stream, w) for w in range(n)])


def test_uniforms_are_a_function_of_their_five_arguments():
    a = uniforms(1, 0, train.WINDOWS, 5, 1000)
    assert (a == uniforms(1, 0, train.WINDOWS, 5, 1000)).all() and (0 <= a).all() and (a < 1).all()
    for other in ((2, 0, train.WINDOWS, 5), (1, 1, train.WINDOWS, 5), (1, 0, train.SHARD_ORDER, 5), (1, 0, train.WINDOWS, 6)):
        assert not np.isin(a, uniforms(*other, 1000)).any()
    assert uniforms(1, 0, train.WINDOWS, 0, 2).tolist() == [0.3035680343067586, 0.8487087496857769]  # for ever


def test_ends_of_documents():
    T = 8
    sampler = WindowSampler([FakeShard(T, T + 1, T + 2, 3)], T, seed=1, windows_per_visit=1000)
    first = Counter(draw(sampler, 1000)[0][:, 0].tolist())
    # T tokens: none; T + 1: one window; T + 2: two. Each document alike, then each start alike.
    assert set(first) == {T, 2 * T + 1, 2 * T + 2}
    assert abs(first[T] - 500) < 80 and abs(first[2 * T + 1] - 250) < 70
    inputs, targets = draw(sampler, 1000)
    assert (targets == inputs + 1).all() and inputs.shape == targets.shape == (1000, T)
    assert targets[:, -1].max() == 3 * T + 2  # the last token of the last eligible document is a target


def test_documents_are_uniform_whatever_their_length():
    lengths = [9, 12, 100, 2000, 8, 40]
    shard = FakeShard(*lengths)
    inputs = draw(WindowSampler([shard], 8, seed=3, windows_per_visit=20_000), 20_000)[0]
    document = np.searchsorted(shard.starts, inputs[:, 0].numpy(), side="right") - 1
    counts = np.bincount(document, minlength=6)
    assert counts[4] == 0
    expected = 20_000 / 5
    assert ((counts[counts > 0] - expected) ** 2 / expected).sum() < 20  # chi-square, 4 degrees of freedom: p = 5e-4
    # Inside a document every start is alike, and no window leaves it.
    starts = inputs[document == 2][:, 0].numpy() - shard.starts[2]
    histogram = np.bincount(starts, minlength=92)
    assert len(histogram) == 92 and ((histogram - len(starts) / 92) ** 2 / (len(starts) / 92)).sum() < 150  # 91 degrees of freedom
    ends = inputs[:, -1].numpy() + 1
    assert (np.searchsorted(shard.starts, ends, side="right") - 1 == document).all()


def test_a_stream_visits_every_shard_once_a_pass_in_a_new_order():
    shards = [FakeShard(20, base=1000 * i) for i in range(5)] + [FakeShard(3, 3)]
    sampler = WindowSampler(shards, 8, seed=1, windows_per_visit=4)
    visited = draw(sampler, 4 * 5 * 4)[0][:, 0].numpy() // 1000
    visits = visited.reshape(-1, 4)
    assert (visits == visits[:, :1]).all()
    passes = visits[:, 0].reshape(4, 5)
    assert all(sorted(p) == [0, 1, 2, 3, 4] for p in passes.tolist()) and len({tuple(p) for p in passes.tolist()}) > 1
    assert (draw(sampler, 80, stream=1)[0] != draw(sampler, 80, stream=0)[0]).any()


def test_windows_do_not_depend_on_when_they_are_asked_for():
    shards = [FakeShard(20, 50, base=1000 * i) for i in range(3)]
    make = lambda: WindowSampler(shards, 8, seed=5, windows_per_visit=4)
    straight = draw(make(), 60)[0]
    backwards = make().batch([(0, w) for w in reversed(range(60))])[0].flip(0)
    alone = torch.cat([make().batch([(0, w)])[0] for w in range(60)])
    assert torch.equal(straight, backwards) and torch.equal(straight, alone)
    assert not torch.equal(straight, WindowSampler(shards, 8, 6, 4).batch([(0, w) for w in range(60)])[0])


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_processes_share_one_global_batch(world_size):
    for step in (0, 1, 17):
        parts = [rank_rows(step, 16, 2, rank, world_size) for rank in range(world_size)]
        assert sum(parts, []) == rank_rows(step, 16, 2, 0, 1)
        assert sorted(sum(parts, [])) == [(stream, w) for stream in range(2) for w in range(8 * step, 8 * step + 8)]
    if world_size == 2:
        assert {stream for stream, _ in parts[0]} == {0} and {stream for stream, _ in parts[1]} == {1}  # the paper


def test_large_ids_stay_positive_and_the_batch_is_its_own():
    shard = FakeShard(5)
    shard.ids = np.array([0, 32_767, 32_768, 49_151, 65_535], np.uint16)
    shard.ids.flags.writeable = False
    inputs, targets = WindowSampler([shard], 4, 1, 1).batch([(0, 0)])
    assert inputs.dtype == torch.int64 and inputs.tolist() == [[0, 32_767, 32_768, 49_151]] and targets[0, -1] == 65_535
    inputs += 1
    assert shard.ids[0] == 0


def test_no_long_document_is_refused():
    with pytest.raises(ValueError, match="block_size=8: no document has more than 8 tokens .*the longest of 2 has 8"):
        WindowSampler([FakeShard(8, 5)], 8, 1, 1)


# --- whole runs

def test_evaluation_is_a_sum_over_a_count():
    class Constant(torch.nn.Module):
        """A model whose loss on a window is the window's first id."""
        def __init__(self):
            super().__init__()
            self.lm_head = torch.nn.Linear(1, 1)

        def forward(self, x, y):
            return None, x[:, 0].float().mean()
    x = torch.tensor([[1, 0]] * 4 + [[6, 0]])
    autocast = torch.autocast("cpu", enabled=False)
    assert train.evaluate(Constant(), x, x, 2, autocast) == pytest.approx(2.0)  # the mean of batch means would be 2.67


@pytest.fixture(scope="module")
def straight(data_dir, tmp_path_factory):
    """20 updates without interruption: {input: (out, checkpoint)}."""
    runs, patch = {}, pytest.MonkeyPatch()
    for input in INPUTS:
        out = tmp_path_factory.mktemp("straight") / input
        runs[input] = out, run_here(patch, data_dir, out, f"--input={input}", "--max_targets=10240")
    patch.undo()
    return runs


@pytest.mark.parametrize("input", INPUTS)
def test_all_interfaces_learn(straight, input):
    out, state = straight[input]
    log = rows(out)
    assert [row["step"] for row in log if "loss" in row] == list(range(1, 21)) and [row["step"] for row in log if "val_loss" in row] == [0, 10, 20]
    assert all(row["lr"] == learning_rate(row["step"], 3e-3, 3e-4, 5, 20) for row in log if "loss" in row)
    assert log[0]["val_loss"] == pytest.approx(math.log(300), abs=0.05) and log[-1]["val_loss"] < 0.95 * log[0]["val_loss"]
    assert state["step"] == 20 and torch.load(list_checkpoints(out)[0], weights_only=True)["step"] == 20
    assert [p.name for p in list_checkpoints(out)] == ["step-00000020.pt", "step-00000015.pt"]
    for name, tensor in state["model"].items():
        assert tensor.isfinite().all() and "_orig_mod" not in name


def test_fixed_codes_are_bit_identical_after_training(straight):
    for input in FIXED:
        state = straight[input][1]
        fresh = Decoder(ModelConfig(**state["model_config"]))
        for name, buffer in fresh.named_buffers():
            assert torch.equal(state["model"][name], buffer)
        assert not any("embed_tokens" in name for name, _ in fresh.named_parameters())


def test_interfaces_see_the_same_windows_and_start_from_the_same_body(data_dir, tmp_path, monkeypatch):
    seen = {}
    for input in INPUTS:
        batches = seen.setdefault(input, [])
        original = WindowSampler.batch
        with monkeypatch.context() as patch:
            patch.setattr(WindowSampler, "batch", lambda self, rows: batches.append(original(self, rows)) or batches[-1])
            run_here(patch, data_dir, tmp_path / input, f"--input={input}", "--max_targets=3000", "--seed=4")
    for batches in zip(*seen.values(), strict=True):
        assert all(torch.equal(batches[0][0], x) and torch.equal(batches[0][1], y) for x, y in batches)
    hashes = {json.loads((tmp_path / input / "config.json").read_text())["initial_body_sha256"] for input in INPUTS}
    assert len(hashes) == 1 and len(hashes.pop()) == 64


@pytest.mark.parametrize("flags", [("--micro_batch=1",), ("--micro_batch=16",), ("--checkpoint_activations=block",), ("--eval_every=3", "--log_every=7")])
def test_machine_flags_do_not_change_what_is_learned(straight, data_dir, tmp_path, monkeypatch, flags):
    state = run_here(monkeypatch, data_dir, tmp_path, "--input=binary", "--max_targets=10240", *flags)
    # Another micro-batch is another order of float32 sums; after 20 updates 1e-5 is ten times what is seen.
    for name, tensor in straight["binary"][1]["model"].items():
        assert torch.allclose(state["model"][name], tensor, atol=1e-5), name


@pytest.mark.parametrize("processes, micro_batch", [(2, 16)])  # 16 is one process's share; two have 8 each
def test_torchrun_gives_the_same_losses_and_weights(straight, data_dir, tmp_path, processes, micro_batch):
    result = run(data_dir, tmp_path, "--input=binary", "--max_targets=10240", f"--micro_batch={micro_batch}", processes=processes)
    assert result.returncode == 0, result.stderr
    out, one = straight["binary"]
    many = read_checkpoint(list_checkpoints(tmp_path)[0])
    for name, tensor in one["model"].items():
        assert torch.allclose(many["model"][name], tensor, atol=1e-5), name
    for a, b in zip(rows(out), rows(tmp_path), strict=True):
        key = "loss" if "loss" in a else "val_loss"
        assert a["step"] == b["step"] and a[key] == pytest.approx(b[key], abs=1e-5)
    assert result.stdout.count("preset smoke") == 1  # one process speaks


def test_resume_is_bitwise_also_across_a_shard_border(straight, data_dir, tmp_path, monkeypatch):
    """24 windows a visit and 8 a stream and update: a border every third update, so updates 6, 9, 12 ... open another shard."""
    flags = ("--input=gf2", "--max_targets=10240")
    for steps in (3, 7, 11):  # a run that ends early keeps the schedule of the whole one
        run_here(monkeypatch, data_dir, tmp_path, *flags, f"--max_targets={512 * steps}", "--decay_steps=20", "--resume")
    state = run_here(monkeypatch, data_dir, tmp_path, *flags, "--resume")
    out, whole = straight["gf2"]
    assert same(state, whole)
    drop = lambda row: {k: v for k, v in row.items() if k != "targets_per_second"}
    numbered = lambda log: {row["step"]: drop(row) for row in log if "loss" in row}
    assert numbered(rows(tmp_path)) == numbered(rows(out))


@pytest.mark.parametrize("processes", [None, 2])
def test_killed_and_resumed_is_bitwise(straight, data_dir, tmp_path, processes):
    flags = ["--input=binary", "--max_targets=10240", "--save_every=3", "--resume"]
    if processes is None:
        reference = straight["binary"][1]
    else:  # two processes sum in another order than one: compared with two that were left alone
        assert run(data_dir, tmp_path / "straight", *flags, processes=processes).returncode == 0
        reference = read_checkpoint(list_checkpoints(tmp_path / "straight")[0])
    out = tmp_path / "killed"
    for kill_at in (2, 11) if processes is None else (8,):
        child = subprocess.Popen(command(data_dir, out, *flags, processes=processes), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                 start_new_session=True)
        deadline = time.monotonic() + 60
        while child.poll() is None and time.monotonic() < deadline and not (
                (out / "log.jsonl").exists() and f'"step": {kill_at}, ' in (out / "log.jsonl").read_text()):
            time.sleep(0.002)
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    result = run(data_dir, out, *flags, processes=processes)
    assert result.returncode == 0, result.stderr
    assert same(read_checkpoint(list_checkpoints(out)[0]), reference)
    steps = [row["step"] for row in rows(out) if "loss" in row]
    assert steps == list(range(1, 21))  # each update once, though some were done twice


def test_a_finished_run_resumes_to_nothing(straight, data_dir, monkeypatch):
    out, state = straight["learned"]
    before = rows(out)
    assert same(run_here(monkeypatch, data_dir, out, "--input=learned", "--max_targets=10240", "--resume"), state)
    assert rows(out) == before


def test_cut_log_drops_later_rows_and_half_a_row(tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_text('{"step": 0, "val_loss": 5}\n{"step": 1, "loss": 4}\n{"step": 2, "loss": 3}\n{"step": 2, "val_loss": 3}\n{"step": 3, "lo')
    with open(log, "ab", buffering=0) as file:
        runs.cut_log(file, 2)
    assert log.read_text() == '{"step": 0, "val_loss": 5}\n{"step": 1, "loss": 4}\n{"step": 2, "loss": 3}\n'
    with open(log, "ab", buffering=0) as file:
        runs.cut_log(file, 0)
    assert log.read_text() == ""


def test_a_loss_that_is_not_finite_stops_before_the_update(data_dir, tmp_path, monkeypatch):
    original = Decoder.forward

    def poisoned(self, idx, targets=None, **rest):
        logits, loss = original(self, idx, targets, **rest)
        calls.append(1)
        return logits, loss * (math.nan if len(calls) > 14 and self.training else 1)
    calls = []
    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "forward", poisoned)
        with pytest.raises(FloatingPointError, match=r"update 7: loss nan.*stopped before this update; last good checkpoint: .*step-00000006.pt"):
            run_here(patch, data_dir, tmp_path, "--max_targets=10240", "--save_every=2", "--eval_every=1000")
    assert all(t.isfinite().all() for t in read_checkpoint(list_checkpoints(tmp_path)[0])["model"].values())


def test_logged_gradient_norm_is_before_clipping_and_clipping_is_once(data_dir, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(train, "GRAD_CLIP", 0.05)
        four = run_here(patch, data_dir, tmp_path / "four", "--max_targets=5120", "--micro_batch=4")
        whole = run_here(patch, data_dir, tmp_path / "whole", "--max_targets=5120", "--micro_batch=16")
    assert all(torch.allclose(four["model"][name], t, atol=1e-5) for name, t in whole["model"].items())
    assert min(row["grad_norm"] for row in rows(tmp_path / "four") if "loss" in row) > 0.05


def test_dry_run_needs_no_data():
    result = subprocess.run([sys.executable, ROOT / "train.py", "--preset=paper", "--input=gf2", "--dry_run"], cwd="/", capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    for figure in ("1,711,376,384", "1,610,713,088", "100,663,296", "786,704", "1,712,163,088", "1,711,276,032", "100,352", "27.38 GB", "10.27 G", "0.604 G"):
        assert figure in result.stdout


# --- sweeps

def test_sweep_grammar():
    assert sweep.parse_sweep("input=binary,gf2;seed=1,2") == [{"input": i, "seed": s} for i in ("binary", "gf2") for s in "12"]
    for wrong in ("input", "input=", "=binary", "input=a,,b", ""):
        with pytest.raises(ValueError, match="expected NAME=VALUE"):
            sweep.parse_sweep(wrong)


def test_sweep_runs_skips_and_resumes(straight, data_dir, tmp_path):
    flags = ["--sweep=input=learned,binary;seed=1", "--sweep=input=gf2;code_seed=1", "--max_targets=1024", "--decay_steps=20"]
    first = run(data_dir, tmp_path, *flags)
    assert first.returncode == 0 and first.stdout.count("trained") == 3, first.stdout + first.stderr
    names = ["input=learned,seed=1", "input=binary,seed=1", "input=gf2,code_seed=1"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    config = json.loads((tmp_path / names[1] / "config.json").read_text())
    assert config["parameters"]["input"] == 0 and config["code_report"]["zero_ids"] == [0]
    # Finished runs are skipped; a run that lost its newest checkpoint is done again from the one before.
    list_checkpoints(tmp_path / names[2])[0].unlink()
    again = run(data_dir, tmp_path, *flags)
    assert again.returncode == 0 and again.stdout.count("skipped") == 2 and again.stdout.count("trained") == 1, again.stdout
    # Another configuration is refused before anything is trained.
    other = refusal(data_dir, tmp_path, *flags, "--max_lr=0.1")
    assert "max_lr 0.003 -> 0.1" in other.stderr and "input=learned,seed=1" in other.stderr
    assert "unrecognized arguments: --sed=1" in refusal(data_dir, tmp_path, "--sweep=sed=1").stderr


def test_a_failed_run_of_a_sweep_is_said_and_the_others_go_on(data_dir, tmp_path):
    result = run(data_dir, tmp_path, "--sweep=micro_batch=3,8", "--max_targets=512", "--warmup_steps=0")
    assert result.returncode == 1 and result.stdout.count("FAILED") == 1 and result.stdout.count("trained") == 1
    assert "do not divide" in (tmp_path / "micro_batch=3" / "console.txt").read_text()


def test_the_readmes_new_interface_trains(data_dir, tmp_path):
    example = next(block for block in (ROOT / "README.md").read_text().split("```python\n")[1:] if "fixed_gray" in block).split("```")[0]
    assert len(example.splitlines()) < 15
    for name in ("kernels.py", "model.py", "train.py"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    shutil.copytree(ROOT / "machinery", tmp_path / "machinery")
    (tmp_path / "codes.py").write_text((ROOT / "codes.py").read_text() + "\n\n" + example)
    result = subprocess.run([sys.executable, tmp_path / "train.py", *command(data_dir, tmp_path / "out", "--input=gray", "--max_targets=1024")[2:]],
                            capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    codes = read_checkpoint(list_checkpoints(tmp_path / "out")[0])["model"]["model.embed_tokens.codebook"].int()
    assert codes.shape == (300, 9) and ((codes[1:] - codes[:-1]).abs().sum(1) == 1).all()


# --- wrong input: one line, a non-zero exit, nothing half-written

@pytest.fixture
def spoiled(data_dir, tmp_path):
    """A copy of the prepared data to spoil."""
    return Path(shutil.copytree(data_dir, tmp_path / "data"))


def refusal(data, out, *flags):
    result = run(data, out, *flags)
    assert result.returncode in (1, 2) and len(result.stderr.splitlines()) == 1 and result.stderr.startswith("train.py: "), result.stderr
    return result


def test_no_data(tmp_path):
    assert "run python prepare.py" in refusal(tmp_path / "none", tmp_path / "out").stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("flags, message", [
    (["--nonsense=1"], "unrecognized arguments: --nonsense"), (["--input=onehot"], "onehot"), (["--n_embd=40"], "36 or 72 would do"),
    (["--tokens_per_step=500"], "multiple of block_size x streams = 64"), (["--micro_batch=0"], "1 or more"), (["--device=mps"], "expected cpu"),
    (["--warmup_steps=999", "--decay_steps=10"], "at most decay_steps=10"), (["--max_targets=1.5"], "max_targets"), (["--max_targets=inf"], "max_targets"), (["--min_lr=1"], "min_lr <= max_lr")])
def test_wrong_flags(data_dir, tmp_path, monkeypatch, capsys, flags, message):
    monkeypatch.setattr(sys, "argv", command(data_dir, tmp_path / "out", *flags)[1:])
    with pytest.raises(SystemExit) as exit:
        train.main()
    error = capsys.readouterr().err
    assert exit.value.code == 2 and len(error.splitlines()) == 1 and message in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("flags, message", [
    (["--vocab_size=400"], "vocab_size=400, but .* has 300; give --vocab_size=300"), (["--block_size=2048", "--tokens_per_step=8192", "--micro_batch=2"], "no document has more"),
    (["--micro_batch=3"], "do not divide")])
def test_flags_that_do_not_fit_the_data(data_dir, tmp_path, monkeypatch, flags, message):
    with pytest.raises(ValueError, match=message):
        run_here(monkeypatch, data_dir, tmp_path / "out", *flags)
    assert not (tmp_path / "out").exists()


def test_the_dry_run_cuts_the_micro_batch_as_the_run_does(tmp_path, monkeypatch, capsys):
    for name, value in dict(TORCHELASTIC_RUN_ID="x", WORLD_SIZE="2", RANK="0", LOCAL_RANK="0").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["train.py", "--preset=smoke", "--dry_run", "--device=cpu", f"--out={tmp_path / 'out'}"])
    train.main()
    assert "each of 2 processes (ddp), micro_batch 4," in capsys.readouterr().out  # of 8 windows an update


def test_a_stray_rank_is_not_torchruns(tmp_path):
    done = subprocess.run([sys.executable, "train.py", "--preset=smoke", f"--data={tmp_path / 'none'}", f"--out={tmp_path / 'out'}", "--device=cpu"],
                          capture_output=True, text=True, cwd=Path(train.__file__).parent, env={**os.environ, "RANK": "1", "LOCAL_RANK": "1"})
    assert done.returncode == 1 and done.stdout.startswith("preset smoke") and "run python prepare.py" in done.stderr


def test_truncated_shard(spoiled, tmp_path):
    path = spoiled / "train" / "00001.bin"
    path.write_bytes(path.read_bytes()[:-2])
    error = refusal(spoiled, tmp_path / "out").stderr
    assert "00001.bin" in error and "expected" in error and "prepare" in error and not (tmp_path / "out").exists()


def test_swapped_shards(spoiled, tmp_path, monkeypatch):
    """Of the same size, so that only the index can tell."""
    path, other = (spoiled / "train" / f"0000{i}.bin" for i in (0, 1))
    meta = json.loads((spoiled / "meta.json").read_text())
    path.write_bytes((other.read_bytes() * 2)[:2 * meta["shards"][0]["train"]["tokens"]])
    with pytest.raises(ValueError, match="index does not belong"):
        run_here(monkeypatch, spoiled, tmp_path / "out", "--max_targets=100000")


def test_unwritable_output(data_dir, tmp_path):
    (tmp_path / "file").write_text("")
    assert "file" in refusal(data_dir, tmp_path / "file" / "out").stderr


def test_an_existing_run_is_not_overwritten(straight, data_dir):
    out, state = straight["binary"]
    assert "--resume continues it" in refusal(data_dir, out, "--input=binary").stderr
    assert same(read_checkpoint(list_checkpoints(out)[0]), state)


def test_resume_with_another_experiment_lists_the_fields(straight, data_dir, spoiled, monkeypatch):
    out, state = straight["binary"]
    with pytest.raises(ValueError, match=r"max_lr 0.003 -> 1.0, .*streams 2 -> 4|streams 2 -> 4.*max_lr"):
        run_here(monkeypatch, data_dir, out, "--input=binary", "--max_targets=10240", "--resume", "--max_lr=1.0", "--streams=4")
    with pytest.raises(ValueError, match="input binary -> gf2"):
        run_here(monkeypatch, data_dir, out, "--input=gf2", "--max_targets=10240", "--resume")
    meta = json.loads((spoiled / "meta.json").read_text())
    meta["tokenizer"]["sha256"] = "0" * 64
    (spoiled / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(ValueError, match="data_fingerprint"):
        run_here(monkeypatch, spoiled, out, "--input=binary", "--max_targets=10240", "--resume")
    assert same(read_checkpoint(list_checkpoints(out)[0]), state)


def test_no_validation_documents_means_no_evaluation(spoiled, tmp_path, monkeypatch, capsys):
    meta = json.loads((spoiled / "meta.json").read_text())
    for entry in meta["shards"]:
        entry["val"].update(documents=0, tokens=0, longest=0)
    (spoiled / "meta.json").write_text(json.dumps(meta))
    run_here(monkeypatch, spoiled, tmp_path / "out", "--max_targets=1024")
    assert "no evaluation" in capsys.readouterr().out
    assert all("val_loss" not in row for row in rows(tmp_path / "out"))
