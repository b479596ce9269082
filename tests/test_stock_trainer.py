"""A Trainer of transformers that knows nothing of this package, with our files in ds_configs/, trains what `deepseek-ft train` does.

The ranks get a script, a folder of weights and an array of tokens. What the script says in TrainingArguments is what a recipe says in its
own words; whatever else a run of ours does (its curve, what it counts and checks, routers that are watched) changes no loss.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
from conftest import BIN, ROOT, run, train

from deepseek_ft import load_config
from deepseek_ft.report import read_metrics
from deepseek_ft.run import _load_materials

pytestmark = pytest.mark.ranks
STEPS, MICRO, ACCUMULATION, RANKS = 10, 2, 2, 3
LOSS, NORM = 1e-4, 1e-3
"""Relative; fp32 sums in another order."""

SCRIPT = """
import json, sys
import deepspeed, numpy
deepspeed.init_distributed(dist_backend="gloo", verbose=False)  # on CPUs Trainer leaves that too late for zero.Init
from accelerate.state import AcceleratorState
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

job = json.load(open("job.json"))
columns = numpy.load("rows.npz")
rows = [dict(zip(columns.files, row)) for row in zip(*(columns[name] for name in columns.files))]
found = {}
for name, case in job["cases"].items():
    args = TrainingArguments("out", deepspeed=case["file"], **job["arguments"] | case["more"])
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype="float32")
    trainer = Trainer(model=model, args=args, train_dataset=rows)
    trainer.train()
    engine, optimizer = trainer.model_wrapped, trainer.model_wrapped.optimizer.optimizer
    history = [row for row in trainer.state.log_history if "loss" in row]
    found[name] = dict(
        engine=type(engine).__name__, stage=engine.zero_optimization_stage(), ranks=engine.dp_world_size,
        accumulation=engine.gradient_accumulation_steps(), optimizer=type(optimizer).__name__,
        decays=sorted({group["weight_decay"] for group in optimizer.param_groups}),
        **{key: [row[key] for row in history] for key in ("loss", "grad_norm", "learning_rate")})
    trainer.accelerator.free_memory()  # the launcher's process group serves the next one too
    AcceleratorState._reset_state()
assert "deepseek_ft" not in sys.modules
if args.process_index == 0:
    json.dump(found, open("found.json", "w"))
"""


@pytest.fixture(scope="module")
def recipe(tiny_recipe, tmp_path_factory) -> tuple[Path, list[str]]:
    """Blocks of one row each, of two targets or twenty, and a decay and a clipping that would show if they were others."""
    source = random.Random(3)
    file = tmp_path_factory.mktemp("uneven") / "rows.jsonl"
    words = "def return value index list of the for in range sum import open read write close".split()
    with open(file, "w", encoding="utf-8") as out:
        for _ in range(900):  # no epoch ends within the run
            row = {"prompt": " ".join(source.choices(words, k=source.randint(30, 34))),
                   "completion": " " + " ".join(source.choices(words, k=source.choice((1, 20))))}  # fmt: skip
            out.write(json.dumps(row) + "\n")
    return tiny_recipe, [
        f"ranks={RANKS}", f"train.micro_batch_size={MICRO}", f"train.global_batch_size={MICRO * ACCUMULATION * RANKS}",
        f"train.max_steps={STEPS}", "optim.weight_decay=0.5", "optim.max_grad_norm=2.0", "optim.min_lr_ratio=0.1",
        f"data.train=[{{source: jsonl, path: {file}, split: train}}]", "data.eval=[]",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def stock(recipe, tmp_path_factory) -> dict:
    """What the script has found, under both files; and once more with each rank's loss divided by its own targets."""
    folder = tmp_path_factory.mktemp("stock")
    config = load_config(*recipe)
    materials = _load_materials(config)
    assert len(materials.train) > STEPS * MICRO * ACCUMULATION * RANKS
    rows = list(materials.train)
    np.savez(folder / "rows.npz", **{name: np.stack([row[name] for row in rows]) for name in rows[0]})
    optim = config.optim
    job = {
        "model": materials.model_source,
        "arguments": {
            "use_cpu": True, "seed": config.seed, "data_seed": config.seed, "max_steps": STEPS, "per_device_train_batch_size": MICRO,
            "gradient_accumulation_steps": ACCUMULATION, "optim": "adamw_torch_fused", "learning_rate": optim.lr,
            "weight_decay": optim.weight_decay, "adam_beta1": optim.betas[0], "adam_beta2": optim.betas[1], "adam_epsilon": optim.eps,
            "max_grad_norm": optim.max_grad_norm, "lr_scheduler_type": "cosine_with_min_lr", "warmup_steps": optim.warmup_steps,
            "lr_scheduler_kwargs": {"min_lr_rate": optim.min_lr_ratio}, "logging_steps": 1, "save_strategy": "no", "report_to": [],
            "disable_tqdm": True,
        },
        "cases": {
            **{name: {"file": str(ROOT / f"ds_configs/{name}.json"), "more": {}} for name in ("zero2", "zero3")},
            "alone": {"file": str(ROOT / "ds_configs/zero2.json"), "more": {"average_tokens_across_devices": False}},
        },
    }  # fmt: skip
    (folder / "job.json").write_text(json.dumps(job))
    (folder / "stock.py").write_text(SCRIPT)
    done = run(BIN / "torchrun", "--nproc-per-node", RANKS, "stock.py", cwd=folder)
    assert done.returncode == 0, done.stdout[-4000:]
    return json.loads((folder / "found.json").read_text())


def apart(some, others) -> float:
    return max(abs(a / b - 1) for a, b in zip(some, others, strict=True))


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_a_plain_trainer_has_the_same_losses(strategy, recipe, stock, tmp_path):
    path, words = recipe
    result = train(path, *words, f"strategy={strategy}", cwd=tmp_path)
    ours = [row for row in read_metrics(result["folder"] / "metrics.jsonl") if "loss" in row]
    theirs = stock[strategy]

    facts = result["engine_facts"]
    assert (facts["engine"], facts["zero_stage"], facts["engine_world_size"], facts["grad_accum_steps"], facts["optimizer"]) == (
        theirs["engine"], theirs["stage"], theirs["ranks"], theirs["accumulation"], theirs["optimizer"],
    ) == ("DeepSpeedEngine", int(strategy[-1]), RANKS, ACCUMULATION, "AdamW")  # fmt: skip
    assert theirs["decays"] == [0.0, 0.5]

    losses, norms = [row["loss"] for row in ours], [row["grad_norm"] for row in ours]
    assert len(losses) == STEPS and losses[-1] < losses[0] - 0.2 and min(norms) < 2.0 < max(norms), (losses, norms)
    assert [row["learning_rate"] for row in ours] == pytest.approx(theirs["learning_rate"])
    assert apart(losses, theirs["loss"]) < LOSS, (losses, theirs["loss"])
    assert apart(norms, theirs["grad_norm"]) < NORM, (norms, theirs["grad_norm"])
    # It would show: with each rank's loss divided by its own targets it is another training.
    assert apart(stock["alone"]["loss"], theirs["loss"]) > 20 * LOSS
