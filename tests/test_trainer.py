"""The Trainer subclass in this process: normalisation, what it asserts, what it hides from nobody."""

from __future__ import annotations

import dataclasses
import json
import random

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from deepseek_ft import RunError, load_config, plan_run
from deepseek_ft.callbacks import RunLog, duration
from deepseek_ft.hardware import Hardware
from deepseek_ft.strategies import STRATEGIES
from deepseek_ft.trainer import FineTuneTrainer, build_training_args

CPU = Hardware(gpus=(), cores=2, host_memory_bytes=8 << 30)


def rows(targets=(15, 1, 12, 2, 14, 1, 3, 9), length=16) -> list[dict]:
    """Rows with very different numbers of targets (casebook ACC-1)."""
    source = random.Random(0)
    made = []
    for k in targets:
        ids = np.array([source.randrange(64) for _ in range(length)])
        made.append({"input_ids": ids, "labels": np.where(np.arange(length) < length - k, -100, ids)})
    return made


def tiny(model_type="llama"):
    shape = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
    }
    if model_type.startswith("deepseek"):
        shape |= {"kv_lora_rank": 16, "q_lora_rank": None, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "head_dim": 8,
                  "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 16,
                  "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1, "num_key_value_heads": 4}  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **shape))


def trained(folder, micro=8, accumulation=1, steps=1, data=None, model=None, **overrides):
    words = {"strategy": "single", "train.micro_batch_size": micro, "train.grad_accum_steps": accumulation, "train.log_steps": 1,
             "optim.max_grad_norm": 1e9, "data.seq_len": 16, "train.save_steps": None, "optim.warmup_steps": 0}  # fmt: skip
    config = load_config("quickstart", words | overrides)
    plan = plan_run(config, CPU)
    args = build_training_args(config, plan, folder, steps)
    trainer = FineTuneTrainer(config=config, plan=plan, bytes_of_token=np.ones(64), eval_blocks=None, model=model or tiny(), args=args,
                              train_dataset=data if data is not None else rows())  # fmt: skip
    log = RunLog(trainer, folder / "metrics.jsonl")
    trainer.add_callback(log)
    trainer.train()
    return trainer, log


@pytest.mark.parametrize("model_type", ["llama", "deepseek_v3"])
def test_loss_and_norm_do_not_know_how_the_batch_is_cut(tmp_path, model_type):
    found = []
    for micro, accumulation in ((8, 1), (2, 4), (1, 8)):
        _, log = trained(tmp_path, micro, accumulation, model=tiny(model_type))
        found.append((log.history[0]["loss"], log.history[0]["grad_norm"]))
    assert found[1] == pytest.approx(found[0], rel=1e-5) and found[2] == pytest.approx(found[0], rel=1e-5)
    assert found[0][0] == pytest.approx(np.log(64), rel=0.05)


def test_targets_are_counted(tmp_path):
    trainer, log = trained(tmp_path, 2, 2, steps=2)
    assert int(trainer.target_tokens) == 15 + 1 + 12 + 2 + 14 + 1 + 3 + 9 == log.history[-1]["target_tokens"]


def test_the_rate_that_is_logged_is_the_rate_that_was_used(tmp_path):
    """Plain SGD-like check: with learning rate 0 in the first step no weight moves, in the second they do."""
    model = tiny()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    _, log = trained(tmp_path, model=model, **{"optim.warmup_steps": 4})
    assert log.history[0]["learning_rate"] == 0
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    _, log = trained(tmp_path, model=model, steps=2, **{"optim.warmup_steps": 4, "optim.lr": 1e-2})
    assert log.history[-1]["learning_rate"] == pytest.approx(2.5e-3)
    assert not torch.equal(model.state_dict()["lm_head.weight"], before["lm_head.weight"])


def test_a_nan_loss_is_shown_and_ends_the_run(tmp_path):
    model = tiny()
    with torch.no_grad():
        model.lm_head.weight[0, 0] = float("nan")
    with pytest.raises(RunError, match=r"(?s)loss is nan at step 1.*optim\.lr"):
        trained(tmp_path, model=model, steps=2)


def test_a_model_that_starts_where_guessing_does_is_not_trained(tmp_path):
    """Weights that were mixed up on the way in look like this, and so does another model's tokenizer (casebook Z3-4)."""
    of_a_folder = {"model.path": "somebody/model"}
    with pytest.raises(RunError, match="guessing among 64 ids gives 4.16"):
        trained(tmp_path / "a", model=tiny(), **of_a_folder)
    trained(tmp_path / "b", model=tiny(), **of_a_folder, **{"model.untrained": True})
    knows, _ = trained(tmp_path / "c", steps=40, **{"optim.lr": 1e-2})
    trained(tmp_path / "d", model=knows.model, **of_a_folder)


def test_norms_and_biases_are_not_decayed(tmp_path):
    trainer, _ = trained(tmp_path, **{"optim.weight_decay": 0.5})
    decayed, free = trainer.optimizer.param_groups
    assert (decayed["weight_decay"], free["weight_decay"]) == (0.5, 0.0)
    assert {p.dim() for p in decayed["params"]} == {2} and {p.dim() for p in free["params"]} == {1}


@pytest.mark.parametrize("change", [{"strategy": STRATEGIES["zero3"]}, {"world_size": 3}])
def test_what_was_not_planned_does_not_train(tmp_path, change):
    """DeepSpeed dropped in silence, or another number of ranks than planned (casebook LCH-5)."""
    trainer, _ = trained(tmp_path)
    assert trainer.assert_planned()["engine"] == "LlamaForCausalLM"
    trainer.plan = dataclasses.replace(trainer.plan, **change)
    with pytest.raises(RunError, match="not what was planned"):
        trainer.assert_planned()


def test_metrics_are_json_lines(tmp_path):
    _, log = trained(tmp_path, 2, 1, steps=3)
    assert [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == log.history


def test_durations():
    assert [duration(s) for s in (5, 65, 3600, 7325)] == ["5s", "1m05s", "1h00m", "2h02m"]
