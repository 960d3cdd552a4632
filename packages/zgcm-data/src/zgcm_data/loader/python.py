"""The ``python`` backend: mapped shards, read piece by piece in threads, delivered in order."""

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError

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
    if job.options.workers == 0:
        for first, count in job.blocks():
            yield from BlockBatches(job, first, count)
        return
    with _Readers(job.options.workers, job.options.timeout) as readers:
        waiting: deque[Future[Batches]] = deque()
        for task in _tasks(job):
            waiting.append(readers.submit(task))
            if len(waiting) > job.options.prefetch:
                yield from readers.wait(waiting.popleft())
        while waiting:
            yield from readers.wait(waiting.popleft())


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


class _Readers:
    """Reading threads. They are daemons, so a stalled file system cannot keep the process alive."""

    def __init__(self, count: int, timeout: float) -> None:
        self._count, self._timeout = count, timeout
        self._tasks: queue.SimpleQueue[tuple[Future[Batches], Task] | None] = queue.SimpleQueue()
        self._stopped = threading.Event()

    def __enter__(self) -> "_Readers":
        for number in range(self._count):
            threading.Thread(target=self._work, name=f"zgcm-reader-{number}", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        for _worker in range(self._count):
            self._tasks.put(None)

    def submit(self, task: Task) -> "Future[Batches]":
        future: Future[Batches] = Future()
        self._tasks.put((future, task))
        return future

    def wait(self, future: "Future[Batches]") -> Batches:
        try:
            return future.result(self._timeout)
        except FutureTimeoutError as error:
            if future.done():
                raise
            raise TimeoutError(
                f"no data for {self._timeout} seconds; check the storage that holds the shards, or raise the "
                "loader option 'timeout'"
            ) from error

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None and not self._stopped.is_set():
            future, read = task
            try:
                future.set_result(read())
            except BaseException as error:
                future.set_exception(error)
