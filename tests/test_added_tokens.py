"""Tokens that a recipe adds: their ids, their rows, that these alone are trained beside a frozen base, and what is saved of it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import SHARED, cli, corpus_of, needs_shared, train
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM

from deepseek_ft import CheckpointError, ConfigError, adapters, load_config, plan_run, tokens
from deepseek_ft.data.chat import choose_form
from deepseek_ft.data.formats import Completion, Conversation, Text
from deepseek_ft.data.store import decide_special
from deepseek_ft.data.tokenise import Encoder, tokenizer_id
from deepseek_ft.hardware import Hardware
from deepseek_ft.losses import Head, head_loss, head_nll
from deepseek_ft.models import load_model, load_tokenizer, token_bytes, tokenizer_source
from deepseek_ft.report import read_metrics
from deepseek_ft.run import open_data
from deepseek_ft.shapes import PRESETS, find_shape, shape_from_config
from deepseek_ft.workload import adapted_modules, adapter_of, adapter_parameters

CPU = Hardware(gpus=(), cores=2, host_memory_bytes=8 << 30)
NEW = ["<tool>", "</tool>"]
TURN = "<tool>add 3 4</tool> It is 7."


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory) -> str:
    text = [Path(json.__file__).read_text(), "How much is 3 and 4?"]
    return tokenizer_source(load_config("quickstart", {"model.tokenizer": "train:400"}), [corpus_of(text, "added")],
                            tmp_path_factory.mktemp("tok"))  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory, tokenizer_folder):
    """Saves a model with so many rows, tied or not, beside the tokenizer, and gives its folder."""

    def make(rows: int, tied: bool = False, name: str = "tiny-llama") -> Path:
        folder = tmp_path_factory.mktemp("base")
        shape = dict(PRESETS[name]) | {"vocab_size": rows, "tie_word_embeddings": tied}
        torch.manual_seed(1)
        AutoModelForCausalLM.from_config(AutoConfig.for_model(shape.pop("model_type"), **shape)).save_pretrained(folder)
        load_tokenizer(tokenizer_folder).save_pretrained(folder)
        return folder

    return make


def loaded(folder: Path, **changes):
    given = {"model.path": str(folder), "strategy": "single", "train.precision": "fp32", "model.new_tokens": NEW, "method.kind": "lora"}
    config = load_config("quickstart", given | {"model.tokenizer": None} | {k.replace("__", "."): v for k, v in changes.items()})
    tokenizer = load_tokenizer(str(folder), config.model.new_tokens)
    return load_model(str(folder), config, plan_run(config, CPU, force=True), tokenizer), config, tokenizer


# ------------------------------------------------------------------------------------------------- the names


@pytest.mark.parametrize(
    ("names", "said"),
    [(["<a>", ""], "got ''; a token has a name"), (["  \n"], "more in it than white space"), (["<a>", "<b>", "<a>"], "'<a>' is there more than once")],
)
def test_names_that_are_none_are_refused_at_once(names, said):
    with pytest.raises(ConfigError, match="model.new_tokens") as caught:
        load_config("quickstart", {"model.new_tokens": names})
    assert said in str(caught.value)


@pytest.mark.parametrize("name", ["add_tokens", "new_special_tokens", "tokens", "trainable_token_indices"])
def test_peers_names_lead_to_ours(name):
    with pytest.raises(ConfigError, match="Here it is called model.new_tokens"):
        load_config("quickstart", {f"model.{name}": ["<a>"]})


def test_they_come_in_order_behind_the_tokenizers_own_and_are_saved_with_it(tokenizer_folder, tmp_path):
    plain, more = load_tokenizer(tokenizer_folder), load_tokenizer(tokenizer_folder, NEW)
    assert [more.convert_tokens_to_ids(t) for t in NEW] == list(tokens.ids_of(more, NEW)) == [len(plain), len(plain) + 1]
    assert more.encode(TURN, add_special_tokens=False) == [len(plain), *more.encode("add 3 4", add_special_tokens=False), len(plain) + 1,
                                                           *more.encode(" It is 7.", add_special_tokens=False)]  # fmt: skip
    assert tokenizer_id(plain) != tokenizer_id(more)
    more.save_pretrained(tmp_path)
    again = load_tokenizer(str(tmp_path))
    assert again.get_vocab() == more.get_vocab() and again.encode(TURN) == more.encode(TURN)
    size = [token_bytes(more, 512, content)[len(plain)] for content in ((), NEW)]
    assert size == [0, len("<tool>")]  # in text it stands for its name


def test_what_is_a_token_already_is_refused_all_at_once(tokenizer_folder):
    with pytest.raises(ConfigError) as caught:
        load_tokenizer(tokenizer_folder, ["<new>", "<｜▁pad▁｜>", "e"])
    assert "'<｜▁pad▁｜>' is already its token 2" in str(caught.value) and "'e' is already" in str(caught.value)
    assert "<new>" not in str(caught.value)


@needs_shared
@pytest.mark.parametrize(("name", "first"), [("deepseek-coder", 32022), ("deepseek-llm", 100015)])
def test_real_tokenizers_take_them_into_rows_that_the_models_have(name, first):
    folder = str(SHARED / "tokenizers" / name)
    tokenizer = load_tokenizer(folder, NEW)
    assert list(tokens.ids_of(tokenizer, NEW)) == [first, first + 1]
    ids = tokenizer.encode(f"x {TURN}", add_special_tokens=False)
    assert first in ids and first + 1 in ids and tokenizer.decode(ids, clean_up_tokenization_spaces=False) == f"x {TURN}"
    model = {"deepseek-coder": "deepseek-ai/deepseek-coder-6.7b-base", "deepseek-llm": "deepseek-ai/deepseek-llm-7b-base"}[name]
    assert first + 1 < find_shape(model).vocab_size == find_shape(model, folder, len(NEW)).vocab_size
    many = find_shape(model).vocab_size - first + 1
    assert find_shape(model, folder, many).vocab_size == find_shape(model).vocab_size + 1


# -------------------------------------------------------------------------------------------------- the text


def encoder_of(folder: str, special_tokens: str = "auto", content: list[str] = NEW) -> Encoder:
    tokenizer = load_tokenizer(folder, NEW)
    form = choose_form(tokenizer, "deepseek_llm", content=content)
    encoder = Encoder(tokenizer, form, special_tokens, content_tokens=content)
    return encoder


EXAMPLES = {
    "conversation": Conversation([{"role": "user", "content": "Add, with <tool>!"}, {"role": "assistant", "content": TURN}], [False, True]),
    "completion": Completion("Add, with <tool>!", TURN),
    "text": Text(f"Add, with <tool>! {TURN}"),
}


@pytest.mark.parametrize("kind", EXAMPLES)
def test_their_names_in_text_are_the_tokens_unless_all_names_are_text(tokenizer_folder, kind):
    example = EXAMPLES[kind]
    encoder = encoder_of(tokenizer_folder)
    auto = encoder.reading(decide_special(encoder, [example], "test"))
    assert auto.special_tokens == "text"  # they alone do not make every special token's name one
    (row,) = auto.encode([example]).rows
    first, second = tokens.ids_of(auto.tokenizer, NEW)
    assert (row.ids == first).sum() == 2 and (row.ids == second).sum() == 1
    if row.learnt is not None:
        assert row.learnt[row.ids == second].all() and list(row.learnt[row.ids == first]) == [0, 1]
    as_text = encoder_of(tokenizer_folder, "text", [])
    (row,) = as_text.encode([example]).rows
    assert not np.isin(row.ids, [first, second]).any() and as_text.decode(row.ids).count("<tool>") == 2
    assert as_text.identity() != auto.identity()  # two readings, two caches


def test_the_names_of_other_special_tokens_beside_them_stay_text(tokenizer_folder):
    encoder = encoder_of(tokenizer_folder).reading("text")
    text = "<tool> and <｜▁pad▁｜>"
    (row,) = encoder.encode([Text(text)]).rows
    assert 2 not in row.ids and tokens.ids_of(encoder.tokenizer, NEW)[0] in row.ids and encoder.decode(row.ids[:-1]).removeprefix("<｜begin▁of▁sentence｜>") == text


@pytest.mark.parametrize(("special_tokens", "expected"), [("auto", NEW), ("parse", NEW), ("text", [])])
def test_a_recipe_says_how_they_are_read(tmp_path, special_tokens, expected):
    (tmp_path / "a.txt").write_text(f"{TURN} and so on, more than a little text for a tokenizer to learn from.\n" * 40)
    config = load_config("quickstart", {"model.new_tokens": NEW, "model.tokenizer": "train:300", "data.special_tokens": special_tokens,
                                        "data.train": [{"source": "text", "path": str(tmp_path)}], "data.eval": []})  # fmt: skip
    encoder, _ = open_data(config, tmp_path, ["train"])
    assert encoder.content_tokens == sorted(expected) and all(t in encoder.tokenizer.get_vocab() for t in NEW)


def test_those_that_the_data_does_not_hold_are_named(tokenizer_folder):
    class Store:
        ids = np.array([5, 401, 7], np.uint16)

    tokenizer = load_tokenizer(tokenizer_folder, ["<a>", "<b>", "<c>"])
    assert tokens.unseen([Store], tokenizer, ["<a>", "<b>", "<c>"]) == ["<a>", "<c>"]


# -------------------------------------------------------------------------------------------------- the rows


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("rows", [448, 401, 400])  # spare ones, one of two, none
def test_spare_rows_are_used_and_only_then_others_put_on(base, rows, tied):
    folder = base(rows, tied)
    model, _, _ = loaded(folder, method__kind="full")
    again, _, _ = loaded(folder, method__kind="full")
    expected = max(rows, 402)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert model.config.vocab_size == model.vocab_size == expected == embedding.num_embeddings == head.out_features
    assert embedding.weight.shape == head.weight.shape == (expected, 96) and (head.weight is embedding.weight) == tied
    for name, before in load_file(folder / "model.safetensors").items():
        after = model.get_parameter(name)
        assert after.requires_grad and torch.equal(after, again.get_parameter(name))
        if "embed" not in name and "head" not in name:
            assert torch.equal(after, before)
            continue
        assert torch.equal(after[:400], before[:400]) and torch.equal(after[402:], before[402:])
        assert torch.equal(after[400:402], before[:400].double().mean(dim=0).float().expand(2, -1))
    assert model(input_ids=torch.tensor([[400, 401, 3]])).logits.shape == (1, 3, expected)


def test_a_tokenizer_of_another_model_is_still_refused(base, tokenizer_folder):
    with pytest.raises(ConfigError, match="ids up to 399, the model in .* rows for 300"):
        loaded(base(300))


def test_frozen_tables_of_a_full_fine_tune_stay_frozen(base):
    model, _, _ = loaded(base(400), method__kind="full", method__freeze=["embed_tokens"])
    assert not model.get_input_embeddings().weight.requires_grad and model.get_output_embeddings().weight.requires_grad


LAYOUTS = {"untied, spare": (448, False), "untied, put on": (400, False), "tied, spare": (448, True), "tied, put on": (400, True)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_beside_a_frozen_base_they_alone_of_the_tables_are_trained_as_planned(base, layout):
    rows, tied = LAYOUTS[layout]
    folder = base(rows, tied)
    model, config, _ = loaded(folder)
    shape = shape_from_config(model.config.to_dict())
    adapter = adapter_of(config, shape)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    tables = {n: p for n, p in trained.items() if "lora_" not in n}
    assert len(tables) == (1 if tied else 2) and all(p.shape == (2, 96) and p.dtype is torch.float32 for p in tables.values())
    assert sum(p.numel() for p in trained.values()) == adapter_parameters(shape, adapter)
    described = adapters.describe(model, config)
    assert described["modules"] == adapted_modules(shape, adapter) and described["modules"]["embed_tokens"] == 1
    assert ("lm_head" in described["modules"]) == (not tied)
    assert plan_run(config, CPU).shape.vocab_size == model.config.vocab_size == max(rows, 402)


def batch(seed: int = 0) -> torch.Tensor:
    ids = torch.randint(3, 400, (2, 24), generator=torch.Generator().manual_seed(seed))
    ids[:, ::5], ids[:, 3::7] = 400, 401
    return ids


def moved(model) -> None:
    """As after some training: nothing is where it began."""
    torch.manual_seed(3)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn_like(parameter)


def gradients(model, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    names = [n for n, p in model.named_parameters() if p.requires_grad]
    return dict(zip(names, torch.autograd.grad(loss, [model.get_parameter(n) for n in names]), strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_computed_apart_give_pefts_logits_and_gradients(base, layout):
    model, _, _ = loaded(base(*LAYOUTS[layout]))
    moved(model)
    ids = batch()
    ours = model(input_ids=ids, labels=ids)
    mine = gradients(model, ours.loss)
    for wrapper in tokens.wrapped(model).values():
        assert tokens.rows_of(wrapper)[0] == 400
        del wrapper.forward  # back to peft's own
    theirs = model(input_ids=ids, labels=ids)
    assert torch.allclose(ours.logits, theirs.logits, atol=1e-5)
    for name, gradient in gradients(model, theirs.loss).items():
        assert torch.allclose(mine[name], gradient, atol=1e-5), name
        assert gradient.any()


@pytest.mark.parametrize("layout", ["untied, put on", "tied, spare"])
def test_the_chunked_loss_knows_them(base, layout):
    model, _, _ = loaded(base(*LAYOUTS[layout]))
    moved(model)
    ids = batch()
    usual = model(input_ids=ids, labels=ids).loss
    expected, head = gradients(model, usual), Head(model)
    with head.scoring(ids), torch.no_grad():
        each = model(input_ids=ids).logits
    assert float(each.sum() / (ids.numel() - len(ids))) == pytest.approx(float(usual.detach()), rel=1e-5)
    head.use_for_training()
    loss = model(input_ids=ids, labels=ids).loss
    assert float(loss.detach()) == pytest.approx(float(usual.detach()), rel=1e-5)
    for name, gradient in gradients(model, loss).items():
        assert torch.allclose(gradient, expected[name], atol=1e-5), name
    with model.disable_adapter(), head.scoring(ids), torch.no_grad():
        plain = model(input_ids=ids).logits
    assert not torch.allclose(plain, each)
    with pytest.raises(ValueError, match="no single rows of the head"):
        head.use_for_training(liger=True)


@pytest.mark.parametrize("elements", [10**9, 256 * 40])  # one piece, and several with an edge among the rows
def test_rows_in_the_place_of_the_heads_own_are_exact(elements):
    torch.manual_seed(0)
    hidden, weight, rows = torch.randn(40, 16, requires_grad=True), torch.randn(1000, 16), torch.randn(5, 16, requires_grad=True)
    labels = torch.randint(0, 1000, (40,))
    labels[:4], labels[5] = torch.tensor([510, 511, 512, 514]), -100
    whole = weight.index_copy(0, torch.arange(510, 515), rows)
    expected = cross_entropy(hidden @ whole.t(), labels)
    loss = head_loss(hidden, weight, labels, elements=elements, rows=(510, rows))
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
    for ours, theirs in zip(torch.autograd.grad(loss, (hidden, rows)), torch.autograd.grad(expected, (hidden, rows)), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)
    each = head_nll(hidden, weight, labels, elements=elements, rows=(510, rows))
    assert torch.allclose(each, cross_entropy(hidden @ whole.t(), labels, reduction="none"), atol=1e-5)


# ------------------------------------------------------------------------------------------------- the files


@pytest.mark.parametrize(("layout", "name"), [*((layout, "tiny-llama") for layout in LAYOUTS), ("untied, put on", "tiny-v3")])
def test_the_adapter_loads_on_the_original_base_here_and_with_plain_peft_and_merges(base, tmp_path, layout, name):
    """Casebook LORA-4: the base is resized on load, and the rows come from the adapter."""
    from peft import PeftModel

    folder = base(*LAYOUTS[layout], name=name)
    model, config, tokenizer = loaded(folder)
    moved(model)
    model.eval()
    saved = tmp_path / "model"
    adapters.save(model, saved, config)
    tokenizer.save_pretrained(saved)
    adapters.check_saved(model, saved)
    tensors = {n: t for n, t in load_file(saved / "adapter_model.safetensors").items() if "lora_" not in n}
    assert {t.shape for t in tensors.values()} == {(2, 96)} and len(tensors) == (1 if layout.startswith("tied") else 2)
    ids = batch()
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        ours, _ = adapters.load_with_base(saved)
        assert torch.allclose(ours.eval()(input_ids=ids).logits, expected, atol=1e-5)
        original = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        rows = load_tokenizer(str(saved)).convert_tokens_to_ids(NEW[-1]) + 1
        if rows > original.config.vocab_size:  # as documented
            original.resize_token_embeddings(rows)
        plain = PeftModel.from_pretrained(original, saved).eval()
        assert torch.allclose(plain(input_ids=ids).logits, expected, atol=1e-5)
        done = adapters.merge(saved, tmp_path / "merged")
        merged = AutoModelForCausalLM.from_pretrained(done["folder"], dtype=torch.float32).eval()
        assert torch.allclose(merged(input_ids=ids).logits, expected, atol=1e-5)
    before = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    after = merged.get_input_embeddings().weight
    assert torch.equal(after[:400], before[:400]) and torch.equal(after[402:], before[402:])
    assert torch.equal(after[400:402], dict(model.named_parameters())[_EMBEDDED])


_EMBEDDED = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta.default"


def test_a_merge_that_loses_a_row_of_the_embedding_is_refused(base, tmp_path, monkeypatch):
    from peft.tuners.trainable_tokens import TrainableTokensLayer

    model, config, tokenizer = loaded(base(448))
    moved(model)
    adapters.save(model, tmp_path / "model", config)
    tokenizer.save_pretrained(tmp_path / "model")
    merge = TrainableTokensLayer.merge
    monkeypatch.setattr(TrainableTokensLayer, "merge", lambda self, **k: None if isinstance(self.base_layer, torch.nn.Embedding) else merge(self, **k))
    with pytest.raises(CheckpointError, match="it is not the model that was trained"):
        adapters.merge(tmp_path / "model")


def test_a_saved_row_that_is_missing_is_named(base, tmp_path):
    from safetensors.torch import save_file

    model, config, _ = loaded(base(400))
    moved(model)
    adapters.save(model, tmp_path, config)
    file = tmp_path / "adapter_model.safetensors"
    save_file({n: t for n, t in load_file(file).items() if "lm_head" not in n}, file)
    with pytest.raises(CheckpointError, match="lm_head.token_adapter.trainable_tokens_delta is missing"):
        adapters.check_saved(model, tmp_path)


def test_beside_a_table_that_is_trained_whole_only_the_others_rows_are_apart(base, tmp_path):
    model, config, tokenizer = loaded(base(400), method__train_also=["lm_head"])
    assert [n.rsplit(".", 1)[-1] for n in tokens.wrapped(model)] == ["embed_tokens"]
    moved(model)
    adapters.save(model, tmp_path, config)
    adapters.check_saved(model, tmp_path)
    ours, _ = adapters.load_with_base(tmp_path)
    with torch.no_grad():
        assert torch.equal(ours.eval()(input_ids=batch()).logits, model.eval()(input_ids=batch()).logits)


# --------------------------------------------------------------------------------------------------- the runs


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokens")
    rows = [{"messages": [{"role": "user", "content": f"How much is {i} and {i}?"},
                          {"role": "assistant", "content": f"<tool>add {i} {i}</tool> It is {2 * i}."}]} for i in range(300)]  # fmt: skip
    (folder / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "tiny.yaml").write_text(f"""
name: tiny
seed: 7
output_dir: runs/${{name}}
model: {{path: preset:tiny-v3, tokenizer: "train:320", new_tokens: [<tool>, </tool>]}}
method: {{rank: 4}}
data:
  path: {folder}/chat.jsonl
  train: [{{source: files, split: train, holdout: 0.1}}]
  eval: [{{source: files, split: validation, holdout: 0.1}}]
  seq_len: 64
optim: {{lr: 2.0e-2, weight_decay: 0, warmup_steps: 1}}
train: {{max_steps: 5, micro_batch_size: 2, global_batch_size: 6, precision: fp32, log_steps: 1, eval_steps: null, save_steps: null, loss: chunked}}
strategy: zero3
""")
    return folder / "tiny.yaml"


MANY = "model.new_tokens=[" + ",".join(["<tool>", "</tool>", *(f"<t{i}>" for i in range(60))]) + "]"
ROOMS = {"spare": (), "put on": (MANY,)}


@pytest.fixture(scope="module")
def runs(recipe, tmp_path_factory):
    done: dict[tuple, dict] = {}

    def of(model: str, kind: str, room: str, strategy: str, *more: str) -> dict:
        key = (model, kind, room, strategy, *more)
        if key not in done:
            micro = 6 if strategy == "single" else 2
            done[key] = train(recipe, f"model.path=preset:{model}", f"method.kind={kind}", f"strategy={strategy}", *ROOMS[room],
                              f"train.micro_batch_size={micro}", *more, cwd=tmp_path_factory.mktemp("run"))  # fmt: skip
        return done[key]

    return of


STRATEGIES = ("single", "ddp", "zero2", "zero3")
CASES = [(m, k, r, s) for m in ("tiny-v3", "tiny-qwen2") for k in ("full", "lora") for r in ROOMS for s in STRATEGIES]
IN_CI = {("tiny-v3", "lora", "put on", "zero3")}


@pytest.mark.ranks
@pytest.mark.parametrize(("model", "kind", "room", "strategy"), [pytest.param(*c, marks=() if c in IN_CI else pytest.mark.slow) for c in CASES])
def test_a_run_trains_them_saves_reloads_on_the_original_base_and_merges(runs, cache, model, kind, room, strategy):
    """Casebook Z3-1 and LORA-4: the counts are right, the tables are in parts, and a fresh process gives the run's loss."""
    result = runs(model, kind, room, strategy)
    assert result["status"] == "finished" and result["after"]["loss"] < result["before"]["loss"]
    folder = result["folder"] / "model"
    if kind == "lora":
        done = cli("merge", result["folder"], cwd=result["folder"].parent)
        assert done.returncode == 0, done.stdout[-2000:]
        base = Path(json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"])
        folder = result["folder"] / "merged"
    tokenizer = load_tokenizer(str(folder))
    new = tokens.ids_of(tokenizer, result["config"]["model"]["new_tokens"])
    rows = json.loads((folder / "config.json").read_text())["vocab_size"]
    weights = load_file(folder / "model.safetensors")
    assert rows == weights["model.embed_tokens.weight"].shape[0] == weights["lm_head.weight"].shape[0]
    assert (rows == new.stop) == (room == "put on")
    assert [tokenizer.convert_tokens_to_ids(t) for t in result["config"]["model"]["new_tokens"]] == list(new)
    assert result["trained"]["all_parameters"] > 0
    if kind == "lora":
        before = load_file(base / "model.safetensors")
        kept = [i for i in range(len(before["lm_head.weight"])) if i not in new]
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            assert torch.equal(weights[name][kept], before[name][kept])
            used = before[name][: new.start].double().mean(dim=0).float()
            assert all((weights[name][i] - used).norm() > 0.01 for i in new[:2])  # <tool> and </tool> have learnt
        assert result["trained"]["modules"]["embed_tokens"] == result["trained"]["modules"]["lm_head"] == 1


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["full", "lora"])
@pytest.mark.parametrize("room", ROOMS)
def test_the_strategies_train_the_same_rows(runs, kind, room):
    one = runs("tiny-qwen2", kind, room, "single")
    for strategy in STRATEGIES[1:]:
        other = runs("tiny-qwen2", kind, room, strategy)
        losses = [[m["loss"] for m in read_metrics(r["folder"] / "metrics.jsonl") if "loss" in m] for r in (one, other)]
        assert losses[1] == pytest.approx(losses[0], rel=1e-4)
        assert other["after"]["loss"] == pytest.approx(one["after"]["loss"], rel=1e-4)


OPTIONS = {
    "bf16 beside a 16-bit base": ("lora", "ddp", "train.precision=bf16"),
    "bf16 under zero3": ("lora", "zero3", "train.precision=bf16"),
    "fp16 under zero2": ("lora", "zero2", "train.precision=fp16"),
    "weights on the host": ("lora", "zero3_offload_all", "train.precision=bf16"),
    "all of it on the host": ("full", "zero3_offload_all", "train.precision=bf16"),
    "naive loss": ("lora", "zero3", "train.loss=naive"),
    "head whole": ("lora", "zero3", "method.train_also=[lm_head]"),
}


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("option", OPTIONS)
def test_options_train_and_reload(runs, option):
    kind, strategy, word = OPTIONS[option]
    result = runs("tiny-v3", kind, "put on", strategy, word)
    assert result["status"] == "finished" and result["after"]["loss"] < result["before"]["loss"]


@pytest.mark.slow
@pytest.mark.ranks
@needs_shared
@pytest.mark.parametrize("strategy", ["single", "zero3"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_real_tokenizer_and_a_tied_head(recipe, tmp_path, strategy, tied):
    base = tmp_path / "base"
    source = SHARED / "tokenizers" / "deepseek-coder"
    shape = dict(PRESETS["tiny-llama"]) | {"vocab_size": 32022, "tie_word_embeddings": tied}
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(shape.pop("model_type"), **shape)).save_pretrained(base)
    load_tokenizer(str(source)).save_pretrained(base)
    words = (f"model.path={base}", "model.tokenizer=null", "model.untrained=true", "method.kind=lora", f"strategy={strategy}", "data.chat.form=deepseek_coder")
    result = train(recipe, *words, f"train.micro_batch_size={6 if strategy == 'single' else 2}", cwd=tmp_path)
    assert result["status"] == "finished" and result["after"]["loss"] < result["before"]["loss"]
    tensors = load_file(result["folder"] / "model/adapter_model.safetensors")
    assert sum("trainable_tokens" in n for n in tensors) == (1 if tied else 2)
    done = cli("merge", result["folder"], cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-2000:]
    merged = json.loads((result["folder"] / "merged/config.json").read_text())
    assert merged["vocab_size"] == 32024 and merged["tie_word_embeddings"] == tied


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("strategy", ["single", "zero3"])
def test_resumed_rows_give_the_losses_of_a_run_that_never_stopped(recipe, tmp_path, strategy):
    import shutil

    words = ("method.kind=lora", MANY, "train.save_steps=2", "train.save_total_limit=5", f"strategy={strategy}",
             f"train.micro_batch_size={6 if strategy == 'single' else 2}")  # fmt: skip
    whole = train(recipe, *words, cwd=tmp_path)
    folder = whole["folder"]
    expected = [m["loss"] for m in read_metrics(folder / "metrics.jsonl") if "loss" in m]
    for gone in ("model", "checkpoint-4", "checkpoint-5"):
        shutil.rmtree(folder / gone)
    record = json.loads((folder / "run.json").read_text()) | {"status": "running"}
    (folder / "run.json").write_text(json.dumps(record))
    resumed = train(recipe, *words, "--resume", cwd=tmp_path)
    assert resumed["folder"] == folder and resumed["status"] == "finished"
    assert [m["loss"] for m in read_metrics(folder / "metrics.jsonl") if "loss" in m] == pytest.approx(expected, rel=1e-5)


def test_liger_has_no_rows_of_the_head(recipe):
    with pytest.raises(ConfigError, match="train.loss=liger knows no single rows of a head"):
        load_config(recipe, ["method.kind=lora", "train.loss=liger"])
    load_config(recipe, ["method.kind=lora", "train.loss=liger", "method.train_also=[lm_head]"])
    load_config(recipe, ["method.kind=full", "train.loss=liger", "method.rank=16"])
