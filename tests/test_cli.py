"""What a user reads: every mistake is one clear message and exit code 2, in seconds and before any weights."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
from conftest import ROOT, clean_environment, cli, run

from deepseek_ft import list_recipes


def test_recipes_are_listed_and_shown(tmp_path):
    listed = cli("recipes", cwd=tmp_path)
    assert listed.returncode == 0 and all(name in listed.stdout for name in list_recipes())
    shown = cli("recipes", "quickstart", "seed=5", cwd=tmp_path)
    assert "seed: 5" in shown.stdout and "preset:tiny-v3" in shown.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [(["train", "quikstart"], "Did you mean quickstart"),
     (["train", "quickstart", "optim.learning_rte=1"], "optim.lr"),
     (["train", "quickstart", "train.micro_batch_size=lots", "nope=1"], "2 problems"),
     (["train", "quickstart", "model.path=./nowhere"], "no folder"),
     (["train", "quickstart", "strategy=zero3_bf16"], "bf16 only"),
     (["train", "quickstart", "deepspeed=nowhere.json"], "zero3_offload"),
     (["train", "quickstart", "data.train=[{source: code}]"], "needs a path"),
     (["train", "quickstart", "data.train.0.path=/nowhere"], "no file or folder"),
     (["train", "quickstart", "data.train=[{source: textt}]"], "Did you mean text"),
     (["train", "quickstart", "data.seq_len=1e8", "strategy=single"], "seq_len 100000000"),
     (["train", "quickstart", "train.global_batch_size=7"], "cannot be cut"),
     (["train", "quickstart", "--resume"], "nothing to resume"),
     (["recipes", "nope"], "no recipe named")],
    ids=lambda v: " ".join(v[-2:]) if isinstance(v, list) else None,
)  # fmt: skip
def test_a_mistake_is_one_message(words, said, tmp_path):
    done = cli(*words, cwd=tmp_path, timeout=120)
    assert done.returncode == 2, done.stdout
    assert said in done.stdout and "Traceback" not in done.stdout
    assert len(re.findall(r"^\w+Error: ", done.stdout, re.M)) == 1
    assert not (tmp_path / "runs").exists()


def test_usage_errors(tmp_path):
    for words in ([], ["trian"], ["train"], ["train", "quickstart", "--lr", "3"]):
        done = cli(*words, cwd=tmp_path)
        assert done.returncode == 2 and "usage: deepseek-ft" in done.stdout and "Traceback" not in done.stdout


def test_without_a_compiler_it_says_so_and_trains(tiny_recipe, tmp_path):
    """A machine with Python and nothing else: one process, the same batch."""
    empty = tmp_path / "bin"
    empty.mkdir()
    env = clean_environment(PATH=str(empty), TORCH_EXTENSIONS_DIR=str(tmp_path / "none"))
    env.pop("CXX", None)
    done = run(sys.executable, "-m", "deepseek_ft", "train", tiny_recipe, "train.max_steps=2", cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "no C++ compiler" in done.stdout and "one process" in done.stdout
    result = json.loads((tmp_path / "runs/tiny/run.json").read_text())
    assert result["engine_facts"]["world_size"] == 1 and result["global_batch_size"] == 6


def test_offline_hub_is_said_in_seconds(tmp_path):
    """Model or data by hub id on a machine that does not reach the hub (casebook DAT-8)."""
    env = clean_environment(HF_ENDPOINT="http://127.0.0.1:9", HF_HOME=str(tmp_path / "hf"))
    for words, name in (
        (["deepseek-llm-7b/wikitext103_full", "strategy=single", "train.precision=bf16", "--force"], "Salesforce/wikitext"),
        (["quickstart", "model.path=deepseek-ai/deepseek-llm-7b-base", "strategy=single", "--force"], "deepseek-llm-7b-base"),
    ):
        done = cli("train", *words, cwd=tmp_path, env=env, timeout=60)
        assert done.returncode == 2 and name in done.stdout, done.stdout
        assert "Retrying" not in done.stdout and "Traceback" not in done.stdout


def test_what_help_imports_is_small():
    """Time is not asserted; what costs it is: the modules that a help text loads."""
    code = "from deepseek_ft.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass\nimport sys; print(len(sys.modules))"
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=clean_environment()
    ).stdout
    bare = subprocess.run(
        [sys.executable, "-c", "import argparse, logging, sys; print(len(sys.modules))"], capture_output=True, text=True
    ).stdout
    assert int(out.split()[-1]) - int(bare) < 60


def test_a_closed_pipe_is_no_traceback(tmp_path):
    done = run("bash", "-c", f"{sys.executable} -m deepseek_ft recipes quickstart | head -1", cwd=tmp_path)
    assert "Traceback" not in done.stdout and "BrokenPipe" not in done.stdout


def test_a_cache_that_cannot_be_written(tiny_recipe, tmp_path):
    if os.geteuid() == 0:
        (tmp_path / "cache").write_text("a file where the cache should be")
    else:
        (tmp_path / "cache").mkdir(mode=0o500)
    done = cli("train", tiny_recipe, f"data.cache_dir={tmp_path}/cache", "strategy=single", cwd=tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stdout and "data.cache_dir" in done.stdout, done.stdout
