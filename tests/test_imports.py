"""The light rooms stay light: what starts in a fraction of a second today does so tomorrow."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, clean_environment

HEAVY = {"torch", "transformers", "deepspeed", "datasets", "peft", "evaluate", "accelerate", "matplotlib", "pandas"}
LIGHT = ("__init__", "errors", "config", "recipe", "hardware", "shapes", "strategies", "planner", "deepspeed_config", "ops",
         "cli", "doctor", "measure", "memory", "workload", "tape", "timing", "candidates", "offers", "plan_view", "launch", "run", "schedules", "report", "checkpoints", "benchmark", "data.sources", "data.blocks")  # fmt: skip


def loaded_after(code: str) -> set[str]:
    out = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print(' '.join(sys.modules))"],
        capture_output=True, text=True, check=True, cwd=ROOT, env=clean_environment(),
    ).stdout  # fmt: skip
    return {name.split(".")[0] for name in out.split()}


@pytest.mark.parametrize("room", LIGHT)
def test_importing_a_light_room_loads_nothing_heavy(room):
    name = "deepseek_ft" if room == "__init__" else f"deepseek_ft.{room}"
    assert not loaded_after(f"import {name}") & HEAVY


def test_planning_a_recipe_loads_no_torch():
    code = "from deepseek_ft import load_config, plan_run; plan_run(load_config('quickstart'))"
    assert not loaded_after(code) & HEAVY


def test_help_and_recipes_load_no_torch():
    card = ["--gpu", "rtx4090", "--host-ram-gib", "256", "--disk-gib", "2000"]
    for words in (["--help"], ["recipes"], ["recipes", "quickstart"], ["plan", "quickstart"],
                  ["plan", "deepseek-llm-7b/wikitext103_full", *card], ["plan", "quickstart", *card, "--json"]):  # fmt: skip
        code = f"""
from deepseek_ft.cli import main
try:
    main({words!r})
except SystemExit:
    pass"""
        assert not loaded_after(code) & HEAVY


def test_importing_has_no_side_effects():
    code = """
import os, logging
before = dict(os.environ), list(logging.root.handlers)
import deepseek_ft, deepseek_ft.run, deepseek_ft.cli
deepseek_ft.finetune
assert before == (dict(os.environ), list(logging.root.handlers))"""
    loaded_after(code)


def test_public_names_are_there():
    import deepseek_ft

    for name in deepseek_ft.__all__:
        assert getattr(deepseek_ft, name) is not None
    with pytest.raises(AttributeError):
        _ = deepseek_ft.nonsense


def test_only_cli_prints():
    for path in Path(ROOT, "deepseek_ft").rglob("*.py"):
        calls = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
        names = {c.func.id for c in calls if isinstance(c.func, ast.Name)}
        assert path.name in ("cli.py",) or not names & {"print", "exit", "quit"}, path
