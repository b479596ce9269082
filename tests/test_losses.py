"""The loss without logits against the usual one, and against double precision."""

from __future__ import annotations

import importlib.util
import sys

import pytest
import torch
from conftest import ROOT, clean_environment, cli, run
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM

from deepseek_ft.losses import IGNORED, Head, Softening, head_loss, head_nll, use_smoothed_loss
from deepseek_ft.shapes import PRESETS

sys.path.insert(0, str(ROOT / "benchmarks"))
import memory as bench


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


def usual_in_double(hidden, weight, labels):
    return torch.nn.functional.cross_entropy(hidden @ weight.t(), labels, ignore_index=IGNORED)


@pytest.mark.parametrize(
    "elements", [96 * 300, 96 * 999, 2**25], ids=["many pieces", "a last piece of one", "one piece"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_and_gradients_are_those_of_double_precision(dtype, elements):
    exact = gradients(lambda h, w, y: torch.nn.functional.cross_entropy(h @ w.t(), y, ignore_index=IGNORED),
                      *(t.double() if t.is_floating_point() else t for t in sample(dtype)))  # fmt: skip
    naive = gradients(usual, *sample(dtype))
    ours = gradients(lambda h, w, y: head_loss(h, w, y, elements=elements), *sample(dtype))
    assert ours[0] == pytest.approx(exact[0], abs=1e-5 if dtype is torch.float32 else 2e-3)
    for mine, theirs, true in zip(ours[1:], naive[1:], exact[1:], strict=True):
        # The sum over pieces rounds each piece's share of a hidden state's gradient, and then the sum.
        worse = 1.02 if elements == 2**25 else 1.25
        assert (mine - true).norm() <= worse * (theirs - true).norm() + 1e-6 * true.norm()


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
    Head(model).use_for_training()
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


SOFT = [Softening(0.1), Softening(0.0, 3.0), Softening(0.1, 3.0)]


def softened(logits, labels, soft, reduction="mean"):
    logits = logits if soft.cap is None else soft.cap * torch.tanh(logits / soft.cap)
    return torch.nn.functional.cross_entropy(
        logits, labels, ignore_index=IGNORED, label_smoothing=soft.smoothing, reduction=reduction
    )


@pytest.mark.parametrize("soft", SOFT, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("elements", [96 * 300, 2**25], ids=["many pieces", "one piece"])
def test_smoothing_and_caps_are_those_of_double_precision(dtype, elements, soft):
    hidden, weight, labels = sample(dtype)
    exact = gradients(lambda h, w, y: softened(h @ w.t(), y, soft), hidden.double(), weight.double(), labels)
    naive = gradients(lambda h, w, y: softened((h @ w.t()).float(), y, soft), hidden, weight, labels)
    ours = gradients(lambda h, w, y: head_loss(h, w, y, elements=elements, soft=soft), hidden, weight, labels)
    assert ours[0] == pytest.approx(exact[0], abs=1e-5 if dtype is torch.float32 else 2e-3)
    for mine, theirs, true in zip(ours[1:], naive[1:], exact[1:], strict=True):
        # The sum over pieces rounds each piece's share of a hidden state's gradient, and then the sum.
        worse = 1.02 if elements == 2**25 else 1.25
        assert (mine - true).norm() <= worse * (theirs - true).norm() + 1e-6 * true.norm()


def test_smoothing_is_transformers():
    from transformers.trainer_pt_utils import LabelSmoother

    hidden, weight, labels = sample(torch.float32)
    theirs = LabelSmoother(epsilon=0.1)({"logits": (hidden @ weight.t())[None]}, labels[None])
    assert head_loss(hidden, weight, labels, soft=Softening(0.1)).item() == pytest.approx(theirs.item(), rel=1e-5)


@pytest.mark.parametrize("elements", [96 * 300, 2**25])
def test_an_adapter_on_the_head_is_a_part_of_its_logits(elements):
    hidden, weight, labels = sample(torch.float32)
    torch.manual_seed(1)
    low, up = torch.randn(96, 4), torch.randn(1000, 4)
    found = []
    for ours in (True, False):
        h, a, b = (t.clone().requires_grad_() for t in (hidden, low, up))
        loss = (
            head_loss(h, weight, labels, elements=elements, adapter=(a, b))
            if ours
            else softened(h @ weight.t() + a @ b.t(), labels, Softening())
        )
        loss.backward()
        found.append((loss, h.grad, a.grad, b.grad))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
    each = head_nll(hidden, weight, labels, elements, adapter=(low, up))
    torch.testing.assert_close(
        each, softened(hidden @ weight.t() + low @ up.t(), labels, Softening(), "none"), rtol=1e-4, atol=1e-4
    )
    assert (each[labels == IGNORED] == 0).all() and each.shape == (96,)


def gemma(**more):
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "gemma2", vocab_size=512, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, final_logit_softcapping=2.0, attn_implementation="eager", **more,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def tiny(**more):
    config = dict(PRESETS["tiny-qwen3"], **more)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(
        AutoConfig.for_model(config.pop("model_type"), **config), dtype=torch.float32
    )


def with_lora(targets, **more):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny(), LoraConfig(r=4, lora_alpha=16, target_modules=targets, **more))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # born 0: nothing would be seen
            torch.nn.init.normal_(parameter, std=0.3)
    return model


MODELS = {
    "a cap on the logits": gemma,
    "tied": lambda: tiny(tie_word_embeddings=True),
    "an adapter on the head": lambda: with_lora(["q_proj", "lm_head"]),
    "an adapter elsewhere, the head frozen": lambda: with_lora(["q_proj"]),
    "the head trained as a whole beside an adapter": lambda: with_lora(["q_proj"], modules_to_save=["lm_head"]),
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_heads_of_every_kind_train_and_score_as_without(make):
    model = make()
    ids = torch.randint(0, 500, (2, 24))
    labels = ids.clone()
    labels[0, :9] = IGNORED

    def step():
        model.zero_grad()
        loss = model(input_ids=ids, labels=labels, num_items_in_batch=torch.tensor(40), use_cache=False).loss
        loss.backward()
        return loss.item(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    loss, grads = step()
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
    head = Head(model).use_for_training()
    found, found_grads = step()
    assert found == pytest.approx(loss, rel=1e-6) and found_grads.keys() == grads.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(found_grads[name], grad, rtol=1e-4, atol=1e-6, msg=name)
    with torch.no_grad():
        with head.scoring(labels):
            each = model(input_ids=ids, use_cache=False).logits
        assert torch.equal(model(input_ids=ids, use_cache=False).logits, logits)  # and is what it was again
    wanted = torch.nn.functional.cross_entropy(
        logits[:, :-1].transpose(1, 2), labels[:, 1:], ignore_index=IGNORED, reduction="none"
    )
    assert each.shape == (2, 24) and (each[:, -1] == 0).all()
    torch.testing.assert_close(each[:, :-1], wanted, rtol=1e-5, atol=1e-5)


def test_after_an_error_in_the_model_everything_is_as_before():
    model = gemma()
    head = Head(model).use_for_training()
    ids = torch.randint(0, 500, (1, 8))
    logits = model(input_ids=ids, use_cache=False).logits.detach()
    for broken in ({"input_ids": torch.full((1, 8), 10_000)}, {"inputs_embeds": torch.zeros(1, 8, 5)}):
        with pytest.raises((IndexError, RuntimeError)):
            model(**broken, labels=ids, use_cache=False)
        with pytest.raises((IndexError, RuntimeError)), head.scoring(ids):
            model(**broken, use_cache=False)
    assert model.config.final_logit_softcapping == 2.0
    assert torch.equal(model(input_ids=ids, use_cache=False).logits, logits)


def test_what_is_not_known_is_refused():
    model = tiny()
    model.config.logit_scale = 0.5
    with pytest.raises(ValueError, match="logit_scale"):
        Head(model)
    with pytest.raises(ValueError, match="DoRA"):
        Head(with_lora(["lm_head"], use_dora=True))


def test_smoothed_labels_have_one_loss_with_and_without_logits():
    ids = torch.randint(0, 500, (2, 24))
    found = []
    for use in (use_smoothed_loss, lambda model, smoothing: Head(model).use_for_training(smoothing)):
        model = tiny()
        plain = model(input_ids=ids, labels=ids, num_items_in_batch=torch.tensor(46)).loss.item()
        use(model, 0.1)
        loss = model(input_ids=ids, labels=ids, num_items_in_batch=torch.tensor(46)).loss
        loss.backward()
        found.append((loss, *(p.grad for p in model.parameters())))
        assert loss.item() > plain
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


# --------------------------------------------------------------------- what docs/benchmarks.md says of large vocabularies


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab", [102_400, 151_936])
def test_a_large_vocabulary_takes_a_quarter_of_the_memory(dtype, vocab):
    """Every live byte over the inputs, at the size of the table (2,048 rows of 512), counted on tensors without numbers."""

    def peak(loss):
        live = bench.counter()
        with FakeTensorMode(), live:
            hidden, weight = (torch.zeros(n, 512, dtype=dtype, requires_grad=True) for n in (2048, vocab))
            labels = torch.zeros(2048, dtype=torch.long)
            inputs = live.now
            loss(hidden, weight, labels).backward()
            return live.peak - inputs

    assert peak(head_loss) <= 0.25 * peak(usual)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab", [32_256, 102_400, 151_936])
def test_over_a_large_vocabulary_nothing_is_less_exact(dtype, vocab):
    hidden, weight, labels = sample(dtype, rows=48, width=32, vocab=vocab)
    exact = gradients(usual_in_double, hidden.double(), weight.double(), labels)
    plain, ours = (gradients(loss, hidden, weight, labels) for loss in (usual, head_loss))
    # Logits in 16 bits round alike in every way to the loss: in a sample as small as this by a little more than 1e-5.
    assert abs(ours[0] - exact[0]) <= max(1e-5 * exact[0], 1.02 * abs(plain[0] - exact[0]))
    for of_ours, of_plain, true in zip(ours[1:], plain[1:], exact[1:], strict=True):
        assert (of_ours - true).norm() <= max(1.02 * (of_plain - true).norm(), 1e-6 * true.norm())
    scored = head_nll(hidden, weight, labels).double().sum() / (labels != IGNORED).sum()
    assert scored.item() == pytest.approx(ours[0], rel=1e-6)


# ---------------------------------------------------------------------------------------------------- Liger's kernels

LIGER = """
import sys, torch
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM
from deepseek_ft.errors import RunError
from deepseek_ft.losses import IGNORED, Head, Softening, check_liger, liger_loss

cpu = torch.device("cpu")
for dtype in (torch.float32, torch.bfloat16):
    check_liger(1500, dtype, cpu)
check_liger(1500, torch.float32, cpu, Softening(0.1))  # the interpreter cannot run a cap

def in_bf16(hidden, weight, labels, soft):  # a sum that is rounded at each step, as in other libraries
    z = F.cross_entropy(hidden @ weight.t(), labels, ignore_index=IGNORED, reduction="none")
    return z.to(torch.bfloat16).cumsum(0)[-1].float() / (labels != IGNORED).sum()

try:
    check_liger(1500, torch.bfloat16, cpu, loss=in_bf16)
except RunError as error:
    assert "the loss by" in str(error) and "train.loss=chunked" in str(error), error
else:
    sys.exit("a loss that is rounded passed")

torch.manual_seed(0)
shape = dict(vocab_size=1500, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4)
ids = torch.randint(0, 1500, (2, 24))
labels = ids.clone()
labels[:, :5] = IGNORED
for tied in (False, True):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **shape, tie_word_embeddings=tied))
    head, found = Head(model), []
    for liger in (False, True):
        head.use_for_training(0.1, liger=liger)
        model.zero_grad()
        loss = model(input_ids=ids, labels=labels, num_items_in_batch=torch.tensor(31)).loss
        loss.backward()
        found.append([loss.detach()] + [p.grad.clone() for p in model.parameters()])
    for ours, theirs in zip(*found):
        torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-6)
print("same")
"""


@pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is None, reason="needs liger-kernel, of the extra `liger`")
def test_ligers_kernels_give_the_same_loss_and_gradients_and_are_held_against_float64(tmp_path):
    """Triton's interpreter runs the kernels without a card; how they are compiled for one is checked at each start."""
    done = run(sys.executable, "-c", LIGER, cwd=tmp_path, env=clean_environment(TRITON_INTERPRET="1"))
    assert done.returncode == 0 and done.stdout.endswith("same\n"), done.stdout[-3000:]


def test_liger_is_refused_where_it_cannot_run(tmp_path, tiny_recipe):
    done = cli("train", tiny_recipe, "train.loss=liger", cwd=tmp_path)
    assert done.returncode == 2 and "train.loss=chunked" in done.stdout and "GPU only" in done.stdout
    assert not (tmp_path / "runs").exists()
