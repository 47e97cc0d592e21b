"""Sweeps: many runs from one command."""

import itertools
import json
import math
import subprocess
import sys
import time
from pathlib import Path

from machinery.runs import (
    check_same_experiment,
    experiment_of,
    list_checkpoints,
    read_log,
)


def parse_sweep(text):
    """Return the flag settings of one --sweep, every combination: "input=binary,gf2;seed=1,2" -> [{"input": "binary", "seed": "1"},
    ...]. Raises ValueError if it does not read so."""
    axes = {}
    for axis in text.split(";"):
        name, equals, values = axis.strip().partition("=")
        if not (name and equals and all(values.split(","))):
            raise ValueError(f"--sweep={text}: expected NAME=VALUE,VALUE;NAME=VALUE,..., as in input=learned,binary;seed=1,2,3")
        axes[name] = values.split(",")
    return [dict(zip(axes, values)) for values in itertools.product(*axes.values())]


def run_sweep(sweeps, flags, root, parse_args, script):
    """Run every combination one after the other, each in a directory of its own below root; finished runs are skipped and
    unfinished ones resumed. Returns the number of runs that failed.

    Everything is checked before anything is trained: the flags of each run, and that a directory that is already there holds
    the same experiment.
    """
    runs = {}
    for setting in itertools.chain.from_iterable(map(parse_sweep, sweeps)):
        out = Path(root) / ",".join(f"{name}={value}" for name, value in setting.items())
        command = [*flags, *(f"--{name}={value}" for name, value in setting.items()), f"--out={out}", "--resume"]
        runs[out] = command, parse_args(command)
        if (out / "config.json").exists():
            try:
                check_same_experiment(json.loads((out / "config.json").read_text()), experiment_of(runs[out][1]))
            except ValueError as error:
                raise ValueError(f"{out}: {error}") from None
    width, failed, started, trained = max(len(out.name) for out in runs), 0, time.monotonic(), 0
    print(f"{len(runs)} runs in {root}")
    for number, (out, (command, args)) in enumerate(runs.items(), 1):
        done = list_checkpoints(out)[:1] == [out / f"step-{args.steps:08d}.pt"]
        if not done:
            out.mkdir(parents=True, exist_ok=True)
            with open(out / "console.txt", "a") as console:
                code = subprocess.run([sys.executable, script, *command], stdout=console, stderr=subprocess.STDOUT).returncode
            failed, trained = failed + (code != 0), trained + 1
        losses = [row["val_loss"] for row in read_log(out) if "val_loss" in row]
        left = (time.monotonic() - started) / max(trained, 1) * (len(runs) - number) / 60
        result = "skipped, finished" if done else "trained" if code == 0 else f"FAILED, see {out}/console.txt"
        print(f"{number:4}/{len(runs)}  {out.name:{width}}  held-out {losses[-1] if losses else math.nan:.4f}  {result}"
              + (f"  (about {left:.0f} minutes left)" if trained and number < len(runs) else ""), flush=True)
    return failed
