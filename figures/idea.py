"""Draw idea.png: how a token id becomes the decoder's first vector, in binary and in gf2.

Usage:
    python figures/idea.py            (from the project's root)

Every bit shown is computed by codes.py, from the paper's own recoding matrix.
"""

import sys
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from codes import binary_codes, draw_recoding, recode  # noqa: E402

TOKEN, V, C = 42, 49_152, 2048  # any id; the paper's vocabulary and width
DARK, LIGHT, EDGE, BLUE = "#20405f", "#f4f1ea", "#8a8a8a", "#0072B2"


def draw_bits(axis, bits, x, y, size):
    """Draw bits as squares from (x, y) to the right; return where they end."""
    for i, bit in enumerate(bits):
        colour = DARK if bit else LIGHT
        axis.add_patch(plt.Rectangle((x + i * size, y), size, size, fc=colour, ec=EDGE, lw=0.5))
        axis.text(x + (i + 0.5) * size, y + size / 2, str(bit), ha="center", va="center",
                  color=LIGHT if bit else DARK, fontsize=7)
    return x + len(bits) * size


def draw_arrow(axis, start, end, text=""):
    axis.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": EDGE, "lw": 1.2})
    axis.text((start[0] + end[0]) / 2, start[1] + 1.3, text, ha="center", va="bottom", fontsize=8,
              color="#333333")


def draw_row(axis, y, name, bits, how):
    """Draw one interface: the id, its code, and the code's copies, which fill the width."""
    axis.text(0, y + 1.5, f"--input={name}", fontsize=9, va="center", family="monospace")
    axis.text(24, y + 1.5, f"id {TOKEN}", fontsize=9, va="center", ha="center")
    draw_arrow(axis, (27.5, y + 1.5), (42, y + 1.5), how)
    end = draw_bits(axis, bits, 43, y, 2.6)
    draw_arrow(axis, (end + 1, y + 1.5), (end + 13, y + 1.5), f"{C // len(bits)} copies")
    for copy in range(3):
        for i, bit in enumerate(bits):
            left = end + 14 + (copy * len(bits) + i) * 0.55
            axis.add_patch(plt.Rectangle((left, y), 0.55, 2.6, fc=DARK if bit else LIGHT, lw=0))
    axis.text(end + 41.4, y + 1.3, "...", fontsize=11, va="center")
    axis.add_patch(plt.Rectangle((end + 14, y), 26.4, 2.6, fill=False, ec=EDGE, lw=0.6))
    return end + 44


def main():
    codes = binary_codes(V)
    matrix, offset = draw_recoding(codes.shape[1])
    figure, axis = plt.subplots(figsize=(9.6, 1.05), layout="constrained")
    draw_row(axis, 9, "binary", codes[TOKEN], "its bits")
    x = draw_row(axis, 1, "gf2", recode(codes, matrix, offset)[TOKEN], "A · bits mod 2")
    draw_arrow(axis, (x, 10.5), (x + 6, 7.6))
    draw_arrow(axis, (x, 2.5), (x + 6, 5.2))
    axis.add_patch(plt.Rectangle((x + 6.5, 2.2), 20, 8.4, fc="white", ec=BLUE, lw=1.6))
    axis.text(x + 16.5, 6.4, "decoder\n24 blocks\nnothing else differs", ha="center", va="center",
              fontsize=8.5)
    axis.text(x - 13, 13.4, f"{C:,} numbers, none trained", fontsize=9, ha="center")
    axis.set(xlim=(-0.5, x + 27), ylim=(0, 15.6), aspect="equal")
    axis.axis("off")
    figure.savefig(Path(__file__).with_name("idea.png"), dpi=200)


if __name__ == "__main__":
    main()
