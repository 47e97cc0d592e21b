"""Paired statistics: intervals and tests."""

import math

import numpy as np
from scipy import stats

LEVEL = 0.95  # of every interval


def student_interval(values):
    """Return (mean, half-width of its interval by Student's t); the half-width of a single value is None."""
    n, mean = len(values), np.mean(values).item()
    return mean, None if n < 2 else (stats.t.ppf((1 + LEVEL) / 2, n - 1) * np.std(values, ddof=1) / math.sqrt(n)).item()


def mcnemar(b, c):
    """Return the two-sided p value of the exact McNemar test (McNemar 1947; exact: Liddell 1976) of b and c documents that
    one model alone has right."""
    return stats.binomtest(b, b + c).pvalue if b + c else 1.0


def paired_bootstrap(difference, weight, resamples, seed=0):
    """Return (low, high, p) of sum(difference) / sum(weight) when documents are drawn anew, with replacement.

    Args:
        difference, weight: float64 [n], of each document; weight 1 gives the mean.
    The interval is the percentile interval (Efron 1979). p is two-sided: twice the share of resamples on the far side
    of 0, each side counting itself once (Davison and Hinkley 1997, 4.2.3), so never 0. Without any difference p = 1.
    """
    if not difference.any():
        return 0.0, 0.0, 1.0
    generator, n, drawn = np.random.default_rng(seed), len(difference), []
    for at in range(0, resamples, rows := max(1, 10**7 // n)):
        index = generator.integers(n, size=(min(rows, resamples - at), n))
        drawn.append(difference[index].sum(1) / weight[index].sum(1))
    drawn = np.concatenate(drawn)
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    p = 2 * (1 + min((drawn <= 0).sum(), (drawn >= 0).sum())) / (1 + resamples)
    return float(low), float(high), min(1.0, float(p))


def holm(p_values):
    """Return p values corrected for their number, in order: the i-th smallest times n - i, monotone (Holm 1979)."""
    order = np.argsort(p_values, kind="stable")
    n, corrected = len(order), np.empty(len(order))
    corrected[order] = np.minimum(1, np.maximum.accumulate((n - np.arange(n)) * np.array(p_values)[order]))
    return corrected.tolist()
