"""Data, a run and scores files that the code before `machinery/` wrote are still read.

tests/earlier/ holds 48 documents of random words as data, ten updates of a gf2 model with its
held-out and benchmark scores, the log and score of a learned one, and continued.jsonl: the gf2
run's log after it had gone on to twenty updates there.
"""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

import compare
import evaluate
import prepare
import train

EARLIER = Path(__file__).parent / "earlier"
EXPERIMENT = ("input", "vocab_size", "n_layer", "n_head", "n_embd", "n_ffn", "block_size", "dtype",
              "tokens_per_step", "micro_batch", "warmup_steps", "windows_per_visit", "eval_windows",
              "eval_every", "log_every", "save_every", "decay_steps")


def command(monkeypatch, stage, *arguments):
    """Run a stage's main() in this process."""
    monkeypatch.setattr(sys, "argv", [f"{stage.__name__}.py", *map(str, arguments)])
    return stage.main()


def read_rows(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_data_are_what_their_meta_says(monkeypatch, capsys):
    command(monkeypatch, prepare, f"--check={EARLIER}/data")
    assert "1 shards are what meta.json says" in capsys.readouterr().out


def test_a_run_goes_on(monkeypatch, tmp_path):
    """Another machine rounds otherwise, by some 1e-6 of a loss; another window changes 1e-2."""
    run = Path(shutil.copytree(EARLIER / "gf2", tmp_path / "gf2"))
    recorded = json.loads((run / "config.json").read_text(encoding="utf-8"))
    flags = [f"--{name}={recorded[name]}" for name in EXPERIMENT]
    command(monkeypatch, train, "--preset=smoke", *flags, "--device=cpu", f"--data={EARLIER}/data",
            f"--out={run}", "--max_targets=2560", "--resume")
    found, expected = read_rows(run / "log.jsonl"), read_rows(EARLIER / "continued.jsonl")
    assert [row["step"] for row in found] == [row["step"] for row in expected]
    for key in ("loss", "grad_norm", "lr"):  # the validation windows are others now
        there = [row[key] for row in expected if key in row]
        np.testing.assert_allclose([row[key] for row in found if key in row], there, rtol=2e-5)


def test_a_checkpoint_scores_as_it_did(monkeypatch, tmp_path):
    run = Path(shutil.copytree(EARLIER / "gf2", tmp_path / "gf2"))
    before = json.loads((run / "heldout-00000010.json").read_text(encoding="utf-8"))
    for scores in run.glob("heldout*"):
        scores.unlink()
    command(monkeypatch, evaluate, "score", run, f"--data={EARLIER}/data", "--device=cpu")
    after = json.loads(next(run.glob("heldout*")).read_text(encoding="utf-8"))
    assert after["loss"] == pytest.approx(before["loss"], rel=1e-6)
    assert [d["targets"] for d in after["documents"]] == [d["targets"] for d in before["documents"]]


def test_runs_and_scores_are_compared(monkeypatch, capsys, tmp_path):
    command(monkeypatch, compare, EARLIER / "gf2", EARLIER / "learned", "--baseline=gf2 code 12345",
            f"--out={tmp_path}/figures")
    assert "+0.1801" in capsys.readouterr().out  # 4.3769 - 4.1967 nats
    scores = EARLIER / "gf2" / "earlier_choice-00000010.json"
    command(monkeypatch, compare, scores, shutil.copy(scores, tmp_path / "other.json"))
    assert "41.67" in capsys.readouterr().out
