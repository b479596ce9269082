"""The model folder: write it whole, and prove in a fresh process that it is the model that was trained."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase, Trainer

from . import adapters
from .data.blocks import IGNORED
from .data.chat import ChatForm
from .errors import CheckpointError, ConfigError
from .evaluation import block_nll
from .models import check_loading_info, load_tokenizer

CHECKED_BLOCKS = 4
"""Held-out blocks that are scored again after reloading."""
log = logging.getLogger(__name__)


def save_model_folder(trainer: Trainer, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Gather the weights, write them beside and rename when all is there. Collective: every rank calls it.

    Under ZeRO-3 rank 0 holds the whole model in host memory while it writes.
    """
    partial = folder.with_name(f"{folder.name}.partial")
    trainer.model.config.use_cache = True
    trainer.save_model(str(partial))
    adapters.check_saved(trainer.model, partial, trainer.is_world_process_zero(), trainer.of_all_stages)
    if trainer.is_world_process_zero():
        (partial / "training_args.bin").unlink(missing_ok=True)  # a pickle that nobody needs to load the model
        tokenizer.save_pretrained(str(partial))
        if folder.exists():  # of an earlier attempt at this run that was cut off before it was checked
            earlier = next(
                p for n in range(1, 1000) if not (p := folder.with_name(f"{folder.name}.earlier-{n}")).exists()
            )
            folder.rename(earlier)
            log.warning("the unchecked model of an earlier attempt is now in %s", earlier)
        partial.replace(folder)


def learn_to_stop(model, tokenizer: PreTrainedTokenizerBase, form: ChatForm | None) -> None:
    """Let generation stop at the token that was learnt as the end, and give a tokenizer without template the form's."""
    stop = str(tokenizer.eos_token)
    if form is not None:
        stop = form.end
        if form.name != "template":
            tokenizer.chat_template = form.template
    model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids(stop)


def check_model_folder(
    folder: Path, rows: Sequence[dict[str, np.ndarray]], block_nlls: Sequence[float], precision: str, seed: int
) -> dict:
    """Load a model folder as a user would and score `rows`, for which the run had measured `block_nlls` (nats).

    Returns:
        For run.json: both losses, and a few tokens that the model wrote.

    Raises:
        CheckpointError: it does not load, a weight is missing, or it gives another loss.
    """
    weights = sum(f.stat().st_size for f in folder.glob("*.safetensors"))
    room = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0
    device = torch.device("cuda" if room > 1.3 * weights else "cpu")
    try:
        if adapters.is_adapter(folder):
            model, info = adapters.load_with_base(folder)
        else:
            model, info = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
        tokenizer = load_tokenizer(str(folder))
    except ConfigError as error:
        raise CheckpointError(f"{folder} has the model, but not its tokenizer: {error}") from None
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{folder} does not load: {type(error).__name__}: {error}") from error
    check_loading_info(info, str(folder))
    if not getattr(model, "is_quantized", False):
        model.to(device)
    device = model.device
    model.eval()
    if not rows:
        log.info("%s loaded in a fresh process; without held-out data there is no loss to compare", folder)
        return {}
    tokens = sum(int((row["labels"] != IGNORED).sum()) for row in rows)
    if not np.isfinite(block_nlls).all():
        raise CheckpointError(f"the run's own held-out loss is not a number: what is in {folder} cannot be used")
    with _products_as_in(precision, model):
        found = float(block_nll(model, rows, 1, device).sum()) / tokens
    expected = sum(block_nlls) / tokens
    # 16-bit sums differ between devices and batch shapes; a wrong or missing weight shows in whole nats.
    if not abs(found - expected) <= (1e-3 if precision == "fp32" else 2e-2):
        raise CheckpointError(
            f"{folder} loads, but gives loss {found:.4f} on {tokens:,} held-out tokens where the run measured "
            f"{expected:.4f}: it is not the model that was trained"
        )
    log.info("%s loaded in a fresh process: loss %.4f on %s held-out tokens, the run measured %.4f",
             folder, found, f"{tokens:,}", expected)  # fmt: skip
    check = {"block_nll": list(block_nlls), "loss": expected, "reloaded_loss": found, "tokens": tokens}
    return {"check": check, "sample": _write_sample(model, tokenizer, rows[0]["input_ids"], seed)}


def _products_as_in(precision: str, model) -> contextlib.AbstractContextManager:
    """Weights that a 16-bit run kept and saved in fp32 were rounded in each product, and are scored so.

    That is no trifle: updates smaller than half a bf16 step are in the fp32 weights, and not yet in the products of the run.
    """
    if precision == "fp32" or any(p.dtype != torch.float32 for p in model.parameters()):
        return contextlib.nullcontext()
    return torch.autocast(model.device.type, adapters.DTYPES[precision])


def _write_sample(model, tokenizer, ids: np.ndarray, seed: int) -> dict[str, str]:
    prompt = torch.from_numpy(ids[:16].copy())[None].to(model.device)
    torch.manual_seed(seed)
    out = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=40, do_sample=True, temperature=0.8, top_k=50,
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
    )  # fmt: skip
    return {"prompt": tokenizer.decode(prompt[0]), "text": tokenizer.decode(out[0, prompt.shape[1] :])}
