"""Paired statistics of compare.py: intervals and tests."""

import math

import numpy as np
from scipy import stats

LEVEL = 0.95  # of every interval


def student_interval(values):
    """Return (mean, half-width of its interval by Student's t); None for that of a single value."""
    n, mean = len(values), np.mean(values).item()
    if n < 2:
        return mean, None
    error = np.std(values, ddof=1) / math.sqrt(n)
    return mean, (stats.t.ppf((1 + LEVEL) / 2, n - 1) * error).item()


def mcnemar(b, c):
    """Return the two-sided p value of the exact McNemar test of b and c documents.

    One model alone has b right, the other alone c (McNemar 1947; exact: Liddell 1976).
    """
    return stats.binomtest(b, b + c).pvalue if b + c else 1.0


def paired_bootstrap(difference, weight, resamples, seed=0):
    """Return (low, high, p) of sum(difference) / sum(weight) when documents are drawn anew.

    Args:
        difference, weight: float64 [n], of each document; weight 1 gives the mean.
    Drawn with replacement; the interval is the percentile interval (Efron 1979). p is two-sided:
    twice the share of resamples on the far side of 0, each side counting itself once (Davison and
    Hinkley 1997, 4.2.3), so never 0. Without any difference p = 1.
    """
    if not difference.any():
        return 0.0, 0.0, 1.0
    generator, n = np.random.default_rng(seed), len(difference)
    rows = max(1, 10**7 // n)  # resamples at a time, 80 MB
    drawn = []
    for start in range(0, resamples, rows):
        index = generator.integers(n, size=(min(rows, resamples - start), n))
        drawn.append(difference[index].sum(1) / weight[index].sum(1))
    drawn = np.concatenate(drawn)
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    p = 2 * (1 + min((drawn <= 0).sum(), (drawn >= 0).sum())) / (1 + resamples)
    return float(low), float(high), min(1.0, float(p))


def holm(p_values):
    """Return p values corrected for their number, in the order given (Holm 1979).

    The i-th smallest, i from 0, is multiplied by n - i; no smaller one ends up above it.
    """
    order = np.argsort(p_values, kind="stable")
    n = len(order)
    stepped = (n - np.arange(n)) * np.array(p_values)[order]
    corrected = np.empty(n)
    corrected[order] = np.minimum(1, np.maximum.accumulate(stepped))
    return corrected.tolist()
