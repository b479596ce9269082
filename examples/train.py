"""Train a recipe under the DeepSpeed launcher, which starts this script once per card:

    deepspeed examples/train.py --deepspeed ds_configs/zero3.json
    deepspeed --num_gpus 3 examples/train.py --recipe deepseek-llm-7b/wikitext103_full data.path=wikitext-103

Started with plain `python`, it starts the ranks itself.
"""

import argparse
import os

from deepseek_ft import finetune
from deepseek_ft.cli import guard, set_up_logging


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="quickstart", help="a shipped recipe's name, or a YAML file")
    parser.add_argument("--deepspeed", metavar="FILE", help="a DeepSpeed file instead of the recipe's strategy")
    parser.add_argument("--resume", action="store_true", help="continue the unfinished run in output_dir")
    parser.add_argument("--new", action="store_true", help="start beside an unfinished run")
    parser.add_argument("--force", action="store_true", help="start even if the plan says that it does not fit")
    parser.add_argument("--local_rank", help="the launcher passes it; the environment says the same")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_intermixed_args()
    overrides = arguments.overrides + ([f"deepspeed={arguments.deepspeed}"] if arguments.deepspeed else [])
    result = finetune(arguments.recipe, overrides, resume=arguments.resume, new=arguments.new, force=arguments.force)
    if os.environ.get("RANK", "0") == "0":
        print(result)


if __name__ == "__main__":
    set_up_logging()
    raise SystemExit(guard(main))
