from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest

from deepseek_ft import ConfigError, list_recipes, load_config
from deepseek_ft import config as config_module
from deepseek_ft.config import known_keys, to_yaml
from deepseek_ft.recipe import find_recipe


def problems(*args, **kwargs) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(*args, **kwargs)
    return str(caught.value)


@pytest.mark.parametrize("name", list_recipes())
def test_every_recipe_loads_and_its_dump_reproduces_it(name, tmp_path):
    config = load_config(name)
    saved = tmp_path / "config.yaml"
    saved.write_text(to_yaml(config))
    assert load_config(saved) == config
    assert Path(find_recipe(name)).read_text().startswith("# ")


def test_the_articles_values():
    c = load_config("deepseek-coder-7b/code_full")
    assert (c.optim.lr, c.optim.weight_decay, c.optim.schedule, c.optim.warmup_steps) == (5e-5, 0.01, "warmup", 1000)
    t = c.train
    assert (t.precision, t.micro_batch_size, t.grad_accum_steps, t.epochs) == ("fp16", 8, 4, 3)
    assert (t.log_steps, t.save_steps, t.save_total_limit) == (10, 500, 2)
    assert c.model.path == "deepseek-ai/deepseek-coder-7b-base-v1.5"
    for name in ("deepseek-llm-7b/openwebtext_full", "deepseek-llm-7b/wikitext103_full"):
        c = load_config(name)
        assert (c.train.epochs, c.optim.schedule, c.train.precision) == (5, "cosine", "fp16")
        assert c.optim.warmup_steps > 0


def test_config_is_frozen():
    config = load_config("quickstart")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.optim.lr = 1.0


def test_overrides_three_ways_give_the_same():
    a = load_config("quickstart", ["optim.lr=1e-4", "train.max_steps=7", "optim.betas=[0.8, 0.9]"])
    b = load_config("quickstart", {"optim": {"lr": 1e-4}, "train.max_steps": 7, "optim.betas": (0.8, 0.9)})
    c = load_config("quickstart", optim={"lr": "1e-4", "betas": [0.8, 0.9]}, train={"max_steps": 7})
    assert a == b == c
    assert a.optim.lr == 1e-4 and isinstance(a.optim.lr, float)


def test_sources_can_be_reached_by_index():
    config = load_config("deepseek-llm-7b/wikitext103_full", ["data.train.0.path=/x", "data.eval[0].split=test"])
    assert config.data.train[0].path == "/x" and config.data.train[0].source == "wikitext-103"
    assert config.data.eval[0].split == "test"


def test_a_list_override_replaces_the_list():
    config = load_config("quickstart", ["data.eval=[]"])
    assert config.data.eval == []


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-5", 1e-5), ("5e-4", 5e-4), (".5", 0.5), ("1.", 1.0), ("2", 2.0), ("'1e-5'", 1e-5), ("1_0.5", 10.5)],
)
def test_numbers_are_numbers_whatever_they_look_like(text, value, tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        f"name: x\nmodel: {{path: preset:tiny-v3}}\ndata: {{train: [{{source: python-stdlib}}]}}\noptim: {{lr: {text}}}\n"
    )
    lr = load_config(recipe).optim.lr
    assert lr == value and type(lr) is float
    assert load_config(recipe, [f"optim.lr={text}"]).optim.lr == value


def test_text_stays_text(tmp_path):
    for word in ("12:30", "no", "on", "007", "1e5", "0x10"):
        assert load_config("quickstart", [f"name={word}"]).name == word
    recipe = tmp_path / "r.yaml"
    recipe.write_text("name: 12:30\nmodel: {path: preset:tiny-v3}\ndata: {train: [{source: python-stdlib}]}\n")
    assert load_config(recipe).name == "12:30"


def test_integers():
    assert load_config("quickstart", ["train.max_steps=1e3"]).train.max_steps == 1000
    assert load_config("quickstart", train={"max_steps": np.int64(5)}).train.max_steps == 5
    assert "whole number" in problems("quickstart", ["train.max_steps=1.5"])
    assert "whole number" in problems("quickstart", ["train.max_steps=true"])
    assert "true or false" in problems("quickstart", ["model.gradient_checkpointing=2"])


def test_everything_wrong_is_said_at_once():
    text = problems(
        "quickstart",
        ["optim.learning_rte=3", "train.micro_batch_size=abc", "nam=2", "train.precision=bf17", "data.train.0.pth=3",
         "model.path=${oc.env:NOPE_NOT_SET}", "output_dir=$NOPE_NOT_SET/x", "optim.betas=0.9", "tain.epochs=3"],
    )  # fmt: skip
    for expected in ("optim.lr?", "'abc'", "Did you mean name?", "bf16?", "data.train.path?", "NOPE_NOT_SET",
                     "output_dir", "list of numbers", "Did you mean train.epochs?", "9 problems"):  # fmt: skip
        assert expected in text, (expected, text)


@pytest.mark.parametrize(
    ("word", "hint"),
    [("learning_rate=1", "optim.lr"), ("optim.warmup=3", "optim.warmup_steps"), ("evaluation_strategy=steps", "train.eval_steps"),
     ("train.per_device_train_batch_size=3", "train.micro_batch_size"), ("gradient_accumulation_steps=2", "train.grad_accum_steps"),
     ("num_train_epochs=2", "train.epochs"), ("overwrite_output_dir=true", "never overwritten"), ("trainer.lr=1", "optim.lr"),
     ("max_seq_length=9", "data.seq_len"), ("train.warmup_ratio=0.1", "optim.warmup_ratio"), ("sed=3", "seed")],
)  # fmt: skip
def test_the_nearest_right_key_is_named(word, hint):
    assert hint in problems("quickstart", [word])


def test_where_it_came_from_is_named(tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        "name: x\nmodel: {path: preset:tiny-v3}\ndata:\n  train: [{source: python-stdlib}]\n  sq_len: 5\n"
    )
    assert "mine.yaml:5" in problems(recipe)
    assert "command line" in problems("quickstart", ["seed=x"])
    assert "keyword argument" in problems("quickstart", seed="x")


def test_duplicate_keys_are_errors(tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("name: x\noptim:\n  lr: 1\n  lr: 2\n")
    assert "lines 3 and 4" in problems(recipe)
    assert "given twice" in problems("quickstart", ["seed=1", "seed=2"])


@pytest.mark.parametrize("text", ["a: [1, 2", "\tx: 1", "- a\n- b\n", "just words"])
def test_broken_yaml_is_one_message(text, tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(text)
    assert "mine.yaml" in problems(recipe)


def test_binary_recipe(tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_bytes(b"\xff\xfe\x00name")
    assert "cannot be read" in problems(recipe)


def test_required_keys(tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("seed: 1\n")
    text = problems(recipe)
    assert "name: required" in text and "model.path: required" in text and "data.train" in text


def test_recipe_names():
    assert "Did you mean" in problems("quikstart")
    assert "deepseek-coder-7b/code_full" in problems("code_full")
    assert "Shipped" in problems("zzz")


def test_paths_are_expanded(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("DATA", "/data")
    config = load_config(
        "quickstart", ["output_dir=~/runs/x", "data.path=$DATA/x", "data.train.0.path=${oc.env:DATA}/y"]
    )
    assert (config.output_dir, config.data.path, config.data.train[0].path) == ("/home/me/runs/x", "/data/x", "/data/y")


def test_an_override_replaces_the_alternative_of_the_recipe():
    config = load_config("quickstart", ["train.global_batch_size=48", "optim.warmup_ratio=0.1", "deepspeed=x.json"])
    assert config.train.grad_accum_steps is None and config.train.global_batch_size == 48
    assert config.optim.warmup_steps is None and config.optim.warmup_ratio == 0.1
    assert config.strategy == "auto" and config.deepspeed == "x.json"


@pytest.mark.parametrize(
    ("words", "expected"),
    [(["optim.warmup_steps=3", "optim.warmup_ratio=0.1"], "keep one"),
     (["train.global_batch_size=3", "train.grad_accum_steps=1"], "keep one"),
     (["seed=-1"], "seed"), (["seed=4294967296"], "seed"), (["name="], "name"),
     (["optim.warmup_steps=0.1"], "optim.warmup_ratio=0.1"), (["data.train.0.source=pyton-stdlib"], "python-stdlib?"),
     (["optim.schedule=wsd", "optim.warmup_ratio=0.9"], "more than the whole run"),
     (["strategy=zero2", "deepspeed=x.json"], "keep one"),
     (["optim.schedule=constant"], "no warm-up"),
     (["optim.schedule=warmup"], "never comes down"),
     (["optim.warmup_type=log"], "WarmupLR"),
     (["experts.balance_loss=often"], "a number above 0, `config`"), (["experts.bias_update_speed=-1"], "above 0"),
     (["experts.balance_loss=0.1", "experts.train_router=false"], "keep one"),
     (["experts.bias_update_speed=0.1", "method.kind=lora"], "set it to null"),
     (["optim.lr=0"], "above 0"), (["optim.lr=.nan"], "above 0"), (["train.micro_batch_size=0"], "above 0"),
     (["optim.betas=[0.9]"], "two numbers"), (["optim.betas=[0.9, 1.0]"], "two numbers"),
     (["optim.min_lr_ratio=2"], "between 0 and 1"), (["data.train=[]"], "no source"), (["strategy=zero4"], "zero3"),
     (["data.train.0.split=tset"], "known: train"), (["data.train.0.holdout=1.5"], "between 0 and 1"),
     (["data.train.0=x"], "list of sources"), (["method.kind=loraa"], "Did you mean lora?"), (["data.seq_len=1"], "no next token")],
)  # fmt: skip
def test_contradictions_and_ranges(words, expected):
    assert expected in problems("quickstart", words)


@pytest.mark.parametrize(
    "key", ["ranks", "train.max_steps", "optim.warmup_ratio", "data.train.0.max_documents", "seed", "name"]
)
def test_unset_variables_in_any_kind_of_key(key):
    assert "NOPE_NOT_SET" in problems("quickstart", [f"{key}=${{oc.env:NOPE_NOT_SET}}"])


def test_interpolation_mistakes():
    assert "optim.nope" in problems("quickstart", ["name=${optim.nope}"])
    assert problems("quickstart", ["name=${output_dir}"])
    assert "problems" not in problems("quickstart", ["name=null"])  # one mistake, said once


def test_dotted_and_merge_keys_in_yaml(tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text("""
name: x
model.path: preset:tiny-v3
optim.lr: 1e-4
optim: {eps: 1e-6}
data:
  path: here
  train: [&a {source: code, split: train, holdout: 0.2}]
  eval: [{<<: *a, split: validation}]
""")
    config = load_config(recipe)
    assert (config.optim.lr, config.optim.eps, config.model.path) == (1e-4, 1e-6, "preset:tiny-v3")
    assert config.data.eval[0].split == "validation" and config.data.eval[0].holdout == 0.2


def test_list_entries_that_are_not_there():
    for index in ("5", "-1", "00", "²"):
        assert f"data.train.{index}" in problems("quickstart", [f"data.train.{index}.path=x"])


def test_a_deepspeed_block_in_a_recipe_is_told_where_to_go():
    assert "json file" in problems("quickstart", deepspeed={"zero_optimization": {"stage": 2}})


def test_python_values():
    assert load_config("quickstart", optim={"betas": np.array([0.5, 0.6])}).optim.betas == [0.5, 0.6]
    assert load_config("quickstart", output_dir=Path("a/b")).output_dir == "a/b"
    for wrong in (5, [1], [("optim.lr", 1)]):
        assert problems("quickstart", wrong)
    for section in ({"optim": None}, ["optim="]):
        assert "section of keys" in problems("quickstart", section)
    for name in ("", ".", "/", "~nouser/x", "x" * 300, "a/"):
        assert "no recipe named" in problems(name)


def test_names_survive_the_dump(tmp_path):
    for name in ("none", "on", "12:30", "1e5", "null-ish", "true story"):
        saved = tmp_path / "c.yaml"
        saved.write_text(to_yaml(load_config("quickstart", [f"name={name}"])))
        assert load_config(saved).name == name


@pytest.mark.parametrize("word", ["no", "yes", "on", "off", "true", "False"])
def test_switches(word):
    expected = word.lower() in ("yes", "on", "true")
    assert load_config("quickstart", [f"model.gradient_checkpointing={word}"]).model.gradient_checkpointing is expected


@pytest.mark.parametrize(
    "words",
    [
        ["data.eval.0.holdout=0.2"],
        ["data.train.0.split=null"],
        ["data.eval.0.split=train"],
        ["data.train=[{source: text, path: a}]", "data.eval=[{source: text, path: a}]"],
        [
            "data.path=a",
            "data.train=[{source: wikitext-2, split: test}]",
            "data.eval=[{source: wikitext-2, path: a, split: test}]",
        ],
    ],
)
def test_held_out_text_is_not_trained_on(words):
    assert "trained on" in problems("quickstart", words)


def test_different_sources_may_share_a_split():
    load_config("quickstart", ["data.train=[{source: text, path: a}]", "data.eval=[{source: text, path: b}]"])


def test_overrides_must_be_overrides():
    text = problems("quickstart", ["--lr", "train", "=3"])
    assert text.count("is not an override") == 3


def test_every_key_is_explained_where_it_stands():
    """A key is a name that says itself, or has a docstring under it; the README sends people there."""
    source = Path(config_module.__file__).read_text()
    say_themselves = {
        "name",
        "seed",
        "output_dir",
        "betas",
        "eps",
        "precision",
        "epochs",
        "log_steps",
        "save_total_limit",
    }
    for key in known_keys():
        leaf = key.rsplit(".", 1)[-1]
        section = key in ("model", "method", "data", "optim", "train", "data.train")
        explained = re.search(rf'^    {leaf}: [^\n]*\n( {{8,}}[^\n]*\n)*    """', source, re.M)
        assert section or leaf in say_themselves or explained, key


def test_kernel_arguments_are_not_read(monkeypatch):
    monkeypatch.setattr("sys.argv", ["ipykernel_launcher.py", "-f", "/x/kernel-1.json"])
    assert load_config("quickstart").name == "quickstart"
