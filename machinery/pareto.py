"""The figure of held-out loss against trainable input values, every mark with its name beside it.

For compare.py. Names cover nothing as far as there is room: those of the interfaces without
trainable values stand in a column, in order and as near to their marks as that allows, all others
in the best place around their mark.
"""

import itertools

import numpy as np

SIZE = 8.3, 6.2  # inches; 830 pixels wide
EDGES = dict(left=0.075, right=0.99, bottom=0.1, top=0.945, wspace=0.025)
SMALL = 8.5  # points
LANE, LANES = 0.045, 4  # of the left panel's width: marks beside each other
SHARE = 2.2  # how much wider than the left panel the right one is
AROUND = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (1, -1), (-1, 1), (-1, -1))
REACH = (9, 13, 18, 26, 36, 48, 62)  # pixels at 100 an inch from a mark to its name
GREY, INK = "#C8C8C8", "#222222"


def draw_pareto(groups, colours, base):
    """Return the figure.

    Args:
        groups: of compare_runs' result, with known parameters.
        colours: {name: colour}.
        base: the group whose loss is the line across.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    figure = Figure(figsize=SIZE)
    FigureCanvasAgg(figure)
    free = sorted((g for g in groups if not g["parameters"]["input"]), key=lambda g: g["loss"])
    paid = sorted((g for g in groups if g["parameters"]["input"]), key=lambda g: g["loss"])
    left, right = figure.subplots(1, 2, sharey=True, gridspec_kw=EDGES,
                                  width_ratios=(1 if free else 0.15, SHARE))
    for axis in (left, right):
        axis.axhline(base["loss"], color=INK, linewidth=1, linestyle=(0, (5, 2)), zorder=1)
    lanes = spread_marks(free)
    for g, lane in zip(free, lanes):
        draw_mark(left, lane, g, colours[g["name"]])
    for g in paid:
        draw_mark(right, g["parameters"]["input"], g, colours[g["name"]])
    set_axes(left, right, paid)
    corners = draw_frontier(right, free, paid)
    left.set_title(f"Mean (dot) and seeds (ticks). Dashed: {base['name']}. Grey: the lowest loss "
                   "with so many values or fewer")
    figure.supxlabel("trainable input values", fontsize=9.5, y=0.022)
    figure.draw_without_rendering()
    name_column(left, free, lanes)
    name_around(right, paid, base, corners)
    return figure


def draw_mark(axis, x, group, colour):
    """Draw a group's mean as a dot and its seeds as ticks on a hairline."""
    losses = group["losses"]
    axis.plot([x, x], [min(losses), max(losses)], color=colour, linewidth=1, zorder=2)
    axis.plot([x] * len(losses), losses, "_", color=colour, markersize=10, zorder=2)
    axis.plot(x, group["loss"], "o", color=colour, markersize=5.5, zorder=3)


def spread_marks(groups):
    """Return where beside 0 each mark stands, so that seeds of different groups do not mix: in the
    first lane whose marks so far, all of lower losses, end below it."""
    tops, lanes = [-np.inf] * LANES, []
    for g in groups:
        clear = [lane for lane in range(LANES) if tops[lane] < min(g["losses"])]
        lane = clear[0] if clear else int(np.argmin(tops))
        tops[lane] = max(g["losses"])
        lanes.append(lane * LANE)
    return lanes


def set_axes(left, right, paid):
    """Give 0 a tick of its own, clearly broken off from the logarithmic axis."""
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter
    left.set(xlim=(-0.07, 1), xticks=[0], xticklabels=["0"],
             ylabel="held-out loss (nats per target)")
    left.grid(False, axis="x")
    right.set_xscale("log")
    counts = [g["parameters"]["input"] for g in paid]
    if counts:
        right.set_xlim(min(counts) / 1.8, max(counts) * 5)  # room for names
    right.xaxis.set_major_locator(LogLocator())
    right.xaxis.set_major_formatter(EngFormatter(sep=""))
    right.xaxis.set_minor_formatter(NullFormatter())
    right.spines["left"].set_visible(False)
    right.tick_params(axis="y", length=0)
    for axis, end in ((left, 1), (right, 0)):
        axis.plot(end, 0, marker=[(-0.6, -1), (0.6, 1)], markersize=9, color="black",
                  transform=axis.transAxes, clip_on=False)
        axis.set_ylim(axis.get_ylim())  # what is drawn from here on changes no limits
        axis.set_xlim(axis.get_xlim())


def draw_frontier(axis, free, paid):
    """Draw the lowest loss that so many trainable values or fewer give, as steps; return their
    corners."""
    start, end = axis.get_xlim()
    corners = [(start, g["loss"]) for g in free[:1]]
    for g in sorted(paid, key=lambda g: g["parameters"]["input"]):
        x, lowest = g["parameters"]["input"], corners[-1][1] if corners else np.inf
        if g["loss"] < lowest:
            corners += [(x, lowest)] if corners else []
            corners.append((x, g["loss"]))
    corners.append((end, corners[-1][1]))
    axis.plot(*zip(*corners), color=GREY, linewidth=2.5, zorder=0.5)
    return corners


def name_column(axis, groups, lanes):
    """Name marks that stand above each other: in order, one below another, right of them."""
    from scipy.optimize import isotonic_regression
    if not groups:
        return
    marks = axis.transData.transform([(lane, g["loss"]) for lane, g in zip(lanes, groups)])
    height, bounds = measure(axis, "binary")[1], axis.get_window_extent()
    steps = height * np.arange(len(groups))
    # The least squares of moves that keep the order and the distance; then none is outside.
    moved = isotonic_regression(marks[:, 1] - steps).x
    middles = moved.clip(bounds.y0 + height / 2, bounds.y1 - height / 2 - steps[-1]) + steps
    end = marks[:, 0].max() + 24
    for g, mark, middle in zip(groups, marks, middles):
        lead(axis, mark + (7, 0), (end - 3, middle))
        write_name(axis, g["name"], (end, middle))


def name_around(axis, groups, base, corners):
    """Name marks in the best of the places around them, off the lines as far as may be."""
    bounds = axis.get_window_extent()
    across = axis.transData.transform((1, base["loss"]))[1]
    taken = [(bounds.x0, across - 1, bounds.x1, across + 1)]
    for ends in itertools.pairwise(axis.transData.transform(corners)):
        low, high = np.min(ends, axis=0) - 1.5, np.max(ends, axis=0) + 1.5
        taken.append((*low, *high))
    for g in groups:
        ends = [(g["parameters"]["input"], loss) for loss in (min(g["losses"]), max(g["losses"]))]
        (x, low), (_, high) = axis.transData.transform(ends)
        taken.append((x - 6, low - 3, x + 6, high + 3))
    for g in groups:
        mark = axis.transData.transform((g["parameters"]["input"], g["loss"]))
        size = np.array(measure(axis, g["name"]))
        places = []
        for reach in REACH:
            places += [box_beside(mark, size, reach, toward) for toward in AROUND]
        costs = [cost(box, taken, bounds) + number for number, box in enumerate(places)]
        best = places[int(np.argmin(costs))]
        taken.append(best)
        nearest = np.clip(mark, best[:2], best[2:])
        if np.abs(mark - nearest).max() > REACH[1]:
            lead(axis, mark, nearest)
        write_name(axis, g["name"], (best[0], (best[1] + best[3]) / 2))


def measure(axis, text):
    """Return the width and height of a name in pixels."""
    drawn = axis.text(0, 0, text, fontsize=SMALL)
    box = drawn.get_window_extent()
    drawn.remove()
    return box.width, box.height


def box_beside(mark, size, reach, toward):
    """Return the box (left, bottom, right, top) of a size, so many pixels from a mark on a side."""
    middle = mark + np.array(toward) * (size / 2 + reach)
    return (*(middle - size / 2), *(middle + size / 2))


def cost(box, taken, bounds):
    """Return how bad a box is: its square pixels that others cover or that are out of bounds."""
    found, area = 0, (box[2] - box[0]) * (box[3] - box[1])
    for other in taken:
        found += overlap(box, other)
    return found + 5 * (area - overlap(box, (bounds.x0, bounds.y0, bounds.x1, bounds.y1)))


def overlap(a, b):
    """Return the area that two boxes share."""
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    return max(0, width) * max(0, height)


def lead(axis, start, end):
    """Draw a thin line between two points in pixels."""
    ends = axis.transData.inverted().transform([start, end])
    axis.plot(*ends.T, color=GREY, linewidth=0.8, zorder=0.8)


def write_name(axis, text, place):
    """Write a name at a place, its left end and middle, in pixels; lines pass behind it."""
    from matplotlib.patheffects import withStroke
    axis.text(*axis.transData.inverted().transform(place), text, fontsize=SMALL, color=INK,
              va="center", ha="left", path_effects=[withStroke(linewidth=3, foreground="white")])
