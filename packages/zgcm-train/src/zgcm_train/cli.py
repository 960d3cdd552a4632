"""The command ``zgcm-train``."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from zgcm_train._version import __version__
from zgcm_train.errors import ZgcmError, explain_os_error

app = typer.Typer(
    name="zgcm-train",
    help="Plan, run, check and report the pretraining of ZGCM models.\n\n"
    "Start with `zgcm-train demo`: it trains a small model on real text in two stages and shows the result.\n\n"
    "Exit codes: 0 done, 1 a setting is missing, 2 usage or configuration error, 3 a path or dataset is missing or "
    "wrong, 4 the checkpoint is missing, torn or not the one asked for, 5 training diverged, 6 a verification failed.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

RecipeArgument = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A TOML file, or the name of a built-in recipe.")
]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")]
SetOption = Annotated[
    list[str],
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a recipe key; may be repeated."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"zgcm-train {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for everything it makes.")] = Path(
        "zgcm-demo"
    ),
    minutes: Annotated[
        float, typer.Option(min=0.2, help="Scales the token budgets; 5 suits two cores.")
    ] = 5.0,
    corpus: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH", help="Your own JSONL or Parquet with a text column, or a folder of text files."
        ),
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Train a small ZGCM on real text in two stages, in about five minutes on two cores.

    Reads text that this Python installation already holds, builds ordered shards, trains stage 1 in curriculum order
    and stage 2 shuffled, evaluates held-out text, and writes report.html and loss.png. Run it again to go on after
    an interruption.

    Example: zgcm-train demo --out demo
    """
    from zgcm_train.demo import run_demo

    summary = run_demo(out, minutes=minutes, corpus=corpus)
    if json_output:
        _print_json(summary.as_dict())
    else:
        summary.print(Console())


@app.command()
def run(
    recipe: RecipeArgument,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="The run folder.")],
    settings: SetOption = [],  # noqa: B006 - typer reads the default, nobody changes it
    accept_changes: Annotated[
        bool,
        typer.Option(
            "--accept-changes", help="Go on although what is learned differs from the run's recipe."
        ),
    ] = False,
) -> None:
    """Train a recipe, or go on with it where its folder stands. Under torchrun it shards over the processes.

    Example: zgcm-train run recipe.toml --out runs/first --set optimizer.lr=3e-4

    Example: torchrun --nproc-per-node 2 -m zgcm_train run recipe.toml --out runs/first --set parallel.dp_shard=2
    """
    from zgcm_train.process import run_process

    run_process(recipe, out, settings, accept_changes=accept_changes)


@app.command()
def launch(
    recipe: RecipeArgument,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="The run folder, seen by every machine.")],
    settings: SetOption = [],  # noqa: B006
    nodes: Annotated[int, typer.Option(min=1, help="Number of machines; run this command on each.")] = 1,
    endpoint: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Of the first machine.")] = None,
    max_restarts: Annotated[int, typer.Option(min=0, help="Restarts after a process died.")] = 3,
) -> None:
    """Check a recipe against its mesh and data, then run it under torchrun with restarts.

    The number of processes is the product of the sizes in [parallel].

    Example: zgcm-train launch recipe.toml --out runs/first --set parallel.dp_shard=8
    """
    from zgcm_train.launch import Machines
    from zgcm_train.launch import launch as start

    code = start(recipe, out, settings, Machines(nodes, endpoint, max_restarts))
    if code:
        raise typer.Exit(code)


@app.command()
def plan(
    recipe: RecipeArgument,
    settings: SetOption = [],  # noqa: B006
    assembly: Annotated[
        bool, typer.Option(help="Assemble some ranks with tensors that have shapes only: memory and traffic.")
    ] = True,
    json_output: JsonOption = False,
) -> None:
    """Print what a recipe will do before anything is started: tokens, updates, parameters, FLOPs, precision, warnings.

    The first and the last rank are assembled on this machine and make one update without memory for their
    tensors, which takes about a minute for a mesh of hundreds of devices.

    Example: zgcm-train plan zgcm-1
    """
    from zgcm_train.plan import make_plan
    from zgcm_train.recipe_file import load_recipe

    checked = load_recipe(recipe, settings)
    result = make_plan(checked, _measured(checked) if assembly else ())
    if json_output:
        _print_json(result.as_dict())
    else:
        result.print(Console())


def _measured(recipe: Any) -> Any:
    from zgcm_train.scale import measure_ranks

    err = Console(stderr=True)
    return measure_ranks(recipe, tell=lambda rank: err.print(f"assembling rank {rank}", highlight=False))


@app.command()
def check(recipe: RecipeArgument, settings: SetOption = [], json_output: JsonOption = False) -> None:  # noqa: B006
    """Prove that a recipe's data are there, whole and long enough, before a run is started.

    Example: zgcm-train check recipe.toml
    """
    from zgcm_train.check import check_recipe_data
    from zgcm_train.recipe_file import load_recipe

    _print_checks(check_recipe_data(load_recipe(recipe, settings)), json_output)


@app.command()
def verify(folder: RunArgument, json_output: JsonOption = False) -> None:
    """Prove after the fact that a run's records agree: checkpoints, ledger, metrics, data and held-out sets.

    Example: zgcm-train verify runs/first
    """
    from zgcm_train.verify import verify_run

    _print_checks(verify_run(folder), json_output)


@app.command()
def report(folder: RunArgument) -> None:
    """Write report.html and loss.png from a run's records.

    Example: zgcm-train report runs/first
    """
    from zgcm_train.report import write_report

    typer.echo(str(write_report(folder)))


@app.command()
def export(
    folder: RunArgument,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for the exported model.")],
    step: Annotated[
        int | None, typer.Option(min=0, help="Which checkpoint; the newest whole one by default.")
    ] = None,
) -> None:
    """Export a checkpoint's weights as safetensors with the published names.

    Example: zgcm-train export runs/first --out model
    """
    from zgcm_train.export import export_run

    typer.echo(str(export_run(folder, out, step)))


@app.command()
def recipes(
    name: Annotated[str | None, typer.Argument(help="Print this recipe's text.")] = None,
    json_output: JsonOption = False,
) -> None:
    """List the built-in recipes, or print one to start your own from.

    Example: zgcm-train recipes zgcm-1 > my-recipe.toml
    """
    from zgcm_train.recipe_file import recipe_names, recipe_text

    if name is not None:
        typer.echo(recipe_text(name), nl=False)
    elif json_output:
        _print_json(recipe_names())
    else:
        typer.echo("\n".join(recipe_names()))


@app.command("import-env")
def import_env(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="Env files, one per stage, in their order.")
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Write the recipe there instead of printing it."),
    ] = None,
    allow_unknown: Annotated[
        bool, typer.Option("--allow-unknown", help="Report unknown variables instead of refusing them.")
    ] = False,
    json_output: JsonOption = False,
) -> None:
    """Turn env files of the published launcher into a recipe, with a report on every variable.

    The files are read, never run. Settings that contradict each other are refused, all at once.

    Example: zgcm-train import-env 01_pretrain.env 02_pretrain.env --out recipe.toml
    """
    import os

    from zgcm_train.files import write_atomic
    from zgcm_train.interchange import import_env_files

    imported = import_env_files(files, os.environ, allow_unknown=allow_unknown)
    if out is not None:
        write_atomic(out, imported.text())
    if json_output:
        _print_json(imported.as_dict())
        return
    if out is None:
        typer.echo(imported.text(), nl=False)
    table = Table("file", "variable", "what became of it", "recipe key, or why")
    for key in imported.keys:
        table.add_row(key.file, key.key, key.status, key.detail)
    Console(stderr=out is None).print(table)


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=1, ensure_ascii=False))


def _print_checks(checks: list[Any], json_output: bool) -> None:
    if json_output:
        _print_json([{"name": c.name, "passed": c.passed, "detail": c.detail} for c in checks])
    else:
        table = Table("check", "result", "detail")
        for item in checks:
            table.add_row(item.name, "passed" if item.passed else "FAILED", item.detail)
        Console().print(table)
    failed = [c for c in checks if not c.passed]
    if len(failed) > 1:
        typer.echo(f"zgcm-train: {len(failed)} of {len(checks)} checks failed; the first:", err=True)
    if failed:
        raise failed[0].error()


def main() -> None:
    """Run the command line; a fault prints one sentence to stderr and sets the exit code."""
    try:
        app()
    except ZgcmError as error:
        typer.echo(f"zgcm-train: {error}", err=True)
        sys.exit(error.exit_code)
    except OSError as error:
        failure = explain_os_error(error, "running this command")
        typer.echo(f"zgcm-train: {failure}", err=True)
        sys.exit(failure.exit_code)
