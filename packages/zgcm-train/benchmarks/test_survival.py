"""What saving and restarting cost a run."""

import itertools
import shutil
import statistics
import subprocess
import sys

from zgcm_testing.tiny_runs import tiny_recipe, write_tiny_data
from zgcm_train import Trainer, dump_recipe, run_recipe
from zgcm_train.assembly import build_parts

SAVES = 4


def test_a_save_behind_training_stalls_it_for_less_than_one_step(recipe, tmp_path, clock, report, benchmark):
    folder = tmp_path / "run"
    for name in ("checkpoints", "logs"):
        (folder / name).mkdir(parents=True)
    saving = recipe(checkpoint={"interval": 1000, "asynchronous": True})
    trainer = Trainer(build_parts(saving, folder, None))
    stream = iter(trainer.parts.loader)
    steps, stalls, beside = [], [], []

    def timed(work, into):
        start = clock()
        work()
        into.append(clock() - start)

    def save_and_train():
        timed(lambda: trainer.train_step(stream), steps)
        timed(trainer.save, stalls)
        # The thread takes its share of the machine from the updates that follow.
        for _ in itertools.takewhile(lambda _: trainer.saver.busy, itertools.count()):
            timed(lambda: trainer.train_step(stream), beside)

    benchmark.pedantic(save_and_train, rounds=SAVES, warmup_rounds=1)
    step, stall = statistics.median(steps[1:]), statistics.median(stalls[1:])
    slower = max(beside, default=step) - step
    report(
        f"an update takes {step:.3f} s, beginning a save stalls training for {stall:.4f} s, and an update beside one "
        f"takes up to {slower:.3f} s longer",
        stall=stall,
        step=step,
    )
    assert stall + max(slower, 0) < step


def test_a_restart_makes_its_first_step_within_ten_seconds(tmp_path, report, benchmark):
    write_tiny_data(tmp_path / "data")
    recipe, folder = tiny_recipe(tmp_path / "data", eval={}), tmp_path / "run"
    recipe = recipe.model_copy(update={"eval": type(recipe.eval)()})
    run_recipe(recipe.model_copy(update={"stage": recipe.stage[:1]}), folder)
    (folder / "recipe.toml").unlink()
    file = tmp_path / "recipe.toml"
    file.write_text(dump_recipe(recipe))
    numbers = itertools.count()

    def fresh_copy():
        copy = tmp_path / f"copy-{next(numbers)}"
        shutil.copytree(folder, copy)
        return ([sys.executable, "-m", "zgcm_train", "run", str(file), "--out", str(copy)],), {}

    def restart(command):
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        first = next((line for line in process.stderr if line.startswith("step")), "")
        process.kill()
        process.wait()
        process.stderr.close()
        return first

    first = benchmark.pedantic(restart, setup=fresh_copy, rounds=3)
    assert "7/12" in first, first
    report(f"from a new process to the first update after a restart: {benchmark.stats.stats.median:.1f} s")
    assert benchmark.stats.stats.max < 10
