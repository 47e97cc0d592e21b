"""Sweeps: many training runs from one command. Used by train.py; free of torch."""

import itertools
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

from machinery.errors import say_at_once
from machinery.files import HELD
from machinery.runs import check_resumable, experiment_of, list_checkpoints, read_log
from machinery.signals import STOPPED, catch_signals

LONGEST_NAME = 255  # bytes, on all usual file systems
RESULTS = {0: "trained", HELD: "left to another process, which is at it"}


def parse_sweep(text):
    """Return the flag settings of one --sweep, every combination: "input=binary,gf2;seed=1" ->
    [{"input": "binary", "seed": "1"}, {"input": "gf2", "seed": "1"}].

    Raises ValueError if it does not read so.
    """
    axes = {}
    for axis in text.split(";"):
        name, equals, values = axis.strip().partition("=")
        if not (name and equals and all(values.split(","))):
            raise ValueError(f"--sweep={text}: expected NAME=VALUE,VALUE;NAME=VALUE,..., as in "
                             "input=learned,binary;seed=1,2,3")
        axes[name] = values.split(",")
    return [dict(zip(axes, values)) for values in itertools.product(*axes.values())]


def run_sweep(args, argv, parse_args, script):
    """Run every combination one after the other, each in a directory of its own below args.out;
    finished ones are skipped, unfinished ones resumed, and what another process is at is left to
    it. Returns the exit code: 1 if one failed.
    """
    runs = plan_runs(args, argv, parse_args)
    width = max(len(out.name) for out in runs)
    failed, trained, started = 0, 0, time.monotonic()
    say_at_once(f"{len(runs)} runs in {args.out}")
    for number, (out, (command, run_args)) in enumerate(runs.items(), 1):
        if list_checkpoints(out)[:1] == [out / f"step-{run_args.steps:08d}.pt"]:
            result = "skipped, finished"
        else:
            code = train(script, command, out)
            if code == STOPPED:
                say_at_once(f"{out.name}: stopped; the same command continues")
                return STOPPED
            failed, trained = failed + (code not in RESULTS), trained + (code != HELD)
            result = RESULTS.get(code, f"FAILED, see {out}/console.txt")
        line = (f"{number:4}/{len(runs)}  {out.name:{width}}  held-out {last_loss(out):.4f}  "
                f"{result}")
        if trained and number < len(runs):
            left = (time.monotonic() - started) / trained * (len(runs) - number) / 60
            line += f"  (about {left:.0f} minutes left)"
        say_at_once(line)
    return 1 if failed else 0


def plan_runs(args, argv, parse_args):
    """Return {run directory: (its flags, its parsed arguments)} of every combination.

    Everything is checked before anything is trained: the flags of each run, and that a directory
    that is already there holds the same experiment. Raises ValueError otherwise.
    """
    if not all(flag.startswith("--") and "=" in flag for flag in argv):
        raise ValueError("--sweep: write every other flag as --NAME=VALUE")
    common = [flag for flag in argv if not flag.startswith(("--sweep=", "--out="))]
    runs = {}
    for setting in itertools.chain.from_iterable(map(parse_sweep, args.sweep)):
        pairs = [f"{name}={value}" for name, value in setting.items()]
        out = Path(args.out) / run_name(setting)
        command = [*common, *(f"--{pair}" for pair in pairs), f"--out={out}", "--resume"]
        run_args = parse_args(argv=command)
        if out in runs and runs[out][0] != command:
            raise ValueError(f"--sweep: two runs would be {out}; give their paths other names")
        runs[out] = command, run_args
        if (out / "config.json").exists():
            try:
                there = json.loads((out / "config.json").read_bytes())
                check_resumable(there, experiment_of(run_args))
            except ValueError as error:
                raise ValueError(f"{out}: {error}") from None
    return runs


def run_name(setting):
    """Return a directory's name for a run's settings; of a path, the part that names it."""
    name = ",".join(f"{flag}={value.rstrip('/').rsplit('/')[-1]}" for flag, value in
                    setting.items())
    if len(name.encode()) > LONGEST_NAME:
        raise ValueError(f"--sweep: {len(name)} letters are too many for a directory's name; sweep "
                         f"fewer flags at a time ({name[:60]}...)")
    return name


def train(script, command, out):
    """Run the training script in a process of its own; return its exit code, STOPPED if a signal
    came to this process. The signal is passed on, and what the run saves is waited for."""
    out.mkdir(parents=True, exist_ok=True)
    children = []

    def pass_on(number):
        if os.name == "posix":  # on Windows the console has told it already
            for child in children:
                child.send_signal(number)

    with open(out / "console.txt", "ab") as console, catch_signals(pass_on) as signals:
        # In a session of its own: a Ctrl-C at the terminal reaches it once, through this process.
        child = subprocess.Popen([sys.executable, script, *command], stdout=console,
                                 stderr=subprocess.STDOUT, start_new_session=True)
        children.append(child)
        if signals:  # one that came before there was a child
            child.terminate()
        code = child.wait()
    return STOPPED if signals else code


def last_loss(out):
    """Return the newest validation loss in a run's log; nan if there is none."""
    losses = [row["val_loss"] for row in read_log(out) if "val_loss" in row]
    return losses[-1] if losses else math.nan
