"""A conversation -> text in the form that the model will see at inference, and which of it is learnt.

A form is a chat template: the tokenizer's own, or one of FORMS for tokenizers that have none. For every turn that is
learnt the template is asked for the prompt, and the row is that prompt and what the assistant wrote, so that the prompt
is a prefix of the row whatever the template does to earlier turns (R1's drops their reasoning: then each turn that is
learnt gets a row of its own). What the assistant wrote is put in for a stand-in after rendering: no template can cut it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from .formats import Conversation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Code points that Unicode keeps for a program's own use.
_STAND_IN = "\ufdd0\ufdd1"
GUARD = "\ufdd2"
"""Put behind the first character of a special token's name inside content, so that it is not read as that token."""
_GUARDED = re.compile(f"{GUARD}(.)", re.DOTALL)
_CONTROL = re.compile(r"<[|｜][^<>\n]{1,60}[|｜]>|</?s>|<pad>|<unk>")
"""How the special tokens of DeepSeek, Qwen and Llama are written, also those that their files do not call special."""
_OPEN, _CLOSE = "<think>", "</think>"


class Controls:
    """The names of tokens that stand for no text: what a form writes and content may not."""

    def __init__(self, names: Iterable[str]):
        self.names = sorted(names, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, self.names)) or r"(?!)")
        # What every name begins with, so that most texts are read only once and quickly.
        self._hint = re.compile("|".join(map(re.escape, sorted({name[:2] for name in self.names}))) or r"(?!)")

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerFast, content: Collection[str] = ()) -> Controls:
        """
        Args:
            content: special tokens that content may hold.
        """
        return cls(
            t.content
            for t in tokenizer.added_tokens_decoder.values()
            if (t.special or _CONTROL.fullmatch(t.content)) and t.content not in content
        )

    def found(self, text: str) -> bool:
        return bool(self._hint.search(text)) and bool(self.pattern.search(text))

    def guard(self, text: str) -> str:
        """The text with GUARD in every name that it holds."""
        text = escape(text)
        return self.pattern.sub(lambda m: m[0][0] + GUARD + m[0][1:], text) if self.found(text) else text


def escape(text: str) -> str:
    """A text that holds GUARD itself, so that `unguarded` gives it back."""
    return text.replace(GUARD, 2 * GUARD) if GUARD in text else text


def unguarded(text: str) -> str:
    return _GUARDED.sub(r"\1", text) if GUARD in text else text


_SYSTEM_FIRST = "{{ bos_token }}{% for m in messages if m.role == 'system' %}{{ ('' if loop.first else '\\n\\n') + m.content }}{% endfor %}"
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
    end: str
    """The token that closes an assistant's turn, which generation must stop at."""
    controls: Controls
    """What no content may write."""
    keep_reasoning: bool = True
    system: str | None = None
    """For conversations that have no system turn."""
    arguments_are_text: bool = True
    """Whether the template joins a tool call's arguments to text, or writes them as JSON itself."""
    writes_tools: bool = False
    """Whether the model is told which tools there are."""


def choose_form(
    tokenizer: PreTrainedTokenizerFast, wanted: str = "auto", model: str = "", keep_reasoning: bool = True, system: str | None = None,
    content: Collection[str] = (),
) -> ChatForm:  # fmt: skip
    """The form of a tokenizer: its own template or, where it has none, that of the family whose tokens it has.

    Args:
        content: special tokens that the turns may hold, as tokens.

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
            **({"thinking": True, "enable_thinking": True} if thinking else {}),
        )  # fmt: skip

    eos = str(tokenizer.eos_token)
    # Reasoning is written by the assistant, also where its marks are called special.
    controls = Controls({*Controls.of(tokenizer, content).names, eos} - {_OPEN, _CLOSE})
    return ChatForm(name, template, render, eos, _usual_end(render, eos, controls), controls, keep_reasoning, system,
                    _joins_arguments(render), _writes_tools(render))  # fmt: skip


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


# What a template does is seen by asking it.


def _usual_end(render: Callable[..., str], eos: str, controls: Controls) -> str:
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _STAND_IN}]
    try:
        closing = render(turns, [], False, False).partition(_STAND_IN)[2]
    except Exception:  # it takes no such conversation
        return eos
    mark = controls.pattern.search(closing)
    return mark[0] if mark else eos


def _joins_arguments(render: Callable[..., str]) -> bool:
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": "b"}}}
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    try:
        return "{'a'" in render(turns, [], False, False)  # Python's quotes, not JSON's
    except Exception:  # it adds the arguments to text, or has no tools at all
        return True


def _writes_tools(render: Callable[..., str]) -> bool:
    name = "a_tool_to_be_seen"
    tool = {"type": "function", "function": {"name": name, "description": "", "parameters": {"type": "object", "properties": {}}}}  # fmt: skip
    try:
        return name in render([{"role": "user", "content": "x"}], [tool], True, False)
    except Exception:  # such a row will say why
        return True


# ------------------------------------------------------------------------------------------------------- rows

Pieces = list[tuple[str, bool]]
"""The text of a row, cut where what is read and what is learnt meet: (text, learnt). To be tokenised piece by piece."""


def to_rows(conversation: Conversation, form: ChatForm) -> list[Pieces]:
    """The rows of a conversation: one, or one per learnt turn where the template rewrites earlier turns.

    Raises:
        ValueError: the template does not take this conversation; the message says why.
    """
    messages, learnt = conversation.messages, conversation.learnt
    if form.system is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": form.system}, *messages]
        learnt = [False, *learnt]
    messages = [_prepared(m, form) for m in messages]
    tools = _guarded(conversation.tools, form)
    rows: list[Pieces] = []
    text = ""
    for k, yes in enumerate(learnt):
        if not yes:
            continue
        thinking = bool(messages[k].get("reasoning_content")) or _CLOSE in messages[k]["content"]
        prompt = _prompt(form, messages[:k], tools, thinking)
        answer, closing = _answer(form, messages[:k], messages[k], tools, prompt, thinking)
        end = _end(closing, form)
        answer += closing[:end] or form.eos_token
        closing = closing[end:]
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


def _prepared(message: Mapping, form: ChatForm) -> dict:
    """A message as the template gets it: nothing given twice, and special tokens in it marked as the text that they are."""
    ready = dict(message)
    if message["role"] == "assistant":
        content, reasoning = without_end(message["content"], form.end, form.eos_token), message.get("reasoning_content")
        if not form.keep_reasoning:
            ready.pop("reasoning_content", None)
            content = content.rpartition(_CLOSE)[2].lstrip("\n") if _CLOSE in content else content
        elif reasoning and _CLOSE in content and content.lstrip().startswith(_OPEN):
            inline = content.lstrip().removeprefix(_OPEN).partition(_CLOSE)[0]
            if inline.strip() != reasoning.strip():
                raise ValueError("its reasoning is given twice and not alike: in the content and beside it")
            del ready["reasoning_content"]
        ready["content"] = content
    ready = _guarded(ready, form)
    if not form.arguments_are_text:
        for call in ready.get("tool_calls") or ():
            try:
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
            except (ValueError, RecursionError):  # the template gets the text
                continue
    return ready


def _guarded(value: Any, form: ChatForm) -> Any:
    if isinstance(value, str):
        return form.controls.guard(value)
    if isinstance(value, dict):
        return {name: _guarded(v, form) for name, v in value.items()}
    return [_guarded(v, form) for v in value] if isinstance(value, list) else value


def without_end(answer: str, *ends: str) -> str:
    """An answer without the end tokens that it brings along: the form writes one."""
    while end := next((e for e in ends if answer.rstrip().endswith(e)), None):
        answer = answer.rstrip().removesuffix(end)
    return answer


def _end(closing: str, form: ChatForm) -> int:
    """Where in `closing` the token ends that tells the model to stop; 0 if there is none."""
    for mark in (form.end, form.eos_token):
        if mark in closing:
            return closing.rindex(mark) + len(mark)
    return max((mark.end() for mark in form.controls.pattern.finditer(closing)), default=0)


def _rendered(form: ChatForm, messages: list[dict], tools: list[dict], opening: bool, thinking: bool) -> str:
    try:
        return form.render(messages, tools, opening, thinking)
    except Exception as error:  # a template is a program of its own
        why = str(error).strip() or type(error).__name__
        raise ValueError(f"the chat template does not take it: {why.splitlines()[0][:120]}") from None


def _prompt(form: ChatForm, before: list[dict], tools: list[dict], thinking: bool) -> str:
    """What the model has read when it begins to write."""
    if before:
        return _rendered(form, before, tools, True, thinking)
    # Nobody can ask for a prompt without turns; an assistant that speaks first begins where its content does.
    whole = _rendered(form, [{"role": "assistant", "content": _STAND_IN}], tools, False, thinking)
    return whole.partition(_STAND_IN)[0]


_OPENED = re.compile(rf"{_OPEN}(\s*)\Z")
_NO_REASONING = re.compile(rf"\s*(?:{_OPEN}\s*)?{_CLOSE}\s*")


def _answer(
    form: ChatForm, before: list[dict], message: dict, tools: list[dict], prompt: str, thinking: bool
) -> tuple[str, str]:
    """What the assistant wrote after `prompt`, and how the template closes the turn.

    The template is asked with a stand-in for the words. White space around them stays with it: some templates strip
    that, and what is learnt must be what later turns will show.
    """
    reasoning = message.get("reasoning_content")
    inline, content = "", message["content"]
    if thinking and not reasoning:
        inline, _, content = content.rpartition(_CLOSE)
    words = content.strip()
    left, right = content[: len(content) - len(content.lstrip())], content[len(content.rstrip()) :]
    if not words and not message.get("tool_calls"):
        raise ValueError("there is nothing to learn: an assistant turn is empty")
    asked = (("" if thinking else left) + _STAND_IN + right) if words else "" if thinking else content
    last = {name: value for name, value in message.items() if name != "reasoning_content"} | {"content": asked}
    whole = _rendered(form, [*before, last], tools, False, thinking)

    opened = _OPENED.search(prompt)  # the prompt has opened the reasoning already
    start = prompt if not opened or whole.startswith(prompt) else prompt[: opened.start()]
    if words:
        lead, found, closing = whole.partition(_STAND_IN)
        if not found or _STAND_IN in closing:
            raise ValueError("the chat template writes an assistant's content not at all, or twice")
        # What the template puts before every answer, such as an empty reasoning, where the prompt does not have it.
        lead = lead[len(start) :] if lead.startswith(start) else left if lead.endswith(left) else ""
        if closing.startswith(right):
            words, closing = words + right, closing[len(right) :]
    else:
        if not whole.startswith(start):
            # In the middle of a conversation some templates (V3's and R1's, after a tool's output) write tool calls
            # otherwise than their own prompt asks for them. What the model writes is the same as at a beginning.
            if len(before) <= 1:
                raise ValueError("the chat template begins tool calls otherwise than its own prompt for them")
            opening = [{"role": "user", "content": "x"}]
            return _answer(form, opening, message, tools, _prompt(form, opening, tools, thinking), thinking)
        empty = _NO_REASONING.match(whole, len(start))
        lead, closing = (empty[0], whole[empty.end() :]) if empty else ("", whole[len(start) :])

    if not thinking:
        if opened and _CLOSE not in lead:
            lead = f"{opened[1]}{_CLOSE}{2 * opened[1]}{lead}"
        return lead + words, closing
    newline = "" if opened and not opened[1] else "\n"
    if reasoning:
        reasoning, left = (reasoning.strip("\n"), left.lstrip("\n")) if newline else (reasoning, left)
        thought = f"{_OPEN}{newline}{reasoning}{newline}{_CLOSE}{2 * newline}{left if words else ''}"
    else:
        inline = inline.lstrip()
        thought = (inline if inline.startswith(_OPEN) else _OPEN + newline + inline) + _CLOSE + left
    if opened:
        return thought.removeprefix(_OPEN).removeprefix(opened[1]) + words, closing
    return re.split(f"{_OPEN}|{_CLOSE}", lead)[0] + thought + words, closing
