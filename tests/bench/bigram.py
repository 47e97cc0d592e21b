"""What counting can do: the held-out loss of unigram and interpolated bigram models of the prepared tokens.

Usage:
    python tests/bench/bigram.py [data/stdlib]

The models are counted on all training tokens and scored on every validation target (the second to the last token of each
document), so the losses stand beside those of `evaluate.py score`. Two interpolations with the add-one unigram P(b):

    Jelinek-Mercer   l c(a,b) / c(a) + (1 - l) P(b)                      l chosen on the validation targets themselves,
    Witten-Bell      (c(a,b) + n(a) P(b)) / (c(a) + n(a))                n(a) = how many different tokens follow a
"""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))
from machinery.shards import open_shards, read_meta


def main(data_dir="data/stdlib"):
    V = read_meta(data_dir)["tokenizer"]["vocab_size"]
    pairs = {}
    for split in ("train", "val"):
        tokens, starts = zip(*(shard.map() for shard in open_shards(data_dir, split)))
        inside = [np.delete(np.arange(len(t) - 1), s[1:-1] - 1) for t, s in zip(tokens, starts)]  # pairs within a document
        pairs[split] = np.concatenate([t[i].astype(np.int64) * V + t[i + 1] for t, i in zip(tokens, inside)])
        if split == "train":
            unigrams = sum(np.bincount(t, minlength=V) for t in tokens)
    p_unigram = (unigrams + 1) / (unigrams.sum() + V)
    bigrams, counts = np.unique(pairs["train"], return_counts=True)
    follow_count = np.bincount(bigrams // V, weights=counts, minlength=V)
    followers = np.bincount(bigrams // V, minlength=V)

    a, b = np.divmod(pairs["val"], V)
    at = np.searchsorted(bigrams, pairs["val"]).clip(max=len(bigrams) - 1)
    count = np.where(bigrams[at] == pairs["val"], counts[at], 0)
    p = p_unigram[b]
    seen = np.maximum(follow_count[a], 1)
    jelinek_mercer = {l: -np.log(l * count / seen + (1 - l) * p).mean() for l in np.arange(0.05, 1, 0.05).round(2)}
    best = min(jelinek_mercer, key=jelinek_mercer.get)
    p_bigram = np.where(followers[a] > 0, (count + followers[a] * p) / np.maximum(follow_count[a] + followers[a], 1), p)
    witten_bell = -np.log(p_bigram).mean()
    print(f"{data_dir}: {len(b):,} validation targets, V = {V:,}")
    print(f"uniform                 {np.log(V):.4f} nats")
    print(f"unigram                 {-np.log(p).mean():.4f} nats")
    print(f"bigram, Jelinek-Mercer  {jelinek_mercer[best]:.4f} nats (l = {best})")
    print(f"bigram, Witten-Bell     {witten_bell:.4f} nats")


if __name__ == "__main__":
    main(*sys.argv[1:])
