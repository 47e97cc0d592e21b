"""A run and its directory: exact resumes, faults that lose nothing, refusals, sweeps."""

import json
import os
import random
import resource
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from training import (
    UPDATES,
    Forks,
    assert_near,
    assert_same_run,
    fault_at,
    final,
    final_path,
    flags,
    furthest,
    rows,
    run_here,
    same_state,
    values,
)

import train
from machinery import checkpoints, runs, settings, sweep
from machinery.checkpoints import read_checkpoint
from machinery.files import sha256_of
from machinery.runs import list_checkpoints
from model import Decoder, ModelConfig


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


@pytest.fixture
def spoiled(data_dir, tmp_path):
    """A copy of the prepared data to spoil."""
    return Path(shutil.copytree(data_dir, tmp_path / "data"))


def steps(out):
    return [row["step"] for row in rows(out)]


# --- resume

def test_resume_is_bitwise_also_across_a_shard_border(data_dir, straight, tmp_path, monkeypatch):
    """24 windows a visit and 8 a stream and update: updates 4, 7, 10 ... open another shard."""
    for updates in (3, 7, 11, UPDATES):
        run_here(monkeypatch, data_dir, tmp_path, max_targets=512 * updates, resume=True)
    assert same_state(final(tmp_path), final(straight))

    def without_speed(row):
        return {key: row[key] for key in row if key not in ("targets_per_second", "memory_gb")}

    assert list(map(without_speed, rows(tmp_path))) == list(map(without_speed, rows(straight)))


def test_checkpoints_move_between_ddp_fsdp_and_numbers_of_processes(data_dir, forks, straight,
                                                                    tmp_path):
    """Each part of the run goes on exactly where the last one stopped; the log has each update
    once."""
    out = tmp_path / "run"
    for updates, processes, parallel in ((4, 2, "fsdp"), (9, 1, "ddp"), (15, 4, "fsdp"),
                                         (UPDATES, 2, "ddp")):
        argv = flags(data_dir, out, max_targets=512 * updates, parallel=parallel, micro_batch=4,
                     resume=True)
        assert forks.run(argv, processes=processes) == [0] * processes, forks.output()
    assert steps(out) == list(range(1, UPDATES + 1))
    assert_near(values(out), values(straight))
    one, two = final(straight)["optimizer"], final(out)["optimizer"]
    for name, state in one["state"].items():
        assert state["step"] == two["state"][name]["step"] == UPDATES
        torch.testing.assert_close(state["exp_avg"], two["state"][name]["exp_avg"],
                                   rtol=1e-3, atol=1e-6)


def test_a_finished_run_resumes_to_nothing(data_dir, straight, monkeypatch):
    before, log = final_path(straight).stat().st_mtime_ns, (straight / "log.jsonl").read_bytes()
    run_here(monkeypatch, data_dir, straight, keep=10, resume=True)
    assert final_path(straight).stat().st_mtime_ns == before
    assert (straight / "log.jsonl").read_bytes() == log


def test_resume_with_another_experiment_lists_the_fields(data_dir, straight, spoiled, monkeypatch):
    before = final_path(straight).stat().st_mtime_ns
    with pytest.raises(ValueError, match=r"max_lr 0.003 -> 1.0, .*streams 2 -> 4|streams.*max_lr"):
        run_here(monkeypatch, data_dir, straight, resume=True, max_lr=1.0, streams=4)
    with pytest.raises(ValueError, match="input binary -> gf2"):
        run_here(monkeypatch, data_dir, straight, resume=True, input="gf2")
    meta = json.loads((spoiled / "meta.json").read_text())
    with open(spoiled / "tokenizer.json", "a") as tokenizer:
        tokenizer.write("\n")
    meta["tokenizer"]["sha256"] = sha256_of(spoiled / "tokenizer.json")
    (spoiled / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(ValueError, match="data_fingerprint"):
        run_here(monkeypatch, spoiled, straight, resume=True)
    assert final_path(straight).stat().st_mtime_ns == before


def test_what_may_change_on_resume_is_the_machine_and_the_reports():
    """The list is written out, so that it can be read without torch; a new flag has to be put on
    it, or not, by decision: every flag of these groups, and of the run's those that say where."""
    free = {*settings.FLAGS["machine"], *settings.FLAGS["reports"], "preset", "data", "out",
            "resume", "dry_run", "targets_per_second", "max_targets",
            "init_from"}  # where; init_from_sha256 says what
    assert runs.FREE_ON_RESUME == free


def test_resume_to_fewer_updates_than_are_done_is_refused(data_dir, straight, forks):
    """It never ended, swallowed SIGTERM and rotated the good checkpoints away."""
    before = {path.name: path.stat().st_mtime_ns for path in straight.iterdir()}
    argv = flags(data_dir, straight, keep=10, resume=True, max_targets=512 * 12)
    assert "is 12 updates, but" in forks.refused(argv)
    assert {path.name: path.stat().st_mtime_ns for path in straight.iterdir()} == before


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("failure, words", [
    ("OSError(13, 'Permission denied', str(path))", "Permission denied"),
    ("OSError(5, 'Input/output error', str(path))", "Input/output error"),
    ("MemoryError()", "not enough memory"),
    ("RuntimeError(\"DefaultCPUAllocator: can't allocate memory\")", "can't allocate memory"),
    ("OSError(116, 'Stale file handle', str(path))", "Stale file handle")])
def test_a_failed_read_is_not_damage(data_dir, straight, forks, tmp_path, failure, words,
                                     processes):
    """Nothing is started over, deleted or cut, and no older checkpoint is taken in its place."""
    out = Path(shutil.copytree(straight, tmp_path / "run"))
    (out / "step-00000099.tmp").write_text("of a save that was killed")
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    fault = ("import torch\ndef load(file, **rest):\n    path = getattr(file, 'name', file)\n"
             f"    raise {failure}\ntorch.load = load")
    argv = flags(data_dir, out, keep=10, resume=True)
    assert words in forks.refused(argv, fault, processes)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_no_whole_checkpoint_stops_and_touches_nothing(data_dir, straight, forks, tmp_path):
    out = Path(shutil.copytree(straight, tmp_path / "run"))
    for path in list_checkpoints(out):
        path.write_bytes(path.read_bytes()[:-100])
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    line = forks.refused(flags(data_dir, out, keep=10, resume=True))
    assert "none of its 4 checkpoints is whole" in line
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_an_earlier_int16_codebook_resumes_in_two_processes(data_dir, forks, tmp_path):
    """As they were written before they could be broadcast."""
    argv = flags(data_dir, tmp_path, input="random", resume=True, max_targets=512)
    assert forks.run(argv) == [0]
    state = read_checkpoint(list_checkpoints(tmp_path)[0])
    name = "model.embed_tokens.codebook"
    expected, state["model"][name] = state["model"][name], state["model"][name].short()
    checkpoints.save_checkpoint(tmp_path, keep=1, **state)
    argv = flags(data_dir, tmp_path, input="random", resume=True, max_targets=1024)
    assert forks.run(argv, processes=2) == [0, 0], forks.output()
    found = read_checkpoint(list_checkpoints(tmp_path)[0])["model"][name]
    assert torch.equal(found, expected) and found.dtype == torch.int32


def test_checkpoints_hold_plain_values_only(straight):
    """torch.load(weights_only=True) takes them; a missing, renamed or added weight is named."""
    state = torch.load(final_path(straight), weights_only=True)
    assert {"step", "model", "optimizer", "config", "model_config", "data", "tokenizer_sha256",
            "eot_id"} == state.keys()
    assert list(state["optimizer"]["state"])[0] in state["model"]
    assert not any("module" in name for name in state["model"])
    state["model"]["extra"] = state["model"].pop("lm_head.weight")
    with pytest.raises(ValueError, match="differ in extra, lm_head.weight"):
        checkpoints.scatter_state(Decoder(ModelConfig(**state["model_config"])), None, state)


def test_a_checkpoint_has_its_name_only_when_it_is_whole_and_on_the_disk(tmp_path, monkeypatch):
    names, original = [], os.fsync

    def fsync(file):
        original(file)
        names.append(sorted(path.name for path in tmp_path.iterdir()))

    monkeypatch.setattr(os, "fsync", fsync)
    for step in (1, 2):
        checkpoints.save_checkpoint(tmp_path, step, keep=1)
    first, second = "step-00000001.pt", "step-00000002.pt"
    aside = [["step-00000001.tmp"], [first, "step-00000002.tmp"]]
    assert names == [aside[0], [first], aside[1], [first, second]]
    assert [path.name for path in list_checkpoints(tmp_path)] == [second]


def test_keep_and_keep_every(tmp_path):
    for step in range(1, 13):
        checkpoints.save_checkpoint(tmp_path, step, keep=2, keep_every=5)
    assert [int(path.stem[5:]) for path in list_checkpoints(tmp_path)] == [12, 11, 10, 5]


# --- the log and the lock

def test_cut_log_drops_later_rows_and_half_a_row(tmp_path):
    log = tmp_path / "log.jsonl"
    kept = '{"step": 0, "val_loss": 5}\n{"step": 1, "loss": 4}\n{"step": 2, "loss": 3}\n'
    log.write_text(kept + '{"step": 2, "val_loss": 3}\n{"step": 3, "lo')
    with open(log, "ab", buffering=0) as file:
        runs.cut_log(file, 2)
    assert log.read_text() == kept
    with open(log, "ab", buffering=0) as file:
        file.write(b'\0\0}\n{"step": 3, "loss"}\n[1]}\n{"loss": 1}\n')  # of a power failure
        assert [row["step"] for row in runs.read_log(tmp_path)] == [0, 1, 2]
        runs.cut_log(file, 5)
    assert log.read_text() == kept
    with open(log, "ab", buffering=0) as file:
        runs.cut_log(file, 0)
    assert log.read_text() == ""


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
    assert steps(tmp_path) == [1, 3]


def test_two_runs_cannot_share_a_directory(data_dir, forks, tmp_path):
    out = tmp_path / "run"
    held = runs.claim_run(out)
    assert f"{out}: another run is at work here" in forks.refused(flags(data_dir, out))
    del held
    assert forks.run(flags(data_dir, out, max_targets=512)) == [0]
    before = list_checkpoints(out)[0].read_bytes()
    assert "--resume continues it" in forks.refused(flags(data_dir, out))  # one that is done
    assert list_checkpoints(out)[0].read_bytes() == before


# --- faults

def test_thirty_kills_lose_nothing(data_dir, forks, straight, tmp_path):
    """kill -9 at random moments, half of them inside a save (which is made slow), then --resume."""
    out, chance = tmp_path / "run", random.Random(1)
    slow = ("import time; sync = os.fsync; "
            "os.fsync = lambda file: (time.sleep(0.02), sync(file))")
    killed = 0
    for _ in range(30):
        before = list_checkpoints(out)
        pid = forks.start(flags(data_dir, out, resume=True, save_every=1), slow)
        time.sleep(chance.uniform(0.1, 0.7))
        os.kill(pid, signal.SIGKILL)
        killed += forks.wait(pid) == -signal.SIGKILL
        found = list_checkpoints(out)
        assert len(found) >= min(len(before), 2)  # nothing good goes first
        for path in found:
            read_checkpoint(path)
        if final_path(out).exists():
            for path in found:
                path.unlink()  # done: once more from the start
    assert killed >= 20
    assert forks.run(flags(data_dir, out, resume=True)) == [0], forks.output()
    assert_same_run(straight, out)
    assert not list(out.glob("*.tmp"))


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_signal_saves_and_leaves_with_the_documented_code(data_dir, forks, straight, tmp_path,
                                                          name):
    out = tmp_path / "run"
    fault = fault_at(16, f"os.kill(os.getpid(), signal.{name})")
    argv = flags(data_dir, out, save_every=1000, eval_every=1000)
    assert forks.run(argv, fault) == [train.STOPPED]
    assert f"by {name}" in forks.output()
    stopped = int(list_checkpoints(out)[0].stem[5:])
    assert len(list_checkpoints(out)) == 1 and stopped == 8 and steps(out)[-1] == stopped
    assert forks.run(flags(data_dir, out, resume=True, save_every=1000)) == [0]
    assert values(out) == values(straight)


def test_signals_are_answered_and_a_second_ctrl_c_ends_at_once(data_dir, forks, tmp_path):
    """Two within a second are one Ctrl-C: under torchrun the terminal and torchrun both send it."""
    twice = "os.kill(os.getpid(), signal.SIGINT); os.kill(os.getpid(), signal.SIGINT)"
    argv = flags(data_dir, tmp_path / "twice", save_every=1000)
    assert forks.run(argv, fault_at(6, twice)) == [train.STOPPED]
    assert forks.stderr.read_text().startswith("SIGINT: a checkpoint after this update")
    later = "import time; time.sleep(1.1); ".join(["os.kill(os.getpid(), signal.SIGINT); "] * 2)
    argv = flags(data_dir, tmp_path / "later", save_every=1000)
    assert forks.run(argv, fault_at(6, later)) == [130]
    said = forks.stderr.read_text().splitlines()
    assert said[-1].startswith("train.py: interrupted; --resume") and len(said) == 2
    assert not list_checkpoints(tmp_path / "later")


def test_a_terminal_that_is_closed_takes_nothing_with_it(data_dir, forks, straight, tmp_path):
    """Its SIGHUP is an orderly stop, though nothing can be written to it any more."""
    closed = ("r, w = os.pipe(); os.close(r); os.dup2(w, 1); os.dup2(w, 2); "
              "os.kill(os.getpid(), signal.SIGHUP)")
    argv = flags(data_dir, tmp_path, save_every=1000, eval_every=1000)
    assert forks.run(argv, fault_at(16, closed)) == [train.STOPPED]
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000008.pt"]
    # Nor does a run end because nobody reads what it says.
    piped = fault_at(3, "r, w = os.pipe(); os.close(r); os.dup2(w, 1); os.dup2(w, 2)")
    assert forks.run(flags(data_dir, tmp_path, resume=True), piped) == [0]
    assert values(tmp_path) == values(straight)


def test_signal_handlers_come_back_after_a_run(data_dir, tmp_path, monkeypatch):
    """As in a notebook, where Ctrl-C is wanted again."""
    numbers = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP
    before = [signal.getsignal(number) for number in numbers]
    run_here(monkeypatch, data_dir, tmp_path, max_targets=512)
    assert [signal.getsignal(number) for number in numbers] == before


def test_a_slow_disk_is_not_a_lost_process(data_dir, forks, tmp_path):
    """Reading and writing a checkpoint may each take longer than --timeout."""
    slow = """
import time
import machinery.checkpoints as checkpoints
save, read = checkpoints.save_checkpoint, checkpoints.read_checkpoint
checkpoints.save_checkpoint = lambda *args, **rest: (time.sleep(2.5), save(*args, **rest))
checkpoints.read_checkpoint = lambda path: (time.sleep(2.5), read(path))[1]
"""
    for updates in (1, 2):
        argv = flags(data_dir, tmp_path, timeout=2, save_every=1, max_targets=512 * updates,
                     eval_every=100, micro_batch=16, resume=True)
        assert forks.run(argv, slow if updates == 2 else "", processes=2) == [0, 0], forks.output()
    assert "resumed after update 1" in forks.output() and steps(tmp_path) == [1, 2]


def test_an_error_of_any_process_is_told(data_dir, forks, tmp_path):
    """In what all do, once and by the first; alone in an update, by the process itself."""
    before = """
import machinery.shards as shards
whole = shards.Shard.map
def map(self):
    if os.environ['RANK'] == '1':
        raise OSError(5, 'Input/output error', str(self.path))
    return whole(self)
shards.Shard.map = map
"""
    line = forks.refused(flags(data_dir, tmp_path / "a"), before, processes=2)
    assert line.startswith("train.py: process 1: ") and "Input/output error" in line
    assert not (tmp_path / "a").exists()
    later = fault_at(9, "if os.environ['RANK'] == '1': raise OSError(5, 'Input/output error')")
    codes = forks.run(flags(data_dir, tmp_path / "b", timeout=20), later, processes=2)
    assert codes == [1, 1]
    assert "train.py: process 1: Input/output error; " in forks.stderr.read_text()


def test_what_is_said_is_there_at_once(data_dir, forks, tmp_path):
    """Also where standard output is a file."""
    fault = fault_at(9, "os.kill(os.getpid(), signal.SIGKILL)")
    assert forks.run(flags(data_dir, tmp_path), fault) == [-signal.SIGKILL]
    assert "\nstep      4  targets 2,048" in forks.stdout.read_text()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_job(data_dir, forks, straight, tmp_path, rank):
    out = tmp_path / "run"
    fault = fault_at(9, f"os.environ['RANK'] == '{rank}' and os.kill(os.getpid(), signal.SIGKILL)")
    started = time.monotonic()
    codes = forks.run(flags(data_dir, out, timeout=20, keep=10), fault, processes=2)
    assert time.monotonic() - started < 30
    assert codes[rank] == -signal.SIGKILL and codes[1 - rank] != 0
    argv = flags(data_dir, out, resume=True, keep=10)
    assert forks.run(argv, processes=2) == [0, 0], forks.output()
    assert furthest(final(straight)["model"], final(out)["model"]) == 0
    assert steps(out) == list(range(1, UPDATES + 1))


@pytest.mark.parametrize("processes, parallel", [(1, "ddp"), (2, "ddp"), (2, "fsdp")])
def test_nan_in_one_rank_stops_all_before_the_update(data_dir, forks, straight, tmp_path,
                                                     processes, parallel):
    """With a log line every 10 updates only, so that the weights are protected while no one looks.
    """
    out = tmp_path / "run"
    factor = f"math.nan if os.environ.get('RANK', '0') == '{processes - 1}' else 1"
    fault = fault_at(26 // processes, f"result = result * ({factor})")
    argv = flags(data_dir, out, log_every=10, save_every=4, eval_every=100, parallel=parallel)
    assert forks.run(argv, fault, processes=processes) == [1] * processes
    line = forks.stderr.read_text()
    assert line.count("\n") == 1 and line.startswith("train.py: update 13: loss nan")
    assert "step-00000012.pt" in line and "stopped before this update" in line
    for path in list_checkpoints(out):
        assert all(value.isfinite().all() for value in read_checkpoint(path)["model"].values())
    argv = flags(data_dir, out, resume=True, parallel=parallel)
    assert forks.run(argv, processes=processes) == [0] * processes
    if parallel == "fsdp":  # it rounds in another order than ddp: a run of its own to compare with
        straight = tmp_path / "straight"
        argv = flags(data_dir, straight, parallel=parallel)
        assert forks.run(argv, processes=processes) == [0] * processes
    assert furthest(final(straight)["model"], final(out)["model"]) == 0


def test_a_full_disk_costs_a_checkpoint_and_not_the_run(data_dir, forks, straight, tmp_path):
    """A write error at a limit below the checkpoint's size, from update 10 on."""
    out = tmp_path / "run"
    assert forks.run(flags(data_dir, out, max_targets=512 * 10)) == [0]
    good = list_checkpoints(out)[0].read_bytes()
    full = "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))"
    argv = flags(data_dir, out, resume=True, save_every=3)
    assert forks.run(argv, full) == [1]  # nothing to go on with at the end
    said = forks.output()
    assert said.count("checkpoint not saved") == 4 and "step-00000010.pt" in said
    assert steps(out)[-1] == UPDATES and list_checkpoints(out)[0].read_bytes() == good
    assert not list(out.glob("*.tmp"))
    assert forks.run(flags(data_dir, out, resume=True)) == [0]
    assert_same_run(straight, out)


def test_damaged_checkpoints_are_skipped_with_a_notice(data_dir, forks, straight, tmp_path):
    """A cut one and one with a flipped byte; they do not crowd a good one out of --keep=1 either.
    """
    out = tmp_path / "run"
    assert forks.run(flags(data_dir, out, keep=4)) == [0]
    cut, flipped = list_checkpoints(out)[:2]
    cut.write_bytes(cut.read_bytes()[:-100])
    content = bytearray(flipped.read_bytes())
    content[len(content) // 2] ^= 1
    flipped.write_bytes(content)
    argv = flags(data_dir, out, resume=True, keep=1, save_every=1, max_targets=512 * 12)
    assert forks.run(argv) == [0]
    said = forks.output()
    assert said.count("skipped: ") == 2 and "resumed after update 10" in said
    left = [path.name for path in list_checkpoints(out)]
    assert left == [cut.name, flipped.name, "step-00000012.pt"]
    assert forks.run(flags(data_dir, out, resume=True)) == [0]
    assert_same_run(straight, out)


def test_any_flipped_byte_is_either_harmless_or_refused(straight, tmp_path):
    """Over the whole file, its zip headers included: the same contents, or ValueError and nothing
    else."""
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
            assert furthest(found, expected) == 0, place
    assert refused > 190  # all but the mark itself


# --- many processes

@pytest.mark.parametrize("changes, words", [
    (dict(max_lr=0.001), "max_lr: 0.001 in 1, 0.003 in 1"), (dict(seed=2), "seed: 1 in 1, 2 in 1"),
    (dict(save_every=7), "save_every: 5 in 1, 7 in 1"),
    (dict(parallel="fsdp"), "parallel: ddp in 1, fsdp in 1")])
def test_processes_of_unlike_flags_all_stop(data_dir, forks, tmp_path, changes, words):
    forks.stdout.write_text("")
    forks.stderr.write_text("")
    env = forks.environment(2)
    pids = [forks.start(flags(data_dir, tmp_path / "run", **(changes if rank else {})),
                        RANK=str(rank), LOCAL_RANK=str(rank), **env) for rank in (0, 1)]
    assert [forks.wait(pid) for pid in pids] == [1, 1]
    line = forks.stderr.read_text()
    assert line.count("\n") == 1 and words in line and not (tmp_path / "run").exists()


def test_processes_of_unlike_code_or_data_all_stop(data_dir, spoiled, forks, tmp_path):
    other = "import machinery.runs as r\nif os.environ['RANK'] == '1': "
    fault = other + "r.code_fingerprint = lambda: 'other'"
    line = forks.refused(flags(data_dir, tmp_path / "a"), fault, processes=2)
    assert "differ in code: " in line and "other in 1" in line
    fault = other + "r.data_fingerprint = lambda meta: 'other'"
    line = forks.refused(flags(data_dir, tmp_path / "b"), fault, processes=2)
    assert "differ in data_fingerprint: " in line


def test_a_sweep_under_torchrun_is_refused_in_one_line(data_dir, forks, tmp_path):
    argv = [*flags(data_dir, tmp_path / "run"), "--sweep=seed=1,2"]
    line = forks.refused(argv, processes=2)
    assert "leave torchrun out" in line and not (tmp_path / "run").exists()


# --- sweeps

def test_a_sweeps_directories_are_named_after_what_names_a_path(data_dir, tmp_path, monkeypatch):
    args = settings.parse_args(train.PRESETS, None, [
        "--preset=smoke", f"--out={tmp_path}", f"--sweep=data={data_dir},~/b/;seed=1"])

    def parse(argv):
        return settings.parse_args(train.PRESETS, None, argv)

    plan = sweep.plan_runs(args, [], parse)
    assert [out.name for out in plan] == ["data=data,seed=1", "data=b,seed=1"]
    assert [run.data for _, run in plan.values()] == [str(data_dir), os.path.expanduser("~/b/")]
    args.sweep = ["data=a/x,b/x"]
    with pytest.raises(ValueError, match="two runs would be .*data=x"):
        sweep.plan_runs(args, [], parse)
    args.sweep = ["data=" + "a" * 300]
    with pytest.raises(ValueError, match="letters are too many"):
        sweep.plan_runs(args, [], parse)
    assert parse(["--preset=smoke", "--out=~/runs/a"]).out == os.path.expanduser("~/runs/a")


def test_sweep_grammar():
    grid = [{"input": i, "seed": s} for i in ("binary", "gf2") for s in "12"]
    assert sweep.parse_sweep("input=binary,gf2;seed=1,2") == grid
    for wrong in ("input", "input=", "=binary", "input=a,,b", ""):
        with pytest.raises(ValueError, match="expected NAME=VALUE"):
            sweep.parse_sweep(wrong)


def test_sweep_runs_skips_and_resumes(data_dir, tmp_path, monkeypatch, capsys):
    """The runs are trained in this process; the next test starts real ones."""
    def train_here(script, command, out):
        out.mkdir(parents=True, exist_ok=True)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", [script, *command])
            return train.main()

    def run_sweep(*more, **changes):
        sweeps = ["--sweep=input=learned,binary;seed=1", "--sweep=input=gf2;code_seed=1", *more]
        argv = ["train.py", *sweeps, *flags(data_dir, tmp_path, max_targets=1024, **changes)]
        monkeypatch.setattr(sys, "argv", argv)
        return train.main(), capsys.readouterr().out

    monkeypatch.setattr(sweep, "train", train_here)
    code, said = run_sweep()
    assert code == 0 and said.count("  trained") == 3 and f"3 runs in {tmp_path}" in said
    names = ["input=learned,seed=1", "input=binary,seed=1", "input=gf2,code_seed=1"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    config = json.loads((tmp_path / names[1] / "config.json").read_text())
    assert config["parameters"]["input"] == 0 and config["code_report"]["zero_ids"] == [0]
    # Finished runs are skipped; one that lost its newest checkpoint is done again.
    list_checkpoints(tmp_path / names[2])[0].unlink()
    code, said = run_sweep()
    assert code == 0 and said.count("  skipped") == 2 and said.count("  trained") == 1
    # Another configuration is refused before anything is trained.
    monkeypatch.setattr(sweep, "train", None)
    with pytest.raises(ValueError, match=r"input=learned,seed=1: .*max_lr 0.003 -> 0.1"):
        run_sweep(max_lr=0.1)
    with pytest.raises(SystemExit):
        run_sweep("--sweep=sed=1")
    assert "unrecognized arguments: --sed=1" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["train.py", "--sweep=seed=1", "--resume"])
    with pytest.raises(ValueError, match="write every other flag as --NAME=VALUE"):
        train.main()


def test_a_failed_run_of_a_sweep_is_said_and_the_others_go_on(data_dir, forks, tmp_path):
    argv = flags(data_dir, tmp_path, max_targets=512, sweep="micro_batch=3,8")
    assert forks.run([flag for flag in argv if flag != "--micro_batch=8"]) == [1], forks.output()
    said = forks.output()
    assert said.count("FAILED") == 1 and said.count("  trained") == 1
    assert "do not divide" in (tmp_path / "micro_batch=3" / "console.txt").read_text()


FORKED_RUNS = """
import machinery.sweep
def forked(script, command, out):
    out.mkdir(parents=True, exist_ok=True)
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.dup2(os.open(out / "console.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
    sys.argv = [script, *command]
    runpy.run_path(script, run_name="__main__")
machinery.sweep.train = forked
"""


def test_two_sweeps_share_the_runs(data_dir, forks, tmp_path):
    """As on two machines with one file system: each run is trained once, and neither fails. Their
    runs are forked, which spares the starts of Python and torch."""
    whole = flags(data_dir, tmp_path, max_targets=512 * 100, save_every=1000, eval_every=1000)
    argv = [*whole, "--sweep=seed=1,2"]
    forks.stdout.write_text("")
    forks.stderr.write_text("")
    pids = [forks.start(argv, FORKED_RUNS), forks.start(argv, FORKED_RUNS)]
    assert [forks.wait(pid) for pid in pids] == [0, 0], forks.output()
    said = forks.output()
    assert "  left to another process" in said and "FAILED" not in said, said
    for seed in (1, 2):
        out = tmp_path / f"seed={seed}"
        assert steps(out) == list(range(1, 101)) and len(list_checkpoints(out)) == 1
        assert (out / "console.txt").read_text().count("step    100  targets") == 1


@pytest.mark.parametrize("name", ["SIGINT", "SIGHUP"])
def test_a_signal_to_a_sweep_is_passed_on_and_its_save_waited_for(data_dir, forks, tmp_path, name):
    """As its runs do it leaves with 75, and starts no other; the same command continues."""
    argv = [*flags(data_dir, tmp_path, save_every=1000, max_targets=512 * 2000),
            "--sweep=seed=1,2"]
    # A terminal signals all of its processes; one that is closed takes their output away, too.
    closed = "; r, w = os.pipe(); os.close(r); os.dup2(w, 1)" if name == "SIGHUP" else ""
    pid = forks.start(argv, "os.setsid()" + closed)
    log = tmp_path / "seed=1" / "log.jsonl"
    deadline = time.monotonic() + 60
    while not (log.exists() and len(rows(log.parent)) > 3) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(pid, getattr(signal, name))
    assert forks.wait(pid) == train.STOPPED
    stopped = [int(path.stem[5:]) for path in list_checkpoints(tmp_path / "seed=1")]
    assert len(stopped) == 1 and steps(tmp_path / "seed=1")[-1] == stopped[0]
    assert f"by {name}" in (tmp_path / "seed=1" / "console.txt").read_text()
    assert not (tmp_path / "seed=2").exists()


# --- wrong input: one line, a non-zero exit, nothing half-written

@pytest.mark.parametrize("argv, message", [
    ("--nonsense=1", "unrecognized arguments: --nonsense"), ("--input=onehot", "onehot"),
    ("--n_embd=40", "36 or 72 would do"), ("--dtype=float16", "invalid choice"),
    ("--tokens_per_step=500", "multiple of block_size x streams = 64"),
    ("--micro_batch=0", "1 or more"), ("--keep=0", "1 or more"), ("--device=mps", "sees 0 mps"),
    ("--warmup_steps=999 --decay_steps=10", "at most decay_steps=10"),
    ("--max_targets=1.5", "max_targets"), ("--max_targets=inf", "max_targets"),
    ("--min_lr=1", "min_lr <= max_lr"), ("--max_lr=inf", "max_lr=inf"), ("--max_lr=nan", "max_lr"),
    ("--targets_per_second=nan", "targets_per_second=nan"), ("--timeout=1e9", "timeout"),
    (f"--timeout={10**9}", "timeout=1000000000: expected at most"), ("--seed=-1", "0 or more"),
    (f"--seed={2**64}", "expected at most 18446744073709551615"), ("--device=cuda", "sees 0 cuda"),
    ("--device=cpu:1", "sees 1 cpu"), ("--device=", "expected auto, cpu"),
    ("--device=cuda:x", "expected auto, cpu"), ("--device=xpu", "expected auto, cpu"),
    ("--input=gf2 --code_seed=-1", "code_seed=-1: expected 0"),
    (f"--input=random --code_seed={2**32}", "code_seed=4294967296: expected 0"),
    ("--input=gf2 --code_offset=zz", "code_offset=zz"),
    ("--input=gf2 --code_offset=fff", "hexadecimal number below 0x200"),
    ("--input=gf2 --vocab_size=16", "no invertible 4 x 4 matrix"),
    ("--compile=maybe", "invalid boolean value"), ("--parallel=tp", "invalid choice")])
def test_wrong_flags(data_dir, tmp_path, monkeypatch, capsys, argv, message):
    whole = ["train.py", *flags(data_dir, tmp_path / "out"), *argv.split()]
    monkeypatch.setattr(sys, "argv", whole)
    with pytest.raises(SystemExit) as end:
        train.main()
    error = capsys.readouterr().err
    assert end.value.code == 2 and len(error.splitlines()) == 1 and message in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("changes, message", [
    (dict(vocab_size=400), "vocab_size=400, but .* has 300; give --vocab_size=300"),
    (dict(block_size=2048, tokens_per_step=8192, micro_batch=2), "no document has more"),
    (dict(micro_batch=3), "do not divide by 1 processes x micro_batch 3; --micro_batch=2 would do"),
    (dict(micro_batch=5, tokens_per_step=64 * 7, windows_per_visit=7), "--micro_batch=2 would do"),
    (dict(vocab_size=4000, n_embd=24),
     "give another --data, or --vocab_size=300 with other sizes: n_embd")])
def test_flags_that_do_not_fit_the_data(data_dir, tmp_path, monkeypatch, changes, message):
    with pytest.raises(ValueError, match=message):
        run_here(monkeypatch, data_dir, tmp_path / "out", **changes)
    assert not (tmp_path / "out").exists()


def test_advice_on_what_divides_is_right(data_dir, tmp_path, monkeypatch):
    """The command that the message gives runs."""
    run_here(monkeypatch, data_dir, tmp_path / "a", micro_batch=2, max_targets=512)
    args = settings.parse_args(train.PRESETS, None, ["--preset=smoke", "--micro_batch=3"])
    with pytest.raises(ValueError, match="--tokens_per_step=(.*) would do") as refused:
        settings.with_micro_batch(args, world_size=3)
    advice = str(refused.value).split("; ")[1].split(" would")[0]
    args = settings.parse_args(train.PRESETS, None, ["--preset=smoke", "--micro_batch=3", advice])
    assert settings.with_micro_batch(args, world_size=3).micro_batch == 3


CAUSES = {
    "no memory": ("raise RuntimeError(\"DefaultCPUAllocator: can't allocate memory: 9 bytes\")",
                  "not enough memory", "--micro_batch"),
    "no GPU memory": ("raise __import__('torch').OutOfMemoryError('CUDA out of memory. Tried')",
                      "not enough memory", "--checkpoint_activations=block"),
    "no memory for Python": ("raise MemoryError", "not enough memory", "run the same command"),
    "a process is lost": ("raise RuntimeError('Connection closed by peer [127.0.0.1]')",
                          "another process is lost", "--resume"),
    "the disk": ("raise OSError(5, 'Input/output error', '/data/train/00000.bin')",
                 "/data/train/00000.bin", "run the same command"),
    "no compiler": ("from torch._inductor.exc import InvalidCxxCompiler; "
                    "raise InvalidCxxCompiler", "--compile", "leave it out"),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_what_ends_a_run_is_one_line_with_advice(data_dir, forks, tmp_path, cause):
    fault, words, advice = CAUSES[cause]
    line = forks.refused(flags(data_dir, tmp_path / "run"), fault_at(5, fault))
    assert words in line and advice in line


def test_a_mistake_of_ours_keeps_its_traceback(data_dir, forks, tmp_path):
    argv = flags(data_dir, tmp_path / "run")
    assert forks.run(argv, fault_at(5, "raise KeyError('ours')")) == [1]
    assert "Traceback" in forks.stderr.read_text() and "KeyError: 'ours'" in forks.output()


@pytest.mark.parametrize("file, content, words", [
    ("meta.json", b"{", "format unreadable"), ("meta.json", b"[]", "format unreadable"),
    ("tokenizer.json", b"{", "its sha256 is not the one in meta.json")])
def test_what_is_not_prepared_data_is_told(spoiled, forks, tmp_path, file, content, words):
    (spoiled / file).write_bytes(content)
    assert words in forks.refused(flags(spoiled, tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_of_no_training_run_is_told(data_dir, straight, forks, tmp_path):
    out = Path(shutil.copytree(straight, tmp_path / "run"))
    checkpoints.save_checkpoint(out, UPDATES, keep=1, model={})
    line = forks.refused(flags(data_dir, out, resume=True))
    assert "not a checkpoint of a training run" in line


def test_no_data(forks, tmp_path):
    line = forks.refused(flags(tmp_path / "none", tmp_path / "out"))
    assert "run python prepare.py" in line and not (tmp_path / "out").exists()


def test_a_stray_rank_is_not_torchruns(forks, tmp_path):
    argv = flags(tmp_path / "none", tmp_path / "out")
    assert forks.wait(forks.start(argv, RANK="1", LOCAL_RANK="1")) == 1
    assert "preset smoke" in forks.output() and "run python prepare.py" in forks.output()


def test_truncated_shard(spoiled, forks, tmp_path):
    path = spoiled / "train" / "00001.bin"
    path.write_bytes(path.read_bytes()[:-2])
    error = forks.refused(flags(spoiled, tmp_path / "out"))
    assert "00001.bin" in error and "expected" in error and "prepare" in error
    assert not (tmp_path / "out").exists()


def test_swapped_shards(spoiled, tmp_path, monkeypatch):
    """Of the same size, so that only the index can tell."""
    path, other = (spoiled / "train" / f"0000{i}.bin" for i in (0, 1))
    meta = json.loads((spoiled / "meta.json").read_text())
    path.write_bytes((other.read_bytes() * 2)[:2 * meta["shards"][0]["train"]["tokens"]])
    with pytest.raises(ValueError, match="index does not belong"):
        run_here(monkeypatch, spoiled, tmp_path / "out", max_targets=100_000)


def test_swapped_shards_of_equal_documents(spoiled, tmp_path, monkeypatch):
    """The same sizes and lengths, other tokens: only the sha256 can tell. Validation's too."""
    path = spoiled / "val" / "00001.bin"
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match="val/00001.bin: its sha256 is not the one in meta.json"):
        run_here(monkeypatch, spoiled, tmp_path / "out", max_targets=100_000)
    assert not (tmp_path / "out").exists()
    content[0] ^= 1
    path.write_bytes(content)
    path = spoiled / "train" / "00002.bin"
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match="train/00002.bin: its sha256 is not the one"):
        run_here(monkeypatch, spoiled, tmp_path / "out", max_targets=100_000)


def test_unwritable_output(data_dir, forks, tmp_path):
    (tmp_path / "file").write_text("")
    assert "file" in forks.refused(flags(data_dir, tmp_path / "file" / "out"))
