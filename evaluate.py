"""Score a checkpoint and sample from it.

    score     held-out loss, perplexity and bits per byte on the prepared validation documents, every target once
    sample    continue a prompt

Usage:
    python evaluate.py score  out/smoke-binary-s1 out/smoke-learned-s1
    python evaluate.py sample out/smoke-binary-s1 --prompt='def main():'

A checkpoint is a run directory (its newest checkpoint is taken) or a step-*.pt file. Reads the run's own tokenizer.json
and the prepared data that it was trained on; score writes heldout-STEP.json beside the checkpoint.
"""

import argparse
import json
import math
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from model import load_model
from prepare import load_tokenizer, open_shards, read_meta, token_bytes


# ----------------------------------------------------------------------------------------------------------------------
# Held-out loss, document by document

def cut_documents(tokens, starts, block_size):
    """Yield (document, ids) windows that together hold every target of every document once.

    Args:
        tokens, starts: a mapped shard, uint16 [n_tokens] and int64 [n_documents + 1].
        block_size: T; a window has 2 to T + 1 ids, the first of them context only:

            document   t0 t1 t2 t3 t4 t5 t6          T = 3
            window     t0>t1>t2>t3                   targets t1 t2 t3
            window              t3>t4>t5>t6          targets t4 t5 t6
    """
    for document, (start, end) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist())):
        for at in range(start, end - 1, block_size):
            yield document, tokens[at:min(at + block_size + 1, end)]


@torch.inference_mode()
def score_windows(model, windows, micro_batch, dtype):
    """Return the summed loss of each window in nats: float64 [n]. windows: a list of id arrays of 2 to T + 1 ids."""
    device = model.lm_head.weight.device
    nats = np.zeros(len(windows))
    order = sorted(range(len(windows)), key=lambda i: -len(windows[i]))  # alike lengths share a batch: little padding
    for at in tqdm(range(0, len(order), micro_batch), unit=" batches", disable=None):
        rows = order[at:at + micro_batch]
        idx = torch.zeros(len(rows), len(windows[rows[0]]), dtype=torch.int64)
        targets = torch.full_like(idx, -1)
        for row, i in enumerate(rows):
            n = len(windows[i]) - 1
            ids = torch.from_numpy(windows[i].astype(np.int64))
            idx[row, :n], targets[row, :n] = ids[:-1], ids[1:]
        with torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16"):
            logits = model(idx.to(device))[0]
        losses = F.cross_entropy(logits.float().flatten(0, 1), targets.to(device).flatten(), ignore_index=-1, reduction="none")
        nats[rows] = losses.view_as(idx).double().sum(1).cpu().numpy()
    return nats


def score_heldout(model, data_dir, micro_batch=16, dtype="float32"):
    """Return the held-out score of a model on the validation documents of a prepared directory, as plain values.

    Keys: loss (nats per target), loss_stderr (over documents), perplexity, bits_per_byte, documents (a list of
    {targets, bytes, nats}); the end-of-text target counts, and stands for no byte.
    Raises ValueError if there are no validation documents.
    """
    sizes = token_bytes(load_tokenizer(Path(data_dir) / "tokenizer.json"))
    documents, windows, owners = [], [], []
    for shard in open_shards(data_dir, "val"):
        for document, ids in cut_documents(*shard.map(), model.config.block_size):
            windows.append(np.array(ids))
            owners.append(len(documents) + document)
        documents += [{"targets": 0, "bytes": 0, "nats": 0.0} for _ in range(shard.documents)]
    if not windows:
        raise ValueError(f"{data_dir}: no validation documents; prepare it with a larger --val_fraction")
    for owner, ids, nats in zip(owners, windows, score_windows(model, windows, micro_batch, dtype)):
        documents[owner]["targets"] += len(ids) - 1
        documents[owner]["bytes"] += int(sizes[ids[1:]].sum())
        documents[owner]["nats"] += float(nats)
    targets, n_bytes, nats = (np.array([d[key] for d in documents], float) for key in ("targets", "bytes", "nats"))
    loss = nats.sum() / targets.sum()
    # A ratio of two sums over documents (Cochran, Sampling Techniques, 2.11): documents are the independent units, not tokens.
    n = len(documents)
    stderr = math.sqrt(((nats - loss * targets) ** 2).sum() * n / max(n - 1, 1)) / targets.sum() if n > 1 else math.nan
    return {"loss": loss, "loss_stderr": stderr, "perplexity": math.exp(loss),
            "bits_per_byte": nats.sum() / math.log(2) / n_bytes.sum(), "documents": documents}


def command_score(args):
    print(f"{'checkpoint':40} {'step':>8} {'loss (nats)':>18} {'perplexity':>11} {'bits/byte':>9} {'documents':>9} {'targets':>11}")
    for path in args.checkpoints:
        model, state = load_model(path, args.device)
        data_dir = args.data or state["data"]
        if (size := read_meta(data_dir)["tokenizer"]["vocab_size"]) != model.config.vocab_size:
            raise ValueError(f"{path}: vocab_size {model.config.vocab_size}, but {data_dir} has {size}; give --data=DIR")
        result = {"checkpoint": str(path), "step": state["step"], "data": str(data_dir), "dtype": args.dtype,
                  **score_heldout(model, data_dir, args.micro_batch, args.dtype)}
        run = Path(path) if Path(path).is_dir() else Path(path).parent
        (run / f"heldout-{state['step']:08d}.json").write_text(json.dumps(result))
        print(f"{str(path):40} {state['step']:8,} {result['loss']:10.4f} +-{result['loss_stderr']:.4f} {result['perplexity']:11.3f} "
              f"{result['bits_per_byte']:9.4f} {len(result['documents']):9,} {sum(d['targets'] for d in result['documents']):11,}")


# ----------------------------------------------------------------------------------------------------------------------
# Sampling

def command_sample(args):
    model, state = load_model(args.checkpoint, args.device)
    run = Path(args.checkpoint) if Path(args.checkpoint).is_dir() else Path(args.checkpoint).parent
    tokenizer = load_tokenizer(run / "tokenizer.json")
    generator = torch.Generator(args.device).manual_seed(args.seed)
    prompt = tokenizer.encode(args.prompt, add_special_tokens=False).ids
    if not prompt:
        raise ValueError("--prompt is empty; give it a text to continue")
    for _ in range(args.num_samples):
        ids = list(model.generate(torch.tensor([prompt], device=args.device), args.max_new_tokens, args.temperature,
                                  args.top_k, state["eot_id"], generator))
        print(tokenizer.decode(prompt + ids, skip_special_tokens=True))
        print("-" * 80)


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, usage=argparse.SUPPRESS, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda[:N] (default: %(default)s)")
    score = commands.add_parser("score", parents=[common], allow_abbrev=False, help="held-out loss on the validation documents")
    score.add_argument("checkpoints", nargs="+", metavar="CHECKPOINT", help="run directory or step-*.pt file")
    score.add_argument("--data", help="prepared data directory (default: the one the run was trained on)")
    score.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="compute (default: %(default)s)")
    score.add_argument("--micro_batch", type=int, default=16, help="windows at a time (default: %(default)s)")
    score.set_defaults(run=command_score)
    sample = commands.add_parser("sample", parents=[common], allow_abbrev=False, help="continue a prompt")
    sample.add_argument("checkpoint", metavar="CHECKPOINT", help="run directory or step-*.pt file")
    sample.add_argument("--prompt", default="def main():\n", help="text to continue")
    sample.add_argument("--num_samples", type=int, default=1, help="continuations (default: %(default)s)")
    sample.add_argument("--max_new_tokens", type=int, default=200, help="tokens a continuation (default: %(default)s)")
    sample.add_argument("--temperature", type=float, default=0.8, help="0 takes the most probable (default: %(default)s)")
    sample.add_argument("--top_k", type=int, default=50, help="sample among the k most probable (default: %(default)s)")
    sample.add_argument("--seed", type=int, default=1, help="seed of the sample (default: %(default)s)")
    sample.set_defaults(run=command_sample)
    return parser.parse_args()


def main():
    args = parse_args()
    args.run(args)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ValueError, OSError) as error:
        sys.exit(f"evaluate.py: {error}")
