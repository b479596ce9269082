"""Tokenizers and models: load or make them, and check that they are what they should be."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from .config import Config
from .data.formats import texts
from .data.sources import Corpus
from .errors import CheckpointError, ConfigError
from .optimizers import keeps_bf16_weights, masters_apart
from .planner import Plan
from .shapes import PRESETS, preset_config
from .tokens import add, ids_of, make_room

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from .stages import Stage

log = logging.getLogger(__name__)

# DeepSeek's own names; a tokenizer that is trained here wears them too.
BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
# How text is cut before BPE: contractions, words with the space before them, single digits, runs of signs and of white
# space. This is Qwen2's rule, which transformers puts over a qwen2 model's own tokenizer.json in any case.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Text on which broken tokenizers show: indentation, digits, Chinese, symbols, line ends (casebook of lost spaces).
_PROBE = "def add(a, b):\n    return 12345 + b  # ≤ ℕ\r\n\t注意 空格，保留。 don't  \n\n"


# ------------------------------------------------------------------------------------------------ tokenizers


def tokenizer_source(config: Config, corpora: list[Corpus], cache_dir: Path) -> str:
    """A hub id or a folder; a tokenizer that is to be trained is trained now, once per corpus and size."""
    spec = config.model.tokenizer
    if spec is None and config.model.path.startswith("preset:"):
        preset = PRESETS[config.model.path.removeprefix("preset:")]
        spec = f"train:{preset['vocab_size']}"
    if spec is None:
        return config.model.path
    if not spec.startswith("train:"):
        return spec
    size = spec.removeprefix("train:")
    if not size.isdigit() or int(size) < 300:
        raise ConfigError(
            f"model.tokenizer: got {spec!r}; train:<size> needs a size of at least 300, such as train:4096"
        )
    return str(_train_tokenizer(corpora, int(size), cache_dir))


def _train_tokenizer(corpora: list[Corpus], size: int, cache_dir: Path) -> Path:
    """Byte-level BPE over the documents: any text survives the round trip."""
    from filelock import FileLock
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    key = hashlib.blake2b(f"3|{size}|{[c.fingerprint for c in corpora]}".encode(), digest_size=16).hexdigest()
    folder = cache_dir / "tokenizers" / key
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        if folder.is_dir():
            return folder
        log.info("training a byte-level BPE tokenizer of %d tokens on the training documents", size)
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=[BOS, EOS, PAD],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator((t for c in corpora for e in c.examples() for t in texts(e)), trainer)
        building = folder.with_suffix(".building")
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir()
        tokenizer.save(str(building / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS, "pad_token": PAD,
                    "clean_up_tokenization_spaces": False}  # fmt: skip
        (building / "tokenizer_config.json").write_text(json.dumps(settings, ensure_ascii=False), encoding="utf-8")
        building.replace(folder)
    return folder


def load_tokenizer(source: str, new_tokens: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """The tokenizer of a folder or hub id, checked: text comes back as it went in, ids are those of its own file. The new tokens
    come behind.

    Raises:
        ConfigError: there is none, it has no end-of-sentence token, it changes text, or it cannot have the new tokens.
    """
    from transformers import AutoTokenizer

    settings = _tokenizer_settings(source)
    options = {}
    if "add_bos_token" in settings:  # transformers 5 ignores the file's wish when tokenizer.json exists
        options["add_bos_token"] = bool(settings["add_bos_token"])
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, use_fast=True, **options)
    except Exception as error:
        reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        raise ConfigError(f"model.tokenizer: no tokenizer can be loaded from {source!r}: {reason}") from None
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise ConfigError(f"model.tokenizer: {source!r} has no tokenizer.json, which fast tokenization needs")
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"model.tokenizer: {source!r} names no eos_token; documents could not be told apart")
    tokenizer.backend_tokenizer.no_truncation()  # which somebody's last call may have left in the file
    tokenizer.backend_tokenizer.no_padding()
    ids = tokenizer.backend_tokenizer.encode(_PROBE, add_special_tokens=False).ids
    back = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    if back != _PROBE:
        raise ConfigError(f"model.tokenizer: {source!r} does not give text back as it was: {_PROBE!r} became {back!r}")
    file = Path(source, "tokenizer.json")
    if file.is_file():
        from tokenizers import Tokenizer

        plain = Tokenizer.from_file(str(file))
        plain.no_truncation()
        plain.no_padding()
        own = plain.encode(_PROBE, add_special_tokens=False).ids
        if own != ids:
            k = next((i for i, (a, b) in enumerate(zip(ids, own, strict=False)) if a != b), min(len(ids), len(own)))
            raise ConfigError(f"model.tokenizer: {type(tokenizer).__name__}, which transformers takes for this model, splits "
                              f"text otherwise than {file} says: ids {ids[k : k + 4]} against {own[k : k + 4]} from position {k}")  # fmt: skip
    add(tokenizer, new_tokens, source)
    sample = tokenizer("def add(a, b):")["input_ids"][:8]
    log.info("tokenizer %s: %s tokens, eos %s (%d), first ids of 'def add(a, b):' %s", source,
             f"{len(tokenizer):,}", tokenizer.eos_token, tokenizer.eos_token_id, sample)  # fmt: skip
    return tokenizer


def _tokenizer_settings(source: str) -> dict:
    file = Path(source, "tokenizer_config.json")
    if not Path(source).is_dir():
        try:
            from huggingface_hub import hf_hub_download

            file = Path(hf_hub_download(source, "tokenizer_config.json"))
        except Exception:  # AutoTokenizer says it better
            return {}
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def largest_id(tokenizer: PreTrainedTokenizerFast) -> int:
    """Not always len(tokenizer) - 1: a vocabulary may have holes."""
    return max(tokenizer.get_vocab().values())


def token_bytes(tokenizer: PreTrainedTokenizerFast, vocab_size: int, content: Collection[str] = ()) -> list[int]:
    """How many bytes of text each id stands for; 0 for special tokens, but for those that are content.

    In a byte-level vocabulary every character of an entry is one byte. Elsewhere `<0x0A>` is one byte and `▁` a space.
    """
    vocabulary = tokenizer.get_vocab()
    counts = [0] * max(vocab_size, largest_id(tokenizer) + 1)
    byte_level = '"ByteLevel"' in json.dumps(json.loads(tokenizer.backend_tokenizer.to_str()).get("decoder"))
    added = tokenizer.added_tokens_decoder
    for token, i in vocabulary.items():
        if byte_level or re.fullmatch(r"<0x[0-9A-F]{2}>", token):
            counts[i] = len(token) if byte_level else 1
        else:
            counts[i] = len(token.replace("▁", " ").encode("utf-8"))
    for i, token in added.items():
        counts[i] = 0 if token.special and token.content not in content else len(token.content.encode("utf-8"))
    return counts


# --------------------------------------------------------------------------------------------------- models


def model_source(config: Config, tokenizer: PreTrainedTokenizerFast, cache_dir: Path) -> str:
    """A folder with weights: the model's own, the hub's (downloaded now), or a preset's, made once per seed."""
    path = config.model.path
    if path.startswith("preset:"):
        tokens = len(tokenizer) - len(config.model.new_tokens)  # a base is the same whatever is added to it
        return str(_make_preset(path.removeprefix("preset:"), tokenizer, tokens, config.seed, cache_dir))
    if Path(path).is_dir():
        return path
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.constants import HF_HUB_OFFLINE

    try:
        files = [] if HF_HUB_OFFLINE else HfApi().list_repo_files(path)
        # Older repositories have no safetensors; where both are, one of them is enough.
        weights = "*.bin" if files and not any(f.endswith(".safetensors") for f in files) else "*.safetensors"
        return snapshot_download(path, allow_patterns=[weights, "*.json", "tokenizer*"])
    except Exception as error:
        reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        raise ConfigError(f"model.path: {path} is not a folder here and cannot be had from the Hugging Face hub: {reason}\n"
                          "  Download it elsewhere and give its folder, or set HF_ENDPOINT to a mirror.") from None  # fmt: skip


def _make_preset(name: str, tokenizer: PreTrainedTokenizerFast, tokens: int, seed: int, cache_dir: Path) -> Path:
    """Random fp32 weights on disk, so that every strategy and rank starts from the same ones."""
    from filelock import FileLock
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar, enable_progress_bar

    shape = preset_config(name, tokens)
    kind = shape.pop("model_type")
    shape |= {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id,
              "pad_token_id": tokenizer.pad_token_id}  # fmt: skip
    made_of = json.dumps([1, kind, shape, seed, torch.__version__], sort_keys=True)
    folder = cache_dir / "presets" / f"{name}-{hashlib.blake2b(made_of.encode(), digest_size=8).hexdigest()}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        if not folder.is_dir():
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape), dtype=torch.float32)
            building = folder.with_suffix(".building")
            shutil.rmtree(building, ignore_errors=True)
            disable_progress_bar()
            model.save_pretrained(building)
            enable_progress_bar()
            building.replace(folder)
    return folder


def load_dtype(config: Config, plan: Plan) -> torch.dtype:
    """16-bit only where master weights are kept beside them, the optimizer rounds in a way that loses no update, or the base is
    not trained; otherwise updates would be rounded away."""
    if masters_apart(plan.strategy) or config.method.kind != "full":
        return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[config.train.precision]
    return torch.bfloat16 if keeps_bf16_weights(plan.optimizer, plan.strategy) else torch.float32


def load_model(
    source: str, config: Config, plan: Plan, tokenizer: PreTrainedTokenizerFast, stage: Stage | None = None
) -> PreTrainedModel | PeftModel:
    """Weights of a folder, what of them is frozen, and the adapter beside them. Under ZeRO-3 each rank keeps its shard only,
    if the TrainingArguments exist already.

    Args:
        stage: of a pipeline: only its part of the model is loaded.

    Raises:
        CheckpointError: a weight is missing, unexpected or of another shape, or a file is broken.
        ConfigError: the tokenizer has ids that the model has no row for.
    """
    import accelerate
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    from . import adapters
    from .stages import device_map, load_cut

    adapters.check(config, source)
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # what it would report is checked below, and said in one line
    try:
        options = {
            "dtype": load_dtype(config, plan),
            "attn_implementation": config.model.attention,
            "output_loading_info": True,
            "ignore_mismatched_sizes": True,  # so that they are listed with the others, and refused below
            **adapters.quantisation(config, plan),
        }
        if plan.strategy.split and plan.device == "cuda":
            options["device_map"] = device_map(plan.stages, range(len(plan.stages)), AutoConfig.from_pretrained(source).tie_word_embeddings)
        if stage is None:
            model, info = AutoModelForCausalLM.from_pretrained(source, **options)
        else:
            model, info = load_cut(source, stage, **options)
    except Exception as error:
        reason = str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
        raise CheckpointError(f"the model in {source} cannot be loaded: {type(error).__name__}: {reason}") from error
    finally:
        transformers_logging.set_verbosity(verbosity)
    check_loading_info(info, source)
    if plan.strategy.split and plan.device == "cpu":  # the same hooks, between devices that are all the host
        accelerate.dispatch_model(model, device_map(plan.stages, ["cpu"] * len(plan.stages), model.config.tie_word_embeddings),
                                  force_hooks=True)  # fmt: skip
    rows, new_tokens = model.config.vocab_size, config.model.new_tokens
    own = largest_id(tokenizer) - len(new_tokens)
    if own >= rows:
        raise ConfigError(f"the tokenizer has ids up to {own:,}, the model in {source} rows for {rows:,}; they do not "
                          "belong together")  # fmt: skip
    if new_tokens:
        make_room(model, tokenizer, new_tokens)
    model.config.use_cache = False  # a cache is for generation; in training it only costs memory
    if config.method.kind == "full":
        return adapters.freeze(model, config)
    return adapters.attach(model, config, plan, source, ids_of(tokenizer, new_tokens) if new_tokens else range(0),
                           None if stage is None else stage.layers)  # fmt: skip


def check_loading_info(info: dict, source: str) -> None:
    """Weights that were not found stay random, and a training that goes on from them looks almost normal."""
    problems = []
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        names = sorted(str(n) for n in info.get(kind) or ())
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            problems.append(f"{kind.replace('_', ' ')}: {', '.join(names[:3])}{more}")
    if problems:
        raise CheckpointError(f"the weights in {source} are not those of its config.json: {'; '.join(problems)}")
