"""The data engine against what it stands on and what people use instead: CPU-seconds, memory, seconds to the first batch.

    python benchmarks/data.py                                       Python's standard library, a tokenizer trained on it
    python benchmarks/data.py --text FILE.jsonl --tokenizer DIR     your own (rows with a `text`; several tokenizers may be given)
    python benchmarks/data.py --megabytes 12.6 --tokenizer DIR      the whole of the standard library
    python benchmarks/data.py --chat FILE --trl-python PATH         packing with lengths of conversations, and beside TRL
    python benchmarks/data.py --large                               also 2 GB of text: memory, second start, kill and go on

Every measurement is a fresh process. Those that are compared take turns, `--repeats` times; the table has medians. CPU
is that of all threads and children between two moments inside the process, after imports and after the tokenizer has been
loaded. Memory is the most that lay in RAM in that time, of which Python and its libraries are the same on both sides.
The numbers are those of one machine on one day: `holds` says whether a target was met there.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

SEQ_LEN = 2048
LARGE_BYTES = 2_000_000_000
SYNTHETIC = 1_000_000
MIB = 2**20


# ------------------------------------------------------------------------------------------------- measuring


def cpu_seconds() -> float:
    """Of all threads of this process and of its children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def memory(name: str) -> int:
    """Bytes by /proc. `ru_maxrss` would not do: it counts the parent from which a process was started."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(name + ":"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class Meter:
    """CPU, wall and peak memory of what is done inside."""

    def __enter__(self) -> Meter:
        gc.collect()
        try:
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew: loading has one of its own
        except OSError:
            pass
        self.held = memory("VmRSS")
        self.began = cpu_seconds(), time.perf_counter()
        return self

    def __exit__(self, *_) -> None:
        self.cpu, self.wall = cpu_seconds() - self.began[0], time.perf_counter() - self.began[1]
        self.peak = memory("VmHWM")

    def facts(self) -> dict:
        return {"cpu": self.cpu, "wall": self.wall, "peak": self.peak, "held": self.held}


def repeated(work, least_seconds: float = 0.3) -> tuple[object, float]:
    """What `work` gives, and its CPU-seconds: the mean of as many rounds as a clock needs."""
    began, rounds = cpu_seconds(), 0
    while True:
        result = work()
        rounds += 1
        spent = cpu_seconds() - began
        if spent >= least_seconds:
            return result, spent / rounds


def measure(task: str, spec: dict, python: str = sys.executable) -> dict:
    """Run one task in a fresh process."""
    command = [python, str(Path(__file__).resolve()), "--task", task, json.dumps(spec)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines or done.returncode not in (0, -signal.SIGKILL):
        raise SystemExit(f"{task} {spec} failed\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    answer = json.loads(lines[-1][7:])
    shown = "  ".join(f"{k} {answer[k]:.4g}" for k in ("cpu", "wall", "encoder", "peak", "batch_us") if k in answer)
    print(f"{task:12} {spec.get('name', '')}  {shown}", file=sys.stderr, flush=True)
    return answer


def tell(answer: dict) -> None:
    print("RESULT " + json.dumps(answer), flush=True)


def digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


# ------------------------------------------------------------------------------- tasks: text -> cached blocks


def open_corpus(path: str, cache: str):
    from deepseek_ft.config import DataConfig, SourceConfig
    from deepseek_ft.data.sources import open_source

    return open_source(SourceConfig(source="files", path=path), DataConfig(), Path(cache), "data.train.0")


def leave_gigatoken_out() -> None:
    from deepseek_ft.data import tokenise

    tokenise._fast_tokenizer = lambda backend: None


def task_ours(spec: dict) -> dict:
    """Open the file, tokenise, write the cache, lay the blocks."""
    from deepseek_ft.data.blocks import load_blocks
    from deepseek_ft.data.tokenise import Encoder
    from deepseek_ft.models import load_tokenizer

    if not spec["fast"]:
        leave_gigatoken_out()
    tokenizer = load_tokenizer(spec["tokenizer"])
    with Meter() as setup:
        encoder = Encoder(tokenizer)
        encoder.decode(encoder.strings(["warm"])[0])  # whatever is made at its first use
    if "kill_after" in spec:
        kill_after(spec["kill_after"])
    with Meter() as meter:
        blocks = load_blocks([open_corpus(spec["text"], spec["cache"])], [1.0], encoder, SEQ_LEN, Path(spec["cache"]))
    return meter.facts() | {
        "encoder": setup.cpu,
        "gigatoken": encoder.fast is not None,
        "tokens": blocks.stats.tokens,
        "documents": blocks.stats.documents,
        "ids": digest(blocks.stores[0].folder / "ids.bin") if spec.get("digest", True) else "",
    }


def kill_after(batches: int) -> None:
    """This process ends without a warning once it has tokenised so many batches, and has told what they cost."""
    from deepseek_ft.data.store import _Builder

    began, add, done = cpu_seconds(), _Builder._add, 0

    def counted(self, batch) -> None:
        nonlocal done
        add(self, batch)
        done += 1
        if done == batches:
            tell({"cpu": cpu_seconds() - began, "tokens": self.stats.tokens})
            os.kill(os.getpid(), signal.SIGKILL)

    _Builder._add = counted


def task_floor(spec: dict) -> dict:
    """The bare tokenizer straight into a memory map, nothing else: no check, no cache key, no way to go on."""
    from deepseek_ft.models import load_tokenizer

    tokenizer = load_tokenizer(spec["tokenizer"])
    backend, eos = tokenizer.backend_tokenizer, tokenizer.eos_token_id
    first = tokenizer("a")["input_ids"][:1]
    start = first if tokenizer.bos_token_id is not None and first == [tokenizer.bos_token_id] else []
    dtype = np.dtype(np.uint16 if max(tokenizer.get_vocab().values()) < 2**16 else np.uint32)
    file = Path(spec["work"], "floor.bin")
    with Meter() as meter:
        # No text has more tokens than bytes.
        target = np.memmap(file, dtype, "w+", shape=(os.path.getsize(spec["text"]),))
        at = documents = 0

        def add(texts: list[str]) -> None:
            nonlocal at
            for encoding in backend.encode_batch_fast(texts, add_special_tokens=False):
                row = [*start, *encoding.ids, eos]
                target[at : at + len(row)] = row
                at += len(row)

        texts: list[str] = []
        with open(spec["text"], encoding="utf-8") as lines:
            for line in lines:
                texts.append(json.loads(line)["text"])
                if len(texts) == 1000:
                    add(texts)
                    documents, texts = documents + len(texts), []
        add(texts)
        documents += len(texts)
        target.flush()
        os.truncate(file, at * dtype.itemsize)
    return meter.facts() | {"tokens": at, "documents": documents, "ids": digest(file)}


def task_datasets(spec: dict) -> dict:
    """What transformers' run_clm does: `map` with the tokenizer, `map` with a function that groups; defaults throughout."""
    import datasets
    from transformers.utils import logging

    from deepseek_ft.models import load_tokenizer

    datasets.disable_progress_bars()
    logging.set_verbosity_error()
    tokenizer = load_tokenizer(spec["tokenizer"])

    def tokenise(rows: dict) -> dict:
        return tokenizer(rows["text"])

    def group_texts(rows: dict) -> dict:
        joined = {name: list(chain(*lists)) for name, lists in rows.items()}
        whole = len(joined["input_ids"]) // SEQ_LEN * SEQ_LEN
        blocks = {name: [x[i : i + SEQ_LEN] for i in range(0, whole, SEQ_LEN)] for name, x in joined.items()}
        blocks["labels"] = blocks["input_ids"].copy()
        return blocks

    folder = Path(spec["work"], "datasets")
    shutil.rmtree(folder, ignore_errors=True)
    with Meter() as meter:
        raw = datasets.load_dataset("json", data_files=spec["text"], split="train", cache_dir=str(folder))
        tokens = raw.map(tokenise, batched=True, remove_columns=raw.column_names)
        blocks = tokens.map(group_texts, batched=True)
    blocks.select_columns(["input_ids", "attention_mask", "labels"]).save_to_disk(Path(spec["work"], "arrow"))
    return meter.facts() | {"tokens": len(blocks) * SEQ_LEN}


# ------------------------------------------------------------------------------------------- tasks: packing


def task_lengths(spec: dict) -> dict:
    """Tokens of every document or conversation of a file."""
    from deepseek_ft.data.blocks import needs_form
    from deepseek_ft.data.chat import choose_form
    from deepseek_ft.data.store import build_store
    from deepseek_ft.data.tokenise import Encoder
    from deepseek_ft.models import load_tokenizer

    tokenizer = load_tokenizer(spec["tokenizer"])
    corpus = open_corpus(spec["text"], spec["cache"])
    encoder = Encoder(tokenizer, choose_form(tokenizer) if needs_form([corpus]) else None)
    lengths = np.diff(build_store(corpus, encoder, Path(spec["cache"])).ends, prepend=0)
    np.save(spec["to"], lengths)
    return {"documents": len(lengths)}


def split_overlong(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Documents longer than a block as whole blocks and a rest, which is what `bfd_split` does with them."""
    whole, rest = np.divmod(lengths, capacity)
    return np.concatenate([np.full(int(whole.sum()), capacity), rest[rest > 0]])


def task_best_fit(spec: dict) -> dict:
    from deepseek_ft.data.packing import best_fit

    lengths = np.load(spec["lengths"])
    with Meter() as meter:
        (sizes, order, begins), cpu = repeated(
            lambda: ((s := split_overlong(lengths, SEQ_LEN)), *best_fit(s, SEQ_LEN)), spec["seconds"]
        )
    filled = np.add.reduceat(sizes[order], begins[:-1])
    kept = np.array_equal(np.sort(order), np.arange(len(sizes))) and int(filled.max()) <= SEQ_LEN
    return {"cpu": cpu, "peak": meter.peak, "held": meter.held, "rows": len(begins) - 1,
            "tokens": int(filled.sum()) if kept else -1}  # fmt: skip


def task_trl(spec: dict) -> dict:
    import datasets
    import pyarrow as pa
    import trl

    datasets.disable_progress_bars()
    lengths = np.load(spec["lengths"])
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    # One byte a token, the least that can be moved: the plan is what is measured.
    ids = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(np.zeros(offsets[-1], np.int8)))
    rows = datasets.Dataset(pa.table({"input_ids": ids}))
    options = {"batch_size": len(rows)} if spec["whole"] else {}
    trl.pack_dataset(rows.select(range(8)), SEQ_LEN, "bfd_split")  # it imports at the first use
    with Meter() as meter:
        packed, cpu = repeated(
            lambda: trl.pack_dataset(rows, SEQ_LEN, "bfd_split", map_kwargs=options), spec["seconds"]
        )
    tokens = sum(len(chunk.values) for chunk in packed.data.column("input_ids").chunks)
    return {"cpu": cpu, "peak": meter.peak, "held": meter.held, "rows": len(packed), "tokens": tokens,
            "version": trl.__version__}  # fmt: skip


# --------------------------------------------------------------------------- tasks: reading, the second start


def reading(count: int, one, batch) -> dict:
    """Microseconds of CPU for a row and for a batch of eight, in a shuffled order."""
    order = list(range(count))
    random.Random(1).shuffle(order)
    batches = [order[i : i + 8] for i in range(0, count - 7, 8)]
    for i in order[:50]:
        one(i)
    batch(batches[0])

    def each(read, what) -> None:  # as training does: a row is gone when the next one comes
        for i in what:
            read(i)

    _, rows = repeated(lambda: each(one, order))
    _, eights = repeated(lambda: each(batch, batches))
    return {"row_us": 1e6 * rows / count, "batch_us": 1e6 * eights / len(batches)}


def task_read(spec: dict) -> dict:
    from deepseek_ft.data.blocks import collate, load_blocks
    from deepseek_ft.data.tokenise import Encoder
    from deepseek_ft.models import load_tokenizer

    leave_gigatoken_out()
    encoder = Encoder(load_tokenizer(spec["tokenizer"]))
    blocks = load_blocks([open_corpus(spec["text"], spec["cache"])], [1.0], encoder, SEQ_LEN, Path(spec["cache"]))
    return reading(
        len(blocks),
        blocks.__getitem__,
        lambda rows: collate(blocks.__getitems__(rows)),
    )


def task_read_datasets(spec: dict) -> dict:
    import datasets
    from transformers import default_data_collator

    rows = datasets.load_from_disk(str(Path(spec["work"], "arrow"))).with_format("torch")
    return reading(len(rows), rows.__getitem__, lambda order: default_data_collator(rows.__getitems__(order)))


def task_start(spec: dict) -> dict:
    """From a bare interpreter to the first batch of eight, with the tokens in the cache."""
    moments = [time.perf_counter()]
    import torch  # noqa: F401
    import transformers  # noqa: F401

    from deepseek_ft.data.blocks import collate, load_blocks
    from deepseek_ft.data.store import _Builder
    from deepseek_ft.data.tokenise import Encoder
    from deepseek_ft.models import load_tokenizer

    def not_cached(_) -> None:
        raise SystemExit("the tokens are not in the cache: was the data engine's code changed in between?")

    _Builder.run = not_cached
    moments.append(time.perf_counter())
    tokenizer = load_tokenizer(spec["tokenizer"])
    moments.append(time.perf_counter())
    corpus = open_corpus(spec["text"], spec["cache"])
    encoder = Encoder(tokenizer)
    moments.append(time.perf_counter())
    blocks = load_blocks([corpus], [1.0], encoder, SEQ_LEN, Path(spec["cache"]))
    collate(blocks.__getitems__(range(min(8, len(blocks)))))
    moments.append(time.perf_counter())
    imports, loading, opening, laying = np.diff(moments).tolist()
    return {"imports": imports, "tokenizer": loading, "encoder": opening, "wall": opening + laying}


# ----------------------------------------------------------------------------------------------------- inputs


def standard_library(folder: Path, megabytes: float) -> Path:
    """Python's own source as rows."""
    text, size = folder / "stdlib.jsonl", 0
    with open(text, "w", encoding="utf-8") as file:
        for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
            if "site-packages" in path.parts or "test" in path.parts or "tests" in path.parts:
                continue
            try:
                source = path.read_text(encoding="utf-8")
            except ValueError:
                continue
            if source.strip():
                size += file.write(json.dumps({"text": source}, ensure_ascii=False) + "\n")
            if size > 1e6 * megabytes:
                break
    return text


def trained_tokenizer(text: Path, folder: Path) -> Path:
    from deepseek_ft import load_config
    from deepseek_ft.models import tokenizer_source

    config = load_config({
        "name": "data", "model": {"path": "preset:tiny-v3", "tokenizer": "train:16384"},
        "data": {"train": [{"source": "files", "path": str(text)}]},
        "train": {"max_steps": 1},
    })  # fmt: skip
    return Path(tokenizer_source(config, [open_corpus(str(text), str(folder))], folder))


def enlarge(text: Path, to: Path, size: int) -> None:
    """The rows of `text` again and again, each copy with a beginning of its own, until there is enough; .txt or .jsonl."""
    with open(text, encoding="utf-8") as file:
        documents = [json.loads(line)["text"] for line in file]
    written = copy = 0
    with open(to, "w", encoding="utf-8") as file:
        while written < size:
            for i, document in enumerate(documents):
                document = f"Copy {copy} of text {i}.\n{document}"
                line = json.dumps({"text": document}, ensure_ascii=False) if to.suffix == ".jsonl" else document
                written += file.write(line + "\n")
            copy += 1


# ------------------------------------------------------------------------------------------------------ table


def middle(runs: list[dict], name: str) -> float:
    return statistics.median(run[name] for run in runs)


class Table:
    def __init__(self):
        self.rows: list[tuple[str, ...]] = []

    def add(
        self, what: str, ours: str, other: str, ratio: str = "", target: str = "", holds: bool | None = None
    ) -> None:
        self.rows.append((what, ours, other, ratio, target, "" if holds is None else "yes" if holds else "**no**"))

    def text(self) -> str:
        head = ("what", "ours", "beside it", "ratio", "target", "holds")
        return "\n".join("| " + " | ".join(row) + " |" for row in [head, ("---",) * 6, *self.rows])


def taking_turns(tasks: dict[str, tuple], repeats: int) -> dict[str, list[dict]]:
    """Each task once, then each once more, so that a slow minute of the machine falls on all of them."""
    runs: dict[str, list[dict]] = {name: [] for name in tasks}
    for _ in range(repeats):
        for name, (task, spec, *python) in tasks.items():
            if spec.get("fast") and runs[name] and not runs[name][0].get("gigatoken"):
                continue  # once is enough to know that it falls back
            if "cache" in spec and spec.get("empty"):
                shutil.rmtree(spec["cache"], ignore_errors=True)
            runs[name].append(measure(task, spec, *python))
    return runs


def compare_tokenising(table: Table, text: Path, tokenizer: Path, work: Path, repeats: int) -> None:
    name, common = tokenizer.name, {"text": str(text), "tokenizer": str(tokenizer), "work": str(work)}
    common["name"] = name
    runs = taking_turns({
        "floor": ("floor", common),
        "ours": ("ours", common | {"fast": False, "empty": True, "cache": str(work / f"cache-{name}")}),
        "fast": ("ours", common | {"fast": True, "empty": True, "cache": str(work / f"fast-{name}")}),
        "datasets": ("datasets", common),
    }, repeats)  # fmt: skip
    floor, ours, fast, peer = (runs[k] for k in ("floor", "ours", "fast", "datasets"))
    f, o, g, d = (middle(r, "cpu") for r in (floor, ours, fast, peer))
    table.add(f"{name}: text to cached blocks, CPU s", f"{o:.2f}", f"{f:.2f} (bare tokenizer)", f"{f / o:.2f}",
              ">= 0.9", f / o >= 0.9)  # fmt: skip
    memories = [middle(r, "peak") / MIB for r in (ours, floor, peer, fast)]
    held = [middle(r, "peak") / MIB - middle(r, "held") / MIB for r in (ours, floor, peer, fast)]
    ratio = memories[0] / memories[1]
    table.add("the same, peak memory, MiB (of which grown)", f"{memories[0]:.0f} ({held[0]:.0f})",
              f"{memories[1]:.0f} ({held[1]:.0f})", f"{ratio:.2f}", "<= 1.5", ratio <= 1.5)  # fmt: skip
    table.add("the same, with making the encoder, once per process", f"{o + middle(ours, 'encoder'):.2f}",
              f"{f:.2f}", f"{f / (o + middle(ours, 'encoder')):.2f}")  # fmt: skip
    table.add("the same, beside `datasets`: map and group_texts, CPU s", f"{o:.2f}", f"{d:.2f}", f"{d / o:.2f}")
    table.add("the same, peak memory, MiB (of which grown)", f"{memories[0]:.0f} ({held[0]:.0f})",
              f"{memories[2]:.0f} ({held[2]:.0f})", f"{memories[0] / memories[2]:.2f}")  # fmt: skip
    alike = len({r["ids"] for r in floor + ours}) == 1
    table.add("the same, ids", f"{ours[0]['tokens']:,}", f"{floor[0]['tokens']:,}", "", "equal", alike)
    if not fast[0]["gigatoken"]:
        table.add(f"{name}: with gigatoken", "not known to it, or not installed", "")
        return
    with_encoder = g + middle(fast, "encoder")
    table.add(f"{name}: with gigatoken, CPU s", f"{g:.3f}", f"{f:.2f} (bare tokenizer)", f"{f / g:.1f}",
              ">= 8", f / g >= 8)  # fmt: skip
    table.add("the same, peak memory, MiB (of which grown)", f"{memories[3]:.0f} ({held[3]:.0f})",
              f"{memories[1]:.0f} ({held[1]:.0f})", f"{memories[3] / memories[1]:.2f}")  # fmt: skip
    table.add("the same, with making the encoder, once per process", f"{with_encoder:.2f}", f"{f:.2f}",
              f"{f / with_encoder:.1f}")  # fmt: skip
    table.add("the same, ids", f"{fast[0]['tokens']:,}", f"{floor[0]['tokens']:,}", "", "equal",
              {r["ids"] for r in fast} == {r["ids"] for r in floor})  # fmt: skip


def compare_packing(
    table: Table, text: Path, chats: list[Path], tokenizer: Path, work: Path, repeats: int, trl: str | None
) -> str | None:
    """Returns TRL's version, or None where it was left out."""
    cases = {}
    for path in [text, *chats]:
        to = work / f"lengths-{len(cases)}.npy"
        spec = {"text": str(path), "tokenizer": str(tokenizer), "cache": str(work / "lengths"), "to": str(to)}
        kind = "documents" if path == text else "conversations"
        cases[f"{measure('lengths', spec | {'name': path.name})['documents']:,} {kind} of {path.name}"] = to
    to = work / "lengths-synthetic.npy"
    made = np.random.default_rng(1).lognormal(5.3, 1.0, SYNTHETIC)
    np.save(to, np.maximum(1, made).astype(np.int64))
    cases[f"{SYNTHETIC:,} documents, log-normal"] = to
    found = None
    for name, lengths in cases.items():
        spec = {"lengths": str(lengths), "name": name, "seconds": 0.3}
        tasks: dict[str, tuple] = {"ours": ("best_fit", spec)}
        if trl:
            tasks["whole"] = ("trl", spec | {"whole": True}, trl)
            if len(np.load(lengths)) > 1000:  # its default batch; of fewer documents it is the same
                tasks["trl"] = ("trl", spec | {"whole": False}, trl)
        # A million documents keep TRL busy for half a minute, and what is far apart needs no median.
        runs = taking_turns(tasks, 1 if trl and lengths == to else repeats)
        wanted, rows = int(np.load(lengths).sum()), runs["ours"][0]["rows"]
        whole = all(r["tokens"] == wanted for r in runs["ours"])
        mine, fill = middle(runs["ours"], "cpu"), wanted / (rows * SEQ_LEN)
        shown = f"{1000 * mine:.2f} ms, {rows:,} rows, {fill:.2%} full"
        if not trl:
            table.add(
                f"plan of {name}", shown, "left out: no Python with TRL (--trl-python)", "", "no token lost", whole
            )
            continue
        for key in [k for k in ("whole", "trl") if k in runs]:
            how = "as one batch" if key == "whole" else "by its default of 1,000 a batch"
            theirs, other = middle(runs[key], "cpu"), runs[key][0]["rows"]
            table.add(f"plan of {name}; TRL {how}", shown, f"{1000 * theirs:.2f} ms, {other:,} rows", f"{theirs / mine:.0f}",
                      ">= 10, no more rows, no token lost", theirs / mine >= 10 and rows <= other and whole)  # fmt: skip
        found = runs["whole"][0]["version"]
    return found


def compare_reading(table: Table, spec: dict, repeats: int) -> None:
    runs = taking_turns({"ours": ("read", spec), "datasets": ("read_datasets", spec)}, repeats)
    for name, what in (("row_us", f"a row of {SEQ_LEN:,} tokens"), ("batch_us", "a batch of eight, as tensors")):
        o, d = middle(runs["ours"], name), middle(runs["datasets"], name)
        table.add(f"{what}, CPU microseconds", f"{o:.1f}", f"{d:.0f} (`datasets`, torch format)", f"{d / o:.1f}",
                  ">= 20", d / o >= 20)  # fmt: skip


def second_start(table: Table, what: str, spec: dict, repeats: int) -> None:
    runs = taking_turns({"start": ("start", spec)}, repeats)["start"]
    wall = middle(runs, "wall")
    table.add(f"{what}: tokens in the cache, seconds from opening to the first batch", f"{wall:.3f}",
              f"encoder {middle(runs, 'encoder'):.3f}; before it imports {middle(runs, 'imports'):.1f}, "
              f"tokenizer {middle(runs, 'tokenizer'):.2f}", "", "< 1", wall < 1)  # fmt: skip


def large(table: Table, text: Path, tokenizers: list[Path], work: Path, repeats: int) -> None:
    """Two files of 2 GB, once each: they take minutes."""
    small = {"text": str(text), "fast": True, "digest": False, "cache": str(work / "known")}
    tokenizer = next((t for t in tokenizers if measure("ours", small | {"tokenizer": str(t)})["gigatoken"]), None)
    used = tokenizer or tokenizers[0]
    with_what = f"{used.name}, {'gigatoken' if tokenizer else 'tokenizers'}"
    floor = middle(
        taking_turns({"floor": ("floor", small | {"tokenizer": str(used), "work": str(work)})}, repeats)["floor"], "cpu"
    )
    floor = text.stat().st_size / floor / 1e6
    limit = 1.5e9
    for name, what in (("large.txt", "one text"), ("large.jsonl", "rows")):
        path = work / name
        enlarge(text, path, LARGE_BYTES)
        spec = {"text": str(path), "tokenizer": str(used), "fast": True, "name": name,
                "cache": str(work / "large")}  # fmt: skip
        run = measure("ours", spec)
        size, cpu = path.stat().st_size, run["cpu"]
        table.add(f"{size / 1e9:.1f} GB as {what} ({with_what}): peak memory, GB", f"{run['peak'] / 1e9:.2f}",
                  f"{cpu:.0f} CPU s, {run['wall']:.0f} s, {run['tokens']:,} tokens", "", "< 1.5", run["peak"] < limit)  # fmt: skip
        if tokenizer:
            table.add("the same, speed, MB per CPU s", f"{size / cpu / 1e6:.0f}", f"{floor:.1f} (bare tokenizer, {text.stat().st_size / 1e6:.1f} MB)",
                      f"{size / cpu / 1e6 / floor:.0f}", ">= 8", size / cpu / 1e6 >= 8 * floor)  # fmt: skip
        if name == "large.jsonl":
            second_start(table, f"{size / 1e9:.1f} GB", spec, repeats)
            again = spec | {"cache": str(work / "again")}
            from deepseek_ft.data.store import _BATCH_CHARACTERS

            first = measure("ours", again | {"kill_after": size // _BATCH_CHARACTERS // 2})
            rest = measure("ours", again)
            together = first["cpu"] + rest["cpu"]
            table.add(f"the same, killed after {first['tokens']:,} tokens and gone on with, CPU s", f"{together:.1f}",
                      f"{run['cpu']:.1f} (at once)", f"{together / run['cpu']:.2f}", "<= 1.1, equal ids",
                      together <= 1.1 * run["cpu"] and rest["ids"] == run["ids"])  # fmt: skip
        path.unlink()
        shutil.rmtree(work / "large")


def installed(name: str) -> str:
    try:
        return f"{name} {version(name)}"
    except PackageNotFoundError:
        return f"no {name}"


TASKS = {name.removeprefix("task_"): f for name, f in list(globals().items()) if name.startswith("task_")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="JSON lines with a field `text`")
    parser.add_argument(
        "--megabytes", type=float, default=6.0, help="of Python's standard library, where no text is given"
    )
    parser.add_argument("--tokenizer", type=Path, action="append", help="a folder; may be given several times")
    parser.add_argument(
        "--chat", type=Path, action="append", default=[], help="conversations, whose lengths are packed"
    )
    parser.add_argument("--trl-python", help="an interpreter that can import trl")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--large", action="store_true", help="also 2 GB of text: needs 10 GB of disk and some minutes")
    parser.add_argument("--only", choices=["tokenising", "packing", "reading", "start", "large"], action="append")
    parser.add_argument("--work", type=Path, help="where the files are made; default: the system's temporary folder")
    parser.add_argument("--task", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.task:
        return tell(TASKS[arguments.task[0]](json.loads(arguments.task[1])))

    parts = arguments.only or ["tokenising", "packing", "reading", "start", *(["large"] if arguments.large else [])]
    trl = arguments.trl_python
    if trl and subprocess.run([trl, "-c", "import trl"], capture_output=True).returncode:
        print(f"{trl} cannot import trl: its rows are left out", file=sys.stderr)
        trl = None
    table, repeats = Table(), arguments.repeats
    with tempfile.TemporaryDirectory(dir=arguments.work) as folder:
        work = Path(folder)
        text = arguments.text.resolve() if arguments.text else standard_library(work, arguments.megabytes)
        if arguments.tokenizer:
            tokenizers = [t.resolve() for t in arguments.tokenizer]
        else:
            tokenizers = [trained_tokenizer(text, work).rename(work / "trained")]
        found = None
        if "tokenising" in parts:
            for tokenizer in tokenizers:
                compare_tokenising(table, text, tokenizer, work, repeats)
        if "packing" in parts:
            chats = [c.resolve() for c in arguments.chat]
            found = compare_packing(table, text, chats, tokenizers[0], work, repeats, trl)
        for tokenizer in tokenizers if {"reading", "start"} & set(parts) else ():
            spec = {"text": str(text), "tokenizer": str(tokenizer), "work": str(work), "name": tokenizer.name,
                    "cache": str(work / f"cache-{tokenizer.name}")}  # fmt: skip
            if not Path(spec["cache"]).exists():
                measure("ours", spec | {"fast": True})
            if "reading" in parts and tokenizer == tokenizers[0]:
                if not (work / "arrow").exists():
                    measure("datasets", spec)
                compare_reading(table, spec, repeats)
            if "start" in parts:
                second_start(table, f"{text.stat().st_size / 1e6:.1f} MB, {tokenizer.name}", spec, repeats)
        if "large" in parts:
            large(table, text, tokenizers, work, repeats)
        size = text.stat().st_size
    print(f"{size / 1e6:.1f} MB of text, {os.cpu_count()} cores, Python {sys.version.split()[0]}, medians of {repeats}; "
          + ", ".join(map(installed, ("tokenizers", "transformers", "datasets", "gigatoken")))
          + (f", trl {found}" if found else ""))  # fmt: skip
    print()
    print(table.text())


if __name__ == "__main__":
    main()
