"""``zgcm-data``: collect, build, look at and check training data.

Results go to standard output, progress to standard error. Exit codes: 0 done, 1 a package is missing,
2 usage or configuration error, 3 a path or data set is missing or wrong, 6 a check failed.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zgcm_data._version import __version__
from zgcm_data.build import build, run_until, without_key
from zgcm_data.clean.plan import write_contract
from zgcm_data.console import Bar, command, emit, flat, table
from zgcm_data.engine import use_runner
from zgcm_data.megatron_commands import add_megatron
from zgcm_data.prepare.steps import BuildError, Steps
from zgcm_data.recipe import BuildRecipe
from zgcm_data.records import CorpusError
from zgcm_data.shards import ShardError, inspect, open_shards, verify_shards
from zgcm_data.sources import collect_default_corpus
from zgcm_data.tokenizer import Tokenizer

OK, MISSING, USAGE, DATA, FAILED = 0, 1, 2, 3, 6
UNTIL = ("clean", "dedup", "order", "pack")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: Arguments without the program's name; ``None`` takes those of the process.

    Returns:
        The exit code.
    """
    options = parser().parse_args(arguments)
    try:
        code: int = options.run(options)
    except ImportError as error:
        return complain(error, MISSING)
    except (
        CorpusError,
        ShardError,
        BuildError,
        FileNotFoundError,
        IsADirectoryError,
        PermissionError,
    ) as error:
        return complain(error, DATA)
    except ValueError as error:
        return complain(error, USAGE)
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except KeyboardInterrupt:
        print("\nstopped; run the same command again to go on", file=sys.stderr)
        return 130
    return code


def complain(error: BaseException, code: int) -> int:
    """Print an error as one sentence."""
    print(f"zgcm-data: {error}", file=sys.stderr)
    return code


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    top = argparse.ArgumentParser(
        prog="zgcm-data",
        description="From raw text to ordered, deduplicated, accounted shards.",
        epilog="example: zgcm-data build recipe.toml --out data && zgcm-data verify data/stage1",
    )
    top.add_argument("--version", action="version", version=f"zgcm-data {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add_building(commands)
    add_looking(commands)
    add_megatron(commands)
    for made in commands.choices.values():
        made.add_argument("--json", action="store_true", help="print JSON")
    return top


def add_building(commands: Any) -> None:
    """Add the commands that collect and build."""
    text = "collect the embedded default corpus"
    corpus = command(commands, "corpus", collect, text, "zgcm-data corpus --out corpus")
    corpus.add_argument("--out", type=Path, required=True, help="folder for one JSONL file per source")
    corpus.add_argument("--megabytes", type=float, default=28.0, help="size to collect (default 28)")
    whole = command(commands, "build", build_all, "run all steps", "zgcm-data build recipe.toml --out data")
    recipe_options(whole)
    for name in UNTIL:
        text = f"run a build up to the step {name!r} of its last stage and print its result"
        made = command(commands, name, build_part, text, f"zgcm-data {name} recipe.toml --out data")
        recipe_options(made)
        if name == "clean":
            made.add_argument(
                "--records", type=Path, help="also write the records with their decisions as JSONL"
            )
            made.add_argument("--keep-dropped", action="store_true", help="write dropped records too")


def add_looking(commands: Any) -> None:
    """Add the commands that read a finished set."""
    look = command(commands, "inspect", show, "show a shard set", "zgcm-data inspect data/stage1 --row 0")
    look.add_argument("folder", type=Path, help="a shard set")
    look.add_argument("--row", type=int, action="append", default=[], help="decode this row too (repeatable)")
    look.add_argument("--tokenizer", type=Path, help="tokenizer.json (default: the one beside the set)")
    text = "recompute every checksum and count"
    check = command(commands, "verify", verify, text, "zgcm-data verify data/stage1")
    check.add_argument("folder", type=Path, nargs="+", help="shard sets")


def recipe_options(made: argparse.ArgumentParser) -> None:
    """Add the options of the commands that build."""
    made.add_argument("recipe", type=Path, help="a TOML recipe")
    made.add_argument("--out", type=Path, required=True, help="output folder; nothing else is written")
    made.add_argument("--runner", choices=("native", "ray"), default="native", help="where Daft runs")
    made.add_argument("--address", help="address of a Ray cluster (default: a local one)")


def collect(options: argparse.Namespace) -> int:
    """Run ``corpus``."""
    sizes = collect_default_corpus(options.out, Bar(), megabytes=options.megabytes)
    rows = [{"source": name, "bytes": size} for name, size in sizes.items()]
    emit(options, {"out": str(options.out), "sources": sizes}, table(rows))
    return OK


def build_all(options: argparse.Namespace) -> int:
    """Run ``build``."""
    result = build(load(options), options.out, progress=Bar())
    stages = result.report["stages"]
    rows = [{"stage": name, **source} for name, stage in stages.items() for source in stage["sources"]]
    text = f"{table(rows)}\n\ndigest {result.digest}\nshard sets: {' '.join(map(str, result.sets.values()))}"
    emit(options, result.report, text)
    return OK


def build_part(options: argparse.Namespace) -> int:
    """Run ``clean``, ``dedup``, ``order`` or ``pack``."""
    results = run_until(Steps(options.out, Bar()), load(options), options.command)
    result = without_key(results[next(reversed(results))])
    if options.command == "clean" and options.records:
        result["records"] = write_contract(
            options.out / "work" / "clean", options.records, dropped=options.keep_dropped
        )
    emit(options, result, flat(result))
    return OK


def show(options: argparse.Namespace) -> int:
    """Run ``inspect``."""
    summary = inspect(options.folder)
    rows = [decoded(options, number) for number in options.row]
    text = flat({name: value for name, value in summary.items() if name != "sources"})
    text += "\n\n" + table(summary["sources"])
    for row in rows:
        text += f"\n\nrow {row['row']}: {len(row['documents'])} documents\n{row['text']}"
    emit(options, summary | {"decoded": rows}, text)
    return OK


def decoded(options: argparse.Namespace, number: int) -> dict[str, Any]:
    """Return one row as text, with the documents it holds."""
    shards = open_shards(options.folder)
    if not 0 <= number < len(shards):
        raise ValueError(f"row {number} is not in the set; it has rows 0 to {len(shards) - 1}")
    path = options.tokenizer or options.folder.parent / "tokenizer.json"
    tokenizer = Tokenizer(path, eos=None)
    if tokenizer.sha256 != shards.manifest.tokenizer_sha256:
        raise ShardError(
            f"{path} is not the tokenizer of {options.folder}; name the right one with --tokenizer"
        )
    row = shards[number]
    names = [source.name for source in shards.manifest.sources]
    documents = [
        {"start": int(start), "source": names[source] if source >= 0 else "padding", "document": int(ordinal)}
        for start, source, ordinal, _ in row.docs
    ]
    return {"row": number, "documents": documents, "text": tokenizer.decode(row.tokens.tolist())}


def verify(options: argparse.Namespace) -> int:
    """Run ``verify``."""
    problems = {str(folder): [str(item) for item in verify_shards(folder)] for folder in options.folder}
    lines = [f"{folder}: {text}" for folder, found in problems.items() for text in (found or ["all right"])]
    emit(options, {"problems": problems}, "\n".join(lines))
    return FAILED if any(problems.values()) else OK


def load(options: argparse.Namespace) -> BuildRecipe:
    """Read the recipe and choose the runner."""
    recipe = BuildRecipe.from_toml(options.recipe)
    if options.runner == "ray":
        use_runner("ray", options.address)
    return recipe


if __name__ == "__main__":
    sys.exit(main())
