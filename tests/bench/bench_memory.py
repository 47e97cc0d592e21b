"""What training holds in memory, measured: the paper's whole model for one step, and a long run of
a small one.

    python tests/bench/bench_memory.py paper    24 layers, one forward and backward on the CPU
                                                (batch 1, T 256, FP32, block checkpointing) beside
                                                train.py --dry_run's estimate; needs 16 GB
    python tests/bench/bench_memory.py growth   2,000 updates, 1,000 visits of a shard: the peak
                                                after 200 and after 2,000

Each ends in one line of JSON. A peak is the most a process has held resident, Python and torch
themselves included.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
import train  # noqa: E402
from machinery import costs, machine  # noqa: E402
from model import Decoder, ModelConfig  # noqa: E402


def paper(T):
    """Return what one step of the paper's model takes beside its estimate. Raises AssertionError
    for a tensor without a gradient, or a loss far from ln V."""
    machine.tune_allocator()
    preset = train.PRESETS["paper"]
    sizes = {key: preset[key] for key in ("vocab_size", "n_layer", "n_head", "n_embd", "n_ffn")}
    config = ModelConfig(input="binary", block_size=T, **sizes)
    parts = costs.estimate_memory(config, 1, "float32", "block")
    parts.pop("optimizer")  # no optimizer here
    itself = machine.peak_memory_gb(torch.device("cpu"))
    model = Decoder(config)
    model.checkpoint_activations = "block"
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(config.vocab_size, (1, T + 1), generator=generator)
    loss = model(tokens[:, :-1], tokens[:, 1:])[1]
    loss.backward()
    without = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert not without, f"no gradient: {without}"
    assert abs(loss.item() - math.log(config.vocab_size)) < 0.5, loss.item()
    peak = machine.peak_memory_gb(torch.device("cpu"))
    estimate = sum(parts.values()) / 1e9 + itself
    print(f"loss {loss.item():.4f}, ln V {math.log(config.vocab_size):.4f}; every one of "
          f"{len(list(model.parameters()))} tensors has a gradient")
    return dict(loss=loss.item(), peak_gb=peak, estimate_gb=estimate, ratio=peak / estimate)


def growth(updates):
    """Return the peak memory after a tenth of the updates and after all, of a small model whose
    streams change shards often."""
    with tempfile.TemporaryDirectory() as folder:
        prepare = [sys.executable, ROOT / "prepare.py", "--tokenizer=train:1024",
                   f"--out={folder}/data"]
        subprocess.run(prepare, check=True, stdout=subprocess.DEVNULL)
        command = [
            sys.executable, ROOT / "train.py", "--preset=smoke", f"--data={folder}/data",
            f"--out={folder}/run", "--vocab_size=1024", "--block_size=64", "--n_layer=2",
            "--n_head=2", "--n_embd=60", "--n_ffn=128", "--tokens_per_step=512",
            f"--max_targets={512 * updates}", "--windows_per_visit=16", "--save_every=500",
            "--log_every=20", "--eval_every=100"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        rows = [json.loads(line) for line in open(f"{folder}/run/log.jsonl")]
    peaks = {row["step"]: row["memory_gb"] for row in rows if "memory_gb" in row}
    early, late = peaks[updates // 10], peaks[updates]
    return dict(updates=updates, visits=updates * 8 // 16, early_gb=early, late_gb=late,
                grown_mb=1000 * (late - early))


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("paper", "growth"))
    parser.add_argument("--block_size", type=int, default=256,
                        help="paper: T (default: %(default)s)")
    parser.add_argument("--updates", type=int, default=2000,
                        help="growth: how many (default: %(default)s)")
    args = parser.parse_args()
    result = paper(args.block_size) if args.what == "paper" else growth(args.updates)
    print(json.dumps(result | {"torch": torch.__version__}))


if __name__ == "__main__":
    main()
