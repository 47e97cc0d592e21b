"""How figures look: colours, dashes, marks and names of interfaces; axes and sizes."""

import itertools
import os

# Each kind of input has its colour in every figure: those that colour-blind eyes tell apart (Okabe
# and Ito, 2008), then some of Tol's for kinds of a user's own. Dashes are for its variants, markers
# for values of --by.
COLOURS = {"learned": "#000000", "binary": "#0072B2", "gf2": "#D55E00", "lowdim": "#009E73",
           "random": "#CC79A7", "tied": "#E69F00", "sinusoid": "#56B4E9", "projected": "#332288",
           "digits": "#882255", "factored": "#117733", "alone": "#999933", "hashed": "#AA4499",
           "spelling": "#8B5A2B"}
SPARE_COLOURS = ("#777777", "#44AA99", "#661100", "#6699CC", "#AA4466")
DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)), (0, (10, 3)),
          (0, (6, 2, 1.5, 2, 1.5, 2)), (0, (1.5, 4)), (0, (12, 2, 4, 2)))
MARKERS = ("", "o", "s", "^", "D", "v", "P", "X")
STYLE = {"font.size": 9.5, "axes.titlesize": 10, "axes.titlelocation": "left",
         "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.3,
         "axes.axisbelow": True, "legend.frameon": False, "legend.handlelength": 3,
         "savefig.dpi": 200}


def line_styles(groups):
    """Return {name: how to draw it}: no two names alike."""
    values = sorted({g["by"] for g in groups})
    looks = label_looks({g["label"]: None for g in groups})
    styles = {}
    for g in groups:
        marker = MARKERS[values.index(g["by"]) % len(MARKERS)]
        styles[g["name"]] = {**looks[g["label"]], "marker": marker, "markersize": 4}
    return styles


def label_looks(labels):
    """Return {label: its colour and dashes}, each once while there are any left."""
    spare, colours = list(SPARE_COLOURS), dict(COLOURS)
    looks, taken = {}, set()
    for label in sorted(labels, key=len):  # the plainest variant is solid
        kind = label.split()[0]
        if kind not in colours:
            colours[kind] = spare.pop(0) if spare else SPARE_COLOURS[0]
        # A ninth variant takes a dash of a colour that no kind has.
        choices = list(itertools.product((colours[kind], *spare), DASHES))
        look = next((choice for choice in choices if choice not in taken), choices[0])
        taken.add(look)
        looks[label] = {"color": look[0], "linestyle": look[1]}
    return looks


def name_shortly(groups):
    """Return a function that leaves out of a name the code seed, where all groups share it."""
    drawn = {g["interface"].get("code_seed") for g in groups} - {None}
    shared = f" code {min(drawn)}" if len(drawn) == 1 else None
    return lambda name: name.replace(shared, "") if shared else name


def import_matplotlib():
    """Return the package, whatever drawing window MPLBACKEND asks for: a notebook's may be missing
    here, and none is needed to write a file."""
    asked = os.environ.pop("MPLBACKEND", None)
    try:
        import matplotlib
    finally:
        if asked is not None:
            os.environ["MPLBACKEND"] = asked
    return matplotlib


def make_figure(height, rows=1, columns=1):
    """Return (figure, axes [rows, columns]), outside of pyplot and so of any window."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(8.3, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def set_log_axis(axis, formatter):
    """Make x logarithmic, with so few numbers that they do not run together."""
    from matplotlib.ticker import LogLocator, NullFormatter
    axis.set_xscale("log")
    low, high = axis.get_xlim()
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 1000 * low else (1,)))
    axis.xaxis.set_major_formatter(formatter)
    axis.xaxis.set_minor_formatter(NullFormatter())


def legend_size(groups):
    """Return (columns, rows) of a legend below a figure, at most three columns."""
    longest = max(len(g["name"]) for g in groups)
    columns = 3 if longest < 25 else 2
    return columns, -(-len(groups) // columns)
