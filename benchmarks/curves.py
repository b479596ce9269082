"""Loss curves on real text: one model, one order of the same batches, every precision and every optimizer that runs here.

    python benchmarks/curves.py path/to/wikitext-103
    python benchmarks/curves.py path/to/wikitext-103 --model runs/smollm2-135m-base --steps 24 --seed 42 --lr 5e-5

Trains on the validation set of WikiText-103, scores articles of its test set, draws one plot and prints one table. The model
is a tiny Llama from its seed, or a folder of weights (`benchmarks/pretrained_135m.py` makes one of 135 M), which are rounded
to bf16 first: so published weights come, and fp32 and bf16 begin at the same place. Every run goes through `finetune`, in one
process: what is compared is rounding and optimizers, and not ranks. A finished run's losses stay under `--work` and are not
made again, so an interrupted benchmark goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import shutil
import statistics
from pathlib import Path

from deepseek_ft import finetune
from deepseek_ft.errors import ConfigError, PlanError

PRECISIONS = {
    "fp32": ("single", "fp32", "adamw"),
    "bf16, autocast over fp32 weights": ("single", "bf16", "adamw"),
    "bf16, fp32 master (ZeRO-2)": ("zero2", "bf16", "adamw"),
    "fp16, fp32 master, loss scale (ZeRO-2)": ("zero2", "fp16", "adamw"),
    "bf16 master, to the nearest (ZeRO-3)": ("zero3_bf16", "bf16", "adamw"),
    "bf16 master, stochastic (ZeRO-3)": ("zero3_bf16", "bf16", "adamw_bf16"),
}
"""Name -> strategy, train.precision, optim.name. The first is what all curves are held against."""


def optimizers() -> dict[str, tuple[str, str, str]]:
    """All but AdamW, in fp32. What is not installed, or runs on a card only, stays in the table with its reason."""
    from deepseek_ft.optimizers import OPTIMIZERS

    return {f"{name}, {'bf16' if row.bf16_weights else 'fp32'} weights":
            ("single", "bf16" if row.bf16_weights else "fp32", name)
            for name, row in OPTIMIZERS.items() if name != "adamw"}  # fmt: skip


def recipe(arguments: argparse.Namespace, seed: int, name: str, choice: tuple[str, str, str]) -> dict:
    strategy, precision, optimizer = choice
    tiny = arguments.model.startswith("preset:")
    return {
        "name": f"curve-{slug(name)}-{seed}",
        "seed": seed,
        "output_dir": str(arguments.work / label(arguments) / f"{slug(name)}-{seed}"),
        "model": {"path": arguments.model, "gradient_checkpointing": False, **({"tokenizer": "train:4096"} if tiny else {})},
        "data": {
            "path": str(arguments.text),
            "train": [{"source": "wikitext-103", "split": "validation"}],
            "eval": [{"source": "wikitext-103", "split": "test", "max_documents": 12 if tiny else 2}],
            "seq_len": 128,
        },
        "optim": {"name": optimizer, "lr": arguments.lr, "schedule": "cosine", "warmup_ratio": 0.1},
        "train": {"max_steps": arguments.steps, "micro_batch_size": 8 if tiny else 4, "precision": precision, "log_steps": 1,
                  "eval_steps": None, "save_steps": None},
        "strategy": strategy,
        "ranks": 1,
    }  # fmt: skip


def slug(name: str) -> str:
    return "-".join("".join(c if c.isalnum() else " " for c in name).split())


def label(arguments: argparse.Namespace) -> str:
    return arguments.model.removeprefix("preset:").rstrip("/").split("/")[-1]


def rounded(folder: Path, target: Path) -> Path:
    """The same model with bf16 weights."""
    import torch
    from safetensors.torch import load_file, save_file

    if not (target / "config.json").is_file():
        shutil.copytree(
            folder, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("config.json", "*.safetensors")
        )
        for file in folder.glob("*.safetensors"):
            weights = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(file).items()}
            save_file(weights, target / file.name, metadata={"format": "pt"})
        config = json.loads((folder / "config.json").read_text("utf-8"))
        config.pop("torch_dtype", None)
        (target / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}, indent=2), "utf-8")
    return target


def train(arguments: argparse.Namespace, seed: int, name: str, choice: tuple[str, str, str]) -> dict:
    """The losses of one run and the held-out loss before and after; or why it is refused. What fails later ends the benchmark."""
    asked = recipe(arguments, seed, name, choice)
    kept = Path(asked["output_dir"] + ".json")
    if kept.is_file() and (found := json.loads(kept.read_text("utf-8")))["recipe"] == asked:
        return found
    try:
        result = finetune(asked, new=True)
    except (ConfigError, PlanError) as error:
        return {"failed": str(error).splitlines()[0]}
    losses = {row["step"]: row["loss"] for row in result.history if "loss" in row}
    found = {
        "recipe": asked,
        # Steps that fp16 leaves out have none.
        "losses": [losses.get(step, math.nan) for step in range(1, arguments.steps + 1)],
        "before": result.run["before"]["loss"],
        "held_out": result.run["after"]["loss"],
    }
    kept.write_text(json.dumps(found), "utf-8")
    return found


def table(curves: dict[str, list[dict]]) -> str:
    """One row a curve. What is said of the first row is over the same seeds, each against its own."""
    first = next(iter(curves.values()))
    lines = [
        "| curve | training loss, last ten | held out | minus the first row's, each seed | largest gap of a step |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, runs in curves.items():
        if "failed" in runs[-1]:
            lines.append(f"| {name} | does not run: {runs[0]['failed']} | | | |")
            continue
        pairs = list(zip(runs, first, strict=True))
        last = statistics.mean(statistics.mean(run["losses"][-10:]) for run in runs)
        held = statistics.mean(run["held_out"] for run in runs)
        apart = ", ".join(f"{run['held_out'] - base['held_out']:+.4f}" for run, base in pairs)
        gaps = (abs(a - b) for run, base in pairs for a, b in zip(run["losses"], base["losses"], strict=True))
        gap = max(gap for gap in gaps if not math.isnan(gap))
        lines.append(f"| {name} | {last:.4f} | {held:.4f} | {apart} | {gap:.4f} |")
    return "\n".join(lines)


def plot(curves: dict[str, list[dict]], file: Path, title: str) -> None:
    """Precisions on the left, optimizers on the right; the mean of the seeds with their range, below it the gap to the first."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    figure, axes = plt.subplots(2, 2, figsize=(14, 8), sharex=True, sharey="row", height_ratios=(3, 2))
    reference = np.array([run["losses"] for run in next(iter(curves.values()))])
    for (above, below), names, what in (
        (axes[:, 0], list(PRECISIONS), "precision, AdamW"),
        (axes[:, 1], ["fp32", *(name for name in curves if name not in PRECISIONS)], "optimizer"),
    ):
        for name in names:
            if not curves.get(name) or "failed" in curves[name][-1]:
                continue
            losses = np.ma.masked_invalid([run["losses"] for run in curves[name]])
            steps, gap = np.arange(1, losses.shape[1] + 1), losses - reference
            (line,) = above.plot(steps, losses.mean(0), label=name if name != "fp32" else "adamw, fp32", linewidth=1)
            for axis, values in ((above, losses), (below, gap)):
                axis.fill_between(steps, values.min(0), values.max(0), color=line.get_color(), alpha=0.15, linewidth=0)
            below.plot(steps, gap.mean(0), color=line.get_color(), linewidth=1)
        above.set_title(what)
        above.legend(fontsize=8)
        below.set_xlabel("optimizer step")
    axes[0, 0].set_ylabel("loss, nats per token")
    axes[1, 0].set_ylabel("minus that of adamw, fp32")
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(file, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="folder with wiki.valid.tokens and wiki.test.tokens")
    parser.add_argument("--model", default="preset:tiny-llama", help="a preset, or a folder of trained weights")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument(
        "--lr", type=float, default=2e-3, help="for every optimizer: GaLore and APOLLO scale it themselves"
    )
    parser.add_argument(
        "--work", type=Path, default=Path("runs/curves"), help="where the runs and their losses are kept"
    )
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"), help="where the plot is put")
    arguments = parser.parse_args()
    arguments.text = arguments.text.resolve()
    if not arguments.model.startswith("preset:"):
        folder = Path(arguments.model).resolve()
        arguments.model = str(rounded(folder, arguments.work.resolve() / "weights" / f"{folder.name}-bf16"))
    curves: dict[str, list[dict]] = {}
    for name, choice in (PRECISIONS | optimizers()).items():
        for seed in arguments.seed:
            found = train(arguments, seed, name, choice)
            curves.setdefault(name, []).append(found)
            if "failed" in found:
                break
            held = f"held out {found['before']:.4f} -> {found['held_out']:.4f}"
            print(f"{name}, seed {seed}: {found['losses'][0]:.4f} -> {found['losses'][-1]:.4f}, {held}", flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    title = f"{label(arguments)}, WikiText-103, {arguments.steps} steps, seeds {', '.join(map(str, arguments.seed))}"
    plot(curves, arguments.out / f"curves-{label(arguments)}.png", title)
    print(f"\n{title}\n\n{table(curves)}")


if __name__ == "__main__":
    from deepseek_ft.cli import guard, set_up_logging

    set_up_logging()
    logging.getLogger().setLevel(logging.WARNING)
    raise SystemExit(guard(main))
