"""Figures of compare.py's runs: 8.3 inches wide, for a page 830 pixels wide."""

import numpy as np

from machinery.looks import (
    STYLE,
    import_matplotlib,
    legend_size,
    line_styles,
    make_figure,
    name_shortly,
    set_log_axis,
)
from machinery.pareto import draw_pareto
from machinery.statistics import LEVEL

CODE_PANELS = {"weight_histogram": ("bits set (Hamming weight)", "share of ids"),
               "bit_counts": ("bit", "share of ids that have it set"),
               "distance_histogram": ("Hamming distance", "share of pairs of ids"),
               "norms": ("squared norm of the input vector", "share of ids up to it")}


def draw_curves(axis, groups, styles, key):
    """Draw group[key], losses [seeds][points], against targets: mean, and range as a band."""
    from matplotlib.ticker import EngFormatter
    for g in groups:
        seen = np.array(g["curve_targets"]) > 0  # the axis is logarithmic
        targets, losses = np.array(g["curve_targets"])[seen], np.array(g[key], float)[:, seen]
        style = styles[g["name"]]
        axis.plot(targets, losses.mean(0), label=g["name"], markevery=max(1, len(targets) // 8),
                  **style)
        axis.fill_between(targets, losses.min(0), losses.max(0), color=style["color"], alpha=0.15,
                          linewidth=0)
    axis.set(xlabel="training targets")
    set_log_axis(axis, EngFormatter(sep=""))  # 500k, 1M


def draw_loss(groups, styles):
    """Return the figure of losses during training, the highest final loss first."""
    figure, [[axis]] = make_figure(max(4.2, 1 + 0.2 * len(groups)))
    draw_curves(axis, groups, styles, "curve_losses")
    axis.set(ylabel="validation loss (nats per target)",
             title="Loss during training: mean and range of seeds")
    lines, _ = axis.get_legend_handles_labels()
    labels = [f"{g['name']}  {g['loss']:.3f}" for g in groups]
    figure.legend(lines, labels, loc="outside right upper", alignment="left",
                  title="interface, final\nheld-out loss")
    return figure


def draw_differences(groups, styles, base):
    """Return the figure with a row for each group: mean difference, seeds, and both intervals."""
    figure, [[axis]] = make_figure(1.3 + (0.34 if len(groups) < 13 else 0.27) * len(groups))
    for y, g in enumerate(groups):
        colour = styles[g["name"]]["color"]
        if g["document_interval"][0] is not None:
            axis.plot(g["document_interval"], [y, y], color=colour, linewidth=9, alpha=0.35,
                      solid_capstyle="butt")
        axis.errorbar(g["difference"], y, xerr=g["seed_interval"], color=colour, marker="o",
                      markersize=5)
        axis.plot(g["differences"], [y] * len(g["differences"]), "|", color=colour, markersize=11)
        axis.annotate(f"{g['difference']:+.3f}", (1.01, y), xycoords=("axes fraction", "data"),
                      va="center")
    axis.axvline(0, color="black", linewidth=1)
    axis.set(yticks=range(len(groups)), yticklabels=[g["name"] for g in groups],
             ylim=(-0.6, len(groups) - 0.4),
             xlabel=f"held-out loss minus {base} (nats per target)",
             title=f"Paired: mean (dot), seeds (ticks), {LEVEL:.0%} interval over seeds (line), "
                   "documents (bar)")
    return figure


def draw_gap(groups, styles, base, by):
    """Return the figure of the gap to the baseline, in training and against `by` if that varies."""
    columns, rows = legend_size(groups)
    figure, axes = make_figure(3.7 + 0.2 * rows, 1, 2 if by else 1)
    draw_curves(axes[0, 0], groups, styles, "curve_differences")
    axes[0, 0].set(ylabel=f"validation loss minus {base} (nats)",
                   title="Gap in training: mean and range of seeds")
    figure.legend(loc="outside lower center", ncols=columns)
    if by:
        draw_gap_against(axes[0, 1], groups, styles, base, by)
    for axis in axes.flat:
        axis.axhline(0, color="black", linewidth=1)
    return figure


def draw_gap_against(axis, groups, styles, base, by):
    """Draw the final difference of each label against the value of the field `by`."""
    from matplotlib.ticker import EngFormatter
    labels = list(dict.fromkeys(g["label"] for g in groups))
    for label in labels:
        mine = sorted((g for g in groups if g["label"] == label), key=lambda g: g["by"])
        style = styles[mine[0]["name"]]
        axis.errorbar([g["by"] for g in mine], [g["difference"] for g in mine],
                      [g["seed_interval"] or 0 for g in mine], label=label, marker="o", capsize=4,
                      color=style["color"], linestyle=style["linestyle"])
    values = sorted({g["by"] for g in groups})
    if isinstance(values[-1], int) and values[-1] >= 10_000:  # as --by=max_targets
        axis.set_xscale("log")
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))
        axis.set_xticks([], minor=True)
    axis.set(xlabel=by, xticks=values, ylabel=f"held-out loss minus {base} (nats)",
             title=f"Final gap, {LEVEL:.0%} interval over seeds")
    if len(labels) > 1:
        axis.legend()


def draw_tuning(groups, styles, fields):
    """Return the figure of what --best_over chose among: the loss on the validation windows against
    the first of the fields, at the best values of the others."""
    figure, [[axis]] = make_figure(max(4.2, 1 + 0.2 * len(groups)))
    xs = set()
    for g in groups:
        curve, best = {}, g["choice"]["value"][0]
        for row in g["choice"]["tried"]:
            if row["loss"] is not None and np.isfinite(row["loss"]):
                x = row["value"][0]
                curve[x] = min(row["loss"], curve.get(x, np.inf))
        style = styles[g["name"]] | {"marker": "."}
        axis.plot(list(curve), list(curve.values()), label=g["name"], **style)
        axis.plot(best, curve[best], "o", color=style["color"], markersize=8, fillstyle="none")
        xs |= set(curve)
    set_log_axis(axis, "{x:g}")
    if len(xs) < 9:
        axis.set_xticks(sorted(xs))
        axis.set_xticks([], minor=True)
    axis.set(xlabel=fields[0], ylabel="final validation loss (nats per target)",
             title="Mean over seeds; circles: the best")
    figure.legend(loc="outside right upper", alignment="left", title="interface")
    return figure


def draw_codes(groups, styles):
    """Return the figure of what fixed codes look like, by train.py's code_report: four panels."""
    columns, rows = legend_size(groups)
    figure, axes = make_figure(5.2 + 0.2 * rows, 2, 2)
    for g in groups:
        report, style = g["code_report"], styles[g["name"]] | {"marker": ""}
        for axis, key in zip(axes.flat, list(CODE_PANELS)[:3]):
            counts = np.array(report.get(key, ()), float)  # none for real numbers
            total = report["vocab_size"] if key == "bit_counts" and len(counts) else counts.sum()
            axis.plot(counts / total, **style | {"marker": "."})
        norms = report["squared_norms"]["histogram"]
        share = np.cumsum([0, *norms["counts"]]) / sum(norms["counts"])
        axes.flat[3].plot(norms["edges"], share, label=g["label"], **style)
    for axis, (xlabel, ylabel) in zip(axes.flat, CODE_PANELS.values()):
        axis.set(xlabel=xlabel, ylabel=ylabel)
    axes.flat[1].set_ylim(0, 1)
    set_log_axis(axes.flat[3], "{x:g}")  # matched norms are a thousand times smaller
    figure.legend(loc="outside lower center", ncols=columns)
    return figure


def draw_runs(result, out):
    """Write the figures of compare_runs' result into the directory out; return their names."""
    with import_matplotlib().rc_context(STYLE):
        figures = make_figures(result)
        for name, figure in figures.items():
            figure.savefig(out / f"{name}.png")
    return list(figures)


def make_figures(result):
    """Return {name: figure} of compare_runs' result."""
    short = name_shortly(result["groups"])
    groups = [g | {"name": short(g["name"]), "label": short(g["label"])} for g in result["groups"]]
    base, by, styles = short(result["baseline"]), result["by"], line_styles(groups)
    ranked = sorted(groups, key=lambda g: -g["loss"])
    others = [g for g in ranked if g["label"] != base]
    coded = [g for g in groups if g["code_report"] and g["by"] == ranked[0]["by"]]
    sized = [g for g in ranked if g["parameters"]]
    figures = {"loss": draw_loss(ranked, styles)}
    if others:
        figures["differences"] = draw_differences(others, styles, base)
        figures["gap"] = draw_gap(others, styles, base, by)
    if any(g["parameters"]["input"] for g in sized) and len(sized) > 1 and not by:
        colours = {g["name"]: styles[g["name"]]["color"] for g in sized}
        figures["pareto"] = draw_pareto(sized, colours, best_table(ranked, base))
    if result["best_over"] and can_be_an_axis(ranked):
        name = "lr" if result["best_over"][0] == "max_lr" else "best_over"
        figures[name] = draw_tuning(ranked, styles, result["best_over"])
    if coded:
        figures["codes"] = draw_codes(coded, styles)
    return figures


def best_table(groups, base):
    """Return the learned table of the lowest loss; the baseline where there is none."""
    tables = [g for g in groups if g["interface"]["input"] == "learned"]
    tables = tables or [g for g in groups if g["label"] == base]
    return min(tables, key=lambda g: g["loss"])


def can_be_an_axis(groups):
    """Return whether the values that --best_over tried are numbers above 0."""
    values = []
    for g in groups:
        values += [row["value"][0] for row in g["choice"]["tried"]]
    return all(isinstance(value, (int, float)) and value > 0 for value in values)
