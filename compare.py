"""Compare training runs that differ in their input interface and seed: a table with error bars, and figures.

    python compare.py out/smoke-*                          every interface against --baseline=learned
    python compare.py out/depth-* --by=n_layer             the same at several depths

A difference to the baseline has two sources of error, and an interval for each:

    seeds        Student's t over the differences of runs of the same seed (same initial body, same training windows):
                 what new weights and windows might give
    documents    a paired bootstrap over the validation documents, losses averaged over the seeds first:
                 what these same models might give on other documents

Reads RUN/config.json, log.jsonl and the newest heldout-STEP.json (evaluate.py score RUN). Writes to --out: comparison.md,
comparison.json, loss.png, differences.png, gap.png and, for fixed codes, codes.png. Losses are nats per target.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy import stats

LEVEL, DRAWS = 0.95, 10_000  # of every interval; resamples of a bootstrap
# What describes the input beside its name, how a label says it, and the value that goes without saying.
INPUT_FIELDS = {"code_seed": ("seed {}", None), "code_offset": ("offset {}", "0"), "code_values": ("{}", "01"),
                "code_scale": ("scale {}", "1"), "lift": ("{}", "tile"), "table_free": ("table-free", "False")}
# What may differ between runs that are compared: where and how they ran, what they wrote. All else is the experiment.
FREE = {"input", "seed", *INPUT_FIELDS, "preset", "data", "out", "device", "micro_batch", "checkpoint_activations", "compile", "eval_every",
        "save_every", "log_every", "keep", "resume", "dry_run", "initial_body_sha256", "parameters", "code_report"}
# Distinguishable to colour-blind eyes (Okabe and Ito, 2008); the baseline is black.
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#777777")
DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))


# ----------------------------------------------------------------------------------------------------------------------
# Statistics

def student_interval(values):
    """Return (mean, half-width of its 95 % interval by Student's t); the half-width of a single value is None."""
    values = np.asarray(values, float)
    n = len(values)
    return values.mean().item(), None if n < 2 else (stats.t.ppf((1 + LEVEL) / 2, n - 1) * values.std(ddof=1) / n**0.5).item()


def paired_bootstrap(differences, weights=None):
    """Return the 95 % percentile interval (low, high) of sum(differences) / sum(weights) under resampling of the units.

    Args:
        differences: float [n], of two models on each unit (document), summed within it.
        weights: float [n], what a unit counts (its targets); None for the mean difference of units that count alike.
    """
    differences = np.asarray(differences, float)
    n, rng, estimates = len(differences), np.random.default_rng(0), []
    weights = np.ones(n) if weights is None else np.asarray(weights, float)
    for draws in np.array_split(np.arange(DRAWS), -(-DRAWS * n // 5_000_000)):  # 5M indices at a time
        units = rng.integers(n, size=(len(draws), n))
        estimates.append(differences[units].sum(1) / weights[units].sum(1))
    return tuple(np.quantile(np.concatenate(estimates), [(1 - LEVEL) / 2, (1 + LEVEL) / 2]).tolist())


# ----------------------------------------------------------------------------------------------------------------------
# Reading

@dataclass
class Run:
    path: str
    config: dict
    curve: dict              # targets seen -> loss on the fixed validation windows
    targets_per_second: float
    heldout: dict            # evaluate.py's score: loss, bits_per_byte, dtype, documents
    documents: np.ndarray    # float [n, 2]: targets and nats of each validation document


def read_run(path):
    """Return the Run of a directory. Raises FileNotFoundError for a file that is not there, ValueError for a run that is not whole."""
    path = Path(path)
    if not (path / "config.json").exists():
        raise FileNotFoundError(f"{path}: no config.json; name run directories that train.py wrote")
    if not (scores := sorted(path.glob("heldout-*.json"))):
        raise FileNotFoundError(f"{path}: no held-out score; python evaluate.py score {path}")
    try:
        config, heldout = (json.loads(file.read_text()) for file in (path / "config.json", scores[-1]))
        rows = [json.loads(line) for line in (path / "log.jsonl").read_text().splitlines()]
        documents = np.array([[d["targets"], d["nats"]] for d in heldout["documents"]], float)
    except (json.JSONDecodeError, KeyError) as error:
        raise ValueError(f"{path}: config.json, log.jsonl or {scores[-1].name} is damaged ({error})") from None
    done = max((row["targets"] for row in rows), default=0)
    if done < config["max_targets"] or heldout["step"] * config["tokens_per_step"] != done:
        raise ValueError(f"{path}: {done:,} of {config['max_targets']:,} targets trained, {heldout['step'] * config['tokens_per_step']:,} "
                         f"when scored; finish it with train.py --resume, then python evaluate.py score {path}")
    return Run(str(path), config, {row["targets"]: row["val_loss"] for row in rows if "val_loss" in row},
               np.median([row["targets_per_second"] for row in rows if "loss" in row]).item(), heldout, documents)


def label(config):
    """Return the name of a run's input interface: binary, gf2 seed 7, binary pm1, binary scale matched ..."""
    words = [config["input"]]
    for field, (text, silent) in INPUT_FIELDS.items():
        drawn = field != "code_seed" or config["input"] in ("gf2", "random")
        if drawn and field in config and str(config[field]) != silent:
            words.append(text.format(config[field]))
    return " ".join(words)


def check_same_experiment(runs, by):
    """Raise ValueError, naming the fields, unless runs differ in their input, their seed and the field `by` alone."""
    initial, first = {}, runs[0]
    for run in runs:
        fields = sorted({*first.config, *run.config} - FREE - {by})
        differing = [f"{name} {first.config.get(name)} / {run.config.get(name)}" for name in fields
                     if first.config.get(name) != run.config.get(name)]
        same_start = initial.setdefault((run.config["seed"], run.config.get(by)), run)
        if run.config["initial_body_sha256"] != same_start.config["initial_body_sha256"]:
            differing.append(f"initial_body_sha256 of seed {run.config['seed']} (first seen in {same_start.path})")
        if run.heldout["dtype"] != first.heldout["dtype"]:
            differing.append(f"dtype of the held-out score {first.heldout['dtype']} / {run.heldout['dtype']}")
        if not np.array_equal(run.documents[:, 0], first.documents[:, 0]):
            differing.append(f"validation documents {len(first.documents)} / {len(run.documents)}, by their targets")
        if differing:
            raise ValueError(f"{first.path} and {run.path} are not the same experiment: {'; '.join(differing)}")


# ----------------------------------------------------------------------------------------------------------------------
# Runs

def compare_runs(paths, baseline="learned", by=None):
    """Return the comparison of run directories as plain values: what comparison.json holds and the figures show.

    Args:
        baseline: the label that every other is compared with, seed by seed, at equal values of the field `by`.
        by: a field of config.json that may differ between the runs, such as n_layer.
    Raises ValueError if runs are not the same experiment but for their input, seed and `by`, or have nothing to pair.
    """
    runs = [read_run(path) for path in paths]
    check_same_experiment(runs, by)
    groups = {}
    for run in runs:
        seeds = groups.setdefault((run.config.get(by), label(run.config)), {})
        if (twin := seeds.setdefault(run.config["seed"], run)) is not run:
            raise ValueError(f"{twin.path} and {run.path} have the same interface ({label(run.config)}) and seed; leave one out")
    result = {"baseline": baseline, "by": by, "level": LEVEL, "draws": DRAWS, "heldout_dtype": runs[0].heldout["dtype"],
              "documents": len(runs[0].documents), "targets": int(runs[0].documents[:, 0].sum()),
              "experiment": {key: value for key, value in runs[0].config.items() if key not in FREE | {by}}, "groups": []}
    names = [baseline, *(name for _, name in groups)]  # the baseline first, so that it gets the first colour; then as they came
    for (value, name), seeds in sorted(groups.items(), key=lambda item: (names.index(item[0][1]), item[0][0])):
        if (value, baseline) not in groups:
            raise ValueError(f"--baseline={baseline}: no such run" + (f" with {by}={value}" if by else "") +
                             f"; there are {', '.join(sorted({name for at, name in groups if at == value}))}")
        base = groups[value, baseline]
        if not (common := sorted(set(seeds) & set(base))):
            raise ValueError(f"{name} has seeds {sorted(seeds)}, {baseline} {sorted(base)}: none to pair")
        loss, interval = student_interval([run.heldout["loss"] for run in seeds.values()])
        difference, seed_interval = student_interval([seeds[s].heldout["loss"] - base[s].heldout["loss"] for s in common])
        nats = np.mean([seeds[s].documents[:, 1] - base[s].documents[:, 1] for s in common], axis=0)
        points = sorted(set.intersection(*(set(run.curve) for run in [*seeds.values(), *base.values()])))
        config = next(iter(seeds.values())).config
        result["groups"].append({
            "name": name + (f", {by} {value}" if by else ""), "label": name, "by": value, "seeds": sorted(seeds),
            "runs": [run.path for run in seeds.values()],
            "loss": loss, "loss_seed_interval": interval, "losses": [seeds[s].heldout["loss"] for s in sorted(seeds)],
            "bits_per_byte": np.mean([run.heldout["bits_per_byte"] for run in seeds.values()]).item(),
            "difference": difference, "difference_seed_interval": seed_interval, "paired_seeds": common,
            "differences": [seeds[s].heldout["loss"] - base[s].heldout["loss"] for s in common],
            "difference_document_interval": paired_bootstrap(nats, runs[0].documents[:, 0]),
            "curve_targets": points, "curve_losses": [[seeds[s].curve[t] for t in points] for s in sorted(seeds)],
            "curve_differences": [[seeds[s].curve[t] - base[s].curve[t] for t in points] for s in common],
            "parameters": config.get("parameters", {}), "code_report": config.get("code_report"),
            "targets_per_second": np.mean([run.targets_per_second for run in seeds.values()]).item()})
    return result


# ----------------------------------------------------------------------------------------------------------------------
# Tables

def table(header, rows):
    """Return a Markdown table of texts, aligned to be read as it is: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows)]
    line = lambda cells: "| " + " | ".join(cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(cells, widths))) + " |"
    return "\n".join([line(header), "|" + "|".join("-" * (w + 1) + ("-:"[i > 0]) for i, w in enumerate(widths)) + "|", *map(line, rows)])


def describe_runs(result):
    """Return the Markdown report of compare_runs' result."""
    e, base, groups = result["experiment"], result["baseline"], result["groups"]
    losses, sizes = [], []
    for g in groups:
        seed, (low, high) = g["difference_seed_interval"], g["difference_document_interval"]
        paired = ["baseline", "", ""] if g["label"] == base else [
            f"{g['difference']:+.4f}", "one seed" if seed is None else f"{g['difference'] - seed:+.4f} to {g['difference'] + seed:+.4f}",
            f"{low:+.4f} to {high:+.4f}"]
        half = g["loss_seed_interval"]
        losses.append([g["name"], str(len(g["seeds"])), f"{g['loss']:.4f}" + ("" if half is None else f" ±{half:.4f}"),
                       f"{g['bits_per_byte']:.4f}", *paired])
        sizes.append([g["name"], *(f"{g['parameters'][key]:,}" if key in g["parameters"] else "" for key in
                                   ("input", "body", "head", "trainable", "buffers")), f"{g['targets_per_second']:,.0f}"])
    sizes_of = ", ".join(f"{key} {e[key]:,}" for key in ("n_layer", "n_embd", "n_head", "n_ffn", "block_size", "vocab_size") if key in e)
    figures = ["loss", "differences", "gap"] + ["codes"] * any(g["code_report"] for g in groups)
    return "\n".join([
        f"# {len(groups)} input interfaces, {sum(len(g['seeds']) for g in groups)} runs", "",
        f"{sizes_of}; {e.get('max_targets', 0):,} targets, {e.get('tokens_per_step', 0):,} an update, {e.get('dtype')}; "
        f"data {str(e.get('data_fingerprint'))[:12]}. Everything but the input and the seed is equal"
        + (f", and {result['by']}." if result["by"] else "."), "",
        table(["interface", "seeds", "held-out loss (nats)", "bits per byte", f"minus {base}", "95 % over seeds", "95 % over documents"], losses),
        "", f"Loss: mean over seeds of the nats per target on {result['documents']:,} validation documents ({result['targets']:,} targets, "
        f"scored in {result['heldout_dtype']}), ± the 95 % interval by Student's t over seeds. Minus {base}: mean of the differences of runs "
        "of the same seed. Over seeds: Student's t of these differences. Over documents: percentile interval of a paired bootstrap, "
        f"{result['draws']:,} resamples of whole validation documents, the same for both sides; losses are averaged over the seeds first, and "
        "seeds are not resampled.", "",
        table(["interface", "input", "body", "head", "trainable", "fixed buffers", "targets/s"], sizes), "",
        "Parameters by group; targets/s: median of a run's log, mean over seeds, on the machines that trained them.", "",
        *(f"![{figure}]({figure}.png)\n" for figure in figures)])


# ----------------------------------------------------------------------------------------------------------------------
# Figures: 8.3 inches wide, for a page 830 pixels wide

STYLE = {"font.size": 9.5, "axes.titlesize": 10, "axes.titlelocation": "left", "axes.spines.top": False, "axes.spines.right": False,
         "axes.grid": True, "grid.alpha": 0.3, "axes.axisbelow": True, "legend.frameon": False, "savefig.dpi": 200}


def new_figure(height, *shape):
    """Return (figure, axes) as plt.subplots, in the style of all figures; needs no display."""
    import matplotlib
    matplotlib.use("agg")
    import matplotlib.pyplot as plt
    plt.rcParams.update(STYLE)
    return plt.subplots(*shape, figsize=(8.3, height), layout="constrained")


def line_styles(groups):
    """Return {name: how to draw it}: a colour for each kind of input, a dash pattern for each of its variants."""
    kinds, styles = {}, {}
    for g in groups:
        names = kinds.setdefault(g["label"].split()[0], [])
        names.append(g["name"])
        colour = COLOURS[list(kinds).index(g["label"].split()[0]) % len(COLOURS)]
        styles[g["name"]] = {"color": colour, "linestyle": DASHES[(len(names) - 1) % len(DASHES)]}
    return styles


def draw_curves(axis, groups, styles, key, name):
    """Draw group[key], losses [seeds][points], against targets: the mean, and a band from the lowest to the highest seed."""
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter
    for g in groups:
        at = [i for i, t in enumerate(g["curve_targets"]) if t > 0]  # the axis is logarithmic
        targets, losses = np.array(g["curve_targets"], float)[at], np.array(g[key])[:, at]
        axis.plot(targets, losses.mean(0), label=name(g), **styles[g["name"]])
        axis.fill_between(targets, losses.min(0), losses.max(0), color=styles[g["name"]]["color"], alpha=0.15, linewidth=0)
    axis.set(xscale="log", xlabel="training targets")
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.xaxis.set_major_formatter(EngFormatter(sep=""))  # 500k, 1M
    axis.xaxis.set_minor_formatter(NullFormatter())


def draw_runs(result, out):
    """Write the figures of compare_runs' result into the directory out."""
    groups, base, by = result["groups"], result["baseline"], result["by"]
    styles = line_styles(groups)
    ranked = sorted(groups, key=lambda g: -g["loss"])

    figure, axis = new_figure(4.2)
    draw_curves(axis, ranked, styles, "curve_losses", lambda g: f"{g['name']}  {g['loss']:.3f}")
    axis.set(ylabel="validation loss (nats per target)", title="Loss during training: mean and range of seeds")
    figure.legend(*axis.get_legend_handles_labels(), loc="outside right upper", title="interface, final\nheld-out loss", alignment="left")
    figure.savefig(out / "loss.png")

    others = [g for g in ranked if g["label"] != base]
    figure, axis = new_figure(1.3 + 0.34 * len(others))
    for y, g in enumerate(others):
        colour, d, half = styles[g["name"]]["color"], g["difference"], g["difference_seed_interval"]
        axis.plot(g["difference_document_interval"], [y, y], color=colour, linewidth=7, alpha=0.35, solid_capstyle="butt")
        if half is not None:
            axis.errorbar(d, y, xerr=half, color=colour, capsize=4)
        axis.plot(g["differences"], [y] * len(g["differences"]), "|", color=colour, markersize=11)
        axis.plot(d, y, "o", color=colour, markersize=5)
        axis.annotate(f"{d:+.3f}", (1.01, y), xycoords=("axes fraction", "data"), va="center")
    axis.axvline(0, color="black", linewidth=1)
    axis.set(yticks=range(len(others)), yticklabels=[g["name"] for g in others], ylim=(-0.6, len(others) - 0.4),
             xlabel=f"held-out loss minus {base} (nats per target)",
             title="Paired differences: mean (dot), seeds (ticks), 95 % over seeds (line), over documents (bar)")
    figure.savefig(out / "differences.png")

    figure, axes = new_figure(3.8, 1, 2 if by else 1)
    draw_curves(np.atleast_1d(axes)[0], others, styles, "curve_differences", lambda g: g["name"])
    np.atleast_1d(axes)[0].set(ylabel=f"validation loss minus {base} (nats)", title="Gap during training: mean and range of seeds")
    if by:
        for name in dict.fromkeys(g["label"] for g in others):
            mine = sorted((g for g in others if g["label"] == name), key=lambda g: g["by"])
            axes[1].errorbar([g["by"] for g in mine], [g["difference"] for g in mine], [g["difference_seed_interval"] or 0 for g in mine],
                             color=styles[mine[0]["name"]]["color"], marker="o", capsize=4)
        axes[1].set(xlabel=by, xticks=sorted({g["by"] for g in others}), ylabel=f"held-out loss minus {base} (nats)",
                    title="Final gap, 95 % over seeds")
    for axis in np.atleast_1d(axes):
        axis.axhline(0, color="black", linewidth=1)
    figure.legend(*np.atleast_1d(axes)[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.savefig(out / "gap.png")
    draw_codes([g for g in groups if g["code_report"] and g["by"] == groups[0]["by"]], styles, out)


def draw_codes(groups, styles, out):
    """Write codes.png: what the fixed codes look like, from the code_report of train.py."""
    if not groups:
        return
    figure, axes = new_figure(5.6, 2, 2)
    panels = (("weight_histogram", "bits set (Hamming weight)", "share of ids"), ("bit_counts", "bit", "share of ids in which it is set"),
              ("distance_histogram", "Hamming distance", "share of pairs of ids"))
    for g in groups:
        report, style = g["code_report"], styles[g["name"]] | {"marker": "o", "markersize": 3}
        for axis, (key, *_) in zip(axes.flat, panels):
            if report.get(key):
                counts = np.array(report[key], float)
                axis.plot(counts / (report["vocab_size"] if key == "bit_counts" else counts.sum()), label=g["label"], **style)
        counts, edges = (np.array(report["squared_norms"]["histogram"][key], float) for key in ("counts", "edges"))
        seen = counts > 0
        axes.flat[3].plot((edges[1:] + edges[:-1])[seen] / 2, counts[seen] / counts.sum(), label=g["label"], **style)
    for axis, (_, xlabel, ylabel) in zip(axes.flat, (*panels, ("", "squared norm of the input vector", "share of ids"))):
        axis.set(xlabel=xlabel, ylabel=ylabel)
    axes.flat[1].set_ylim(0, 1)
    axes.flat[3].set_xscale("log")  # matched norms are a thousand times smaller
    figure.legend(*axes.flat[3].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.savefig(out / "codes.png")


# ----------------------------------------------------------------------------------------------------------------------

def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, usage=argparse.SUPPRESS, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", metavar="RUN", help="run directories")
    parser.add_argument("--baseline", default="learned", help="label of the interface to compare with (default: %(default)s)")
    parser.add_argument("--by", metavar="FIELD", help="a field of config.json that may differ, such as n_layer")
    parser.add_argument("--out", default="out/comparison", help="directory to write to (default: %(default)s)")
    return parser.parse_args()


def main():
    args = parse_args()
    result = compare_runs(args.paths, args.baseline, args.by)
    report, out = describe_runs(result), Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    draw_runs(result, out)
    (out / "comparison.json").write_text(json.dumps(result, indent=1))
    (out / "comparison.md").write_text(report)
    print(report.split("\n![")[0])
    print(f"written to {out}")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ValueError, OSError) as error:
        sys.exit(f"compare.py: {error}")
