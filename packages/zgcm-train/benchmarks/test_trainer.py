"""What the trainer costs beside the computation itself."""

import itertools
import statistics

from zgcm_optim import clip_grad_norm_
from zgcm_train import Trainer
from zgcm_train.assembly import build_parts
from zgcm_train.run import _built_in_hooks

ROUNDS = 24


def prepare(recipe, folder):
    for name in ("checkpoints", "logs"):
        (folder / name).mkdir(parents=True)
    parts = build_parts(recipe, folder, None)
    hooks = _built_in_hooks(recipe, folder, lambda kind, value: None)
    trainer = Trainer(parts, hooks)
    for hook in hooks:
        hook.stage_start(trainer)
    return trainer


def bare_update(parts, batches):
    """Forward, backward, clip and update, with nothing else."""
    tokens = sum(int(batch.loss_mask.sum()) for batch in batches)
    for batch in batches:
        hidden = parts.decoder(batch.tokens[:, :-1])
        total, _ = parts.decoder.lm_terms(hidden, batch.tokens[:, 1:], batch.loss_mask)
        (total / tokens).backward()
    clip_grad_norm_(parts.decoder.parameters(), 1.0)
    parts.optimizer.step()
    parts.optimizer.zero_grad()


def test_the_trainer_adds_at_most_three_percent(recipe, tmp_path, clock, report, benchmark):
    trainer = prepare(recipe(), tmp_path / "ours")
    bare = build_parts(recipe(), tmp_path / "bare", None)
    batches = list(itertools.islice(iter(bare.loader), bare.loader.accumulation))
    stream = iter(trainer.parts.loader)
    ours, theirs = [], []

    def timed(work, into):
        start = clock()
        work()
        into.append(clock() - start)

    def both():
        # In turns, the first one changing, so that neither gets the warmer cache.
        turns = [(lambda: trainer.train_step(stream), ours), (lambda: bare_update(bare, batches), theirs)]
        for work, into in turns if len(ours) % 2 else turns[::-1]:
            timed(work, into)

    benchmark.pedantic(both, rounds=ROUNDS, warmup_rounds=2)
    added = statistics.median(a / b for a, b in zip(ours[2:], theirs[2:], strict=True)) - 1
    report(
        f"an update takes {statistics.median(theirs):.3f} s bare and {statistics.median(ours):.3f} s in the trainer; "
        f"it adds {added:.1%}",
        added=added,
    )
    assert added <= 0.03
