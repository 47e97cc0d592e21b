"""The runs that compare.py compares, of run directories and of the lines of a runs.jsonl.

A line holds all that is needed of a directory, so that runs of many days and machines can be kept
in one small file and compared again without them:

    run                 the directory's name
    config              config.json without paths
    curve               [[targets, loss on the fixed validation windows], ...]
    trained             targets
    targets_per_second  the median of the log; null where it has no update
    heldout             of the newest held-out score step, dtype, max_length, data_sha256,
                        weights_sha256, loss, bits_per_byte and documents, [[targets, nats], ...];
                        null where there is none

What is rounded is rounded as a directory is read: a run and its line give the same figures.
"""

import json
import os
import shlex
from pathlib import Path

import numpy as np

from machinery.errors import explained
from machinery.files import write_whole
from machinery.labels import label, places
from machinery.results import read_json
from machinery.runs import ADDED, data_fingerprint
from machinery.scores import plain
from machinery.shards import read_meta

KEYS = ("run", "config", "curve", "trained", "targets_per_second", "heldout")
PATHS = ("data", "out", "init_from")  # in config.json
CURVE_DECIMALS, NATS_DECIMALS = 6, 3  # of a mean over targets, and of a sum over a document's
DIGITS = 6  # of code reports and speeds
NO_SCORE = {"step": 0, "dtype": None, "loss": 0, "bits_per_byte": 0, "documents": []}


# --- Reading and writing

def read_runs(paths):
    """Return the runs of run directories and .jsonl files, each once: dicts of KEYS, path (for
    messages) and directory (its name only, where a line alone is known).

    Of a run given twice, where one has no held-out score the other counts.
    Raises ValueError for what is no run, or a run with two different held-out scores.
    """
    runs = {}
    for path in paths:
        for run in read_lines(path) if is_file(path) else [read_directory(path)]:
            trained = json.dumps([run["config"], run["curve"], run["trained"]], sort_keys=True)
            there = runs.setdefault(trained, run)
            if not there["heldout"]:
                runs[trained] = run
            elif run["heldout"] and run["heldout"] != there["heldout"]:
                raise ValueError(f"{there['path']} and {run['path']} are one run with two "
                                 "different held-out scores; leave one out")
    return list(runs.values())


def is_file(path):
    return str(path).endswith(".jsonl")


def read_lines(path):
    """Return the runs of a file, one a line."""
    runs = []
    for number, line in enumerate(Path(path).read_bytes().splitlines(), 1):
        place = f"{path}, line {number}"
        with explained(place, "expected a run, as compare.py writes it to runs.jsonl"):
            run = json.loads(line)
            run = {key: run[key] for key in KEYS}
        runs.append(run | {"path": place, "directory": str(run["run"])})
    if not runs:
        raise ValueError(f"{path}: no run in it; give what compare.py wrote to runs.jsonl")
    return runs


def write_runs(runs, path):
    """Write runs, as read_runs returns them, to a file."""
    text = ""
    for run in runs:
        kept = {key: run[key] for key in KEYS}
        text += json.dumps(kept, separators=(",", ":"), allow_nan=False) + "\n"
    write_whole(path, text.encode())


def read_directory(path):
    """Return the run of a directory that train.py wrote."""
    path = Path(path)
    if not (path / "config.json").exists():
        raise FileNotFoundError(f"{path}: no config.json; name run directories that train.py wrote")
    config, rows = read_json(path / "config.json"), read_json(path / "log.jsonl")
    with explained(path, "expected what train.py writes"):
        curve = [[row["targets"], row["val_loss"]] for row in rows if "val_loss" in row]
        speeds = [row["targets_per_second"] for row in rows if "loss" in row]
        kept = {key: value for key, value in config.items() if key not in PATHS}
        run = {"run": Path(os.path.abspath(path)).name,
               "config": kept | {"code_report": shorten(config.get("code_report"))},
               "curve": [[targets, rounded(loss, CURVE_DECIMALS)] for targets, loss in curve],
               "trained": max(row["targets"] for row in rows),
               "targets_per_second": shorten(np.median(speeds).item()) if speeds else None}
    run["heldout"] = read_heldout(path, config)
    return plain(run) | {"path": str(path), "directory": str(path)}


def read_heldout(path, config):
    """Return the newest held-out score of a run directory; None where there is none."""
    # Names of scores of other data end in -dataSHA256; that of none but the usual settings is last.
    scores = [file for file in sorted(path.glob("heldout-*.json")) if "-data" not in file.name]
    if not scores:
        return None
    found = read_json(scores[-1])
    with explained(path, "expected what evaluate.py score writes"):
        kept = {key: found[key] for key in ("step", "dtype", "loss", "bits_per_byte")}
        kept |= {key: found.get(key) for key in ("max_length", "weights_sha256")}
        documents = [[d["targets"], rounded(d["nats"], NATS_DECIMALS)] for d in found["documents"]]
        return kept | {"data_sha256": find_data(found, config), "documents": documents}


def find_data(heldout, config):
    """Return the sha256 of the data that a held-out score is of; None where it is not known."""
    if heldout.get("data_sha256") is not None:
        return heldout["data_sha256"]
    if heldout["data"] == config["data"]:  # an older score, which names its data by path only
        return config["data_fingerprint"]
    try:
        return data_fingerprint(read_meta(heldout["data"]))
    except (OSError, ValueError, KeyError):
        return None


def rounded(value, decimals):
    """Return a number rounded; None, as JSON has what is not finite, as it is."""
    return value if value is None else round(float(value), decimals)


def shorten(value):
    """Return a value, or a report of them, with as many digits as a figure shows."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, list):
        return [shorten(item) for item in value]
    if isinstance(value, dict):
        return {key: shorten(item) for key, item in value.items()}
    return value


# --- What comparisons use

def prepare_run(run, chosen_over=()):
    """Return a run with what follows from its keys.

    Keys: label, places (on the axes of labels.py), curve (targets -> loss), left (targets),
    documents (float64 [n, 2]: targets and nats), scored (the targets trained at the held-out
    score), finite (whether that is).

    Args:
        chosen_over: fields of config.json that neither label nor places are to tell of.
    Raises ValueError for what train.py and evaluate.py do not write.
    """
    with explained(run["path"], "expected what train.py and evaluate.py score write"):
        config, heldout = ADDED | run["config"], NO_SCORE | (run["heldout"] or {})
        steps = -(-config["max_targets"] // config["tokens_per_step"])
        if config.get("decay_steps") == max(steps, config.get("warmup_steps", 0)):
            config["decay_steps"] = 0  # as the flag has it: at the last one, how many there may be
        for key in ("initial_body_sha256", "data_fingerprint"):
            config[key]
        config["seed"] = int(config["seed"])
        told = {key: value for key, value in config.items() if key not in chosen_over}
        curve = np.array(run["curve"], float).reshape(-1, 2).tolist()
        documents = np.array(heldout["documents"], float).reshape(-1, 2)
        figures = np.array([heldout["loss"], heldout["bits_per_byte"]], float)
        heldout["loss"], heldout["bits_per_byte"] = figures.tolist()
        return run | {"label": label(told), "places": places(told), "config": config,
                      "curve": {int(targets): loss for targets, loss in curve},
                      "left": config["max_targets"] - run["trained"],
                      "heldout": heldout, "documents": documents,
                      "scored": int(heldout["step"]) * config["tokens_per_step"],
                      "finite": np.isfinite(figures).all() and np.isfinite(documents).all()}


def check_finished(run):
    """Raise ValueError unless a run was trained to its end, and its loss evaluated there."""
    most = run["config"]["max_targets"]
    if run["left"] > 0 or run["trained"] not in run["curve"]:
        raise ValueError(f"{run['path']}: {run['trained']:,} of {most:,} targets trained and "
                         f"{max(run['curve'], default=0):,} at its last validation loss; finish it "
                         "with train.py --resume, or leave it out")


def check_score(run):
    """Raise ValueError unless a run is finished and scored on its own data, with finite losses."""
    config, heldout, again = run["config"], run["heldout"], score_command([run])
    if run["left"] > 0 or run["scored"] != run["trained"]:
        raise ValueError(f"{run['path']}: {run['trained']:,} of {config['max_targets']:,} "
                         f"targets trained, {run['scored']:,} at its held-out score; finish it "
                         f"with train.py --resume, and score it with {again}")
    if not run["finite"]:
        raise ValueError(f"{run['path']}: its held-out score is not finite; leave this run out")
    found = heldout.get("data_sha256")
    if found is None:
        raise ValueError(f"{run['path']}: its held-out score is of data that is no more to be "
                         f"read; score it again with {again}")
    if found != config["data_fingerprint"]:
        raise ValueError(f"{run['path']}: its held-out score is of other data than it was trained "
                         f"on ({found[:12]}, {config['data_fingerprint'][:12]}); score it again "
                         f"with {again}")


def score_command(runs):
    """Return what to type for the held-out scores of runs."""
    command = f"python evaluate.py score {shlex.join(run['directory'] for run in runs)}"
    by_lines = any(run["path"] != run["directory"] for run in runs)
    return f"{command} where these directories are, and give them too" if by_lines else command
