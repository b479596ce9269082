from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import SHARED, corpus_of, needs_shared
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from deepseek_ft import CheckpointError, ConfigError, load_config, plan_run
from deepseek_ft.data.tokenise import tokenizer_id
from deepseek_ft.hardware import Hardware
from deepseek_ft.models import (
    load_model,
    load_tokenizer,
    model_source,
    token_bytes,
    tokenizer_source,
)
from deepseek_ft.shapes import PRESETS

TEXT = "def add(a, b):\n    return 12345 + b  # ≤ ℕ\n你好，世界\r\n"
CPU = Hardware(gpus=(), cores=2, host_memory_bytes=8 << 30)


def corpus():
    return corpus_of([TEXT, Path(json.__file__).read_text(), Path(shutil.__file__).read_text()], "models")


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    return tokenizer_source(
        load_config("quickstart", {"model.tokenizer": "train:400"}), [corpus()], tmp_path_factory.mktemp("tok")
    )


# ------------------------------------------------------------------------------------------------ tokenizers


def test_a_trained_tokenizer_gives_text_back(tokenizer_folder):
    tokenizer = load_tokenizer(tokenizer_folder)
    for text in (TEXT, "  leading", "tabs\t\tand\x0bodd", "🦊 don't", "<｜end▁of▁sentence｜>"):
        assert (
            tokenizer.decode(tokenizer.encode(text, add_special_tokens=False), clean_up_tokenization_spaces=False)
            == text
        )
    assert len(tokenizer) == 400 and tokenizer.eos_token_id == 1
    assert tokenizer_id(tokenizer) == tokenizer_id(load_tokenizer(tokenizer_folder))


def test_token_bytes_add_up_to_the_text(tokenizer_folder):
    tokenizer = load_tokenizer(tokenizer_folder)
    sizes = np.array(token_bytes(tokenizer, 512))
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    assert sizes[ids].sum() == len(TEXT.encode()) and sizes[tokenizer.eos_token_id] == 0 and len(sizes) == 512


def test_a_tokenizer_that_loses_spaces_is_refused(tokenizer_folder, tmp_path):
    shutil.copytree(tokenizer_folder, tmp_path / "t")
    file = tmp_path / "t" / "tokenizer.json"
    settings = json.loads(file.read_text())
    settings["normalizer"] = {"type": "Replace", "pattern": {"String": " "}, "content": ""}
    file.write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match="does not give text back"):
        load_tokenizer(str(tmp_path / "t"))


def test_a_class_that_splits_otherwise_is_refused(tokenizer_folder, tmp_path):
    """Labelled as a Llama tokenizer and loaded as one, a byte-level file loses its own splitting (casebook TOK-1)."""
    shutil.copytree(tokenizer_folder, tmp_path / "t")
    AutoConfig.for_model("qwen2").save_pretrained(tmp_path / "t")  # transformers then takes Qwen2's own splitter
    settings = json.loads((tmp_path / "t" / "tokenizer_config.json").read_text())
    settings["tokenizer_class"] = "Qwen2Tokenizer"
    (tmp_path / "t" / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer_json = json.loads((tmp_path / "t" / "tokenizer.json").read_text())
    tokenizer_json["pre_tokenizer"] = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    (tmp_path / "t" / "tokenizer.json").write_text(json.dumps(tokenizer_json))
    try:
        load_tokenizer(str(tmp_path / "t"))
    except ConfigError as error:
        assert "splits text otherwise" in str(error)
    else:  # a transformers that keeps the file's splitter is as good
        from tokenizers import Tokenizer

        own = Tokenizer.from_file(str(tmp_path / "t" / "tokenizer.json"))
        assert own.encode(TEXT).ids == load_tokenizer(str(tmp_path / "t")).encode(TEXT, add_special_tokens=False)


def test_add_bos_is_honoured(tokenizer_folder, tmp_path):
    shutil.copytree(tokenizer_folder, tmp_path / "t")
    file = tmp_path / "t" / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"add_bos_token": True}))
    tokenizer = load_tokenizer(str(tmp_path / "t"))
    assert tokenizer("hi")["input_ids"][0] == tokenizer.bos_token_id
    tokenizer.save_pretrained(tmp_path / "saved")
    assert load_tokenizer(str(tmp_path / "saved"))("hi")["input_ids"][0] == tokenizer.bos_token_id


def test_truncation_that_was_saved_with_it_is_not_kept(tokenizer_folder, tmp_path):
    tokenizer = load_tokenizer(tokenizer_folder)
    tokenizer.backend_tokenizer.enable_truncation(5)
    tokenizer.backend_tokenizer.enable_padding(length=40)
    tokenizer.save_pretrained(tmp_path / "t")
    assert '"max_length": 5' in (tmp_path / "t/tokenizer.json").read_text()
    again = load_tokenizer(str(tmp_path / "t"))
    assert again.decode(again.encode(TEXT, add_special_tokens=False), clean_up_tokenization_spaces=False) == TEXT


def test_no_tokenizer_is_said(tmp_path):
    with pytest.raises(ConfigError, match="no tokenizer can be loaded"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(ConfigError, match="train:<size>"):
        tokenizer_source(load_config("quickstart", {"model.tokenizer": "train:12"}), [], tmp_path)


@needs_shared
@pytest.mark.parametrize("name", ["deepseek-llm", "deepseek-coder"])
def test_deepseeks_tokenizers_give_their_reference_ids(name):
    folder = SHARED / "tokenizers" / name
    tokenizer = load_tokenizer(str(folder))
    texts = (folder / "vectors.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    wanted = (folder / "vectors.out").read_text().split("\n")
    checked = 0
    for text, line in zip(texts, wanted, strict=False):
        assert tokenizer.encode(text, add_special_tokens=False) == [int(i) for i in line.split()], text
        checked += 1
    assert checked >= 46


# --------------------------------------------------------------------------------------------------- models


@pytest.mark.parametrize("name", [n for n in PRESETS if n.startswith("tiny")])
def test_every_tiny_preset_learns(name, tokenizer_folder, tmp_path):
    tokenizer = load_tokenizer(tokenizer_folder)
    config = load_config("quickstart", {"model.path": f"preset:{name}", "strategy": "single"})
    model = load_model(model_source(config, tokenizer, tmp_path), config, plan_run(config, CPU), tokenizer)
    assert model.config.model_type == PRESETS[name]["model_type"]
    ids = torch.tensor([tokenizer.encode(Path(json.__file__).read_text(), add_special_tokens=False)[:96]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(5):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(np.log(448), rel=0.05) and losses[-1] < losses[0] - 0.5


@pytest.fixture(scope="module")
def llama(tokenizer_folder, tmp_path_factory):
    config = load_config("quickstart", {"model.path": "preset:tiny-llama", "strategy": "single"})
    tokenizer = load_tokenizer(tokenizer_folder)
    return model_source(config, tokenizer, tmp_path_factory.mktemp("presets")), tokenizer


def load(folder, tokenizer, **more):
    config = load_config("quickstart", {"model.path": str(folder), "strategy": "single"} | more)
    return load_model(str(folder), config, plan_run(config, CPU), tokenizer)


def test_a_preset_is_made_once_and_from_its_seed(llama, tokenizer_folder, tmp_path):
    folder, tokenizer = llama
    config = load_config("quickstart", {"model.path": "preset:tiny-llama"})
    again = model_source(config, tokenizer, tmp_path)
    weights = [load_file(f"{f}/model.safetensors") for f in (folder, again)]
    assert all(torch.equal(weights[0][k], weights[1][k]) for k in weights[0])
    other = load_file(
        model_source(load_config("quickstart", {"model.path": "preset:tiny-llama", "seed": 1}), tokenizer, tmp_path)
        + "/model.safetensors"
    )
    assert not torch.equal(weights[0]["lm_head.weight"], other["lm_head.weight"])
    assert weights[0]["lm_head.weight"].shape[0] == 448  # 400 ids, rounded up


def test_trainable_weights_are_loaded_in_fp32_outside_deepspeed(llama, tmp_path):
    folder, tokenizer = llama
    AutoModelForCausalLM.from_pretrained(folder).to(torch.bfloat16).save_pretrained(tmp_path / "bf16")
    assert load(tmp_path / "bf16", tokenizer, **{"train.precision": "bf16"}).dtype == torch.float32


def damaged(llama, folder, change):
    shutil.copytree(llama[0], folder)
    weights = load_file(folder / "model.safetensors")
    save_file(change(weights), folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("change", "expected"),
    [(lambda w: {k.replace("layers.0.self_attn.q_proj", "layers.0.self_attn.q_prj"): v for k, v in w.items()}, "q_prj"),
     (lambda w: {k: v for k, v in w.items() if "norm" not in k}, "missing keys"),
     (lambda w: w | {"extra.weight": torch.zeros(2)}, "extra.weight"),
     (lambda w: w | {"model.norm.weight": torch.zeros(3)}, "model.norm.weight")],
)  # fmt: skip
def test_weights_that_are_not_those_of_the_config_are_fatal(llama, tmp_path, change, expected):
    folder = damaged(llama, tmp_path / "m", change)
    with pytest.raises(CheckpointError, match=expected):
        load(folder, llama[1])


def test_a_cut_off_file_is_one_message(llama, tmp_path):
    shutil.copytree(llama[0], tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:10_000])
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        load(tmp_path / "m", llama[1])


def test_a_tokenizer_with_more_ids_than_rows_is_refused(llama, tmp_path):
    from transformers import PreTrainedTokenizerFast

    big = PreTrainedTokenizerFast.from_pretrained(llama[1].name_or_path)
    big.add_tokens([f"<{i}>" for i in range(100)])
    with pytest.raises(ConfigError, match="do not belong together"):
        load(llama[0], big)
