"""A conversation -> text in the form that the model will see at inference, and which of it is learnt.

A form is a chat template: the tokenizer's own, or one of FORMS for tokenizers that have none. For every turn that is
learnt the template is asked for the prompt, and the row is that prompt and what the assistant wrote, so that the prompt
is a prefix of the row whatever the template does to earlier turns (R1's drops their reasoning: then each turn that is
learnt gets a row of its own). What the assistant wrote is put in for a stand-in after rendering: no template can cut it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from .formats import Conversation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_STAND_IN = "\U000f3a7c\U000f3a7d"
GUARD = "\U000f3a7e"
"""Put behind the first character of a special token's text inside content, so that it is not read as that token."""
CONTROL = re.compile(r"<[|｜][^<>\n]{1,60}[|｜]>")
"""How the special tokens of DeepSeek, Qwen and Llama 3 are written, also those that their files do not call special."""

_SYSTEM_FIRST = "{{ bos_token }}{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
_NO_TOOLS = (
    "{% if m.role == 'tool' or m.tool_calls %}{{ raise_exception('this prompt form has no tool turns') }}{% endif %}"
)
_V3_TURNS = """\
{%- set ns = namespace(tool=false) -%}
{%- for m in messages -%}
{%- if m.role == 'user' -%}
{%- set ns.tool = false -%}{{ '<｜User｜>' + m.content }}
{%- elif m.role == 'tool' -%}
{{ ('' if ns.tool else '<｜tool▁outputs▁begin｜>') + '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
{%- set ns.tool = true -%}
{%- if loop.last or messages[loop.index].role != 'tool' -%}{{ '<｜tool▁outputs▁end｜>' }}{%- endif -%}
{%- elif m.role == 'assistant' -%}
{{- '' if ns.tool else ASSISTANT -}}
{%- set ns.tool = false -%}{{ CONTENT }}
{%- for call in m.tool_calls or [] -%}
{{ ('<｜tool▁calls▁begin｜>' if loop.first else '\\n') + '<｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' + call.function.name
   + '\\n```json\\n' + call.function.arguments + '\\n```<｜tool▁call▁end｜>' + ('<｜tool▁calls▁end｜>' if loop.last else '') }}
{%- endfor -%}
{{ eos_token }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and not ns.tool -%}{{ OPENING }}{%- endif -%}"""


def _v3(
    content: str = "(m.content or '')", assistant: str = "'<｜Assistant｜>'", opening: str = "'<｜Assistant｜>'"
) -> str:
    turns = _V3_TURNS.replace("CONTENT", content).replace("ASSISTANT", assistant)
    return _SYSTEM_FIRST + turns.replace("OPENING", opening)


_ANSWER_ONLY = "(m.content or '').split('</think>')[-1]"

FORMS = {
    "deepseek_llm": "{{ bos_token }}{% for m in messages %}" + _NO_TOOLS + """\
{% if m.role == 'user' %}{{ 'User: ' + m.content + '\\n\\n' }}\
{% elif m.role == 'assistant' %}{{ 'Assistant: ' + m.content + eos_token }}\
{% else %}{{ m.content + '\\n\\n' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}""",
    "deepseek_coder": "{{ bos_token }}{% for m in messages %}" + _NO_TOOLS + """\
{% if m.role == 'user' %}{{ '### Instruction:\\n' + m.content + '\\n' }}\
{% elif m.role == 'assistant' %}{{ '### Response:\\n' + m.content + '\\n<|EOT|>\\n' }}\
{% else %}{{ m.content }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '### Response:\\n' }}{% endif %}""",
    "deepseek_v3": _v3(),
    "deepseek_v3_1": _v3(
        _ANSWER_ONLY, "'<｜Assistant｜></think>'", "'<｜Assistant｜><think>' if thinking else '<｜Assistant｜></think>'"
    ),
    "deepseek_r1": _v3(_ANSWER_ONLY, opening="'<｜Assistant｜><think>\\n'"),
    "deepseek_r1_0528": _v3(_ANSWER_ONLY),
}  # fmt: skip
"""Name -> template, for `data.chat.form`. deepseek_llm: deepseek-llm-chat, V2-chat. deepseek_coder: coder-instruct.
deepseek_r1: R1 and its distilled models. deepseek_r1_0528: R1-0528-Qwen3, whose prompt does not open the reasoning."""

# Tokens without which a form cannot be told from its text.
_MARKS = {"deepseek_coder": ["<|EOT|>"]} | {f: ["<｜User｜>", "<｜Assistant｜>"] for f in FORMS if f not in ("deepseek_llm", "deepseek_coder")}  # fmt: skip


@dataclass(frozen=True)
class ChatForm:
    """How conversations are written for one tokenizer."""

    name: str
    template: str
    render: Callable[..., str]
    """(messages, tools, add_generation_prompt, thinking) -> text"""
    eos_token: str
    keep_reasoning: bool = True
    system: str | None = None
    """For conversations that have no system turn."""
    arguments_are_text: bool = True
    """Whether the template joins a tool call's arguments to text, or writes them as JSON itself."""


def choose_form(
    tokenizer: PreTrainedTokenizerFast, wanted: str = "auto", model: str = "", keep_reasoning: bool = True, system: str | None = None
) -> ChatForm:  # fmt: skip
    """The form of a tokenizer: its own template or, where it has none, that of the family whose tokens it has.

    Raises:
        ConfigError: neither can be had, or the form's marks are no tokens of this tokenizer.
    """
    vocabulary = tokenizer.get_vocab()
    own = getattr(tokenizer, "chat_template", None)
    own = own.get("default") if isinstance(own, dict) else own
    name = wanted
    if wanted == "auto":
        name = "template" if own else _family(vocabulary, model, str(tokenizer.eos_token))
    if name == "template" and not own:
        raise ConfigError(
            f"data.chat.form is template, and the tokenizer has no chat template; known forms: {', '.join(FORMS)}"
        )
    missing = [mark for mark in _MARKS.get(name, ()) if mark not in vocabulary]
    if missing:
        raise ConfigError(f"data.chat.form={name} writes {', '.join(missing)}, and the tokenizer has no such token: it belongs to "
                          "another family; data.chat.form=auto chooses what fits")  # fmt: skip
    template = own if name == "template" else FORMS[name]

    def render(messages: Sequence[Mapping], tools: Sequence[Mapping], opening: bool, thinking: bool) -> str:
        return tokenizer.apply_chat_template(
            messages, tools=tools or None, chat_template=template, add_generation_prompt=opening, tokenize=False,
            **({"thinking": True} if thinking else {}),
        )  # fmt: skip

    return ChatForm(name, template, render, str(tokenizer.eos_token), keep_reasoning, system, _joins_arguments(render))


def _family(vocabulary: Mapping[str, int], model: str, eos: str) -> str:
    if {"<｜User｜>", "<｜Assistant｜>"} <= vocabulary.keys():
        lower = model.lower()
        if "r1-0528" in lower:
            return "deepseek_r1_0528"
        if "v3.1" in lower or "v3_1" in lower:
            return "deepseek_v3_1"
        return "deepseek_r1" if re.search(r"(^|[^a-z0-9])r1([^a-z0-9]|$)", lower) else "deepseek_v3"
    if "<|EOT|>" in vocabulary and "<｜fim▁hole｜>" in vocabulary:
        return "deepseek_coder"
    if eos == "<｜end▁of▁sentence｜>":
        return "deepseek_llm"
    raise ConfigError(f"the tokenizer has no chat template and its end token {eos!r} is of no known family; set data.chat.form to "
                      f"one of {', '.join(FORMS)}")  # fmt: skip


def _joins_arguments(render: Callable) -> bool:
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": "b"}}}
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    try:
        return "{'a'" in render(turns, [], False, False)  # Python's quotes, not JSON's
    except Exception:  # it adds the arguments to text, or has no tools at all
        return True


# ------------------------------------------------------------------------------------------------------- rows

Pieces = list[tuple[str, bool]]
"""The text of a row, cut where what is read and what is learnt meet: (text, learnt). To be tokenised piece by piece."""


def to_rows(conversation: Conversation, form: ChatForm) -> list[Pieces]:
    """The rows of a conversation: one, or one per learnt turn where the template rewrites earlier turns.

    Raises:
        ValueError: the template does not take this conversation; the message says why.
    """
    messages = [_guarded(m, form) for m in conversation.messages]
    learnt = list(conversation.learnt)
    if form.system is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": form.system})
        learnt.insert(0, False)
    rows: list[Pieces] = []
    text = ""
    for k, yes in enumerate(learnt):
        if not yes:
            continue
        thinking = _has_reasoning(messages[k]) and form.keep_reasoning
        before = _rendered(form, messages[:k], conversation.tools, False, thinking)
        prompt = _rendered(form, messages[:k], conversation.tools, True, thinking)
        answer, closing = _answer(form, messages, k, conversation.tools, before, prompt, thinking)
        answer += closing[: _end(closing, form)] or form.eos_token
        closing = closing[_end(closing, form) :]
        if rows and prompt.startswith(text):
            read = prompt[len(text) :]
            if not rows[-1][-1][1]:  # what closes a turn and what opens the next are read as one
                read = rows[-1].pop()[0] + read
            rows[-1].append((read, False))
        else:
            rows.append([(prompt, False)])
        rows[-1].append((answer, True))
        if closing:
            rows[-1].append((closing, False))
        text = prompt + answer + closing
    return rows


def _guarded(message: Mapping, form: ChatForm) -> dict:
    """The message with special tokens inside its content marked as the text that they are."""

    def guard(text: str) -> str:
        return CONTROL.sub(lambda m: m[0][0] + GUARD + m[0][1:], text) if "<" in text else text

    guarded = {**message, "content": guard(message["content"])}
    if message.get("reasoning_content"):
        guarded["reasoning_content"] = guard(message["reasoning_content"])
    if message.get("tool_calls"):
        guarded["tool_calls"] = [
            {**c, "function": {**c["function"], "arguments": _arguments(guard(c["function"]["arguments"]), form)}}
            for c in message["tool_calls"]
        ]
    return guarded


def _arguments(text: str, form: ChatForm) -> Any:
    if form.arguments_are_text:
        return text
    import json

    try:
        return json.loads(text)
    except ValueError:
        return text


def _rendered(form: ChatForm, messages: list[dict], tools: list[dict], opening: bool, thinking: bool) -> str:
    try:
        return form.render(messages, tools, opening, thinking)
    except Exception as error:  # a template is a program of its own
        raise ValueError(f"the chat template does not take it: {str(error).splitlines()[0][:120]}") from None


_OPEN, _CLOSE = "<think>", "</think>"


def _has_reasoning(message: Mapping) -> bool:
    return bool(message.get("reasoning_content")) or _CLOSE in message["content"]


def _answer(
    form: ChatForm, messages: list[dict], k: int, tools: list[dict], before: str, prompt: str, thinking: bool
) -> tuple[str, str]:
    """What the assistant wrote after `prompt`, and how the template closes the turn."""
    message = {n: v for n, v in messages[k].items() if n != "reasoning_content"}
    content, reasoning = message["content"], messages[k].get("reasoning_content")
    opening = prompt[len(before) :] if prompt.startswith(before) else prompt
    if content:
        whole = _rendered(form, [*messages[:k], {**message, "content": _STAND_IN}], tools, False, thinking)
        lead, found, closing = whole.partition(_STAND_IN)
        if not found or _STAND_IN in closing:
            raise ValueError("the chat template writes an assistant's content not at all, or twice")
        # What the template puts before every answer, such as an empty reasoning, where the prompt does not have it.
        lead = lead[len(prompt) :] if lead.startswith(prompt) else ""
    else:  # tool calls alone
        whole = _rendered(form, [*messages[:k], message], tools, False, thinking)
        after = whole[len(before) :] if whole.startswith(before) else whole
        lead, closing = "", after[len(commonprefix([after, opening])) :]
    if _CLOSE in content and not reasoning:
        head, _, answer = content.rpartition(_CLOSE)
        head = head.lstrip()
        written = (head if head.startswith(_OPEN) else _OPEN + head) + _CLOSE + answer
        bare = answer.lstrip("\n")
    else:
        newline = "\n" if not opening.endswith(_OPEN) else ""
        written = f"{_OPEN}{newline}{reasoning}{newline}{_CLOSE}{2 * newline}{content}" if reasoning else content
        bare = content
    if not thinking:
        written = bare
    if opening.rstrip().endswith(_OPEN):  # the prompt has opened the reasoning already
        space = opening[len(opening.rstrip()) :]
        if thinking:
            written = written.removeprefix(_OPEN)
            return written.removeprefix(space) if space else written, closing
        return f"{space}{_CLOSE}{2 * space}{written}", closing
    return (written if thinking else lead + written), closing


def _end(closing: str, form: ChatForm) -> int:
    """Where in `closing` the token ends that tells the model to stop; 0 if there is none."""
    at = closing.rfind(form.eos_token)
    if at >= 0:
        return at + len(form.eos_token)
    marks = list(CONTROL.finditer(closing))
    return marks[-1].end() if marks else 0


def end_token(form: ChatForm) -> str:
    """The token that closes an assistant's turn, which generation must stop at."""
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _STAND_IN}]
    closing = form.render(turns, [], False, False).partition(_STAND_IN)[2]
    if form.eos_token in closing:
        return form.eos_token
    marks = CONTROL.findall(closing)
    return marks[-1] if marks else form.eos_token
