"""Examples -> token ids, and which of them are learnt. All cores, whole batches at a time."""

from __future__ import annotations

import copy
import functools
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
from .chat import GUARD, ChatForm, Controls, Pieces, escape, to_rows, unguarded, without_end
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
        content_tokens: Sequence[str] = (),
    ):
        """
        Args:
            content_tokens: special tokens whose names in a document are always the tokens.
        """
        self.tokenizer = tokenizer
        self.content_tokens = sorted(content_tokens)
        self.backend: Tokenizer = tokenizer.backend_tokenizer
        self.form, self.special_tokens = form, special_tokens
        self.seed, self.fim_rate, self.spm_rate = seed, fim_rate, spm_rate
        self.eos = int(tokenizer.eos_token_id)
        _unbounded(self.backend)
        first = tokenizer("a")["input_ids"][:1]
        self.bos = int(first[0]) if tokenizer.bos_token_id is not None and first == [tokenizer.bos_token_id] else None
        """The token that this tokenizer puts before every text by itself, if it does."""
        largest = max(tokenizer.get_vocab().values())
        self.dtype = np.dtype(np.uint16 if largest < 2**16 else np.uint32)
        self.fim = code.fim_ids(tokenizer.get_vocab()) if fim_rate else None
        self._controls = Controls.of(tokenizer, content_tokens)
        self.controls = self._controls.names
        self._plain: Tokenizer | None = None
        self.counts: Counter[str] = Counter()
        """special_text: documents in which a special token's name was read as text; fim: turned into infilling."""
        self._readings: dict[str, Encoder] = {}
        self._tools_said = form is None or form.writes_tools

    # What only tokenising needs is made when it is needed: a start that finds its tokens in the cache does without.
    @functools.cached_property
    def fast(self):
        return _fast_tokenizer(self.backend)

    @functools.cached_property
    def seams(self) -> bool:
        return cuts_safely(self.backend, self._bytes)

    @functools.cached_property
    def _bytes(self) -> list[bytes] | None:
        return byte_table(self.backend)

    @functools.cached_property
    def _tokenizer_id(self) -> str:
        return tokenizer_id(self.tokenizer)

    def identity(self) -> str:
        """Everything that an id depends on beside the examples."""
        import tokenizers

        form = [self.form.template, self.form.keep_reasoning, self.form.system] if self.form else None
        more = [self.content_tokens] if self.content_tokens else []
        return json.dumps([self._tokenizer_id, tokenizers.__version__, self.bos, self.eos, form, self.special_tokens, *more])

    def reading(self, special_tokens: str) -> Encoder:
        """The same encoder with that decided: `text` or `parse`."""
        if special_tokens == self.special_tokens:
            return self
        if special_tokens not in self._readings:
            _ = self.fast, self.seams  # made once, not by each copy
            self._readings[special_tokens] = other = copy.copy(self)
            other.special_tokens = special_tokens
        return self._readings[special_tokens]

    # ---------------------------------------------------------------------------------------------- strings

    def strings(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of each text, special tokens parsed, nothing added."""
        if self.fast is not None:
            try:
                return self.fast(texts, self.dtype)
            except BaseException as error:
                if not _is_failure(error):
                    raise
                log.warning("gigatoken failed (%s); going on without it", _one_line(error))
                self.fast = None
        _unbounded(self.backend)
        encodings = self.backend.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=self.dtype) for encoding in encodings]

    def holds_control(self, text: str) -> bool:
        return self._controls.found(text)

    def plain(self, text: str) -> np.ndarray:
        """Ids of a text in which no special token is parsed."""
        if self._plain is None:
            from tokenizers import Tokenizer

            definition = json.loads(self.backend.to_str())
            for token in definition["added_tokens"]:  # all stay: without one, those behind it would get other ids
                token["special"] = token["content"] in self.controls
            definition |= {"post_processor": None, "truncation": None, "padding": None}
            self._plain = Tokenizer.from_str(json.dumps(definition))
            self._plain.encode_special_tokens = True
        return np.array(self._plain.encode(text, add_special_tokens=False).ids, dtype=self.dtype)

    def _guarded(self, text: str) -> np.ndarray:
        """Ids of a rendered text: special tokens that the form wrote are parsed, those marked with GUARD are not."""
        parts, at = [], 0
        for mark in self._controls.pattern.finditer(text):
            parts += [self.plain(unguarded(text[at : mark.start()])), self.strings([mark[0]])[0]]
            at = mark.end()
        return np.concatenate([*parts, self.plain(unguarded(text[at:]))])

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
            except RecursionError:
                result.rejected.append((i, "it is nested too deeply"))
                continue
            jobs += rows
            origin += [i] * len(rows)
            whole += [isinstance(example, Text)] * len(rows)
        texts = [part for row in jobs for part, _ in row if isinstance(part, str)]
        ids = iter(self._encode_all(texts))
        sizes: list[int] = []
        for row, all_learnt in zip(jobs, whole, strict=True):
            parts = [(next(ids) if isinstance(part, str) else np.array([part], self.dtype)) for part, _ in row]
            joined = np.concatenate(parts) if len(parts) > 1 else parts[0]
            learnt = None
            if not all_learnt:
                learnt = np.concatenate(
                    [np.full(len(p), yes, np.uint8) for p, (_, yes) in zip(parts, row, strict=True)]
                )
            result.rows.append(Row(joined, learnt))
            sizes.append(sum(len(unguarded(p).encode("utf-8")) for p, _ in row if isinstance(p, str)))
        wrong = self._check(examples, origin, whole, result.rows)
        keep = [n for n in range(len(result.rows)) if origin[n] not in wrong]
        result.rows, result.text_bytes = [result.rows[n] for n in keep], sum(sizes[n] for n in keep)
        result.rejected = sorted(result.rejected + list(wrong.items()))
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
            form = self._need_form()
            if example.tools and not self._tools_said:
                log.warning("the prompt form %s does not tell the model which tools there are; where it shall know, a system turn must", form.name)  # fmt: skip
                self._tools_said = True
            return [self._one_bos(row) for row in to_rows(example, form)]
        if isinstance(example, Completion):
            prompt = self._as_text(example.prompt)
            completion = self._as_text(without_end(example.completion, str(self.tokenizer.eos_token)))
            if self._begins(prompt):
                start = []
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
                if self._begins(text):
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

    def _begins(self, text: str) -> bool:
        """Whether the text brings along the token that the tokenizer puts before every text."""
        return (
            self.special_tokens == "parse" and self.bos is not None and text.startswith(str(self.tokenizer.bos_token))
        )

    def _as_text(self, text: str) -> str:
        """Content, with special tokens in it marked as text unless they are to be parsed."""
        return escape(text) if self.special_tokens == "parse" else self._controls.guard(text)

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

    def _check(
        self, examples: Sequence[Example], origin: list[int], whole: list[bool], rows: list[Row]
    ) -> dict[int, str]:
        """Whether what is learnt says what the data's answers say: each target is turned back into text and compared.

        Returns:
            {index in the batch: why} of the examples of which that is not so.
        """
        wrong: dict[int, str] = {}
        said: dict[int, str] = {}
        for n, row in enumerate(rows):
            if whole[n]:
                continue
            if row.learnt is None or not row.learnt.any():
                wrong[origin[n]] = "there is nothing to learn in it once it is written in the prompt form"
            else:
                said[origin[n]] = said.get(origin[n], "") + self.decode(row.ids[row.learnt.astype(bool)])
        for i, text in said.items():
            lost = next((a for a in self._answers(examples[i]) if _same(a) not in _same(text)), None)
            if lost is not None:
                wrong.setdefault(i, f"its answer is not what would be learnt: {lost[:60]!r} became {text[:60]!r}")
        return wrong

    def _answers(self, example: Example) -> list[str]:
        """What must be found in the targets of an example."""
        eos = str(self.tokenizer.eos_token)
        if isinstance(example, Completion):
            return [without_end(example.completion, eos)]
        if isinstance(example, Infill):
            return [example.middle]
        form = self._need_form()
        found = []
        for message, yes in zip(example.messages, example.learnt, strict=True):
            if yes:
                content = without_end(message["content"], form.end, eos)
                if form.keep_reasoning:
                    found.append(message.get("reasoning_content") or "")
                else:
                    content = content.rpartition("</think>")[2]
                # The marks of reasoning, and white space beside them, may be the prompt's.
                found += re.split("<think>|</think>", content)
                found += [call["function"]["name"] for call in message.get("tool_calls", ())]
        return found


def _same(text: str) -> str:
    return unicodedata.normalize("NFC", text.strip())


# --------------------------------------------------------------------------------------------------- tokenizers


def tokenizer_id(tokenizer: PreTrainedTokenizerFast) -> str:
    """Identity by content: whatever changes an id changes this."""
    _unbounded(tokenizer.backend_tokenizer)
    return hashlib.blake2b(tokenizer.backend_tokenizer.to_str().encode("utf-8"), digest_size=16).hexdigest()


def _unbounded(backend: Tokenizer) -> None:
    """Every call of a tokenizer that truncates or pads leaves that behind, and files are saved with it."""
    backend.no_truncation()
    backend.no_padding()


def byte_table(backend: Tokenizer) -> list[bytes] | None:
    """The bytes of each id of a byte-level vocabulary; None for another kind."""
    from tokenizers import pre_tokenizers

    if backend.decoder is None or b'"ByteLevel"' not in backend.decoder.__getstate__():
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
        try:
            table[i] = token.encode() if i in added else bytes(map(byte_of.__getitem__, token))
        except KeyError:  # an entry that no text can give
            table[i] = token.encode()
    return table


_OVER_SEAM = re.compile(r"\n[^\W\d_]")


def cuts_safely(backend: Tokenizer, table: list[bytes] | None = None) -> bool:
    """Whether a text cut at its seams (`files.split_long`) gives the ids of the whole.

    Args:
        table: of `byte_table`, if it is at hand.
    """
    table = table or byte_table(backend)
    tokens = backend.get_vocab() if table is None else (entry.decode("utf-8", "replace") for entry in table)
    # Where no entry reaches over a seam, no token can. One that does may still be kept from it by the pre-tokenizer.
    over = [f"x{t[m.start() :]}" for t in tokens if (m := _OVER_SEAM.search(t))]
    for text in (_PROBE, *over):
        pieces = [e.ids for e in backend.encode_batch(split_long(text, 1), add_special_tokens=False)]
        if len(pieces) < 2 or [i for ids in pieces for i in ids] != backend.encode(text, add_special_tokens=False).ids:
            return False
    return True


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
            "e\u0301",
            " ".join(t.content for t in backend.get_added_tokens_decoder().values()),
            "".join(f"a{t.content}b" for t in backend.get_added_tokens_decoder().values()),
        ]
        expected = [e.ids for e in backend.encode_batch(probes, add_special_tokens=False)]
        if [a.tolist() for a in encode(probes, np.dtype(np.uint32))] != expected:
            log.info("gigatoken gives other ids than the tokenizer's own file; it is not used")
            return None
    except BaseException as error:
        if not _is_failure(error):
            raise
        log.info("gigatoken does not know this tokenizer (%s); it is not used", _one_line(error))
        return None
    log.info("tokenising with gigatoken; its ids are those of the tokenizer's own file")
    return encode


def _is_failure(error: BaseException) -> bool:
    """A panic of gigatoken's Rust is no Exception; a person's Ctrl-C is none either, and no failure."""
    return not isinstance(error, (KeyboardInterrupt, SystemExit, GeneratorExit))


def _one_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:80]
