"""train.py at scale: the same run whatever the machine, and no run lost.

Impossible by design, so without a test here: CK-09 and CK-10 (there is no random state to save: windows are a pure function
of seed, stream and number), LP-18 (no float16, hence no gradient scaler; --dtype and --device are choices), LP-20 (no port
in the code). GPU parts (CK-10, CK-17's peak) need a device.
"""

import json
import math
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest
import torch

import kernels
import train
from machinery import checkpoints, costs, runs, settings
from machinery import shards as shard_format
from machinery import tokenizer as tokenizing
from machinery.checkpoints import load_model, read_checkpoint
from machinery.runs import list_checkpoints
from model import Decoder, ModelConfig

ROOT = Path(__file__).parents[1]
UPDATES = 30
# Two streams x 4 windows an update; a visit to a shard lasts five updates.
TINY = dict(vocab_size=300, block_size=16, n_layer=2, n_head=2, n_embd=36, n_ffn=40, tokens_per_step=128, micro_batch=4,
            max_targets=128 * UPDATES, warmup_steps=3, decay_steps=UPDATES, dtype="float32", windows_per_visit=20,
            eval_windows=5, eval_every=10, save_every=5, log_every=1, device="cpu")


def write_data(path, seed=0, shards=2):
    """Prepare random documents, 3 to 90 tokens long, as prepare.py would."""
    rng = np.random.default_rng(seed)
    path.mkdir(parents=True)
    texts = [" ".join(rng.choice(["alpha", "beta", "gamma", "delta"], 20)) for _ in range(50)]
    tokenizing.train_tokenizer(texts, 300).save(str(path / "tokenizer.json"))
    entries = []
    for number in range(shards):
        entry = {}
        for split, documents in (("train", 40), ("val", 6)):
            writer = shard_format.ShardWriter(path, split, number)
            for n in rng.integers(2, 90, documents):
                writer.add(np.array([*rng.zipf(1.5, n).clip(1, 250), 0], "<u2").tobytes(), [int(n) + 1], int(n))
            entry[split] = writer.close()
        entries.append(entry)
    meta = {"format": shard_format.FORMAT, "sources": ["a"] * shards, "shards": entries,
            "tokenizer": {"name": "tiny", "vocab_size": 300, "eot_id": 0, "sha256": "0" * 64}}
    (path / "meta.json").write_text(json.dumps(meta))
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("prepared") / "data")


def flags(data, out, **changes):
    values = TINY | {"data": data, "out": out} | changes
    return [f"--{name}" if value is True else f"--{name}={value}" for name, value in values.items()]


# A process that has imported torch once and forks a training process for each order: {"start": ...} answers with its id,
# {"wait": id} with its exit code.
FORKS = """
import json, os, resource, runpy, sys, time, traceback
import torch, train
for line in sys.stdin:
    order = json.loads(line)
    if "wait" in order:
        status = os.waitpid(order["wait"], 0)[1]
        print(os.waitstatus_to_exitcode(status), flush=True)
        continue
    pid = os.fork()
    if pid:
        print(pid, flush=True)
        continue
    code = 1
    try:
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1), os.dup2(log, 2)
        os.environ.update(order["env"])
        torch.set_num_threads(1)
        sys.argv = ["train.py", *order["argv"]]
        exec(order["fault"])
        runpy.run_path(train.__file__, run_name="__main__")
    except SystemExit as done:
        code = done.code or 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(code)
"""


class Forks:
    def __init__(self, log):
        self.log = log
        self.process = subprocess.Popen([sys.executable, "-c", FORKS], cwd=ROOT, text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def ask(self, **order):
        print(json.dumps(order), file=self.process.stdin, flush=True)
        return int(self.process.stdout.readline())

    def start(self, argv, fault="", **env):
        self.log.write_text("")
        return self.ask(start=True, argv=argv, fault=fault, env=env, log=str(self.log))

    def wait(self, pid):
        return self.ask(wait=pid)

    def run(self, argv, fault="", processes=1):
        """Return the exit codes of a run, as torchrun would start it where there is more than one process."""
        if processes == 1:
            return [self.wait(self.start(argv, fault))]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        env = dict(TORCHELASTIC_RUN_ID="test", MASTER_ADDR="127.0.0.1", MASTER_PORT=port, WORLD_SIZE=str(processes))
        return [self.wait(pid) for pid in [self.start(argv, fault, RANK=str(rank), LOCAL_RANK=str(rank), **env)
                                           for rank in range(processes)]]

    def output(self):
        return self.log.read_text()


@pytest.fixture(scope="module")
def forks(tmp_path_factory):
    forks = Forks(tmp_path_factory.mktemp("forks") / "log")
    yield forks
    forks.process.stdin.close()
    forks.process.wait()


def rows(out, key="loss"):
    return [row for row in map(json.loads, (Path(out) / "log.jsonl").read_text().splitlines()) if key in row]


def losses(out, key="loss"):
    return [row[key] for row in rows(out, key)]


def assert_near(found, expected, tolerance=2e-5):
    """Nats, in float32, over 30 updates."""
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance)


def final_path(out):
    return Path(out) / f"step-{UPDATES:08d}.pt"


def final(out):
    return read_checkpoint(final_path(out))


def fault_at(call, action):
    """Return code that has a training process do `action` in its call number `call` of the loss of a micro-batch in training."""
    return f"""
import math, model, signal
calls, whole = [0], model.Decoder.loss
def loss(self, x, targets):
    calls[0] += self.training
    result = whole(self, x, targets)
    if calls[0] == {call} and self.training:
        {action}
    return result
model.Decoder.loss = loss
"""


def assert_same_run(a, b):
    """Weights, moments and log rows, bit for bit."""
    one, two = final(a), final(b)
    assert one["model"].keys() == two["model"].keys()
    assert all(torch.equal(one["model"][name], two["model"][name]) for name in one["model"])
    for name, state in one["optimizer"]["state"].items():
        assert all(torch.equal(state[key], two["optimizer"]["state"][name][key]) for key in state)
    for key in ("loss", "val_loss"):
        assert [(r["step"], r[key]) for r in rows(a, key)] == [(r["step"], r[key]) for r in rows(b, key)]


@pytest.fixture(scope="module")
def straight(data, forks, tmp_path_factory):
    """An undisturbed run of 30 updates."""
    out = tmp_path_factory.mktemp("straight") / "run"
    assert forks.run(flags(data, out, keep=10)) == [0], forks.output()
    return out


# ----------------------------------------------------------------------------------------------------------------------
# The same run on any machine

@pytest.mark.parametrize("processes, changes", [
    (1, dict(micro_batch=1)), (1, dict(micro_batch=8)), (2, dict(micro_batch=1)), (4, dict(micro_batch=2)),
    (2, dict(parallel="fsdp", checkpoint_activations="block")),
    (4, dict(parallel="fsdp", micro_batch=1, checkpoint_activations="selective")),
], ids=str)
def test_any_split_of_the_work_is_the_same_run(data, forks, straight, tmp_path, processes, changes):
    """LP-01, LP-05, LP-06, LP-10, LP-14, LP-19, SM-04: rows, losses, norms and evaluations do not depend on the split."""
    assert forks.run(flags(data, tmp_path / "run", **changes), processes=processes) == [0] * processes, forks.output()
    for key in ("loss", "grad_norm", "val_loss"):
        assert_near(losses(tmp_path / "run", key), losses(straight, key))
    one, two = final(straight)["model"], final(tmp_path / "run")["model"]
    assert max((one[name].float() - two[name].float()).abs().max() for name in one) < 1e-5


def test_two_processes_are_bitwise_one_process_with_two_micro_batches(data, forks, straight, tmp_path):
    assert forks.run(flags(data, tmp_path / "run", keep=10), processes=2) == [0, 0], forks.output()
    one, two = final(straight)["model"], final(tmp_path / "run")["model"]
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("kind", ["block", "selective"])
def test_checkpointing_activations_is_bitwise_the_same_run(data, forks, straight, tmp_path, kind):
    """LP-03 too: every parameter trains."""
    assert forks.run(flags(data, tmp_path / "run", checkpoint_activations=kind)) == [0], forks.output()
    assert_same_run(straight, tmp_path / "run")


def test_a_compiled_run_is_the_same_and_its_checkpoint_has_plain_names(data, forks, straight, tmp_path):
    """CK-01, in both directions: compiled for 10 updates, then not."""
    quick = "import functools; torch.compile = functools.partial(torch.compile, backend='aot_eager')"  # no C++ compiler
    assert forks.run(flags(data, tmp_path / "run", compile=True, max_targets=128 * 10), quick) == [0], forks.output()
    expected = read_checkpoint(straight / "step-00000010.pt")["model"]
    found = load_model(tmp_path / "run")[0].state_dict()
    assert max((expected[name].float() - found[name].float()).abs().max() for name in expected) < 1e-5
    assert forks.run(flags(data, tmp_path / "run", resume=True)) == [0]
    assert_near(losses(tmp_path / "run"), losses(straight))


def test_checkpoints_move_between_ddp_fsdp_and_numbers_of_processes(data, forks, straight, tmp_path):
    """CK-07, CK-20: each part of the run goes on exactly where the last one stopped; the log has each update once (CK-18)."""
    out = tmp_path / "run"
    for updates, processes, parallel in ((7, 2, "fsdp"), (13, 1, "ddp"), (22, 4, "fsdp"), (UPDATES, 2, "ddp")):
        argv = flags(data, out, max_targets=128 * updates, parallel=parallel, micro_batch=2, resume=True)
        assert forks.run(argv, processes=processes) == [0] * processes, forks.output()
    assert [row["step"] for row in rows(out)] == list(range(1, UPDATES + 1))
    assert_near(losses(out), losses(straight))
    one, two = final(straight)["optimizer"], final(out)["optimizer"]
    for name, state in one["state"].items():
        assert state["step"] == two["state"][name]["step"] == UPDATES
        torch.testing.assert_close(state["exp_avg"], two["state"][name]["exp_avg"], rtol=1e-3, atol=1e-6)


def test_bfloat16_fsdp_follows_ddp(data, forks, tmp_path):
    """BF16 weights on the wire, float32 masters: within BF16's rounding of autocast's curve."""
    for parallel in ("ddp", "fsdp"):
        argv = flags(data, tmp_path / parallel, parallel=parallel, dtype="bfloat16", max_targets=128 * 10)
        assert forks.run(argv, processes=2) == [0, 0], forks.output()
    assert_near(losses(tmp_path / "fsdp"), losses(tmp_path / "ddp"), 2e-3)
    assert load_model(tmp_path / "fsdp")[1]["optimizer"]["state"]["lm_head.weight"]["exp_avg"].dtype == torch.float32


# ----------------------------------------------------------------------------------------------------------------------
# The loss

@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_in_chunks_equals_cross_entropy(monkeypatch, dtype):
    """Also with rows that do not count, a last chunk that is not full, a scaled gradient, and none at all to count (0)."""
    monkeypatch.setattr(kernels, "LOSS_ROWS", 7)
    torch.manual_seed(1)
    x, weight = torch.randn(30, 12, dtype=dtype, requires_grad=True), torch.randn(50, 12, requires_grad=True)
    targets = torch.randint(-1, 50, (30,))
    loss = kernels.LinearCrossEntropy.apply(x, weight, targets, True)
    dx, dweight = torch.autograd.grad(loss / 3, (x, weight))
    logits = x @ weight.to(dtype).t()
    expected = torch.nn.functional.cross_entropy(logits.float(), targets, ignore_index=-1)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    near = dict(rtol=1e-5, atol=1e-6) if dtype == torch.float32 else dict(rtol=2e-2, atol=2e-3)
    for found, wanted in zip((dx, dweight), torch.autograd.grad(expected / 3, (x, weight))):
        torch.testing.assert_close(found, wanted, **near)
    assert kernels.LinearCrossEntropy.apply(x, weight, torch.full((30,), -1), False) == 0


@pytest.mark.parametrize("grad", [True, False], ids=["train", "validate"])
def test_whole_logits_never_exist(grad):
    """4096 rows x 8192 ids are 134 MB in float32; a quarter of the rows is there at a time, with its gradient."""
    config = ModelConfig(vocab_size=8192, block_size=4096, n_layer=1, n_head=1, n_embd=26, n_ffn=8)
    with costs.FakeTensorMode(allow_non_fake_inputs=True), torch.set_grad_enabled(grad):
        model, idx = Decoder(config), torch.zeros(1, 4096, dtype=torch.int64)
        with costs.LiveBytes(lambda tensor: "logits" if tensor.shape[-1:] == (8192,) else "rest") as live:
            loss = model(idx, idx)[1]
            if grad:
                loss.backward()
    assert 0 < live.peak["logits"] < 3.1 * 1024 * 8192 * 4 < 4096 * 8192 * 4


# ----------------------------------------------------------------------------------------------------------------------
# Faults

def test_thirty_kills_lose_nothing(data, forks, straight, tmp_path):
    """CK-05: kill -9 at random moments, half of them inside a save (which is made slow), then --resume."""
    out, chance = tmp_path / "run", random.Random(1)
    slow = "import time; sync = os.fsync; os.fsync = lambda file: (time.sleep(0.02), sync(file))"
    killed = 0
    for _ in range(30):
        before = {path.name: path.read_bytes() for path in list_checkpoints(out)}
        pid = forks.start(flags(data, out, resume=True, save_every=1), slow)
        time.sleep(chance.uniform(0.1, 0.7))
        os.kill(pid, signal.SIGKILL)
        killed += forks.wait(pid) == -signal.SIGKILL
        checkpoints = list_checkpoints(out)
        assert len(checkpoints) >= min(len(before), 2)  # nothing good goes first
        for path in checkpoints:
            read_checkpoint(path)
        if (out / f"step-{UPDATES:08d}.pt").exists():
            for path in checkpoints:
                path.unlink()  # done: once more from the start
    assert killed >= 20
    assert forks.run(flags(data, out, resume=True)) == [0], forks.output()
    assert_same_run(straight, out)
    assert not list(out.glob("*.tmp"))


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_signal_saves_and_leaves_with_the_documented_code(data, forks, straight, tmp_path, name):
    out = tmp_path / "run"
    fault = fault_at(16, f"os.kill(os.getpid(), signal.{name})")
    assert forks.run(flags(data, out, save_every=1000, eval_every=1000), fault) == [train.STOPPED]
    assert f"by {name}" in forks.output()
    stopped = int(list_checkpoints(out)[0].stem[5:])
    assert len(list_checkpoints(out)) == 1 and 1 < stopped < UPDATES and rows(out)[-1]["step"] == stopped
    assert forks.run(flags(data, out, resume=True, save_every=1000)) == [0]
    assert losses(out) == losses(straight)


def test_torchrun_passes_a_signal_on_and_all_ranks_leave_together(data, straight, tmp_path):
    """CK-15: one checkpoint at the step where all stopped, long before the save interval; nothing is off until there."""
    out = tmp_path / "run"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "train.py",
               *flags(data, out, save_every=1000, max_targets=128 * 100_000, decay_steps=UPDATES, micro_batch=1)]
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"})
    while not (out / "log.jsonl").exists() or len(rows(out)) < 7:
        time.sleep(0.05)
        assert process.poll() is None, (tmp_path / "log").read_text()
    process.terminate()
    assert process.wait(timeout=60) != 0
    assert [int(path.stem[5:]) for path in list_checkpoints(out)] == [rows(out)[-1]["step"]], (tmp_path / "log").read_text()
    assert "SIGTERM; --resume continues" in (tmp_path / "log").read_text()
    assert_near(losses(out)[:UPDATES], losses(straight)[:rows(out)[-1]["step"]])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_job(data, forks, straight, tmp_path, rank):
    out = tmp_path / "run"
    fault = fault_at(9, f"os.environ['RANK'] == '{rank}' and os.kill(os.getpid(), signal.SIGKILL)")
    started = time.monotonic()
    codes = forks.run(flags(data, out, timeout=20, keep=10), fault, processes=2)
    assert time.monotonic() - started < 30 and codes[rank] == -signal.SIGKILL and codes[1 - rank] != 0
    assert forks.run(flags(data, out, resume=True, keep=10), processes=2) == [0, 0], forks.output()
    one, two = final(straight)["model"], final(out)["model"]
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("processes, parallel", [(1, "ddp"), (2, "ddp"), (2, "fsdp")])
def test_nan_in_one_rank_stops_all_before_the_update(data, forks, straight, tmp_path, processes, parallel):
    """LP-15: with a log line every 10 updates only, so that the weights are protected while no one looks."""
    out = tmp_path / "run"
    fault = fault_at(26 // processes, f"result = result * (math.nan if os.environ.get('RANK', '0') == '{processes - 1}' else 1)")
    argv = flags(data, out, log_every=10, save_every=4, eval_every=100, parallel=parallel)
    assert forks.run(argv, fault, processes=processes) == [1] * processes
    line = [line for line in forks.output().splitlines() if line.startswith("train.py: ")]
    assert len(line) == 1 and line[0].startswith("train.py: update 13: loss nan") and "step-00000012.pt" in line[0]
    assert all(value.isfinite().all() for path in list_checkpoints(out) for value in read_checkpoint(path)["model"].values())
    assert forks.run(flags(data, out, resume=True, parallel=parallel), processes=processes) == [0] * processes
    if parallel == "fsdp":  # it rounds in another order than ddp, so it has an undisturbed run of its own
        straight = tmp_path / "straight"
        assert forks.run(flags(data, straight, parallel=parallel), processes=processes) == [0] * processes
    one, two = final(straight)["model"], final(out)["model"]
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_full_disk_costs_a_checkpoint_and_not_the_run(data, forks, straight, tmp_path):
    """CK-22: a write error at a limit below the checkpoint's size, from update 10 on."""
    out = tmp_path / "run"
    assert forks.run(flags(data, out, max_targets=128 * 10)) == [0]
    good = list_checkpoints(out)[0].read_bytes()
    full = "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))"
    assert forks.run(flags(data, out, resume=True), full) == [1]  # nothing to go on with at the end
    assert forks.output().count("checkpoint not saved") == 4 and "step-00000010.pt" in forks.output()
    assert rows(out)[-1]["step"] == UPDATES and list_checkpoints(out)[0].read_bytes() == good and not list(out.glob("*.tmp"))
    assert forks.run(flags(data, out, resume=True)) == [0]
    assert_same_run(straight, out)


def test_a_full_disk_costs_a_log_row_and_no_half_row(tmp_path):
    log = runs.claim_run(tmp_path)
    runs.write_row(log, {"step": 1, "loss": 1.0})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40, hard))
    try:
        with pytest.raises(OSError):
            runs.write_row(log, {"step": 2, "loss": 1.0, "lr": 0.1})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    runs.write_row(log, {"step": 3, "loss": 1.0})
    assert [row["step"] for row in rows(tmp_path)] == [1, 3]


def test_damaged_checkpoints_are_skipped_with_a_notice(data, forks, straight, tmp_path):
    """A cut one and one with a flipped byte; they do not crowd a good one out of --keep=1 either."""
    out = tmp_path / "run"
    assert forks.run(flags(data, out, max_targets=128 * 20, keep=4)) == [0]
    cut, flipped = list_checkpoints(out)[:2]
    cut.write_bytes(cut.read_bytes()[:-100])
    content = bytearray(flipped.read_bytes())
    content[len(content) // 2] ^= 1
    flipped.write_bytes(content)
    assert forks.run(flags(data, out, resume=True, keep=1, save_every=1, max_targets=128 * 12)) == [0]
    assert forks.output().count("skipped: ") == 2 and "resumed after update 10" in forks.output()
    assert sorted(path.name for path in list_checkpoints(out)) == ["step-00000012.pt", flipped.name, cut.name]
    assert forks.run(flags(data, out, resume=True)) == [0]
    assert_same_run(straight, out)


def test_any_flipped_byte_is_either_harmless_or_refused(straight, tmp_path):
    """Over the whole file, its zip headers included: the same contents, or ValueError and nothing else."""
    content, chance = final_path(straight).read_bytes(), random.Random(0)
    expected = final(straight)["model"]
    places = [chance.randrange(len(content)) for _ in range(60)]
    places += [len(content) - 1 - chance.randrange(6000) for _ in range(140)]
    refused = 0
    for place in places:
        bad = bytearray(content)
        bad[place] ^= 1 << chance.randrange(8)
        (tmp_path / "step-00000030.pt").write_bytes(bad)
        try:
            found = read_checkpoint(tmp_path / "step-00000030.pt")["model"]
        except ValueError:
            refused += 1
        else:
            assert all(torch.equal(found[name], expected[name]) for name in expected), place
    assert refused > 190  # all but the mark itself


def test_two_runs_cannot_share_a_directory(data, forks, tmp_path):
    out = tmp_path / "run"
    held = runs.claim_run(out)
    assert forks.run(flags(data, out)) == [1]
    assert forks.output().splitlines()[-1] == f"train.py: {out} is in use by another run; wait for it or give another --out"
    held.close()
    assert forks.run(flags(data, out, max_targets=128)) == [0]
    assert forks.run(flags(data, out)) == [1] and "--resume continues it" in forks.output()  # nor overwrite one that is done


def test_keep_and_keep_every(tmp_path):
    for step in range(1, 13):
        checkpoints.save_checkpoint(tmp_path, step, keep=2, keep_every=5)
    assert [int(path.stem[5:]) for path in list_checkpoints(tmp_path)] == [12, 11, 10, 5]


# ----------------------------------------------------------------------------------------------------------------------
# Resume: refusals and ends

def test_resume_refuses_another_experiment(data, forks, straight, tmp_path):
    """CK-12, CK-21: other data, another recipe; a finished run ends at once; a longer one goes on where its schedule allows."""
    argv = flags(write_data(tmp_path / "data", seed=1), straight, resume=True)
    assert forks.run(argv) == [1] and "data_fingerprint" in forks.output().splitlines()[-1]
    assert forks.run(flags(data, straight, resume=True, max_lr=1)) == [1] and "max_lr 0.004 -> 1.0" in forks.output()
    before = final_path(straight).stat().st_mtime_ns
    assert forks.run(flags(data, straight, resume=True)) == [0] and final_path(straight).stat().st_mtime_ns == before


def test_checkpoints_hold_plain_values_only(straight):
    """CK-13, CK-03: torch.load(weights_only=True) takes them; a missing, renamed or added weight is named."""
    state = torch.load(final_path(straight), weights_only=True)
    assert {"step", "model", "optimizer", "config", "model_config", "data", "tokenizer_sha256", "eot_id"} == state.keys()
    assert list(state["optimizer"]["state"])[0] in state["model"] and not any("module" in name for name in state["model"])
    state["model"]["extra"] = state["model"].pop("lm_head.weight")
    with pytest.raises(ValueError, match="differ in extra, lm_head.weight"):
        checkpoints.scatter_state(Decoder(ModelConfig(**state["model_config"])), None, state)


# ----------------------------------------------------------------------------------------------------------------------
# Sampler and loop

def document_shard(lengths):
    tokens = np.concatenate([np.arange(n) + 100 * i for i, n in enumerate(lengths)]).astype(np.uint16)
    starts = shard_format.document_starts(lengths)
    return types.SimpleNamespace(longest=max(lengths), documents=len(lengths), tokens=len(tokens), map=lambda: (tokens, starts))


def test_sampler_reaches_every_window_and_no_other():
    """SM-01: T + 1 tokens give one window, T + 2 two, T none; the last target is the last token. SM-06: shards of any size."""
    sampler = train.WindowSampler([document_shard([9, 10, 8]), document_shard([12])], block_size=8, seed=1, windows_per_visit=7)
    inputs, targets = sampler.batch([(0, w) for w in range(700)])
    assert {row[0] for row in inputs.tolist()} == {0, 100, 101, 1, 2, 3}  # the second shard's starts are 0 to 3
    assert targets.max() == 109 and (targets == inputs + 1).all()


def test_sampler_wraps_around_a_small_data_set_in_a_new_order():
    """SM-07, LP-23: five eligible windows, as many updates as wanted; every update has exactly its windows."""
    shards = [document_shard([9] * n) for n in (2, 3, 1)]
    sampler = train.WindowSampler(shards, block_size=8, seed=1, windows_per_visit=2)
    orders = set()
    for epoch in range(20):
        visits = [len(sampler.visit(0, 3 * epoch + i)[0]) for i in range(3)]
        assert sorted(visits) == [9, 18, 27]
        orders.add(tuple(visits))
    assert len(orders) > 1 and len(sampler.batch(train.rank_rows(10**6, 4, 2, 0, 1))[0]) == 4


@pytest.mark.filterwarnings("error")
def test_batches_hold_int64_of_their_own():
    """SM-08: large ids keep their value; writing to a batch leaves the shard alone."""
    ids = np.array([0, 32_767, 32_768, 49_151, 65_535], np.uint16)
    shard = types.SimpleNamespace(longest=5, documents=1, tokens=5, map=lambda: (ids, np.array([0, 5])))
    inputs, targets = train.WindowSampler([shard], 4, 1, 1).batch([(0, 0)])
    assert inputs.dtype == torch.int64 and torch.cat((inputs[0], targets[0, -1:])).tolist() == ids.tolist()
    inputs.zero_()
    assert ids[1] == 32_767


def test_ranks_share_an_update_without_overlap():
    """SM-04: whatever the number of processes, the windows of an update are the same and each is in one process."""
    whole = train.rank_rows(5, 16, 2, 0, 1)
    for world_size in (2, 4, 8, 16):
        assert [row for rank in range(world_size) for row in train.rank_rows(5, 16, 2, rank, world_size)] == whole
    assert len(set(whole)) == 16


@pytest.mark.parametrize("warmup, total", [(100, 100), (0, 10), (0, 1), (1, 1), (5, 20)])
def test_learning_rate_has_no_gap(warmup, total):
    """LP-08, LP-09: the peak once, no jump above one cosine step, the minimum at the end."""
    rates = [train.learning_rate(step, 1.0, 0.1, warmup, total) for step in range(1, total + 3)]
    assert all(0 < rate <= 1 for rate in rates) and rates[total:] == [0.1, 0.1]
    if warmup < total:
        falls = [a - b for a, b in zip(rates[max(warmup - 1, 0):], rates[max(warmup, 1):])]
        assert max(falls) < 0.9 * math.pi / 2 / (total - warmup) + 1e-9


@pytest.mark.parametrize("flag, words", [
    ("--warmup_steps=20 --decay_steps=10", "at most decay_steps"), ("--compile=maybe", "invalid boolean value"),
    ("--dtype=float16", "invalid choice"), ("--device=mps", "expected cpu"), ("--parallel=tp", "invalid choice"),
    ("--keep=0", "1 or more"), ("--tokens_per_step=6000", "multiple of")])
def test_wrong_flags_end_in_one_line(capsys, flag, words):
    """LP-08, LP-17, LP-18, CL-01."""
    with pytest.raises(SystemExit) as end:
        settings.parse_args(train.PRESETS, None, ["--preset=smoke", *flag.split()])
    assert end.value.code == 2 and words in capsys.readouterr().err.splitlines()[-1]


def test_an_indivisible_batch_is_refused(data, forks, tmp_path):
    """LP-06."""
    assert forks.run(flags(data, tmp_path / "run", micro_batch=3)) == [1]
    assert "do not divide" in forks.output() and not (tmp_path / "run").exists()


def test_evaluation_weighs_targets_not_batches():
    """LP-12: windows of loss 1, 1, 1, 1, 6 in batches of 2 have a mean of 2."""
    class Constant(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.lm_head = torch.nn.Linear(1, 1)

        def forward(self, x, y):
            return None, x[y >= 0].float().mean() if (y >= 0).any() else torch.zeros(())
    inputs = torch.tensor([1, 1, 1, 1, 6, 99])[:, None].expand(6, 3)
    targets = torch.tensor([0, 0, 0, 0, 0, -1])[:, None].expand(6, 3)
    assert train.evaluate(Constant(), inputs, targets, 2, torch.autocast("cpu", enabled=False)) == 2.0


# ----------------------------------------------------------------------------------------------------------------------
# Before and beside a run

def test_dry_run_needs_no_data_and_states_every_part(forks, tmp_path):
    """The paper's model: 27.38 GB of weights, gradients and moments; logits by rows, not 3.2 GB."""
    argv = ["--preset=paper", "--dry_run", f"--out={tmp_path / 'run'}", "--device=cpu", "--dtype=bfloat16"]
    assert forks.run(argv) == [0]
    line = next(line for line in forks.output().splitlines() if line.startswith("memory"))
    parts = {word: float(size) for word, size in (part.split() for part in line.split(" = ")[1].split(";")[0].split(" + "))}
    assert parts["parameters"] == 6.85 and parts["optimizer"] == 13.69
    assert 6.8 < parts["gradients"] < 7.7 and parts["logits"] < 1
    assert "time for 100,000,000,000 targets" in forks.output() and not (tmp_path / "run").exists()


def test_dry_run_takes_the_rate_of_a_log_that_a_crash_cut(forks, tmp_path):
    (tmp_path / "log.jsonl").write_text('{"step": 1, "targets_per_second": 1234.0}\n{"step": 2, "targets_per')
    assert forks.run(["--preset=smoke", "--dry_run", f"--out={tmp_path}", "--device=cpu"]) == [0], forks.output()
    assert f"at 1,234 targets/s (as measured in {tmp_path})" in forks.output()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["none", "block", "selective"])
def test_estimate_counts_what_a_real_step_allocates(kind, dtype):
    """Against the same count over real tensors (the whole process is measured in tests/bench)."""
    config = ModelConfig(vocab_size=512, block_size=64, n_layer=3, n_head=2, n_embd=36, n_ffn=96)
    parts = costs.estimate_memory(config, 4, dtype, kind, accumulation=1)
    model, idx = Decoder(config), torch.zeros(4, 64, dtype=torch.int64)
    model.checkpoint_activations = kind
    with costs.LiveBytes(lambda tensor: "all") as live:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16", cache_enabled=False):
            loss = model(idx, idx)[1]
        loss.backward()
    estimate = parts["gradients"] + parts["activations"] + parts["logits"]
    assert abs(estimate / live.peak["all"] - 1) < 0.05
    held = sum(p.numel() for p in model.parameters()) * 4
    assert parts["parameters"] == held and parts["optimizer"] == 2 * held
    few = costs.estimate_memory(config, 1, dtype, kind, accumulation=2)  # hardly an activation: all gradients at the peak
    assert held <= few["gradients"] < 1.5 * held  # one for each parameter and one on its way, no parameter once more


def test_estimate_for_a_gpu_keeps_no_attention_weights():
    """They are kept on a CPU in BF16: 3 layers, 4 rows, 2 heads, for each 128 queries the keys up to them, 2 bytes."""
    config = ModelConfig(vocab_size=512, block_size=256, n_layer=3, n_head=2, n_embd=36, n_ffn=96)
    cpu, gpu = (sum(costs.estimate_memory(config, 4, "bfloat16", "none", device=device).values()) for device in ("cpu", "cuda:0"))
    assert cpu - gpu == pytest.approx(3 * 4 * 2 * 128 * (128 + 256) * 2, rel=0.2)


def test_profile_writes_a_trace(data, forks, tmp_path):
    assert forks.run(flags(data, tmp_path / "run", profile=True, max_targets=128 * 8)) == [0], forks.output()
    names = {event.get("name") for event in json.loads((tmp_path / "run" / "trace.json").read_text())["traceEvents"]}
    assert {"ProfilerStep#2", "ProfilerStep#3", "ProfilerStep#4"} <= names


def test_tensorboard_without_the_package_is_one_line(data, forks, tmp_path):
    fault = "sys.modules['torch.utils.tensorboard'] = None"
    assert forks.run(flags(data, tmp_path / "run", tensorboard=True), fault) == [1]
    assert "pip install tensorboard" in forks.output().splitlines()[-1]
