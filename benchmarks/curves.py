"""Loss curves on real text: one model, one order of the same batches, every precision and every optimizer that runs here.

    python benchmarks/curves.py path/to/wikitext-103 --out docs/benchmarks
    python benchmarks/curves.py path/to/wikitext-103 --model runs/smollm2-135m-base --steps 24 --seed 42 --out docs/benchmarks

Trains on the validation set of WikiText-103, scores articles of its test set, and writes one plot and one table. The model
is a tiny Llama from its seed, or a folder of weights (`benchmarks/pretrained_135m.py` makes one of 135 M). Every run goes
through `finetune`, in one process: what is compared is rounding and optimizers, and not ranks.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
from pathlib import Path

from deepseek_ft import finetune
from deepseek_ft.errors import DeepSeekFTError

PRECISIONS = {
    "fp32": ("single", "fp32", "adamw"),
    "bf16, autocast over fp32 weights": ("single", "bf16", "adamw"),
    "bf16, fp32 master (ZeRO)": ("zero2", "bf16", "adamw"),
    "fp16, fp32 master, dynamic loss scale (ZeRO)": ("zero2", "fp16", "adamw"),
    "bf16 master, rounded (ZeRO-3)": ("zero3_bf16", "bf16", "adamw"),
    "bf16 master, stochastic rounding (ZeRO-3)": ("zero3_bf16", "bf16", "adamw_bf16"),
}
"""Name -> strategy, train.precision, optim.name. The first is what the others are held against."""


def optimizers() -> dict[str, tuple[str, str, str]]:
    """All of them, in fp32; what is not installed, or runs on a card only, stays in the table with its reason."""
    from deepseek_ft.optimizers import OPTIMIZERS

    in_fp32 = {name: ("single", "fp32", name) for name, row in OPTIMIZERS.items() if not row.bf16_weights}
    return in_fp32 | {name: ("single", "bf16", name) for name, row in OPTIMIZERS.items() if row.bf16_weights}


def recipe(arguments: argparse.Namespace, seed: int, name: str, choice: tuple[str, str, str]) -> dict:
    strategy, precision, optimizer = choice
    tiny = arguments.model.startswith("preset:")
    slug = "".join(c if c.isalnum() else "-" for c in name)
    optim = {"name": optimizer, "lr": arguments.lr, "schedule": "cosine", "warmup_ratio": 0.1}
    return {
        "name": f"curve-{slug}-{seed}",
        "seed": seed,
        "output_dir": str(arguments.work / f"{slug}-{seed}"),
        "model": {"path": arguments.model, "gradient_checkpointing": False, **({"tokenizer": "train:4096"} if tiny else {})},
        "data": {
            "path": str(arguments.text),
            "train": [{"source": "wikitext-103", "split": "validation"}],
            "eval": [{"source": "wikitext-103", "split": "test", "max_documents": 12 if tiny else 2}],
            "seq_len": 128,
        },
        "optim": optim | arguments.rates.get(optimizer, {}),
        "train": {"max_steps": arguments.steps, "micro_batch_size": 8 if tiny else 4, "precision": precision, "log_steps": 1,
                  "eval_steps": None, "save_steps": None},
        "strategy": strategy,
        "ranks": 1,
    }  # fmt: skip


def train(arguments: argparse.Namespace, names: dict[str, tuple[str, str, str]]) -> dict[str, dict]:
    """Name -> the losses of each seed, and the held-out loss before and after; or why it does not run."""
    found: dict[str, dict] = {}
    for name, choice in names.items():
        runs: list[dict] = []
        for seed in arguments.seed:
            try:
                result = finetune(recipe(arguments, seed, name, choice), new=True)
            except DeepSeekFTError as error:
                found[name] = {"failed": str(error).splitlines()[0]}
                break
            losses = [row["loss"] for row in result.history if "loss" in row]
            runs.append(
                {"losses": losses, "held_out": result.run["after"]["loss"], "before": result.run["before"]["loss"]}
            )
            print(
                f"{name}, seed {seed}: {losses[0]:.4f} -> {losses[-1]:.4f}, held out {runs[-1]['held_out']:.4f}",
                flush=True,
            )
        else:
            found[name] = {"choice": choice, "runs": runs}
    return found


def table(found: dict[str, dict], seeds: list[int]) -> str:
    first = next(iter(found.values()))["runs"]
    lines = [
        "| curve | last losses, mean of ten | held out | the same minus the first row's, each seed | largest gap of a step to the first row |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, row in found.items():
        if "failed" in row:
            lines.append(f"| {name} | does not run: {row['failed']} | | | |")
            continue
        last = statistics.mean(statistics.mean(run["losses"][-10:]) for run in row["runs"])
        held = statistics.mean(run["held_out"] for run in row["runs"])
        apart = ", ".join(
            f"{run['held_out'] - base['held_out']:+.4f}" for run, base in zip(row["runs"], first, strict=True)
        )
        gap = max(abs(a - b) for run, base in zip(row["runs"], first, strict=True)
                  for a, b in zip(run["losses"], base["losses"], strict=True))  # fmt: skip
        lines.append(f"| {name} | {last:.4f} | {held:.4f} | {apart} | {gap:.4f} |")
    return "\n".join(lines)


def plot(found: dict[str, dict], file: Path, title: str) -> None:
    """One line for each, the mean of its seeds with their range; below it the gap to the first."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    figure, (above, below) = plt.subplots(2, 1, figsize=(9, 8), sharex=True, height_ratios=(3, 2))
    reference = None
    for name, row in found.items():
        if "failed" in row:
            continue
        losses = np.array([run["losses"] for run in row["runs"]])
        mean, steps = losses.mean(0), np.arange(1, losses.shape[1] + 1)
        reference = mean if reference is None else reference
        (line,) = above.plot(steps, mean, label=name, linewidth=1)
        above.fill_between(steps, losses.min(0), losses.max(0), color=line.get_color(), alpha=0.15, linewidth=0)
        below.plot(steps, mean - reference, color=line.get_color(), linewidth=1)
    above.set_ylabel("loss, nats per token")
    above.set_title(title)
    above.legend(fontsize=8)
    below.set_ylabel("minus that of the first")
    below.set_xlabel("optimizer step")
    figure.tight_layout()
    plt.rcParams["svg.hashsalt"] = "curves"  # the same curves give the same file
    figure.savefig(file, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="folder with wiki.valid.tokens and wiki.test.tokens")
    parser.add_argument("--model", default="preset:tiny-llama", help="a preset, or a folder of trained weights")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument(
        "--rates",
        type=json.loads,
        default={},
        help='as JSON, what an optimizer needs otherwise: {"muon": {"lr": 0.02}}',
    )
    parser.add_argument("--what", choices=("precisions", "optimizers"), default="precisions")
    parser.add_argument("--work", type=Path, default=Path("runs/curves"))
    parser.add_argument(
        "--out", type=Path, default=Path("docs/benchmarks"), help="where plot, table and numbers are put"
    )
    arguments = parser.parse_args()
    arguments.text = arguments.text.resolve()
    names = PRECISIONS if arguments.what == "precisions" else optimizers()
    found = train(arguments, names)
    arguments.out.mkdir(parents=True, exist_ok=True)
    label = arguments.model.removeprefix("preset:").split("/")[-1]
    title = f"{label}, WikiText-103, {arguments.steps} steps, seeds {', '.join(map(str, arguments.seed))}"
    plot(found, arguments.out / f"curves-{label}-{arguments.what}.svg", title)
    print(f"\n{title}\n\n{table(found, arguments.seed)}")


if __name__ == "__main__":
    from deepseek_ft.cli import guard, set_up_logging

    set_up_logging()
    logging.getLogger().setLevel(logging.WARNING)
    raise SystemExit(guard(main))
