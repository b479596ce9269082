"""Rows of every format become what is learnt from them, or are refused with the reason."""

from __future__ import annotations

import datetime
import json

import pytest

from deepseek_ft.config import SourceConfig
from deepseek_ft.data.formats import FORMATS, Completion, Conversation, Infill, Text, convert, recognise, texts


def source(**settings) -> SourceConfig:
    return SourceConfig(source="files", **settings)


def learn(row: dict, form: str | None = None, learn: str = "all", **settings):
    """What a row gives in its own format, or in the one that is asked for."""
    return convert(row, form or recognise(row, source(**settings)), source(**settings), learn)


def refused(row: dict, form: str | None = None, **settings) -> str:
    with pytest.raises(ValueError) as caught:
        learn(row, form, **settings)
    return str(caught.value)


def user(content: str) -> dict:
    return {"role": "user", "content": content}


def assistant(content: str, **more) -> dict:
    return {"role": "assistant", "content": content, **more}


def call(name: str, arguments: str) -> dict:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


CHAT = [user("hi"), assistant("hello")]


# ------------------------------------------------------------------------------------------- recognising


@pytest.mark.parametrize(
    ("form", "row"),
    [*[("text", {name: "x", "id": 3, "meta": {"a": 1}}) for name in ("text", "content", "code", "document", "passage", "context")],
     ("text", {"title": "t", "context": "c", "question": "q", "answers": {"text": ["a"], "answer_start": [0]}}),
     ("prompt_completion", {"prompt": "p", "completion": "c"}), ("prompt_completion", {"prompt": "p", "response": "r"}),
     ("prompt_completion", {"query": "p", "response": "r"}), ("prompt_completion", {"prompt": "p", "chosen": "r", "rejected": "s"}),
     ("prompt_completion", {"prompt": [user("a")], "completion": [assistant("b")]}),
     ("prompt_completion", {"task_id": "HumanEval/0", "prompt": "p", "canonical_solution": "s", "test": "t", "entry_point": "e"}),
     ("infill", {"task_id": "x/0", "prompt": "p", "suffix": "s", "canonical_solution": "m", "test": "t", "entry_point": "e"}),
     ("infill", {"prefix": "p", "suffix": "s", "middle": "m"}),
     ("alpaca", {"instruction": "i", "output": "o"}), ("alpaca", {"instruction": "i", "input": "x", "output": "o", "text": "all of it"}),
     ("alpaca", {"instruction": "i", "input": "", "output": "o", "history": [], "system": "s"}),
     ("alpaca", {"instruction": "i", "response": "o", "context": "c", "category": "closed_qa"}),
     ("qa", {"question": "q", "answer": "a"}), ("qa", {"id": 1, "question": "q", "response": "a", "context": "c"}),
     ("sharegpt", {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}),
     ("sharegpt", {"conversation": [{"from": "user", "value": "a"}], "tools": "[]"}),
     ("messages", {"messages": CHAT}), ("messages", {"conversations": CHAT, "text": "rendered"}), ("messages", {"messages": []}),
     ("messages", {"prompt": "first words", "prompt_id": "x", "messages": CHAT})],
)  # fmt: skip
def test_a_format_is_recognised_by_the_names_of_the_fields(form, row):
    assert recognise(row, source()) == form
    assert recognise(json.loads(json.dumps(row)), source()) == form


@pytest.mark.parametrize(
    ("form", "row", "settings"),
    [("text", {"body": "x"}, {"text_field": "body"}), ("text", {"text": "x", "messages": CHAT, "prompt": "p"}, {"text_field": "text"}),
     ("text", {"instruction": "i", "output": "o", "text": "t"}, {"text_field": "text"}),
     ("prompt_completion", {"problem": "p", "solution": "s", "text": "t"}, {"prompt_field": "problem", "completion_field": "solution"}),
     ("prompt_completion", {"question": "p", "answer": "s"}, {"prompt_field": "question", "completion_field": "answer"}),
     ("alpaca", {"instruction": "i", "output": "o", "gold": "g"}, {"completion_field": "gold"}),
     ("qa", {"question": "q", "gold": "g"}, {"completion_field": "gold"}),
     ("infill", {"before": "b", "suffix": "s", "hole": "h"}, {"prompt_field": "before", "completion_field": "hole"}),
     ("messages", {"dialog": CHAT, "text": "t"}, {"messages_field": "dialog"}),
     ("sharegpt", {"dialog": [{"from": "human"}]}, {"messages_field": "dialog", "text_field": "text"})],
)  # fmt: skip
def test_a_name_that_was_given_decides(form, row, settings):
    assert recognise(row, source(**settings)) == form


def test_what_no_format_fits_is_told_with_its_fields():
    for row in ({"body": "b", "n": 1}, {"output": "o"}, {"prompt": "p"}, {"question": "q"}, {}):
        message = refused(row)
        assert "no format fits" in message and all(name in message for name in row) and "text_field" in message
    assert "no format fits" in refused({"text": "t"}, text_field="body")


@pytest.mark.parametrize("value", [5, None, True, {}, {"a": 1}, 1.5])
def test_turns_of_another_type_are_refused_and_do_not_break_the_recognising(value):
    assert "not a list of messages" in refused({"messages": value})


# ------------------------------------------------------------------------------------------- each format


def test_text_and_code_are_the_documents_they_are():
    text = " \r\n\tx\u2028 \ufeff"
    assert learn({"text": text, "n": 1}) == learn({"content": text}, "code") == Text(text)
    assert learn({"text": ""}) == Text("")  # blank ones are counted by who reads
    for value in (5, None, ["a"], {"a": 1}, b"a", float("nan"), datetime.date(2024, 1, 2)):
        assert "'text' holds" in refused({"text": value}) and "not text" in refused({"text": value})
    assert "has no field 'body'; it has text; set text_field" in refused({"text": "x"}, "text", text_field="body")


def test_a_prompt_is_read_and_its_completion_learnt():
    assert learn({"prompt": "a ", "completion": " b\n"}) == Completion("a ", " b\n")
    assert learn({"prompt": "", "response": "b"}) == Completion("", "b")
    assert "nothing to learn" in refused({"prompt": "p", "completion": " \n"})
    assert "'completion' holds null" in refused({"prompt": "p", "completion": None})
    assert "'prompt' holds 3" in refused({"prompt": 3, "completion": "c"})
    assert "'prompt' holds [" in refused({"prompt": [user("a")], "completion": "c"})
    assert "has no field 'completion or response" in refused({"prompt": "p"}, "prompt_completion")


def test_a_prompt_and_a_completion_of_turns_are_a_conversation():
    row = {"prompt": [user("a"), assistant("b"), user("c")], "completion": [assistant("d")], "system": "s"}
    example = learn(row)
    assert [m["content"] for m in example.messages] == ["s", "a", "b", "c", "d"]
    assert example.learnt == [False, False, False, False, True]  # what the prompt says is not learnt
    assert learn({"prompt": [], "completion": CHAT}).learnt == [False, True]
    assert "no assistant turn" in refused({"prompt": CHAT, "completion": [user("c")]})
    assert "message 0" in refused({"prompt": [5], "completion": CHAT})


def test_the_middle_is_learnt_between_prefix_and_suffix():
    assert learn({"prefix": "a", "suffix": "c", "middle": "b"}) == Infill("a", "c", "b")
    assert learn({"prompt": "", "suffix": "", "canonical_solution": "b"}) == Infill("", "", "b")
    assert "nothing to learn" in refused({"prefix": "a", "suffix": "c", "middle": ""})
    assert "'suffix' holds null" in refused({"prefix": "a", "suffix": None, "middle": "b"})
    assert "has no field 'suffix'" in refused({"prefix": "a", "middle": "b"}, "infill")


def test_alpaca_joins_instruction_and_input_and_takes_history_and_system():
    assert learn({"instruction": "Add.", "input": "1 and 2", "output": "3"}) == Conversation(
        [user("Add.\n1 and 2"), assistant("3")], [False, True]
    )
    row = {"instruction": "c", "input": "", "output": "d", "system": "s", "history": [["a", "b"]]}
    assert learn(row) == Conversation(
        [{"role": "system", "content": "s"}, user("a"), assistant("b"), user("c"), assistant("d")],
        [False, False, True, False, True],
    )
    assert learn(row, learn="last").learnt == [False, False, False, False, True]
    for empty in ({}, {"input": None, "history": None, "system": None}, {"history": [], "system": " "}):
        assert learn({"instruction": "a", "output": "b"} | empty) == Conversation(
            [user("a"), assistant("b")], [False, True]
        )


@pytest.mark.parametrize(
    ("change", "words"),
    [({"instruction": None}, "'instruction' holds null"), ({"output": ["a"]}, "'output' holds"), ({"output": ""}, "empty"),
     ({"input": 5}, "'input' holds 5"), ({"system": 5}, "'system' holds 5"), ({"history": 5}, "'history' holds 5"),
     ({"history": "ab"}, "'history' holds"), ({"history": {"a": "b"}}, "'history' holds"), ({"history": [["a"]]}, "history holds"),
     ({"history": ["ab"]}, "history holds"), ({"history": [["a", None]]}, "history holds"), ({"history": [["a", ""]]}, "empty")],
)  # fmt: skip
def test_a_malformed_alpaca_row_is_refused(change, words):
    assert words in refused({"instruction": "i", "output": "o"} | change)


def test_a_forced_format_that_lacks_its_fields_is_refused():
    for form in FORMATS:
        assert "has no field" in refused({"something": "else"}, form), form
        message = refused(
            {"something": "else"}, form, prompt_field="p", completion_field="c", text_field="t", messages_field="m"
        )
        assert "has no field" in message and "it has something" in message, form
    assert "has no field 'instruction'" in refused({"question": "q", "output": "a"}, "alpaca")
    assert "has no field 'question'" in refused({"instruction": "q", "output": "a"}, "qa")
    assert "has no field 'ask'" in refused({"question": "q", "answer": "a"}, "qa", prompt_field="ask")


def test_a_question_and_its_answer_are_one_exchange():
    assert learn({"question": "q", "answer": "a"}) == Conversation([user("q"), assistant("a")], [False, True])
    row = {"ask": "q", "say": "a"}
    assert learn(row, "qa", prompt_field="ask", completion_field="say").messages == [user("q"), assistant("a")]
    assert "'answer' holds {" in refused({"question": "q", "answer": {"text": "a"}})


# ------------------------------------------------------------------------------------------ conversations


def test_sharegpt_with_tools_calls_and_observations():
    arguments = {"item": "苹果", "n": 2}
    row = {"conversations": [{"from": "human", "value": "buy"},
                             {"from": "function_call", "value": json.dumps({"name": "buy", "arguments": arguments})},
                             {"from": "observation", "value": '{"ok": true}'}, {"from": "gpt", "value": "bought"}],
           "tools": json.dumps([{"name": "buy", "description": "d", "parameters": {}}]), "system": "s"}  # fmt: skip
    assert learn(row) == Conversation(
        [{"role": "system", "content": "s"}, user("buy"), assistant("", tool_calls=[call("buy", '{"item": "苹果", "n": 2}')]),
         {"role": "tool", "content": '{"ok": true}'}, assistant("bought")],
        [False, False, True, False, True],
        [{"type": "function", "function": {"name": "buy", "description": "d", "parameters": {}}}],
    )  # fmt: skip
    several = json.dumps([{"name": "f", "arguments": "{}"}, {"name": "g", "parameters": {"x": None}}])
    turns = [{"from": "user", "value": "x"}, {"from": "tool_call", "value": several}]
    assert learn({"conversations": turns}).messages[1]["tool_calls"] == [call("f", "{}"), call("g", '{"x": null}')]


def test_sharegpt_knows_the_names_that_data_sets_use():
    names = ["human", "chatgpt", "user", "gpt", "human", "bing", "human", "bard", "human", "model", "human", "bot"]
    turns = [{"from": n, "value": n} for n in names]
    assert [m["role"] for m in learn({"conversations": turns}).messages] == ["user", "assistant"] * 6
    assert learn({"conversations": [{"from": "system", "value": "s"}, *turns[:2]]}).messages[0]["role"] == "system"
    weighted = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", "weight": 0}, {"from": "human", "value": "c"},
                {"from": "gpt", "value": "d", "weight": 1}]  # fmt: skip
    assert learn({"conversations": weighted}).learnt == [False, False, False, True]


@pytest.mark.parametrize(
    ("turns", "words"),
    [([{"from": "human", "value": "a"}, {"role": "assistant", "content": "b"}], "`from` and `value`"),
     ([{"from": "human", "value": "a"}, "b"], "`from` and `value`"), ([{"from": None, "value": "a"}], "message 0"),
     ([{"from": "alien", "value": "a"}], "the role 'alien'; known: system, user, assistant, tool"),
     ([{"from": "gpt"}], "content of message 0 (assistant) is null"), ([{"from": "gpt", "value": 5}], "is 5, not text"),
     ([{"from": "gpt", "value": " "}], "assistant turn is empty"),
     ([{"from": "human", "value": "a"}], "no assistant turn"),
     ([{"from": "function_call", "value": "not json"}], "tool call of message 0 is not valid JSON: not json"),
     ([{"from": "function_call", "value": "[5]"}], "a tool call of message 0 is 5, not a name"),
     ([{"from": "function_call", "value": '{"arguments": {}}'}], "not a name with arguments"),
     ([{"from": "function_call", "value": None}], "message 0"), ([{"from": "function_call", "value": "[" * 100_000}], "not valid JSON"),
     ([{"from": "function_call", "value": '{"name": "f", "arguments": {"x": "\\ud83d"}}'}], "surrogate")],
)  # fmt: skip
def test_a_malformed_sharegpt_turn_is_refused(turns, words):
    assert words in refused({"conversations": turns}, "sharegpt")


def test_messages_keep_roles_text_reasoning_and_tool_calls():
    calls = [{"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}}]
    row = {"messages": [{"role": "developer", "content": "s"}, {"role": "user", "content": "a", "name": "Ann"},
                        assistant(None, tool_calls=calls, reasoning_content="think"),
                        {"role": "tool", "content": "1", "name": "f", "tool_call_id": "call_1"}, assistant("b", refusal=None)],
           "tools": [{"type": "function", "function": {"name": "f"}}], "id": 3, "meta": {"x": [1]}}  # fmt: skip
    assert learn(row) == Conversation(
        [{"role": "system", "content": "s"}, user("a"), assistant("", reasoning_content="think", tool_calls=[call("f", '{"x":1}')]),
         {"role": "tool", "content": "1", "name": "f"}, assistant("b")],
        [False, False, True, False, True],
        [{"type": "function", "function": {"name": "f"}}],
    )  # fmt: skip
    legacy = assistant(None, function_call={"name": "f", "arguments": {"é": [1.5, None]}})
    assert learn({"messages": [user("a"), legacy]}).messages[1]["tool_calls"] == [call("f", '{"é": [1.5, null]}')]


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_is_kept_apart_from_the_answer(name):
    assert learn({"messages": [user("a"), assistant("b", **{name: " c\n"})]}).messages[1] == assistant(
        "b", reasoning_content=" c\n"
    )
    assert learn({"messages": [user("a"), assistant("b", **{name: None})]}).messages[1] == assistant("b")
    assert "is 5, not text" in refused({"messages": [user("a"), assistant("b", **{name: 5})]})


def test_reasoning_that_stands_in_the_text_is_not_touched():
    content = "<think>\nadd two and two\n</think>\n\n4"
    assert learn({"messages": [user("2+2"), assistant(content)]}).messages[1] == assistant(content)


def test_parts_of_a_message_become_its_text():
    parts = [{"type": "text", "text": "a"}, "b", {"type": "text", "value": "\nc"}]
    answer = [{"type": "reasoning", "value": "think "}, {"type": "thinking", "thinking": "more"}, {"type": "text", "text": "d"},
              {"type": "tool_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
              {"type": "tool_call", "tool_call": {"function": {"name": "g", "arguments": "{}"}}}]  # fmt: skip
    assert learn(
        {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]}
    ).messages == [
        user("ab\nc"),
        assistant("d", reasoning_content="think more", tool_calls=[call("f", '{"x": 1}'), call("g", "{}")]),
    ]
    only_call = [{"type": "tool_call", "value": '{"name": "f"}'}]
    assert learn({"messages": [user("a"), assistant(only_call)]}).messages[1] == assistant(
        "", tool_calls=[call("f", "{}")]
    )


@pytest.mark.parametrize(
    ("message", "words"),
    [(None, "message 1 is null"), ("hi", 'message 1 is "hi"'), ([], "message 1 is []"), ({"content": "x"}, "`role` and `content`"),
     ({"role": 5, "content": "x"}, "message 1"), ({"role": "alien", "content": "x"}, "the role 'alien'"),
     (assistant(None), "content of message 1 (assistant) is null"), ({"role": "assistant"}, "is null"),
     (assistant(5), "is 5, not text"), (assistant({"text": "x"}), "not text"), (assistant([]), "is null"),
     (assistant([5]), "a part that is no text: 5"), (assistant([None]), "no text: null"),
     (assistant([{"type": "image_url", "image_url": {"url": "x"}}]), "no text"), (assistant([{"text": "x"}]), "no text"),
     (assistant([{"type": "text"}]), "the text of a part of message 1 is null"),
     (assistant([{"type": "text", "text": 5}]), "the text of a part of message 1 is 5"),
     (assistant([{"type": ["text"], "text": "x"}]), "no text"),
     (assistant("x", tool_calls=5), "not a name with arguments"), (assistant("x", tool_calls=[5]), "not a name"),
     (assistant("x", tool_calls="nonsense"), "is not valid JSON: nonsense"), (assistant("x", tool_calls=[{"function": 5}]), "not a name"),
     (assistant("x", tool_calls=[{"function": {"name": 5}}]), "not a name"),
     (assistant("x", tool_calls=[{"function": {"name": "f", "arguments": {"day": datetime.date(2024, 1, 2)}}}]), "are no JSON"),
     (assistant("x", weight=0.5), "the weight 0.5"), (assistant("x", weight="1"), 'the weight "1"'),
     (assistant("x", loss_weight=[1]), "the weight [1]"), (assistant("x", weight=float("nan")), "weight"),
     (assistant("x", weight=0), "no assistant turn with a weight above 0"), (assistant(""), "assistant turn is empty"),
     (assistant("\n \t"), "assistant turn is empty"), (user("x"), "no assistant turn")],
)  # fmt: skip
def test_a_malformed_message_is_refused(message, words):
    assert words in refused({"messages": [user("q"), message]})


def test_null_content_never_becomes_the_word_none():
    for form, row in (("messages", {"messages": [user(None), assistant("b")]}), ("sharegpt", {"conversations": [
            {"from": "human", "value": None}, {"from": "gpt", "value": "b"}]})):  # fmt: skip
        assert "content of message 0 (user) is null, not text" in refused(row, form)


def test_weights_say_which_turns_are_learnt():
    def learnt(*weights, name="weight"):
        turns = [t for w in weights for t in (user("a"), assistant("b", **{name: w}))]
        example = learn({"messages": turns})
        assert all(set(m) == {"role", "content"} for m in example.messages)
        return [yes for m, yes in zip(example.messages, example.learnt, strict=True) if m["role"] == "assistant"]

    assert learnt(None, 1) == [True, True] and learnt(0, 1) == [False, True]
    assert learnt(1, 0) == [True]  # what comes after the last learnt turn is no part of it
    for name in ("weight", "loss_weight", "loss", "train"):
        assert learnt(0.0, 1.0, name=name) == learnt(False, True, name=name) == [False, True]
    weighted_user = [user("a") | {"loss_weight": 1.0}, assistant("b", loss_weight=1.0)]
    assert learn({"messages": weighted_user}).learnt == [False, True]
    contradicting = [user("a"), assistant("b"), user("c"), assistant("d", weight=1, loss=0), user("e"), assistant("f")]
    assert learn({"messages": contradicting}).learnt == [False, True, False, False, False, True]


def test_only_the_last_answer_is_learnt_if_asked_for():
    turns = [*CHAT, *CHAT, user("unanswered")]
    assert learn({"messages": turns}).learnt == [False, True, False, True]
    last = learn({"messages": turns}, learn="last")
    assert last.learnt == [False, False, False, True] and len(last.messages) == 4
    weighted = [*CHAT, user("c"), assistant("d", weight=0)]
    assert learn({"messages": weighted}, learn="last") == Conversation(CHAT, [False, True])


def test_an_empty_turn_that_is_only_read_is_no_mistake():
    turns = [user(""), assistant("", weight=0), user("a"), assistant("b")]
    assert learn({"messages": turns}).learnt == [False, False, False, True]
    assert learn({"messages": [user("a"), assistant(""), user("c"), assistant("d")]}, learn="last").learnt[-1]


def test_a_system_prompt_beside_the_turns_comes_first_and_is_not_doubled():
    system = {"role": "system", "content": "own"}
    assert learn({"messages": CHAT, "system": "s"}).messages[0] == {"role": "system", "content": "s"}
    assert learn({"messages": [system, *CHAT], "system": "s"}).messages == [system, *CHAT]
    assert learn({"messages": CHAT, "system": None}).messages == CHAT


@pytest.mark.parametrize("tools", [[{"name": "f"}], [{"type": "function", "function": {"name": "f"}}]])
def test_tools_are_taken_as_objects_and_as_json_text(tools):
    wanted = [{"type": "function", "function": {"name": "f"}}]
    assert (
        learn({"messages": CHAT, "tools": tools}).tools
        == learn({"messages": CHAT, "tools": json.dumps(tools)}).tools
        == wanted
    )
    for none in (None, "", " ", [], "[]", "null"):
        assert learn({"messages": CHAT, "tools": none}).tools == []


@pytest.mark.parametrize(
    ("tools", "words"),
    [("nonsense", "'tools' is not valid JSON: nonsense"), (5, "'tools' is 5, not a list"), ([5], "not a list of tools"),
     ({"name": "f"}, "not a list"), ("5", "not a list"), ("[" * 100_000, "not valid JSON"), ('[{"name": "\\udc00"}]', "surrogate")],
)  # fmt: skip
def test_malformed_tools_are_refused(tools, words):
    assert words in refused({"messages": CHAT, "tools": tools})


def test_ragged_rows_of_one_file_are_all_read():
    """Unknown keys are nobody's business; columns that only some rows have come as null from parquet."""
    ragged = [{"messages": [{"role": "user", "content": "a", "tool_calls": None, "weight": None, "name": None, "extra": {"x": [1]}},
                            {"role": "assistant", "content": "b", "tool_calls": None, "reasoning_content": None, "audio": None}],
               "tools": None, "system": None, "score": 0.5},
              {"messages": CHAT}]  # fmt: skip
    assert [learn(row).learnt for row in ragged] == [[False, True]] * 2
    assert learn(ragged[0]) == Conversation([user("a"), assistant("b")], [False, True])


def test_a_row_is_not_changed_by_reading_it():
    rows = [{"messages": [user("a"), assistant([{"type": "text", "text": "b"}], weight=1)], "system": "s", "tools": [{"name": "f"}]},
            {"prompt": [user("a")], "completion": [assistant("b", weight=1)]}, {"instruction": "i", "output": "o", "history": [["a", "b"]]},
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", "weight": 1}]}]  # fmt: skip
    for row in rows:
        before = json.dumps(row)
        assert learn(row) == learn(row) and json.dumps(row) == before


def test_a_message_about_a_row_is_short():
    long = {"role": "alien" * 10, "content": "x" * 100_000}
    nested: list = []
    for _ in range(50_000):
        nested = [nested]
    for value in (long, "x" * 100_000, [long] * 1000, nested):
        assert len(refused({"messages": [user("a"), assistant([value, 5])]})) < 300
        assert len(refused({"messages": value}, "messages")) < 300
        assert len(refused({"text": [value]})) < 300


def test_all_text_of_an_example():
    turns = [user("a"), assistant("b", reasoning_content="c", tool_calls=[call("f", "{}")])]
    assert list(texts(Text("t"))) == ["t"] and list(texts(Completion("p", "c"))) == ["pc"]
    assert list(texts(Infill("a", "c", "b"))) == ["abc"]
    assert list(texts(learn({"messages": turns}))) == ["", "a", "c", "b", "{}"]
