"""Small prepared data sets, made once by prepare.py itself from documents written here."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
os.environ["HF_HUB_OFFLINE"] = "1"   # no test may wait for a network
os.environ["OMP_NUM_THREADS"] = "1"  # models this small lose by a second thread, and badly so on a busy machine
WORDS = "the of and a to in is you that it he was for on are as with his they at be this have from or one had by word".split()


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
    subprocess.run([sys.executable, ROOT / "prepare.py", f"--source={folder}/documents-*.jsonl", "--tokenizer=train:300",
                    "--val_fraction=0.2", f"--out={folder}/data"], check=True, capture_output=True)
    return folder / "data"
