"""A model folder that is not the model that was trained is found before anybody uses it."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from conftest import corpus_of
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from deepseek_ft import CheckpointError, load_config, plan_run
from deepseek_ft.evaluation import block_nll
from deepseek_ft.export import check_model_folder
from deepseek_ft.hardware import Hardware
from deepseek_ft.models import load_model, load_tokenizer, model_source, tokenizer_source

CPU = Hardware(gpus=(), cores=2, host_memory_bytes=8 << 30)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A model folder, some rows and what a run would have measured on them."""
    cache, folder = tmp_path_factory.mktemp("cache"), tmp_path_factory.mktemp("saved") / "model"
    config = load_config(
        "quickstart", {"model.path": "preset:tiny-v3", "strategy": "single", "model.tokenizer": "train:400"}
    )
    text = open(np.__file__, encoding="utf-8").read()
    tokenizer = load_tokenizer(tokenizer_source(config, [corpus_of([text], "export")], cache))
    model = load_model(model_source(config, tokenizer, cache), config, plan_run(config, CPU), tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    ids = np.array(tokenizer.encode(text, add_special_tokens=False)[:128]).reshape(2, 64)
    rows = [{"input_ids": r, "labels": np.concatenate([[-100], r[1:]])} for r in ids]
    return folder, rows, block_nll(model, rows, 2, torch.device("cpu")).tolist()


def check(folder, rows, nlls, precision="fp32"):
    return check_model_folder(folder, rows, nlls, precision, seed=1)


def test_the_same_model_passes_and_writes(saved):
    found = check(*saved)
    assert found["check"]["reloaded_loss"] == pytest.approx(found["check"]["loss"], abs=1e-5)
    assert found["sample"]["prompt"] and found["sample"]["text"] and found["check"]["tokens"] == 126
    assert check(saved[0], [], []) == {}


def test_fp32_weights_of_a_bf16_run_are_scored_as_the_run_did(saved, tmp_path):
    """Updates below half a bf16 step, all for the better: the products of the run had not seen them."""
    folder, rows, _ = saved
    shutil.copytree(folder, tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).float()
    batch = torch.stack([torch.from_numpy(row["input_ids"]) for row in rows])
    for _ in range(8):  # away from where it began, so that there is something to gain
        model(input_ids=batch, labels=batch).loss.backward()
        for p in model.parameters():
            if p.grad is not None:
                p.data, p.grad = (p.data - 2e-3 * p.grad.sign()).bfloat16().float(), None
    model(input_ids=batch, labels=batch).loss.backward()
    for p in model.parameters():
        if p.grad is not None:
            p.data -= 0.49 * 2 ** (p.data.abs().log2().floor() - 7) * p.grad.sign()  # bf16 has 7 bits behind the first
    model.save_pretrained(tmp_path / "model")
    exact = block_nll(model, rows, 2, torch.device("cpu")).sum() / 126
    with torch.autocast("cpu", torch.bfloat16):
        measured = block_nll(model, rows, 2, torch.device("cpu")).tolist()
    assert abs(sum(measured) / 126 - exact) > 2e-2  # what the check allows for 16 bits
    found = check(tmp_path / "model", rows, measured, "bf16")["check"]
    assert found["reloaded_loss"] == pytest.approx(found["loss"], abs=2e-3)


DAMAGES = {
    "one matrix zeroed": lambda w: {
        k: v * 0 if k.endswith("layers.1.self_attn.o_proj.weight") else v for k, v in w.items()
    },
    "embeddings shuffled": lambda w: {k: v.flip(0) if "embed_tokens" in k else v for k, v in w.items()},
    "a tensor is missing": lambda w: {k: v for k, v in w.items() if "layers.2.mlp.gate" not in k},
    "a tensor is empty": lambda w: {k: v[:0] if k == "model.norm.weight" else v for k, v in w.items()},
    "not a number": lambda w: {k: v * float("nan") if k == "model.norm.weight" else v for k, v in w.items()},
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_another_model_does_not_pass(saved, tmp_path, damage):
    shutil.copytree(saved[0], tmp_path / "model")
    weights = load_file(tmp_path / "model/model.safetensors")
    torch.manual_seed(3)
    save_file(
        {k: v.contiguous().clone() for k, v in DAMAGES[damage](weights).items()},
        tmp_path / "model/model.safetensors",
        {"format": "pt"},
    )
    with pytest.raises(CheckpointError):
        check(tmp_path / "model", *saved[1:])


def test_a_folder_without_a_model(saved, tmp_path):
    with pytest.raises(CheckpointError, match="does not load"):
        check(tmp_path, *saved[1:])
