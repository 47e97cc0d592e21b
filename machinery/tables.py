"""The reports of compare.py, as text, Markdown or JSON: tables of scores and of runs."""

import json
import math

from machinery.choices import say
from machinery.scores import plain
from machinery.statistics import LEVEL

ACCURACIES = ("acc", "acc_norm", "exact_match")  # shares of documents
LOWER_IS_BETTER = ("perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte")
SHOWN = (*ACCURACIES, "f1", *LOWER_IS_BETTER)


def to_json(result):
    """Return plain values as JSON, with null for what is not finite, which JSON cannot say."""
    return json.dumps(plain(result), indent=1, allow_nan=False)


def format_table(header, rows, markdown, left=1):
    """Return a table of strings, aligned or as Markdown; `left` columns are flush left."""
    widths = [max(map(len, column)) for column in zip(header, *rows)]
    lines = []
    for row in [header, *rows]:
        cells = [cell.ljust(width) for cell, width in zip(row[:left], widths)]
        cells += [cell.rjust(width) for cell, width in zip(row[left:], widths[left:])]
        lines.append(f"| {' | '.join(cells)} |" if markdown else "  ".join(cells).rstrip())
    if markdown:
        rule = ["---"] * left + ["---:"] * (len(header) - left)
        lines.insert(1, f"| {' | '.join(rule)} |")
    return "\n".join(lines)


def format_value(metric, values):
    """Return a metric as the paper prints it: accuracies in percent, with their standard error."""
    if metric not in values:
        return "-"
    value, error = values[metric], values.get(f"{metric}_stderr")
    if value is None or not math.isfinite(value):  # in JSON null is what is not finite
        return "not finite"
    scale = 1 if metric in LOWER_IS_BETTER else 100
    return f"{scale * value:.2f}" + (f" ±{scale * error:.2f}" if isinstance(error, float) else "")


def build_table(result):
    """Return (header, rows) of strings: a column for each model, then the paper's."""
    measured, published = result["metrics"].values(), result["published"].values()
    tasks = {}  # in order, each once
    for model in measured:
        tasks |= dict.fromkeys(model)
    rows = []
    for task in tasks:
        metrics = [model.get(task, {}) for model in measured]
        paper = [model.get(task, {}) for model in published]
        for metric in SHOWN:
            if not any(metric in values for values in metrics):
                continue
            unit = " (lower is better)" if metric in LOWER_IS_BETTER else ", %"
            rows.append([task, metric + unit, *(format_value(metric, values) for values in metrics),
                         *(f"{values[metric]:.2f}" if metric in values else "-"
                           for values in paper)])
    models = [f"{name} (first {limit} documents)" if limit else name
              for name, limit in zip(result["models"], result["limits"])]
    papers = [f"paper: {name}" for name in result["published"]]
    return ["task", "metric", *models, *papers], rows


def build_statistics(results):
    """Return (header, rows) of strings of compare_pair's results."""
    units = {"loglikelihood": "nats", "bits_per_byte": "bits/byte"}
    rows = []
    for r in results:
        if r["p"] is None:
            rows.append([r["task"], r["metric"], f"{r['n']:,}", "-", "-", "", r["test"], "-", "-"])
            continue
        unit = units.get(r["metric"], "points")
        scale = 100 if unit == "points" else 1
        difference = f"{scale * r['difference']:+.3f} {unit}"
        interval = "too few documents"
        if r["low"] is not None:
            interval = f"[{scale * r['low']:+.3f}, {scale * r['high']:+.3f}]"
        p = f"{r['p']:.4g}"
        if r["p_least"] > 0.001:
            p += f" (least possible {r['p_least']:.2g})"
        alone = f"{r['only_first']} / {r['only_other']}" if "only_first" in r else ""
        rows.append([r["task"], r["metric"], f"{r['n']:,}", difference, interval, alone, r["test"],
                     p, f"{r['p_holm']:.4g}"])
    return ["task", "metric", "documents", "difference", f"{LEVEL:.0%} interval",
            "only first / other right", "test", "p", "p (Holm)"], rows


def describe_scores(result, markdown):
    """Return the report of compare_scores' result: the table, remarks, each pair's tests."""
    parts = [format_table(*build_table(result), markdown, left=2)]
    parts += [f"NOTE: {remark}" for remark in result["remarks"]]
    bold = "**" if markdown else ""
    for pair in result["pairs"]:
        first, other = pair["first"], pair["other"]
        parts.append(f"{bold}{other} - {first}, on the same documents{bold} "
                     f"(positive: {other} is higher)")
        parts.append(format_table(*build_statistics(pair["tests"]), markdown, left=2))
    return "\n\n".join(parts) + "\n"


def loss_row(group, base):
    """Return the cells of a group in the table of losses."""
    loss = f"{group['loss']:.4f}"
    if group["loss_interval"]:
        loss += f" ±{group['loss_interval']:.4f}"
    row = [group["name"], str(len(group["seeds"])), loss, f"{group['bits_per_byte']:.4f}"]
    if group["label"] == base:
        return [*row, "baseline", "", ""]
    return [*row, *difference_cells(group)]


def difference_cells(found):
    """Return the cells of a paired difference and its two intervals."""
    d, half, (low, high) = found["difference"], found["seed_interval"], found["document_interval"]
    over_seeds = "one seed" if half is None else f"{d - half:+.4f} to {d + half:+.4f}"
    over_documents = "too few" if low is None else f"{low:+.4f} to {high:+.4f}"
    return [f"{d:+.4f}", over_seeds, over_documents]


def choice_cell(choice):
    """Return the cell of what --best_over chose, and where among the tried it is."""
    value, tried = say(choice["value"]), [say(row["value"]) for row in choice["tried"]]
    if len(tried) == 1:
        return f"{value}, the only one tried"
    edge = f", the {choice['edge']}" if choice["edge"] else ""
    return f"{value}{edge} of {', '.join(tried)}"


def describe_choice(result):
    """Return what the choice by --best_over was made on."""
    names, n = ", ".join(result["best_over"]), result["experiment"].get("eval_windows")
    windows = f"{n} validation windows" if n else "validation windows"
    return (f"Best {names}: of each interface the one with the lowest final loss on the {windows}, "
            "averaged over the seeds that all of its values share; the held-out loss had no part "
            "in it. Beyond the smallest or largest tried there may be a better one.")


def describe_effects(effects, by, markdown):
    """Return the table of what changes where one thing does, and how to read it."""
    rows = []
    for e in effects:
        at = f" at {by} {e['by']}" if by else ""
        low, high = (f"{value:g}" if isinstance(value, float) else str(value)
                     for value in e["values"])
        rows.append([f"{e['axis']}: {low} to {high}{at}", e["from"], e["to"], str(len(e["seeds"])),
                     *difference_cells(e)])
    header = ["only this changes", "from", "to", "seeds", "difference (nats)",
              f"{LEVEL:.0%} over seeds", f"{LEVEL:.0%} over documents"]
    return "\n\n".join([
        format_table(header, rows, markdown, left=3),
        "Pairs of interfaces that differ in one thing: whether an id's numbers are fixed or "
        "learned, how many they are (width), their root mean square at the start (scale; of bits "
        "of 0 and 1 the factor, with half the mean square of -1 and 1), what they are (values), "
        "how they become the model's width (lift), or a setting of one interface. Paired by seed, "
        "with intervals as above, not corrected for the number of rows."])


def size_row(group):
    """Return the cells of a group in the table of sizes and speed."""
    n = group["parameters"] or {}
    keys = ("input", "body", "head", "trainable", "buffers")
    counts = [f"{n[key]:,}" if key in n else "-" for key in keys]
    speed = group["targets_per_second"]
    return [group["name"], *counts, "-" if speed is None else f"{speed:,.0f}"]


def describe_runs(result, markdown):
    """Return the report of compare_runs' result: losses, differences, sizes and speed."""
    experiment, base = result["experiment"], result["baseline"]
    keys = ("n_layer", "n_embd", "n_head", "n_ffn", "block_size", "vocab_size", "max_targets",
            "tokens_per_step", "max_lr", "dtype")
    shown = ", ".join(f"{key} {experiment[key]}" for key in keys if key in experiment)
    free = ", ".join(["input", "seed", *([result["by"]] if result["by"] else []),
                      *result["best_over"]])
    header = ["interface", "seeds", "held-out loss (nats)", "bits per byte", f"minus {base}",
              f"{LEVEL:.0%} over seeds", f"{LEVEL:.0%} over documents"]
    rows = [loss_row(group, base) for group in result["groups"]]
    if result["best_over"]:
        header.append(f"best {', '.join(result['best_over'])}")
        for row, group in zip(rows, result["groups"]):
            row.append(choice_cell(group["choice"]))
    sizes = format_table(
        ["parameters", "input", "body", "head", "trainable", "fixed buffers", "targets/s"],
        [size_row(group) for group in result["groups"]], markdown)
    parts = [
        f"{shown}; data {experiment['data_fingerprint'][:12]}. Only {free} differ.",
        format_table(header, rows, markdown),
        f"Loss: nats per target on {result['documents']:,} validation documents "
        f"({result['targets']:,} targets, scored in {result['heldout_dtype']}), mean over seeds "
        f"± Student's t interval. Minus {base}: mean difference of runs of the same seed. Over "
        "seeds: Student's t interval of these differences. Over documents: the ratios of "
        f"{result['resamples']:,} random subsets of the documents, the same for both sides, all "
        "but the outermost; losses are averaged over the seeds before.",
        sizes,
        "targets/s: median of a run's log, mean over seeds, on the machines that trained them."]
    if result["best_over"]:
        parts.insert(3, describe_choice(result))
    if result["effects"]:
        parts.append(describe_effects(result["effects"], result["by"], markdown))
    return "\n\n".join(parts) + "\n"
