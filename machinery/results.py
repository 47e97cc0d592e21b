"""What compare.py reads: scores files and run directories, whole or refused in one line."""

import json
from pathlib import Path

import numpy as np

from machinery.errors import explained
from machinery.labels import label, places
from machinery.runs import ADDED, data_fingerprint
from machinery.shards import read_meta

COMPARISON = "comparison of training runs"  # what comparison.json says it is


def read_json(path):
    """Return what a JSON file, or each line of a .jsonl file, holds. Raises ValueError, OSError."""
    path = Path(path)
    with explained(path, "it is not JSON"):
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            return json.loads(text)
        return [json.loads(line) for line in text.splitlines()]


def read_comparison(path):
    """Return a comparison of runs, as compare.py wrote it; None if the file holds something else.

    Raises ValueError for one without a group.
    """
    values = read_json(path)
    if not (isinstance(values, dict) and values.get("kind") == COMPARISON):
        return None
    if not values.get("groups"):
        raise ValueError(f"{path}: a comparison of no runs; expected comparison.json as compare.py "
                         "writes it")
    return values


def read_scores(path):
    """Return a scores file as a dict, with its name. Raises ValueError if it is not one."""
    scores = read_json(path)
    with explained(path, "not a scores file; expected what evaluate.py score --suite=paper writes"):
        check_scores(scores)
        name = Path(scores["model"]["name"]).name.removesuffix(".pt")
        return scores | {"name": name, "path": str(path)}


def check_scores(scores):
    """Raise KeyError, TypeError or the like unless everything that is read later is there."""
    for key in ("dtype", "max_length", "lm_eval"):
        scores["protocol"][key]
    for task in scores["tasks"].values():
        for key in ("prompts_sha256", "tokens_sha256", "version", "n_truncated"):
            task[key]
        len(task["docs"]["doc_id"])
    for tasks, metrics in list_rows(scores).values():
        metrics.get("acc")
        scores["tasks"][tasks[0]]
    if not scores["tasks"]:
        raise ValueError("no task")


def list_rows(scores):
    """Return {name: (its tasks' names, its metrics)}: each task in no group, and each group."""
    grouped = set()
    for group in scores["groups"].values():
        grouped.update(group["tasks"])
    rows = {}
    for name, task in scores["tasks"].items():
        if name not in grouped:
            rows[name] = [name], task["metrics"]
    for name, group in scores["groups"].items():
        rows[name] = group["tasks"], group["metrics"]
    return rows


def read_run(path, chosen_over=()):
    """Return what training left in a run directory, as a dict.

    Keys: path, label, places (on the axes of labels.py), config, curve (targets -> loss on the
    fixed validation windows), trained and left (targets), per_step, targets_per_second (the median;
    None if the log has no update).

    Args:
        chosen_over: fields of config.json that neither label nor places are to tell of.
    Raises FileNotFoundError for a file that is not there, ValueError for what train.py does not
    write.
    """
    path = Path(path)
    if not (path / "config.json").exists():
        raise FileNotFoundError(f"{path}: no config.json; name run directories that train.py wrote")
    config, rows = read_json(path / "config.json"), read_json(path / "log.jsonl")
    with explained(path, "expected what train.py writes"):
        config = ADDED | config
        steps = -(-config["max_targets"] // config["tokens_per_step"])
        if config.get("decay_steps") == max(steps, config.get("warmup_steps", 0)):
            config["decay_steps"] = 0  # as the flag has it: at the last one, how many there may be
        for key in ("seed", "initial_body_sha256", "data_fingerprint"):
            config[key]
        told = {key: value for key, value in config.items() if key not in chosen_over}
        speeds = [row["targets_per_second"] for row in rows if "loss" in row]
        trained = max(row["targets"] for row in rows)
        return {"path": str(path), "label": label(told), "places": places(told), "config": config,
                "curve": {row["targets"]: row["val_loss"] for row in rows if "val_loss" in row},
                "trained": trained, "left": config["max_targets"] - trained,
                "per_step": config["tokens_per_step"],
                "targets_per_second": np.median(speeds).item() if speeds else None}


def check_finished(run):
    """Raise ValueError unless a run was trained to its end, and its loss evaluated there."""
    most = run["config"]["max_targets"]
    if run["left"] > 0 or run["trained"] not in run["curve"]:
        raise ValueError(f"{run['path']}: {run['trained']:,} of {most:,} targets trained and "
                         f"{max(run['curve'], default=0):,} at its last validation loss; finish it "
                         "with train.py --resume, or leave it out")


def read_heldout(run):
    """Return a run with heldout (its newest held-out score, one of nothing where there is none),
    documents (float64 [n, 2]: targets and nats), scored (the targets trained then) and finite."""
    # Names of scores of other data end in -dataSHA256; that of none but the usual settings is last.
    scores = [file for file in sorted(Path(run["path"]).glob("heldout-*.json"))
              if "-data" not in file.name]
    heldout = read_json(scores[-1]) if scores else {"step": 0, "documents": [], "loss": 0,
                                                    "bits_per_byte": 0, "dtype": ""}
    with explained(run["path"], "expected what evaluate.py score writes"):
        documents = [[d["targets"], d["nats"]] for d in heldout["documents"]]
        documents = np.array(documents, float).reshape(-1, 2)
        for key in ("data", "dtype") if heldout["documents"] else ():
            heldout[key]
        figures = np.array([heldout["loss"], heldout["bits_per_byte"]], float)
        return run | {"heldout": heldout, "documents": documents,
                      "scored": heldout["step"] * run["per_step"],
                      "finite": np.isfinite(figures).all() and np.isfinite(documents).all()}


def add_score(run):
    """Return a run with its held-out score, as read_heldout adds it.

    Raises ValueError for a run that is not finished and scored on its own data, or whose score is
    not finite.
    """
    run = read_heldout(run)
    again = f"python evaluate.py score {run['path']}"
    if run["left"] > 0 or run["scored"] != run["trained"]:
        raise ValueError(f"{run['path']}: {run['trained']:,} of {run['config']['max_targets']:,} "
                         f"targets trained, {run['scored']:,} at its held-out score; finish it "
                         f"with train.py --resume, and score it with {again}")
    if not run["finite"]:
        raise ValueError(f"{run['path']}: its held-out score is not finite; leave this run out")
    check_data(run, again)
    return run


def check_data(run, again):
    """Raise ValueError unless the held-out score is of the data that the run was trained on."""
    config, heldout = run["config"], run["heldout"]
    found = heldout.get("data_sha256")
    if found is None and heldout["data"] == config["data"]:
        return  # an older score, which names its data by path only
    if found is None:
        try:
            found = data_fingerprint(read_meta(heldout["data"]))
        except (OSError, ValueError, KeyError):
            raise ValueError(f"{run['path']}: its held-out score is of {heldout['data']}, which is "
                             f"no more to be read; score it again with {again}") from None
    if found != config["data_fingerprint"]:
        raise ValueError(f"{run['path']}: its held-out score is of other data than it was trained "
                         f"on ({found[:12]}, {config['data_fingerprint'][:12]}); score it again "
                         f"with {again}")
