"""The loss without logits against the usual one, and against double precision."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from deepseek_ft.losses import IGNORED, head_loss, use_chunked_loss
from deepseek_ft.shapes import PRESETS


def sample(dtype, rows=96, width=64, vocab=1000):
    torch.manual_seed(0)
    hidden, weight = torch.randn(rows, width), torch.randn(vocab, width) * 0.2
    labels = torch.randint(0, vocab, (rows,))
    labels[::5] = IGNORED
    return hidden.to(dtype), weight.to(dtype), labels


def gradients(loss, hidden, weight, labels):
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    value = loss(hidden, weight, labels)
    value.backward()
    return value.item(), hidden.grad.double(), weight.grad.double()


def usual(hidden, weight, labels):
    return torch.nn.functional.cross_entropy((hidden @ weight.t()).float(), labels, ignore_index=IGNORED)


@pytest.mark.parametrize("elements", [96 * 300, 96 * 999, 2**25], ids=["many pieces", "a last piece of one", "one piece"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_and_gradients_are_those_of_double_precision(dtype, elements):
    exact = gradients(lambda h, w, y: torch.nn.functional.cross_entropy(h @ w.t(), y, ignore_index=IGNORED),
                      *(t.double() if t.is_floating_point() else t for t in sample(dtype)))  # fmt: skip
    naive = gradients(usual, *sample(dtype))
    ours = gradients(lambda h, w, y: head_loss(h, w, y, elements=elements), *sample(dtype))
    assert ours[0] == pytest.approx(exact[0], abs=1e-5 if dtype is torch.float32 else 2e-3)
    for mine, theirs, true in zip(ours[1:], naive[1:], exact[1:], strict=True):
        assert (mine - true).norm() <= 1.25 * (theirs - true).norm() + 1e-6 * true.norm()


def test_the_denominator_is_the_steps():
    """Accumulation divides by the targets of the whole step (casebook ACC-1 and ACC-2)."""
    hidden, weight, labels = sample(torch.float32)
    counted = int((labels != IGNORED).sum())
    whole = head_loss(hidden, weight, labels)
    parts = [head_loss(h, weight, y, counted) for h, y in zip(hidden.split(32), labels.split(32), strict=True)]
    assert sum(parts).item() == pytest.approx(whole.item(), rel=1e-6)
    assert head_loss(hidden, weight, torch.full_like(labels, IGNORED)).item() == 0


def test_a_frozen_head_gets_no_gradient():
    hidden, weight, labels = sample(torch.float32)
    hidden.requires_grad_()
    head_loss(hidden, weight, labels).backward()
    assert hidden.grad.abs().sum() > 0 and weight.grad is None


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen2", "tiny-qwen3", "tiny-v2", "tiny-v3", "tied"])
def test_every_architecture_trains_the_same(name):
    config = dict(PRESETS["tiny-qwen2" if name == "tied" else name], tie_word_embeddings=name == "tied")
    kind = config.pop("model_type")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **config), dtype=torch.float32)
    ids = torch.randint(0, config["vocab_size"], (2, 24))

    def step():
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids, num_items_in_batch=torch.tensor(46)).loss
        loss.backward()
        return loss.item(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    loss, grads = step()
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    use_chunked_loss(model)
    chunked, chunked_grads = step()
    assert chunked == pytest.approx(loss, rel=1e-6) and chunked_grads.keys() == grads.keys()
    for parameter, grad in grads.items():
        torch.testing.assert_close(chunked_grads[parameter], grad, rtol=1e-4, atol=1e-6)
    with torch.no_grad():  # without labels, and when nothing is trained, the model is what it was
        assert torch.equal(model(input_ids=ids).logits, logits)
        assert model(input_ids=ids, labels=ids).loss.item() == pytest.approx(loss, rel=1e-5)


def test_fp16_under_a_loss_scale_and_many_tokens():
    """The gradients of a step of 200,000 tokens vanish in fp16 unless the loss scale reaches them first."""
    hidden, weight, labels = sample(torch.float16, rows=256, vocab=4096)
    exact = gradients(lambda h, w, y: 65536 * torch.nn.functional.cross_entropy(h @ w.t(), y, ignore_index=IGNORED, reduction="sum") / 2e5,
                      hidden.double(), weight.double(), labels)  # fmt: skip
    naive = gradients(lambda h, w, y: 65536 * torch.nn.functional.cross_entropy((h @ w.t()).float(), y, ignore_index=IGNORED, reduction="sum") / 2e5,
                      hidden, weight, labels)  # fmt: skip
    ours = gradients(lambda h, w, y: 65536 * head_loss(h, w, y, 200_000, elements=256 * 999), hidden, weight, labels)
    for mine, theirs, true in zip(ours[1:], naive[1:], exact[1:], strict=True):
        assert (mine - true).norm() <= 1.5 * (theirs - true).norm() + 1e-4 * true.norm()
    assert (ours[2].abs().sum(1) == 0).float().mean() < 0.01  # every row of the head is pushed


def test_labels_outside_the_vocabulary_are_seen():
    hidden, weight, labels = sample(torch.float32)
    for wrong in (1000, -7):
        labels[1] = wrong
        assert head_loss(hidden, weight, labels).isnan()
