"""What to learn: the keys of a recipe, what else they are called, and which of them contradict each other.

`recipe` makes a `Config` of files and overrides.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import get_type_hints


def _choice(default: str, *others: str):
    return field(default=default, metadata={"choices": (default, *others)})


# --------------------------------------------------------------------------------------------- the keys


@dataclass(frozen=True)
class ModelConfig:
    path: str = "???"
    """Hub id, local folder, or `preset:<name>` for random weights (see `shapes.PRESETS`)."""
    tokenizer: str | None = None
    """Hub id or folder; `train:<size>` trains a byte-level BPE on the training documents. null: the model's
    own, or for a preset one of the preset's vocabulary size trained on the spot."""
    new_tokens: list[str] = field(default_factory=list)
    """Special tokens that the tokenizer gets behind its own, such as `<tool>`. Their rows in embedding and head are trained, with
    an adapter they alone. In text their names are these tokens, unless data.special_tokens is `text` (docs/adapters.md)."""
    untrained: bool = False
    """The weights at `path` are random, so a loss that starts at that of guessing is no sign of a mix-up."""
    gradient_checkpointing: bool = True
    """Recompute activations in the backward pass: about a third more math for a fraction of the memory."""
    checkpoint_every: int = 1
    """With `gradient_checkpointing`, recompute only every so many layers; the others keep what they computed."""
    offload_activations: bool = False
    """With `gradient_checkpointing`, what enters a recomputed layer waits in the host's memory."""
    tiled_mlp: int | None = None
    """Compute dense feed-forward layers in so many tiles of the sequence: for long ones, at one more forward pass of theirs."""
    attention: str = _choice("sdpa", "eager", "flash_attention_2")
    """torch's own, the plain one, or flash attention 2, for which the package flash-attn must be installed."""


@dataclass(frozen=True)
class MethodConfig:
    kind: str = _choice("full", "lora", "qlora")
    """`full` trains every weight that is not frozen. `lora` trains a small adapter beside a frozen base (arXiv:2106.09685),
    `qlora` beside a base in 4 bits (arXiv:2305.14314; needs the package bitsandbytes)."""
    rank: int = 16
    """Width of an adapter."""
    alpha: float | None = None
    """What the adapter's output is multiplied by, times the rank (`rslora`: times its square root). null: twice the rank."""
    dropout: float = 0.0
    """Share of an adapter's input that is left out at random while training."""
    variant: str = _choice("lora", "rslora", "dora")
    """`rslora` divides alpha by the square root of the rank (arXiv:2312.03732), `dora` trains the norm of each row of the
    adapted weights too (arXiv:2402.09353), which costs time and memory."""
    targets: list[str] | None = None
    """Modules that get an adapter, by the end of their names; null: the linear layers of attention and feed-forward. The
    router of a mixture of experts never gets one."""
    experts: bool = False
    """Adapt the routed experts of V2 and V3 models too: each expert gets a pair of its own."""
    train_also: list[str] = field(default_factory=list)
    """Trained whole, beside the adapter: embed_tokens, lm_head or both."""
    freeze: list[str] = field(default_factory=list)
    """Of `full`: what is not trained, by parts of the weights' names: `embed_tokens`, `layers.0-11` (both ends included),
    `layers.*.mlp`, `*norm`."""


@dataclass(frozen=True)
class ExpertsConfig:
    """Of a mixture of experts (docs/experts.md); a dense model refuses them."""

    balance_loss: float | str | None = None
    """Coefficient of the sequence-wise balance loss, or `config` for the one in the model's config.json; null: none.
    V2-Lite's config.json says 0.001, the paper of V3 0.0001."""
    bias_update_speed: float | None = None
    """V3 only: by how much an expert's bias is moved after each step, against its load; null: it stays as it is.
    DeepSeek trained V3 with 0.001."""
    train_router: bool = True
    """false: the routers' weights stay as they are."""


@dataclass(frozen=True)
class SourceConfig:
    source: str = "???"
    """A known name (see `KNOWN_SOURCES`); `files` for local files of any kind, recognised by their content; or a data
    set's id on the hub, `owner/name`."""
    split: str | None = None
    """train | validation | test. Where the data has no splits of its own, `validation` is a fixed `holdout`
    share of the documents, chosen by their content, and `train` the others. null: every document."""
    path: str | None = None
    """Local file, folder or glob such as `data/*.jsonl`; null means `data.path`, and where that is null too, the hub."""
    subset: str | None = None
    """The configuration of a data set on the hub that has several."""
    include: list[str] | None = None
    """Globs below a folder; null means the source's usual file types."""
    exclude: list[str] | None = None
    """Globs below a folder to leave out."""
    format: str = _choice("auto", "text", "code", "prompt_completion", "infill", "alpaca", "qa", "sharegpt", "messages")
    """What a row is; auto: seen in the names of the first row's fields, and said in the log."""
    text_field: str | None = None
    """The field of a row that holds the document; null: text, content, code, document, passage or context."""
    prompt_field: str | None = None
    """What is read but not learnt; null: prompt, query, instruction, question or prefix."""
    completion_field: str | None = None
    """What is learnt after it; null: completion, response, output, answer or canonical_solution."""
    messages_field: str | None = None
    """The turns of a conversation; null: messages, conversations or conversation."""
    weight: float = 1.0
    """How often this source is seen per epoch: 2 is twice, 0.5 is a fixed half of it."""
    holdout: float = 0.01
    """Share of the documents in `split: validation` where the data has no such split of its own."""
    max_documents: int | None = None
    """Take only the first so many documents of this split."""


@dataclass(frozen=True)
class ChatConfig:
    form: str = _choice("auto", "template", "deepseek_llm", "deepseek_coder", "deepseek_v3", "deepseek_v3_1", "deepseek_r1",
                        "deepseek_r1_0528")  # fmt: skip
    """How conversations are written. auto: by the tokenizer's own template or, where it has none, by its family."""
    learn: str = _choice("all", "last")
    """Which assistant turns are learnt."""
    reasoning: str = _choice("keep", "drop")
    """Whether a learnt turn keeps its `<think>` part."""
    system: str | None = None
    """System prompt of conversations that have none."""


@dataclass(frozen=True)
class CodeConfig:
    """For sources of format `code`."""

    fim_rate: float = 0.0
    """Share of the documents that are turned into fill-in-the-middle examples; DeepSeek-Coder's authors use 0.5."""
    spm_rate: float = 0.0
    """Share of those that are written suffix first."""
    repository: bool = False
    """One document per repository, each file after those that it imports, instead of one per file."""
    licenses: list[str] | None = None
    """SPDX names of licences that are taken, or `permissive`; null: whatever it is."""
    skip_generated: bool = True
    """Leave out minified and generated files."""
    gitignore: bool = True
    """Leave out what .gitignore leaves out."""


@dataclass(frozen=True)
class DataConfig:
    train: list[SourceConfig] = field(default_factory=list)
    eval: list[SourceConfig] = field(default_factory=list)
    """Held-out text for perplexity; an empty list trains without evaluation."""
    seq_len: int = 2048
    """Tokens per block."""
    path: str | None = None
    """Where sources without a path of their own look."""
    cache_dir: str | None = None
    """Token caches and preset weights; null: $DEEPSEEK_FT_CACHE or ~/.cache/deepseek_ft."""
    isolate: bool = True
    """Documents that share a block do not see each other: positions begin anew, and attention stays inside each."""
    overlong: str = _choice("cut", "drop", "error")
    """What becomes of a conversation or completion longer than a block. cut: its end goes or, where that would leave
    little to learn, the beginning of its prompt (see docs/data.md). Plain text goes on in the next block."""
    on_bad_row: str = _choice("error", "skip")
    """What becomes of a row that cannot be used: the run ends and names it, or it is left out, counted and listed."""
    max_bad_share: float = 0.01
    """With `on_bad_row: skip`, the share of bad rows above which nothing is trained."""
    special_tokens: str = _choice("auto", "text", "parse")
    """What a special token's name inside a document is: `text`, or the token (`parse`). auto: the token if half of the
    documents hold some, as text does that a template has rendered already; and one of model.new_tokens always."""
    streaming: bool = False
    """Tokenise while training and store nothing; needs train.max_steps."""
    shuffle_rows: int = 1024
    """With `streaming`, how many blocks are shuffled among each other; 1 keeps the order."""
    chat: ChatConfig = field(default_factory=ChatConfig)
    """Of conversations: the prompt form, and what of them is learnt."""
    code: CodeConfig = field(default_factory=CodeConfig)
    """Of source code: fill-in-the-middle, repositories, and which files are left out."""


@dataclass(frozen=True)
class OptimConfig:
    name: str = _choice("auto", "adamw", "adamw_bf16", "adamw_8bit", "paged_adamw_8bit", "muon", "galore", "apollo", "adafactor")
    """Which optimizer (see `optimizers.OPTIMIZERS` and docs/optimizers.md). auto: AdamW, with stochastic rounding where a
    strategy keeps bf16 master weights on the card."""
    lr: float = 5e-5
    """Peak learning rate."""
    weight_decay: float = 0.01
    """Decoupled weight decay, on matrices only: biases and norms are not decayed."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    eps: float = 1e-8
    rank: int = 128
    """`galore` and `apollo`: the rank that gradients of linear layers are projected to."""
    update_proj_gap: int = 200
    """`galore` and `apollo`: optimizer steps between two projections."""
    max_grad_norm: float = 1.0
    """Global gradient norm to clip at; 0 does not clip."""
    schedule: str = _choice("cosine", "linear", "warmup", "wsd", "constant")
    """After the warm-up: cosine or linear decay, flat for good (`warmup`: DeepSpeed's WarmupLR), flat and then
    a linear decay (`wsd`). `constant` is flat from the first step."""
    warmup_steps: int | None = None
    """Optimizer steps from 0 to the peak; null: none."""
    warmup_ratio: float | None = None
    """The same as a share of all steps."""
    warmup_type: str = _choice("linear", "log")
    """`log` is the ramp that DeepSpeed's WarmupLR has by default (schedule `warmup` only)."""
    min_lr_ratio: float = 0.0
    """Floor of the decay, as a share of `lr`."""
    decay_ratio: float = 0.2
    """Share of all steps in which `wsd` decays."""


@dataclass(frozen=True)
class TrainConfig:
    epochs: float = 1.0
    max_steps: int | None = None
    """Optimizer steps; overrules `epochs`."""
    micro_batch_size: int = 1
    """Blocks per card and forward pass."""
    grad_accum_steps: int | None = None
    """Forward passes per optimizer step; null: 1, or what `global_batch_size` asks for."""
    global_batch_size: int | None = None
    """Blocks per optimizer step over all cards."""
    precision: str = _choice("bf16", "fp16", "fp32")
    loss: str = _choice("auto", "naive", "chunked", "liger")
    """`chunked` never holds the logits of a whole micro-batch: the same loss in a fraction of the memory, for about a
    quarter more time in the head. auto: chunked for vocabularies of 32,000 and more. `liger` does it by the kernels of the
    package liger-kernel, which are held against float64 before the first step: for a GPU, and bf16 or fp32."""
    label_smoothing: float = 0.0
    """Share of each target that is spread evenly over the vocabulary; evaluation is without."""
    log_steps: int = 10
    eval_steps: int | None = 500
    """null: only before the first step and after the last."""
    save_steps: int | None = 500
    """null: no checkpoints; the model folder at the end is written all the same."""
    save_total_limit: int = 2


@dataclass(frozen=True)
class Config:
    name: str = "???"
    seed: int = 42
    output_dir: str = "runs/${name}"
    model: ModelConfig = field(default_factory=ModelConfig)
    method: MethodConfig = field(default_factory=MethodConfig)
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)
    """Of a mixture of experts: what is asked of its routers."""
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    strategy: str = "auto"
    """How it is laid over the hardware: `auto` or a row of `strategies.STRATEGIES`."""
    deepspeed: str | None = None
    """A DeepSpeed file of your own, instead of a strategy's."""
    ranks: int | None = None
    """Processes to start; null: one per visible GPU or, where there is none, three on the CPU (the
    three-card run in miniature)."""
    stages: list[int] | None = None
    """Layers of each stage under a pipeline strategy; null: one stage a rank, balanced by their work. With more ranks than
    stages there are several pipelines, each with its part of the batch."""
    offload_dir: str | None = None
    """Where `zero3_nvme` keeps gradients, master weights and states while it runs, 16 bytes per parameter, each run in a folder of
    its own there; null: in the run's folder."""


KNOWN_SOURCES = ("wikitext-103", "wikitext-103-raw", "wikitext-2", "wikitext-2-raw", "openwebtext", "files", "text", "code",
                 "jsonl", "python-stdlib")  # fmt: skip
# Setting one of a pair in an override replaces the other of the recipe below it.
ALTERNATIVES = [
    ("optim.warmup_steps", "optim.warmup_ratio"),
    ("train.grad_accum_steps", "train.global_batch_size"),
    ("strategy", "deepspeed"),
]
PATH_KEYS = {"output_dir", "model.path", "model.tokenizer", "data.path", "data.cache_dir", "deepspeed", "offload_dir"}

# What the same thing is called elsewhere (Trainer, DeepSpeed, peers), and what removed arguments became.
OTHER_NAMES = {
    "learning_rate": "optim.lr",
    "optimizer": "optim.name",
    "optimizer_type": "optim.name",
    "use_galore": "optim.name (galore)",
    "use_apollo": "optim.name (apollo)",
    "use_adafactor": "optim.name (adafactor)",
    "galore_rank": "optim.rank",
    "apollo_rank": "optim.rank",
    "galore_update_interval": "optim.update_proj_gap",
    "apollo_update_interval": "optim.update_proj_gap",
    "lr_scheduler_type": "optim.schedule",
    "label_smoothing_factor": "train.label_smoothing",
    "lr_scheduler": "optim.schedule",
    "warmup_num_steps": "optim.warmup_steps",
    "warmup": "optim.warmup_steps",
    "adam_beta1": "optim.betas",
    "adam_beta2": "optim.betas",
    "adam_epsilon": "optim.eps",
    "gradient_clipping": "optim.max_grad_norm",
    "nvme_path": "offload_dir",
    "offload_folder": "offload_dir",
    "num_train_epochs": "train.epochs",
    "num_epochs": "train.epochs",
    "per_device_train_batch_size": "train.micro_batch_size",
    "per_gpu_train_batch_size": "train.micro_batch_size",
    "train_micro_batch_size_per_gpu": "train.micro_batch_size",
    "batch_size": "train.micro_batch_size",
    "gradient_accumulation_steps": "train.grad_accum_steps",
    "train_batch_size": "train.global_batch_size",
    "fp16": "train.precision",
    "bf16": "train.precision",
    "logging_steps": "train.log_steps",
    "evaluation_strategy": "train.eval_steps",
    "eval_strategy": "train.eval_steps",
    "save_strategy": "train.save_steps",
    "packing": "data.isolate (rows are always packed; nothing is dropped)",
    "sample_packing": "data.isolate (rows are always packed; nothing is dropped)",
    "template": "data.chat.form",
    "chat_template": "data.chat.form",
    "conversation_template": "data.chat.form",
    "train_on_inputs": "data.chat.learn (prompts are read, not learnt)",
    "mask_history": "data.chat.learn",
    "buffer_size": "data.shuffle_rows",
    "block_size": "data.seq_len",
    "max_seq_length": "data.seq_len",
    "max_length": "data.seq_len",
    "sequence_len": "data.seq_len",
    "cutoff_len": "data.seq_len",
    "dataset": "data.train",
    "finetuning_type": "method.kind",
    "tuner_type": "method.kind",
    "train_type": "method.kind",
    "use_peft": "method.kind",
    "load_in_4bit": "method.kind=qlora",
    "quantization_bit": "method.kind=qlora",
    "lora_r": "method.rank",
    "lora_rank": "method.rank",
    "lora_alpha": "method.alpha",
    "lora_dropout": "method.dropout",
    "use_dora": "method.variant=dora",
    "use_rslora": "method.variant=rslora",
    "lora_target": "method.targets",
    "lora_target_modules": "method.targets",
    "target_modules": "method.targets",
    "lora_target_linear": "method.targets (null is every linear layer)",
    "target_parameters": "method.experts",
    "modules_to_save": "method.train_also",
    "additional_target": "method.train_also",
    "lora_modules_to_save": "method.train_also",
    "freeze_trainable_layers": "method.freeze (which says what is frozen, not what is trained)",
    "freeze_trainable_modules": "method.freeze (which says what is frozen, not what is trained)",
    "unfrozen_parameters": "method.freeze (which says what is frozen, not what is trained)",
    "freeze_parameters": "method.freeze",
    "model_name_or_path": "model.path",
    "base_model": "model.path",
    "model_name": "model.path",
    "tokenizer_name": "model.tokenizer",
    "add_tokens": "model.new_tokens",
    "add_special_tokens": "model.new_tokens",
    "new_special_tokens": "model.new_tokens",
    "additional_special_tokens": "model.new_tokens",
    "extra_special_tokens": "model.new_tokens",
    "tokens": "model.new_tokens",
    "trainable_token_indices": "model.new_tokens",
    "resize_vocab": "model.new_tokens (rows are put on where a model has no spare ones)",
    "resize_token_embeddings": "model.new_tokens (rows are put on where a model has no spare ones)",
    "overwrite_output_dir": "output_dir (an earlier run is never overwritten)",
    "logging_dir": "output_dir",
    "zero_stage": "strategy",
    "router_aux_loss_coef": "experts.balance_loss",
    "moe_aux_loss_coeff": "experts.balance_loss",
    "aux_loss_alpha": "experts.balance_loss",
    "moe_router_bias_update_rate": "experts.bias_update_speed",
    "num_gpus": "ranks",
    "gpus": "ranks",
    "activation_checkpointing": "model.gradient_checkpointing",
    "every_n_layers": "model.checkpoint_every",
    "activation_offloading": "model.offload_activations",
    "cpu_checkpointing": "model.offload_activations",
    "tiled_mlp_num_shards": "model.tiled_mlp",
}


def known_keys(schema: type = Config, prefix: str = "") -> list[str]:
    """Every dotted key of the schema; keys of a source as `data.train.<key>`."""
    keys = []
    for name, kind in get_type_hints(schema).items():
        inner = kind.__args__[0] if getattr(kind, "__origin__", None) is list else kind
        keys.append(f"{prefix}{name}")
        if dataclasses.is_dataclass(inner):
            keys += known_keys(inner, f"{prefix}{name}.")
    return keys


def to_dict(config: Config) -> dict:
    """Plain containers, ready for JSON."""
    return dataclasses.asdict(config)


def to_yaml(config: Config) -> str:
    """A YAML recipe that `load_config` reads back to the same `Config`."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(to_dict(config)))


# ------------------------------------------------------------------------------------- what cannot be together


def contradictions(config: Config) -> Iterator[str]:
    """What no single key shows: values outside their range, and settings that exclude each other."""
    from .optimizers import unknown_options
    from .strategies import STRATEGIES

    sections = [(config.model, "model."), (config.method, "method."), (config.optim, "optim."), (config.train, "train."), (config.data, "data."),
                (config.data.chat, "data.chat.")]  # fmt: skip
    for name, sources in (("train", config.data.train), ("eval", config.data.eval)):
        sections += [(source, f"data.{name}.{i}.") for i, source in enumerate(sources)]
    for owner, prefix in sections:
        for f in dataclasses.fields(owner):
            choices = f.metadata.get("choices")
            value = getattr(owner, f.name)
            if choices and value not in choices:
                near = difflib.get_close_matches(str(value), choices, n=1)
                hint = f" Did you mean {near[0]}?" if near else ""
                yield f"{prefix}{f.name}: got {value!r}; known: {', '.join(choices)}.{hint}"
    optim, train, data = config.optim, config.train, config.data
    if config.strategy not in ("auto", *STRATEGIES):
        near = difflib.get_close_matches(config.strategy, STRATEGIES, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        yield f"strategy: got {config.strategy!r}; known: auto, {', '.join(STRATEGIES)}.{hint}"

    positive = {
        "data.seq_len": data.seq_len, "train.epochs": train.epochs, "train.max_steps": train.max_steps,
        "train.micro_batch_size": train.micro_batch_size, "train.grad_accum_steps": train.grad_accum_steps,
        "train.global_batch_size": train.global_batch_size, "train.log_steps": train.log_steps,
        "train.eval_steps": train.eval_steps, "train.save_steps": train.save_steps,
        "train.save_total_limit": train.save_total_limit, "optim.lr": optim.lr, "optim.eps": optim.eps,
        "experts.bias_update_speed": config.experts.bias_update_speed,
        "model.checkpoint_every": config.model.checkpoint_every, "model.tiled_mlp": config.model.tiled_mlp,
        "optim.rank": optim.rank, "optim.update_proj_gap": optim.update_proj_gap,
        "ranks": config.ranks, "method.rank": config.method.rank, "method.alpha": config.method.alpha,
        "data.shuffle_rows": data.shuffle_rows,
    }  # fmt: skip
    for key, value in positive.items():
        if value is not None and not 0 < value < float("inf"):
            yield f"{key}: got {value}; it must be above 0"
    for key, value, low, high in (
        ("optim.weight_decay", optim.weight_decay, 0, float("inf")),
        ("optim.max_grad_norm", optim.max_grad_norm, 0, float("inf")),
        ("optim.min_lr_ratio", optim.min_lr_ratio, 0, 1),
        ("optim.decay_ratio", optim.decay_ratio, 0, 1),
        ("optim.warmup_ratio", optim.warmup_ratio, 0, 1),
        ("optim.warmup_steps", optim.warmup_steps, 0, float("inf")),
        ("train.label_smoothing", train.label_smoothing, 0, 1),
        ("data.max_bad_share", data.max_bad_share, 0, 1),
        ("data.code.fim_rate", data.code.fim_rate, 0, 1),
        ("data.code.spm_rate", data.code.spm_rate, 0, 1),
    ):
        if value is not None and not low <= value <= high:
            yield f"{key}: got {value}; it must be {'at least 0' if high > 1 else 'between 0 and 1'}"
    yield from _odd_tokens(config.model.new_tokens)
    if config.model.new_tokens and config.method.kind != "full" and train.loss == "liger" and "lm_head" not in config.method.train_also:
        yield ("train.loss=liger knows no single rows of a head, which model.new_tokens trains beside a frozen one; use "
               "train.loss=chunked")  # fmt: skip
    yield from _odd_method(config.method)
    if len(optim.betas) != 2 or not all(0 <= b < 1 for b in optim.betas):
        yield f"optim.betas: got {list(optim.betas)}; two numbers from 0 to below 1, such as [0.9, 0.999]"
    balance = config.experts.balance_loss
    if balance not in (None, "config") and not (isinstance(balance, float) and 0 < balance < float("inf")):
        yield f"experts.balance_loss: got {balance!r}; a number above 0, `config`, or null for none"
    if balance is not None and not config.experts.train_router:
        yield "experts.balance_loss is for routers that learn, and experts.train_router is false; keep one"
    if config.experts.bias_update_speed is not None and config.method.kind != "full":
        yield (f"experts.bias_update_speed changes the model itself, which method.kind={config.method.kind} leaves as it is and does "
               "not save; set it to null")  # fmt: skip
    yield from unknown_options(optim)
    if data.seq_len == 1:
        yield "data.seq_len: got 1; a block of one token has no next token to predict"

    if optim.warmup_steps is not None and optim.warmup_ratio is not None:
        yield "optim.warmup_steps and optim.warmup_ratio are both set; keep one"
    if train.grad_accum_steps is not None and train.global_batch_size is not None:
        yield "train.grad_accum_steps and train.global_batch_size are both set; keep one, the other follows"
    if config.strategy != "auto" and config.deepspeed is not None:
        yield (f"strategy ({config.strategy}) and deepspeed ({config.deepspeed}) are both set; the file is a strategy "
               "of its own, keep one")  # fmt: skip
    if optim.schedule == "constant" and (optim.warmup_steps or optim.warmup_ratio):
        yield "optim.schedule is constant, which has no warm-up; set optim.warmup_steps=0 or optim.schedule=warmup"
    if optim.min_lr_ratio and optim.schedule in ("constant", "warmup"):
        yield f"optim.min_lr_ratio is {optim.min_lr_ratio}, but schedule {optim.schedule} never comes down; set it to 0"
    if optim.warmup_type == "log" and optim.schedule != "warmup":
        yield f"optim.warmup_type log belongs to schedule warmup (DeepSpeed's WarmupLR), got {optim.schedule}"

    if not 0 <= config.seed < 2**32:
        yield f"seed: got {config.seed}; a whole number from 0 to {2**32 - 1}"
    if not config.name.strip() or "/" in config.name:
        yield f"name: got {config.name!r}; it names the run's folder, so it must not be empty or hold a slash"
    if optim.schedule == "wsd" and (optim.warmup_ratio or 0) + optim.decay_ratio > 1:
        yield f"optim.warmup_ratio {optim.warmup_ratio} and optim.decay_ratio {optim.decay_ratio} are more than the whole run"

    if not data.train:
        yield "data.train: no source to train on"
    if not config.model.gradient_checkpointing:
        for key, value, usual in (("checkpoint_every", config.model.checkpoint_every, 1),
                                  ("offload_activations", config.model.offload_activations, False)):  # fmt: skip
            if value != usual:
                yield f"model.{key} is {value}, and model.gradient_checkpointing is false: it is about recomputed layers; set one of them"
    if data.streaming and train.max_steps is None:
        yield "data.streaming needs train.max_steps: how much there is, is known only at its end"
    for licence in data.code.licenses or ():
        if "/" in licence or not licence.strip():
            yield f"data.code.licenses: got {licence!r}; SPDX names such as MIT, or permissive"
    yield from _leaks(data)
    for name, sources in (("train", data.train), ("eval", data.eval)):
        for i, source in enumerate(sources):
            here = f"data.{name}.{i}"
            if not 0 < source.weight < float("inf"):
                yield f"{here}.weight: got {source.weight}; it must be above 0"
            if source.source not in KNOWN_SOURCES and not is_hub_id(source.source):
                near = difflib.get_close_matches(source.source, KNOWN_SOURCES, n=1)
                hint = f"Did you mean {near[0]}?" if near else f"Known: {', '.join(KNOWN_SOURCES)}."
                yield f"{here}.source: got {source.source!r}. {hint}"
            if source.split not in (None, "train", "validation", "test"):
                yield f"{here}.split: got {source.split!r}; known: train, validation, test"
            if not 0 < source.holdout < 1:
                yield f"{here}.holdout: got {source.holdout}; a share between 0 and 1, such as 0.01"
            if source.max_documents is not None and source.max_documents < 1:
                yield f"{here}.max_documents: got {source.max_documents}; it must be above 0"


TRAINED_WHOLE = ("embed_tokens", "lm_head")


def _odd_tokens(names: list[str]) -> Iterator[str]:
    if blank := [name for name in names if not name.strip()]:
        yield f"model.new_tokens: got {', '.join(map(repr, blank))}; a token has a name, with more in it than white space"
    elif twice := sorted({name for name in names if names.count(name) > 1}):
        yield f"model.new_tokens: {', '.join(map(repr, twice))} is there more than once; name each token once"


def _odd_method(method: MethodConfig) -> Iterator[str]:
    if not 0 <= method.dropout < 1:
        yield f"method.dropout: got {method.dropout}; it must be at least 0 and below 1"
    unknown = [name for name in method.train_also if name not in TRAINED_WHOLE]
    if unknown:
        yield f"method.train_also: got {', '.join(unknown)}; known: {', '.join(TRAINED_WHOLE)}"
    if method.targets is not None and not method.targets and not method.experts:
        yield "method.targets: got an empty list; null adapts every linear layer of attention and feed-forward"
    if method.kind == "full":
        default = MethodConfig()
        for key in ("alpha", "dropout", "variant", "targets", "experts", "train_also"):
            if getattr(method, key) != getattr(default, key):
                yield f"method.{key} is set, and method.kind=full has no adapter; use method.kind=lora or leave it out"
    elif method.freeze:
        yield f"method.freeze: {method.kind} freezes every weight of the model as it is; it belongs to method.kind=full"
    if method.kind == "qlora" and method.experts:
        yield "method.experts: the fused experts are not quantised, so qlora does not adapt them; use method.kind=lora"
    if method.experts and method.variant == "dora":
        yield "method.experts: peft's adapters of fused experts know no DoRA; use method.variant=lora or rslora"
    if method.experts and method.dropout:
        yield "method.experts: peft's adapters of fused experts know no dropout; set method.dropout=0"


def is_hub_id(source: str) -> bool:
    """Whether a source's name is that of a data set on the hub: `owner/name`."""
    return source not in KNOWN_SOURCES and bool(re.fullmatch(r"[\w.-]+/[\w.-]+", source)) and source[0] not in "./~"


def _leaks(data: DataConfig) -> Iterator[str]:
    """Held-out documents that are also trained on: the one way to a wonderful perplexity."""
    for i, train in enumerate(data.train):
        for j, held_out in enumerate(data.eval):
            same = (train.source, train.path or data.path) == (held_out.source, held_out.path or data.path)
            if not same or train.include != held_out.include or train.exclude != held_out.exclude:
                continue
            here = f"data.train.{i} and data.eval.{j} are both {train.source}"
            if train.split is None or held_out.split is None or train.split == held_out.split:
                yield (f"{here} with split {train.split or 'null (everything)'} and {held_out.split or 'null (everything)'}: "
                       "what is held out would be trained on; use split: train and split: validation")  # fmt: skip
            elif not train.source.startswith("wikitext") and train.holdout != held_out.holdout:
                yield (f"{here} with holdout {train.holdout} and {held_out.holdout}: the larger share would be trained on in "
                       "part; give both the same")  # fmt: skip
