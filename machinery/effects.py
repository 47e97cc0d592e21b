"""Paired differences of runs, and those of one thing only: width, scale, learning, values."""

import itertools

import numpy as np

from machinery.labels import AXES, differing
from machinery.statistics import paired_subsets, student_interval


def subtract(seeds, base, resamples):
    """Return the held-out losses of runs {seed: run} minus those of base, paired by seed.

    Keys: differences (of the seeds that both have), difference (their mean), seed_interval (its
    half-width; None for one seed), document_interval (low and high; None for few documents).
    """
    pairs = [(seeds[seed], base[seed]) for seed in seeds if seed in base]
    differences = [a["heldout"]["loss"] - b["heldout"]["loss"] for a, b in pairs]
    difference, seed_interval = student_interval(differences)
    nats = np.mean([a["documents"][:, 1] - b["documents"][:, 1] for a, b in pairs], axis=0)
    low, high, _, _ = paired_subsets(nats, pairs[0][0]["documents"][:, 0], resamples)
    return {"differences": differences, "difference": difference, "seed_interval": seed_interval,
            "document_interval": (low, high)}


def find_effects(groups, resamples):
    """Return what changes where one thing does: a dict for each two groups of runs that differ on
    one axis (labels.places), have the same `by` and share a seed.

    Args:
        groups: {(by, label): {seed: run}}.
    Keys: axis, values (on it), from and to (labels), by, seeds, and subtract's: to minus from.
    """
    effects = []
    for (first, a), (second, b) in itertools.combinations(groups.items(), 2):
        seeds = sorted(set(a) & set(b))
        places = [next(iter(runs.values()))["places"] for runs in (a, b)]
        axes = differing(*places)
        if first[0] != second[0] or not seeds or axes is None or len(axes) != 1:
            continue
        ends = [(rank(axes[0], place[axes[0]]), place[axes[0]], name, runs)
                for place, (_, name), runs in zip(places, (first, second), (a, b))]
        (*_, low, start, base), (*_, high, end, runs) = sorted(ends, key=lambda end: end[0])
        effects.append({"axis": axes[0], "values": [low, high], "from": start, "to": end,
                        "by": first[0], "seeds": seeds,
                        **subtract({seed: runs[seed] for seed in seeds}, base, resamples)})
    return sorted(effects, key=order)


def order(effect):
    """Return where an effect is in the table: by its axis, then by its values."""
    axis, known = effect["axis"], list(AXES)
    number = known.index(axis) if axis in known else len(known)
    return number, axis, [rank(axis, value) for value in effect["values"]]


def rank(axis, value):
    """Return the place of a value in the order of its axis: words as AXES has them, numbers by
    their size, other words after them."""
    words = AXES.get(axis, ())
    if value in words:
        return words.index(value), ""
    try:
        return float(value), ""
    except ValueError:
        return float("inf"), value
