"""Compare training runs, or benchmark scores: tables, paired statistics and figures.

What both sides of a comparison share cancels, and most noise is shared: which questions were asked,
which documents were held out, which weights and windows a seed drew. So everything is paired, which
the paper does not do.

    scores   of each task, the difference of the first file to each other one on the same documents
             accuracies       exact McNemar test: b ~ Binomial(b + c, 1/2) of b + c documents that
                              one alone has right
             log-likelihoods  sign-flip test of the mean difference (bits per byte of a page: of a
                              ratio of sums), interval by subsets of the documents
             across tasks     Holm's correction, for the tests of one kind on one pair of models
    runs     of each input interface, the difference to --baseline in held-out loss, two intervals
             seeds            Student's t over differences of single seeds: other weights, windows
             documents        by subsets of the documents, losses averaged over the seeds before
             one thing        the same for each two interfaces that differ in one thing only: fixed
                              or learned, how many numbers an id, their scale, their values

Usage:
    python compare.py out/smoke-*                      runs: every interface against learned
    python compare.py out/depth-* --by=n_layer         the same at several depths
    python compare.py out/lab/* --best_over=max_lr     each interface at its best learning rate
    python compare.py runs.jsonl out/mine              kept runs, without directories, and mine
    python compare.py A.json B.json --format=markdown --published=binary,gf2

Reads run directories (config.json, log.jsonl, the newest heldout-STEP.json) and runs.jsonl files,
or files that evaluate.py score --suite or --tasks wrote. Prints text, Markdown or JSON; of runs,
writes comparison.md, figures and runs.jsonl to --out: a line for each run given, from which all can
be drawn again. Refuses models that did not see the same documents and prompts, and runs that differ
in more than input and seed.
"""

import argparse
import difflib
import math
import os
import sys
from pathlib import Path

import numpy as np

from machinery.choices import choose_runs, list_runs
from machinery.effects import find_effects, subtract
from machinery.errors import one_line
from machinery.figures import draw_runs
from machinery.labels import LABELS, said
from machinery.records import check_score, prepare_run, read_runs, write_runs
from machinery.results import list_rows, read_scores
from machinery.runs import FREE_ON_RESUME
from machinery.statistics import LEVEL, holm, mcnemar, paired_subsets, student_interval
from machinery.tables import ACCURACIES, describe_runs, describe_scores, to_json

TESTED = (*ACCURACIES, "loglikelihood", "bits_per_byte")
# The paper's own figures (its results section), as printed there: accuracies in percent. Not
# measured here.
PUBLISHED = {
    "binary": {
        "hellaswag": {"acc": 40.70, "acc_norm": 52.40},
        "piqa": {"acc": 70.51, "acc_norm": 71.11},
        "lambada_openai": {"acc": 42.75, "perplexity": 17.91},
        "arc_easy": {"acc": 67.59, "acc_norm": 61.53},
        "arc_challenge": {"acc": 32.34, "acc_norm": 34.04},
        "winogrande": {"acc": 55.33},
        "openbookqa": {"acc": 28.20, "acc_norm": 38.00},
        "commonsense_qa": {"acc": 20.56},
        "mmlu": {"acc": 25.88},
        "mmlu_5shot": {"acc": 25.57},
        "wikitext": {"word_perplexity": 18.58, "byte_perplexity": 1.73, "bits_per_byte": 0.79}},
    "gf2": {
        "hellaswag": {"acc_norm": 51.44},
        "piqa": {"acc": 71.16},
        "lambada_openai": {"acc": 42.29}},
    "SmolLM2-135M": {"hellaswag": {"acc_norm": 43.02}},
    "SmolLM2-360M": {"hellaswag": {"acc_norm": 56.28}},
}
# What may differ between runs: their input and seed, and where and how they ran, as on a resume,
# but for what changes the curves. All other fields are the experiment.
FREE = {"input", "seed", *LABELS, "initial_body_sha256", "parameters", "code_report",
        *FREE_ON_RESUME} - {"max_targets", "eval_windows"}


# --- Scores

def name_models(files):
    """Return a short, distinct name for each file: the model's, or the path where two share one."""
    names = [scores["name"] for scores in files]
    paths = [scores["path"].removesuffix(".json") for scores in files]
    return [name if names.count(name) == 1 else path for name, path in zip(names, paths)]


def list_remarks(first, other):
    """Return what differs between two files and yet can be compared, as strings.

    Raises ValueError if they share no task, or a task has other prompts or documents.
    """
    shared = [task for task in first["tasks"] if task in other["tasks"]]
    if not shared:
        raise ValueError(f"{other['path']} and {first['path']} have no task in common")

    def differing(key):
        return [task for task in shared if first["tasks"][task][key] != other["tasks"][task][key]]

    tasks = differing("prompts_sha256")
    if tasks:
        listed = ", ".join(tasks[:5]) + (" and others" if len(tasks) > 5 else "")
        raise ValueError(f"{other['path']} and {first['path']} did not see the same documents and "
                         f"prompts in {listed}; score both alike (--limit, --num_fewshot, "
                         "--data_dir)")
    remarks = []
    for key in ("dtype", "max_length", "lm_eval"):
        there, here = first["protocol"][key], other["protocol"][key]
        if there != here:
            remarks.append(f"{key}: {there} there, {here} here")
    for key, words in (("tokens_sha256", "token ids"), ("version", "task versions"),
                       ("n_truncated", "numbers of truncated requests")):
        tasks = differing(key)
        if tasks:
            remarks.append(f"other {words} in {len(tasks)} of {len(shared)} tasks")
    missing = sorted(set(list_rows(first)) ^ set(list_rows(other)))
    if missing:
        remarks.append(f"in one only: {', '.join(missing)}")
    return remarks


def read_values(scores, tasks, metric):
    """Return {(task, document): (value, weight)} of the documents that have the metric.

    A mean has weights 1; bits per byte has minus the log-likelihood in bits, and the bytes.
    """
    values = {}
    for task in tasks:
        docs = scores["tasks"][task]["docs"]
        for doc_id, value in zip(docs["doc_id"], docs.get(metric, ())):
            if value is None and metric == "loglikelihood":
                continue  # of a right answer that this document does not have
            value, weight = value if metric == "bits_per_byte" else (value, 1)
            value = math.nan if value is None else value  # in JSON null is what is not finite
            if metric == "bits_per_byte":
                value = -value / math.log(2)
            values[task, doc_id] = value, weight
    return values


def read_paired(first, other, tasks, metric):
    """Return float64 [n, 2] of values and weights for each of two files: a row a document."""
    a, b = read_values(first, tasks, metric), read_values(other, tasks, metric)
    both = [key for key in a if key in b]
    a, b = [a[key] for key in both], [b[key] for key in both]
    return np.array(a, float).reshape(-1, 2), np.array(b, float).reshape(-1, 2)


def compare_metric(task, metric, a, b, resamples):
    """Return the comparison of paired values and weights a, b [n, 2], as compare_pair lists it."""
    result = {"task": task, "metric": metric, "n": len(a),
              "not_finite": [int((~np.isfinite(side).all(1)).sum()) for side in (a, b)]}
    difference, weight = b[:, 0] - a[:, 0], a[:, 1]
    total = weight.sum()
    if any(result["not_finite"]) or total == 0:
        keys = ("first", "other", "difference", "low", "high", "p", "p_least", "p_holm")
        return result | dict.fromkeys(keys) | {"test": "not finite"}
    low, high, p, least = paired_subsets(difference, weight, resamples)
    result |= {"first": a[:, 0].sum() / total, "other": b[:, 0].sum() / total,
               "difference": difference.sum() / total, "low": low, "high": high,
               "test": "sign flips", "p": p, "p_least": least}
    if metric in ACCURACIES and np.isin(difference, (-1, 0, 1)).all():
        only_first, only_other = int((difference < 0).sum()), int((difference > 0).sum())
        result |= {"test": "exact McNemar", "p": mcnemar(only_first, only_other),
                   "p_least": min(1.0, 2.0 ** (1 - only_first - only_other)),
                   "only_first": only_first, "only_other": only_other}
    return result


def compare_pair(first, other, resamples):
    """Return the paired comparisons of two files: a dict for each task and metric that both have.

    Keys: task, metric, n (documents), first, other, difference (other - first), low, high (95 %;
    None where documents are too few), test, p, p_least (what so many documents can give), p_holm,
    not_finite (documents, of each); for accuracies also only_first, only_other (documents that one
    alone has right). Accuracies are shares, log-likelihoods nats a document. Without finite values
    of both for every document all results are None.
    """
    results, there = [], list_rows(other)
    for task, (tasks, _) in list_rows(first).items():
        is_page = "bits_per_byte" in first["tasks"][tasks[0]]["docs"]
        for metric in TESTED if task in there else ():
            a, b = read_paired(first, other, tasks, metric)
            if len(a) and not (is_page and metric == "loglikelihood"):
                results.append(compare_metric(task, metric, a, b, resamples))
    for metric in TESTED:
        family = [result for result in results
                  if result["metric"] == metric and result["p"] is not None]
        for result, corrected in zip(family, holm([result["p"] for result in family])):
            result["p_holm"] = corrected
    return results


def list_paper_remarks(scores, published):
    """Return how a file's scores were made otherwise than the paper's own figures, as strings."""
    remarks = []
    limit = scores["protocol"].get("limit")
    if limit:
        remarks.append(f"the first {limit} documents of each task; the paper's figures are of all "
                       "of them")
    known = set().union(*(PUBLISHED[name] for name in published))
    for row, (tasks, _) in list_rows(scores).items():
        papers = 5 if row.endswith("_5shot") else 0
        shots = {scores["tasks"][task].get("num_fewshot") or 0 for task in tasks}
        if row in known and shots != {papers}:
            listed = ", ".join(str(n) for n in sorted(shots))
            remarks.append(f"{listed}-shot in {row}; the paper's figure is {papers}-shot")
    return remarks


def compare_scores(paths, published=(), resamples=10_000):
    """Return the comparison of scores files: their metrics, and the first against each other."""
    files = [read_scores(path) for path in paths]
    first, names, remarks = files[0], name_models(files), []
    for other in files[1:]:
        told = "; ".join(list_remarks(first, other))
        if told:
            remarks.append(f"{other['path']}, against {first['path']}: {told}")
    for name, scores in zip(names, files):
        told = list_paper_remarks(scores, published) if published else []
        remarks += [f"{name}: {remark}" for remark in told]
    metrics, pairs = {}, []
    for name, scores in zip(names, files):
        metrics[name] = {task: values for task, (_, values) in list_rows(scores).items()}
    for name, other in zip(names[1:], files[1:]):
        tests = compare_pair(first, other, resamples)
        pairs.append({"first": names[0], "other": name, "tests": tests})
        for t in tests:
            for side, n in zip((names[0], name), t["not_finite"]):
                if n:
                    remarks.append(f"{side}: {t['metric']} of {t['task']} is not finite in {n} of "
                                   f"{t['n']} documents, and gets no p value")
    return {"models": names, "files": [scores["path"] for scores in files],
            "limits": [scores["protocol"].get("limit") for scores in files],
            "remarks": list(dict.fromkeys(remarks)),
            "metrics": metrics, "published": {name: PUBLISHED[name] for name in published},
            "pairs": pairs}


# --- Runs

def check_fields(run, by, best_over):
    """Raise ValueError unless --by and --best_over name fields of the first run's config.json."""
    fields = [key for key, value in run["config"].items() if np.isscalar(value)]
    asked = [("--by", by)] if by else []
    for flag, name in [*asked, *(("--best_over", name) for name in best_over)]:
        if name not in fields:
            close = difflib.get_close_matches(name, fields)
            advice = f"; did you mean {' or '.join(close)}?" if close else ", such as n_layer"
            raise ValueError(f"{flag}={name}: expected a field of the config.json of "
                             f"{run['path']}{advice}")


def check_experiment(runs, by, best_over):
    """Raise ValueError, naming the fields, unless runs were trained alike but for input, seed, `by`
    and the fields of best_over."""
    first, starts = runs[0], {}
    asked = {"--by": [by] if by else [], "--best_over": best_over}
    for run in runs:
        a, b = first["config"], run["config"]
        for flag, names in asked.items():
            for name in names:
                if b.get(name) is None:
                    raise ValueError(f"{flag}={name}: {run['path']} has no {name} in its "
                                     "config.json")
        fields = sorted({*a, *b} - FREE - {by, *best_over})
        differing = [f"{key} {a.get(key)} / {b.get(key)}" for key in fields
                     if a.get(key) != b.get(key)]
        values = [b[name] for name in best_over]
        start = starts.setdefault((b["seed"], b.get(by), *values), run)
        if b["initial_body_sha256"] != start["config"]["initial_body_sha256"]:
            differing.append(f"initial_body_sha256 of seed {b['seed']} (the first is that of "
                             f"{start['path']})")
        if differing:
            also = "; name what follows from --best_over with it, as in --best_over=max_lr,min_lr"
            raise ValueError(f"{first['path']} and {run['path']} are not the same experiment: "
                             f"{'; '.join(differing)}{also if best_over else ''}")


def check_documents(runs):
    """Raise ValueError, naming what differs, unless runs were scored alike on one set of documents.
    """
    first = runs[0]
    for run in runs:
        differing = []
        for key in ("dtype", "max_length"):
            there, here = first["heldout"].get(key), run["heldout"].get(key)
            if there != here:
                differing.append(f"{key} of the held-out score {there} / {here}")
        if not np.array_equal(first["documents"][:, 0], run["documents"][:, 0]):
            differing.append(f"the targets of {len(first['documents'])} / {len(run['documents'])} "
                             "validation documents")
        if differing:
            raise ValueError(f"{first['path']} and {run['path']} are not the same experiment: "
                             f"{'; '.join(differing)}")


def read_curve(run, points):
    """Return a run's validation losses at so many targets each."""
    return np.array([run["curve"][point] for point in points])


def summarize(seeds, base, resamples):
    """Return the figures of an interface's runs {seed: run} against the baseline's."""
    runs = list(seeds.values())
    pairs = [(seeds[seed], base[seed]) for seed in seeds if seed in base]
    losses = [run["heldout"]["loss"] for run in runs]
    loss, loss_interval = student_interval(losses)
    curves = [set(run["curve"]) for run in [*runs, *base.values()]]
    points = sorted(set.intersection(*curves))
    config = pairs[0][0]["config"]
    speeds = [run["targets_per_second"] for run in runs]
    group = {"interface": {"input": config["input"]} | said(config),
             "seeds": list(seeds), "runs": [run["run"] for run in runs],
             "losses": losses, **subtract(seeds, base, resamples),
             "bits_per_byte": np.mean([run["heldout"]["bits_per_byte"] for run in runs]).item(),
             "curve_targets": points, "curve_losses": [], "curve_differences": [],
             "targets_per_second": np.mean(speeds).item() if None not in speeds else None,
             "parameters": config.get("parameters"),
             "code_report": config.get("code_report"),
             "loss": loss, "loss_interval": loss_interval}
    for run in runs:
        group["curve_losses"].append(read_curve(run, points).tolist())
    for a, b in pairs:
        group["curve_differences"].append((read_curve(a, points) - read_curve(b, points)).tolist())
    return group


def compare_runs(runs, baseline="learned", by=None, resamples=10_000, best_over=()):
    """Return the comparison of runs: what the tables and figures show.

    Args:
        runs: as records.read_runs returns them.
        baseline: the label that the others are compared with, seed by seed, at equal `by`.
        by: a field of config.json that may differ between the runs, such as n_layer.
        best_over: fields of config.json, such as max_lr, of which each interface has its best.
    Raises ValueError if runs are not the same experiment but for input, seed, `by` and best_over,
    or have nothing to pair.
    """
    runs = [prepare_run(run, best_over) for run in runs]
    check_fields(runs[0], by, best_over)
    for run in () if best_over else runs:
        check_score(run)
    check_experiment(runs, by, best_over)
    groups, choices = choose_runs(runs, by, best_over)
    runs = list_runs(groups)
    check_documents(runs)
    weights, free = runs[0]["documents"][:, 0], FREE | {by, *best_over}
    fixed = {key: value for key, value in runs[0]["config"].items() if key not in free}
    result = {"baseline": baseline, "by": by, "best_over": list(best_over), "level": LEVEL,
              "resamples": resamples, "documents": len(weights), "targets": int(weights.sum()),
              "heldout_dtype": runs[0]["heldout"]["dtype"], "experiment": fixed, "groups": []}
    order = [baseline, *(name for _, name in groups)]  # the baseline gets black
    for value, name in sorted(groups, key=lambda group: (order.index(group[1]), group[0])):
        seeds, base = groups[value, name], groups.get((value, baseline), {})
        if not set(seeds) & set(base):
            at = f" at {by}={value}" if by else ""
            there = [f"{other} (seeds {sorted(found)})" for (v, other), found in groups.items()
                     if v == value]
            raise ValueError(f"--baseline={baseline}: no run to pair with {name}{at}; there are "
                             f"{', '.join(there)}")
        full_name = f"{name}, {by} {value}" if by else name
        group = summarize(dict(sorted(seeds.items())), base, resamples)
        result["groups"].append({"name": full_name, "label": name, "by": value, **group,
                                 "choice": choices.get((value, name))})
    return result | {"effects": find_effects(groups, resamples)}


# --- The command

def parse_args():
    """Return the command line's settings."""
    parser = argparse.ArgumentParser(
        description=__doc__, usage=argparse.SUPPRESS, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    flag = parser.add_argument
    flag("paths", nargs="+", metavar="RUN_OR_SCORES",
         help="run directories and runs.jsonl files of this command, or .json files of "
         "evaluate.py score")
    flag("--format", choices=("text", "markdown", "json"), default="text",
         help="of the output (default: %(default)s)")
    flag("--resamples", type=int, default=10_000,
         help="random subsets of the documents (default: %(default)s)")
    flag("--published", default="",
         help=f"scores: columns of the paper's own figures, as {','.join(PUBLISHED)}")
    flag("--baseline", default="learned",
         help="runs: label of the interface to compare with (default: %(default)s)")
    flag("--by", metavar="FIELD",
         help="runs: a field of config.json that may differ, such as n_layer")
    flag("--best_over", metavar="FIELD,...", default="",
         help="runs: take of each interface the runs with the best value of a field of "
         "config.json, such as max_lr, by the final loss on the validation windows, over the "
         "seeds that all values share; only these need a held-out score. Several fields, as "
         "max_lr,min_lr: the best of their combinations that occur")
    flag("--out", default="out/comparison",
         help="runs: directory to write to (default: %(default)s)")
    args = parser.parse_args()
    args.paths, args.out = [os.path.expanduser(path) for path in args.paths], Path(args.out)
    args.out = args.out.expanduser()
    args.best_over = [name for name in args.best_over.split(",") if name]
    args.published = [name for name in args.published.split(",") if name]
    of_scores = [path for path in args.paths if path.endswith(".json")]
    for path in of_scores:
        if Path(path).name == "comparison.json":
            parser.error(f"{path} cannot be compared again; give the runs.jsonl of its runs")
    if of_scores and len(of_scores) < len(args.paths):
        run = next(path for path in args.paths if path not in of_scores)
        parser.error(f"{of_scores[0]} holds scores, {run} does not: compare runs with runs and "
                     "scores with scores")
    unknown = [name for name in args.published if name not in PUBLISHED]
    if unknown:
        parser.error(f"--published={unknown[0]}: expected some of {', '.join(PUBLISHED)}")
    if args.resamples < 100:
        parser.error(f"--resamples={args.resamples}: expected 100 or more")
    taken = [name for name in args.best_over if name in ("input", "seed", args.by)]
    if taken or len(set(args.best_over)) < len(args.best_over):
        parser.error(f"--best_over={','.join(args.best_over)}: expected other fields than input, "
                     "seed and that of --by, each once")
    return args


def write_comparison(result, runs, out):
    """Write runs.jsonl, and comparison.md and the figures of compare_runs' result."""
    out.mkdir(parents=True, exist_ok=True)
    figures = "".join(f"\n![{name}]({name}.png)\n" for name in draw_runs(result, out))
    write_runs(runs, out / "runs.jsonl")
    (out / "comparison.md").write_text(describe_runs(result, True) + figures, encoding="utf-8")
    print(f"written to {out}", file=sys.stderr)


def main():
    args = parse_args()
    of_scores = args.paths[0].endswith(".json")
    describe = describe_scores if of_scores else describe_runs
    if not of_scores and args.out.exists() and not args.out.is_dir():
        raise ValueError(f"--out={args.out}: a file is there; name another directory")
    if of_scores:
        result = compare_scores(args.paths, args.published, args.resamples)
    else:
        runs = read_runs(args.paths)
        result = compare_runs(runs, args.baseline, args.by, args.resamples, args.best_over)
    if args.format == "json":
        print(to_json(result))
    else:
        print(describe(result, args.format == "markdown"))
    if not of_scores:
        write_comparison(result, runs, args.out)


if __name__ == "__main__":
    with one_line("compare.py", "compare fewer files at a time"):
        main()
