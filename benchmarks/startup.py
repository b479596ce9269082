"""CPU-seconds until something useful: importing the package, the command line's help, reading a recipe, a plan.

    python benchmarks/startup.py

Beside each stands the floor, a bare interpreter, and what `import torch` alone would cost. Medians of seven runs.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import tempfile
import time

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


def short_run() -> tuple[float, float, float]:
    """A run of two steps on three CPU ranks, whose data and ops are there already: seconds on the clock and of all cores, and what
    three ranks would need for their imports alone if each made its own. Medians of five."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "deepseek_ft", "train", "quickstart", "train.max_steps=2", "--new"]

        def run() -> tuple[float, float]:
            before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
            subprocess.run(words, check=True, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            return time.perf_counter() - began, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

        run()
        runs = [run() for _ in range(5)]
    imports = 3 * statistics.median(cpu_seconds("import deepspeed, deepseek_ft.trainer") for _ in range(5))
    return statistics.median(r[0] for r in runs), statistics.median(r[1] for r in runs), imports


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
    wall, cores, imports = short_run()
    print(f"{'a run of two steps, three ranks':32} {cores:.1f}  ({wall:.1f} s on the clock; three ranks' imports by themselves: {imports:.1f})")


if __name__ == "__main__":
    main()
