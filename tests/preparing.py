"""What the tests of prepare.py and its rooms share: documents, runs, and what a run wrote."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import prepare
from machinery.shards import open_shards, read_meta
from machinery.tokenizer import load_tokenizer

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"
SMOLLM2 = SHARED / "smollm2" / "tokenizer.json"
needs_shared = pytest.mark.skipif(not SMOLLM2.exists(),
                                  reason="the real tokenizer is not in ../shared")
WORDS = ("the of and a to in is you that it he was for on are as with his they at be this have "
         "from or one had by word").split()


def texts_of(n, seed=0, words=40):
    """Return n texts of 1 to so many words."""
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(1, words))) for _ in range(n)]


def parquet(path, texts, ids="d", text_type=None, id_column="id", row_group_size=None):
    """Write texts, and ids that begin so, as a parquet file; return its path."""
    columns = {"text": pa.array(texts, text_type)}
    if ids:
        columns[id_column] = [f"{ids}{i}" for i in range(len(texts))]
    pq.write_table(pa.table(columns), path, row_group_size=row_group_size)
    return path


def run(*flags):
    """Run prepare.py in this process, with one worker unless the flags say more."""
    with patch.object(sys, "argv", ["prepare.py", "--workers=1", *map(str, flags)]):
        prepare.main()


def end_of(*flags):
    """Run prepare.py in this process as its command does; return what it prints as it ends."""
    arguments = ["prepare.py", "--workers=1", *map(str, flags)]
    with patch.object(sys, "argv", arguments), patch.object(signal, "signal"):
        try:
            prepare.command()
        except SystemExit as end:
            return str(end.code)
    return ""


def command(*flags, **environment):
    """Run prepare.py as a person does; return the finished process."""
    return subprocess.run([sys.executable, ROOT / "prepare.py", *map(str, flags)],
                          capture_output=True, text=True, timeout=120,
                          env=os.environ | {"PYTHONPATH": str(ROOT)} | environment)


def assert_one_line(process, *parts):
    """Assert that a process ended as a user's mistake must: exit 1, one line with these parts."""
    assert process.returncode == 1 and process.stderr.endswith("\n"), process.stderr
    assert_is_line(process.stderr[:-1], *parts)


def assert_is_line(told, *parts):
    assert told.startswith("prepare.py: ") and "\n" not in told, told
    for part in parts:
        assert part in told, told


def contents(out):
    """Return every file of a directory and its bytes; not the lock, which is empty."""
    files = [path for path in sorted(Path(out).rglob("*")) if path.is_file()]
    files = [path for path in files if path.name != ".lock"]
    return {str(path.relative_to(out)): path.read_bytes() for path in files}


def final_names(out):
    """Return the shards' files that are there under their final names."""
    return [name for name in contents(out) if name.endswith((".bin", ".idx"))]


def documents(out, split="train"):
    """Return a prepared directory's documents as lists of ids, without the end of text."""
    eot_id = read_meta(out)["tokenizer"]["eot_id"]
    found = []
    for shard in open_shards(out, split):
        tokens, starts = shard.map()
        for start, end in zip(starts[:-1], starts[1:]):
            assert tokens[end - 1] == eot_id
            found.append(tokens[start:end - 1].tolist())
    return found


def decoded(out, split="train"):
    """Return a prepared directory's documents as texts."""
    tokenizer = load_tokenizer(Path(out) / "tokenizer.json")
    return [tokenizer.decode(ids, skip_special_tokens=False) for ids in documents(out, split)]


def entries(out):
    """Return what meta.json says of each source."""
    return read_meta(out)["shards"]


def descendants(pid):
    """Return the process ids of a process's children, their children and so on."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError:
        return []
    found = list(children)
    for child in children:
        found += descendants(child)
    return found


def is_alive(pid):
    """Return whether a process is there and no zombie."""
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]
    except FileNotFoundError:
        return False
