"""The training step on a CPU beside its peers: transformers' Llama, and a GPT-2-like model in
nanoGPT's manner.

    python tests/bench/bench_train.py together S    interleaved in one process, one allocator
                                                    (ours), medians and ratios; also with M
    python tests/bench/bench_train.py alone M       each in a process of its own, launched plainly:
                                                    ours sets its allocator as train.py does, the
                                                    peers do not; seconds and peak memory
    python tests/bench/bench_train.py attention S   kernels.attend beside torch's own kernel, a
                                                    layer forward and backward: time, and error
                                                    against float64

A step is forward, backward and fused AdamW at batch B x T on random tokens, BF16 autocast, no
clipping. S: 6 x 384, FFN 1024, V 3072, 16 x 256. M: 12 x 768, FFN 2048, V 49,152, 4 x 512. The
peers have a trained input table, we have fixed codes unless the name says learned. Ends in one line
of JSON. Needs transformers for the first peer.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[2]))
import train  # noqa: E402
from kernels import attend
from machinery import machine  # noqa: E402
from machinery.costs import flops_per_target  # noqa: E402
from model import Decoder, ModelConfig  # noqa: E402

SIZES = {
    "S": dict(n_layer=6, n_embd=384, n_head=6, n_ffn=1024, vocab_size=3072, block_size=256,
              batch=16),
    "M": dict(n_layer=12, n_embd=768, n_head=12, n_ffn=2048, vocab_size=49_152, block_size=512,
              batch=4)}
MODELS = ("ours", "ours_block", "ours_selective", "ours_learned", "llama", "gpt")


class GPTBlock(nn.Module):
    """Attention and a GELU MLP of 4 n_embd, behind layer norms; no biases."""

    def __init__(self, C, n_head):
        super().__init__()
        self.n_head = n_head
        self.ln_1, self.ln_2 = nn.LayerNorm(C, bias=False), nn.LayerNorm(C, bias=False)
        self.qkv, self.proj = nn.Linear(C, 3 * C, bias=False), nn.Linear(C, C, bias=False)
        self.fc, self.fc_out = nn.Linear(C, 4 * C, bias=False), nn.Linear(4 * C, C, bias=False)

    def forward(self, x):
        B, T, C = x.size()
        qkv = self.qkv(self.ln_1(x)).split(C, dim=2)
        q, k, v = (y.view(B, T, self.n_head, -1).transpose(1, 2) for y in qkv)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(B, T, C))
        return x + self.fc_out(F.gelu(self.fc(self.ln_2(x))))


class GPT(nn.Module):
    """GPT-2 as small training scripts write it: learned positions, the head tied to the input
    table. At n_ffn = 8/3 n_embd our SwiGLU has as many matmul parameters as its MLP."""

    def __init__(self, vocab_size, block_size, n_layer, n_head, n_embd, **_):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, n_embd), nn.Embedding(block_size, n_embd)
        self.h = nn.ModuleList(GPTBlock(n_embd, n_head) for _ in range(n_layer))
        self.ln_f = nn.LayerNorm(n_embd, bias=False)
        self.head = nn.Linear(n_embd, vocab_size, bias=False)
        self.head.weight = self.wte.weight
        nn.init.normal_(self.wte.weight, std=0.02)

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        for block in self.h:
            x = block(x)
        logits = self.head(self.ln_f(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build(name, size):
    """Return (model, loss(x, y)) of a contender; one whose name ends in _compiled is compiled as
    its users would."""
    kind = name.removesuffix("_compiled")
    compiled = kind != name
    sizes = {key: value for key, value in size.items() if key != "batch"}
    torch.manual_seed(1)
    if kind == "llama":
        from transformers import LlamaConfig, LlamaForCausalLM
        model = LlamaForCausalLM(LlamaConfig(
            vocab_size=size["vocab_size"], hidden_size=size["n_embd"],
            intermediate_size=size["n_ffn"], num_hidden_layers=size["n_layer"],
            num_attention_heads=size["n_head"], max_position_embeddings=size["block_size"],
            tie_word_embeddings=False, use_cache=False, attn_implementation="sdpa"))

        def loss(run, x, y):
            logits = run(input_ids=x).logits
            return F.cross_entropy(logits.float().flatten(0, 1), y.flatten())
        run = torch.compile(model) if compiled else model
        return model, lambda x, y: loss(run, x, y)
    if kind == "gpt":
        model = GPT(**sizes)
        return model, torch.compile(model) if compiled else model
    model = Decoder(ModelConfig(input="learned" if kind == "ours_learned" else "binary", **sizes))
    recompute = {"ours_block": "block", "ours_selective": "selective"}
    model.checkpoint_activations = recompute.get(kind, "none")
    if compiled:
        train.compile_model(model)
    return model, lambda x, y: model(x, y)[1]


class Contender:
    def __init__(self, name, size):
        self.model, self.loss = build(name, size)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        generator = torch.Generator().manual_seed(1)
        shape = size["batch"], size["block_size"] + 1
        tokens = torch.randint(size["vocab_size"], shape, generator=generator)
        self.batch, self.seconds = (tokens[:, :-1], tokens[:, 1:]), []

    def step(self):
        started = time.perf_counter()
        cache = not isinstance(self.model, Decoder)  # as train.py does
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
            loss = self.loss(*self.batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.seconds.append(time.perf_counter() - started)
        return loss.item()


def matmul_peak():
    """Return the best BF16 FLOP/s of a 4096^3 product in five tries."""
    a, b = torch.randn(4096, 4096).bfloat16(), torch.randn(4096, 4096).bfloat16()
    best = 0.0
    for _ in range(5):
        started = time.perf_counter()
        a @ b
        best = max(best, 2 * 4096**3 / (time.perf_counter() - started))
    return best


def step_flops(size):
    with torch.device("meta"):
        sizes = {key: value for key, value in size.items() if key != "batch"}
        model = Decoder(ModelConfig(**sizes))
    return sum(flops_per_target(model)) * size["batch"] * size["block_size"]


def together(size, names, repeats):
    machine.tune_allocator()
    peak = matmul_peak()
    contenders = {name: Contender(name, size) for name in names}
    for contender in contenders.values():  # compilation and the first touch of the memory
        contender.step(), contender.step()
        contender.seconds.clear()
    for _ in range(repeats):
        for contender in contenders.values():
            contender.step()
    seconds = {name: statistics.median(contender.seconds) for name, contender in contenders.items()}
    shares = {name: step_flops(size) / s / peak for name, s in seconds.items()}
    return dict(seconds=seconds, matmul_tflops=peak / 1e12, share_of_peak=shares)


def attention(size, repeats):
    machine.tune_allocator()
    shape = size["batch"], size["block_size"], size["n_head"], size["n_embd"] // size["n_head"]
    q, k, v, g = (torch.randn(shape).bfloat16().transpose(1, 2).requires_grad_() for _ in range(4))
    compiled = torch.compile(attend)
    ways = {"torch": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
            "attend": lambda: attend(q, k, v), "attend_compiled": lambda: compiled(q, k, v)}
    seconds = {name: [] for name in ways}
    for _ in range(repeats + 2):
        for name, way in ways.items():
            started = time.perf_counter()
            torch.autograd.grad(way(), (q, k, v), g)
            seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(values[2:]) for name, values in seconds.items()}


def attention_errors(size, spread):
    """Return {way: the relative errors of y, dq, dk, dv} where scores spread by about spread."""
    shape = size["batch"], size["block_size"], size["n_head"], size["n_embd"] // size["n_head"]
    values = torch.randn(4, *shape, generator=torch.Generator().manual_seed(0)).transpose(2, 3)
    values[:2] *= spread**0.5
    q, k, v, g = values.bfloat16()

    def run(way, dtype):
        given = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        y = way(*given)
        return [x.detach().double() for x in (y, *torch.autograd.grad(y, given, g.to(dtype)))]

    def torchs(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    exact = run(torchs, torch.float64)
    errors = {}
    for name, way in (("torch", torchs), ("attend", attend)):
        pairs = zip(run(way, torch.bfloat16), exact)
        errors[name] = [((a - b).norm() / b.norm()).item() for a, b in pairs]
    return errors


def one(size, name, repeats):
    if name.startswith("ours"):
        machine.tune_allocator()
    contender = Contender(name, size)
    for _ in range(repeats + 2):
        contender.step()
    return dict(seconds=statistics.median(contender.seconds[2:]),
                peak_gb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9)


def show_attention(size, names, repeats):
    result = attention(SIZES[size], repeats)
    for name, seconds in result.items():
        ratio = result["torch"] / seconds
        print(f"{name:24} {1000 * seconds:7.1f} ms  {ratio:5.2f} x torch")
    for spread in (1, 4, 16):
        for name, errors in attention_errors(SIZES[size], spread).items():
            y, dq, dk, dv = errors
            listed = f"y {y:.4f}  dq {dq:.4f}  dk {dk:.4f}  dv {dv:.4f}"
            print(f"{name:24} scores spread by {spread:2}: relative error of {listed}")
            result[f"{name}_errors_{spread}"] = errors
    return result


def show_together(size, names, repeats):
    result = together(SIZES[size], names, repeats)
    print(f"BF16 matmul peak {result['matmul_tflops']:.3f} TFLOP/s")
    for name, seconds in result["seconds"].items():
        ratio = result["seconds"][names[0]] / seconds
        print(f"{name:24} {seconds:7.3f} s  {ratio:5.2f} x {names[0]}  "
              f"{result['share_of_peak'][name]:.0%} of the matmul peak")
    return result


def show_alone(size, names, repeats):
    result = {}
    for name in names:
        command = [sys.executable, __file__, "one", size, f"--models={name}",
                   f"--repeats={repeats}"]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        this = result[name] = json.loads(done.stdout.splitlines()[-1])
        first = result[names[0]]
        print(f"{name:24} {this['seconds']:7.3f} s  "
              f"{first['seconds'] / this['seconds']:5.2f} x {names[0]}  "
              f"peak {this['peak_gb']:.2f} GB = {this['peak_gb'] / first['peak_gb']:.2f} x",
              flush=True)
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("how", choices=("together", "alone", "one", "attention"))
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("--models", default="llama,ours,llama_compiled,ours_compiled,gpt_compiled",
                        help=f"of {', '.join(MODELS)}, each also with _compiled "
                             "(default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    names = args.models.split(",")
    if args.how == "one":
        print(json.dumps(one(SIZES[args.size], names[0], args.repeats)))
        return
    show = {"attention": show_attention, "together": show_together, "alone": show_alone}[args.how]
    result = show(args.size, names, args.repeats)
    facts = dict(size=args.size, torch=torch.__version__, threads=torch.get_num_threads(),
                 cpus=os.cpu_count())
    print(json.dumps(facts | result))


if __name__ == "__main__":
    main()
