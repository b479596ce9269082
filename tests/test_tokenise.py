from __future__ import annotations

import gzip
import json
import logging
import shutil
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from conftest import SHARED, STDLIB, needs_shared
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from deepseek_ft import ConfigError, DataError
from deepseek_ft.config import SourceConfig
from deepseek_ft.data import tokenise
from deepseek_ft.data.chat import choose_form
from deepseek_ft.data.formats import Completion, Conversation, Infill, Text, convert
from deepseek_ft.data.store import decide_special
from deepseek_ft.data.tokenise import Encoder, cuts_safely
from deepseek_ft.models import load_tokenizer

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
FIM = ["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"]
CODE = "def add(a, b):\n    return 12345 + b  # ≤ ℕ"
NAMES = ["deepseek-llm", "deepseek-coder"]
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SAMPLES = [Path(json.__file__).read_text(), Path(shutil.__file__).read_text(), "Ünïcödé für 你好，世界。\n" * 20]


def train(size=700, split=SPLIT, normalizer=None) -> Tokenizer:
    """Byte-level BPE, as DeepSeek's: any text has ids."""
    tokenizer = Tokenizer(models.BPE())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    cut = [pre_tokenizers.Split(Regex(split), "isolated")] if split else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cut, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(SAMPLES, trainer)
    return tokenizer


def wrapped(backend: Tokenizer, adds_bos=False, bos=BOS, eos=EOS, more=()) -> PreTrainedTokenizerFast:
    special = [AddedToken(t, special=True, normalized=False) for t in (bos, eos) if t]
    backend.add_special_tokens(special)
    backend.add_tokens([AddedToken(t, special=False) for t in more])
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
        )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos, eos_token=eos)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """One that puts BOS before every text. Tokens of letters stand behind the special ones, as in DeepSeek's files."""
    return wrapped(train(), adds_bos=True, more=[*FIM, "ü", "÷", "<pad>", "<think>"])


@pytest.fixture(scope="module")
def encoder(tokenizer) -> Encoder:
    return Encoder(tokenizer)


@pytest.fixture(scope="module", params=[pytest.param(name, marks=needs_shared) for name in NAMES])
def real(request) -> Encoder:
    return Encoder(load_tokenizer(str(SHARED / "tokenizers" / request.param)))


def save(backend: Tokenizer, folder: Path, **more) -> Path:
    """A folder as DeepSeek ships them: byte-level BPE, labelled a Llama tokenizer, with no template for BOS."""
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    config = {"tokenizer_class": "LlamaTokenizerFast", "bos_token": BOS, "eos_token": EOS, "pad_token": EOS, "legacy": True,
              "clean_up_tokenization_spaces": False, "model_max_length": 4096}  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config | more), encoding="utf-8")
    return folder


def one(encoder: Encoder, example) -> tokenise.Row:
    encoded = encoder.encode([example])
    assert not encoded.rejected and len(encoded.rows) == 1, encoded.rejected
    return encoded.rows[0]


def assert_round_trip(encoder: Encoder, texts: list[str]) -> None:
    encoded = encoder.encode([Text(t) for t in texts])
    assert not encoded.rejected and len(encoded.rows) == len(texts)
    for text, row in zip(texts, encoded.rows, strict=True):
        assert row.learnt is None and row.ids.dtype == encoder.dtype
        first, last = (1 if encoder.bos is not None else 0), len(row.ids) - 1
        assert row.ids[0] == encoder.bos and row.ids[last] == encoder.eos
        assert not {encoder.bos, encoder.eos} & set(row.ids[first:last].tolist())
        assert encoder.decode(row.ids[first:last]) == text
    assert encoded.text_bytes == sum(len(t.encode()) for t in texts)


# ------------------------------------------------------------------------------------------------ reference ids


def test_deepseeks_tokenizers_give_the_reference_ids(real):
    folder, encoder = Path(real.tokenizer.name_or_path), real
    texts = (folder / "vectors.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    lines = (folder / "vectors.out").read_text().removesuffix("\n").split("\n")
    wanted = [[int(i) for i in line.split()] for line in lines]
    assert len(texts) >= len(wanted) >= 46
    assert [ids.tolist() for ids in encoder.strings(texts)[: len(wanted)]] == wanted
    assert [encoder.plain(t).tolist() for t in texts[: len(wanted)]] == wanted
    assert [encoder.decode(np.array(ids, int)) for ids in wanted] == texts[: len(wanted)]


# -------------------------------------------------------------------------------------------------- round trips


def test_real_english_comes_back(real):
    lines = (SHARED / "text/openwebtext/openwebtext-1000.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    assert len(texts) == 1000
    assert_round_trip(real, texts)


def test_real_chinese_comes_back(real):
    def strings(value):
        if isinstance(value, str):
            yield value
        elif value:
            for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
                yield from strings(inner)

    texts = list(strings(json.loads((SHARED / "text/zh/cmrc2018_trial.json").read_text(encoding="utf-8"))))
    assert len(texts) > 1000
    assert_round_trip(real, texts)


def test_code_comes_back(encoder):
    assert_round_trip(encoder, [p.read_text(encoding="utf-8") for p in sorted(STDLIB.glob("*.py"))[:60]])


def test_code_comes_back_from_the_real_tokenizers(real):
    assert_round_trip(real, [p.read_text(encoding="utf-8") for p in sorted(STDLIB.glob("*.py"))[60:120]])


@pytest.mark.slow
def test_all_of_pythons_library_comes_back(real):
    texts = []
    for path in sorted(STDLIB.rglob("*.py")):
        if "site-packages" not in path.parts:
            try:
                texts.append(path.read_bytes().decode("utf-8"))
            except UnicodeDecodeError:  # made to be wrong
                continue
    assert len(texts) > 700
    assert_round_trip(real, texts)


@settings(max_examples=300, deadline=None)
@given(text=st.text(max_size=40))
@example(text=EOS)
@example(text=f"{BOS}a ü ÷{EOS}\n")
@example(text="\ufdd2<\ufdd2｜fim▁hole｜>\ufdd2")
@example(text="<pad><think></s>")
def test_any_text_comes_back(encoder, text):
    row = one(encoder, Text(text))
    assert encoder.decode(row.ids[1:-1]) == text and row.ids[0] == encoder.bos and row.ids[-1] == encoder.eos
    assert not {encoder.bos, encoder.eos} & set(row.ids[1:-1].tolist())


def _examples(path: Path) -> list:
    source = SourceConfig(source="files")
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as file:
        rows = json.load(file) if path.suffix == ".json" else [json.loads(line) for line in file]
    kind = {"glaive": "sharegpt", "sharegpt": "sharegpt", "identity": "alpaca"}.get(
        path.name.split("_")[0].split(".")[0]
    )
    return [convert(row, kind or "messages", source) for row in rows]


def test_every_learnt_answer_of_the_chat_sets_is_found_again(real):
    form = choose_form(real.tokenizer)
    encoder = Encoder(real.tokenizer, form)
    for name in ("sharegpt_dummy_conversation.json", "v1_sft_demo.jsonl", "identity.json"):
        examples = _examples(SHARED / "chat" / name)
        encoded = encoder.encode(examples)
        assert not encoded.rejected and len(encoded.rows) == len(examples)
        for conversation, row in zip(examples, encoded.rows, strict=True):
            edges = np.flatnonzero(np.diff(row.learnt, prepend=0, append=0))
            said = [encoder.decode(row.ids[a:b]) for a, b in edges.reshape(-1, 2)]
            answers = [m["content"] for m, yes in zip(conversation.messages, conversation.learnt, strict=True) if yes]
            assert [s.removesuffix(form.end).strip() for s in said] == [a.strip() for a in answers]


# -------------------------------------------------------------------------------------- what begins and what ends


def test_bos_is_there_exactly_where_the_tokenizer_itself_puts_it(encoder):
    assert one(encoder, Text("hi")).ids.tolist() == [*encoder.tokenizer("hi")["input_ids"], encoder.eos]
    bare = Encoder(wrapped(train(300)))
    assert bare.bos is None and one(bare, Text("hi")).ids.tolist() == [*bare.tokenizer("hi")["input_ids"], bare.eos]
    unnamed = Encoder(wrapped(train(300), bos=None))
    assert unnamed.bos is None and one(unnamed, Text("hi")).ids.tolist() == [*unnamed.strings(["hi"])[0], unnamed.eos]


def test_deepseeks_tokenizers_begin_and_end_as_their_models_were_trained(real):
    bos, eos = {NAMES[0]: (100000, 100001), NAMES[1]: (32013, 32014)}[Path(real.tokenizer.name_or_path).name]
    row = one(real, Text(CODE))
    assert row.ids[[0, -1]].tolist() == [bos, eos] and row.ids.tolist().count(eos) == 1
    # Coder's 32,022 ids take 16 bits, the 100,015 of the larger vocabulary do not.
    assert row.ids.dtype == (np.uint32 if bos == 100000 else np.uint16)


def test_a_prompt_is_read_and_what_follows_is_learnt_with_its_end(encoder):
    row = one(encoder, Completion("2 + 2 = ", "4 and no more"))
    assert encoder.decode(row.ids) == f"{BOS}2 + 2 = 4 and no more{EOS}"
    assert encoder.decode(row.ids[row.learnt == 1]) == f"4 and no more{EOS}"
    # The prompt's ids are those of the prompt alone: that is how the model will be asked.
    asked = encoder.tokenizer("2 + 2 = ")["input_ids"]
    assert row.ids[: len(asked)].tolist() == asked and not row.learnt[: len(asked)].any()
    alone = one(encoder, Completion("", "4"))
    assert encoder.decode(alone.ids) == f"{BOS}4{EOS}" and alone.learnt.tolist() == [0, 1, 1]


def test_a_hole_is_shown_by_its_tokens_and_its_filling_is_learnt(encoder):
    row = one(encoder, Infill("def f():\n", "\n    return x", "    x = 1"))
    begin, hole, end = FIM
    assert encoder.decode(row.ids) == f"{BOS}{begin}def f():\n{hole}\n    return x{end}    x = 1{EOS}"
    assert encoder.decode(row.ids[row.learnt == 1]) == f"    x = 1{EOS}"


@pytest.mark.parametrize("special", ["auto", "text", "parse"])
def test_an_answer_that_brings_its_end_along_ends_once(tokenizer, special):
    encoder = Encoder(tokenizer, special_tokens=special)
    for answer in (f"four{EOS}", f"four{EOS}\n", f"four{EOS}{EOS}"):
        row = one(encoder, Completion("2 + 2 =", answer))
        assert encoder.decode(row.ids) == f"{BOS}2 + 2 =four{EOS}" and row.ids.tolist().count(encoder.eos) == 1


# ------------------------------------------------------------------------------------------------ special tokens


@pytest.mark.parametrize("special", ["auto", "text"])
@pytest.mark.parametrize("name", [EOS, BOS, FIM[1], "<pad>"])
def test_a_special_tokens_name_in_a_document_is_text(tokenizer, special, name):
    encoder = Encoder(tokenizer, special_tokens=special)
    text = f"The token {name} ends it; für ÷ {name}{name}\n"
    row = one(encoder, Text(text))
    assert tokenizer.convert_tokens_to_ids(name) not in row.ids[1:-1].tolist()
    assert encoder.decode(row.ids[1:-1]) == text and encoder.counts["special_text"] == 1


def test_letters_that_are_tokens_of_their_own_keep_their_ids_beside_a_special_tokens_name(encoder, tokenizer):
    """DeepSeek's first tokenizers have ü and others behind BOS and EOS: leaving these out must not move those."""
    for letter in ("ü", "÷", "<think>"):
        wanted = tokenizer.convert_tokens_to_ids(letter)
        assert one(encoder, Text(f"a {letter} b")).ids.tolist().count(wanted) == 1
        assert one(encoder, Text(f"{EOS} a {letter} b")).ids.tolist().count(wanted) == 1
        assert encoder.plain(f"a {letter} b").tolist() == encoder.strings([f"a {letter} b"])[0].tolist()


def test_the_real_tokenizers_ids_stay_beside_a_special_tokens_name(real):
    letters = [t.content for t in real.tokenizer.added_tokens_decoder.values() if t.content not in real.controls]
    assert len(letters) >= 13
    text = " ".join(letters)
    assert real.plain(text).tolist() == real.strings([text])[0].tolist()
    row = one(real, Text(f"{text} {EOS}"))
    n = len(real.strings([text])[0])
    assert row.ids[1 : n + 1].tolist() == real.strings([text])[0].tolist()


@pytest.mark.parametrize("adds_bos", [True, False])
def test_parsed_documents_have_one_beginning_and_one_end(adds_bos):
    encoder = Encoder(wrapped(train(300), adds_bos, more=FIM), special_tokens="parse")
    bos, eos = (encoder.tokenizer.convert_tokens_to_ids(t) for t in (BOS, EOS))
    inner = encoder.strings(["hello"])[0].tolist()
    assert one(encoder, Text(f"{BOS}hello{EOS}")).ids.tolist() == [bos, *inner, eos]
    assert one(encoder, Text(f"{BOS}hello{EOS}\n")).ids.tolist() == [bos, *inner, eos]
    assert one(encoder, Text(f"{BOS}hello")).ids.tolist() == [bos, *inner, eos]
    assert one(encoder, Text(f"hello{EOS}")).ids.tolist() == [*([bos] if adds_bos else []), *inner, eos]
    middle = one(encoder, Text(f"hello{EOS}hello")).ids.tolist()
    assert middle == [*([bos] if adds_bos else []), *inner, eos, *inner, eos]
    asked = one(encoder, Completion(f"{BOS}hello", f"hello{EOS}"))
    assert asked.ids.tolist() == [bos, *inner, *inner, eos] and asked.learnt.sum() == len(inner) + 1
    assert not encoder.counts["special_text"]


def test_auto_parses_what_a_template_has_rendered_and_nothing_else(encoder, caplog):
    rendered = [Text(f"{BOS}User: hi\n\nAssistant: hello{EOS}")] * 3
    prose = [Text("nothing special")] * 3
    assert decide_special(encoder.reading("auto"), rendered + prose, "x") == "parse"
    assert decide_special(encoder.reading("auto"), [*rendered[:1], *prose], "x") == "text"
    assert decide_special(encoder.reading("text"), rendered, "x") == "text"


# --------------------------------------------------------------------------------------------------- gigatoken


def test_gigatoken_gives_the_files_own_ids():
    pytest.importorskip("gigatoken")
    for backend in (
        train(),
        train(normalizer=normalizers.NFC()),
        train(split=SPLIT.replace(r"\p{N}|", r"\p{N}{1,3}|")),
    ):
        encoder = Encoder(wrapped(backend, more=FIM))
        assert encoder.fast is not None
        texts = [
            *SAMPLES,
            "",
            " ",
            "e\u0301 é 가",
            f"a{EOS}b",
            f"{FIM[0]}x{FIM[1]}",
            "a\u2028\x85\x00b",
            "١٢٣ x² Ⅷ",
            "don'ſ 'S",
        ]
        wanted = [e.ids for e in backend.encode_batch(texts, add_special_tokens=False)]
        assert [ids.tolist() for ids in encoder.strings(texts)] == wanted
        assert [ids.dtype for ids in encoder.strings(texts[:1])] == [np.uint16] and encoder.strings([]) == []


def test_gigatoken_is_left_out_where_it_does_not_know_a_tokenizer(real):
    texts = ["the same ids with and without it", CODE]
    wanted = [e.ids for e in real.backend.encode_batch(texts, add_special_tokens=False)]
    assert [ids.tolist() for ids in real.strings(texts)] == wanted


class Panic(BaseException):
    """What a panic of Rust becomes in Python: no Exception."""


class Stub:
    def __init__(self, backend: Tokenizer, change=None, fails_at=None):
        self.backend, self.change, self.fails_at, self.calls = backend, change, fails_at, 0

    def encode_batch(self, texts):
        self.calls += 1
        if self.fails_at == self.calls:
            raise Panic("index out of bounds\nnote: run with RUST_BACKTRACE=1")
        ids = [e.ids for e in self.backend.encode_batch(texts, add_special_tokens=False)]
        ids = [self.change(i) for i in ids] if self.change else ids
        offsets = np.cumsum([0, *map(len, ids)])
        layout = types.SimpleNamespace(
            offsets=types.SimpleNamespace(data=offsets), content=types.SimpleNamespace(data=np.concatenate(ids))
        )
        return types.SimpleNamespace(layout=layout)


def pretend(monkeypatch, make) -> None:
    module = types.ModuleType("gigatoken")
    module.Tokenizer = types.SimpleNamespace(from_json=lambda text: make(Tokenizer.from_str(text)))
    monkeypatch.setitem(sys.modules, "gigatoken", module)


def _panic(_):
    raise Panic()


def test_gigatoken_is_used_only_where_its_ids_are_the_same(monkeypatch, caplog):
    backend = train(300)
    pretend(monkeypatch, Stub)
    assert Encoder(wrapped(backend)).fast is not None
    caplog.set_level(logging.INFO)
    pretend(monkeypatch, lambda b: Stub(b, change=lambda ids: ids[:-1] + [0] if len(ids) > 5 else ids))
    assert Encoder(wrapped(backend)).fast is None and "other ids" in caplog.text
    pretend(monkeypatch, _panic)
    assert Encoder(wrapped(backend)).fast is None and "does not know this tokenizer (Panic)" in caplog.text
    monkeypatch.setitem(sys.modules, "gigatoken", None)  # not installed
    assert Encoder(wrapped(backend)).fast is None


def test_a_panic_of_gigatoken_in_the_middle_ends_its_use_not_the_run(monkeypatch, caplog):
    pretend(monkeypatch, lambda b: Stub(b, fails_at=3))
    encoder = Encoder(wrapped(train(300)))
    first = one(encoder, Text(CODE)).ids.tolist()
    assert encoder.fast is not None
    assert one(encoder, Text(CODE)).ids.tolist() == first
    assert encoder.fast is None and "index out of bounds" in caplog.text and "RUST" not in caplog.text


def test_ctrl_c_in_gigatoken_is_ctrl_c(monkeypatch):
    encoder = Encoder(wrapped(train(300)))

    def interrupted(texts, dtype):
        raise KeyboardInterrupt

    encoder.fast = interrupted
    with pytest.raises(KeyboardInterrupt):
        encoder.strings(["a"])


# ----------------------------------------------------------------------------------------------- long documents


def test_a_long_document_in_pieces_has_the_ids_of_the_whole(real, monkeypatch):
    lines = (SHARED / "text/openwebtext/openwebtext-1000.jsonl").read_text(encoding="utf-8").splitlines()[:150]
    chinese = json.loads((SHARED / "text/zh/cmrc2018_trial.json").read_text(encoding="utf-8"))["data"][:40]
    for text in (
        "\n".join(json.loads(line)["text"] for line in lines),
        "\n".join(p["context"] for article in chinese for p in article["paragraphs"]),
        "".join(p.read_text(encoding="utf-8") for p in sorted(STDLIB.glob("*.py"))[:30]),
        f"für {EOS} und\nÄpfel ÷\n" * 500,
    ):
        whole = one(real, Text(text)).ids
        monkeypatch.setattr(tokenise, "PIECE_CHARACTERS", 100)
        parts = real._parts(Text(text), False)[0]
        assert len(parts) > 30
        assert one(real, Text(text)).ids.tolist() == whole.tolist()
        monkeypatch.undo()


def test_a_document_is_not_cut_where_a_token_may_reach_over_the_seam(monkeypatch):
    metaspace = Tokenizer(models.Unigram())
    metaspace.pre_tokenizer = pre_tokenizers.Metaspace()
    metaspace.decoder = decoders.Metaspace()
    metaspace.train_from_iterator(
        SAMPLES,
        trainers.UnigramTrainer(vocab_size=500, show_progress=False, unk_token="<unk>", special_tokens=["<unk>"]),
    )
    joining = train(1500, split=None)  # nothing keeps a line's end and the next line apart
    assert any("Ċimport" in t or "Ċfrom" in t or "Ċdef" in t for t in joining.get_vocab())
    assert cuts_safely(train()) and not cuts_safely(metaspace) and not cuts_safely(joining)
    monkeypatch.setattr(tokenise, "PIECE_CHARACTERS", 100)
    for backend in (metaspace, joining):
        encoder = Encoder(wrapped(backend))
        whole = backend.encode(SAMPLES[0], add_special_tokens=False).ids
        assert one(encoder, Text(SAMPLES[0])).ids.tolist() == [*whole, encoder.eos]


def test_a_rare_token_over_a_seam_is_found_too():
    """It joins a line's end with a word that no sample text would show."""
    backend = train(600, split=None)
    definition = json.loads(backend.to_str())
    merges = [m for m in definition["model"]["merges"] if "Ċ" not in "".join(m)]
    vocabulary = {t: i for t, i in definition["model"]["vocab"].items() if "Ċ" not in t or t == "Ċ"}
    definition["model"] |= {"merges": merges, "vocab": {t: i for i, t in enumerate(vocabulary)}}
    assert cuts_safely(Tokenizer.from_str(json.dumps(definition)))
    definition["model"]["merges"] = [["Ċ", "Q"], *merges]
    definition["model"]["vocab"] = {t: i for i, t in enumerate([*vocabulary, "ĊQ"])}
    assert not cuts_safely(Tokenizer.from_str(json.dumps(definition)))
    # The same entry is harmless where the text is split before it could be found.
    definition["pre_tokenizer"] = json.loads(train(300).to_str())["pre_tokenizer"]
    assert cuts_safely(Tokenizer.from_str(json.dumps(definition)))


# --------------------------------------------------------------------------------------- what is learnt is checked


def conversation(*turns: str, **more) -> Conversation:
    roles = ["user", "assistant"] * len(turns)
    messages = [{"role": r, "content": t} for r, t in zip(roles, turns, strict=False)]
    messages[-1] |= more
    return Conversation(messages, [m["role"] == "assistant" for m in messages])


def with_template(tokenizer, template: str, **more) -> Encoder:
    other = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, bos_token=BOS, eos_token=EOS)
    other.chat_template = template
    return Encoder(other, choose_form(other, **more))


_ASK = "{% for m in messages %}{% if m.role == 'user' %}Q {{ m.content }}\n{% else %}"
_END = "{{ eos_token }}{% endif %}{% endfor %}{% if add_generation_prompt %}A {% endif %}"


@pytest.mark.parametrize(
    ("answer", "why"),
    [("A ", "not at all"), ("A {{ m.content[:1] }}", "not at all"), ("A {{ m.content }}{{ m.content }}", "twice"),
     ("{{ raise_exception('no such turn') }}", "no such turn"), ("{{ raise_exception('') }}", "TemplateError"),
     ("{{ m.nothing.at_all }}", "does not take it"), ("A {{ m.content | upper }}", None)],
)  # fmt: skip
def test_a_prompt_form_that_loses_the_answer_is_a_rejected_row_with_its_reason(tokenizer, answer, why):
    encoded = with_template(tokenizer, _ASK + answer + _END).encode([conversation("hi", "the answer")])
    if why is None:  # what the assistant wrote is what is learnt, whatever later turns show of it
        assert not encoded.rejected
    else:
        assert not encoded.rows and encoded.text_bytes == 0
        ((i, reason),) = encoded.rejected
        assert i == 0 and why in reason, reason


def test_a_tokenizer_that_changes_text_is_found_in_the_targets():
    lower = Encoder(wrapped(train(300, normalizer=normalizers.Lowercase())))
    encoded = lower.encode([Completion("q", "An ANSWER"), Completion("q", "fine"), Infill("p", "s", "fine")][:2])
    assert [i for i, _ in encoded.rejected] == [0] and len(encoded.rows) == 1
    assert "'An ANSWER' became 'an answer" in encoded.rejected[0][1]
    composed = Encoder(wrapped(train(300, normalizer=normalizers.NFC())))  # Qwen's: the same text to a reader
    assert not composed.encode([Completion("q", "cafe\u0301")]).rejected


def test_tool_calls_that_a_template_does_not_write_are_no_answer(tokenizer):
    call = [{"type": "function", "function": {"name": "get_time", "arguments": "{}"}}]
    encoded = with_template(tokenizer, _ASK + "A {{ m.content }}" + _END).encode(
        [conversation("hi", "", tool_calls=call)]
    )
    assert not encoded.rows and "get_time" in encoded.rejected[0][1]


def test_empty_answers_are_rejected(tokenizer):
    encoder = with_template(tokenizer, _ASK + "A {{ m.content }}" + _END, keep_reasoning=False)
    empty = [
        conversation("q", ""),
        conversation("q", " \n"),
        conversation("q", EOS),
        conversation("q", "<think>x</think>\n"),
    ]
    encoded = encoder.encode([*empty, conversation("q", "a")])
    assert [i for i, _ in encoded.rejected] == [0, 1, 2, 3] and len(encoded.rows) == 1
    assert all("nothing to learn" in why for _, why in encoded.rejected)


def test_rejected_rows_keep_their_numbers_and_the_others_their_order(tokenizer):
    encoder = with_template(tokenizer, _ASK + "A {{ m.content }}" + _END)
    batch = [
        Completion("q", "one"),
        conversation("q", ""),
        Text("two"),
        conversation("\ufdd0\ufdd1", "a"),
        conversation("q", "three"),
    ]
    encoded = encoder.encode(batch)
    assert [i for i, _ in encoded.rejected] == [1, 3]
    assert [encoder.decode(r.ids) for r in encoded.rows] == [
        f"{BOS}qone{EOS}",
        f"{BOS}two{EOS}",
        f"{BOS}Q q\nA three{EOS}",
    ]
    assert encoded.text_bytes == len("qone") + len("two") + len(f"Q q\nA three{EOS}".encode())


def test_conversations_without_a_form_stop_with_the_option_to_set(encoder):
    with pytest.raises(DataError, match="data.chat.form"):
        encoder.encode([conversation("a", "b")])


# ------------------------------------------------------------------------------------------------- width of ids


def test_ids_take_16_bits_while_they_fit():
    definition = json.loads(train(300).to_str())
    last, before = list(definition["model"]["vocab"])[-1], len(definition["model"]["vocab"]) - 1
    assert definition["model"]["vocab"][last] == before
    for largest, width in ((before, np.uint16), (2**16 - 1, np.uint16), (2**16, np.uint32)):
        definition["model"]["vocab"][last] = largest
        encoder = Encoder(wrapped(Tokenizer.from_str(json.dumps(definition))))
        assert encoder.dtype == width
        word = encoder.backend.decode([largest])
        row = one(encoder, Completion(f"{word}{EOS}", word))
        assert row.ids.dtype == width and row.ids[0] == row.ids[-2] == largest
        assert encoder.decode(row.ids) == f"{word}{EOS}{word}{EOS}"


def test_what_decides_an_id_is_in_the_identity(tokenizer):
    base = Encoder(tokenizer).identity()
    assert Encoder(tokenizer).identity() == base
    others = [Encoder(tokenizer, special_tokens="parse"), Encoder(wrapped(train(), more=FIM)),
              with_template(tokenizer, _ASK + "A {{ m.content }}" + _END), with_template(tokenizer, _ASK + "B {{ m.content }}" + _END),
              with_template(tokenizer, _ASK + "A {{ m.content }}" + _END, system="s"),
              with_template(tokenizer, _ASK + "A {{ m.content }}" + _END, keep_reasoning=False)]  # fmt: skip
    assert len({base, *(e.identity() for e in others)}) == len(others) + 1


# ------------------------------------------------------------------------------------------- loading a tokenizer


@pytest.mark.parametrize("kind", ["llama", "deepseek_v3", "qwen3", None])
def test_a_deepseek_folder_labelled_llama_keeps_spaces_and_newlines(tmp_path, kind):
    backend = train()
    backend.add_special_tokens([BOS, EOS])
    folder = save(backend, tmp_path / "t")
    (folder / "config.json").unlink() if kind is None else (folder / "config.json").write_text(
        json.dumps({"model_type": kind})
    )
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.encode(CODE, add_special_tokens=False) == backend.encode(CODE).ids
    encoder = Encoder(tokenizer)
    for text in (CODE, "  indented\n\n\ttabs \n", "a  b\r\n", "你好，世界。"):
        assert encoder.decode(one(encoder, Text(text)).ids) == text + EOS
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_a_class_that_strips_spaces_is_refused(tmp_path, monkeypatch):
    from transformers import AutoTokenizer, LlamaTokenizerFast

    backend = train()
    backend.add_special_tokens([BOS, EOS])
    folder = str(save(backend, tmp_path / "t"))
    stripped = LlamaTokenizerFast.from_pretrained(folder)
    if stripped.decode(stripped.encode(CODE, add_special_tokens=False)) == CODE:
        pytest.skip("this transformers' Llama class keeps a byte-level file's splitting")
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", LlamaTokenizerFast.from_pretrained)
    with pytest.raises(ConfigError, match="does not give text back"):
        load_tokenizer(folder)


@pytest.mark.parametrize("wish", [True, False, None])
def test_bos_is_put_where_add_bos_token_says(tmp_path, wish):
    backend = train()
    backend.add_special_tokens([BOS, EOS])
    tokenizer = load_tokenizer(str(save(backend, tmp_path / "t", **({} if wish is None else {"add_bos_token": wish}))))
    assert (tokenizer("hi")["input_ids"][0] == tokenizer.bos_token_id) == bool(wish)
    row = one(Encoder(tokenizer), Text("hi"))
    assert row.ids.tolist().count(tokenizer.bos_token_id) == bool(wish) and row.ids[-1] == tokenizer.eos_token_id
    tokenizer.save_pretrained(tmp_path / "saved")
    again = load_tokenizer(str(tmp_path / "saved"))
    assert one(Encoder(again), Text("hi")).ids.tolist() == row.ids.tolist()


@needs_shared
@pytest.mark.parametrize("name", NAMES)
def test_a_real_tokenizer_under_deepseeks_own_label_gives_the_same_ids(tmp_path, name):
    folder = shutil.copytree(SHARED / "tokenizers" / name, tmp_path / "t")
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    config |= {"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True, "add_eos_token": False, "legacy": True,
               "model_max_length": 10**30}  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    own = Encoder(load_tokenizer(str(SHARED / "tokenizers" / name)))
    labelled = Encoder(load_tokenizer(str(folder)))
    texts = [Text(CODE), Text(SAMPLES[1]), Text(SAMPLES[2])]
    pairs = zip(own.encode(texts).rows, labelled.encode(texts).rows, strict=True)
    assert all(a.ids.tolist() == b.ids.tolist() for a, b in pairs)


def test_a_length_limit_of_10_to_the_30_is_no_limit_and_no_error(tmp_path):
    backend = train()
    backend.add_special_tokens([BOS, EOS])
    tokenizer = load_tokenizer(str(save(backend, tmp_path / "t", model_max_length=10**30)))
    encoder = Encoder(tokenizer)
    short = Encoder(load_tokenizer(str(save(backend, tmp_path / "s", model_max_length=16))))
    text = SAMPLES[1] * 3
    assert encoder.decode(one(encoder, Text(text)).ids) == text + EOS
    assert (
        one(short, Text(text)).ids.tolist() == one(encoder, Text(text)).ids.tolist()
    )  # packing cuts, not the tokenizer


def test_truncation_and_padding_that_others_left_behind_do_not_touch_documents():
    backend = train()
    plain = one(Encoder(wrapped(train())), Text(CODE)).ids.tolist()
    backend.enable_truncation(8)
    backend.enable_padding(length=8)
    tokenizer = wrapped(backend)
    encoder = Encoder(tokenizer)
    identity = encoder.identity()
    for _ in range(2):
        assert encoder.decode(one(encoder, Text(f"a {EOS} {CODE}")).ids) == f"a {EOS} {CODE}{EOS}"
        encoded = encoder.encode([Text("a"), Text(CODE)])
        assert [encoder.decode(r.ids) for r in encoded.rows] == [f"a{EOS}", CODE + EOS]
        assert encoded.rows[1].ids.tolist() == plain and encoder.identity() == identity
        encoder.fast = None
        tokenizer.pad_token = EOS
        tokenizer(["a", CODE], padding=True, truncation=True, max_length=4)
