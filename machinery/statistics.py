"""Paired statistics of compare.py: intervals and tests."""

import math

import numpy as np

LEVEL = 0.95  # of every interval


def student_interval(values):
    """Return (mean, half-width of its interval by Student's t); None for that of a single value."""
    from scipy import stats  # where it is used: compare.py tells in one line that it is missing
    n, mean = len(values), np.mean(values).item()
    if n < 2:
        return mean, None
    error = np.std(values, ddof=1) / math.sqrt(n)
    return mean, (stats.t.ppf((1 + LEVEL) / 2, n - 1) * error).item()


def mcnemar(b, c):
    """Return the two-sided p value of the exact McNemar test of b and c documents.

    One model alone has b right, the other alone c (McNemar 1947; exact: Liddell 1976).
    """
    from scipy import stats
    return stats.binomtest(b, b + c).pvalue if b + c else 1.0


def paired_subsets(difference, weight, resamples, seed=0):
    """Return (low, high, p, least p) of sum(difference) / sum(weight) over documents.

    Args:
        difference, weight: float64 [n], of each document; weight 1 gives the mean.
    By subsets of the documents, all of them where they are no more than resamples, else so many
    random ones (Hartigan 1969: typical values): the true value lies between any two neighbours of
    the subsets' sorted ratios with equal chance, and their share on the far side of 0 is half the p
    value of a sign-flip test. Exact at any n where a document's difference is as likely of either
    sign, as when it is a coin's toss which model is which. So an interval of LEVEL needs 6
    documents (low and high are None with fewer), and p is never below 2^(1 - n). Without any
    difference the interval is 0 and p 1.
    """
    n = len(difference)
    if not difference.any():
        return 0.0, 0.0, 1.0, 1.0
    sums, weights = [], []
    for chosen in draw_subsets(n, resamples, seed):
        sums.append(chosen @ difference)
        weights.append(chosen @ weight)
    sums, weights = np.concatenate(sums), np.concatenate(weights)
    rounding = 1e-12 * np.abs(difference).sum()
    far = min((sums <= rounding).sum(), (sums >= -rounding).sum())  # the empty subset is on both
    p = min(1.0, float(2 * far / len(sums)))
    least = max(2.0 ** (1 - np.count_nonzero(difference)), 2 / len(sums))
    ratios = np.sort(sums[weights > 0] / weights[weights > 0])
    outside = int((1 - LEVEL) / 2 * len(sums))  # of them on each side
    if outside == 0:
        return None, None, p, least
    return float(ratios[outside - 1]), float(ratios[-outside]), p, least


def draw_subsets(n, resamples, seed):
    """Yield subsets of n documents as float64 [rows, n] of zeros and ones, the empty one first."""
    rows = max(1, 10**7 // n)  # at a time, 80 MB
    if 2**n <= resamples:
        yield ((np.arange(2**n)[:, None] >> np.arange(n)) & 1).astype(float)
        return
    generator = np.random.default_rng(seed)
    yield np.zeros((1, n))
    for start in range(0, resamples, rows):
        shape = min(rows, resamples - start), n
        yield generator.integers(0, 2, shape, dtype=np.int8).astype(float)


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
