"""The paper's model on one GPU: targets/s, MFU and peak memory, beside transformers' Llama in the
same run. Under 5 minutes.

    python tests/bench/bench_gpu.py             24 x 2048, 8 x 2048 targets, BF16, compiled: needs
                                                about 80 GB and CUDA
    python tests/bench/bench_gpu.py --dry_run   the same code, a tiny model on the CPU, uncompiled

A step is train.update: forward and backward of one micro-batch, clipping, fused AdamW; random
tokens. MFU counts the model's FLOPs (costs.print_model), no recomputation, over the device's dense
BF16 peak. Each case runs in a process of its own, so that its peak memory is its own; medians of
the timed steps. Ends in one line of JSON.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[2]))
import train  # noqa: E402
from machinery import costs, machine, processes  # noqa: E402
from model import Decoder, ModelConfig  # noqa: E402

CASES = ("binary block", "binary selective", "learned block", "learned selective", "llama block")
TINY = dict(vocab_size=512, block_size=64, n_layer=2, n_head=2, n_embd=72, n_ffn=96)


class Llama(torch.nn.Module):
    """transformers' Llama of the same sizes, called as our model is."""

    def __init__(self, config):
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM
        self.llama = LlamaForCausalLM(LlamaConfig(
            vocab_size=config.vocab_size, hidden_size=config.n_embd,
            intermediate_size=config.n_ffn, num_hidden_layers=config.n_layer,
            num_attention_heads=config.n_head, max_position_embeddings=config.block_size,
            tie_word_embeddings=False, use_cache=False, attn_implementation="sdpa"))
        self.llama.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs=dict(use_reentrant=False))

    def forward(self, idx, targets):
        logits = self.llama(input_ids=idx).logits
        return None, F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def measure(case, dry_run, steps):
    """Return {targets_per_second, mfu, peak_gb, loss} of one case."""
    kind, recompute = case.split()
    wanted = argparse.Namespace(device="cpu" if dry_run else "cuda")
    _, _, device = processes.start_processes(wanted)
    config = ModelConfig(input="learned" if kind == "llama" else kind, **TINY if dry_run else {})
    torch.manual_seed(1)
    with torch.device("meta"):
        flops = sum(costs.flops_per_target(Decoder(config)))
    model = (Llama(config) if kind == "llama" else Decoder(config)).to(device).train()
    model.checkpoint_activations = recompute
    if not dry_run:
        if kind == "llama":
            model.compile()
        else:
            train.compile_model(model)
    optimizer = train.build_optimizer(model, 1e-4)
    B = 2 if dry_run else 8
    shape = B, config.block_size
    batch = [torch.randint(config.vocab_size, shape, device=device) for _ in range(2)]
    autocast = torch.autocast(device.type, torch.bfloat16, cache_enabled=False)
    bad, seconds = torch.zeros(3, device=device), []
    for step in range(3 + steps):
        started = time.perf_counter()
        loss, _ = train.update(model, optimizer, batch, B, autocast, step + 1, bad)
        loss = loss.item()  # waits for the device
        seconds.append(time.perf_counter() - started)
    rate = B * config.block_size / statistics.median(seconds[3:])
    peak = machine.peak_flops(device)
    estimate = None
    if kind != "llama":
        parts = costs.estimate_memory(config, B, "bfloat16", recompute, device=device.type)
        estimate = sum(parts.values()) / 1e9
    return dict(targets_per_second=rate, mfu=rate * flops / peak if peak else None,
                peak_gb=machine.peak_memory_gb(device), estimated_gb=estimate, loss=loss,
                finite=not bad.any().item(), torch=torch.__version__,
                device=torch.cuda.get_device_name() if device.type == "cuda" else "cpu")


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry_run", action="store_true")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--case", choices=CASES, help="one case, in this process")
    args = parser.parse_args()
    if args.case:
        return print(json.dumps(measure(args.case, args.dry_run, args.steps)))
    results = {}
    for case in CASES:
        command = [sys.executable, __file__, f"--case={case}", f"--steps={args.steps}"]
        command += ["--dry_run"] if args.dry_run else []
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        results[case] = {"failed": done.returncode}
        if done.returncode == 0:
            results[case] = json.loads(done.stdout.splitlines()[-1])
        print(f"{case:20} {json.dumps(results[case])}", flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
