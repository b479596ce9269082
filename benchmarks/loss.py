"""The cross entropy over a large vocabulary, side by side: memory, CPU-seconds, and how far off in double precision.

    python benchmarks/loss.py                                    three vocabularies, fp32 and bf16: some twenty minutes
    python benchmarks/loss.py --vocab 102400 --dtype fp32        one case; --vocab and --dtype may be given several times
    python benchmarks/loss.py --tokens 64 --vocab 1000           whether it runs
    python benchmarks/loss.py --device cuda                      on a GPU, where Liger's kernel takes part

Hidden states, a head and labels are drawn at random, a tenth of the labels -100. Every measurement is one forward and
backward pass in a fresh process on one thread, after a tiny one that loads what is loaded once; those that are compared
take turns, and the table has medians. Memory is by how much what lies in RAM grew at most over what lay there with the
inputs (/proc, the high-water mark set anew): gradients, torch's tensors and what the matrix products keep for themselves.
The error is relative to double precision, of the gradients by their norms. On a GPU, seconds are those of the clock and
memory is what torch's allocator gave out.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.data import MIB, Meter, installed, middle, tell  # noqa: E402

VOCABULARIES = [32_256, 102_400, 151_936]
IGNORED = -100
MEMORY, CPU, LOSS = 0.25, 1.3, 1e-5
MEMORY_FROM = 100_000
"""The target for memory is one for large vocabularies."""
ONE_PIECE, PIECES = 1.02, 1.25
TRAINING = {
    "naive": "logits, fp32, cross_entropy",
    "of_transformers": "transformers, ForCausalLMLoss",
    "ours": "**ours**, head_loss",
    "of_deepspeed": "DeepSpeed, TiledFusedLogitsLoss",
    "of_torch": "torch, linear_cross_entropy",
    "of_liger": "Liger, fused linear cross entropy",
}
EVALUATION = {"naive_each": "evaluation: logits, cross_entropy", "ours_each": "evaluation: **ours**, head_nll"}


# --------------------------------------------------------------------------------------- what is compared
# Each takes hidden (N, h), the head (V, h) and labels (N,).


def naive(hidden, weight, labels):
    import torch

    return torch.nn.functional.cross_entropy((hidden @ weight.t()).float(), labels, ignore_index=IGNORED)


def of_transformers(hidden, weight, labels):
    from transformers.loss.loss_utils import ForCausalLMLoss

    logits = (hidden @ weight.t())[None]
    return ForCausalLMLoss(logits, None, weight.shape[0], shift_labels=labels[None])


def ours(hidden, weight, labels):
    from deepseek_ft.losses import head_loss

    return head_loss(hidden, weight, labels)


def of_deepspeed(hidden, weight, labels):
    """With tiles of as many logits as a piece of ours."""
    import torch
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss

    from deepseek_ft.memory import LOSS_ELEMENTS

    counted = (labels != IGNORED).sum()

    def loss(_, x, y):
        logits = (x @ weight.t()).float()
        return torch.nn.functional.cross_entropy(logits, y, ignore_index=IGNORED, reduction="sum") / counted

    shards = -(-hidden.shape[0] * weight.shape[0] // LOSS_ELEMENTS)
    return TiledFusedLogitsLoss.apply(loss, None, hidden[None], labels[None], None, shards, [weight], "sum")


def of_torch(hidden, weight, labels):
    import torch

    options = torch.nn.LinearCrossEntropyOptions()
    return torch.nn.functional.linear_cross_entropy(hidden, weight, labels, options=options)


def of_liger(hidden, weight, labels):
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    return LigerFusedLinearCrossEntropyLoss(ignore_index=IGNORED)(weight, hidden, labels)


def naive_each(hidden, weight, labels):
    import torch

    logits = (hidden @ weight.t()).float()
    return torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none")


def ours_each(hidden, weight, labels):
    from deepseek_ft.losses import head_nll

    return head_nll(hidden, weight, labels)


def why_not(name: str, device: str) -> str:
    """Why one of them cannot take part; empty where it can."""
    if name == "of_deepspeed" and find_spec("deepspeed") is None:
        return "DeepSpeed is not installed"
    if name == "of_torch":
        import torch

        if not hasattr(torch.nn, "LinearCrossEntropyOptions"):
            return f"torch {torch.__version__} does not have it"
    if name == "of_liger" and (device == "cpu" or find_spec("liger_kernel") is None):
        return "it needs a GPU" if device == "cpu" else "liger-kernel is not installed"
    return ""


# ---------------------------------------------------------------------------------------------- measuring


def inputs(spec: dict):
    """Logits with a standard deviation of 2; the same numbers in every process."""
    import torch

    made = torch.Generator().manual_seed(spec["vocab"])
    hidden = torch.randn(spec["tokens"], spec["width"], generator=made)
    weight = torch.randn(spec["vocab"], spec["width"], generator=made).mul_(2 / spec["width"] ** 0.5)
    labels = torch.randint(0, spec["vocab"], (spec["tokens"],), generator=made)
    labels[torch.randperm(spec["tokens"], generator=made)[: spec["tokens"] // 10]] = IGNORED
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[spec["dtype"]]
    return hidden.to(spec["device"], dtype), weight.to(spec["device"], dtype), labels.to(spec["device"])


def task_reference(spec: dict) -> dict:
    """Loss and gradients of the very same numbers in double precision, in slices of the rows."""
    import torch

    hidden, weight, labels = inputs(spec)
    hidden, weight = hidden.double(), weight.double()
    counted = labels != IGNORED
    loss, of_hidden, of_weight = torch.zeros(()).double(), torch.zeros_like(hidden), torch.zeros_like(weight)
    rows = max(1, 2**25 // spec["vocab"])
    for start in range(0, spec["tokens"], rows):
        part = slice(start, start + rows)
        h, y, used = hidden[part], labels[part].clamp(min=0)[:, None], counted[part]
        z = h @ weight.t()
        log_sum = z.logsumexp(dim=1, keepdim=True)
        loss += (log_sum - z.gather(1, y))[used].sum()
        z = z.sub_(log_sum).exp_()
        z.scatter_add_(1, y, -torch.ones_like(log_sum))
        z.mul_(used[:, None] / counted.sum())
        of_hidden[part] = z @ weight
        of_weight.addmm_(z.t(), h)
    found = {"loss": loss / counted.sum(), "hidden": of_hidden, "weight": of_weight}
    torch.save({name: tensor.cpu() for name, tensor in found.items()}, spec["reference"])
    return {}


def task_pass(spec: dict) -> dict:
    import torch

    torch.set_num_threads(1)
    work, each = globals()[spec["name"]], spec["name"].endswith("_each")
    on_gpu = spec["device"] != "cpu"

    def once(hidden, weight, labels):
        if each:
            with torch.no_grad():
                return work(hidden, weight, labels)
        loss = work(hidden, weight, labels)
        loss.backward()
        return loss.detach()

    tensors = [inputs(spec | {"tokens": 8, "vocab": 300}), inputs(spec)]
    for hidden, weight, _ in tensors:
        hidden.requires_grad_(not each)
        weight.requires_grad_(not each)
    once(*tensors.pop(0))
    hidden, weight, labels = tensors[0]
    if on_gpu:
        once(hidden, weight, labels)  # kernels are chosen by shape
        hidden.grad = weight.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held, began = torch.cuda.memory_allocated(), time.perf_counter()
        loss = once(hidden, weight, labels)
        torch.cuda.synchronize()
        answer = {"cpu": time.perf_counter() - began, "grown": torch.cuda.max_memory_allocated() - held}
    else:
        with Meter() as meter:
            loss = once(hidden, weight, labels)
        answer = {"cpu": meter.cpu, "grown": meter.peak - meter.held}
    if spec["check"]:
        exact = torch.load(spec["reference"], mmap=True)
        if each:
            loss = loss.double().sum() / (labels != IGNORED).sum()
        else:
            for name, tensor in (("hidden", hidden), ("weight", weight)):
                off = tensor.grad.cpu().double().sub_(exact[name]).norm()
                answer[name] = (off / exact[name].norm()).item()
        answer["loss"] = (loss.cpu().double() / exact["loss"] - 1).abs().item()
    return answer


def measure(task: str, spec: dict) -> dict:
    """Run one task in a fresh process."""
    command = [sys.executable, str(Path(__file__).resolve()), "--task", task, json.dumps(spec)]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines or done.returncode:
        raise SystemExit(f"{task} {spec} failed\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    answer = json.loads(lines[-1][7:])
    shown = "  ".join(f"{name} {value:.4g}" for name, value in answer.items())
    print(f"{spec['vocab']:7} {spec['dtype']} {spec.get('name', task):12} {shown}", file=sys.stderr, flush=True)
    return answer


# -------------------------------------------------------------------------------------------------- table


def missed(vocab: int, pieces: bool, mine: dict, other: dict) -> list[str]:
    worse = PIECES if pieces else ONE_PIECE
    holds = {
        "memory": vocab < MEMORY_FROM or mine["grown"] <= MEMORY * other["grown"],
        "CPU": mine["cpu"] <= CPU * other["cpu"],
        "loss": mine["loss"] <= LOSS,
        "gradients": all(mine[name] <= worse * other[name] for name in ("hidden", "weight")),
    }
    return [name for name, held in holds.items() if not held]


def compare(spec: dict, repeats: int) -> list[tuple[str, ...]]:
    """Rows of the table for one vocabulary in one type."""
    from deepseek_ft.memory import LOSS_ELEMENTS

    reasons = {name: why_not(name, spec["device"]) for name in TRAINING | EVALUATION}
    measure("reference", spec)
    runs: dict[str, list[dict]] = {name: [] for name, reason in reasons.items() if not reason}
    for turn in range(repeats):  # each once, then each once more: a slow minute falls on all of them
        for name in runs:
            if turn and runs[name][0]["cpu"] > 3 * runs["naive"][0]["cpu"]:
                continue  # what is far apart needs no median
            runs[name].append(measure("pass", spec | {"name": name, "check": turn == 0}))
    found = {name: r[0] | {key: middle(r, key) for key in ("cpu", "grown")} for name, r in runs.items()}
    pieces = LOSS_ELEMENTS // max(spec["tokens"], spec["width"]) < spec["vocab"]
    rows = []
    for name, title in (TRAINING | EVALUATION).items():
        case = f"{spec['vocab']:,} {spec['dtype']}"
        if reasons[name]:
            rows.append((case, title, f"left out: {reasons[name]}", *[""] * 7))
            continue
        mine, other = found[name], found["naive_each" if name in EVALUATION else "naive"]
        held = ""
        if name == "ours":
            lacking = missed(spec["vocab"], pieces, mine, other)
            held = f"**no**: {', '.join(lacking)}" if lacking else "yes"
        ratio = [f"{mine[key] / other[key]:.2f}" for key in ("grown", "cpu")]
        errors = [f"{mine[key]:.1e}" if key in mine else "" for key in ("loss", "hidden", "weight")]
        rows.append(
            (case, title, f"{mine['grown'] / MIB:,.0f}", ratio[0], f"{mine['cpu']:.2f}", ratio[1], *errors, held)
        )
    return rows


def show(rows: list[tuple[str, ...]]) -> None:
    print("\n".join("| " + " | ".join(row) + " |" for row in rows), flush=True)


TASKS = {name.removeprefix("task_"): f for name, f in list(globals().items()) if name.startswith("task_")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--width", type=int, default=512, help="of the hidden states")
    parser.add_argument("--vocab", type=int, action="append", help="ids; may be given several times")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], action="append", help="may be given several times")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--work", type=Path, help="where the references are kept; default: the system's temporary folder"
    )
    parser.add_argument("--task", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.task:
        return tell(TASKS[arguments.task[0]](json.loads(arguments.task[1])))

    head = (
        "ids, type",
        "what",
        "memory, MiB",
        "ratio",
        "CPU s",
        "ratio",
        "error: loss",
        "hidden states",
        "head",
        "holds",
    )
    print(f"{arguments.tokens:,} tokens, {arguments.width} wide, {arguments.device}, {os.cpu_count()} cores, Python "
          f"{platform.python_version()}, medians of {arguments.repeats}; "
          + ", ".join(map(installed, ("torch", "transformers", "deepspeed", "liger-kernel"))))  # fmt: skip
    print(f"holds: memory <= {MEMORY} of the first (from {MEMORY_FROM:,} ids), CPU <= {CPU}, loss off by <= {LOSS:g}, "
          f"gradients by <= {ONE_PIECE} of its errors in one piece and {PIECES} in pieces\n")  # fmt: skip
    show([head, ("---",) * len(head)])
    with tempfile.TemporaryDirectory(dir=arguments.work) as folder:
        common = {"tokens": arguments.tokens, "width": arguments.width, "device": arguments.device,
                  "reference": str(Path(folder, "reference.pt"))}  # fmt: skip
        for dtype in arguments.dtype or ["fp32", "bf16"]:
            for vocab in arguments.vocab or VOCABULARIES:
                show(compare(common | {"vocab": vocab, "dtype": dtype}, arguments.repeats))


if __name__ == "__main__":
    main()
