"""Save the checkpoints of a run one after another, in the foreground or behind training."""

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.optim import Optimizer

from zgcm_train.checkpoint.folder import folder_name
from zgcm_train.checkpoint.progress import Identity, Progress, dump_state
from zgcm_train.checkpoint.tensors import collect_tensors, write_checkpoint
from zgcm_train.errors import ZgcmError

Outcome = Path | ZgcmError | None


class Saver:
    """Writes one checkpoint at a time.

    In the background, ``begin`` copies every tensor to memory of its own and returns; a thread writes the copy,
    over a process group of its own, while training goes on.

    Args:
        folder: where the ``step-*`` folders are.
        asynchronous: whether to write in the background.
    """

    def __init__(self, folder: Path, *, asynchronous: bool = False) -> None:
        """Nothing is started before the first save."""
        self.folder = folder
        self.asynchronous = asynchronous
        self._save: Future[Path] | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._group: dist.ProcessGroup | None = None
        self._stager: DefaultStager | None = None

    def begin(self, model: nn.Module, optimizer: Optimizer, progress: Progress, identity: Identity) -> None:
        """Start to save; every rank calls this. An earlier save must be over, see ``wait``.

        Args:
            model: its parameters may be sharded.
            optimizer: its state is saved under the parameters' names.
            progress: where the run stands.
            identity: what the run is.
        """
        if self._save is not None:
            raise RuntimeError("one checkpoint at a time: call wait() first")
        final, state = self.folder / folder_name(progress.step), dump_state(progress, identity)
        tensors = collect_tensors(model, optimizer)
        if self.asynchronous:
            copies, thread = self._copy(tensors), self._open_thread()
            self._save = thread.submit(self._write, final, copies, state, self._group)
        else:
            self._save = Future()
            try:
                self._save.set_result(self._write(final, tensors, state, None))
            except ZgcmError as error:
                self._save.set_exception(error)

    @property
    def busy(self) -> bool:
        """Whether a save goes on."""
        return self._save is not None and not self._save.done()

    def poll(self) -> Outcome:
        """Return how a save ended, once; None while it goes on or when there is none."""
        return None if self.busy else self.wait()

    def wait(self) -> Outcome:
        """Wait for the save that goes on and return its folder, or why it failed; None when there is none.

        Raises:
            Exception: it failed for a reason that is not the disk's.
        """
        if self._save is None:
            return None
        save, self._save = self._save, None
        try:
            return save.result()
        except ZgcmError as error:
            return error

    def close(self) -> None:
        """Wait for what goes on and stop the thread."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
        if self._stager is not None:
            self._stager.close()
            self._stager = None

    @staticmethod
    def _write(final: Path, tensors: dict[str, Any], state: str, group: dist.ProcessGroup | None) -> Path:
        write_checkpoint(final, tensors, state, group)
        return final

    def _copy(self, tensors: dict[str, Any]) -> dict[str, Any]:
        if self._stager is None:
            # In this thread and without pinned memory, so that the copy is whole when this returns.
            self._stager = DefaultStager(StagingOptions(False, False, False, False))
        copies = self._stager.stage(tensors)
        return copies.result() if isinstance(copies, Future) else copies

    def _open_thread(self) -> ThreadPoolExecutor:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
            # Collectives of two threads must not meet in one group.
            self._group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        return self._thread
