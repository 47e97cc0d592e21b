"""Linear readouts of a stream of vectors: what they are asked, how they are fitted, how good they
are. For machinery/probe.py."""

import keyword
import math
from dataclasses import dataclass

import numpy as np
import torch
from scipy.stats import rankdata

from machinery.tokenizer import token_bytes

N_IDENTITIES = 256  # ids that the identity readout chooses between: the most frequent
RIDGE = 1e-3        # of a feature's variance


def is_keyword(text):
    return keyword.iskeyword(text.strip())


def begins_with_space(text):
    return text.startswith(" ")


def is_digit(text):
    return text.strip().isdigit()


PROPERTIES = {"keyword": is_keyword, "space first": begins_with_space, "digit": is_digit}


def standardise(x, fit):
    """Return x (N, C) with mean 0 and standard deviation 1 over the positions fit."""
    std = x[fit].std(0)
    return (x - x[fit].mean(0)) / torch.where(std > 0, std, 1)


def read_classes(x, classes, fit, test):
    """Return the class that linear discriminant analysis of x (N, C), fitted at the positions fit,
    says at the positions test, bool (N,) both: the largest of an affine function each.

    classes: int64 (N,), -1 for none.
    """
    x, known = standardise(x, fit), fit & (classes >= 0)
    if not known.any():
        return torch.zeros(int(test.sum()), dtype=torch.int64)
    ridge = RIDGE * torch.eye(x.size(1), dtype=x.dtype)
    n = torch.bincount(classes[known])
    centres = torch.zeros(len(n), x.size(1), dtype=x.dtype)
    centres = centres.index_add_(0, classes[known], x[known]) / n[:, None]
    within = x[known] - centres[classes[known]]
    directions = torch.linalg.solve(within.T @ within / known.sum() + ridge, centres.T)
    offsets = (n / n.sum()).log() - (centres * directions.T).sum(1) / 2
    return (x[test] @ directions + offsets).argmax(1)


def read_values(x, targets, fit, test):
    """Return what ridge regression of targets, float64 (N, M), on x (N, C), fitted at the positions
    fit, says at the positions test, bool (N,) both."""
    x, mean = standardise(x, fit), targets[fit].mean(0)
    ridge = RIDGE * torch.eye(x.size(1), dtype=x.dtype)
    covariance = x[fit].T @ x[fit] / fit.sum() + ridge
    weights = torch.linalg.solve(covariance, x[fit].T @ (targets[fit] - mean) / fit.sum())
    return x[test] @ weights + mean


def area_under_roc(scores, truth):
    """Return how often a true case scores above a false one, ties counted half (Mann-Whitney); nan
    if all are alike."""
    n = int(truth.sum())
    if not 0 < n < len(truth):
        return math.nan
    ranks = rankdata(scores)[truth].sum() - n * (n + 1) / 2
    return float(ranks / (n * (len(truth) - n)))


def lexical_columns(tokenizer):
    """Return int64 [n_ids, 4]: the PROPERTIES of every id's text, and its length in bytes."""
    rows = []
    for i, n_bytes in enumerate(token_bytes(tokenizer).tolist()):
        word = tokenizer.decode([i])
        rows.append([*(check(word) for check in PROPERTIES.values()), n_bytes])
    return torch.tensor(rows)


def frequent_classes(ids, counts):
    """Return (int64 (N,): the rank of each id among the N_IDENTITIES of most counts (V,), else -1;
    how many they are)."""
    n = min(N_IDENTITIES, int((counts > 0).sum()))
    frequent = counts.argsort(descending=True, stable=True)[:n]
    ranks = torch.full_like(counts, -1).index_put_((frequent,), torch.arange(n))
    return ranks[ids], n


def hold_out_ids(lexical, counts):
    """Return bool (n_ids,): every other id of each kind, the frequent ones first. A readout that
    has seen all ids may have learned them by heart."""
    order = sorted(range(len(lexical)), key=lambda i: -int(counts[i]))
    held_out, turn = torch.zeros(len(lexical), dtype=torch.bool), {}
    for i in order:
        kind = tuple(lexical[i, :len(PROPERTIES)].tolist())
        turn[kind] = not turn.get(kind, len(turn) % 2 == 1)
        held_out[i] = turn[kind]
    return held_out


@dataclass
class Questions:
    """What is asked of each of N positions: properties of its own token, and where the answers are
    fitted and where scored."""
    classes: torch.Tensor   # int64 (N,): the identity among the frequent ids, -1 for none
    codes: torch.Tensor     # float64 (N, K): the bits of its code
    lexical: torch.Tensor   # float64 (N, 4): PROPERTIES of its text, and its length in bytes
    test: torch.Tensor      # bool (N,): in the documents that are scored
    held_out: torch.Tensor  # bool (N,): of an id that is kept from the fit of lexical

    def answer(self, stream):
        """Return {readout: score} of linear readouts of the stream, float32 (N, C); of None, what
        can be said without a look: the most frequent class, the means."""
        fit, test = ~self.test, self.test
        fit_words, test_words = ~self.test & ~self.held_out, self.test & self.held_out
        if stream is None:
            found = torch.zeros(int(test.sum()), dtype=torch.int64)
            bits = self.codes[fit].mean(0).expand(int(test.sum()), -1)
            words = self.lexical[fit_words].mean(0).expand(int(test_words.sum()), -1)
        else:
            x = stream.double()
            found = read_classes(x, self.classes, fit, test)
            bits = read_values(x, self.codes, fit, test)
            words = read_values(x, self.lexical, fit_words, test_words)
        classes, right = self.classes[test], (bits > 0.5) == (self.codes[test] > 0.5)
        scores = {"identity": (found == classes)[classes >= 0].double().mean().item(),
                  "code": right.all(1).double().mean().item(),
                  "bit": right.double().mean().item()}
        truth = self.lexical[test_words]
        for i, name in enumerate(PROPERTIES):
            scores[name] = area_under_roc(words[:, i].numpy(), truth[:, i].numpy() > 0)
        error = (words[:, -1] - truth[:, -1]).square().mean()
        scores["bytes"] = 1 - (error / truth[:, -1].var(correction=0)).item()
        return scores


def ask(ids, test, classes, codes, lexical, counts):
    """Return the Questions of positions with these ids: codes (V, K) and lexical (n_ids, 4) by id,
    counts (V,) where the answers are fitted."""
    held_out = hold_out_ids(lexical, counts)
    return Questions(classes, codes[ids].double(), lexical[ids].double(), test, held_out[ids])


def shuffle_ids(ids):
    """Return the permutation of all ids up to the largest that gives each that occurs another's
    place: with its labels a readout can be right by heart alone."""
    there = np.unique(ids)
    mixed = np.arange(there[-1] + 1)
    mixed[there] = np.random.default_rng(0).permutation(there)
    return torch.from_numpy(mixed)
