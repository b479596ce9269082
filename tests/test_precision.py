"""Numbers that a type cannot hold: found before the first step, named, counted, never trained on (casebook FP-1 to FP-4)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import cli, newest_run, train
from safetensors.torch import load_file, save_file
from test_trainer import tiny, trained

from deepseek_ft import CheckpointError, RunError, load_config
from deepseek_ft.deepspeed_config import Batch, check, read
from deepseek_ft.precision import Origin, check_weights, find_origin
from deepseek_ft.schedules import lr_factor

RECIPE = "quickstart"


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    """A llama of 96 wide states with tied embeddings, in fp32, as a folder."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    shape = {"vocab_size": 640, "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
             "tie_word_embeddings": True, "max_position_embeddings": 256}  # fmt: skip
    folder = tmp_path_factory.mktemp("models") / "sound"
    AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **shape), dtype=torch.float32).save_pretrained(folder)
    return folder


def changed(folder: Path, to: Path, change) -> Path:
    """A copy of a model folder whose tensors `change` has had in its hands."""
    shutil.copytree(folder, to)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    return to


def rows_of(run: dict) -> list[dict]:
    return [row for line in (run["folder"] / "metrics.jsonl").read_text().splitlines() if "learning_rate" in (row := json.loads(line))]


# ------------------------------------------------------------------------------------------------ loss scale


def test_a_forward_pass_beyond_fp16_ends_the_run_in_words(tmp_path, sound, tiny_recipe):
    """Casebook FP-1: ZeRO-2 fp16 with a dynamic scale; a clear message in fewer than 40 steps, and no traceback."""

    def hurt(tensors):
        tensors["model.layers.1.mlp.down_proj.weight"].copy_(
            tensors["model.layers.1.mlp.down_proj.weight"].sign() * 6e4
        )
        tensors["model.layers.1.mlp.up_proj.weight"] *= 1e3

    model = changed(sound, tmp_path / "hurt", hurt)
    done = cli("train", tiny_recipe, f"model.path={model}", "model.untrained=true", "strategy=zero2", "train.precision=fp16", "ranks=2", "train.max_steps=40",
               "train.global_batch_size=4", "data.eval=[]", cwd=tmp_path)  # fmt: skip
    assert done.returncode == 1 and "Traceback" not in done.stdout, done.stdout[-3000:]
    message = done.stdout[done.stdout.index("RunError: ") :]
    assert message.startswith("RunError: step 18: gradients overflowed again in fp16, and the loss scale is at its smallest (1)")
    for words in ("18 of 18 steps were left out", "model.layers.1.mlp.down_proj (rank ", "train.precision=bf16", "optim.lr (0.005)"):
        assert words in message, (words, message)
    assert "step 1: gradients overflowed (loss scale 65536), no update; first non-finite output: model.layers.1.mlp.down_proj" in done.stdout
    assert "loss none: no update" in done.stdout and "skipped 17, scale 1" in done.stdout
    rows = rows_of(newest_run(tmp_path))
    assert [row["skipped"] for row in rows] == list(range(1, 18))
    assert {row["loss_scale"] for row in rows} == {2.0**k for k in range(17)}
    assert all("loss" not in row and row["tokens"] == row["target_tokens"] == 0 for row in rows)
    assert {row["learning_rate"] for row in rows} == {0.0}  # the warm-up waits for the first update


def first_scale(tmp_path: Path, strategy: str, power: int) -> Path:
    ds = read(strategy)
    ds["fp16"] = ds["fp16"] | {"initial_scale_power": power, "hysteresis": 1}
    path = tmp_path / "scale.json"
    path.write_text(json.dumps(ds))
    return path


@pytest.mark.parametrize("strategy", ["zero3", pytest.param("zero1", marks=pytest.mark.slow)])
def test_skipped_steps_are_counted_and_are_no_training(tmp_path, tiny_recipe, strategy):
    """A first scale that is too high: a few steps are lost to it, and everything counted is of the others."""
    file = first_scale(tmp_path, strategy, 26)
    run = train(tiny_recipe, f"deepspeed={file}", "strategy=auto", "train.precision=fp16", "model.path=preset:tiny-llama", "ranks=2",
                "train.global_batch_size=4", "train.max_steps=16", cwd=tmp_path)  # fmt: skip
    rows, skipped = rows_of(run), run["skipped_steps"]
    assert 2 <= skipped < 16 and (run["steps"], run["updates"]) == (16, 16 - skipped)
    so_far = [row["skipped"] for row in rows]
    left_out = [b - a for a, b in zip([0, *so_far], so_far, strict=False)]
    assert len(rows) == 16 and left_out[0] == 1 and set(left_out) == {0, 1} and so_far[-1] == skipped
    assert [row["loss_scale"] for row in rows] == [2.0 ** (26 - n) for n in so_far]
    assert [("loss" in row, row["grad_norm"] is None) for row in rows] == [(not x, bool(x)) for x in left_out]
    assert [row["tokens"] for row in rows] == [(i + 1 - n) * 4 * 64 for i, n in enumerate(so_far)]
    assert rows[-1]["tokens"] == run["tokens"] and 0 < rows[-1]["target_tokens"] == run["target_tokens"] <= run["tokens"]
    # The curve follows the updates: the first update has its first rate, and none is left out.
    optim = load_config(tiny_recipe).optim
    rates = [optim.lr * lr_factor(optim, i - n, 16, 2) for i, n in enumerate([0, *so_far[:-1]])]
    assert [row["learning_rate"] for row in rows] == pytest.approx(rates)


def test_the_overflow_of_a_scale_that_is_too_high_is_said_to_be_the_backward_pass(tmp_path, tiny_recipe):
    file = first_scale(tmp_path, "zero2", 30)
    done = cli("train", tiny_recipe, f"deepspeed={file}", "strategy=auto", "train.precision=fp16", "model.path=preset:tiny-llama",
               "ranks=1", "train.global_batch_size=2", "train.max_steps=20", "train.log_steps=20", "data.eval=[]", cwd=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    run = newest_run(tmp_path)
    assert (f"step 1: gradients overflowed (loss scale {2**30:g} -> {2**29:g}), no update; every output of the forward pass is finite: "
            "it happened in the backward pass") in done.stdout  # fmt: skip
    assert done.stdout.count("gradients overflowed (") == 1
    assert f"note: {run['skipped_steps']} of 20 steps were left out" in done.stdout
    # The line of a mean over several steps is the mean over those that were updates.
    first, last = rows_of(run)
    assert "loss" not in first and last["skipped"] == run["skipped_steps"] and 4.5 < last["loss"] < 7


@pytest.mark.parametrize(
    "words, expected",
    [
        ({"loss_scale": 8, "fp16_scale_tolerance": 0.25}, "no such key"),
        ({"initial_scale_power": 60}, "initial_scale_power: got 60"),
        ({"initial_scale_power": 4, "min_loss_scale": 32}, "above the first loss scale 2^4 = 16"),
        ({"min_loss_scale": 0}, "min_loss_scale: got 0"),
        ({"loss_scale_window": 0}, "loss_scale_window: got 0"),
        ({"hysteresis": 0}, "hysteresis: got 0"),
    ],
)
def test_harmful_cures_are_refused(words, expected):
    """Casebook FP-2 and its neighbours."""
    ds = read("zero2")
    ds["fp16"] |= words
    _, problems, _ = check(ds, "own.json", load_config(RECIPE, {"train.precision": "fp16"}), Batch(1, 1, 3))
    assert len(problems) == 1 and expected in problems[0], problems


def test_a_static_scale_is_warned_of_and_two_precisions_are_refused():
    ds = read("zero2")
    ds["fp16"]["loss_scale"] = 8
    _, problems, notes = check(ds, "own.json", load_config(RECIPE, {"train.precision": "fp16"}), Batch(1, 1, 3))
    assert not problems and "loss_scale 8 is static" in notes[0]
    ds = read("zero2")
    ds["fp16"]["enabled"] = ds["bf16"]["enabled"] = True
    _, problems, _ = check(ds, "own.json", load_config(RECIPE, {"train.precision": "bf16"}), Batch(1, 1, 3))
    assert any("both true" in p for p in problems)


# -------------------------------------------------------------------------------------------- where it came from


def batch():
    ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids.clone()}


@pytest.mark.parametrize("model_type", ["llama", "deepseek_v3"])
@pytest.mark.parametrize("name", ["self_attn.o_proj", "mlp", "input_layernorm"])
def test_the_first_module_whose_output_is_not_finite_is_named(model_type, name):
    model = tiny(model_type)
    module = model.get_submodule(f"model.layers.0.{name}")
    rows = batch()

    def spoil(module, args, output):  # one token of the second row
        output = output.clone()
        output[1, 5, 0] = float("inf")
        return output

    module.register_forward_hook(spoil)
    hooks = sum(len(m._forward_hooks) for m in model.modules())
    model.train()
    origin = find_origin(model, model, [rows], torch.device("cpu"), None, lambda ids: f"{ids}")
    assert (origin.module, origin.entered, origin.rank, origin.row) == (f"model.layers.0.{name}", False, 0, 1)
    assert origin.text.startswith(f"{rows['input_ids'][1, :3].tolist()}"[:-1])
    assert model.training and sum(len(m._forward_hooks) for m in model.modules()) == hooks


def test_a_number_made_between_modules_is_said_to_enter_the_next():
    model = tiny()
    with torch.no_grad():
        for name in "qk":  # both finite, but not their products
            model.get_submodule(f"model.layers.0.self_attn.{name}_proj").weight.mul_(1e25)
    origin = find_origin(model, model, [batch()], torch.device("cpu"))
    assert (origin.module, origin.entered) == ("model.layers.0.self_attn.o_proj", True)
    assert "not finite already" in str(origin)
    sound = tiny()
    assert find_origin(sound, sound, [batch()], torch.device("cpu")) == Origin(None)


def test_a_nan_ends_the_run_at_once_and_no_weight_has_it(tmp_path):
    """Before torch's update, at the step itself and not at the next line of the log."""
    model = tiny()
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[0, 0] = float("inf")
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(RunError, match=r"(?s)the loss is nan at step 1.*weights are still those of step 0.*layers\.0\.mlp\.down_proj"):
        trained(tmp_path, model=model, steps=3, **{"train.log_steps": 3, "optim.lr": 1e-2})
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def spread_1e38(tensors):
    tensors["model.layers.1.mlp.down_proj.weight"].copy_(tensors["model.layers.1.mlp.down_proj.weight"].sign() * 1e38)
    tensors["model.layers.1.mlp.up_proj.weight"] *= 1e3


@pytest.mark.parametrize(
    "strategy, precision",
    [("zero3", "bf16"), *(pytest.param(*p, marks=pytest.mark.slow) for p in (("zero2", "bf16"), ("zero1", "fp32"), ("ddp", "bf16")))],
)
def test_every_strategy_ends_at_the_first_step_that_is_not_finite(tmp_path, sound, tiny_recipe, strategy, precision):
    """ZeRO-1 and 2 in bf16 would have added the NaN to the weights, ZeRO-3 would have gone on leaving out every step."""
    model = changed(sound, tmp_path / "huge", spread_1e38)
    done = cli("train", tiny_recipe, f"model.path={model}", "model.untrained=true", f"strategy={strategy}", f"train.precision={precision}", "ranks=2",
               "train.global_batch_size=4", "train.log_steps=8", "data.eval=[]", cwd=tmp_path)  # fmt: skip
    assert done.returncode == 1 and "Traceback" not in done.stdout, done.stdout[-3000:]
    assert "RunError: the loss is nan at step 1" in done.stdout and "those of step 0" in done.stdout
    assert "first non-finite output: model.layers.1.mlp.down_proj (rank " in done.stdout


# ---------------------------------------------------------------------------------- weights, before the first step


def one_weight(value: float):
    def change(tensors):
        tensors["model.layers.0.mlp.up_proj.weight"][1, 2] = value

    return change


def test_weights_beyond_fp16_are_refused_before_the_first_step(tmp_path, sound, tiny_recipe):
    """Casebook FP-3, with the weights in shards: from_pretrained and DeepSpeed cast it to inf without a word."""
    model = changed(sound, tmp_path / "beyond", lambda t: (one_weight(1e5)(t), t.update({k: v.bfloat16() for k, v in t.items()})))
    done = cli("train", tiny_recipe, f"model.path={model}", "model.untrained=true", "strategy=zero3", "train.precision=fp16", "ranks=2",
               "train.global_batch_size=4", "data.eval=[]", cwd=tmp_path)  # fmt: skip
    assert done.returncode == 2 and "CheckpointError" in done.stdout, done.stdout[-3000:]
    assert "model.layers.0.mlp.up_proj.weight: 1 of 24,576 values is beyond it, the largest 99,840" in done.stdout
    assert "train.precision=bf16" in done.stdout and "step 1" not in done.stdout


@pytest.mark.parametrize(
    "value, precision, expected",
    [
        (float("nan"), "fp32", r"not finite \(1 NaN, 0 infinite\)"),
        (float("-inf"), "bf16", r"not finite \(0 NaN, 1 infinite\)"),
        (float("nan"), "fp16", r"not finite \(1 NaN, 0 infinite\)"),
        (-70000.0, "fp16", r"1 of 24,576 values is beyond it, the largest 70,000"),
        (-70000.0, "bf16", None),
        (65504.0, "fp16", None),
        (1e-7, "fp16", None),
    ],
)
def test_what_a_precision_cannot_hold_is_found_and_nothing_else(tmp_path, sound, value, precision, expected):
    from transformers import AutoModelForCausalLM

    folder = changed(sound, tmp_path / "model", one_weight(value))
    config = load_config(RECIPE, {"train.precision": precision})
    for dtype in (torch.float32, {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[precision]):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)  # as autocast has it, and as DeepSpeed does
        if expected is None:
            check_weights(model, config, str(folder))
            continue
        with pytest.raises(CheckpointError, match=expected):
            check_weights(model, config, str(folder))


# ------------------------------------------------------------------------------------------------ types in use

TYPES = {
    ("single", "bf16"): ("fp32", "bf16", "fp32", "fp32", "fp32", None),
    ("ddp", "bf16"): ("fp32", "bf16", "fp32", "fp32", "fp32", "fp32"),
    ("zero1", "bf16"): ("bf16", "bf16", "bf16", "fp32", "fp32", "bf16"),
    ("zero2", "fp16"): ("fp16", "fp16", "fp16", "fp32", "fp32", "fp16"),
    ("zero3", "fp32"): ("fp32", "fp32", "fp32", "fp32", "fp32", "fp32"),
    ("zero3", "bf16"): ("bf16", "bf16", "bf16", "fp32", "fp32", "bf16"),
    ("zero3_bf16", "bf16"): ("bf16", "bf16", "bf16", "bf16", "bf16", "bf16"),
    ("zero2_offload", "bf16"): ("bf16", "bf16", "bf16", "fp32", "fp32", "bf16"),
    ("zero2_offload_bf16", "bf16"): ("bf16", "bf16", "bf16", "bf16", "bf16", "bf16"),
    ("zero3_offload", "bf16"): ("bf16", "bf16", "bf16", "fp32", "fp32", "bf16"),
    ("zero3_offload_bf16", "bf16"): ("bf16", "bf16", "bf16", "bf16", "bf16", "bf16"),
    ("zero3_offload_all", "bf16"): ("bf16", "bf16", "bf16", "fp32", "fp32", "bf16"),
}
IN_CI = [("zero3_bf16", "bf16")]


@pytest.mark.parametrize(
    "strategy, precision", [pytest.param(*pair, marks=[] if pair in IN_CI else [pytest.mark.slow]) for pair in TYPES]
)
def test_the_types_that_run_are_read_off_the_engine(tmp_path, tiny_recipe, strategy, precision):
    ranks = 1 if strategy == "single" else 2
    done = cli("train", tiny_recipe, "model.path=preset:tiny-llama", f"strategy={strategy}", f"train.precision={precision}",
               f"ranks={ranks}", "train.global_batch_size=4", "train.max_steps=2", "data.eval=[]", cwd=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    names = ("parameters", "products", "gradients", "master", "states", "communication")
    expected = dict(zip(names, TYPES[strategy, precision], strict=True)) | {"buffers": "fp32", "frozen": None}
    assert newest_run(tmp_path)["precision"] == expected
    order = ("parameters", "buffers", "products", "gradients", "master", "states", "communication")
    assert " | ".join(f"{k} {expected[k]}" for k in order if expected[k]) in done.stdout
