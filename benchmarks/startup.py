"""CPU-seconds until something useful: importing the package, the command line's help, reading a recipe, a plan.

    python benchmarks/startup.py

Beside each stands the floor, a bare interpreter, and what `import torch` alone would cost. Medians of seven runs.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys

CASES = {
    "python -c pass (floor)": "pass",
    "import deepseek_ft": "import deepseek_ft",
    "deepseek-ft --help": "from deepseek_ft.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass",
    "deepseek-ft recipes quickstart": "from deepseek_ft.cli import main; main(['recipes', 'quickstart'])",
    "plan of the quick start": "from deepseek_ft import load_config, plan_run; plan_run(load_config('quickstart'))",
    "import torch": "import torch",
}
CARDS = ["--gpu", "rtx4090", "--gpus", "3", "--host-ram-gib", "256", "--disk-gib", "2000"]


def dearest_plan() -> tuple[str, float]:
    """Of all published models, on three 4090s: the one whose `deepseek-ft plan` costs the most (median of three)."""
    from deepseek_ft.shapes import PUBLISHED

    costs = {}
    for model in PUBLISHED:
        words = ["plan", "deepseek-llm-7b/wikitext103_full", f"model.path={model}", *CARDS]
        code = f"from deepseek_ft.cli import main; main({words!r})"
        costs[model] = statistics.median(cpu_seconds(code) for _ in range(3))
    return max(costs.items(), key=lambda item: item[1])


def cpu_seconds(code: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    print(f"{'':32} CPU s (median of 7)")
    for name, code in CASES.items():
        print(f"{name:32} {statistics.median(cpu_seconds(code) for _ in range(7)):.3f}")
    model, seconds = dearest_plan()
    print(f"{'dearest `plan` of all models':32} {seconds:.3f}  ({model})")


if __name__ == "__main__":
    main()
