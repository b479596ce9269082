"""Whole runs with adapters: what is trained, what stays, what is saved, and what comes of resuming and merging."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, cli, newest_run, run, train
from safetensors.torch import load_file

from deepseek_ft.checkpoints import size_bytes
from deepseek_ft.report import read_metrics

pytestmark = pytest.mark.ranks

LORA = ("method.kind=lora", "method.rank=4", "optim.lr=2e-2", "train.max_steps=5", "model.gradient_checkpointing=true")
RANKS = {"single": 1, "ddp": 3, "zero3": 3}


def watched(recipe: Path, cwd: Path, ranks: int, *overrides: str) -> dict:
    """A run under torchrun, with what its observer saw."""
    done = run(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks, ROOT / "tests/observer.py",
               recipe, cwd / "seen.json", *overrides, cwd=cwd)  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    return newest_run(cwd) | {"seen": json.loads((cwd / "seen.json").read_text())}


def losses(result: dict) -> list[float]:
    return [m["loss"] for m in read_metrics(result["folder"] / "metrics.jsonl") if "loss" in m]


@pytest.fixture(scope="module")
def runs(tiny_recipe, tmp_path_factory):
    done: dict[tuple[str, str], dict] = {}

    def of(model: str, strategy: str) -> dict:
        if (model, strategy) not in done:
            ranks = RANKS[strategy]
            words = (*LORA, f"model.path=preset:{model}", f"strategy={strategy}", f"train.micro_batch_size={6 // ranks}")
            done[model, strategy] = watched(tiny_recipe, tmp_path_factory.mktemp("run"), ranks, *words)
        return done[model, strategy]

    return of


MODELS = ("tiny-llama", "tiny-qwen2", "tiny-qwen3", "tiny-v2", "tiny-v3")
IN_CI = {("tiny-v3", "zero3")}


@pytest.mark.parametrize(
    ("model", "strategy"),
    [pytest.param(m, s, marks=() if (m, s) in IN_CI else pytest.mark.slow) for m in MODELS for s in RANKS],
)
def test_lora_trains_what_was_named_saves_reloads_and_merges(runs, model, strategy):
    """Casebook LORA-1, LORA-2, Z3-2: recomputed layers, frozen base, under every layout."""
    result = runs(model, strategy)
    assert result["status"] == "finished"  # in a fresh process base and adapter gave the loss that the run had measured
    engine = {"single": "PeftModelForCausalLM", "ddp": "DistributedDataParallel", "zero3": "DeepSpeedEngine"}[strategy]
    assert (result["engine_facts"]["engine"], result["engine_facts"]["world_size"]) == (engine, RANKS[strategy])
    assert result["last_loss"] < result["first_loss"] and result["after"]["loss"] < result["before"]["loss"]

    seen = result["seen"]
    assert seen["changed_base"] == [] and seen["left"] == []  # bit by bit
    assert all(".lora_" in name for name in seen["trained"])
    assert [name for name, tensor in seen["trained"].items() if not tensor["moved"]] == []
    kinds = {"deepseek": {"q_a_proj", "q_b_proj", "q_proj", "kv_a_proj_with_mqa", "kv_b_proj"}, "other": {"q_proj", "k_proj", "v_proj"}}
    allowed = kinds["deepseek" if model in ("tiny-v2", "tiny-v3") else "other"] | {"o_proj", "gate_proj", "up_proj", "down_proj"}
    assert {name.split(".lora_")[0].rsplit(".", 1)[-1] for name in seen["trained"]} == set(result["trained"]["modules"]) <= allowed

    folder = result["folder"] / "model"
    tensors = load_file(folder / "adapter_model.safetensors")
    assert sum(t.numel() for t in tensors.values()) == result["trained"]["parameters"]
    assert all(t.any() for name, t in tensors.items()) and not list(folder.glob("model*.safetensors"))
    assert size_bytes(folder) < 0.5e6  # with the tokenizer; the base is five times that
    settings = json.loads((folder / "adapter_config.json").read_text())
    assert (Path(settings["base_model_name_or_path"]) / "config.json").is_file()

    done = cli("merge", result["folder"], cwd=result["folder"].parent)
    assert done.returncode == 0, done.stdout[-2000:]
    assert "differ by at most" in done.stdout
    assert cli("merge", result["folder"], cwd=result["folder"].parent).returncode != 0  # never over a folder that is there


@pytest.mark.parametrize(
    ("model", "strategy"),
    [pytest.param(m, s, marks=() if (m, s) in IN_CI else pytest.mark.slow) for m in MODELS for s in ("ddp", "zero3")],
)
def test_the_strategies_train_the_same_adapter(runs, model, strategy):
    one, other = runs(model, "single"), runs(model, strategy)
    assert losses(other) == pytest.approx(losses(one), rel=1e-4)
    assert other["after"]["loss"] == pytest.approx(one["after"]["loss"], rel=1e-4)
    first, second = (load_file(r["folder"] / "model/adapter_model.safetensors") for r in (one, other))
    assert first.keys() == second.keys()


@pytest.mark.parametrize("strategy", ["single", "ddp", "zero2", "zero3"])
@pytest.mark.slow
def test_a_resumed_adapter_gives_the_losses_of_one_that_never_stopped(tiny_recipe, tmp_path, strategy):
    ranks = 1 if strategy == "single" else 3
    words = (*LORA, f"strategy={strategy}", f"train.micro_batch_size={6 // ranks}", "train.save_steps=2", "train.save_total_limit=5")
    whole = train(tiny_recipe, *words, cwd=tmp_path)
    expected, folder = losses(whole), whole["folder"]
    chosen = next(c for c in whole["plan"]["candidates"] if c["strategy"] == strategy)
    planned = chosen["memory"]["disk"]["6 checkpoints"] / 6
    assert size_bytes(folder / "checkpoint-4") == pytest.approx(planned, rel=0.1, abs=350_000)  # beside it names, settings and random states
    shutil.rmtree(folder / "model")  # a crash between steps 2 and 4
    for step in (4, 5):
        shutil.rmtree(folder / f"checkpoint-{step}")
    record = json.loads((folder / "run.json").read_text()) | {"status": "running"}
    (folder / "run.json").write_text(json.dumps(record))
    resumed = train(tiny_recipe, *words, "--resume", cwd=tmp_path)
    assert resumed["folder"] == folder and resumed["status"] == "finished"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in rows if "loss" in r] == [1, 2, 3, 4, 5, 3, 4, 5]
    assert losses(resumed) == pytest.approx(expected, rel=1e-5)
    assert resumed["after"]["loss"] == pytest.approx(whole["after"]["loss"], rel=1e-5)


OPTIONS = {
    "bf16 beside a 16-bit base": ("tiny-v2", ("strategy=ddp", "train.precision=bf16")),
    "fp16 under zero2": ("tiny-llama", ("strategy=zero2", "train.precision=fp16", "optim.lr=1e-3", "train.max_steps=10")),
    "bf16 under zero3": ("tiny-v3", ("strategy=zero3", "train.precision=bf16", "train.loss=chunked")),
    "optimizer on the host": ("tiny-qwen3", ("strategy=zero2_offload",)),
    "weights on the host": ("tiny-v2", ("strategy=zero3_offload_all", "train.precision=bf16")),
    "rslora and dropout under zero1": ("tiny-v3", ("strategy=zero1", "method.variant=rslora", "method.dropout=0.1", "optim.lr=3e-3")),
    "routed experts": ("tiny-v3", ("strategy=zero2", "method.experts=true")),
    "routed experts of v2, one process": ("tiny-v2", ("strategy=single", "method.experts=true", "train.micro_batch_size=6")),
    "dora": ("tiny-v2", ("strategy=ddp", "method.variant=dora")),
    "a base in 4 bits": ("tiny-qwen2", ("strategy=ddp", "method.kind=qlora")),
    "embedding and head whole": ("tiny-qwen2", ("strategy=zero3", "method.train_also=[embed_tokens,lm_head]")),
    "head whole, chunked loss": ("tiny-llama", ("strategy=ddp", "method.train_also=[lm_head]", "train.loss=chunked")),
}
OPTIONS_IN_CI = ("a base in 4 bits",)


@pytest.mark.parametrize("option", [pytest.param(o, marks=() if o in OPTIONS_IN_CI else pytest.mark.slow) for o in OPTIONS])
def test_options_train_reload_and_merge(tiny_recipe, tmp_path, option):
    model, words = OPTIONS[option]
    given = {word.split("=")[0] for word in words}
    usual = [word for word in LORA if word.split("=")[0] not in given]
    result = train(tiny_recipe, *usual, f"model.path=preset:{model}", *words, cwd=tmp_path)
    assert result["status"] == "finished" and result["after"]["loss"] < result["before"]["loss"]
    tensors = load_file(result["folder"] / "model/adapter_model.safetensors")
    assert sum(t.numel() for t in tensors.values()) == result["trained"]["parameters"]
    done = cli("merge", result["folder"], cwd=tmp_path)
    assert done.returncode == 0 and "differ by at most" in done.stdout, done.stdout[-2000:]


@pytest.mark.parametrize("strategy", ["single", *(pytest.param(s, marks=pytest.mark.slow) for s in ("ddp", "zero2", "zero3"))])
def test_what_is_frozen_of_a_full_fine_tune_stays_as_it_was(tiny_recipe, tmp_path, strategy, cache):
    words = ("model.path=preset:tiny-v3", "method.freeze=[embed_tokens,layers.0-1,layers.2.self_attn,'*norm*']", "train.max_steps=4")
    result = train(tiny_recipe, *words, f"strategy={strategy}", f"train.micro_batch_size={6 if strategy == 'single' else 2}", cwd=tmp_path)
    trained = load_file(result["folder"] / "model/model.safetensors")
    (base,) = [f for f in cache.glob("presets/tiny-v3-*/model.safetensors") if load_file(f).keys() == trained.keys()
               and all(a.shape == trained[k].shape for k, a in load_file(f).items()) and _same_seed(f, trained)]  # fmt: skip
    moved = {name for name, tensor in load_file(base).items() if not torch.equal(tensor, trained[name])}
    expected = {n for n in trained if n == "lm_head.weight" or n.startswith("model.layers.2.mlp.")}
    # No gradient ever comes to the router's correction; an expert without tokens has none but a weight decay.
    assert moved == {n for n in expected if "e_score_correction_bias" not in n}
    assert result["trained"]["parameters"] < result["trained"]["all_parameters"]
    assert result["after"]["loss"] < result["before"]["loss"]


def _same_seed(file: Path, trained: dict) -> bool:
    return torch.equal(load_file(file)["model.embed_tokens.weight"], trained["model.embed_tokens.weight"])


RECIPES = {
    "deepseek-llm-7b/wikitext103_lora": ("tiny-llama", "ddp", "data.path={text}"),
    "deepseek-coder-6.7b/code_lora": ("tiny-llama", "zero2", "data.path={code}", "data.code.fim_rate=0"),
    "r1-distill-qwen-7b/chat_lora": ("tiny-qwen2", "zero3", "data.path={chat}"),
    "deepseek-v2-lite/chat_lora": ("tiny-v2", "pipeline", "data.path={chat}"),
    "deepseek-coder-6.7b/instruct_qlora": ("tiny-llama", "zero2", "data.path={chat}"),
    "deepseek-llm-7b/wikitext103_full_bf16states": ("tiny-llama", "zero3_bf16", "data.path={text}"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_runs_with_a_tiny_model_of_its_architecture(name, tmp_path, code):
    model, strategy, *words = RECIPES[name]
    rows = [{"messages": [{"role": "user", "content": f"How much is {i} and {i}?"}, {"role": "assistant", "content": f"It is {2 * i}."}]} for i in range(300)]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = tmp_path / "wikitext-103"
    text.mkdir()
    for part, lines in (("train", 4000), ("valid", 400), ("test", 400)):
        (text / f"wiki.{part}.tokens").write_text("".join(f" = Page {i} = \n Some text about the number {i} . \n" for i in range(lines)))
    places = {"text": text, "code": code, "chat": tmp_path / "chat.jsonl"}
    changed = ["train.max_steps=3", "train.micro_batch_size=1", "train.grad_accum_steps=1", "train.save_steps=null", "train.eval_steps=null",
               "data.seq_len=64", "model.tokenizer=train:600", f"model.path=preset:{model}", f"strategy={strategy}", "optim.lr=1e-2"]  # fmt: skip
    result = train(name, *changed, *(w.format(**places) for w in words), cwd=tmp_path)
    assert result["status"] == "finished" and result["engine_facts"]["world_size"] == 3
    assert result["trained"]["kind"] == name.rsplit("_", 1)[-1].replace("bf16states", "full")
