"""Figures of runs: 8.3 inches wide, for a page 830 pixels wide."""

import numpy as np

from machinery.statistics import LEVEL

# Colours that colour-blind eyes tell apart (Okabe and Ito, 2008), one for each kind of input; dashes for its variants.
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#777777")

DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))

STYLE = {"font.size": 9.5, "axes.titlesize": 10, "axes.titlelocation": "left", "axes.spines.top": False,
         "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.3, "axes.axisbelow": True,
         "legend.frameon": False, "legend.handlelength": 3, "savefig.dpi": 200}


def line_styles(groups):
    """Return {name: how to draw it}: a colour for each kind of input, a dash pattern for each of its variants."""
    kinds = {}
    for g in groups:
        kinds.setdefault(g["label"].split()[0], []).append(g["name"])
    return {name: {"color": COLOURS[i % len(COLOURS)], "linestyle": DASHES[j % len(DASHES)]}
            for i, names in enumerate(kinds.values()) for j, name in enumerate(sorted(names, key=len))}  # the plainest is solid


def draw_curves(axis, groups, styles, key, text):
    """Draw group[key], losses [seeds][points], against targets: the mean, and a band from lowest to highest seed."""
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter
    for g in groups:
        seen = np.array(g["curve_targets"]) > 0  # the axis is logarithmic
        targets, losses, style = np.array(g["curve_targets"])[seen], np.array(g[key])[:, seen], styles[g["name"]]
        axis.plot(targets, losses.mean(0), label=text(g), **style)
        axis.fill_between(targets, losses.min(0), losses.max(0), color=style["color"], alpha=0.15, linewidth=0)
    axis.set(xscale="log", xlabel="training targets")
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.xaxis.set_major_formatter(EngFormatter(sep=""))  # 500k, 1M
    axis.xaxis.set_minor_formatter(NullFormatter())


def draw_differences(axis, groups, styles):
    """Draw a row for each group: the mean difference, those of single seeds, and both intervals."""
    for y, g in enumerate(groups):
        colour = styles[g["name"]]["color"]
        axis.plot(g["document_interval"], [y, y], color=colour, linewidth=9, alpha=0.35, solid_capstyle="butt")
        axis.errorbar(g["difference"], y, xerr=g["seed_interval"], color=colour, capsize=4, marker="o", markersize=5)
        axis.plot(g["differences"], [y] * len(g["differences"]), "|", color=colour, markersize=11)
        axis.annotate(f"{g['difference']:+.3f}", (1.01, y), xycoords=("axes fraction", "data"), va="center")
    axis.axvline(0, color="black", linewidth=1)
    axis.set(yticks=range(len(groups)), yticklabels=[g["name"] for g in groups], ylim=(-0.6, len(groups) - 0.4))


def draw_codes(axes, groups, styles):
    """Draw what fixed codes look like, by train.py's code_report: four panels; real numbers have norms only."""
    labels = {"weight_histogram": ("bits set (Hamming weight)", "share of ids"),
              "bit_counts": ("bit", "share of ids that have it set"),
              "distance_histogram": ("Hamming distance", "share of pairs of ids"),
              "norms": ("squared norm of the input vector", "share of ids up to it")}
    for g in groups:
        report, style = g["code_report"], styles[g["name"]]
        for axis, key in zip(axes.flat, list(labels)[:3]):
            counts = np.array(report.get(key, ()), float)
            total = report["vocab_size"] if key == "bit_counts" and len(counts) else counts.sum()
            axis.plot(counts / total, marker=".", **style)
        norms = report["squared_norms"]["histogram"]
        share = np.cumsum([0, *norms["counts"]]) / sum(norms["counts"])
        axes.flat[3].plot(norms["edges"], share, label=g["label"], **style)
    for axis, (xlabel, ylabel) in zip(axes.flat, labels.values()):
        axis.set(xlabel=xlabel, ylabel=ylabel)
    axes.flat[1].set_ylim(0, 1)
    axes.flat[3].set_xscale("log")  # matched norms are a thousand times smaller


def draw_runs(result, out):
    """Write the figures of compare_runs' result into the directory out; return their names."""
    import matplotlib
    matplotlib.use("agg")
    import matplotlib.pyplot as plt
    plt.rcParams.update(STYLE)
    base, by, styles, figures = result["baseline"], result["by"], line_styles(result["groups"]), {}
    ranked = sorted(result["groups"], key=lambda g: -g["loss"])
    others = [g for g in ranked if g["label"] != base]

    figures["loss"], axis = plt.subplots(figsize=(8.3, 4.2), layout="constrained")
    draw_curves(axis, ranked, styles, "curve_losses", lambda g: f"{g['name']}  {g['loss']:.3f}")
    axis.set(ylabel="validation loss (nats per target)", title="Loss during training: mean and range of seeds")
    figures["loss"].legend(loc="outside right upper", title="interface, final\nheld-out loss", alignment="left")
    if others:
        figures["differences"], axis = plt.subplots(figsize=(8.3, 1.3 + 0.34 * len(others)), layout="constrained")
        draw_differences(axis, others, styles)
        axis.set(xlabel=f"held-out loss minus {base} (nats per target)",
                 title=f"Paired: mean (dot), seeds (ticks), {LEVEL:.0%} interval over seeds (line), documents (bar)")
        figures["gap"], axes = plt.subplots(1, 2 if by else 1, figsize=(8.3, 4.2), layout="constrained", squeeze=False)
        draw_curves(axes[0, 0], others, styles, "curve_differences", lambda g: g["name"])
        axes[0, 0].set(ylabel=f"validation loss minus {base} (nats)", title="Gap in training: mean and range of seeds")
        figures["gap"].legend(loc="outside lower center", ncols=3)
        for name in {g["label"]: 0 for g in others} if by else ():
            mine = sorted((g for g in others if g["label"] == name), key=lambda g: g["by"])
            x, y, error = zip(*((g["by"], g["difference"], g["seed_interval"] or 0) for g in mine))
            axes[0, 1].errorbar(x, y, error, color=styles[mine[0]["name"]]["color"], marker="o", capsize=4)
            axes[0, 1].set(xlabel=by, xticks=x, ylabel=f"held-out loss minus {base} (nats)",
                           title=f"Final gap, {LEVEL:.0%} interval over seeds")
        for axis in axes.flat:
            axis.axhline(0, color="black", linewidth=1)
    if coded := [g for g in result["groups"] if g["code_report"] and g["by"] == ranked[0]["by"]]:
        figures["codes"], axes = plt.subplots(2, 2, figsize=(8.3, 5.6), layout="constrained")
        draw_codes(axes, coded, styles)
        figures["codes"].legend(loc="outside lower center", ncols=3)
    for name, figure in figures.items():
        figure.savefig(out / f"{name}.png")
        plt.close(figure)
    return list(figures)
