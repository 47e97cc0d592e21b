"""Whole commands of any stage, run in this process on a small run and its data."""

import os
import runpy
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
EARLIER = Path(__file__).parent / "earlier"
RUN_FLAGS = ["--preset=smoke", "--vocab_size=280", "--n_layer=1", "--n_head=2", "--n_embd=36",
             "--n_ffn=24", "--block_size=16", "--dtype=float32", "--device=cpu",
             "--tokens_per_step=128", "--micro_batch=4", "--warmup_steps=2",
             "--windows_per_visit=16", "--eval_windows=4", "--eval_every=5",
             "--log_every=1", "--save_every=5", "--decay_steps=20", "--input=gf2"]
RESUME = ["train.py", *RUN_FLAGS, "--data=DATA", "--out=RUN", "--max_targets=2560", "--resume"]
START = ["train.py", *RUN_FLAGS, "--data=DATA", "--out=NEW", "--max_targets=640"]
SWEEP = [*START, "--sweep=seed=1,2"]
PREPARE = ["prepare.py", "--source=SOURCE", "--tokenizer=train:280", "--workers=1", "--out=NEW"]
SCORE = ["evaluate.py", "score", "RUN", "--data=DATA", "--device=cpu"]
SAMPLE = ["evaluate.py", "sample", "RUN", "--device=cpu"]
PROBE = ["evaluate.py", "probe", "RUN", "--data=DATA", "--device=cpu"]
EXPORT = ["evaluate.py", "export", "RUN", "NEW"]
COMPARE = ["compare.py", "RUN", "--baseline=gf2 code 12345", "--out=NEW"]

# What has a Python lack the modules, calls and signals that Windows lacks.
WINDOWS = """
import multiprocessing, os, signal, sys
sys.modules.update(fcntl=None, resource=None, termios=None, pwd=None, grp=None)
for name in ("fork", "forkpty", "sched_getaffinity", "sched_setaffinity", "getuid", "geteuid",
             "fchmod", "fchown", "chown", "killpg", "setsid", "getpgid", "mkfifo",
             "getloadavg", "wait3", "wait4", "nice"):
    vars(os).pop(name, None)
for name in ("SIGHUP", "SIGUSR1", "SIGUSR2", "SIGQUIT", "SIGALRM", "SIGCHLD", "SIGPIPE"):
    vars(signal).pop(name, None)
os.process_cpu_count = os.cpu_count  # of Python 3.13, which asks for the affinity elsewhere
multiprocessing.get_all_start_methods = lambda: ["spawn"]
"""


def snapshot(folder):
    return {path.relative_to(folder): path.read_bytes()
            for path in sorted(folder.rglob("*")) if path.is_file()}


def make_place(folder):
    """Fill a folder with a run, its data and a source, as the capital words of a command name them;
    return it."""
    shutil.copytree(EARLIER / "gf2", folder / "RUN")
    shutil.copytree(EARLIER / "data", folder / "DATA")
    (folder / "SOURCE.jsonl").write_text(
        "".join(f'{{"id": "{i}", "text": "the cat sat on the mat {i}"}}\n' for i in range(40)))
    return folder


def spell_out(command, place):
    """Return a command with its capital words as the paths that they name."""
    words = {"RUN": place / "RUN", "DATA": place / "DATA", "NEW": place / "NEW",
             "SOURCE": place / "SOURCE.jsonl"}
    arguments = []
    for argument in command:
        flag, equals, value = argument.rpartition("=")
        arguments.append(f"{flag}{equals}{words.get(value, value)}")
    return arguments


def beginning_with(code, folder):
    """Return the environment of a Python that executes code first, by a new folder's
    sitecustomize.py."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(code)
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def run_stage(monkeypatch, capsys, place, command):
    """Run a command in this process as python STAGE.py would; return (exit code, stderr)."""
    arguments = spell_out(command, place)
    monkeypatch.setattr(sys, "argv", arguments)
    code = 0
    try:
        runpy.run_path(str(ROOT / arguments[0]), run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1 if end.code else 0
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    return code, capsys.readouterr().err
