"""compare.py --best_over: of each interface the value of a field, such as the learning rate, that
the validation windows like best. The held-out documents have no part in the choice."""

import math

import numpy as np

from machinery.records import check_finished, check_score, score_command


def group_runs(runs, by, fields):
    """Return {(value of the field `by`, label): {values of the fields: {seed: run}}}.

    Raises ValueError for a run twice.
    """
    groups = {}
    for run in runs:
        config = run["config"]
        tried = groups.setdefault((config.get(by), run["label"]), {})
        seeds = tried.setdefault(tuple(config[field] for field in fields), {})
        seed = config["seed"]
        if seed in seeds:
            raise ValueError(f"{seeds[seed]['path']} and {run['path']} are both {run['label']} of "
                             f"seed {seed}; leave one out")
        seeds[seed] = run
    return groups


def final_loss(run):
    """Return a run's last loss on the validation windows; infinity for one that is not finite."""
    loss = run["curve"][run["trained"]]
    return loss if loss is not None and math.isfinite(loss) else math.inf


def choose(tried, fields, name):
    """Return the choice among an interface's runs {value: {seed: run}}, as plain values.

    The least mean of the final validation loss over the seeds that all values share; the smaller
    value where two are equal.

    Keys: value (of each field), shared (seeds), edge (smallest or largest of those tried, by the
    first field; empty for neither), tried (a dict for each value: value, seeds, losses, and loss,
    the mean over the shared seeds; infinity where one is not finite).
    Raises ValueError if they share no seed, or no value has finite losses.
    """
    flag, values = f"--best_over={','.join(fields)}", sorted(tried)
    shared = sorted(set.intersection(*(set(seeds) for seeds in tried.values())))
    if not shared:
        listed = ", ".join(f"{say(value)} (seeds {sorted(tried[value])})" for value in values)
        raise ValueError(f"{flag}: no seed of {name} was trained with all of {listed}; train one "
                         "with each, or leave some out")
    rows = []
    for value in values:
        losses = {seed: final_loss(run) for seed, run in sorted(tried[value].items())}
        mean = np.mean([losses[seed] for seed in shared]).item()
        rows.append({"value": list(value), "seeds": list(losses), "loss": mean,
                     "losses": list(losses.values())})
    best = min(rows, key=lambda row: row["loss"])  # the first of equal ones
    if best["loss"] == math.inf:
        raise ValueError(f"{flag}: {name} has no finite validation loss with any of "
                         f"{', '.join(say(value) for value in values)}; leave it out")
    return {"value": best["value"], "shared": shared, "tried": rows,
            "edge": find_edge(best["value"][0], sorted({value[0] for value in values}))}


def find_edge(best, values):
    """Return whether the best of several sorted values is the smallest or largest; else nothing."""
    if len(values) == 1 or isinstance(best, str) or best not in (values[0], values[-1]):
        return ""
    return "smallest" if best == values[0] else "largest"


def say(value):
    """Return the values of the fields of --best_over as a string: 0.004, or 0.004/0.0004."""
    return "/".join(f"{part:g}" if isinstance(part, float) else str(part) for part in value)


def check_scored(runs):
    """Raise ValueError, with the command to type, if some of the chosen runs have no score."""
    missing = [run for run in runs if run["scored"] != run["trained"]]
    if missing:
        raise ValueError(f"{len(missing)} of the {len(runs)} chosen runs have no held-out score of "
                         f"their last step; type {score_command(missing)}")


def choose_runs(runs, by, best_over):
    """Return ({(value of `by`, label): {seed: run}}, {the same: its choice}): of each interface the
    runs with the best values of the fields of best_over. There is no choice without fields.

    Raises ValueError unless all runs are finished and the chosen ones scored.
    """
    tried = group_runs(runs, by, best_over)
    if not best_over:
        return {key: found[()] for key, found in tried.items()}, {}
    for run in runs:
        check_finished(run)
    choices, chosen = {}, {}
    for (value, name), found in tried.items():
        choice = choose(found, best_over, f"{name}, {by} {value}" if by else name)
        choices[value, name], chosen[value, name] = choice, found[tuple(choice["value"])]
    check_scored(list_runs(chosen))
    for run in list_runs(chosen):
        check_score(run)
    return chosen, choices


def list_runs(groups):
    """Return all runs of groups {key: {seed: run}}."""
    found = []
    for seeds in groups.values():
        found += seeds.values()
    return found
