"""Compare training runs, or benchmark scores: tables, paired statistics and figures.

What both sides of a comparison share cancels, and most noise is shared: which questions were asked, which documents
were held out, which weights and windows a seed drew. So everything is paired, which the paper does not do.

    scores    of each task, the difference of the first file to each other one on the same documents
              accuracies       exact McNemar test: of b + c documents that one alone has right, b ~ Binomial(b + c, 1/2)
              log-likelihoods  paired bootstrap of the mean difference (of bits per byte, for a page: a ratio of sums)
              across tasks     Holm's correction, for the tests of one kind on one pair of models
    runs      of each input interface, the difference to --baseline in held-out loss, with two intervals
              seeds            Student's t over the differences of single seeds: other weights and windows
              documents        paired bootstrap of documents, losses averaged over the seeds: other documents

Usage:
    python compare.py out/smoke-*                      runs: every interface against --baseline=learned
    python compare.py out/depth-* --by=n_layer         the same at several depths
    python compare.py A.json B.json --format=markdown --published=binary,gf2

Reads run directories (config.json, log.jsonl, the newest heldout-STEP.json), or files that evaluate.py score --suite
or --tasks wrote. Prints text, Markdown or JSON; of runs, writes comparison.md, comparison.json and figures to --out.
Refuses models that did not see the same documents and prompts, and runs that differ in more than input and seed.
"""

import argparse
import json
import math
import sys
from pathlib import Path

import numpy as np

from machinery.figures import draw_runs
from machinery.statistics import (
    LEVEL,
    holm,
    mcnemar,
    paired_bootstrap,
    student_interval,
)

LOWER_IS_BETTER = ("perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte")
SHOWN = ("acc", "acc_norm", "exact_match", "f1") + LOWER_IS_BETTER
# The paper's own figures (its results section), as printed there: accuracies in percent. Not measured here.
PUBLISHED = {
    "binary": {
        "hellaswag": {"acc": 40.70, "acc_norm": 52.40}, "piqa": {"acc": 70.51, "acc_norm": 71.11},
        "lambada_openai": {"acc": 42.75, "perplexity": 17.91}, "arc_easy": {"acc": 67.59, "acc_norm": 61.53},
        "arc_challenge": {"acc": 32.34, "acc_norm": 34.04}, "winogrande": {"acc": 55.33},
        "openbookqa": {"acc": 28.20, "acc_norm": 38.00}, "commonsense_qa": {"acc": 20.56}, "mmlu": {"acc": 25.88},
        "mmlu_5shot": {"acc": 25.57},
        "wikitext": {"word_perplexity": 18.58, "byte_perplexity": 1.73, "bits_per_byte": 0.79}},
    "gf2": {"hellaswag": {"acc_norm": 51.44}, "piqa": {"acc": 71.16}, "lambada_openai": {"acc": 42.29}},
    "SmolLM2-135M": {"hellaswag": {"acc_norm": 43.02}},
    "SmolLM2-360M": {"hellaswag": {"acc_norm": 56.28}},
}
# The fields of config.json that describe an input beside its name, as a label says them, and what goes without saying.
INPUT_FIELDS = {"code_seed": ("code {}", None), "code_offset": ("offset {}", "0"), "code_values": ("{}", "01"),
                "code_scale": ("scale {}", "1"), "lift": ("{}", "tile"), "table_free": ("table-free", "False")}
# What else may differ between runs: where and how they ran, what they reported. All other fields are the experiment.
FREE = {"input", "seed", *INPUT_FIELDS, "preset", "data", "out", "device", "micro_batch", "parallel", "compile", "timeout",
        "checkpoint_activations", "eval_every", "save_every", "log_every", "keep", "keep_every", "profile", "tensorboard",
        "resume", "dry_run", "targets_per_second", "initial_body_sha256", "parameters", "code_report"}


# ----------------------------------------------------------------------------------------------------------------------
# Statistics and tables


def format_table(header, rows, markdown, left=1):
    """Return a table of strings, as Markdown or in aligned columns; the first `left` columns are flush left."""
    lines, widths = [], [max(map(len, column)) for column in zip(header, *rows)]
    for row in [header, *rows]:
        cells = [cell.ljust(widths[i]) if i < left else cell.rjust(widths[i]) for i, cell in enumerate(row)]
        lines.append("| " + " | ".join(cells) + " |" if markdown else "  ".join(cells).rstrip())
    if markdown:
        lines.insert(1, "| " + " | ".join("---" if i < left else "---:" for i in range(len(header))) + " |")
    return "\n".join(lines)


# ----------------------------------------------------------------------------------------------------------------------
# Scores

def read_json(path):
    """Return what a JSON file, or each line of a .jsonl file, holds. Raises ValueError if it is not JSON."""
    try:
        text = Path(path).read_text()
        return json.loads(text) if Path(path).suffix == ".json" else [json.loads(line) for line in text.splitlines()]
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: not JSON ({error})") from None


def read_scores(path):
    """Return a scores file as a dict, with its name. Raises ValueError if it is not one."""
    scores = read_json(path)
    if not isinstance(scores, dict) or not {"model", "protocol", "tasks", "groups"} <= set(scores):
        raise ValueError(f"{path}: not a scores file; expected what evaluate.py score --suite=paper writes")
    return scores | {"name": scores["model"]["name"], "path": str(path)}


def name_models(files):
    """Return a short, distinct name for each file: the model's, or the file's path where that is not enough."""
    names = [Path(scores["name"]).name.removesuffix(".pt") for scores in files]
    return [name if names.count(name) == 1 else f["path"].removesuffix(".json") for name, f in zip(names, files)]


def list_rows(scores):
    """Return {name: (its tasks' names, its metrics)}: each group, and each task in none."""
    grouped = {task for group in scores["groups"].values() for task in group["tasks"]}
    rows = {name: ([name], task["metrics"]) for name, task in scores["tasks"].items() if name not in grouped}
    return rows | {name: (group["tasks"], group["metrics"]) for name, group in scores["groups"].items()}


def check_same(files):
    """Return remarks on what differs between files. Raises ValueError if a task has other prompts or documents."""
    first, remarks = files[0], []
    for other in files[1:]:
        shared = [task for task in first["tasks"] if task in other["tasks"]]
        differ = {key: [task for task in shared if first["tasks"][task][key] != other["tasks"][task][key]]
                  for key in ("prompts_sha256", "tokens_sha256", "version", "n_truncated")}
        if tasks := differ["prompts_sha256"]:
            listed = ", ".join(tasks[:5]) + (" and others" if len(tasks) > 5 else "")
            raise ValueError(f"{other['path']} and {first['path']} did not see the same documents and prompts in "
                             f"{listed}; score both alike (--limit, --num_fewshot, --data_dir)")
        if not shared:
            raise ValueError(f"{other['path']} and {first['path']} have no task in common")
        told = [f"{key}: {first['protocol'][key]} there, {other['protocol'][key]} here"
                for key in ("dtype", "max_length", "lm_eval") if first["protocol"][key] != other["protocol"][key]]
        words = {"tokens_sha256": "token ids", "version": "task versions",
                 "n_truncated": "numbers of truncated requests"}
        told += [f"other {words[key]} in {len(differ[key])} of {len(shared)} tasks" for key in words if differ[key]]
        missing = sorted(set(list_rows(first)) ^ set(list_rows(other)))
        told += [f"in one only: {', '.join(missing)}"] if missing else []
        remarks += [f"{other['path']}, against {first['path']}: {'; '.join(told)}"] if told else []
    return remarks


def read_paired(first, other, tasks, metric):
    """Return float64 [n, 2] of values and weights for each of two files: one row a document, in the same order.

    A mean has weights 1; bits per byte has minus the log-likelihood in bits, and the bytes.
    """
    both = {}, {}
    for rows, scores in zip(both, (first, other)):
        for task in tasks:
            docs = scores["tasks"][task]["docs"]
            for doc_id, value in zip(docs["doc_id"], docs.get(metric, ())):
                if value is not None:
                    rows[task, doc_id] = (-value[0] / math.log(2), value[1]) if metric == "bits_per_byte" else (value, 1)
    keys = [key for key in both[0] if key in both[1]]
    return [np.array([rows[key] for key in keys], float).reshape(-1, 2) for rows in both]


def compare_pair(first, other, resamples):
    """Return the paired comparisons of two files: a list of dicts, one for each task and metric that both have.

    Keys: task, metric, n (documents), first, other, difference (other - first), low, high (95 %), test, p, p_holm; for
    accuracies also only_first, only_other (documents that one alone has right). Accuracies are shares, log-likelihoods
    nats a document.
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
            result["p_holm"] = corrected
    return results


def format_value(metric, value, error=None):
    """Return a metric as the paper prints it: accuracies in percent with their standard error, others as they are."""
    if value is None:
        return "-"
    scale = 1 if metric in LOWER_IS_BETTER else 100
    return f"{scale * value:.2f}" + (f" ±{scale * error:.2f}" if isinstance(error, float) else "")


def compare_scores(paths, published=(), resamples=10_000):
    """Return the comparison of scores files as plain values: the metrics of each, and the first against each other."""
    files = [read_scores(path) for path in paths]
    remarks, names = check_same(files), name_models(files)
    return {"models": names, "files": [scores["path"] for scores in files], "remarks": remarks,
            "metrics": {name: {task: metrics for task, (_, metrics) in list_rows(scores).items()}
                        for name, scores in zip(names, files)},
            "published": {name: PUBLISHED[name] for name in published},
            "pairs": [{"first": names[0], "other": name, "tests": compare_pair(files[0], other, resamples)}
                      for name, other in zip(names[1:], files[1:])]}


def build_table(result):
    """Return (header, rows) of strings: a row for each task and metric, a column for each model, then the paper's."""
    rows = []
    for task in dict.fromkeys(task for tasks in result["metrics"].values() for task in tasks):
        metrics = [tasks.get(task, {}) for tasks in result["metrics"].values()]
        for metric in SHOWN:
            if any(metric in values for values in metrics):
                paper = [tasks.get(task, {}).get(metric) for tasks in result["published"].values()]
                rows.append([task, metric + (" (lower is better)" if metric in LOWER_IS_BETTER else ", %"),
                             *(format_value(metric, m.get(metric), m.get(f"{metric}_stderr")) for m in metrics),
                             *("-" if value is None else f"{value:.2f}" for value in paper)])
    return ["task", "metric", *result["models"], *(f"paper: {name}" for name in result["published"])], rows


def build_statistics(results):
    """Return (header, rows) of strings of compare_pair's results."""
    rows = []
    for r in results:
        unit = {"loglikelihood": "nats", "bits_per_byte": "bits/byte"}.get(r["metric"], "points")
        scale = 100 if unit == "points" else 1
        rows.append([r["task"], r["metric"], f"{r['n']:,}", f"{scale * r['difference']:+.3f} {unit}",
                     f"[{scale * r['low']:+.3f}, {scale * r['high']:+.3f}]",
                     f"{r['only_first']} / {r['only_other']}" if "only_first" in r else "", r["test"], f"{r['p']:.4g}",
                     f"{r['p_holm']:.4g}"])
    return ["task", "metric", "documents", "difference", f"{LEVEL:.0%} interval", "only first / other right", "test",
            "p", "p (Holm)"], rows


def describe_scores(result, markdown):
    """Return the report of compare_scores' result: the table, remarks, and the tests of each pair."""
    parts = [format_table(*build_table(result), markdown, left=2), *(f"NOTE: {remark}" for remark in result["remarks"])]
    for pair in result["pairs"]:
        first, other, bold = pair["first"], pair["other"], "**" * markdown
        parts += [f"{bold}{other} - {first}, on the same documents{bold} (positive: {other} is higher)",
                  format_table(*build_statistics(pair["tests"]), markdown, left=2)]
    return "\n\n".join(parts) + "\n"


# ----------------------------------------------------------------------------------------------------------------------
# Runs

def label(config):
    """Return the name of a run's input interface: binary, gf2 code 7 (its code_seed), binary pm1, binary scale matched ..."""
    words = [config["input"]]
    for field, (text, silent) in INPUT_FIELDS.items():
        said = field != "code_seed" or config["input"] in ("gf2", "random")
        if said and str(config.get(field, silent)) != str(silent):
            words.append(text.format(config[field]))
    return " ".join(words)


def read_run(path):
    """Return a run directory as a dict: path, label, config, curve (targets -> loss on the fixed validation windows),
    heldout (its held-out score), documents (float64 [n, 2]: targets and nats) and targets_per_second (the median).

    Raises FileNotFoundError for a file that is not there, ValueError for a run that is not finished and scored.
    """
    path = Path(path)
    if not (path / "config.json").exists():
        raise FileNotFoundError(f"{path}: no config.json; name run directories that train.py wrote")
    config, rows = read_json(path / "config.json"), read_json(path / "log.jsonl")
    heldout = read_json(scores[-1]) if (scores := sorted(path.glob("heldout-*.json"))) else {"step": 0}
    done, scored = max((row["targets"] for row in rows), default=0), heldout["step"] * config["tokens_per_step"]
    if done < config["max_targets"] or scored != done:
        raise ValueError(f"{path}: {done:,} of {config['max_targets']:,} targets trained, {scored:,} at its held-out "
                         f"score; finish it with train.py --resume, and score it with python evaluate.py score {path}")
    return {"path": str(path), "label": label(config), "config": config, "heldout": heldout,
            "curve": {row["targets"]: row["val_loss"] for row in rows if "val_loss" in row},
            "documents": np.array([[d["targets"], d["nats"]] for d in heldout["documents"]], float),
            "targets_per_second": np.median([row["targets_per_second"] for row in rows if "loss" in row]).item()}


def check_same_experiment(runs, by):
    """Raise ValueError, naming the fields, unless runs differ in their input, their seed and the field `by` alone."""
    first, starts = runs[0], {}
    for run in runs:
        a, b = first["config"], run["config"]
        differing = [f"{key} {a.get(key)} / {b.get(key)}" for key in sorted({*a, *b} - FREE - {by})
                     if a.get(key) != b.get(key)]
        start = starts.setdefault((b["seed"], b.get(by)), run)
        if b["initial_body_sha256"] != start["config"]["initial_body_sha256"]:
            differing.append(f"initial_body_sha256 of seed {b['seed']} (the first is that of {start['path']})")
        differing += [f"{key} of the held-out score {first['heldout'].get(key)} / {run['heldout'].get(key)}"
                      for key in ("dtype", "max_length") if first["heldout"].get(key) != run["heldout"].get(key)]
        if not np.array_equal(first["documents"][:, 0], run["documents"][:, 0]):
            differing.append(f"the targets of {len(first['documents'])} / {len(run['documents'])} validation documents")
        if differing:
            raise ValueError(f"{first['path']} and {run['path']} are not the same experiment: {'; '.join(differing)}")


def compare_runs(paths, baseline="learned", by=None, resamples=10_000):
    """Return the comparison of run directories as plain values: what comparison.json holds and the figures show.

    Args:
        baseline: the label that the others are compared with, seed by seed, at equal values of the field `by`.
        by: a field of config.json that may differ between the runs, such as n_layer.
    Raises ValueError if runs are not the same experiment but for input, seed and `by`, or have nothing to pair.
    """
    runs, groups = [read_run(path) for path in paths], {}
    check_same_experiment(runs, by)
    for run in runs:
        seeds = groups.setdefault((run["config"].get(by), run["label"]), {})
        if (twin := seeds.setdefault(run["config"]["seed"], run)) is not run:
            raise ValueError(f"{twin['path']} and {run['path']} are both {run['label']} of seed {run['config']['seed']}"
                             "; leave one out")
    weights, names = runs[0]["documents"][:, 0], [baseline, *(name for _, name in groups)]  # the baseline gets black
    result = {"baseline": baseline, "by": by, "level": LEVEL, "resamples": resamples, "documents": len(weights),
              "targets": int(weights.sum()), "heldout_dtype": runs[0]["heldout"]["dtype"],
              "experiment": {key: v for key, v in runs[0]["config"].items() if key not in FREE | {by}}, "groups": []}
    for value, name in sorted(groups, key=lambda group: (names.index(group[1]), group[0])):
        seeds, base = dict(sorted(groups[value, name].items())), groups.get((value, baseline), {})
        pairs = [(run, base[seed]) for seed, run in seeds.items() if seed in base]
        if not pairs:
            at, there = f" at {by}={value}" if by else "", [f"{other} (seeds {sorted(seeds)})" for (v, other), seeds
                                                            in groups.items() if v == value]
            raise ValueError(f"--baseline={baseline}: no run to pair with {name}{at}; there are {', '.join(there)}")
        config, losses = pairs[0][0]["config"], [run["heldout"]["loss"] for run in seeds.values()]
        differences = [a["heldout"]["loss"] - b["heldout"]["loss"] for a, b in pairs]
        nats = np.mean([a["documents"][:, 1] - b["documents"][:, 1] for a, b in pairs], axis=0)
        points = sorted(set.intersection(*(set(run["curve"]) for run in [*seeds.values(), *base.values()])))
        group = {"name": name + (f", {by} {value}" if by else ""), "label": name, "by": value, "seeds": list(seeds),
                 "runs": [run["path"] for run in seeds.values()], "losses": losses, "differences": differences,
                 "bits_per_byte": np.mean([run["heldout"]["bits_per_byte"] for run in seeds.values()]).item(),
                 "document_interval": paired_bootstrap(nats, weights, resamples)[:2], "curve_targets": points,
                 "curve_losses": [[run["curve"][t] for t in points] for run in seeds.values()],
                 "curve_differences": [[a["curve"][t] - b["curve"][t] for t in points] for a, b in pairs],
                 "targets_per_second": np.mean([run["targets_per_second"] for run in seeds.values()]).item(),
                 "parameters": config.get("parameters"), "code_report": config.get("code_report")}
        group["loss"], group["loss_interval"] = student_interval(losses)
        group["difference"], group["seed_interval"] = student_interval(differences)
        result["groups"].append(group)
    return result


def describe_runs(result, markdown):
    """Return the report of compare_runs' result: losses and differences, what they mean, sizes and speed."""
    e, base, by, losses, sizes = result["experiment"], result["baseline"], result["by"], [], []
    for g in result["groups"]:
        d, half, (low, high), n = g["difference"], g["seed_interval"], g["document_interval"], g["parameters"] or {}
        loss = f"{g['loss']:.4f}" + (f" ±{g['loss_interval']:.4f}" if g["loss_interval"] else "")
        over_seeds = f"{d - half:+.4f} to {d + half:+.4f}" if half is not None else "one seed"
        paired = [f"{d:+.4f}", over_seeds, f"{low:+.4f} to {high:+.4f}"] if g["label"] != base else ["baseline", "", ""]
        losses.append([g["name"], str(len(g["seeds"])), loss, f"{g['bits_per_byte']:.4f}", *paired])
        counts = [f"{n[key]:,}" if key in n else "-" for key in ("input", "body", "head", "trainable", "buffers")]
        sizes.append([g["name"], *counts, f"{g['targets_per_second']:,.0f}"])
    shown = [f"{key} {e[key]}" for key in ("n_layer", "n_embd", "n_head", "n_ffn", "block_size", "vocab_size",
                                           "max_targets", "tokens_per_step", "max_lr", "dtype") if key in e]
    return "\n\n".join([
        f"{', '.join(shown)}; data {e['data_fingerprint'][:12]}. Only input, seed{f', {by}' if by else ''} differ.",
        format_table(["interface", "seeds", "held-out loss (nats)", "bits per byte", f"minus {base}",
                      f"{LEVEL:.0%} over seeds", f"{LEVEL:.0%} over documents"], losses, markdown),
        f"Loss: nats per target on {result['documents']:,} validation documents ({result['targets']:,} targets, scored "
        f"in {result['heldout_dtype']}), mean over seeds ± Student's t interval. Minus {base}: mean difference of runs "
        "of the same seed. Over seeds: Student's t interval of these differences. Over documents: percentile interval "
        f"of a paired bootstrap: whole documents are resampled {result['resamples']:,} times, the same for both sides; "
        "losses are averaged over the seeds before, and seeds are not resampled.",
        format_table(["parameters", "input", "body", "head", "trainable", "fixed buffers", "targets/s"], sizes,
                     markdown),
        "targets/s: median of a run's log, mean over seeds, on the machines that trained them."]) + "\n"


# ----------------------------------------------------------------------------------------------------------------------
# Figures of runs: 8.3 inches wide, for a page 830 pixels wide


# ----------------------------------------------------------------------------------------------------------------------

def parse_args():
    """Return the command line's settings."""
    parser = argparse.ArgumentParser(description=__doc__, usage=argparse.SUPPRESS, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    flag = parser.add_argument
    flag("paths", nargs="+", metavar="RUN_OR_SCORES", help="run directories, or .json files of evaluate.py score")
    flag("--format", choices=("text", "markdown", "json"), default="text", help="of the output (default: %(default)s)")
    flag("--resamples", type=int, default=10_000, help="of the bootstrap (default: %(default)s)")
    flag("--published", default="", help=f"scores: columns of the paper's own figures, as {','.join(PUBLISHED)}")
    flag("--baseline", default="learned", help="runs: label of the interface to compare with (default: %(default)s)")
    flag("--by", metavar="FIELD", help="runs: a field of config.json that may differ, such as n_layer")
    flag("--out", default="out/comparison", help="runs: directory to write to (default: %(default)s)")
    args = parser.parse_args()
    args.published = [name for name in args.published.split(",") if name]
    if unknown := [name for name in args.published if name not in PUBLISHED]:
        parser.error(f"--published={unknown[0]}: expected some of {', '.join(PUBLISHED)}")
    if args.resamples < 100:
        parser.error(f"--resamples={args.resamples}: expected 100 or more")
    return args


def main():
    args = parse_args()
    if runs := not args.paths[0].endswith(".json"):
        result, describe = compare_runs(args.paths, args.baseline, args.by, args.resamples), describe_runs
    else:
        result, describe = compare_scores(args.paths, args.published, args.resamples), describe_scores
    print(json.dumps(result, indent=1) if args.format == "json" else describe(result, args.format == "markdown"))
    if runs:
        out = Path(args.out)
        out.mkdir(parents=True, exist_ok=True)
        figures = "".join(f"\n![{name}]({name}.png)\n" for name in draw_runs(result, out))
        (out / "comparison.json").write_text(json.dumps(result, indent=1))
        (out / "comparison.md").write_text(describe(result, True) + figures)
        print(f"written to {out}", file=sys.stderr)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ValueError, OSError) as error:
        sys.exit(f"compare.py: {error}")
