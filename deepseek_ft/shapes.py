"""What a model is made of, from the numbers in its config.json: no torch, no download."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from .errors import ConfigError

# Random-weight models, as config.json would say it. The `tiny-*` are for tests and quick starts.
_TINY = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 6,
         "num_key_value_heads": 6, "vocab_size": 4096, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6}  # fmt: skip
_TINY_MLA_MOE = {**_TINY, "kv_lora_rank": 32, "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
                 "v_head_dim": 16, "head_dim": 16, "n_routed_experts": 6, "num_experts_per_tok": 2,
                 "n_shared_experts": 1, "moe_intermediate_size": 96, "first_k_dense_replace": 1, "n_group": 1,
                 "topk_group": 1}  # fmt: skip
PRESETS: dict[str, dict[str, Any]] = {
    "tiny-llama": {"model_type": "llama", **_TINY},
    "tiny-qwen2": {"model_type": "qwen2", **_TINY, "num_key_value_heads": 2},
    "tiny-qwen3": {"model_type": "qwen3", **_TINY, "num_key_value_heads": 2, "head_dim": 16},
    "tiny-v2": {"model_type": "deepseek_v2", **_TINY_MLA_MOE},
    "tiny-v3": {"model_type": "deepseek_v3", **_TINY_MLA_MOE, "q_lora_rank": 48, "norm_topk_prob": True},
    "mini-v3": {
        "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 448, "intermediate_size": 1792,
        "num_hidden_layers": 12, "num_attention_heads": 8, "num_key_value_heads": 8, "q_lora_rank": 256,
        "kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64, "head_dim": 32,
        "n_routed_experts": 16, "num_experts_per_tok": 4, "n_shared_experts": 1, "moe_intermediate_size": 224,
        "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
    },
}  # fmt: skip


def preset_config(name: str, tokens: int | None = None) -> dict[str, Any]:
    """A preset's config; with another vocabulary when the tokenizer's `tokens` do not fit into its own, or hardly fill it."""
    config = dict(PRESETS[name])
    if tokens is not None and not tokens <= config["vocab_size"] <= 1.1 * tokens:
        config["vocab_size"] = math.ceil(tokens / 64) * 64
    return config


def _llama(
    h: int, layers: int, heads: int, kv: int, ff: int, vocab: int, positions: int, **more: Any
) -> dict[str, Any]:
    return {"model_type": "llama", "hidden_size": h, "num_hidden_layers": layers, "num_attention_heads": heads,
            "num_key_value_heads": kv, "intermediate_size": ff, "vocab_size": vocab, "max_position_embeddings": positions,
            "torch_dtype": "bfloat16", **more}  # fmt: skip


_CODER_67 = _llama(4096, 32, 32, 32, 11008, 32256, 16384)
_LLM_7 = _llama(4096, 30, 32, 32, 11008, 102400, 4096)
_V2_LITE = {"model_type": "deepseek_v2", "hidden_size": 2048, "num_hidden_layers": 27, "num_attention_heads": 16,
            "num_key_value_heads": 16, "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_routed_experts": 64,
            "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1, "kv_lora_rank": 512,
            "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 102400,
            "max_position_embeddings": 163840, "aux_loss_alpha": 0.001, "torch_dtype": "bfloat16"}  # fmt: skip
_V3 = {"model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
       "num_key_value_heads": 128, "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256,
       "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3, "kv_lora_rank": 512, "q_lora_rank": 1536,
       "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 129280,
       "max_position_embeddings": 163840, "torch_dtype": "bfloat16"}  # fmt: skip


def _qwen2(h: int, layers: int, heads: int, kv: int, ff: int, vocab: int) -> dict[str, Any]:
    return _llama(h, layers, heads, kv, ff, vocab, 131072) | {"model_type": "qwen2"}


# The numbers of the published config.json files, so that a hub id is planned without a download.
PUBLISHED: dict[str, dict[str, Any]] = {
    f"deepseek-ai/{name}": config
    for names, config in {
        "deepseek-coder-1.3b-base deepseek-coder-1.3b-instruct": _llama(2048, 24, 16, 16, 5504, 32256, 16384),
        "deepseek-coder-6.7b-base deepseek-coder-6.7b-instruct": _CODER_67,
        "deepseek-coder-33b-base deepseek-coder-33b-instruct": _llama(7168, 62, 56, 8, 19200, 32256, 16384),
        "deepseek-coder-7b-base-v1.5 deepseek-coder-7b-instruct-v1.5 deepseek-llm-7b-base deepseek-llm-7b-chat "
        "deepseek-math-7b-base deepseek-math-7b-instruct deepseek-math-7b-rl": _LLM_7,
        "DeepSeek-V2-Lite DeepSeek-V2-Lite-Chat DeepSeek-Coder-V2-Lite-Base DeepSeek-Coder-V2-Lite-Instruct": _V2_LITE,
        "DeepSeek-R1-Distill-Qwen-1.5B": _qwen2(1536, 28, 12, 2, 8960, 151936),
        "DeepSeek-R1-Distill-Qwen-7B": _qwen2(3584, 28, 28, 4, 18944, 152064),
        "DeepSeek-R1-Distill-Qwen-14B": _qwen2(5120, 48, 40, 8, 13824, 152064),
        "DeepSeek-R1-Distill-Llama-8B": _llama(4096, 32, 32, 8, 14336, 128256, 131072),
        "DeepSeek-R1-0528-Qwen3-8B": _llama(4096, 36, 32, 8, 12288, 151936, 131072, head_dim=128) | {"model_type": "qwen3"},
        "DeepSeek-V3 DeepSeek-V3-Base DeepSeek-V3.1 DeepSeek-R1": _V3,
    }.items()
    for name in names.split()
}  # fmt: skip


@dataclass(frozen=True)
class LayerKind:
    """Layers that are alike: how many, and their parameters."""

    count: int
    weights: Mapping[str, tuple[int, ...]]
    """Name -> shape, as transformers names them below `model.layers.N.`; a linear layer is (out, in)."""

    @cached_property
    def parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.weights.values())


@dataclass(frozen=True)
class ModelShape:
    model_type: str
    hidden_size: int
    vocab_size: int
    tied: bool
    """The head is the embedding."""
    heads: int
    kv_heads: int
    qk_head_dim: int
    """Width of a head's query and key; `v_head_dim` is its value's. Under latent attention they differ."""
    v_head_dim: int
    latent: bool
    """Multi-head latent attention (MLA, arXiv:2405.04434 §2.1): keys and values come from one narrow latent."""
    rope_head_dim: int
    """The part of a head that carries positions: all of it, but for latent attention."""
    experts: int
    experts_per_token: int
    kinds: tuple[LayerKind, ...]
    """In order; of a mixture of experts the dense layers come first."""
    max_positions: int
    dtype: str | None
    """Of the checkpoint, when the config says so."""
    balance_loss: float | None = None
    """Coefficient of the routers' balance loss, when the config names one."""

    @cached_property
    def layers(self) -> int:
        return sum(kind.count for kind in self.kinds)

    @property
    def embedding_parameters(self) -> int:
        """Embedding and head together (once when tied)."""
        return self.vocab_size * self.hidden_size * (1 if self.tied else 2)

    @cached_property
    def parameters(self) -> int:
        return sum(kind.count * kind.parameters for kind in self.kinds) + self.hidden_size + self.embedding_parameters

    @cached_property
    def active_parameters(self) -> int:
        """Of these, what one token passes through: of a mixture of experts the chosen and the shared ones."""
        idle = sum(
            kind.count * math.prod(shape) * (1 - self.experts_per_token / self.experts)
            for kind in self.kinds
            for name, shape in kind.weights.items()
            if name in EXPERTS
        )
        return self.parameters - round(idle)

    @property
    def attention_width(self) -> int:
        """Heads times the mean of query/key and value width: what attention costs per pair of positions."""
        return self.heads * (self.qk_head_dim + self.v_head_dim) // 2

    def flops_per_token(self, seq_len: int, checkpointing: bool, trained: float = 1.0, untouched: float = 0.0) -> float:
        """Training FLOPs per token: 2 per weight and pass, one pass forward, two backward, one more when recomputed.

        Attention adds 2 x seq_len x width per layer and pass under a causal mask (a token sees half the sequence on
        average, in two products of 2 FLOPs). The head is never recomputed, and an embedding is looked up, not multiplied.

        Args:
            trained: share of the weights whose gradients are computed; adapters leave out almost a whole pass.
            untouched: share of the layers through which no gradient passes: those are computed once.
        """
        head = self.vocab_size * self.hidden_size
        body = self.active_parameters - self.embedding_parameters
        attention = 2 * self.layers * self.attention_width * seq_len
        passes = (3 if checkpointing else 2) * (1 - untouched) + untouched
        return passes * (2 * body + attention) + trained * 2 * body + (1 - untouched) * attention + (2 + trained) * 2 * head

    def names(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Every parameter's name in transformers, in the model's order, with its shape; a tied head is the embedding."""
        yield "model.embed_tokens.weight", (self.vocab_size, self.hidden_size)
        layer = 0
        for kind in self.kinds:
            for _ in range(kind.count):
                yield from ((f"model.layers.{layer}.{name}", shape) for name, shape in kind.weights.items())
                layer += 1
        yield "model.norm.weight", (self.hidden_size,)
        if not self.tied:
            yield "lm_head.weight", (self.vocab_size, self.hidden_size)

    def part(self, degree: int) -> ModelShape:
        """What one of `degree` cards holds under tensor parallelism: heads and feed-forward columns split, the rest whole, and with it
        routed experts, which are fused weights that AutoTP does not know.
        """

        def cut(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
            whole = ("norm", "kv_a_proj", "q_a_proj", "mlp.gate.")
            if name in EXPERTS or any(word in name for word in whole):
                return shape
            axis = {"o_proj.weight": 1, "down_proj.weight": 1}
            i = next((a for end, a in axis.items() if name.endswith(end)), 0)
            if name.endswith(("o_proj.bias", "down_proj.bias")):
                return shape
            return (*shape[:i], shape[i] // degree, *shape[i + 1 :])

        kinds = tuple(LayerKind(k.count, {n: cut(n, s) for n, s in k.weights.items()}) for k in self.kinds)
        return dataclasses.replace(self, heads=self.heads // degree, kv_heads=self.kv_heads // degree, kinds=kinds)

    def stages(self, count: int, seq_len: int) -> list[int]:
        """Layers of each pipeline stage: the first of `splits`; empty when there are fewer layers than stages."""
        return next(iter(self.splits(count, seq_len)), [])

    def only(self, layers: range) -> ModelShape:
        """With these of its layers."""
        kinds, start = [], 0
        for kind in self.kinds:
            count = len(range(max(start, layers.start), min(start + kind.count, layers.stop)))
            kinds += [dataclasses.replace(kind, count=count)] if count else []
            start += kind.count
        return dataclasses.replace(self, kinds=tuple(kinds))

    def splits(self, count: int, seq_len: int) -> list[list[int]]:
        """Ways to cut the layers into so many stages, the one whose slowest stage is the fastest first, the head's work counted;
        with the near ones behind it, which may fit where that does not: the first stage also holds the embedding.

        Among equals the first stage is the shortest: it has the most micro-batches at once.
        """
        layer = 4 * 2 * (self.active_parameters - self.embedding_parameters) / self.layers
        layer += 4 * 2 * self.attention_width * seq_len
        head = 6 * self.vocab_size * self.hidden_size / layer
        found = []
        share = (self.layers + head) / count
        for first in {max(1, round(share) + d) for d in range(-4, 3)} if count > 1 else {0}:
            for last in {max(1, round(share - head) + d) for d in range(-4, 4)} if count > 1 else {self.layers}:
                middle, rest = count - 2, self.layers - first - last
                if rest < max(0, middle) or (middle < 1 and rest != 0):
                    continue
                between = [rest // middle + (i >= middle - rest % middle) for i in range(middle)] if middle > 0 else []
                sizes = [first, *between, last] if count > 1 else [last]
                found.append((max([*sizes[:-1], last + head]), first, sizes))
        return [sizes for _, _, sizes in sorted(found)]


EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
"""The two fused tensors that hold all routed experts of a layer."""


def _attention(c: Mapping[str, Any], h: int, heads: int) -> dict[str, tuple[int, ...]]:
    if c.get("kv_lora_rank"):
        nope, rope, v, kv_rank = (c[k] for k in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank"))
        rank = c.get("q_lora_rank")
        query = {
            "q_a_proj.weight": (rank, h),
            "q_a_layernorm.weight": (rank,),
            "q_b_proj.weight": (heads * (nope + rope), rank),
        }
        query = query if rank else {"q_proj.weight": (heads * (nope + rope), h)}
        return query | {
            "kv_a_proj_with_mqa.weight": (kv_rank + rope, h),
            "kv_a_layernorm.weight": (kv_rank,),
            "kv_b_proj.weight": (heads * (nope + v), kv_rank),
            "o_proj.weight": (h, heads * v),
        }
    head_dim = c.get("head_dim") or h // heads
    q, kv = heads * head_dim, (c.get("num_key_value_heads") or heads) * head_dim
    weights: dict[str, tuple[int, ...]] = {
        "q_proj.weight": (q, h), "k_proj.weight": (kv, h), "v_proj.weight": (kv, h), "o_proj.weight": (h, q)
    }  # fmt: skip
    biased = c.get("attention_bias") and c["model_type"] in ("llama", "qwen3")
    if biased or c["model_type"] == "qwen2":
        weights |= {"q_proj.bias": (q,), "k_proj.bias": (kv,), "v_proj.bias": (kv,)}
    if biased:
        weights["o_proj.bias"] = (h,)
    if c["model_type"] == "qwen3":
        weights |= {"q_norm.weight": (head_dim,), "k_norm.weight": (head_dim,)}
    return weights


def _mlp(h: int, ff: int, bias: bool = False) -> dict[str, tuple[int, ...]]:
    weights: dict[str, tuple[int, ...]] = {
        "gate_proj.weight": (ff, h), "up_proj.weight": (ff, h), "down_proj.weight": (h, ff)
    }  # fmt: skip
    return weights | ({"gate_proj.bias": (ff,), "up_proj.bias": (ff,), "down_proj.bias": (h,)} if bias else {})


def _experts(c: Mapping[str, Any], h: int) -> dict[str, tuple[int, ...]]:
    n, ff, shared = c["n_routed_experts"], c["moe_intermediate_size"], c.get("n_shared_experts") or 0
    weights: dict[str, tuple[int, ...]] = {
        "gate.weight": (n, h), "experts.gate_up_proj": (n, 2 * ff, h), "experts.down_proj": (n, h, ff)
    }  # fmt: skip
    return weights | {
        f"shared_experts.{name}": shape for name, shape in (_mlp(h, ff * shared) if shared else {}).items()
    }


def _kinds(c: Mapping[str, Any], h: int, heads: int, layers: int) -> tuple[LayerKind, ...]:
    both = {"input_layernorm.weight": (h,), "post_attention_layernorm.weight": (h,)}
    both |= {f"self_attn.{name}": shape for name, shape in _attention(c, h, heads).items()}
    dense = min(c.get("first_k_dense_replace") or 0, layers) if c.get("n_routed_experts") else layers
    bias = bool(c.get("mlp_bias")) and c["model_type"] == "llama"
    kinds = []
    if dense:
        mlp = _mlp(h, c["intermediate_size"], bias)
        kinds.append(LayerKind(dense, both | {f"mlp.{name}": shape for name, shape in mlp.items()}))
    if layers > dense:
        kinds.append(LayerKind(layers - dense, both | {f"mlp.{name}": s for name, s in _experts(c, h).items()}))
    return tuple(kinds)


_MAY_BE_ZERO = {"n_routed_experts", "n_shared_experts", "first_k_dense_replace", "q_lora_rank", "kv_lora_rank"}
_COUNTS = _MAY_BE_ZERO | {"hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
                          "vocab_size", "head_dim", "moe_intermediate_size", "num_experts_per_tok", "qk_nope_head_dim",
                          "qk_rope_head_dim", "v_head_dim", "max_position_embeddings"}  # fmt: skip
SUPPORTED = ("llama", "qwen2", "qwen3", "deepseek_v2", "deepseek_v3")


def shape_from_config(c: Mapping[str, Any], where: str = "config.json") -> ModelShape:
    """`ModelShape` of a transformers config.

    Raises:
        ConfigError: an architecture that this library does not know, or a key that it needs is missing.
    """
    if not isinstance(c, Mapping):
        raise ConfigError(f"{where} holds a {type(c).__name__}; a model's config is one JSON object")
    kind = c.get("model_type")
    if kind not in SUPPORTED:
        raise ConfigError(f"{where}: model_type is {kind!r}; known: {', '.join(SUPPORTED)}")
    for key in _COUNTS:
        value = c.get(key)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            if not (value == 0 and key in _MAY_BE_ZERO):
                raise ConfigError(f"{where}: {key} is {value!r}; it must be a whole number above 0")
    latent_keys = ("kv_lora_rank", "q_lora_rank", "n_routed_experts", "n_shared_experts")  # mean nothing to the others
    c = {k: v for k, v in c.items() if v is not None and (kind.startswith("deepseek") or k not in latent_keys)}
    try:
        h, heads, layers, vocab = (
            c[k] for k in ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
        )
        kinds = _kinds(c, h, heads, layers)
        latent = bool(c.get("kv_lora_rank"))
        head_dim = c.get("head_dim") or h // heads
        qk = c["qk_nope_head_dim"] + c["qk_rope_head_dim"] if latent else head_dim
        routed, top_k = c.get("n_routed_experts") or 0, c["num_experts_per_tok"] if c.get("n_routed_experts") else 0
    except KeyError as error:
        raise ConfigError(f"{where}: {error.args[0]} is missing, which a {kind} model needs") from None
    kv_heads = heads if latent else c.get("num_key_value_heads") or heads
    if heads % kv_heads or head_dim < 1 or top_k > routed:
        raise ConfigError(f"{where}: {heads} heads of {h} features cannot share {kv_heads} key heads" if top_k <= routed else
                          f"{where}: a token cannot choose {top_k} of {routed} experts")  # fmt: skip
    return ModelShape(
        model_type=kind,
        hidden_size=h,
        vocab_size=vocab,
        tied=bool(c.get("tie_word_embeddings", False)),
        heads=heads,
        kv_heads=kv_heads,
        qk_head_dim=qk,
        v_head_dim=c["v_head_dim"] if latent else head_dim,
        latent=latent,
        rope_head_dim=c["qk_rope_head_dim"] if latent else head_dim,
        experts=routed,
        experts_per_token=top_k,
        kinds=kinds,
        max_positions=c.get("max_position_embeddings") or 0,
        dtype=c.get("dtype") or c.get("torch_dtype"),
        balance_loss=c.get("router_aux_loss_coef") or c.get("aux_loss_alpha"),
    )


def _count_tokens(tokenizer: str | None) -> int | None:
    """Of `train:<size>` or a folder with tokenizer.json; None when that cannot be said yet."""
    if tokenizer is None:
        return None
    if tokenizer.startswith("train:"):
        size = tokenizer.removeprefix("train:")
        return int(size) if size.isdigit() else None
    try:
        content = json.loads(Path(tokenizer, "tokenizer.json").read_text(encoding="utf-8"))
        vocabulary = content["model"]["vocab"]
        added = {token["id"] for token in content.get("added_tokens", ())}
        return len(set(vocabulary.values()) | added) if isinstance(vocabulary, dict) else len(vocabulary)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _hub_cache(model_id: str) -> Path | None:
    """Folder of a hub model's newest revision in the local cache, when its config.json is there."""
    home = Path(
        os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "huggingface")
    )
    repository = (
        Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser() / f"models--{model_id.replace('/', '--')}"
    )
    try:
        revision = (repository / "refs" / "main").read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return None
    folder = repository / "snapshots" / revision
    return folder if (folder / "config.json").is_file() else None


def fetch_config(model_path: str) -> bool:
    """Bring a hub model's config.json, a kilobyte, into the local cache, so that it can be planned; whether that went well."""
    try:
        from huggingface_hub import hf_hub_download

        hf_hub_download(model_path, "config.json", etag_timeout=3)
    except Exception:  # offline, or no such model: whoever needs the weights says it better
        return False
    return True


def find_shape(model_path: str, tokenizer: str | None = None, new_tokens: int = 0) -> ModelShape | None:
    """Shape of a preset, a local folder, a hub model in the local cache or a published DeepSeek model; else None.

    Args:
        tokenizer: `model.tokenizer`, which may give a preset another vocabulary.
        new_tokens: that many more ids, which may need more rows; not known of a tokenizer that is not here.

    Raises:
        ConfigError: an unknown preset, or a folder without a usable config.json.
    """
    if new_tokens:
        shape = find_shape(model_path, tokenizer)
        tokens = _count_tokens(tokenizer or model_path)
        if shape is None or tokens is None or tokens + new_tokens <= shape.vocab_size:
            return shape
        return dataclasses.replace(shape, vocab_size=tokens + new_tokens)
    if model_path.startswith("preset:"):
        name = model_path.removeprefix("preset:")
        if name not in PRESETS:
            raise ConfigError(f"model.path: no preset {name!r}; known: {', '.join(PRESETS)}")
        return shape_from_config(preset_config(name, _count_tokens(tokenizer)), model_path)
    folder = Path(model_path)
    if not folder.exists():
        looks_local = model_path.startswith((".", "/", "~")) or model_path.count("/") != 1
        if looks_local:
            raise ConfigError(f"model.path: there is no folder {model_path!r}, and a hub id has the form owner/name")
        cached = _hub_cache(model_path)
        if cached is None:
            return shape_from_config(PUBLISHED[model_path], model_path) if model_path in PUBLISHED else None
        folder = cached
    file = folder / "config.json"
    if not file.is_file():
        raise ConfigError(f"model.path: {folder} holds no config.json; it is not a model folder")
    try:
        return shape_from_config(json.loads(file.read_text(encoding="utf-8-sig")), str(file))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read as JSON: {error}") from None
