"""What a stage does when the machine fails it: the same result, or one line and nothing lost.

Each case makes one call fail on cue (open, read, write, fsync, lock, fork, memory, import) while a
stage runs as its command does, and then looks at three things: the exit code, that standard error
has no traceback, and that every file that was there before still holds what it held.
"""

import builtins
import errno
import io
import mmap
import os
import re
import subprocess
import sys

import pytest
import torch
from stages import (
    COMPARE,
    EXPORT,
    PREPARE,
    PROBE,
    RESUME,
    ROOT,
    SAMPLE,
    SCORE,
    START,
    SWEEP,
    WINDOWS,
    beginning_with,
    run_stage,
    snapshot,
    spell_out,
)


def fail(monkeypatch, call, part, error):
    """Make `call` raise an error where it is about a file whose path contains `part`."""
    def broken(path):
        return isinstance(path, (str, os.PathLike)) and part in str(path)

    def wrap(original):
        def opened(path, mode="r", *args, **kwargs):
            writes = any(letter in mode for letter in "wax+")
            if broken(path) and writes == (call == "write"):
                raise make(error, path)
            return original(path, mode, *args, **kwargs)
        return opened

    def failing(*args, **kwargs):
        raise make(error, part)

    if call in ("read", "write"):
        monkeypatch.setattr(builtins, "open", wrap(builtins.open))
        monkeypatch.setattr(io, "open", wrap(io.open))
    elif call == "import":
        monkeypatch.setitem(sys.modules, part, None)
    elif call == "map":
        monkeypatch.setattr(mmap, "mmap", failing)
    elif call == "fsync":
        monkeypatch.setattr(os, "fsync", failing)
    elif call == "fork":
        monkeypatch.setattr(subprocess, "Popen", failing)
    elif call == "lock":
        fcntl = pytest.importorskip("fcntl")
        monkeypatch.setattr(fcntl, "flock", failing)


def make(error, path):
    return MemoryError() if error == "memory" else OSError(error, os.strerror(error), str(path))


STOPS = [
    (PREPARE, "read", "SOURCE", errno.EACCES),
    (PREPARE, "read", "SOURCE", errno.EIO),
    (PREPARE, "read", "SOURCE", "memory"),
    (PREPARE, "write", "00000.bin", errno.ENOSPC),
    (PREPARE, "write", "meta", errno.EROFS),
    (START, "read", "DATA/meta.json", errno.EACCES),
    (START, "read", "tokenizer.json", errno.EIO),
    (START, "write", "log.jsonl", errno.EROFS),
    (RESUME, "read", "RUN/step-", errno.EACCES),
    (RESUME, "read", "RUN/step-", errno.EIO),
    (RESUME, "read", "RUN/step-", errno.ESTALE),
    (RESUME, "read", "RUN/step-", "memory"),
    (RESUME, "map", "RUN/step-", errno.ENOMEM),
    (SWEEP, "fork", "", errno.EAGAIN),
    (SWEEP, "fork", "", errno.ENOMEM),
    (SCORE, "read", "RUN/step-", errno.EACCES),
    (SCORE, "map", "RUN/step-", errno.ENOMEM),
    (SCORE, "read", "DATA/meta.json", errno.EIO),
    (SCORE, "write", "heldout-", errno.EROFS),
    (COMPARE, "read", "config.json", errno.EACCES),
    (PREPARE, "import", "filelock", None),
    (START, "import", "filelock", None),
    (RESUME, "import", "filelock", None),
    ([*START, "--input=random"], "import", "scipy.spatial", None),
    (EXPORT, "import", "safetensors.torch", None),
    (PROBE, "import", "matplotlib.pyplot", None),
    (COMPARE, "import", "matplotlib", None),
    ([*SCORE[:3], "--tasks=own", "--device=cpu"], "import", "lm_eval.tasks", None),
    (COMPARE, "read", "heldout-", errno.EIO),
    (COMPARE, "write", "NEW", errno.EROFS),
]


@pytest.mark.parametrize("command, call, part, error", STOPS, ids=lambda value: str(value)[:40])
def test_a_failure_is_told_in_one_line_and_loses_nothing(
        command, call, part, error, monkeypatch, capsys, place):
    before = snapshot(place)
    with monkeypatch.context() as patch:
        fail(patch, call, part, error)
        code, told = run_stage(patch, capsys, place, command)
    assert code == 1, told
    assert "Traceback" not in told
    assert told.count("\n") <= 2, told
    assert not any(word in told for word in ("damaged", "replace it", "delete")), told
    after = snapshot(place)
    assert {path: after.get(path) for path in before} == before


def no_keys(path):
    torch.save({"state_dict": {}, "epoch": 3}, path)


def some_keys(path):
    torch.save({"step": 3, "model": {}, "optimizer": {}}, path)


def other_config(path):
    good = torch.load(next(path.parent.glob("step-*.pt")), weights_only=True)
    torch.save(good | {"model_config": {"n_layers": 2}, "config": {}}, path)


def other_weights(path):
    good = torch.load(next(path.parent.glob("step-*.pt")), weights_only=True)
    torch.save(good | {"model": {"transformer.wte.weight": torch.ones(2, 2)}}, path)


def only_a_tensor(path):
    torch.save(torch.ones(3), path)


def a_whole_module(path):
    torch.save(torch.nn.Linear(2, 2), path)


def a_program(path):
    torch.jit.script(torch.nn.Linear(2, 2)).save(path)


def a_pointer(path):
    path.write_text("version 1\noid sha256:0\nsize 9\n")


FOREIGN = [no_keys, some_keys, other_config, other_weights, only_a_tensor, a_whole_module,
           a_program, a_pointer]


@pytest.mark.filterwarnings("ignore")  # torch's, of how some of these are made
@pytest.mark.parametrize("command", [RESUME, SCORE, SAMPLE, PROBE, EXPORT],
                         ids=["resume", "score", "sample", "probe", "export"])
@pytest.mark.parametrize("make", FOREIGN)
def test_a_checkpoint_of_another_program_is_told_as_such(
        command, make, monkeypatch, capsys, place):
    make(place / "RUN" / "foreign")
    for path in (place / "RUN").glob("step-*.pt"):
        path.unlink()
    (place / "RUN" / "foreign").rename(place / "RUN" / "step-00000099.pt")
    before = snapshot(place)
    with monkeypatch.context() as patch:
        code, told = run_stage(patch, capsys, place, command)
    assert code == 1 and told.count("\n") == 1, told
    assert "run the code" not in told and "weights_only" not in told
    after = snapshot(place)
    assert {path: after.get(path) for path in before} == before


GOES_ON = [
    (PREPARE, "lock", "", errno.ENOSYS),
    (PREPARE, "lock", "", errno.ENOLCK),
    (START, "lock", "", errno.ENOSYS),
    (START, "lock", "", errno.ENOLCK),
    (START, "lock", "", errno.EOPNOTSUPP),
    (START, "fsync", "", errno.EINVAL),
    (SCORE, "fsync", "", errno.EINVAL),
]


@pytest.mark.parametrize("command, call, part, error", GOES_ON, ids=lambda value: str(value)[:40])
def test_what_a_file_system_lacks_stops_nothing(
        command, call, part, error, monkeypatch, capsys, place):
    with monkeypatch.context() as patch:
        fail(patch, call, part, error)
        code, told = run_stage(patch, capsys, place, command)
    assert code == 0, told


# What each Python of a preparation does first, and what is told then. (With its fork server a pool
# may lose its first worker before it misses the second.)
NO_PROCESSES = {
    "no fork server": ("multiprocessing.util.spawnv_passfds = refuse", "one process does it all"),
    "no first worker": ("os.fork = refuse", "no more processes"),
    "no second worker": ("os.fork = lambda fork=os.fork, ids=[]: refuse() if ids else"
                         " ids.append(fork()) or ids[0]", "no more processes|a worker died"),
    "no worker without a fork server": (
        "multiprocessing.get_all_start_methods = lambda: ['spawn']\n"
        "multiprocessing.util.spawnv_passfds = refuse", "no more processes"),
    "no thread": ("threading.Thread.start = refuse_thread", "can't start new thread")}


@pytest.mark.parametrize("name", NO_PROCESSES)
def test_processes_that_cannot_be_started(name, monkeypatch, capsys, place):
    """As where a user's limit, or a container's, is reached."""
    fault, words = NO_PROCESSES[name]
    source = place / "SOURCE.jsonl"
    source.write_text(source.read_text() * 50)  # several batches
    environment = beginning_with(f"""
import multiprocessing, multiprocessing.util, os, threading

def refuse(*_):
    raise BlockingIOError({errno.EAGAIN}, os.strerror({errno.EAGAIN}))

def refuse_thread(self):
    raise RuntimeError("can't start new thread")

{fault}
""", place / "site")
    argv = [argument.replace("--workers=1", "--workers=2") for argument in PREPARE]
    done = subprocess.run([sys.executable, *spell_out(argv, place)], capture_output=True,
                          text=True, cwd=ROOT, timeout=60, env=environment)
    told = done.stderr.splitlines()
    assert re.search(words, done.stderr), done.stderr
    if name == "no fork server":
        assert done.returncode == 0, done.stderr
    else:
        assert done.returncode == 1 and told[-1].startswith("prepare.py: "), done.stderr
        assert not list((place / "NEW").rglob("*.bin"))
    clean = snapshot(place / "NEW")
    with monkeypatch.context() as patch:  # the same command completes it
        assert run_stage(patch, capsys, place, PREPARE)[0] == 0
    if name == "no fork server":
        assert snapshot(place / "NEW") == clean


def test_modules_and_calls_that_some_systems_lack_are_not_needed(place):
    """Windows has no fcntl, no fork, no SIGHUP. All in one process, to start torch once."""
    commands = [PREPARE, SCORE, PROBE, [*EXPORT[:-1], "HF"], [*COMPARE[:-1], "--out=COMPARISON"],
                [*START[:-2], "--out=OUT", "--max_targets=640"]]
    code = WINDOWS + f"""
import runpy
sys.path.insert(0, {str(ROOT)!r})
for command in {[spell_out(command, place) for command in commands]!r}:
    sys.argv = command
    try:
        runpy.run_path({str(ROOT)!r} + "/" + command[0], run_name="__main__")
    except SystemExit as end:
        assert end.code == 0, (command, end.code)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=place,
                          timeout=120)
    assert done.returncode == 0 and "Error" not in done.stderr, done.stderr[-2000:]
    for name in ("NEW/meta.json", "RUN/probe-00000010.png", "HF/model.safetensors",
                 "COMPARISON/comparison.md", "OUT/step-00000005.pt"):
        assert (place / name).exists(), name
