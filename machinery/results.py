"""The scores files that compare.py reads, whole or refused in one line."""

import json
from pathlib import Path

from machinery.errors import explained


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
