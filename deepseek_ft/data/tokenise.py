"""Examples -> token ids, and which of them are learnt. All cores, whole batches at a time."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ..errors import DataError
from . import code
from .chat import CONTROL, GUARD, ChatForm, Pieces, to_rows
from .files import split_long
from .formats import Completion, Conversation, Example, Infill, Text

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

PIECE_CHARACTERS = 1 << 20
"""A longer document is tokenised in pieces of about this size, so that one document too keeps all cores busy."""
_PROBE = ("def add(a, b):\n    return 12345 + b  # ≤ ℕ\r\n\t注意 空格，保留。 don't  \n\nΣ naïve ½ x²=4；“引号”\n" "The end.\nNext 3.14\n"
          "为什么？\n因为。\nA\n\nB \n C\u2028D\u00a0E 🙂👩‍🚀\n")  # fmt: skip
log = logging.getLogger(__name__)


@dataclass
class Row:
    """One document as the model gets it."""

    ids: np.ndarray
    """(N,)"""
    learnt: np.ndarray | None = None
    """(N,) of 0 and 1; None: every token."""


@dataclass
class Encoded:
    """What became of a batch of examples."""

    rows: list[Row] = field(default_factory=list)
    rejected: list[tuple[int, str]] = field(default_factory=list)
    """(index in the batch, why)"""
    text_bytes: int = 0


class Encoder:
    """A tokenizer with all that decides which ids an example becomes."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        form: ChatForm | None = None,
        special_tokens: str = "auto",
        fim_rate: float = 0.0,
        spm_rate: float = 0.0,
        seed: int = 42,
    ):
        self.tokenizer = tokenizer
        self.backend: Tokenizer = tokenizer.backend_tokenizer
        self.form, self.special_tokens = form, special_tokens
        self.seed, self.fim_rate, self.spm_rate = seed, fim_rate, spm_rate
        self.eos = int(tokenizer.eos_token_id)
        first = tokenizer("a")["input_ids"][:1]
        self.bos = int(first[0]) if tokenizer.bos_token_id is not None and first == [tokenizer.bos_token_id] else None
        """The token that this tokenizer puts before every text by itself, if it does."""
        largest = max(tokenizer.get_vocab().values())
        self.dtype = np.dtype(np.uint16 if largest < 2**16 else np.uint32)
        self.fim = code.fim_ids(tokenizer.get_vocab()) if fim_rate else None
        self.seams = cuts_safely(self.backend)
        self.controls = sorted(
            (t.content for t in tokenizer.added_tokens_decoder.values() if t.special or CONTROL.fullmatch(t.content)),
            key=len, reverse=True,
        )  # fmt: skip
        self._control = re.compile("|".join(map(re.escape, self.controls)) or r"(?!)")
        self._control_hints = sorted({c[:2] for c in self.controls})
        self._plain: Tokenizer | None = None
        self._bytes = byte_table(self.backend)
        self.fast = _fast_tokenizer(self.backend)
        self.counts: Counter[str] = Counter()
        """special_text: documents in which a special token's name was read as text; fim: turned into infilling."""

    def identity(self) -> str:
        """Everything that an id depends on beside the examples."""
        import tokenizers

        form = [self.form.template, self.form.keep_reasoning, self.form.system] if self.form else None
        return json.dumps(
            [tokenizer_id(self.tokenizer), tokenizers.__version__, self.bos, self.eos, form, self.special_tokens]
        )

    # ---------------------------------------------------------------------------------------------- strings

    def strings(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of each text, special tokens parsed, nothing added."""
        if self.fast is not None:
            return self.fast(texts, self.dtype)
        encodings = self.backend.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=self.dtype) for encoding in encodings]

    def holds_control(self, text: str) -> bool:
        return any(hint in text for hint in self._control_hints) and bool(self._control.search(text))

    def plain(self, text: str) -> np.ndarray:
        """Ids of a text in which no special token is parsed."""
        if self._plain is None:
            from tokenizers import Tokenizer

            definition = json.loads(self.backend.to_str())
            controls = set(self.controls)
            definition["added_tokens"] = [t for t in definition["added_tokens"] if t["content"] not in controls]
            definition["post_processor"] = None
            self._plain = Tokenizer.from_str(json.dumps(definition))
        return np.array(self._plain.encode(text, add_special_tokens=False).ids, dtype=self.dtype)

    def _guarded(self, text: str) -> np.ndarray:
        """Ids of a rendered text: special tokens that the form wrote are parsed, those marked with GUARD are not."""
        parts, at = [], 0
        for mark in self._control.finditer(text):
            parts += [self.plain(text[at : mark.start()].replace(GUARD, "")), self.strings([mark[0]])[0]]
            at = mark.end()
        return np.concatenate([*parts, self.plain(text[at:].replace(GUARD, ""))])

    def decode(self, ids: np.ndarray) -> str:
        """The text that ids stand for, special tokens by their names. Exactly: the tokenizers of DeepSeek's first models
        have characters such as ÷ as tokens of their own, which their decoder takes for broken bytes."""
        if self._bytes is None:
            return self.backend.decode(ids.tolist(), skip_special_tokens=False)
        return b"".join(map(self._bytes.__getitem__, ids.tolist())).decode("utf-8", "replace")

    # --------------------------------------------------------------------------------------------- examples

    def encode(self, examples: Sequence[Example], is_code: bool = False) -> Encoded:
        """Rows of a batch of examples, in their order; a conversation may give several."""
        result = Encoded()
        jobs: list[
            list[tuple[str | int, bool]]
        ] = []  # for each row its parts: a text or an id, and whether it is learnt
        whole: list[bool] = []
        origin: list[int] = []
        for i, example in enumerate(examples):
            try:
                rows = self._parts(example, is_code)
            except ValueError as error:
                result.rejected.append((i, str(error)))
                continue
            jobs += rows
            origin += [i] * len(rows)
            whole += [isinstance(example, Text)] * len(rows)
        texts = [part for row in jobs for part, _ in row if isinstance(part, str)]
        ids = iter(self._encode_all(texts))
        result.text_bytes = sum(len(t.encode("utf-8")) for t in texts)
        for row, all_learnt in zip(jobs, whole, strict=True):
            parts = [(next(ids) if isinstance(part, str) else np.array([part], self.dtype)) for part, _ in row]
            joined = np.concatenate(parts) if len(parts) > 1 else parts[0]
            learnt = None
            if not all_learnt:
                learnt = np.concatenate(
                    [np.full(len(p), yes, np.uint8) for p, (_, yes) in zip(parts, row, strict=True)]
                )
            result.rows.append(Row(joined, learnt))
        self._check(examples, origin, whole, result)
        return result

    def encode_texts(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of pieces of documents, without what begins and ends a document."""
        return self._encode_all([self._as_text(text) for text in texts])

    def _encode_all(self, texts: list[str]) -> list[np.ndarray]:
        simple = [i for i, t in enumerate(texts) if GUARD not in t]
        found = dict(zip(simple, self.strings([texts[i] for i in simple]), strict=True))
        return [found[i] if i in found else self._guarded(t) for i, t in enumerate(texts)]

    def _parts(self, example: Example, is_code: bool) -> list[list[tuple[str | int, bool]]]:
        start: list[tuple[str | int, bool]] = [] if self.bos is None else [(self.bos, False)]
        if isinstance(example, Conversation):
            return [self._one_bos(row) for row in to_rows(example, self._need_form())]
        if isinstance(example, Completion):
            prompt, completion = self._as_text(example.prompt), self._as_text(example.completion)
            return [[*start, *([(prompt, False)] if prompt else []), (completion, True), (self.eos, True)]]
        if isinstance(example, Infill):
            if self.fim is None:
                self.fim = code.fim_ids(self.tokenizer.get_vocab())
            begin, hole, end = self.fim.begin, self.fim.hole, self.fim.end
            return [[*start, (begin, False), (self._as_text(example.prefix), False), (hole, False),
                     (self._as_text(example.suffix), False), (end, False), (self._as_text(example.middle), True), (self.eos, True)]]  # fmt: skip
        text = example.text
        ending: list[tuple[str | int, bool]] = [(self.eos, True)]
        if self.holds_control(text):
            if self.special_tokens == "parse":
                if self.bos is not None and text.startswith(str(self.tokenizer.bos_token)):
                    start = []
                if text.rstrip().endswith(str(self.tokenizer.eos_token)):
                    ending, text = [], text.rstrip()
            else:
                self.counts["special_text"] += 1
        if is_code and self.fim_rate:
            cut = code.split_fim(
                text, self.seed, self.fim_rate, self.spm_rate, self.controls if self.special_tokens == "parse" else ()
            )
            if cut is not None:
                self.counts["fim"] += 1
                marks = dict(zip(code.FIM_TOKENS, (self.fim.begin, self.fim.hole, self.fim.end), strict=True))
                parts = [marks[t] if sentinel else self._as_text(t) for sentinel, t in code.fim_parts(cut[0], *cut[1])]
                return [[*start, *((p, True) for p in parts if p != ""), *ending]]
        pieces = split_long(text, PIECE_CHARACTERS) if self.seams and len(text) > PIECE_CHARACTERS else [text]
        return [[*start, *((self._as_text(p), True) for p in pieces), *ending]]

    def _as_text(self, text: str) -> str:
        """Content, with special tokens in it marked as text unless they are to be parsed."""
        if self.special_tokens == "parse" or not self.holds_control(text):
            return text
        return self._control.sub(lambda m: m[0][0] + GUARD + m[0][1:], text)

    def _need_form(self) -> ChatForm:
        if self.form is None:
            raise DataError("conversations need a prompt form; set data.chat.form")
        return self.form

    def _one_bos(self, row: Pieces) -> list[tuple[str | int, bool]]:
        """A template may write the first token or not, and the tokenizer too: it is there once."""
        bos = self.tokenizer.bos_token
        text, learnt = row[0]
        if bos and text.startswith(bos):
            while text.startswith(bos + bos):
                text = text.removeprefix(bos)
            return [(text, learnt), *row[1:]]
        return [*([(self.bos, False)] if self.bos is not None else []), *row]

    def _check(self, examples: Sequence[Example], origin: list[int], whole: list[bool], result: Encoded) -> None:
        """What is learnt says what the data's answers say: each target is turned back into text and compared.

        Rows of which that is not so are rejected.
        """
        wrong = {}
        for n, row in enumerate(result.rows):
            if whole[n]:
                continue
            if row.learnt is None or not row.learnt.any():
                wrong[origin[n]] = "there is nothing to learn in it once it is written in the prompt form"
        answers = {i: _answers(examples[i], self.form) for i in set(origin) if not isinstance(examples[i], Text)}
        if answers:
            said: dict[int, str] = {}
            for n, row in enumerate(result.rows):
                if row.learnt is not None:
                    said[origin[n]] = said.get(origin[n], "") + self.decode(row.ids[row.learnt.astype(bool)])
            for i, wanted in answers.items():
                lost = next((a for a in wanted if _same(a) not in _same(said[i])), None)
                if lost is not None and i not in wrong:
                    wrong[i] = f"its answer is not what would be learnt: {lost[:60]!r} became {said[i][:60]!r}"
        if wrong:
            result.rejected += sorted(wrong.items())
            keep = [n for n in range(len(result.rows)) if origin[n] not in wrong]
            result.rows = [result.rows[n] for n in keep]


def _same(text: str) -> str:
    return unicodedata.normalize("NFC", text.strip())


def _answers(example: Example, form: ChatForm | None) -> list[str]:
    """What must be found in the targets of an example."""
    if isinstance(example, Completion):
        return [example.completion]
    if isinstance(example, Infill):
        return [example.middle]
    found = []
    for message, yes in zip(example.messages, example.learnt, strict=True):
        if yes:
            content = message["content"]
            if form is not None and not form.keep_reasoning:
                content = content.rpartition("</think>")[2]
            elif message.get("reasoning_content"):
                found.append(message["reasoning_content"])
            elif "</think>" in content:  # the prompt may have opened it, and its newline
                found += [content.partition("<think>")[2] or content]
                continue
            found += [content, *(c["function"]["name"] for c in message.get("tool_calls", ()))]
    return found


# --------------------------------------------------------------------------------------------------- tokenizers


def tokenizer_id(tokenizer: PreTrainedTokenizerFast) -> str:
    """Identity by content: whatever changes an id changes this."""
    return hashlib.blake2b(tokenizer.backend_tokenizer.to_str().encode("utf-8"), digest_size=16).hexdigest()


def byte_table(backend: Tokenizer) -> list[bytes] | None:
    """The bytes of each id of a byte-level vocabulary; None for another kind."""
    from tokenizers import pre_tokenizers

    if '"ByteLevel"' not in json.dumps(json.loads(backend.to_str()).get("decoder")):
        return None
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    # Printable bytes of Latin-1 stand for themselves, the others for the characters from U+0100 on, in order.
    own = {ord(c): c for c in alphabet if ord(c) < 256}
    others = iter(c for c in alphabet if ord(c) >= 256)
    byte_of = {own[b] if b in own else next(others): b for b in range(256)}
    vocabulary = backend.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocabulary.values()) + 1)
    added = {i: token.content for i, token in backend.get_added_tokens_decoder().items()}
    for token, i in vocabulary.items():
        if i not in added and all(c in byte_of for c in token):
            table[i] = bytes(map(byte_of.__getitem__, token))
        else:
            table[i] = token.encode("utf-8", "replace")
    return table


def cuts_safely(backend: Tokenizer) -> bool:
    """Whether a text cut at its seams (`files.split_long`) gives the ids of the whole."""
    pieces = split_long(_PROBE, 1)
    parts = [i for p in pieces for i in backend.encode(p, add_special_tokens=False).ids]
    return len(pieces) > 3 and parts == backend.encode(_PROBE, add_special_tokens=False).ids


def _fast_tokenizer(backend: Tokenizer):
    """gigatoken (the `fast` extra), if it is installed, knows this tokenizer and gives the same ids; None otherwise."""
    try:
        import gigatoken
    except ImportError:
        return None
    try:
        fast = gigatoken.Tokenizer.from_json(backend.to_str())

        def encode(texts: Sequence[str], dtype: np.dtype) -> list[np.ndarray]:
            if not texts:
                return []
            layout = fast.encode_batch(list(texts)).layout
            offsets, ids = np.asarray(layout.offsets.data), np.asarray(layout.content.data).astype(dtype)
            return [ids[a:b] for a, b in zip(offsets[:-1], offsets[1:], strict=True)]

        probes = [
            _PROBE,
            *_PROBE.split("\n"),
            "",
            " ",
            *(t.content for t in list(backend.get_added_tokens_decoder().values())[:64]),
        ]
        expected = [e.ids for e in backend.encode_batch(probes, add_special_tokens=False)]
        if [a.tolist() for a in encode(probes, np.dtype(np.uint32))] != expected:
            log.info("gigatoken gives other ids than the tokenizer's own file; it is not used")
            return None
    except BaseException as error:  # a panic of its Rust is no Exception
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        log.info("gigatoken does not know this tokenizer (%s); it is not used", str(error).splitlines()[0][:80])
        return None
    log.info("tokenising with gigatoken; its ids are those of the tokenizer's own file")
    return encode
