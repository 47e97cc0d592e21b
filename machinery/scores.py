"""Scores files: where they are, what they are called, and that no two unlike ones share a name. For
evaluate.py score and probe."""

import hashlib
import json
import math
import re
import tempfile
from pathlib import Path

from machinery.files import write_whole
from machinery.runs import run_directory

LONGEST_LABEL = 100  # characters: file systems take 255, and the step and marks come after


def scores_directory(name, out, is_reference):
    """Return where a model's scores go: into out/NAME, without out into the run itself, or for a
    reference into out/NAME of the working directory.

    Raises ValueError where nothing can be written, which is better known before the work.
    """
    place = Path(name) if is_reference else run_directory(name)
    directory = place
    if not is_reference and not any(place.glob("step-*.pt")):
        raise FileNotFoundError(f"{name}: no checkpoint (step-*.pt) there; expected a run of "
                                "train.py, or one of its checkpoints")
    if is_reference or out is not None:
        directory = Path(out or "out") / (place.resolve().name if place.exists() else place.name)
    try:
        if directory != place:
            directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise ValueError(f"{directory}: {error.strerror}; give --out=DIR to write elsewhere"
                         ) from None
    return directory


def scores_name(args, facts, usual_length):
    """Return a scores file's name: what was scored, the examples, the limit, the checkpoint's step;
    and of what is not as it would be by itself, the dtype, the length and the data. Whatever the
    user's words, it is a name on every file system."""
    marks = [args.dtype] if args.dtype != "float32" else []
    if args.max_length not in (None, usual_length):
        marks.append(f"T{args.max_length}")
    step = [] if facts["step"] is None else [f"{facts['step']:08d}"]
    if not (args.suite or args.tasks):
        own, used = facts.get("data_sha256"), facts.get("heldout_sha256")
        if own is not None and own != used:
            marks.append(f"data{used[:8]}")
        return "-".join(["heldout", *step, *marks]) + ".json"
    label = args.suite or re.sub(r"[^\w.=+-]", "_", args.tasks.replace(",", "+"))
    if len(label) > LONGEST_LABEL:
        label = f"{args.tasks.count(',') + 1}tasks-{digest(args.tasks)}"
    if args.limit:
        marks.insert(0, f"limit{args.limit}")
    if args.num_fewshot is not None:
        marks.insert(0, f"{args.num_fewshot}shot")
    return "-".join(["_".join([label, *marks]), *step]) + ".json"


def digest(value):
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]


def identity(result):
    """Return what a result depends on, as far as it says: the weights, the data, how it was run."""
    model, protocol = result.get("model", result), result.get("protocol", result)
    keys = "dtype", "max_length", "limit", "data_sha256", "windows"  # a probe has the last two
    known = {key: protocol.get(key) for key in keys}
    known["weights_sha256"] = model.get("weights_sha256")
    for name, task in result.get("tasks", {}).items():
        known[name] = task.get("prompts_sha256")
    return {key: value for key, value in known.items() if value is not None}


def free_path(path, result):
    """Return path, or one beside it named by what the result depends on, if the file that is there
    is of something else."""
    try:
        there = identity(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return path
    except (ValueError, AttributeError):
        there = {"": "something else"}
    here = identity(result)
    if all(here.get(key) == value for key, value in there.items()):
        return path
    return path.with_name(f"{path.stem}-{digest(here)}{path.suffix}")


def plain(value):
    """Return a value of JSON: numbers that are not finite, which it has not, become null."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def write(path, result):
    """Write a result where nothing unlike is; return the path."""
    path = free_path(path, result)
    write_whole(path, json.dumps(plain(result), default=str).encode())
    return path
