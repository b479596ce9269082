"""Plans of the named models on three 4090s, as a file that people review: tests/golden/plans.txt.

    python tests/test_golden_plans.py        records it anew; say in the commit why a figure moved
"""

from __future__ import annotations

import difflib
from pathlib import Path

from deepseek_ft import load_config, plan_run
from deepseek_ft.candidates import figures
from deepseek_ft.hardware import GIB, Hardware, described
from deepseek_ft.plan_view import _align, rows

GOLDEN = Path(__file__).parent / "golden" / "plans.txt"
MODELS = ("deepseek-coder-1.3b-base", "deepseek-coder-6.7b-base", "deepseek-llm-7b-base", "deepseek-coder-33b-base", "DeepSeek-V2-Lite",
          "DeepSeek-R1-Distill-Qwen-1.5B", "DeepSeek-R1-Distill-Qwen-7B", "DeepSeek-R1-Distill-Qwen-14B",
          "DeepSeek-R1-Distill-Llama-8B", "DeepSeek-R1-0528-Qwen3-8B")  # fmt: skip
SETTINGS = ("train.precision=bf16", "train.micro_batch_size=4", "train.grad_accum_steps=8", "data.seq_len=2048")


def tables() -> str:
    parts = [f"Three RTX 4090 on PCIe 4.0 x16, 32 cores; {', '.join(SETTINGS)}; every constant as assumed."]
    for model in MODELS:
        for host in (128, 256):
            hardware = described(Hardware((), 32, host * GIB), gpu="rtx4090", gpus=3)
            config = load_config("deepseek-llm-7b/wikitext103_full", [*SETTINGS, f"model.path=deepseek-ai/{model}", "output_dir=runs/x"])
            plan = plan_run(config, hardware, can_build_ops=True, force=True)
            parts += ["", f"{model}, {host} GiB host: {plan.strategy.name if plan.chosen.fits else 'nothing fits'}"]
            parts += _align(rows(plan), {2, 3, 4})
            parts += [f"  offered: {' '.join(o.overrides)} ({o.candidate.strategy.name}, {figures(o.candidate)})" for o in plan.offers]
    return "\n".join(parts) + "\n"


def test_plans_are_the_reviewed_ones():
    recorded, now = GOLDEN.read_text(encoding="utf-8"), tables()
    moved = "\n".join(difflib.unified_diff(recorded.splitlines(), now.splitlines(), "reviewed", "now", lineterm="", n=1))
    assert recorded == now, f"plans have moved; if that is meant, record them anew and say why:\n{moved[:4000]}"


def test_different_models_get_different_answers():
    """What fits three 24 GB cards depends on the model, not on a default."""
    answers = {line.split(", ")[0]: line.rsplit(": ")[-1] for line in GOLDEN.read_text(encoding="utf-8").splitlines() if "256 GiB host:" in line}
    assert answers["DeepSeek-R1-Distill-Qwen-1.5B"] == "zero1" and answers["deepseek-llm-7b-base"].startswith("pipeline_offload")
    assert len(set(answers.values())) >= 4, answers


def test_the_worked_example_of_the_docs_is_what_the_planner_says():
    text = (GOLDEN.parents[2] / "docs" / "planner.md").read_text(encoding="utf-8")
    words = ["strategy=zero2_offload", "train.precision=bf16", "train.micro_batch_size=4", "train.grad_accum_steps=8", "data.seq_len=1024", "output_dir=runs/x"]
    plan = plan_run(load_config("deepseek-llm-7b/wikitext103_full", words), described(Hardware((), 32, 256 * GIB), gpu="rtx4090"), can_build_ops=True)
    memory, timing = plan.memory, plan.timing
    shown = [f"{memory.gpu[name] / GIB:.2f} |" for name in ("weights", "communication buffers", "activations", "working memory")]
    shown += [f"| {memory.gpu_bytes / GIB:.2f} |", f"{memory.host_bytes / GIB:.1f} GiB", f"{timing.step_seconds:.1f} s", f"{round(timing.tokens_per_second, -2):,.0f} tokens/s"]
    assert plan.strategy.name == "zero2_offload" and [part for part in shown if part not in text] == []


if __name__ == "__main__":
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(tables(), encoding="utf-8")
