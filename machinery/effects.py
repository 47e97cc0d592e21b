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
    effects, sides = [], []
    for (by, label), runs in groups.items():
        one = next(iter(runs.values()))
        sides.append({"by": by, "label": label, "runs": runs, "places": one["places"]})
    for a, b in itertools.combinations(sides, 2):
        axes = differing(a["places"], b["places"])
        seeds = sorted(set(a["runs"]) & set(b["runs"]))
        if a["by"] != b["by"] or not seeds or axes is None or len(axes) != 1:
            continue
        axis = axes[0]
        start, end = sorted((a, b), key=lambda side: rank(axis, side["places"][axis]))
        runs = {seed: end["runs"][seed] for seed in seeds}
        effects.append({"axis": axis, "values": [start["places"][axis], end["places"][axis]],
                        "from": start["label"], "to": end["label"], "by": a["by"], "seeds": seeds,
                        **subtract(runs, start["runs"], resamples)})
    return sorted(effects, key=place_in_table)


def place_in_table(effect):
    """Return what effects are sorted by: the axis, then the values on it."""
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
