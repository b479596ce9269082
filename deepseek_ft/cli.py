"""The command line. The only room that prints, exits, or sets up logging; heavy imports stay inside functions."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Callable

from . import __version__
from .errors import DeepSeekFTError, RunError

_EPILOG = """\
examples:
  deepseek-ft train quickstart
  deepseek-ft train deepseek-llm-7b/wikitext103_full data.path=wikitext-103 train.precision=bf16 --gpus 3
  deepseek-ft recipes deepseek-coder-7b/code_full        show a recipe, resolved
  deepseek-ft doctor                                     what would go wrong on this machine
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="deepseek-ft",
        description="Fine-tune DeepSeek models on a few consumer cards.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"deepseek_ft {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    train = commands.add_parser("train", help="train a recipe", description="Train a recipe; starts the ranks itself.")
    train.add_argument("recipe", help="a shipped recipe's name, or a YAML file")
    train.add_argument(
        "overrides", nargs="*", metavar="key=value", help="for example optim.lr=1e-5 train.max_steps=100"
    )
    train.add_argument(
        "--gpus", type=int, metavar="N", help="how many ranks; the first N visible GPUs (same as ranks=N)"
    )
    train.add_argument("--hostfile", help="DeepSpeed's hostfile, for ranks on several hosts")
    group = train.add_mutually_exclusive_group()
    group.add_argument("--resume", action="store_true", help="continue the unfinished run in output_dir")
    group.add_argument("--new", action="store_true", help="start beside an unfinished run")

    recipes = commands.add_parser("recipes", help="list the shipped recipes, or show one")
    recipes.add_argument("recipe", nargs="?")
    recipes.add_argument("overrides", nargs="*", metavar="key=value")

    doctor = commands.add_parser("doctor", help="check this machine, and measure it")
    doctor.add_argument("--json", action="store_true", help="for programs")
    doctor.add_argument("--quick", action="store_true", help="look only, measure nothing")
    doctor.add_argument("--clear-locks", action="store_true", help="first remove the locks of builds that were killed")
    return parser


def set_up_logging() -> None:
    """Plain lines on standard error, from rank 0; warnings, also those of the libraries below, from every rank."""
    from . import launch

    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("deepseek_ft").setLevel(logging.INFO if launch.is_main_rank() else logging.WARNING)
    # DeepSpeed calls collectives by names that torch has begun to rename; torch says so at every call.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")


def guard(action: Callable[[], object]) -> int:
    """Run an action; a user's error becomes its message and exit code, not a traceback."""
    from . import launch

    try:
        action()
    except DeepSeekFTError as error:
        # What is wrong with a config is wrong on every rank, and said once. A rank that fails alone says so itself.
        if not launch.report_error(error) and (launch.is_main_rank() or isinstance(error, RunError)):
            rank = "" if launch.is_main_rank() else f"rank {os.environ.get('RANK')}: "
            print(f"{rank}{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted; everything saved so far is kept", file=sys.stderr)
        return 130
    return 0


def _train(arguments: argparse.Namespace) -> None:
    from .run import finetune

    overrides = list(arguments.overrides)
    if arguments.gpus is not None:
        overrides.append(f"ranks={arguments.gpus}")
    result = finetune(
        arguments.recipe, overrides, resume=arguments.resume, new=arguments.new, hostfile=arguments.hostfile
    )
    print(result)


def _recipes(arguments: argparse.Namespace) -> None:
    from .config import list_recipes, load_config, to_yaml

    if arguments.recipe:
        print(to_yaml(load_config(arguments.recipe, arguments.overrides)), end="")
        return
    recipes = list_recipes()
    width = max(map(len, recipes))
    for name, summary in recipes.items():
        print(f"{name:{width}}  {summary}")


def _doctor(arguments: argparse.Namespace) -> None:
    import json

    from . import doctor

    if arguments.clear_locks:
        doctor.clear_locks()
    findings = doctor.examine(arguments.quick)
    findings.append(doctor.remember(findings))
    if arguments.json:
        print(json.dumps(doctor.to_json(findings), indent=2))
    else:
        print(doctor.describe(findings, colour=sys.stdout.isatty()))
    if any(finding.state == "fail" for finding in findings):
        raise SystemExit(1)


def _worker(words: list[str]) -> int:
    """`worker STAGE TASK`: a process that a run started for itself."""
    from . import launch

    launch.die_with_parent()
    set_up_logging()
    from .run import worker

    try:
        return guard(lambda: worker(words[0], words[-1]))
    except RuntimeError as error:
        # When one rank dies the others' collectives break. Theirs is not the story.
        if not any(sign in str(error) for sign in ("Connection closed by peer", "Connection reset", "gloo/transport")):
            raise
        print(f"rank {os.environ.get('RANK', 0)} lost its connection to another rank", file=sys.stderr)
        return 1


def main(argv: list[str] | None = None) -> int:
    words = [w for w in (sys.argv[1:] if argv is None else argv) if not w.startswith("--local_rank")]
    if words[:1] == ["worker"]:
        return _worker(words[1:])
    parser = _parser()
    arguments, rest = parser.parse_known_args(words)
    # argparse gives up on positional words after a flag, as in `train NAME --gpus 3 key=value`
    late = [w for w in rest if "=" in w and not w.startswith("-")]
    unknown = [w for w in rest if w not in late]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}; settings are written key=value, without dashes")
    if late and "overrides" not in arguments:
        parser.error(f"unrecognized arguments: {' '.join(late)}")
    if late:
        arguments.overrides += late
    set_up_logging()
    action = {"train": _train, "recipes": _recipes, "doctor": _doctor}[arguments.command]
    try:
        return guard(lambda: action(arguments))
    except BrokenPipeError:  # as in `deepseek-ft recipes | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
