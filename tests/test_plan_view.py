"""What people see of a plan: a screen, JSON, a table in a notebook."""

from __future__ import annotations

import json
import re

import pytest
from conftest import cli
from test_planner import LLM, MODEST, described_cards, plan, seven

from deepseek_ft import load_config, plan_view
from deepseek_ft.planner import schedule_run

FLAGS = ("--gpus", "3", "--gpu", "rtx4090", "--host-ram-gib", "256", "--disk-gib", "2000", "--pcie", "x16,x8,x4", "--cores", "32")


def test_sparkline():
    assert plan_view.sparkline([0, 1, 2, 4, 8]) == "▁▂▃▅█" and plan_view.sparkline([]) == ""
    config = load_config("quickstart")
    curve = plan_view.learning_rate_curve(config, steps=100, warmup=10, width=20)
    assert len(curve) == 20 and curve[0] == "▁" and "█" in curve[1:5] and curve[-1] == "▁"


def test_one_screen():
    config = load_config(LLM, list(MODEST))
    p = seven(*MODEST)
    command = plan_view.start_command(LLM, MODEST, p, config)
    screen = plan_view.text(p, config, schedule_run(p, config, 129_000_000), command)
    assert len(screen.splitlines()) < 57
    for part in ("> pipeline_offload", "of 23.51 usable", "weights", "3 checkpoints", "tokens per step", "estimate", "warm-up 1,000",
                 "about", "lr        5e-05 ▁", "note", f"start     deepseek-ft train {LLM} train.precision=bf16"):  # fmt: skip
        assert part in screen, part
    assert command.endswith("strategy=pipeline_offload --gpus 3")


def test_a_plan_shows_itself_in_a_notebook():
    table = seven(*MODEST)._repr_html_()
    assert table.count("<tr>") == 17 and "<b>pipeline_offload</b>" in table and "<script" not in table
    assert str(seven(*MODEST)).startswith("on 3 x NVIDIA GeForce RTX 4090")
    assert "rank GiB" in plan()._repr_html_()  # without cards: ranks, and no speed
    misfit = plan("train.precision=fp16", recipe=LLM, hardware=described_cards(host=64), force=True)
    assert "GiB per GPU, 23.5 are usable" in misfit._repr_html_()


def test_the_command_in_json(tmp_path):
    done = cli("plan", LLM, *MODEST, *FLAGS, "--constant", "dram_bytes_per_second=2e11", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    answer = json.loads(done.stdout)
    assert answer["fits"] and answer["strategy"] == "pipeline_offload" and answer["world_size"] == 3
    chosen = next(c for c in answer["candidates"] if c["strategy"] == "pipeline_offload")
    assert chosen["memory"]["gpu_bytes"] == sum(chosen["memory"]["gpu"].values())
    assert chosen["timing"]["estimate"] and chosen["timing"]["bottleneck"] in chosen["timing"]["parts_seconds"]
    assert answer["constants"]["dram_bytes_per_second"] == {"value": 2e11, "measured": True}
    assert answer["constants"]["pcie_bytes_per_second"]["value"] == 6.25e9  # the slowest link
    assert answer["schedule"]["steps"] > 1000 and answer["command"].startswith("deepseek-ft train")
    assert list(tmp_path.iterdir()) == []  # nothing is written or downloaded


def test_the_command_when_nothing_fits(tmp_path):
    done = cli("plan", LLM, *FLAGS[:4], "--host-ram-gib", "64", "--disk-gib", "900", cwd=tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stdout
    assert "It does not fit: " in done.stdout and "Nearest that fits:" in done.stdout and "start     " not in done.stdout


def test_the_command_on_this_machine(tmp_path):
    done = cli("plan", "quickstart", cwd=tmp_path)
    assert done.returncode == 0 and "3 CPU ranks" not in done.stdout and "> zero3" in done.stdout
    assert re.search(r"host memory, GiB, all ranks", done.stdout) and "50 steps, 0.2 M tokens" in done.stdout
    assert done.stdout.rstrip().endswith("start     deepseek-ft train quickstart")


@pytest.mark.parametrize(
    ("words", "said"),
    [(["--gpu", "rtx9999"], "no figures for 'rtx9999'"), (["--gpu", "rtx4090", "--pcie", "x16,x8"], "names 2 links, and there are 3 cards"),
     (["--gpu", "rtx4090", "--pcie", "x3"], "lanes are x16"), (["--gpu", "rtx4090", "--host-ram-gib", "0"], "must be above 0"),
     (["--gpu", "rtx4090", "--constant", "dram=1"], "there is no 'dram'"), (["--gpu", "rtx4090", "--constant", "dram_bytes_per_second"], "NAME=VALUE"),
     (["--gpus", "-1"], "must be 0 or more"), (["--gpu", "rtx4090", "train.lss=naive"], "Did you mean train.loss"),
     (["--gpu", "rtx4090", "method.kind=lora", "method.targets=[w_proj]"], "no linear layer of")],
    ids=lambda v: " ".join(v) if isinstance(v, list) else None,
)  # fmt: skip
def test_mistakes_are_one_message(words, said, tmp_path):
    done = cli("plan", LLM, *words, cwd=tmp_path)
    assert done.returncode == 2 and said in done.stdout and "Traceback" not in done.stdout
    assert len(re.findall(r"^\w+Error: ", done.stdout, re.M)) == 1
