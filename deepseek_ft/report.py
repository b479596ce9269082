"""run.json and metrics.jsonl -> what a person looks at afterwards."""

from __future__ import annotations

import json
from pathlib import Path


def read_metrics(path: Path) -> list[dict]:
    """The rows of a metrics.jsonl, steps in order.

    A line that was cut off is left out, and so are rows that a resumed run has trained again.
    """
    rows: list[dict] = []
    for line in path.read_text(encoding="utf-8").split("\n") if path.is_file() else []:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        while rows and rows[-1]["step"] > row["step"]:
            rows.pop()
        if rows and rows[-1]["step"] == row["step"] and rows[-1].keys() == row.keys():
            rows.pop()
        rows.append(row)
    return rows


def plot_loss(metrics: list[dict], path: Path, title: str) -> Path | None:
    """Training and held-out loss over steps, the learning rate below them, as a PNG; None without data."""
    from matplotlib.figure import Figure  # without pyplot: no window system, no global state

    train = [(m["step"], m["loss"], m["learning_rate"]) for m in metrics if "loss" in m]
    held_out = [(m["step"], m["eval_loss"]) for m in metrics if "eval_loss" in m]
    if not train:
        return None
    figure = Figure(figsize=(8, 5), layout="constrained")
    loss, rate = figure.subplots(2, 1, sharex=True, height_ratios=[4, 1])
    steps, losses, rates = zip(*train, strict=True)
    loss.plot(steps, losses, label="training", color="#4d6bfe")
    if held_out:
        loss.plot(*zip(*held_out, strict=True), "o", label="held out", color="#e4572e")
    loss.set_ylabel("loss (nats per token)")
    loss.set_title(title)
    loss.grid(alpha=0.3)
    loss.legend()
    rate.plot(steps, rates, color="#555555")
    rate.set_ylabel("learning rate")
    rate.set_xlabel("step")
    rate.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    return path
