"""Compare scores files of evaluate.py: the paper's table, and paired tests on the same documents.

Models that answered the same questions are compared question by question, which the paper does not do: most of the noise of an
accuracy is which questions were asked, and that cancels. For each task, of the first file against each other one:

    difference d = mean of (score of the other - score of the first) over documents, with a paired bootstrap interval
    accuracies       exact McNemar test: of the b + c documents that one model alone has right, b ~ Binomial(b + c, 1/2)
    log-likelihoods  paired bootstrap test of the mean difference (of bits per byte, for a page: a ratio of two sums)
    across tasks     Holm's correction, for the tests of one kind on one pair of models

Usage:
    python compare.py out/paper-learned-s1/paper-00381470.json out/paper-binary-s1/paper-00381470.json
    python compare.py A.json B.json --format=markdown --published=binary,gf2

Reads files that evaluate.py score --suite or --tasks wrote; prints text, Markdown or JSON. Refuses files whose models did not see
the same documents and prompts, and marks what else differs.
"""

import argparse
import json
import math
import sys
from pathlib import Path

import numpy as np

LOWER_IS_BETTER = ("perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte")
SHOWN = ("acc", "acc_norm", "exact_match", "f1") + LOWER_IS_BETTER
# The paper's own figures (its results section), as printed there: accuracies in percent. Not measured here.
PUBLISHED = {
    "binary": {
        "hellaswag": {"acc": 40.70, "acc_norm": 52.40}, "piqa": {"acc": 70.51, "acc_norm": 71.11},
        "lambada_openai": {"acc": 42.75, "perplexity": 17.91}, "arc_easy": {"acc": 67.59, "acc_norm": 61.53},
        "arc_challenge": {"acc": 32.34, "acc_norm": 34.04}, "winogrande": {"acc": 55.33},
        "openbookqa": {"acc": 28.20, "acc_norm": 38.00}, "commonsense_qa": {"acc": 20.56}, "mmlu": {"acc": 25.88},
        "mmlu_5shot": {"acc": 25.57}, "wikitext": {"word_perplexity": 18.58, "byte_perplexity": 1.73, "bits_per_byte": 0.79}},
    "gf2": {"hellaswag": {"acc_norm": 51.44}, "piqa": {"acc": 71.16}, "lambada_openai": {"acc": 42.29}},
    "SmolLM2-135M": {"hellaswag": {"acc_norm": 43.02}},
    "SmolLM2-360M": {"hellaswag": {"acc_norm": 56.28}},
}


# ----------------------------------------------------------------------------------------------------------------------
# Reading

def read_scores(path):
    """Return a scores file as a dict, with its name. Raises ValueError if it is not one."""
    try:
        scores = json.loads(Path(path).read_text())
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: not JSON ({error})") from None
    if not isinstance(scores, dict) or not {"model", "protocol", "tasks", "groups"} <= set(scores):
        raise ValueError(f"{path}: not a scores file; expected what evaluate.py score --suite=paper writes")
    return scores | {"name": scores["model"]["name"], "path": str(path)}


def name_models(files):
    """Return a short, distinct name for each file: the model's, with its step or the file's path where that is not enough."""
    names = [Path(scores["name"]).name.removesuffix(".pt") for scores in files]
    return [name if names.count(name) == 1 else scores["path"].removesuffix(".json") for name, scores in zip(names, files)]


def list_rows(scores):
    """Return {name: (its tasks' names, its metrics)}: each group, and each task in none."""
    grouped = {task for group in scores["groups"].values() for task in group["tasks"]}
    rows = {name: ([name], task["metrics"]) for name, task in scores["tasks"].items() if name not in grouped}
    return rows | {name: (group["tasks"], group["metrics"]) for name, group in scores["groups"].items()}


def check_same(files):
    """Return remarks on what differs between files. Raises ValueError where a task they share has other prompts or documents."""
    first, remarks = files[0], []
    for other in files[1:]:
        shared = [task for task in first["tasks"] if task in other["tasks"]]
        differ = {key: [task for task in shared if first["tasks"][task][key] != other["tasks"][task][key]]
                  for key in ("prompts_sha256", "tokens_sha256", "version", "n_truncated")}
        if tasks := differ["prompts_sha256"]:
            listed = ", ".join(tasks[:5]) + (" and others" if len(tasks) > 5 else "")
            raise ValueError(f"{other['path']} and {first['path']} did not see the same documents and prompts in {listed}; "
                             "score both alike (--limit, --num_fewshot, --data_dir)")
        if not shared:
            raise ValueError(f"{other['path']} and {first['path']} have no task in common")
        told = [f"{key}: {first['protocol'][key]} there, {other['protocol'][key]} here"
                for key in ("dtype", "max_length", "lm_eval") if first["protocol"][key] != other["protocol"][key]]
        words = {"tokens_sha256": "token ids", "version": "task versions", "n_truncated": "numbers of truncated requests"}
        told += [f"other {what} in {len(differ[key])} of {len(shared)} tasks" for key, what in words.items() if differ[key]]
        missing = sorted(set(list_rows(first)) ^ set(list_rows(other)))
        told += [f"in one only: {', '.join(missing)}"] if missing else []
        remarks += [f"{other['path']}, against {first['path']}: {'; '.join(told)}"] if told else []
    return remarks


def read_paired(first, other, tasks, metric):
    """Return float64 [n, 2] of values and weights for each of two files: one row a document, in the same order.

    A mean has weights 1; bits per byte has minus the log-likelihood in bits, and the bytes.
    """
    both = []
    for scores in (first, other):
        rows = {}
        for task in tasks:
            docs = scores["tasks"][task]["docs"]
            rows |= {(task, doc_id): value for doc_id, value in zip(docs["doc_id"], docs.get(metric, ()))}
        both.append(rows)
    keys = [key for key in both[0] if key in both[1] and both[0][key] is not None and both[1][key] is not None]
    if metric == "bits_per_byte":
        return [np.array([(-rows[key][0] / math.log(2), rows[key][1]) for key in keys], float).reshape(-1, 2) for rows in both]
    return [np.array([(rows[key], 1) for key in keys], float).reshape(-1, 2) for rows in both]


# ----------------------------------------------------------------------------------------------------------------------
# Statistics

def mcnemar(b, c):
    """Return the two-sided p value of the exact McNemar test: b and c documents that one model alone has right.

    Under the null hypothesis b ~ Binomial(b + c, 1/2); twice the smaller tail, at most 1 (McNemar 1947; exact: Liddell 1976).
    """
    n, tail, term = b + c, 0, 1  # whole numbers, so that thousands of documents lose no digit
    for k in range(min(b, c) + 1):
        tail += term
        term = term * (n - k) // (k + 1)
    return min(1.0, 2 * tail / 2**n)


def paired_bootstrap(difference, weight, resamples, seed=0, level=0.95):
    """Return (low, high, p) of sum(difference) / sum(weight) when documents are drawn anew, with replacement.

    Args:
        difference, weight: float64 [n], of each document; weight 1 gives the mean.
    The interval is the percentile interval (Efron 1979). p is two-sided: twice the share of resamples on the far side of 0, each
    side counting itself once (Davison and Hinkley 1997, 4.2.3), so it is never 0. Without any difference p = 1.
    """
    if not difference.any():
        return 0.0, 0.0, 1.0
    generator, n, drawn = np.random.default_rng(seed), len(difference), []
    for _ in range(0, resamples, rows := max(1, 10**7 // n)):
        index = generator.integers(n, size=(min(rows, resamples - len(drawn) * rows), n))
        drawn.append(difference[index].sum(1) / weight[index].sum(1))
    drawn = np.concatenate(drawn)
    low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2])
    p = 2 * (1 + min((drawn <= 0).sum(), (drawn >= 0).sum())) / (1 + resamples)
    return float(low), float(high), min(1.0, float(p))


def holm(p_values):
    """Return p values corrected for their number, in their order: the i-th smallest times n - i, monotone (Holm 1979)."""
    order = np.argsort(p_values, kind="stable")
    n, corrected, highest = len(order), np.empty(len(order)), 0.0
    for i, place in enumerate(order):
        highest = max(highest, min(1.0, (n - i) * p_values[place]))
        corrected[place] = highest
    return corrected.tolist()


def compare_pair(first, other, resamples):
    """Return the paired comparisons of two files: a list of dicts, one for each task and metric that both have.

    Keys: task, metric, n (documents), first, other, difference (other - first), low, high (95 %), test, p, p_holm; for accuracies
    also only_first, only_other (documents that one alone has right). Accuracies are shares, log-likelihoods nats a document.
    """
    results = []
    for task, (tasks, _) in list_rows(first).items():
        if task not in list_rows(other):
            continue
        for metric in ("acc", "acc_norm", "exact_match", "loglikelihood", "bits_per_byte"):
            a, b = read_paired(first, other, tasks, metric)
            if not len(a) or metric == "loglikelihood" and "bits_per_byte" in first["tasks"][tasks[0]]["docs"]:
                continue
            difference, weight = b[:, 0] - a[:, 0], a[:, 1]
            low, high, p = paired_bootstrap(difference, weight, resamples)
            result = {"task": task, "metric": metric, "n": len(a), "first": a[:, 0].sum() / weight.sum(),
                      "other": b[:, 0].sum() / weight.sum(), "difference": difference.sum() / weight.sum(), "low": low,
                      "high": high, "test": "paired bootstrap", "p": p}
            if metric in ("acc", "acc_norm", "exact_match") and set(np.unique(difference)) <= {-1.0, 0.0, 1.0}:
                alone = {"only_first": int((difference < 0).sum()), "only_other": int((difference > 0).sum())}
                result |= {"test": "exact McNemar", "p": mcnemar(*alone.values()), **alone}
            results.append(result)
    for metric in {result["metric"] for result in results}:
        family = [result for result in results if result["metric"] == metric]
        for result, corrected in zip(family, holm([result["p"] for result in family])):
            result |= {"p_holm": corrected, "family": len(family)}
    return results


# ----------------------------------------------------------------------------------------------------------------------
# Tables

def format_value(metric, value, error=None):
    """Return a metric as the paper prints it: accuracies in percent with their standard error, the others as they are."""
    if value is None:
        return "-"
    scale = 1 if metric in LOWER_IS_BETTER else 100
    return f"{scale * value:.2f}" + (f" ±{scale * error:.2f}" if isinstance(error, float) else "")


def build_table(files, names, published):
    """Return (header, rows) of strings: a row for each task and metric, a column for each model, then the paper's own columns."""
    rows = []
    for task in dict.fromkeys(task for scores in files for task in list_rows(scores)):
        metrics = [list_rows(scores).get(task, ([], {}))[1] for scores in files]
        for metric in SHOWN:
            if any(metric in values for values in metrics):
                paper = [PUBLISHED[name].get(task, {}).get(metric) for name in published]
                rows.append([task, metric + (" (lower is better)" if metric in LOWER_IS_BETTER else ", %"),
                             *(format_value(metric, values.get(metric), values.get(f"{metric}_stderr")) for values in metrics),
                             *("-" if value is None else f"{value:.2f}" for value in paper)])
    return ["task", "metric", *names, *(f"paper: {name}" for name in published)], rows


def build_statistics(results):
    """Return (header, rows) of strings of compare_pair's results."""
    rows = []
    for r in results:
        scale = 100 if r["test"] == "exact McNemar" else 1
        unit = "points" if scale == 100 else "bits/byte" if r["metric"] == "bits_per_byte" else "nats"
        rows.append([r["task"], r["metric"], f"{r['n']:,}", f"{scale * r['difference']:+.3f} {unit}",
                     f"[{scale * r['low']:+.3f}, {scale * r['high']:+.3f}]",
                     f"{r['only_first']} / {r['only_other']}" if "only_first" in r else "", r["test"], f"{r['p']:.4g}",
                     f"{r['p_holm']:.4g}"])
    return ["task", "metric", "documents", "difference", "95 % interval", "only first / other right", "test", "p", "p (Holm)"], rows


def print_table(header, rows, markdown):
    """Print a table of strings, as Markdown or in aligned columns."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    for number, row in enumerate([header, *rows]):
        cells = [cell.ljust(width) if i < 2 else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths))]
        print("| " + " | ".join(cells) + " |" if markdown else "  ".join(cells).rstrip())
        if markdown and number == 0:
            print("| " + " | ".join("---" if i < 2 else "---:" for i in range(len(header))) + " |")
    print()


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, usage=argparse.SUPPRESS, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="SCORES.json", help="of evaluate.py score; each is compared with the first")
    parser.add_argument("--format", choices=("text", "markdown", "json"), default="text", help="of the output (default: %(default)s)")
    parser.add_argument("--published", default="", help=f"columns of the paper's own figures, as {','.join(PUBLISHED)}")
    parser.add_argument("--resamples", type=int, default=10_000, help="of the bootstrap (default: %(default)s)")
    args = parser.parse_args()
    args.published = [name for name in args.published.split(",") if name]
    if unknown := [name for name in args.published if name not in PUBLISHED]:
        parser.error(f"--published={unknown[0]}: expected some of {', '.join(PUBLISHED)}")
    if args.resamples < 100:
        parser.error(f"--resamples={args.resamples}: expected 100 or more")
    return args


def main():
    args = parse_args()
    files = [read_scores(path) for path in args.files]
    remarks, names = check_same(files), name_models(files)
    pairs = [(names[0], name, compare_pair(files[0], other, args.resamples)) for name, other in zip(names[1:], files[1:])]
    if args.format == "json":
        print(json.dumps({"models": names, "files": args.files, "remarks": remarks,
                          "metrics": {name: {task: metrics for task, (_, metrics) in list_rows(scores).items()}
                                      for name, scores in zip(names, files)},
                          "published": {name: PUBLISHED[name] for name in args.published},
                          "pairs": [{"first": first, "other": other, "tests": tests} for first, other, tests in pairs]}, indent=1))
        return
    markdown = args.format == "markdown"
    print_table(*build_table(files, names, args.published), markdown)
    for remark in remarks:
        print(f"NOTE: {remark}\n")
    for first, other, tests in pairs:
        print(f"{'**' * markdown}{other} - {first}, on the same documents{'**' * markdown} (positive: {other} is higher)\n")
        print_table(*build_statistics(tests), markdown)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ValueError, OSError) as error:
        sys.exit(f"compare.py: {error}")
