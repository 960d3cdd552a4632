"""The ``python`` backend: mapped shards, read block by block in threads, delivered in order."""

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError

from zgcm_data.loader.batch import Batch
from zgcm_data.loader.fields import BlockBatches, Job


def batches(job: Job) -> Iterator[Batch]:
    """Yield the micro batches of a job in order.

    Args:
        job: what to read.

    Raises:
        ShardError: the rows cannot be read as the manifest says.
        TimeoutError: a reader delivered nothing for ``timeout`` seconds.
    """
    if job.options.workers == 0:
        for first, count in job.blocks():
            yield from BlockBatches(job, first, count)
        return
    with _Readers(job) as readers:
        waiting: deque[Future[list[Batch]]] = deque()
        for first, count in job.blocks():
            waiting.append(readers.submit(first, count))
            if len(waiting) > job.options.prefetch:
                yield from readers.wait(waiting.popleft())
        while waiting:
            yield from readers.wait(waiting.popleft())


class _Readers:
    """Reading threads. They are daemons, so a stalled file system cannot keep the process alive."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._tasks: queue.SimpleQueue[tuple[Future[list[Batch]], Callable[[], list[Batch]]] | None]
        self._tasks = queue.SimpleQueue()
        self._stopped = threading.Event()

    def __enter__(self) -> "_Readers":
        for number in range(self._job.options.workers):
            threading.Thread(target=self._work, name=f"zgcm-reader-{number}", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        for _worker in range(self._job.options.workers):
            self._tasks.put(None)

    def submit(self, first: int, count: int) -> "Future[list[Batch]]":
        future: Future[list[Batch]] = Future()
        self._tasks.put((future, lambda: list(BlockBatches(self._job, first, count))))
        return future

    def wait(self, future: "Future[list[Batch]]") -> list[Batch]:
        timeout = self._job.options.timeout
        try:
            return future.result(timeout)
        except FutureTimeoutError as error:
            if future.done():
                raise
            raise TimeoutError(
                f"no data for {timeout} seconds; check the storage that holds the shards, or raise the "
                "loader option 'timeout'"
            ) from error

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None and not self._stopped.is_set():
            future, read = task
            try:
                future.set_result(read())
            except BaseException as error:
                future.set_exception(error)
