"""The command ``zgcm-eval``."""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import TypeAlias

from zgcm_eval import commands
from zgcm_eval._version import __version__
from zgcm_eval.frozen import HeldoutSetError

MISSING_PART, USAGE, WRONG_PATH = 1, 2, 3

DESCRIPTION = """\
Measure language models on frozen sets.

A model is named zgcm:DIR (saved by zgcm_model), hf:DIR (saved by transformers) or python:MODULE:NAME (a
function without arguments that returns the model; the current folder is searched first)."""

EPILOG = """\
example:
  zgcm-eval freeze documents.jsonl --out heldout
  zgcm-eval heldout zgcm:run/model --sets heldout --out after.json
  zgcm-eval compare before.json after.json

exit codes: 0 done; 1 an optional part is not installed; 2 wrong usage or input; 3 a path or set is missing
or wrong; 6 a comparison was asked to fail and did"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: arguments without the program's name; None takes those of the process.

    Returns:
        The exit code.
    """
    arguments = build_parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
    except ImportError as error:
        return _fail(error, MISSING_PART)
    except (HeldoutSetError, OSError) as error:
        return _fail(error, WRONG_PATH)
    except ValueError as error:
        return _fail(error, USAGE)
    return code


def _fail(error: Exception, code: int) -> int:
    print(f"zgcm-eval: {error}", file=sys.stderr)
    return code


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of all commands."""
    parser = argparse.ArgumentParser(
        "zgcm-eval",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"zgcm-eval {__version__}")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for add in (_freeze, _heldout, _tasks, _long_context, _memorization, _compare, _report):
        add(subparsers)
    return parser


Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def _command(
    subparsers: Subparsers, name: str, run: Callable[[argparse.Namespace], int], example: str
) -> argparse.ArgumentParser:
    summary = str(run.__doc__).strip()
    parser = subparsers.add_parser(
        name,
        help=summary,
        description=summary,
        epilog=f"example:\n  zgcm-eval {name} {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=run)
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="zgcm:DIR, hf:DIR or python:MODULE:NAME")
    parser.add_argument(
        "--tokenizer", metavar="FILE", help="tokenizer.json of a zgcm model (default: beside it)"
    )
    parser.add_argument("--device", default="cpu", help="where the model goes (default: cpu)")
    parser.add_argument("--out", metavar="FILE", help="write the whole report here as JSON")


def _add_batch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tokens-per-batch",
        type=int,
        default=4096,
        metavar="N",
        help="padded tokens of one forward pass; does not change the result (default: 4096)",
    )


def _freeze(subparsers: Subparsers) -> None:
    parser = _command(subparsers, "freeze", commands.freeze, "documents.jsonl --out heldout")
    parser.add_argument("documents", help='JSON lines {"id", "domain", "text"}')
    parser.add_argument(
        "--out", metavar="DIR", required=True, help="folder of the set; must not hold one yet"
    )


def _heldout(subparsers: Subparsers) -> None:
    parser = _command(
        subparsers,
        "heldout",
        commands.heldout,
        "zgcm:run/model --sets heldout --context 512 --out report.json",
    )
    _add_model(parser)
    _add_batch(parser)
    parser.add_argument("--sets", metavar="DIR", required=True, help="folder of the frozen sets")
    parser.add_argument(
        "--context", type=int, metavar="N", help="tokens of a window (default: what the model takes)"
    )
    parser.add_argument(
        "--overlap", type=int, metavar="N", help="tokens repeated as context (default: context/4)"
    )


def _tasks(subparsers: Subparsers) -> None:
    parser = _command(subparsers, "tasks", commands.tasks, "hf:model --tasks hellaswag arc_easy --limit 100")
    _add_model(parser)
    _add_batch(parser)
    parser.add_argument(
        "--tasks", nargs="+", required=True, metavar="TASK", help="tasks or groups of the harness"
    )
    parser.add_argument("--shots", type=int, metavar="N", help="solved examples (default: the task's)")
    parser.add_argument("--limit", type=int, metavar="N", help="questions per task, for a quick look")
    parser.add_argument("--include", metavar="DIR", help="task definitions of your own")


def _long_context(subparsers: Subparsers) -> None:
    parser = _command(
        subparsers,
        "long-context",
        commands.long_context,
        "zgcm:run/model --lengths 512 2048 --depths 0 0.5 1",
    )
    _add_model(parser)
    _add_batch(parser)
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[512, 2048, 8192], metavar="N", help="in tokens"
    )
    parser.add_argument("--depths", type=float, nargs="+", default=[0, 0.25, 0.5, 0.75, 1], metavar="SHARE")
    parser.add_argument("--samples", type=int, default=4, metavar="N", help="prompts per cell (default: 4)")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts (default: 0)")
    parser.add_argument(
        "--filler", metavar="FILE", help='JSON lines {"text"} of natural text between the facts'
    )


def _memorization(subparsers: Subparsers) -> None:
    parser = _command(
        subparsers, "memorization", commands.memorization, "zgcm:run/model --samples trained.jsonl"
    )
    _add_model(parser)
    parser.add_argument(
        "--samples", metavar="FILE", required=True, help='JSON lines {"id", "token_ids"}, or "text" to encode'
    )
    parser.add_argument("--prefix", type=int, default=32, metavar="N", help="tokens given (default: 32)")
    parser.add_argument(
        "--continuation", type=int, default=32, metavar="N", help="tokens asked (default: 32)"
    )
    parser.add_argument("--batch", type=int, default=16, metavar="N", help="prompts at once (default: 16)")


def _compare(subparsers: Subparsers) -> None:
    parser = _command(subparsers, "compare", commands.compare, "before.json after.json")
    parser.add_argument("before", help="report of the reference model")
    parser.add_argument("after", help="report of the model in question")
    parser.add_argument("--confidence", type=float, default=0.95, metavar="SHARE", help="(default: 0.95)")
    parser.add_argument("--resamples", type=int, default=5000, metavar="N", help="(default: 5000)")
    parser.add_argument("--seed", type=int, default=0, help="of the resamples (default: 0)")
    parser.add_argument("--fail-if-worse", action="store_true", help="exit with 6 if any figure became worse")


def _report(subparsers: Subparsers) -> None:
    parser = _command(subparsers, "report", commands.report, "before.json after.json")
    parser.add_argument("reports", nargs="+", metavar="FILE", help="what --out wrote")
