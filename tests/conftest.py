"""Small prepared data sets, made by prepare.py itself from documents written here."""

import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from preparing import ROOT, WORDS, run
from stages import make_place

from machinery.tokenizer import train_tokenizer

caches = tempfile.TemporaryDirectory()  # until the tests end
os.environ["HF_HUB_OFFLINE"] = "1"  # no test may wait for a network
os.environ["HF_HOME"] = caches.name  # nor write into a home, which may be read-only
os.environ["OMP_NUM_THREADS"] = "1"  # models this small lose by a second thread


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory):
    """Three shards of documents of 5 to 400 words, a tokenizer of 300 ids, a fifth held out."""
    folder = tmp_path_factory.mktemp("prepared")
    rng = random.Random(0)
    for shard in range(3):
        with open(folder / f"documents-{shard}.jsonl", "w") as file:
            for i in range(40):
                text = " ".join(rng.choices(WORDS, k=rng.choice((5, 60, 150, 400))))
                file.write(json.dumps({"id": f"{shard}-{i}", "text": text}) + "\n")
    subprocess.run([sys.executable, ROOT / "prepare.py", f"--source={folder}/documents-*.jsonl",
                    "--tokenizer=train:300", "--val_fraction=0.2", f"--out={folder}/data"],
                   check=True, capture_output=True)
    return folder / "data"


@pytest.fixture(scope="session")
def tokenizer_path(tmp_path_factory):
    """A byte-level BPE of 600 ids, trained on prepare.py."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    text = (ROOT / "prepare.py").read_text()
    path.write_text(train_tokenizer([text, "0 1 2 the end\r\n\t "], 600).to_str())
    return str(path)


@pytest.fixture
def flags(tokenizer_path, tmp_path):
    """A function that returns flags of prepare.py; paths are those in this test's directory."""
    def flags(source="*.parquet", out="out", tokenizer=tokenizer_path, val_fraction=0):
        return [f"--source={tmp_path}/{source}", f"--out={tmp_path}/{out}",
                f"--tokenizer={tokenizer}", f"--val_fraction={val_fraction}"]
    return flags


@pytest.fixture
def prep(flags):
    """A function that runs prepare.py in this process and returns the directory it prepared."""
    def prep(source="*.parquet", *more, **settings):
        asked = flags(source, **settings)
        run(*asked, *more)
        return Path(asked[1].removeprefix("--out="))
    return prep


@pytest.fixture
def place(tmp_path):
    """A folder with a run, its data and a source (stages.make_place)."""
    return make_place(tmp_path)
