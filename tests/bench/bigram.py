"""What counting can do: the held-out loss of unigram and interpolated bigram models.

Usage:
    python tests/bench/bigram.py [data/stdlib]

The models are counted on all training tokens and scored on every validation target (the second to
the last token of each document), so the losses stand beside those of `evaluate.py score`. Two
interpolations with the add-one unigram P(b); c counts, n(a) is how many different tokens follow a:

    Jelinek-Mercer   w c(a,b) / c(a) + (1 - w) P(b), w chosen on the validation targets themselves
    Witten-Bell      (c(a,b) + n(a) P(b)) / (c(a) + n(a))
"""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))
from machinery.shards import open_shards, read_meta  # noqa: E402


def read_split(data_dir, split, V):
    """Return (token counts [V], pairs a * V + b of neighbours within a document)."""
    counts, pairs = np.zeros(V, np.int64), []
    for shard in open_shards(data_dir, split):
        tokens, starts = shard.map()
        counts += np.bincount(tokens, minlength=V)
        inside = np.delete(np.arange(len(tokens) - 1), starts[1:-1] - 1)
        pairs.append(tokens[inside].astype(np.int64) * V + tokens[inside + 1])
    return counts, np.concatenate(pairs)


def main(data_dir="data/stdlib"):
    V = read_meta(data_dir)["tokenizer"]["vocab_size"]
    unigrams, train_pairs = read_split(data_dir, "train", V)
    _, val_pairs = read_split(data_dir, "val", V)
    p_unigram = (unigrams + 1) / (unigrams.sum() + V)
    bigrams, counts = np.unique(train_pairs, return_counts=True)
    follow_count = np.bincount(bigrams // V, weights=counts, minlength=V)
    followers = np.bincount(bigrams // V, minlength=V)

    a, b = np.divmod(val_pairs, V)
    at = np.searchsorted(bigrams, val_pairs).clip(max=len(bigrams) - 1)
    count = np.where(bigrams[at] == val_pairs, counts[at], 0)
    p = p_unigram[b]
    seen = np.maximum(follow_count[a], 1)
    jelinek_mercer = {}
    for weight in np.arange(0.05, 1, 0.05).round(2):
        jelinek_mercer[weight] = -np.log(weight * count / seen + (1 - weight) * p).mean()
    best = min(jelinek_mercer, key=jelinek_mercer.get)
    backed_off = (count + followers[a] * p) / np.maximum(follow_count[a] + followers[a], 1)
    p_bigram = np.where(followers[a] > 0, backed_off, p)
    witten_bell = -np.log(p_bigram).mean()
    print(f"{data_dir}: {len(b):,} validation targets, V = {V:,}")
    print(f"uniform                 {np.log(V):.4f} nats")
    print(f"unigram                 {-np.log(p).mean():.4f} nats")
    print(f"bigram, Jelinek-Mercer  {jelinek_mercer[best]:.4f} nats (w = {best})")
    print(f"bigram, Witten-Bell     {witten_bell:.4f} nats")


if __name__ == "__main__":
    main(*sys.argv[1:])
