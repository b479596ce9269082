"""A row's fields -> what is learnt from it. Pure functions: no file, no tokenizer.

Which of the formats a source has is seen in its first row's names, said in the log, and then held against every row.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..config import SourceConfig
from .files import LongText, half_character, short

FORMATS = ("text", "code", "prompt_completion", "infill", "alpaca", "qa", "sharegpt", "messages")


@dataclass(frozen=True)
class Text:
    """A document; every token of it is learnt."""

    text: str | LongText


@dataclass(frozen=True)
class Completion:
    """A prompt that is read and a continuation that is learnt."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Infill:
    """A document with a hole; what fills it is learnt."""

    prefix: str
    suffix: str
    middle: str


@dataclass(frozen=True)
class Conversation:
    """Turns in OpenAI's form: `role`, `content` (text), and where there are some `reasoning_content` and `tool_calls`."""

    messages: list[dict]
    learnt: list[bool]
    """For each message, whether it is to be learnt; only an assistant's can be."""
    tools: list[dict] = field(default_factory=list)


Example = Text | Completion | Infill | Conversation


def is_long(example: Example) -> bool:
    """Whether it is a document that is too long to hold."""
    return isinstance(example, Text) and isinstance(example.text, LongText)


def texts(example: Example) -> Iterator[str]:
    """All text of an example, for those who only count it or train a tokenizer on it."""
    if isinstance(example, Text):
        yield from [example.text] if isinstance(example.text, str) else example.text.pieces()
    elif isinstance(example, Completion):
        yield example.prompt + example.completion
    elif isinstance(example, Infill):
        yield example.prefix + example.middle + example.suffix
    else:
        for message in example.messages:
            yield message.get("reasoning_content") or ""
            yield message["content"]
            for call in message.get("tool_calls", ()):
                yield call["function"]["arguments"]


# -------------------------------------------------------------------------------------------------- recognising

# The names that people use for a field, the commonest first.
_TEXT = ("text", "content", "code", "document", "passage", "context")
_PROMPT = ("prompt", "query")
_COMPLETION = ("completion", "response", "canonical_solution", "chosen")
_OUTPUT = ("output", "response", "answer")
_MIDDLE = ("middle", "canonical_solution", "completion")
_TURNS = ("messages", "conversations", "conversation")


def _first(row: Mapping, names: Iterable[str | None]) -> str | None:
    return next((n for n in names if n is not None and n in row), None)


def _named(row: Mapping, given: str | None, usual: tuple[str, ...]) -> str | None:
    return _first(row, (given,) if given is not None else usual)


def recognise(row: Mapping[str, Any], source: SourceConfig) -> str:
    """The format of a row, by the names of its fields; a name that was asked for comes before the usual ones.

    Raises:
        ValueError: none fits; says which fields there are.
    """
    if source.text_field is not None and source.text_field in row and source.messages_field is None:
        return "text"
    turns = _named(row, source.messages_field, _TURNS)
    if turns is not None and not isinstance(row[turns], str):
        messages = row[turns] if isinstance(row[turns], list) else ()
        first = next((m for m in messages if isinstance(m, Mapping)), {})
        return "sharegpt" if "from" in first else "messages"
    prompt = _named(row, source.prompt_field, (*_PROMPT, "prefix"))
    if prompt is not None and "suffix" in row and _named(row, source.completion_field, _MIDDLE):
        return "infill"
    if "instruction" in row and _named(row, source.completion_field, _OUTPUT):
        return "alpaca"
    if prompt is not None and _named(row, source.completion_field, _COMPLETION):
        return "prompt_completion"
    if "question" in row and _named(row, source.completion_field, ("answer", "response", "output")):
        return "qa"
    if source.text_field is None and _first(row, _TEXT):
        return "text"
    raise ValueError(f"no format fits its fields {_fields(row)}; name them with text_field, or with prompt_field and "
                     "completion_field, or messages_field")  # fmt: skip


def convert(row: Mapping[str, Any], form: str, source: SourceConfig, learn: str = "all") -> Example:
    """
    Args:
        form: one of FORMATS.
        learn: `all` assistant turns, or only the `last`.

    Raises:
        ValueError: the row is not of that format; says why.
    """
    if form in ("text", "code"):
        return Text(_text(row, _need(row, source.text_field, _TEXT, "text_field")))
    if form == "infill":
        prefix = _text(row, _need(row, source.prompt_field, (*_PROMPT, "prefix"), "prompt_field"))
        middle = _text(row, _need(row, source.completion_field, _MIDDLE, "completion_field"))
        return _learnable(Infill(prefix, _text(row, _need(row, None, ("suffix",), None)), middle), middle)
    if form == "prompt_completion":
        prompt = row[_need(row, source.prompt_field, _PROMPT, "prompt_field")]
        completion = row[_need(row, source.completion_field, _COMPLETION, "completion_field")]
        if isinstance(prompt, list) and isinstance(completion, list):  # both are turns
            before = _conversation(prompt, row, "none")
            return _conversation(before.messages + _turns(completion), row, learn, first_learnt=len(before.messages))
        pair = Completion(_text(row, _need(row, source.prompt_field, _PROMPT, "")),
                          _text(row, _need(row, source.completion_field, _COMPLETION, "")))  # fmt: skip
        return _learnable(pair, pair.completion)
    if form in ("alpaca", "qa"):
        return _alpaca(row, form, source, learn)
    turns = row[_need(row, source.messages_field, _TURNS, "messages_field")]
    if not isinstance(turns, list):
        raise ValueError(f"the turns are {short(turns)}, not a list of messages")
    if form == "sharegpt":
        turns = [_from_sharegpt(turn) for turn in turns]
    return _conversation(turns, row, learn)


def _fields(row: Mapping) -> str:
    names = ", ".join(map(str, row)) or "none"
    return names if len(names) <= 200 else f"{names[:200]} ..."


def _need(row: Mapping, given: str | None, usual: tuple[str, ...], option: str | None) -> str:
    name = _named(row, given, usual)
    if name is None:
        wanted = given if given is not None else " or ".join(usual)
        hint = f"; set {option}" if option else ""
        raise ValueError(f"has no field {wanted!r}; it has {_fields(row)}{hint}")
    return name


def _text(row: Mapping, name: str) -> str:
    value = row[name]
    if not isinstance(value, str):
        raise ValueError(f"the field {name!r} holds {short(value)}, not text")
    return value


def _learnable(example: Example, target: str) -> Example:
    if not target.strip():
        raise ValueError("there is nothing to learn: the answer is empty")
    return example


def _alpaca(row: Mapping, form: str, source: SourceConfig, learn: str) -> Conversation:
    messages: list[dict] = []
    if form == "alpaca":
        history = row.get("history")
        if history is not None and not isinstance(history, list):
            raise ValueError(f"the field 'history' holds {short(history)}, not a list of questions and answers")
        for pair in history or ():
            if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(t, str) for t in pair)):
                raise ValueError(f"history holds {short(pair)}, not pairs of question and answer")
            messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    usual = "instruction" if form == "alpaca" else "question"
    question = _text(row, _need(row, source.prompt_field, (usual,), "prompt_field"))
    extra = row.get("input")
    if extra is not None and not isinstance(extra, str):
        raise ValueError(f"the field 'input' holds {short(extra)}, not text")
    answer = _text(row, _need(row, source.completion_field, _OUTPUT, "completion_field"))
    messages.append({"role": "user", "content": f"{question}\n{extra}" if extra else question})
    messages.append({"role": "assistant", "content": answer})
    return _conversation(messages, row, learn)


# ------------------------------------------------------------------------------------------------ conversations

_ROLES = {
    "system": "system", "developer": "system",
    "user": "user", "human": "user",
    "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "bot": "assistant",
    "bing": "assistant", "bard": "assistant",
    "tool": "tool", "function": "tool", "observation": "tool", "function_response": "tool", "tool_response": "tool",
    "function_call": "assistant", "tool_call": "assistant",
}  # fmt: skip


def _from_sharegpt(turn: Any) -> dict:
    if not isinstance(turn, Mapping) or "from" not in turn:
        raise ValueError(f"a turn is {short(turn)}, and ShareGPT's have `from` and `value`")
    message = {"role": turn["from"], "content": turn.get("value")} | {
        k: turn[k] for k in ("weight", "loss") if k in turn
    }
    if turn["from"] in ("function_call", "tool_call"):
        message |= {"content": None, "tool_calls": turn.get("value")}
    return message


def _conversation(turns: list, row: Mapping, learn: str, first_learnt: int = 0) -> Conversation:
    messages = _turns(turns)
    system = row.get("system")
    if system is not None and not isinstance(system, str):
        raise ValueError(f"the field 'system' holds {short(system)}, not text")
    if system and system.strip() and not (messages and messages[0]["role"] == "system"):
        messages.insert(0, {"role": "system", "content": system})
        first_learnt += bool(first_learnt)
    learnt = [
        m["role"] == "assistant" and i >= first_learnt and m.pop("weight", 1) != 0 for i, m in enumerate(messages)
    ]
    for message in messages:
        message.pop("weight", None)
    if learn == "last":
        last = max((i for i, yes in enumerate(learnt) if yes), default=-1)
        learnt = [i == last for i in range(len(learnt))]
    if learn != "none":
        if not any(learnt):
            raise ValueError("there is nothing to learn: it has no assistant turn" +
                             (" with a weight above 0" if any(m["role"] == "assistant" for m in messages) else ""))  # fmt: skip
        for message, yes in zip(messages, learnt, strict=True):
            if yes and not (message["content"].strip() or message.get("tool_calls")):
                raise ValueError("there is nothing to learn: an assistant turn is empty")
        last = max(i for i, yes in enumerate(learnt) if yes)
        messages, learnt = messages[: last + 1], learnt[: last + 1]  # what nobody answers is no part of it
    return Conversation(messages, learnt, _tools(row.get("tools")))


def _turns(turns: list) -> list[dict]:
    return [_message(turn, i) for i, turn in enumerate(turns)]


def _message(turn: Any, i: int) -> dict:
    if not isinstance(turn, Mapping) or not isinstance(turn.get("role"), str):
        raise ValueError(f"message {i} is {short(turn)}, not an object with `role` and `content`")
    role = _ROLES.get(turn["role"].lower())
    if role is None:
        raise ValueError(
            f"message {i} has the role {turn['role'][:60]!r}; known: {', '.join(dict.fromkeys(_ROLES.values()))}"
        )
    content, reasoning, calls = (
        turn.get("content"),
        None,
        _calls(turn.get("tool_calls") or turn.get("function_call"), i),
    )
    weights = [turn[k] for k in ("weight", "loss_weight", "loss", "train") if turn.get(k) is not None]
    if isinstance(content, list):
        content, reasoning, more = _parts(content, i)
        calls = calls + more
    if content is None and (calls or reasoning):
        content = ""
    if not isinstance(content, str):
        raise ValueError(f"the content of message {i} ({role}) is {short(content)}, not text")
    for name in ("reasoning_content", "reasoning", "thinking"):
        value = turn.get(name)
        if value is not None and not isinstance(value, str):
            raise ValueError(f"{name} of message {i} is {short(value)}, not text")
        reasoning = reasoning or value
    message: dict[str, Any] = {"role": role, "content": content}
    if role == "assistant":
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        if weights:
            if not all(w in (0, 1) for w in weights):
                raise ValueError(f"message {i} has the weight {short(weights[0])}; a turn is learnt (1) or read (0)")
            message["weight"] = min(map(int, weights))
    elif role == "tool" and isinstance(turn.get("name"), str):
        message["name"] = turn["name"]
    return message


def _parts(parts: list, i: int) -> tuple[str | None, str | None, list[dict]]:
    """Content as a list: its text, its reasoning and its tool calls."""
    words: list[str] = []
    thoughts: list[str] = []
    calls: list[dict] = []
    for part in parts:
        if isinstance(part, str):
            words.append(part)
            continue
        kind = part.get("type") if isinstance(part, Mapping) else None
        value = next((part[k] for k in ("text", "value", "reasoning", "thinking") if k in part), None) if kind else None
        if kind == "tool_call":
            calls += _calls(part.get("tool_call") or value, i)
        elif kind not in ("text", "reasoning", "thinking"):
            raise ValueError(f"message {i} has a part that is no text: {short(part)}")
        elif not isinstance(value, str):
            raise ValueError(f"the {kind} of a part of message {i} is {short(value)}, not text")
        else:
            (words if kind == "text" else thoughts).append(value)
    return "".join(words) if words else None, "".join(thoughts) or None, calls


def _calls(value: Any, i: int) -> list[dict]:
    """Tool calls in OpenAI's form, with the arguments as the JSON text that a model writes."""
    if value is None or value == []:
        return []
    if isinstance(value, str):
        value = _json(value, f"the tool call of message {i}")
    calls = []
    for call in value if isinstance(value, list) else [value]:
        inner = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
            raise ValueError(f"a tool call of message {i} is {short(call)}, not a name with arguments")
        arguments = inner.get("arguments", inner.get("parameters", {}))
        if not isinstance(arguments, str):
            try:
                arguments = json.dumps(arguments, ensure_ascii=False)
            except (TypeError, ValueError, RecursionError):
                raise ValueError(
                    f"the arguments of a tool call of message {i} are no JSON: {short(arguments)}"
                ) from None
        calls.append({"type": "function", "function": {"name": inner["name"], "arguments": arguments}})
    return calls


def _json(text: str, what: str) -> Any:
    """JSON that stands as text in a field."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"{what} is not valid JSON: {text[:60]}") from None
    if "\\u" in text and half_character(value):
        raise ValueError(f"{what} holds half a character (a lone surrogate): {text[:60]}")
    return value


def _tools(value: Any) -> list[dict]:
    if isinstance(value, str):
        if not value.strip():
            return []
        value = _json(value, "the field 'tools'")
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(t, Mapping) for t in value):
        raise ValueError(f"the field 'tools' is {short(value)}, not a list of tools")
    return [dict(t) if "function" in t else {"type": "function", "function": dict(t)} for t in value]
