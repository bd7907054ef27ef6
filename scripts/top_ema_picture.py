"""Draws docs/top_ema.svg: what Top-EMA keeps while a model is sure, then suddenly is not.

    python scripts/top_ema_picture.py

A made-up text of 24 steps; the numbers in the picture are computed as kvasir/sampling/logit_rules.py computes them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

BETA, SHARE, DEPTH, VOCAB = 0.9, 0.5, 2, 40
SURE, UNSURE = 2.2, 0.95  # how steep the logits are
PICTURE = Path(__file__).parent.parent / "docs" / "top_ema.svg"
WIDTH, HEIGHT, LEFT, TOP, STEP = 720, 320, 60, 30, 26


def kept(sums: np.ndarray, goal: float) -> int:
    """How many of the likeliest tokens have this much mass."""
    return min(VOCAB, int((sums < goal).sum()) + 1)


def run() -> list[tuple[float, float, float, int, int]]:
    """For each step: H, m, the mass to keep, tokens kept by Top-EMA, tokens kept by plain top-p."""
    average, found = None, []
    for step in range(24):
        steep = UNSURE if step in (9, 10, 17) else SURE * (0.8 + 0.2 * np.sin(step))
        logits = -steep * np.log1p(np.arange(VOCAB))
        probs = np.exp(logits) / np.exp(logits).sum()
        mass = float(probs[:DEPTH].sum())
        average = mass if average is None else BETA * average + (1 - BETA) * mass
        goal = min(1.0, max(SHARE, SHARE * average / mass))
        sums = np.cumsum(probs)
        found.append((mass, average, goal, kept(sums, goal), kept(sums, SHARE)))
    return found


def draw() -> str:
    steps = run()
    low = TOP + 170

    def y(value: float) -> float:
        return TOP + 150 * (1 - value)

    def line(values: list[float], color: str) -> str:
        points = " ".join(f"{LEFT + STEP * (i + 0.5):.0f},{y(v):.1f}" for i, v in enumerate(values))
        return f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>'

    def text(x: float, height: float, said: str, color: str = "#333") -> str:
        return f'<text x="{x:.0f}" y="{height:.0f}" fill="{color}">{said}</text>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        *(f'<line x1="{LEFT}" x2="{LEFT + 24 * STEP}" y1="{y(v)}" y2="{y(v)}" stroke="#ddd"/>' for v in (0, 0.5, 1)),
        *(text(LEFT - 28, y(v) + 4, f"{v:g}") for v in (0, 0.5, 1)),
        line([s[0] for s in steps], "#999"),
        line([s[1] for s in steps], "#2a7"),
        line([s[2] for s in steps], "#c33"),
        text(LEFT, 16, "H: mass of the top d tokens", "#777"),
        text(LEFT + 190, 16, "m: its moving average", "#2a7"),
        text(LEFT + 350, 16, f"mass kept (top_ema_p={SHARE:g}, top_ema_d={DEPTH})", "#c33"),
    ]
    for i, (*_, wide, plain) in enumerate(steps):
        x = LEFT + STEP * i
        parts.append(f'<rect x="{x + 4}" y="{low}" width="8" height="{wide * 2.2:.1f}" fill="#c33"/>')
        parts.append(f'<rect x="{x + 14}" y="{low}" width="8" height="{plain * 2.2:.1f}" fill="#bbb"/>')
    said = f"tokens kept in each step, hanging down: Top-EMA (red) against plain top_p={SHARE:g} (grey)"
    parts.append(text(LEFT, HEIGHT - 8, said))
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
    print(f"wrote {PICTURE.name}")
