"""run.json and metrics.jsonl -> what a person looks at afterwards."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .checkpoints import read_json
from .hardware import GIB


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


def plot_speeds(bars: Sequence[tuple[str, float | None, float | None]], path: Path, title: str) -> Path | None:
    """Tokens/s by strategy as a PNG, measured and planned apart; None without data.

    Args:
        bars: (name, measured, planned), either of which may not be there.
    """
    from matplotlib.figure import Figure

    known = [bar for bar in bars if bar[1] or bar[2]]
    if not known:
        return None
    figure = Figure(figsize=(8, 1 + 0.4 * len(known)), layout="constrained")
    axes = figure.subplots()
    places = range(len(known), 0, -1)
    both = any(bar[1] for bar in known) and any(bar[2] for bar in known)
    height = 0.35 if both else 0.7
    for nth, label, style in ((1, "measured", {"color": "#4d6bfe"}), (2, "planned", {"facecolor": "none", "edgecolor": "#555555", "hatch": "//"})):
        if any(bar[nth] for bar in known):
            shift = (height / 2 if nth == 1 else -height / 2) if both else 0.0
            axes.barh([place + shift for place in places], [bar[nth] or 0.0 for bar in known], height, label=label, **style)
    axes.set_yticks(list(places), [bar[0] for bar in known])
    axes.set_xlabel("tokens/s")
    axes.set_title(title, fontsize=8, wrap=True)
    axes.grid(axis="x", alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    return path


def duration(seconds: float) -> str:
    """`95` -> `1m35s`, `7300` -> `2h01m`, `200000` -> `2d07h`."""
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours_left = divmod(hours, 24)
    if days:
        return f"{days}d{hours_left:02d}h"
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{seconds:02d}s" if minutes else f"{seconds}s"


@dataclass(frozen=True)
class RunResult:
    """What a finished run left behind; everything is also in its folder."""

    output_dir: Path
    run: dict = field(repr=False)
    """run.json."""
    history: list[dict] = field(repr=False)
    """The rows of metrics.jsonl."""

    @classmethod
    def load(cls, run_dir: str | os.PathLike) -> RunResult:
        folder = Path(run_dir)
        return cls(folder, read_json(folder / "run.json"), read_metrics(folder / "metrics.jsonl"))

    @property
    def status(self) -> str:
        return self.run.get("status", "unknown")

    @property
    def model_dir(self) -> Path:
        return self.output_dir / "model"

    @property
    def metrics(self) -> dict:
        """Held-out figures after training, with first and last loss and tokens/s."""
        keys = ("first_loss", "last_loss", "tokens_per_second", "steps", "tokens", "wall_seconds")
        return {**(self.run.get("after") or {}), **{k: self.run.get(k) for k in keys}}

    @property
    def perplexity_before(self) -> float | None:
        return self.run.get("perplexity_before")

    @property
    def perplexity_after(self) -> float | None:
        return self.run.get("perplexity_after")

    def __str__(self) -> str:
        r = self.run
        lines = [f"{r.get('name')}: {self.status} after {r.get('steps')} steps, {r.get('tokens', 0):,} tokens, "
                 f"{r.get('wall_seconds', 0):.0f} s"]  # fmt: skip
        stage = f" stage {r['zero_stage']}" if r.get("zero_stage") is not None else ""
        lines.append(
            f"  ran        {r.get('engine')}{stage}, {r.get('world_size')} x {r.get('plan', {}).get('device')}"
        )
        if r.get("first_loss") is not None:
            lines.append(f"  loss       {r['first_loss']:.4f} -> {r['last_loss']:.4f}")
        if self.perplexity_after is not None:
            before = f"{self.perplexity_before:,.2f} -> " if self.perplexity_before else ""
            after = r["after"]
            more = [f"{after['bits_per_byte']:.3f} bits per byte"] if "bits_per_byte" in after else []
            more += [f"word perplexity {after['word_perplexity']:,.2f}"] if "word_perplexity" in after else []
            lines.append(f"  perplexity {before}{self.perplexity_after:,.2f} on {after['tokens']:,} held-out tokens"
                         + (f" ({', '.join(more)})" if more else ""))  # fmt: skip
        if r.get("tokens_per_second"):
            lines.append(f"  speed      {r['tokens_per_second']:,.0f} tokens/s, peak memory "
                         f"{max(r.get('peak_memory_bytes', [0])) / GIB:.2f} GiB per rank")  # fmt: skip
        if r.get("sample"):
            lines.append(f"  sample     {r['sample']['prompt']!r} ->\n             {r['sample']['text']!r}")
        if (self.output_dir / "loss.png").is_file():
            lines.append(f"  plot       {self.output_dir / 'loss.png'}")
        lines.append(f"  model      {self.model_dir}")
        return "\n".join(lines)
