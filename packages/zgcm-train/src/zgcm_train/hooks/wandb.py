"""Show a run on Weights & Biases; the only file that imports ``wandb``."""

import uuid
from pathlib import Path
from typing import Any

from zgcm_train.errors import MissingSettingError
from zgcm_train.files import write_atomic
from zgcm_train.processes import is_main
from zgcm_train.trainer import Hook, Trainer


class WandbHook(Hook):
    """Logs the records of ``metrics.jsonl`` on the main rank; a resumed run goes on as the same W&B run.

    ``WANDB_MODE=offline`` keeps everything in the run folder, for ``wandb sync``.

    Args:
        project: of W&B.
        name: of the run.
        folder: the run folder, which keeps the id of the W&B run.
        settings: the recipe, shown beside the figures.
    """

    def __init__(self, project: str, name: str, folder: Path, settings: dict[str, Any]) -> None:
        """Refuse at once when the extra is missing.

        Raises:
            MissingSettingError: ``wandb`` cannot be imported.
        """
        self.project, self.name, self.folder, self.settings = project, name, folder, settings
        self._run: Any = None
        self._module: Any = load_wandb() if is_main() else None

    def record(self, record: dict[str, Any]) -> None:
        """Log one record of kind ``train`` or ``eval``."""
        if self._module is None:
            return
        if self._run is None:
            self._run = self._open()
        if record["kind"] == "eval":
            figures = {f"heldout/{name}": d["bits_per_byte"] for name, d in record["domains"].items()}
        else:
            figures = {
                f"train/{k}": v for k, v in record.items() if isinstance(v, int | float) and k != "step"
            }
        self._run.log(figures, step=record["step"])

    def _open(self) -> Any:
        file = self.folder / "logs" / "wandb_id"
        if not file.exists():
            write_atomic(file, uuid.uuid4().hex)
        return self._module.init(
            project=self.project,
            name=self.name,
            id=file.read_text(encoding="utf-8"),
            resume="allow",
            dir=str(self.folder),
            config=self.settings,
        )

    def stage_end(self, trainer: Trainer) -> None:
        """Close the W&B run; the next stage opens it again."""
        if self._run is not None:
            self._run.finish()
            self._run = None

    def failed(self, trainer: Trainer, error: BaseException) -> None:
        """Close the W&B run."""
        self.stage_end(trainer)


def load_wandb() -> Any:
    """Import ``wandb``.

    Raises:
        MissingSettingError: it is not installed; names the extra.
    """
    try:
        import wandb
    except ImportError as error:
        raise MissingSettingError(
            'log.wandb needs Weights & Biases: pip install "zgcm-train[wandb]", or leave log.wandb out.'
        ) from error
    return wandb
