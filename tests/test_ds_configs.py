"""The files in ds_configs/ with nothing else of ours: a plain Hugging Face Trainer under the DeepSpeed launcher."""

from __future__ import annotations

import json

import pytest
from conftest import BIN, ROOT, needs_libaio, run

from deepseek_ft.strategies import STRATEGIES

pytestmark = pytest.mark.ranks

SCRIPT = """
import deepspeed, json, sys, torch
deepspeed.init_distributed(dist_backend="gloo", verbose=False)  # on CPUs Trainer leaves that too late for zero.Init
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

def rows(n=24, length=16):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 64, (n, length), generator=generator)
    return [{"input_ids": i, "labels": i} for i in ids]

folder, *names = [word for word in sys.argv[1:] if not word.startswith("--local_rank")]
found = {}
for name in names:
    bf16 = name.endswith("_bf16")
    args = TrainingArguments(
        f"out/{name}", use_cpu=True, deepspeed=f"{folder}/{name}.json", bf16=bf16, max_steps=4, learning_rate=1e-2,
        per_device_train_batch_size=2, gradient_accumulation_steps=2, warmup_steps=2, max_grad_norm=0.7, logging_steps=1,
        save_strategy="no", report_to=[], disable_tqdm=True, lr_scheduler_type="constant_with_warmup",
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(
        "llama", vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4))
    trainer = Trainer(model=model, args=args, train_dataset=rows())
    trainer.train()
    trainer.save_model(f"out/{name}/model")
    engine = trainer.model_wrapped
    found[name] = dict(
        engine=type(engine).__name__, stage=engine.zero_optimization_stage(), ranks=engine.dp_world_size, clip=engine.gradient_clipping(),
        micro=engine.train_micro_batch_size_per_gpu(), accumulation=engine.gradient_accumulation_steps(), bf16=engine.bfloat16_enabled(),
        losses=[h["loss"] for h in trainer.state.log_history if "loss" in h])
    # The launcher's process group serves the next file too; only the engine goes.
    trainer.accelerator.free_memory()
    from accelerate.state import AcceleratorState
    AcceleratorState._reset_state()
if args.process_index == 0:
    json.dump(found, open("found.json", "w"))
"""


def use(names: list[str], folder) -> dict:
    (folder / "plain.py").write_text(SCRIPT)
    done = run(BIN / "deepspeed", "--num_gpus", "2", "plain.py", ROOT / "ds_configs", *names, cwd=folder)
    assert done.returncode == 0, done.stdout[-4000:]
    return json.loads((folder / "found.json").read_text())


def check(found: dict, names: list[str], folder) -> None:
    from transformers import AutoModelForCausalLM

    for name in names:
        row = found[name]
        assert (row["engine"], row["stage"], row["ranks"]) == ("DeepSpeedEngine", STRATEGIES[name].stage, 2)
        assert (row["clip"], row["micro"], row["accumulation"]) == (0.7, 2, 2)
        assert row["bf16"] == name.endswith("_bf16") and row["losses"][-1] < row["losses"][0]
        model, info = AutoModelForCausalLM.from_pretrained(folder / f"out/{name}/model", output_loading_info=True)
        assert not info["missing_keys"] and model.lm_head.weight.shape == (64, 32)


def test_with_a_plain_trainer(tmp_path):
    names = ["zero1", "zero2", "zero3", "zero3_bf16"]
    check(use(names, tmp_path), names, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zero2_offload", "zero2_offload_bf16", "zero3_offload", "zero3_offload_bf16", "zero3_offload_all", "zero3_warmup",
                                  pytest.param("zero3_nvme", marks=needs_libaio)])
def test_with_a_plain_trainer_and_deepspeeds_optimizer(name, tmp_path):
    """Builds DeepSpeed's Adam on the first call: minutes."""
    check(use([name], tmp_path), [name], tmp_path)
