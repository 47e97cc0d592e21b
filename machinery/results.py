"""What compare.py reads: scores files and run directories, whole or refused in one line."""

import json
from pathlib import Path

import numpy as np

from machinery.errors import explained
from machinery.runs import data_fingerprint
from machinery.shards import read_meta

# The fields of config.json that describe an input beside its name, as a label says them, and what
# goes without saying.
LABELS = {"code_seed": ("code {}", None), "code_offset": ("offset {}", "0"),
          "code_values": ("{}", "01"), "code_scale": ("scale {}", "1"), "lift": ("{}", "tile"),
          "table_free": ("table-free", "False"), "code_width": ("width {}", "0"),
          "input_std": ("std {:g}", "0.02")}


def read_json(path):
    """Return what a JSON file, or each line of a .jsonl file, holds. Raises ValueError, OSError."""
    path = Path(path)
    with explained(path, "it is not JSON"):
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            return json.loads(text)
        return [json.loads(line) for line in text.splitlines()]


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


def label(config):
    """Return the name of a run's input: binary, gf2 code 7 (its code_seed), binary pm1 ..."""
    words = [config["input"]]
    for field, (text, silent) in LABELS.items():
        tossed = config["input"] in ("gf2", "random") or (config["input"] == "binary"
                                                         and config.get("code_width"))
        said = field != "code_seed" or tossed
        if said and str(config.get(field, silent)) != str(silent):
            words.append(text.format(config[field]))
    return " ".join(words)


def read_run(path):
    """Return a finished and scored run directory as a dict.

    Keys: path, label, config, curve (targets -> loss on the fixed validation windows), heldout (its
    held-out score), documents (float64 [n, 2]: targets and nats), targets_per_second (the median;
    None if the log has no update).
    Raises FileNotFoundError for a file that is not there, ValueError for a run that is not finished
    and scored on its own data, or whose score is not finite.
    """
    path = Path(path)
    if not (path / "config.json").exists():
        raise FileNotFoundError(f"{path}: no config.json; name run directories that train.py wrote")
    config, rows = read_json(path / "config.json"), read_json(path / "log.jsonl")
    # Names of scores of other data end in -dataSHA256; that of none but the usual settings is last.
    scores = [file for file in sorted(path.glob("heldout-*.json")) if "-data" not in file.name]
    heldout = read_json(scores[-1]) if scores else {"step": 0, "documents": [], "loss": 0,
                                                    "bits_per_byte": 0, "dtype": ""}
    again = f"python evaluate.py score {path}"
    with explained(path, "expected what train.py and evaluate.py score write"):
        run = gather(path, config, rows, heldout)
        done, scored = max(row["targets"] for row in rows), heldout["step"] * run["per_step"]
        left = config["max_targets"] - done
        figures = np.array([heldout["loss"], heldout["bits_per_byte"]], float)
        finite = np.isfinite(figures).all() and np.isfinite(run["documents"]).all()
    if left > 0 or scored != done:
        raise ValueError(f"{path}: {done:,} of {config['max_targets']:,} targets trained, "
                         f"{scored:,} at its held-out score; finish it with train.py --resume, "
                         f"and score it with {again}")
    if not finite:
        raise ValueError(f"{path}: its held-out score is not finite; leave this run out")
    check_data(run, again)
    return run


def gather(path, config, rows, heldout):
    """Return what read_run returns; KeyError, TypeError or the like if something is not there."""
    speeds = [row["targets_per_second"] for row in rows if "loss" in row]
    documents = [[d["targets"], d["nats"]] for d in heldout["documents"]]
    for key in ("seed", "initial_body_sha256", "data_fingerprint"):
        config[key]
    for key in ("data", "dtype") if heldout["documents"] else ():
        heldout[key]
    return {"path": str(path), "label": label(config), "config": config, "heldout": heldout,
            "per_step": config["tokens_per_step"],
            "curve": {row["targets"]: row["val_loss"] for row in rows if "val_loss" in row},
            "documents": np.array(documents, float).reshape(-1, 2),
            "targets_per_second": np.median(speeds).item() if speeds else None}


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
