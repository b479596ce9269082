from __future__ import annotations

import copy
import json

import pytest

from deepseek_ft import ConfigError, load_config
from deepseek_ft.deepspeed_config import Batch, check, read
from deepseek_ft.recipe import resource_dir
from deepseek_ft.strategies import STRATEGIES

FILES = sorted(p.stem for p in resource_dir("ds_configs").glob("*.json"))
BATCH = Batch(micro_batch_size=8, grad_accum_steps=4, world_size=3)
RECIPE = "deepseek-llm-7b/wikitext103_full"  # cosine, 1,000 steps of warm-up, fp16, lr 5e-5


def ds(**more) -> dict:
    base = {
        "zero_optimization": {"stage": 2},
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
    }
    return copy.deepcopy(base | more)


def problems(config=None, **more) -> str:
    return "\n".join(check(ds(**more), "mine.json", config or load_config(RECIPE), BATCH)[1])


def test_every_file_has_a_row_and_every_row_its_file():
    assert set(FILES) == {row.file or name for name, row in STRATEGIES.items() if row.deepspeed}


def test_what_does_nothing_on_one_host_is_said():
    zero = {"stage": 3, "zero_quantized_gradients": True, "zero_hpz_partition_size": 2, "zero_quantized_weights": True}
    _, problems, notes = check({"zero_optimization": zero}, "mine.json", load_config(RECIPE), Batch(8, 1, 3))
    assert not problems and sum("is for several hosts" in note for note in notes) == 2
    _, _, quiet = check({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 1}}, "mine.json", load_config(RECIPE), Batch(8, 1, 3))
    assert not any("several hosts" in note for note in quiet)


@pytest.mark.parametrize("name", FILES)
def test_shipped_files(name):
    row, config = read(name), load_config(RECIPE)
    strategy = STRATEGIES[name]
    zero = row["zero_optimization"]
    assert zero["stage"] == strategy.stage
    assert zero.get("offload_optimizer", {}).get("device") == ("nvme" if strategy.nvme else "cpu" if strategy.offload_optimizer else None)
    assert zero.get("zero_quantized_weights", False) == strategy.quantized_gathers
    assert (zero.get("offload_param", {}).get("device") == "cpu") == strategy.offload_params
    for key in (
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
    ):
        assert row[key] == "auto"
    if strategy.stage == 3:
        assert zero["stage3_gather_16bit_weights_on_model_save"] is True
    overrides = {"train.precision": "bf16"} if name.endswith("_bf16") else {}
    overrides |= {"optim.schedule": "warmup"} if name == "zero3_warmup" else {}
    completed, wrong, notes = check(row, f"{name}.json", load_config(RECIPE, overrides), BATCH)
    assert not wrong and not notes and completed == row
    config_of_other_precision = load_config(RECIPE, overrides | {"train.precision": "bf16"})
    assert not check(row, f"{name}.json", config_of_other_precision, BATCH)[1]
    assert config.train.precision == "fp16"


def test_the_articles_file_value_for_value():
    zero = read("zero3_offload_all")["zero_optimization"]
    expected = {
        "stage": 3, "overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": 5e8,
        "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9, "stage3_prefetch_bucket_size": 5e8,
        "offload_optimizer": {"device": "cpu", "pin_memory": True}, "offload_param": {"device": "cpu", "pin_memory": True},
    }  # fmt: skip
    assert {k: zero[k] for k in expected} == expected


def test_conflicts_are_listed_with_both_values():
    text = problems(
        train_batch_size=64, gradient_accumulation_steps=8, gradient_clipping=0.5, bf16={"enabled": True},
        optimizer={"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.1}},
    )  # fmt: skip
    for expected in ("64", "96", "8 in the file, but 4", "0.5 in the file, but 1.0", "bf16.enabled", "0.0001 in the file, but 5e-05",
                     "[0.9, 0.95]", "1e-06", "0.1 in the file, but 0.01", "mine.json"):  # fmt: skip
        assert expected in text, expected


def test_equal_values_are_no_conflict():
    assert not problems(train_micro_batch_size_per_gpu=8, train_batch_size=96, fp16={"enabled": True},
                        optimizer={"type": "Adam", "params": {"lr": 5e-5, "betas": [0.9, 0.999]}})  # fmt: skip


def test_another_curve_is_an_error_that_shows_both():
    block = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-4, "warmup_num_steps": 500}}
    text = problems(scheduler=block)
    assert "WarmupLR" in text and "optim.schedule=cosine" in text
    assert "0.0001 in the file, but 5e-05" in text and "500 in the file, but 1000" in text


def test_warmup_lr_in_the_file_needs_the_same_ramp():
    linear, log = (load_config(RECIPE, {"optim.schedule": "warmup", "optim.warmup_type": t}) for t in ("linear", "log"))
    block = {"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}}  # without warmup_type DeepSpeed's is log
    assert "log warm-up" in problems(linear, scheduler=block)
    assert not problems(log, scheduler=block)


def test_fixed_total_steps_are_refused():
    config = load_config(RECIPE, {"optim.schedule": "linear"})
    block = {
        "type": "WarmupDecayLR",
        "params": {"total_num_steps": 3, "warmup_num_steps": 1000, "warmup_type": "linear"},
    }
    assert 'write "auto"' in problems(config, scheduler=block)
    block["params"]["total_num_steps"] = "auto"
    assert not problems(config, scheduler=block)


def test_auto_where_nothing_fills_it():
    text = problems(zero_optimization={"stage": 3, "sub_group_size": "auto", "reduce_bucket_size": "auto"})
    assert "sub_group_size" in text and "reduce_bucket_size" not in text


def test_numbers_as_text_are_read_and_said():
    done, wrong, notes = check(
        ds(gradient_accumulation_steps="4", zero_optimization={"stage": "3", "overlap_comm": "true"}),
        "mine.json", load_config(RECIPE), BATCH,
    )  # fmt: skip
    assert not wrong and done["gradient_accumulation_steps"] == 4 and done["zero_optimization"]["stage"] == 3
    assert done["zero_optimization"]["overlap_comm"] is True
    assert any("'4'" in n for n in notes) and any("'3'" in n for n in notes)


def test_missing_clipping_is_put_in():
    raw = ds()
    del raw["gradient_clipping"]
    done, _, notes = check(raw, "mine.json", load_config(RECIPE), BATCH)
    assert done["gradient_clipping"] == "auto" and any("max_grad_norm" in n for n in notes)


def test_missing_gather_is_switched_on():
    done, _, notes = check(ds(zero_optimization={"stage": 3}), "mine.json", load_config(RECIPE), BATCH)
    assert done["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] is True and notes


def test_precision_of_the_recipe_gets_its_section():
    done = check(ds(), "mine.json", load_config(RECIPE), BATCH)[0]
    assert done["fp16"]["enabled"] == "auto"


@pytest.mark.parametrize(
    ("more", "expected"),
    [({"fp16": {"enabled": "auto", "loss_scale": 8, "fp16_scale_tolerance": 0.25}}, "fp16_scale_tolerance"),
     ({"zero_optimisation": {"stage": 3}}, "did you mean zero_optimization?"),
     ({"zero_optimization": {"stage": 3, "overlap_com": True}}, "did you mean overlap_comm?"),
     ({"zero_optimization": {"stage": 7}}, "stages 0 to 3"),
     ({"zero_optimization": [3]}, "JSON object"), ({"fp16": True}, "JSON object"),
     ({"tensorboard": {"enabled": True}}, "metrics.jsonl"), ({"wandb": {}}, "metrics.jsonl"),
     ({"optimizer": {"type": "OneBitAdam"}}, "AdamW")],
)  # fmt: skip
def test_refused(more, expected):
    assert expected in problems(**more)


@pytest.mark.parametrize(
    "more",
    [{"zero_optimization": {"stage": s}} for s in (True, "²", -1, 2.5, "two", [2])]
    + [{"zero_optimization": {"stage": 2, "offload_optimizer": v}} for v in ("cpu", True, [], {"device": "CPU"}, {"device": 1})]
    + [{"zero_optimization": {"stage": 2, "reduce_bucket_size": v}} for v in ("big", -1, [5], 1.5)]
    + [{"fp16": {"enabled": "auto", "loss_scale": [1]}}, {"fp16": {"initial_scale_power": "abc"}}, {"steps_per_print": "abc"},
       {"aio": []}, {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, {"gradient_allreduce_op": "sum"},
       {"bfloat16": {"enabled": True}}, {"scheduler": {"type": ["WarmupLR"]}}, {"scheduler": {"type": "WarmupLR", "params": "auto"}},
       {"optimizer": {"type": "AdamW", "params": {"betas": ["a", "b"]}}}, {"optimizer": {"params": {"betas": [None, 0.95]}}},
       {"optimizer": {"type": "AdamW", "params": {"amsgrad": True}}}, {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}},
       {"scheduler": {"type": "OneCycle"}}, {"scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": "auto"}}},
       {"zero_optimization": {"stage": 2, "cpu_offload": True}}, {"gradient_clipping": float("nan")}],
    ids=str,
)  # fmt: skip
def test_also_refused(more):
    assert "mine.json: " in problems(**more)


def test_null_means_auto():
    raw = ds(gradient_clipping=None, fp16={"enabled": None})
    done, wrong, notes = check(raw, "mine.json", load_config(RECIPE), BATCH)
    assert not wrong and done["gradient_clipping"] == "auto" and done["fp16"]["enabled"] == "auto" and len(notes) == 2


@pytest.mark.parametrize("kind", ["WarmupLR", "WarmupDecayLR"])
def test_what_a_scheduler_is_not_told_comes_from_the_recipe(kind):
    """DeepSpeed's own defaults are a peak of 0.001 and 1,000 steps (casebook SCH-2)."""
    config = load_config(RECIPE, {"optim.schedule": "warmup" if kind == "WarmupLR" else "linear"})
    raw = ds(scheduler={"type": kind, "params": {"warmup_type": "linear"}})
    done, wrong, notes = check(raw, "mine.json", config, BATCH)
    assert not wrong
    expected = {"warmup_min_lr", "warmup_max_lr", "warmup_num_steps"}
    expected |= {"total_num_steps"} if kind == "WarmupDecayLR" else set()
    assert {k for k, v in done["scheduler"]["params"].items() if v == "auto"} == expected and len(notes) == len(
        expected
    )


@pytest.mark.parametrize("steps", [0, 1, None])
def test_deepspeed_cannot_warm_up_in_less_than_two_steps(steps):
    config = load_config(RECIPE, {"optim.schedule": "warmup", "optim.warmup_steps": steps})
    block = {"type": "WarmupLR", "params": {"warmup_type": "linear"}}
    assert "at least 2 steps" in problems(config, scheduler=block)


def test_deep_nesting_is_one_message(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text('{"a":' * 100_000)
    with pytest.raises(ConfigError, match=r"mine\.json"):
        read(str(path))


def test_static_loss_scale_is_said():
    notes = check(ds(fp16={"enabled": "auto", "loss_scale": 8}), "mine.json", load_config(RECIPE), BATCH)[2]
    assert any("static" in n for n in notes)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("{", ":1"), ('{"a": 1, "a": 2}', "given twice"), ("[]", "one JSON object"), ("{'a': 1}", "not valid JSON")],
)
def test_broken_files(tmp_path, text, expected):
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=expected):
        read(str(path))


def test_missing_file_names_the_shipped_ones():
    with pytest.raises(ConfigError, match="zero3_offload"):
        read("nowhere.json")


def test_shipped_files_are_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert (
        read("ds_configs/zero3.json")
        == read("zero3")
        == json.loads((resource_dir("ds_configs") / "zero3.json").read_text())
    )
