"""Figures of compare.py's runs: 8.3 inches wide, for a page 830 pixels wide."""

import numpy as np

from machinery.statistics import LEVEL

# Colours that colour-blind eyes tell apart (Okabe and Ito, 2008), one for each kind of input;
# dashes for its variants.
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#777777")
DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))
STYLE = {"font.size": 9.5, "axes.titlesize": 10, "axes.titlelocation": "left",
         "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.3,
         "axes.axisbelow": True, "legend.frameon": False, "legend.handlelength": 3,
         "savefig.dpi": 200}
CODE_PANELS = {"weight_histogram": ("bits set (Hamming weight)", "share of ids"),
               "bit_counts": ("bit", "share of ids that have it set"),
               "distance_histogram": ("Hamming distance", "share of pairs of ids"),
               "norms": ("squared norm of the input vector", "share of ids up to it")}


def line_styles(groups):
    """Return {name: how to draw it}: a colour for each kind of input, dashes for its variants."""
    kinds = {}
    for g in groups:
        kinds.setdefault(g["label"].split()[0], []).append(g["name"])
    styles = {}
    for i, names in enumerate(kinds.values()):
        for j, name in enumerate(sorted(names, key=len)):  # the plainest is solid
            colour, dashes = COLOURS[i % len(COLOURS)], DASHES[j % len(DASHES)]
            styles[name] = {"color": colour, "linestyle": dashes}
    return styles


def draw_curves(axis, groups, styles, key):
    """Draw group[key], losses [seeds][points], against targets: mean, and range as a band."""
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter
    for g in groups:
        seen = np.array(g["curve_targets"]) > 0  # the axis is logarithmic
        targets, losses = np.array(g["curve_targets"])[seen], np.array(g[key])[:, seen]
        style = styles[g["name"]]
        axis.plot(targets, losses.mean(0), label=g["name"], **style)
        axis.fill_between(targets, losses.min(0), losses.max(0), color=style["color"], alpha=0.15,
                          linewidth=0)
    axis.set(xscale="log", xlabel="training targets")
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.xaxis.set_major_formatter(EngFormatter(sep=""))  # 500k, 1M
    axis.xaxis.set_minor_formatter(NullFormatter())


def draw_loss(plt, groups, styles):
    """Return the figure of losses during training, the highest final loss first."""
    figure, axis = plt.subplots(figsize=(8.3, 4.2), layout="constrained")
    draw_curves(axis, groups, styles, "curve_losses")
    axis.set(ylabel="validation loss (nats per target)",
             title="Loss during training: mean and range of seeds")
    lines, _ = axis.get_legend_handles_labels()
    labels = [f"{g['name']}  {g['loss']:.3f}" for g in groups]
    figure.legend(lines, labels, loc="outside right upper", alignment="left",
                  title="interface, final\nheld-out loss")
    return figure


def draw_differences(plt, groups, styles, base):
    """Return the figure with a row for each group: mean difference, seeds, and both intervals."""
    size = 8.3, 1.3 + 0.34 * len(groups)
    figure, axis = plt.subplots(figsize=size, layout="constrained")
    for y, g in enumerate(groups):
        colour = styles[g["name"]]["color"]
        axis.plot(g["document_interval"], [y, y], color=colour, linewidth=9, alpha=0.35,
                  solid_capstyle="butt")
        axis.errorbar(g["difference"], y, xerr=g["seed_interval"], color=colour, capsize=4,
                      marker="o", markersize=5)
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


def draw_gap(plt, groups, styles, base, by):
    """Return the figure of the gap to the baseline, in training and against `by` if that varies."""
    figure, axes = plt.subplots(1, 2 if by else 1, figsize=(8.3, 4.2), layout="constrained",
                                squeeze=False)
    draw_curves(axes[0, 0], groups, styles, "curve_differences")
    axes[0, 0].set(ylabel=f"validation loss minus {base} (nats)",
                   title="Gap in training: mean and range of seeds")
    figure.legend(loc="outside lower center", ncols=3)
    labels = dict.fromkeys(g["label"] for g in groups) if by else ()
    for label in labels:
        mine = sorted((g for g in groups if g["label"] == label), key=lambda g: g["by"])
        x = [g["by"] for g in mine]
        axes[0, 1].errorbar(x, [g["difference"] for g in mine],
                            [g["seed_interval"] or 0 for g in mine],
                            color=styles[mine[0]["name"]]["color"], marker="o", capsize=4)
        axes[0, 1].set(xlabel=by, xticks=x, ylabel=f"held-out loss minus {base} (nats)",
                       title=f"Final gap, {LEVEL:.0%} interval over seeds")
    for axis in axes.flat:
        axis.axhline(0, color="black", linewidth=1)
    return figure


def draw_codes(plt, groups, styles):
    """Return the figure of what fixed codes look like, by train.py's code_report: four panels."""
    figure, axes = plt.subplots(2, 2, figsize=(8.3, 5.6), layout="constrained")
    for g in groups:
        report, style = g["code_report"], styles[g["name"]]
        for axis, key in zip(axes.flat, list(CODE_PANELS)[:3]):
            counts = np.array(report.get(key, ()), float)  # none for real numbers
            total = report["vocab_size"] if key == "bit_counts" and len(counts) else counts.sum()
            axis.plot(counts / total, marker=".", **style)
        norms = report["squared_norms"]["histogram"]
        share = np.cumsum([0, *norms["counts"]]) / sum(norms["counts"])
        axes.flat[3].plot(norms["edges"], share, label=g["label"], **style)
    for axis, (xlabel, ylabel) in zip(axes.flat, CODE_PANELS.values()):
        axis.set(xlabel=xlabel, ylabel=ylabel)
    axes.flat[1].set_ylim(0, 1)
    axes.flat[3].set_xscale("log")  # matched norms are a thousand times smaller
    figure.legend(loc="outside lower center", ncols=3)
    return figure


def draw_runs(result, out):
    """Write the figures of compare_runs' result into the directory out; return their names."""
    import matplotlib
    matplotlib.use("agg")
    import matplotlib.pyplot as plt
    plt.rcParams.update(STYLE)
    base, by, styles = result["baseline"], result["by"], line_styles(result["groups"])
    ranked = sorted(result["groups"], key=lambda g: -g["loss"])
    others = [g for g in ranked if g["label"] != base]
    coded = [g for g in result["groups"] if g["code_report"] and g["by"] == ranked[0]["by"]]
    figures = {"loss": draw_loss(plt, ranked, styles)}
    if others:
        figures["differences"] = draw_differences(plt, others, styles, base)
        figures["gap"] = draw_gap(plt, others, styles, base, by)
    if coded:
        figures["codes"] = draw_codes(plt, coded, styles)
    for name, figure in figures.items():
        figure.savefig(out / f"{name}.png")
        plt.close(figure)
    return list(figures)
