"""The ``python`` backend: mapped shards, read piece by piece in threads, delivered in order."""

import queue
import threading
from collections.abc import Callable, Iterator

import numpy as np

from zgcm_data.loader.batch import Batch
from zgcm_data.loader.fields import BlockBatches, Job, piece_places

_LARGEST_KEPT = 16 << 20

Batches = list[Batch]
Task = Callable[[], Batches]


def batches(job: Job) -> Iterator[Batch]:
    """Yield the micro batches of a job in order.

    Args:
        job: what to read.

    Raises:
        ShardError: the rows cannot be read as the manifest says.
        TimeoutError: a reader delivered nothing for ``timeout`` seconds.
    """
    _keep_freed_memory()
    threads = job.options.threads
    if not threads:
        for first, count in job.blocks():
            yield from BlockBatches(job, first, count)
        return
    readers = _Readers(threads, job.options.timeout)
    try:
        for task in _tasks(job):
            readers.submit(task)
            if readers.waiting > job.options.prefetch:
                yield from readers.next()
        while readers.waiting:
            yield from readers.next()
    finally:
        readers.stop()


def _keep_freed_memory() -> None:
    """Make the C library keep freed buffers of a few MiB, instead of returning and clearing pages each time.

    Freeing one large block raises its threshold for that; the block itself is never touched.
    """
    np.empty(_LARGEST_KEPT, np.uint8)


def _tasks(job: Job) -> Iterator[Task]:
    """Yield what the threads are to do, in the order of the rows."""
    for first, count in job.blocks():
        block = _SharedBlock(job, first, count)
        for piece in piece_places(job, count):
            yield block.task(*piece)


class _SharedBlock:
    """A block that is looked up once, by the first thread that needs it."""

    def __init__(self, job: Job, first: int, count: int) -> None:
        self._place = (job, first, count)
        self._lock = threading.Lock()
        self._block: BlockBatches | None = None

    def task(self, start: int, stop: int) -> Task:
        return lambda: self._looked_up().piece(start, stop)

    def _looked_up(self) -> BlockBatches:
        with self._lock:
            if self._block is None:
                self._block = BlockBatches(*self._place)
            return self._block


class _Reader:
    """A reading thread that takes tasks and hands out what they gave, or their error, in the same order.

    It is a daemon, so a stalled file system cannot keep the process alive.
    """

    def __init__(self, number: int) -> None:
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[Batches | BaseException] = queue.SimpleQueue()
        threading.Thread(target=self._work, name=f"zgcm-reader-{number}", daemon=True).start()

    def submit(self, task: Task | None) -> None:
        """Add a task; None ends the thread."""
        self._tasks.put(task)

    def wait(self, timeout: float) -> Batches:
        """Return what the oldest task gave."""
        try:
            result = self._results.get(timeout=timeout)
        except queue.Empty as error:
            raise TimeoutError(
                f"no data for {timeout} seconds; check the storage that holds the shards, or raise the "
                "loader option 'timeout'"
            ) from error
        if isinstance(result, BaseException):
            raise result
        return result

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                self._results.put(task())
            except BaseException as error:
                self._results.put(error)


class _Readers:
    """Reading threads that take turns, so that results come in the order of the tasks.

    Args:
        count: threads.
        timeout: seconds to wait for a result.
    """

    def __init__(self, count: int, timeout: float) -> None:
        self._readers = [_Reader(number) for number in range(count)]
        self._timeout = timeout
        self._submitted = self._received = 0

    @property
    def waiting(self) -> int:
        """Tasks whose results have not been taken."""
        return self._submitted - self._received

    def submit(self, task: Task) -> None:
        self._readers[self._submitted % len(self._readers)].submit(task)
        self._submitted += 1

    def next(self) -> Batches:
        batches = self._readers[self._received % len(self._readers)].wait(self._timeout)
        self._received += 1
        return batches

    def stop(self) -> None:
        for reader in self._readers:
            reader.submit(None)
