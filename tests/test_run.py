"""Whole runs, through each door, with real components: DeepSpeed on several CPU ranks, a real tokenizer, real text."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest
from conftest import BIN, ROOT, SHARED, clean_environment, cli, needs_libaio, needs_shared, newest_run, run, train

from deepseek_ft import RunResult, finetune
from deepseek_ft.checkpoints import size_bytes
from deepseek_ft.report import read_metrics

pytestmark = pytest.mark.ranks

RELOAD = """
import json, sys, numpy, torch
from pathlib import Path
from transformers import AutoModelForCausalLM, AutoTokenizer
from deepseek_ft import load_config
from deepseek_ft.run import load_data
model, info = AutoModelForCausalLM.from_pretrained(sys.argv[1], output_loading_info=True)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
assert not info["missing_keys"] and not info["unexpected_keys"]
blocks, total, count = load_data(load_config(sys.argv[2]), Path(sys.argv[3]), ["eval"])[1]["eval"], 0.0, 0
with torch.no_grad():
    for row in blocks:
        begins = [*numpy.flatnonzero(row["position_ids"] == 0), len(row["input_ids"])]
        for a, b in zip(begins[:-1], begins[1:]):  # each document alone
            ids, labels = (torch.from_numpy(row[k][a:b])[None] for k in ("input_ids", "labels"))
            scored = int((labels[:, 1:] != -100).sum())
            if scored:
                total += float(model(input_ids=ids, labels=labels).loss) * scored
                count += scored
print(json.dumps({"perplexity": float(numpy.exp(total / count)), "tokens": count, "type": model.config.model_type,
                  "round_trip": tokenizer.decode(tokenizer("x = 1\\n", add_special_tokens=False)["input_ids"])}))
"""


def perplexity_of_folder(result: dict, cache) -> dict:
    """Perplexity by transformers alone, one document at a time, in a process that never saw the run."""
    folder = result["folder"]
    done = subprocess.run([sys.executable, "-c", RELOAD, str(folder / "model"), str(folder / "config.yaml"), str(cache)],
                          capture_output=True, text=True, env=clean_environment(), cwd=folder.parent.parent)  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def check_finished(result: dict, engine="DeepSpeedEngine", stage=3, ranks=3):
    assert result["status"] == "finished"
    facts = result["engine_facts"]
    assert (facts["engine"], facts["zero_stage"], facts["world_size"]) == (engine, stage, ranks)
    assert stage is None or facts["engine_world_size"] == ranks
    assert len(result["peak_memory_bytes"]) == len(result["host_peak_after_loading_bytes"]) == ranks
    for name in ("model", "config.yaml", "metrics.jsonl", "loss.png", "run.json"):
        assert (result["folder"] / name).exists(), name
    assert result["last_loss"] < result["first_loss"] and result["tokens_per_second"] > 0
    assert result["after"]["perplexity"] < result["before"]["perplexity"]
    for predicted in ("peak_memory_bytes_per_rank", "host_memory_bytes"):  # beside what was measured
        row = result["prediction"][predicted]
        assert row["error"] == pytest.approx(row["predicted"] / row["measured"] - 1) and abs(row["error"]) < 0.3, row
    assert result["versions"]["deepspeed"] and result["steps"] == result["config"]["train"]["max_steps"]


@pytest.fixture(scope="module")
def launched(tmp_path_factory, tiny_recipe):
    """`deepspeed --num_gpus 3 examples/train.py --deepspeed ds_configs/zero3.json`, from another directory."""
    folder = tmp_path_factory.mktemp("launched")
    done = run(BIN / "deepspeed", "--num_gpus", "3", ROOT / "examples/train.py", "--deepspeed", ROOT / "ds_configs/zero3.json",
               "--recipe", tiny_recipe, "train.max_steps=12", cwd=folder)  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    return newest_run(folder) | {"output": done.stdout}


def test_under_the_deepspeed_launcher(launched, cache):
    check_finished(launched)
    assert launched["config"]["deepspeed"].endswith("zero3.json")
    reloaded = perplexity_of_folder(launched, cache)
    assert reloaded["perplexity"] == pytest.approx(launched["after"]["perplexity"], rel=1e-4)
    assert reloaded["tokens"] == launched["after"]["tokens"] and reloaded["round_trip"] == "x = 1\n"
    assert reloaded["type"] == "deepseek_v3"
    assert launched["output"].count("held-out loss") == 2  # one voice, not three


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["tensor", "sequence", "pipeline", "pipeline_offload"])
def test_a_layout_under_somebody_elses_launcher(strategy, tiny_recipe, tmp_path):
    """torchrun starts the script's ranks; the same losses as from the command that starts them itself."""
    words = (f"strategy={strategy}", "train.micro_batch_size=3", "train.max_steps=3")
    done = run(BIN / "torchrun", "--nproc-per-node", "2", ROOT / "examples/train.py", "--recipe", tiny_recipe, *words,
               "output_dir=runs/torchrun", cwd=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    started = train(tiny_recipe, *words, "ranks=2", "output_dir=runs/own", cwd=tmp_path)
    theirs = json.loads((tmp_path / "runs/torchrun/run.json").read_text())
    assert theirs["status"] == "finished" and theirs["world_size"] == 2
    assert theirs["last_loss"] == started["last_loss"] and theirs["after"] == started["after"]
    assert done.stdout.count("held-out loss") == 2


def test_metrics_have_every_number(launched):
    rows = read_metrics(launched["folder"] / "metrics.jsonl")
    losses = [r for r in rows if "loss" in r]
    assert [r["step"] for r in losses] == list(range(1, 13))
    for row in losses:
        for key in (
            "loss",
            "learning_rate",
            "grad_norm",
            "tokens_per_second",
            "peak_memory_bytes",
            "eta_seconds",
            "target_tokens",
        ):
            assert math.isfinite(row[key]), key
    assert losses[-1]["target_tokens"] == 12 * 6 * 63
    rates = [r["learning_rate"] for r in losses]
    expected = [0, 2.5e-3, *(5e-3 * 0.5 * (1 + math.cos(math.pi * i / 10)) for i in range(10))]
    assert rates == pytest.approx(expected)


@pytest.mark.slow
def test_the_saved_config_reproduces_the_run(launched, tmp_path):
    again = train(launched["folder"] / "config.yaml", cwd=tmp_path)
    curves = [
        [r["loss"] for r in read_metrics(r["folder"] / "metrics.jsonl") if "loss" in r] for r in (launched, again)
    ]
    assert curves[0] == curves[1]
    assert again["config"] == launched["config"]


def test_from_python_and_twice_in_one_process(tiny_recipe, tmp_path, monkeypatch):
    """As in a notebook or script: the ranks are children, and this process stays what it was."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["ipykernel_launcher.py", "-f", "/x/kernel-1.json"])
    environment = dict(os.environ)
    first = finetune(tiny_recipe, train={"max_steps": 6})
    second = finetune(tiny_recipe, train={"max_steps": 4, "micro_batch_size": 3}, seed=8, strategy="single")
    assert dict(os.environ) == environment
    check_finished(first.run | {"folder": first.output_dir})
    assert (second.run["steps"], second.run["plan"]["strategy"], second.run["config"]["seed"]) == (4, "single", 8)
    assert second.output_dir != first.output_dir and second.run["engine_facts"]["world_size"] == 1
    assert first.perplexity_after < first.perplexity_before and first.metrics["perplexity"] == first.perplexity_after
    assert [r["step"] for r in first.history if "loss" in r] == [1, 2, 3, 4, 5, 6]
    assert str(first.model_dir) in str(first) and RunResult.load(first.output_dir) == first


def test_bf16_and_gradient_checkpointing_under_zero3_bf16(tiny_recipe, tmp_path, cache):
    result = train(
        tiny_recipe, "strategy=zero3_bf16", "train.precision=bf16", "model.gradient_checkpointing=true", cwd=tmp_path
    )
    check_finished(result)
    assert result["engine_facts"]["bf16"] and not result["engine_facts"]["fp16"]
    assert perplexity_of_folder(result, cache)["perplexity"] == pytest.approx(result["after"]["perplexity"], rel=2e-2)


def test_fp16_reaches_the_engine_and_a_taken_port_does_not_matter(tiny_recipe, tmp_path):
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("", 29500))
        holder.listen()
        result = train(tiny_recipe, "strategy=zero2", "train.precision=fp16", "train.max_steps=12", cwd=tmp_path)
    assert result["engine_facts"]["fp16"] and result["engine_facts"]["zero_stage"] == 2


def test_a_hostfile_of_this_host(tiny_recipe, tmp_path):
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    words = ("train.max_steps=2", "train.micro_batch_size=3", "--hostfile", "hosts")
    result = train(tiny_recipe, *words, cwd=tmp_path)
    assert result["status"] == "finished" and result["engine_facts"]["engine_world_size"] == 2


@pytest.mark.slow
def test_clipping_is_the_recipes(tiny_recipe, tmp_path):
    (tmp_path / "mine.json").write_text(json.dumps({"zero_optimization": {"stage": 2}}))  # no gradient_clipping in it
    result = train(tiny_recipe, "deepspeed=mine.json", "optim.max_grad_norm=0.01", "train.max_steps=2", cwd=tmp_path)
    assert result["engine_facts"]["gradient_clipping"] == 0.01


def test_resume_continues_the_run(tiny_recipe, tmp_path):
    """Same losses, learning rates and gradient norms as the run that was never interrupted (casebook SCH-7, CKP-6)."""
    whole = train(tiny_recipe, "train.save_steps=3", "train.save_total_limit=5", "output_dir=runs/whole", cwd=tmp_path)
    cut = train(tiny_recipe, "train.save_steps=3", "train.save_total_limit=5", "output_dir=runs/cut", cwd=tmp_path)
    run_dir = cut["folder"]
    chosen = next(c for c in cut["plan"]["candidates"] if c["strategy"] == cut["plan"]["strategy"])
    planned = chosen["memory"]["disk"]["6 checkpoints"] / 6
    assert size_bytes(run_dir / "checkpoint-8") == pytest.approx(planned, rel=0.03, abs=200_000)  # beside the tokenizer
    for path in ("model/config.json", "checkpoint-8/trainer_state.json"):  # a crash after step 6
        (run_dir / path).unlink()
    shutil.rmtree(run_dir / "model")
    record = json.loads((run_dir / "run.json").read_text()) | {"status": "running"}
    (run_dir / "run.json").write_text(json.dumps(record))
    words = ("train.save_steps=3", "train.save_total_limit=5", "output_dir=runs/cut")
    refused = cli("train", tiny_recipe, *words, cwd=tmp_path)
    assert refused.returncode == 2 and "--resume" in refused.stdout
    changed = cli("train", tiny_recipe, *words, "optim.lr=1e-3", "--resume", cwd=tmp_path)
    assert changed.returncode == 2 and "optim.lr: 0.005 then, 0.001 now" in changed.stdout
    other = cli("train", tiny_recipe, *words, "--gpus", "2", "train.micro_batch_size=3", "--resume", cwd=tmp_path)
    assert other.returncode == 2 and "3 ranks" in other.stdout
    done = cli("train", tiny_recipe, *words, "--resume", cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "checkpoint-8: trainer_state.json is missing" in done.stdout and "checkpoint-6" in done.stdout
    rows = {r["step"]: r for r in read_metrics(run_dir / "metrics.jsonl") if "loss" in r}
    for row in read_metrics(whole["folder"] / "metrics.jsonl"):
        if "loss" in row:
            for key in ("loss", "learning_rate", "grad_norm"):
                assert rows[row["step"]][key] == row[key], (row["step"], key)
    resumed = json.loads((run_dir / "run.json").read_text())
    assert resumed["status"] == "finished" and resumed["after"]["loss"] == whole["after"]["loss"]
    assert resumed["before"] == whole["before"] and resumed["tokens"] == whole["tokens"]


@pytest.mark.slow
@needs_libaio
def test_states_on_a_disk_are_resumed_to_the_bit(tiny_recipe, tmp_path):
    """Of two sub-groups of weights one is on the disk, the other is too small for it; DeepSpeed's own resume loses both."""
    words = ("strategy=zero3_nvme", "train.save_steps=3", "train.save_total_limit=5", "model.tokenizer=train:12000")
    elsewhere = (*words, f"offload_dir={tmp_path / 'disk'}")
    whole = train(tiny_recipe, *words, "output_dir=runs/whole", cwd=tmp_path)
    cut = train(tiny_recipe, *elsewhere, "output_dir=runs/cut", cwd=tmp_path)
    folder = cut["folder"]
    assert len(list((folder / "checkpoint-6").rglob("rank00/*.tensor.swp"))) == 3  # master weights and two moments
    assert not (whole["folder"] / "offloaded").exists() and not list((tmp_path / "disk").iterdir())  # nothing is left behind
    shutil.rmtree(folder / "model")
    shutil.rmtree(folder / "checkpoint-8")
    (folder / "run.json").write_text(json.dumps(json.loads((folder / "run.json").read_text()) | {"status": "running"}))
    done = cli("train", tiny_recipe, *elsewhere, "output_dir=runs/cut", "--resume", cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:]
    rows = [{r["step"]: [r["loss"], r["learning_rate"], r["grad_norm"]] for r in read_metrics(run / "metrics.jsonl") if "loss" in r}
            for run in (folder, whole["folder"])]  # fmt: skip
    assert rows[0] == rows[1]
    one, other = ((run / "model/model.safetensors").read_bytes() for run in (folder, whole["folder"]))
    assert one == other


def start(tiny_recipe, folder, *words):
    process = subprocess.Popen(
        [sys.executable, "-m", "deepseek_ft", "train", str(tiny_recipe), "train.max_steps=5000", *words], cwd=folder,
        env=clean_environment(), stdout=open(folder / "log", "w"), stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while "step 3/" not in (folder / "log").read_text():
        assert process.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()[-3000:]
        time.sleep(0.2)
    ranks = [p for p in psutil.Process(process.pid).children(recursive=True) if p.name().startswith("rank ")]
    return process, ranks


def gone(processes, seconds=30) -> bool:
    return not psutil.wait_procs(processes, timeout=seconds)[1]


def test_ctrl_c_ends_every_rank(tiny_recipe, tmp_path):
    process, ranks = start(tiny_recipe, tmp_path)
    assert len(ranks) == 3
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(30) == 130 and gone(ranks)
    log = (tmp_path / "log").read_text()
    assert "interrupted" in log and "Traceback" not in log


@pytest.mark.parametrize(
    "words", [(), ("strategy=pipeline",), *(pytest.param(w, marks=pytest.mark.slow) for w in (
        ("strategy=tensor", "ranks=2", "train.micro_batch_size=3"), ("strategy=sequence", "ranks=2", "train.micro_batch_size=3")))],
    ids=lambda words: words[0] if words else "zero3",
)  # fmt: skip
def test_a_killed_rank_ends_all(words, tiny_recipe, tmp_path):
    process, ranks = start(tiny_recipe, tmp_path, *words)
    ranks[1].kill()
    assert process.wait(60) == 1 and gone(ranks)
    log = (tmp_path / "log").read_text()
    assert "SIGKILL" in log and "RunError" in log and "Traceback" not in log


def test_a_killed_parent_leaves_no_ranks_behind(tiny_recipe, tmp_path):
    process, ranks = start(tiny_recipe, tmp_path)
    process.kill()
    assert gone(ranks, 60)


@needs_shared
@pytest.mark.slow
def test_real_text_and_deepseeks_tokenizer(tmp_path, cache):
    """WikiText-103 validation to train on, its test set and an OpenWebText sample held out, three ranks under ZeRO-3."""
    recipe = tmp_path / "real.yaml"
    recipe.write_text(f"""
name: real
model: {{path: preset:tiny-v3, tokenizer: {SHARED}/tokenizers/deepseek-llm, gradient_checkpointing: false}}
data:
  train: [{{source: wikitext-103, split: validation, path: {SHARED}/text/wikitext-103}}, {{source: openwebtext, path: {SHARED}/text/openwebtext, split: train}}]
  eval:  [{{source: wikitext-103, split: test, path: {SHARED}/text/wikitext-103, max_documents: 10}}]
  seq_len: 128
optim: {{lr: 6.0e-3, schedule: cosine, warmup_steps: 5}}
train: {{max_steps: 30, micro_batch_size: 4, precision: fp32, log_steps: 5, eval_steps: null, save_steps: null}}
strategy: zero3
""")
    result = train(recipe, cwd=tmp_path, timeout=600)
    check_finished(result)
    assert result["before"]["perplexity"] > 50_000 and result["after"]["perplexity"] < 10_000
    assert result["after"]["word_perplexity"] > result["after"]["perplexity"]
    assert perplexity_of_folder(result, cache)["perplexity"] == pytest.approx(result["after"]["perplexity"], rel=1e-4)


SMALL_HOST = """
import psutil
real = psutil.virtual_memory
psutil.virtual_memory = lambda: real()._replace(total=int(0.55 * 1024**3))
"""


def test_what_does_not_fit_is_refused_and_can_be_forced(tiny_recipe, tmp_path):
    """On a host that says it has 0.55 GiB, of which a tenth is the system's: exit code 2 in seconds, nothing written; --force runs."""
    (tmp_path / "sitecustomize.py").write_text(SMALL_HOST)
    env = clean_environment(PYTHONPATH=os.pathsep.join([str(tmp_path), str(ROOT)]))
    words = ("train", tiny_recipe, "strategy=single", "train.max_steps=2")
    refused = cli(*words, cwd=tmp_path, env=env)
    assert refused.returncode == 2 and "Traceback" not in refused.stdout, refused.stdout
    assert "GiB of host memory, 0.5 of 1 are usable" in refused.stdout and "--force" in refused.stdout
    assert not (tmp_path / "runs").exists()
    forced = cli(*words, "--force", cwd=tmp_path, env=env)
    assert forced.returncode == 0 and "warning: it does not fit: single needs" in forced.stdout, forced.stdout[-3000:]
    assert newest_run(tmp_path)["status"] == "finished"


def test_what_no_card_here_can_do_does_not_start(tiny_recipe, tmp_path):
    done = cli("train", tiny_recipe, "strategy=zeropp", "train.precision=bf16", cwd=tmp_path)
    assert done.returncode == 2 and "quantises with a CUDA kernel, and there is no GPU" in done.stdout, done.stdout
    assert not (tmp_path / "runs").exists()
