"""Documents that share a block do not see each other: in training and evaluation, in every architecture, under every
attention; and so a packed batch has the loss of its conversations one by one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers.modeling_flash_attention_utils as flash_utils
from conftest import corpus_of
from test_blocks import byte_encoder
from transformers import AutoConfig, AutoModelForCausalLM

from deepseek_ft.data.blocks import Blocks, collate, load_blocks
from deepseek_ft.data.formats import Completion
from deepseek_ft.evaluation import block_nll
from deepseek_ft.losses import Head
from deepseek_ft.shapes import PRESETS

ARCHITECTURES = [name for name in PRESETS if name.startswith("tiny")]
ATTENTIONS = ["sdpa", "eager", "flash_attention_2"]
ENCODER = byte_encoder()


def reference_flash(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale=None, causal=True, **_):
    """What flash-attn's kernel for documents of several lengths computes, (N, heads, d), in plain torch."""
    assert cu_seqlens_q.tolist() == cu_seqlens_k.tolist() and cu_seqlens_q[0] == 0 and cu_seqlens_q[-1] == len(q)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    parts = []
    for a, b in zip(cu_seqlens_q[:-1].tolist(), cu_seqlens_q[1:].tolist(), strict=True):
        one = [x[a:b].transpose(0, 1)[None] for x in (q, k, v)]
        out = torch.nn.functional.scaled_dot_product_attention(*one, is_causal=causal, scale=softmax_scale)
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)


def whole_flash(q, k, v, **kwargs):
    b, t = q.shape[:2]
    ends = torch.arange(b + 1) * t
    flat = [x.reshape(b * t, *x.shape[2:]) for x in (q, k, v)]
    return reference_flash(*flat, ends, ends, **kwargs).view(b, t, q.shape[2], -1)


@pytest.fixture(autouse=True)
def flash_without_a_gpu(monkeypatch):
    """transformers' own way to flash attention with a kernel that runs here; the real one needs a GPU."""

    def kwargs(softmax_scale=None, is_causal=True, **_):
        return {"softmax_scale": softmax_scale, "causal": is_causal}

    monkeypatch.setattr(flash_utils, "lazy_import_flash_attention",
                        lambda *_: ((whole_flash, reference_flash, None, None, None), (kwargs, None)))  # fmt: skip


def make_model(name: str, attention: str):
    torch.manual_seed(0)
    shape = dict(PRESETS[name]) | {"vocab_size": 320}
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(shape.pop("model_type"), **shape), dtype=torch.float32
    )
    model.config._attn_implementation = attention
    model.config.use_cache = False
    return model


def batch_of(blocks: Blocks, model) -> dict:
    return collate(list(blocks), lengths=model.config._attn_implementation.startswith("flash"))


def words(n: int, seed: int) -> str:
    return "".join(chr(97 + i) for i in np.random.default_rng(seed).integers(0, 26, n))


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_changing_one_document_changes_no_others_logits(name, attention, training, tmp_path):
    sizes = [9, 14, 5, 20, 3, 8]  # with their ends 65 tokens: two rows, one document over the seam, padding at the end
    documents = [words(n, i) for i, n in enumerate(sizes)]
    other = [words(n, 99) if i == 1 else d for i, (n, d) in enumerate(zip(sizes, documents, strict=True))]
    model = make_model(name, attention).train(training)
    if training:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    def logits(docs: list[str], isolate: bool) -> torch.Tensor:
        blocks = load_blocks([corpus_of(docs, str(docs))], [1.0], ENCODER, 36, tmp_path, isolate=isolate)
        batch = batch_of(blocks, model)
        assert batch["input_ids"].shape == (2, 36)
        batch.pop("labels")
        return model(**batch, use_cache=False).logits.detach().reshape(72, -1)

    changed = slice(10, 25)  # the second document and its end
    apart = (logits(documents, True) - logits(other, True)).abs().amax(dim=1)
    assert apart[changed].max() > 1e-2
    assert torch.cat([apart[:10], apart[25:]]).max() < 1e-6
    joined = (logits(documents, False) - logits(other, False)).abs().amax(dim=1)
    assert joined[25:36].min() > 1e-4  # so that this test can fail: joined documents do see each other


CONVERSATIONS = [("ask me", "an answer"), ("q", "a"), ("a longer question", "and an answer that is longer still"), ("", "only this"),
                 ("hello?", "yes"), ("one more question", "no")]  # fmt: skip


@pytest.mark.parametrize("loss", ["naive", "chunked"])
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_packed_batch_has_the_loss_and_gradient_of_its_conversations_one_by_one(name, attention, loss, tmp_path):
    examples = [Completion(*pair) for pair in CONVERSATIONS]
    blocks = load_blocks([corpus_of(examples, "conversations")], [1.0], ENCODER, 70, tmp_path)
    model = make_model(name, attention).train()
    if loss == "chunked":
        Head(model).use_for_training()
    batch = batch_of(blocks, model)
    targets = int((batch["labels"] != -100).sum())
    assert len(blocks) == 2 and targets == blocks.count_targets() == sum(len(c) + 1 - (not p) for p, c in CONVERSATIONS)
    packed = model(**batch, num_items_in_batch=torch.tensor(targets)).loss
    packed.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()

    single, reference = 0.0, make_model(name, "eager").train()
    for prompt, completion in CONVERSATIONS:
        ids = torch.tensor(
            [[*ENCODER.strings([prompt])[0].tolist(), *ENCODER.strings([completion])[0].tolist(), ENCODER.eos]]
        )
        labels = ids.clone()
        labels[0, : max(1, len(prompt))] = -100
        one = reference(input_ids=ids, labels=labels).loss * (labels != -100).sum() / targets
        one.backward()
        single += one.item()
    assert packed.item() == pytest.approx(single, abs=1e-5)
    assert len(gradients) > 10
    for n, p in reference.named_parameters():
        if n in gradients:
            torch.testing.assert_close(gradients[n], p.grad, atol=1e-5, rtol=1e-3, msg=n)


class Wrapped(torch.nn.Module):
    """As DeepSpeed's engine stands around a model: with a `config` that is another's."""

    config = {"zero_optimization": {"stage": 3}}

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_evaluation_scores_each_document_as_if_it_were_alone(name, attention, tmp_path):
    examples = [Completion(*pair) for pair in CONVERSATIONS]
    packed = load_blocks([corpus_of(examples, "c")], [1.0], ENCODER, 70, tmp_path)
    model = make_model(name, attention)
    alone = [load_blocks([corpus_of([e], str(e))], [1.0], ENCODER, 70, tmp_path) for e in examples]
    device = torch.device("cpu")
    expected = sum(block_nll(model, blocks, 1, device).sum() for blocks in alone)
    assert block_nll(model, packed, 2, device).sum() == pytest.approx(expected, rel=1e-5)
    assert block_nll(Wrapped(model), packed, 2, device).sum() == pytest.approx(expected, rel=1e-5)
