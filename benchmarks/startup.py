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


def cpu_seconds(code: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    print(f"{'':32} CPU s (median of 7)")
    for name, code in CASES.items():
        print(f"{name:32} {statistics.median(cpu_seconds(code) for _ in range(7)):.3f}")


if __name__ == "__main__":
    main()
