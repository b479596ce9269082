"""What is trained on, for people: rows with their targets marked, figures of a whole corpus, and what the cache holds."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..config import DataConfig
from ..hardware import GIB
from .blocks import Blocks, cut_row
from .code import FIM_TOKENS
from .formats import Text, is_long
from .sources import START, Corpus, Report
from .store import decide_special
from .tokenise import Encoder, Row

if TYPE_CHECKING:
    from .store import TokenStore

_READ, _LEARNT, _SPECIAL, _OFF = "\x1b[2m", "\x1b[32m", "\x1b[1;35m", "\x1b[0m"

# --------------------------------------------------------------------------------------------------------- rows


def first_rows(corpus: Corpus, encoder: Encoder, data: DataConfig, count: int, skip: int = 0) -> Iterator[dict]:
    """The first rows of a corpus as they are trained, before they share blocks: nothing is cached, little is read.

    Yields:
        `source`, `where`, `form`, `tokens`, `targets`, `cut` (tokens that a block has no room for), `ids`, and `pieces`:
        the row's text in order, each piece with `learnt` and, for a special token, `special`.
    """
    report = Report(bad=corpus.bad(), quiet=True)
    for position, example in corpus.read(START, report):
        if count <= 0:
            break
        if is_long(example):
            example = Text(next(iter(example.text.pieces())))  # of a text too long to hold, its beginning
        special = decide_special(encoder, [example], corpus.label)
        encoded = encoder.reading(special).encode([example], corpus.is_code)
        for row, why in [(r, None) for r in encoded.rows] + [(None, why) for _, why in encoded.rejected]:
            if skip:
                skip -= 1
                continue
            if not count:
                break
            count -= 1
            facts = {"source": corpus.label, "where": corpus.where(position), "form": report.form}
            yield facts | (_shown(row, encoder, data) if row is not None else {"rejected": why})


def _shown(row: Row, encoder: Encoder, data: DataConfig) -> dict:
    ids, learnt, cut = row.ids, row.learnt, 0
    if learnt is not None and len(ids) > data.seq_len:
        a, b = cut_row(learnt, data.seq_len) if data.overlong == "cut" else (0, len(ids))
        cut, ids, learnt = len(ids) - (b - a), ids[a:b], learnt[a:b]
    learnt = np.ones(len(ids), np.uint8) if learnt is None else learnt.copy()
    learnt[:1] = 0  # nothing stands before it
    marks = {encoder.tokenizer.convert_tokens_to_ids(c) for c in (*encoder.controls, *encoder.content_tokens)}
    special = np.isin(ids, [m for m in marks if isinstance(m, int)])
    # Specials stand alone; everything else runs on as long as it is learnt or not.
    edges = np.flatnonzero((np.diff(learnt, prepend=learnt[:1]) != 0) | special | np.roll(special, 1))
    bounds = [0, *(int(e) for e in edges if e), len(ids)]
    pieces = [
        {"text": encoder.decode(ids[a:b]), "learnt": bool(learnt[a])} | ({"special": True} if special[a] else {})
        for a, b in zip(bounds[:-1], bounds[1:], strict=True)
        if b > a
    ]
    return {"tokens": len(ids), "targets": int(learnt.sum()), "cut": cut, "pieces": pieces, "ids": ids.tolist()}


def row_text(row: dict, number: int, colour: bool) -> str:
    """A row for a terminal: what is learnt green, what is only read dim; without colours, what is learnt in ⟦ ⟧."""
    head = f"--- row {number}: {row['source']}, {row['where']}"
    if "rejected" in row:
        return f"{head}\nleft out: {row['rejected']}\n"
    kind = f", {row['form']}" if row["form"] else ""
    if any(p["text"] in FIM_TOKENS for p in row["pieces"]):
        kind += f", fill in the middle ({'prefix' if row['pieces'][-1]['text'] and _is_psm(row) else 'suffix'} first)"
    cut = f", {row['cut']:,} tokens cut off" if row["cut"] else ""
    lines = [f"{head}{kind}: {row['tokens']:,} tokens, {row['targets']:,} of them targets{cut}"]
    body = ""
    for piece in row["pieces"]:
        if colour:
            shade = (_LEARNT if piece["learnt"] else _READ) + (_SPECIAL if piece.get("special") else "")
            body += f"{shade}{piece['text']}{_OFF}"
        else:
            body += f"⟦{piece['text']}⟧" if piece["learnt"] else piece["text"]
    return "\n".join([*lines, body.replace("⟧⟦", ""), ""])


def _is_psm(row: dict) -> bool:
    texts = [p["text"] for p in row["pieces"]]
    begin = texts.index(FIM_TOKENS[0])
    return texts[begin + 1 : begin + 2] != [FIM_TOKENS[1]] or texts.index(FIM_TOKENS[1]) != begin + 1


# -------------------------------------------------------------------------------------------------------- stats


def stats(blocks: Blocks) -> dict:
    """Figures of a whole corpus as it is trained; everything that went in is in a block or told of."""
    laid = blocks.stats
    targets = blocks.count_targets()
    return {
        "blocks": laid.blocks,
        "seq_len": laid.seq_len,
        "isolated": laid.isolated,
        "documents": laid.documents,
        "tokens": laid.tokens,
        "targets": targets,
        "target_share": targets / max(1, laid.tokens),
        "padding": laid.padding,
        "packing_efficiency": laid.tokens / (laid.blocks * laid.seq_len),
        "cut_rows": laid.cut_rows,
        "cut_tokens": laid.cut_tokens,
        "dropped_rows": laid.dropped_rows,
        "dropped_tokens": laid.dropped_tokens,
        "sources": [_source_stats(store) for store in blocks.stores],
    }


def _source_stats(store: TokenStore) -> dict:
    lengths = np.diff(store.ends, prepend=0)
    bins = np.bincount(np.ceil(np.log2(np.maximum(lengths, 1))).astype(int))
    quantiles = np.quantile(lengths, [0.5, 0.9, 0.99], method="nearest")
    return asdict(store.stats) | {
        "length_mean": float(lengths.mean()),
        **{f"length_{name}": int(q) for name, q in zip(("median", "p90", "p99"), quantiles, strict=True)},
        "length_max": int(lengths.max()),
        "length_histogram": {2**i: int(n) for i, n in enumerate(bins) if n},
    }


def stats_text(part: str, found: dict) -> str:
    lines = [
        f"{part}: {found['blocks']:,} blocks of {found['seq_len']:,}, documents {'apart' if found['isolated'] else 'joined'}",
        f"  tokens    {found['tokens']:,}, of which {found['targets']:,} are targets ({found['target_share']:.1%})",
        f"  packing   {found['packing_efficiency']:.2%} full, {found['padding']:,} of padding",
    ]
    if found["cut_rows"]:
        lines.append(
            f"  cut       {found['cut_rows']:,} rows by {found['cut_tokens']:,} tokens: they were longer than a block"
        )
    if found["dropped_tokens"]:
        lines.append(
            f"  left out  {found['dropped_rows']:,} rows, {found['dropped_tokens']:,} tokens: too long, or by the weight"
        )
    for s in found["sources"]:
        lines += ["", f"  {s['source']}: {s['form']}" + (f" in the form {s['chat_form']}" if s["chat_form"] else "")]
        rows = f" -> {s['documents']:,} rows" if s["documents"] != s["examples"] else ""
        lines.append(
            f"    examples  {s['examples']:,}{rows}, {s['tokens']:,} tokens, {s['text_bytes'] / max(1, s['tokens']):.2f} bytes a token"
        )
        lines.append(f"    lengths   median {s['length_median']:,}, mean {s['length_mean']:,.0f}, 99 % up to {s['length_p99']:,}, "
                     f"longest {s['length_max']:,}")  # fmt: skip
        most = max(s["length_histogram"].values())
        for edge, n in s["length_histogram"].items():
            lines.append(f"      up to {edge:>9,} {'█' * max(1, round(30 * n / most))} {n:,}")
        left = [
            (s["blank"], "blank"),
            (s["other_split"], "of the other split"),
            (s["generated"], "generated"),
            (s["bad"], "bad"),
        ]
        if any(n for n, _ in left):
            lines.append("    left out  " + ", ".join(f"{n:,} {what}" for n, what in left if n))
        for bad in s["bad_listed"][:5]:
            lines.append(f"      {bad}")
        if s["duplicates"]:
            lines.append(f"    copies    {s['duplicates']:,} documents equal an earlier one")
        if s["special_text"]:
            lines.append(f"    specials  {s['special_text']:,} documents hold a special token's name, read as text")
        if s["fim"]:
            lines.append(f"    infilling {s['fim']:,} documents")
    return "\n".join(lines)


# -------------------------------------------------------------------------------------------------------- cache

_KINDS = ("tokens", "streams", "tokenizers", "presets")


def cache_entries(cache_dir: Path) -> list[dict]:
    """What the cache holds, the largest first: `kind`, `name`, `what`, `bytes`, `used` (seconds since 1970), `path`."""
    entries = []
    for kind in _KINDS:
        folder = cache_dir / kind
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            if not path.is_dir():
                continue
            files = [f for f in path.rglob("*") if f.is_file()]
            what = ""
            if kind == "tokens":
                with contextlib.suppress(OSError, ValueError, KeyError):
                    record = json.loads((path / "store.json").read_text(encoding="utf-8"))["stats"]
                    what = f"{record['source']}, {record['tokens']:,} tokens"
                what = what or (
                    "interrupted, goes on when it is wanted again" if path.suffix == ".building" else "damaged"
                )
            entries.append({
                "kind": kind, "name": path.name, "what": what, "bytes": sum(f.stat().st_size for f in files),
                "used": max((f.stat().st_mtime for f in files), default=path.stat().st_mtime), "path": str(path),
            })  # fmt: skip
    return sorted(entries, key=lambda e: -e["bytes"])


def prune(entries: Sequence[dict], days: float) -> list[dict]:
    """Delete what has not been used for so many days, and is not being made right now; returns what is gone."""
    from filelock import FileLock, Timeout

    gone = []
    for entry in entries:
        if time.time() - entry["used"] < days * 86400:
            continue
        path = Path(entry["path"])
        lock = FileLock(path.with_name(path.name.removesuffix(".building")).with_suffix(".lock"))
        try:
            with lock.acquire(timeout=0):
                shutil.rmtree(path)
        except (Timeout, OSError):
            continue
        gone.append(entry)
    return gone


def cache_text(entries: Sequence[dict], cache_dir: Path) -> str:
    if not entries:
        return f"{cache_dir} is empty"
    now = time.time()
    lines = [f"{cache_dir}: {sum(e['bytes'] for e in entries) / GIB:.2f} GiB"]
    for e in entries:
        lines.append(
            f"  {e['bytes'] / 2**20:10,.1f} MiB  {(now - e['used']) / 86400:5.0f} days ago  {e['kind']:<10} {e['name'][:24]:<24} {e['what']}"
        )
    return "\n".join(lines)
