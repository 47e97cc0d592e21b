"""Comparisons of training runs: the statistics against closed forms and scipy, what is refused, what is written."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

import compare
import evaluate
import train
from test_train import TINY

ROOT = Path(__file__).parents[1]
V, K = 3072, 12


def code_report(rng):
    """What train.py reports of V random K-bit codes."""
    bits = np.array([[int(b) for b in f"{i:012b}"] for i in rng.permutation(2**K)[:V]])
    distances = (bits[:, None] != bits[None]).sum(-1)[np.triu_indices(V, 1)]
    counts, edges = np.histogram(16.0 * bits.sum(1), bins=K)
    return {"vocab_size": V, "n_bits": K, "weight_histogram": np.bincount(bits.sum(1), minlength=K + 1).tolist(),
            "bit_counts": bits.sum(0).tolist(), "distance_histogram": np.bincount(distances, minlength=K + 1).tolist(),
            "squared_norms": {"mean": 16 * bits.sum() / V, "min": 0, "max": 192, "histogram": {"edges": edges.tolist(), "counts": counts.tolist()}},
            "zero_ids": np.flatnonzero(~bits.any(1)).tolist()}


def write_run(folder, name, seed=1, cost=0.0, noise=0.01, report=None, **config):
    """Write a run whose loss is `cost` nats above a common curve, as train.py and evaluate.py score leave it."""
    path = folder / name
    path.mkdir(parents=True)
    shared, own = np.random.default_rng(7), np.random.default_rng([seed, len(name), int(1000 * cost)])
    config = {"input": "learned", "seed": seed, "n_layer": 4, "n_embd": 192, "n_head": 4, "n_ffn": 512, "block_size": 256, "vocab_size": V,
              "max_targets": 40_000, "tokens_per_step": 4096, "max_lr": 0.003, "dtype": "float32", "out": str(path), "code_seed": 12345,
              "code_offset": "0", "data_fingerprint": "f" * 64, "initial_body_sha256": f"body {seed} {config.get('n_layer', 4)}",
              "parameters": {"input": 589_824, "body": 1_771_200, "head": 589_824, "buffers": 0, "trainable": 2_950_848}, "code_report": report} | config
    (path / "config.json").write_text(json.dumps(config))
    with open(path / "log.jsonl", "w") as log:
        for step in range(11):
            targets, loss = step * 4096, 3.4 + 4.6 * math.exp(-step / 3) + cost * (1 + math.exp(-step / 3)) + own.normal(0, noise)
            log.write(json.dumps({"step": step, "targets": targets, "val_loss": loss, "val_bits_per_byte": loss}) + "\n")
            if step < 10:
                log.write(json.dumps({"step": step + 1, "targets": targets + 4096, "loss": loss, "lr": 0.003, "grad_norm": 1.0,
                                      "targets_per_second": 9000.0 + step}) + "\n")
    targets = shared.integers(50, 5000, 60)
    nats = targets * (3.4 + shared.normal(0, 0.5, 60) + cost + own.normal(0, noise, 60) + own.normal(0, noise))
    (path / "heldout-00000010.json").write_text(json.dumps({
        "step": 10, "dtype": "float32", "loss": nats.sum() / targets.sum(), "bits_per_byte": 1.5,
        "documents": [{"targets": int(t), "bytes": int(3 * t), "nats": n} for t, n in zip(targets, nats)]}))
    return path
