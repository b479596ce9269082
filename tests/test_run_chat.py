"""A run on conversations, from rows to a model folder that can be talked to; and data that teaches nothing never trains."""

from __future__ import annotations

import json

import pytest
from conftest import cli, train
from transformers import AutoTokenizer, GenerationConfig

from deepseek_ft import DataError, load_config
from deepseek_ft.report import read_metrics
from deepseek_ft.run import load_data

RECIPE = """
name: chat
seed: 7
model: {path: preset:tiny-llama, tokenizer: "train:600", gradient_checkpointing: false}
data:
  train: [{source: files, path: chat.jsonl, split: train, holdout: 0.2}]
  eval:  [{source: files, path: chat.jsonl, split: validation, holdout: 0.2}]
  seq_len: 96
optim: {lr: 1.0e-2, schedule: cosine, warmup_steps: 2}
train: {max_steps: 12, micro_batch_size: 2, global_batch_size: 6, precision: fp32, log_steps: 1, eval_steps: null, save_steps: null}
"""


def turns(i: int) -> dict:
    return {"messages": [{"role": "user", "content": f"How much is {i} and {i + 1}?"}, {"role": "assistant", "content": f"It is {2 * i + 1}."},
                         {"role": "user", "content": "Are you sure?"}, {"role": "assistant", "content": "Yes, I am."}]}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(turns(i)) + "\n" for i in range(200)))
    return tmp_path


@pytest.mark.ranks
def test_a_run_on_conversations_leaves_a_model_that_can_be_talked_to(folder, monkeypatch, cache):
    result = train("recipe.yaml", "strategy=zero3", cwd=folder)
    assert result["engine_facts"]["zero_stage"] == 3 and result["after"]["loss"] < result["before"]["loss"] - 1
    rows = [r for r in read_metrics(result["folder"] / "metrics.jsonl") if "loss" in r]
    assert rows[-1]["tokens"] == 12 * 6 * 96 and 0.1 < rows[-1]["target_tokens"] / rows[-1]["tokens"] < 0.6

    monkeypatch.chdir(folder)
    encoder, blocks = load_data(load_config("recipe.yaml"), cache)
    row = blocks["train"][0]
    model = result["folder"] / "model"
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert GenerationConfig.from_pretrained(model).eos_token_id == tokenizer.eos_token_id
    # What the saved tokenizer asks the model is what it was trained to answer, token by token.
    first = encoder.decode(row["input_ids"]).split("How much is ")[1].split(" ")[0]
    asked = tokenizer.apply_chat_template(
        turns(int(first))["messages"][:1], add_generation_prompt=True, return_dict=False
    )
    assert row["input_ids"][: len(asked)].tolist() == asked
    assert row["labels"][len(asked) - 1] == -100 and row["labels"][len(asked)] != -100
    learnt = encoder.decode(row["labels"][row["labels"] != -100])
    assert (
        learnt.count(tokenizer.eos_token) == learnt.count("It is") + learnt.count("Yes, I am.")
        and "How much" not in learnt
    )


NOTHING = {
    "no assistant": {"messages": [{"role": "user", "content": "hello"}]},
    "an empty answer": {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": " "}]},
    "every turn with weight 0": {
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0}]
    },
    "an empty completion": {"prompt": "hello", "completion": ""},
}


@pytest.mark.parametrize("row", NOTHING.values(), ids=NOTHING)
def test_data_without_anything_to_learn_is_refused(folder, cache, monkeypatch, row):
    monkeypatch.chdir(folder)
    (folder / "chat.jsonl").write_text((json.dumps(row) + "\n") * 50)
    words = ["data.eval=[]", "data.train.0.split=null", "model.tokenizer=train:600"]
    with pytest.raises(DataError, match=r"chat.jsonl:1: there is nothing to learn"):
        load_data(load_config("recipe.yaml", words), cache)
    with pytest.raises(DataError, match="nothing in it but rows that are 50 bad"):
        load_data(load_config("recipe.yaml", [*words, "data.on_bad_row=skip", "data.max_bad_share=1.0"]), cache)


def test_it_never_trains(folder):
    (folder / "chat.jsonl").write_text((json.dumps(NOTHING["no assistant"]) + "\n") * 50)
    done = cli("train", "recipe.yaml", "strategy=single", cwd=folder)
    assert done.returncode == 2 and "nothing to learn" in done.stdout and "chat.jsonl:1" in done.stdout
    assert "step 1/" not in done.stdout and "Traceback" not in done.stdout


def test_a_template_that_loses_the_answers_never_trains(folder, cache, monkeypatch):
    monkeypatch.chdir(folder)
    encoder, _ = load_data(load_config("recipe.yaml"), cache)
    tokenizer = encoder.tokenizer
    tokenizer.chat_template = ("{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ '' if m.role == 'assistant' else m.content }}"
                               "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}")  # fmt: skip
    tokenizer.save_pretrained(folder / "lossy")
    done = cli("train", "recipe.yaml", "strategy=single", "model.tokenizer=lossy", cwd=folder)
    assert done.returncode == 2 and "chat.jsonl:1" in done.stdout and "step 1/" not in done.stdout, done.stdout
