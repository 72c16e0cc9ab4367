"""Which worker gets which task, and when."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from ..interrupts import wait_free
from .encoder import EncodedTask, Encoder, Task
from .worker_handle import WorkerHandle
from .workers import Workers

# Tasks of a call, per worker: as many as a map has that is told no chunk size.
_FIRST = 4


class Scheduler:
    """Sends tasks ahead while their turn is near, and takes back what was given to the wrong one.

    `put` is for any thread, all else for the pool's one thread: a signal handler may raise at any
    step of the main thread, and there leaves a task sent or not, and nothing half done.

    Args:
        workers: the workers.
        backlog: where tasks wait.
        encoder: encodes them.
        lock: guards the workers and the backlog. It is not held while tasks are pickled and sent:
            the worker's `sending` is held for that.
        refuse: takes the result of a task that cannot be sent.

    Attributes:
        may_have_room: whether a worker may have room, so that not each `put` looks at all of them.
    """

    def __init__(
        self,
        workers: Workers,
        backlog: SharedBacklog | PerWorkerBacklog,
        encoder: Encoder,
        lock: threading.RLock,
        refuse: Callable[[tuple[int, int, tuple[bool, Any]]], object],
        *,
        is_timed: bool,
    ) -> None:
        self.may_have_room = False
        self._workers = workers
        self._backlog = backlog
        self._encoder = encoder
        self._lock = lock
        self._refuse = refuse
        # What is done with each task that is sent from another thread than the pool's.
        self._then = (partial(os.eventfd_write, workers.wake_fd, 1),) if is_timed else ()

    def put(self, task: Task) -> None:
        """Take a task, and send it at once where none waits and a worker has room."""
        # Of a call of many tasks only the first go one by one: each wakes a worker.
        is_first = task[1] < _FIRST * len(self._workers.by_slot)
        if is_first and self.may_have_room and not self._backlog and self._send_now(task):
            return
        self._backlog.put(task)
        if self.may_have_room:
            self._workers.wake()

    def put_back(self, worker: WorkerHandle, tasks: Sequence[Task]) -> None:
        """Have tasks of a worker wait again, before others."""
        with self._lock:
            self._backlog.put_back(worker.slot, tasks)

    @property
    def is_uneven(self) -> bool:
        """Whether a worker has nothing to do while tasks wait at another."""
        return not self._backlog and self._workers.is_uneven

    def take_back(self, since: float) -> None:
        """Take tasks from behind those that workers have been at since some time."""
        with self._lock:
            for worker in self._workers.by_slot.values():
                if (
                    worker.last_event < since
                    and len(worker.inflight) > 1
                    and not worker.sending.locked()
                ):
                    self._backlog.put_back(worker.slot, worker.take_back())

    def forget(self, job: int) -> None:
        """Drop the function of a call that has ended, here and in the workers."""
        if self._encoder.forget(job):
            with self._lock:
                for worker in self._workers.by_slot.values():
                    worker.forget(job)

    def close(self) -> None:
        """Drop what waits."""
        with self._lock:
            self.may_have_room = False
            self._backlog.clear()

    def send_waiting(self) -> None:
        """Send waiting tasks to workers that have room."""
        while self.may_have_room and self._backlog:
            sending = threading.Lock()
            with sending:
                with self._lock:
                    worker, tasks = self._choice()
                    if worker is not None:
                        worker.sending = sending
                if worker is not None:
                    self._send(worker, tasks)
                    self.may_have_room = True
                    continue
            # A thread that is interrupted tells nobody that it has let go.
            for worker in self._workers.by_slot.values():
                wait_free(worker.sending)

    def _send_now(self, task: Task) -> bool:
        """Send a task from the caller's thread; return whether it needs no more care.

        Ctrl-C may come after any step here: what is changed is changed in one go.
        """
        with self._lock:
            worker = self._best()
        if worker is None:
            return False
        try:
            encoded = self._encoder.encode(task, worker.known)
        except Exception as error:
            self._refused(task, error)
            return True
        sending = threading.Lock()
        try:
            with sending:
                # Not longer: the answer may be there before this thread goes on.
                with self._lock:
                    # Another thread may have been faster, or the worker have ended.
                    if self._workers.by_slot.get(worker.slot) is not worker or worker.room <= 0:
                        return False
                    worker.sending = sending
                return worker.send(task, encoded, *self._then)
        except OSError as error:
            self._refused(task, error)
            return True
        finally:
            encoded.release()

    def _best(self) -> WorkerHandle | None:
        workers = self._workers.by_slot.values()
        best = min((worker for worker in workers if worker.room > 0), key=_load, default=None)
        if best is None and not any(worker.sending.locked() for worker in workers):
            self.may_have_room = False
        return best

    def _choice(self) -> tuple[WorkerHandle | None, list[Task]]:
        waiting = len(self._backlog)
        best = self._best() if waiting else None
        if best is None:
            return None, []
        # What is left is shared out evenly.
        share = min(best.room, -(-waiting // len(self._workers.by_slot)))
        return best, self._backlog.take(best.slot, share)

    def _send(self, worker: WorkerHandle, tasks: list[Task]) -> None:
        """Send tasks that were taken for a worker; what there is no room for waits again."""
        rest = deque(tasks)
        small: list[tuple[Task, EncodedTask]] = []
        while rest and worker.has_room_beside and self._send_large(worker, rest[0], small):
            rest.popleft()
        left = [*(worker.send_small(small) if small else ()), *rest]
        if left:
            with self._lock:
                self._backlog.put_back(worker.slot, left)

    def _send_large(
        self, worker: WorkerHandle, task: Task, small: list[tuple[Task, EncodedTask]]
    ) -> bool:
        """Send a task if it is large, put it among the small ones if it is not.

        Returns:
            Whether it needs no more care.
        """
        try:
            encoded = self._encoder.encode(task, worker.known)
            if not encoded.beside:
                small.append((task, encoded))
                return True
            try:
                return worker.send(task, encoded)
            finally:
                encoded.release()
        # Pickling runs the code of classes; in this thread nothing else raises what ends programs.
        except BaseException as error:
            self._refused(task, error)
            return True

    def _refused(self, task: Task, error: BaseException) -> None:
        self._refuse((task[0], task[1], (False, error)))
        self._workers.wake()


def _load(worker: WorkerHandle) -> int:
    return len(worker.inflight)


class SharedBacklog:
    """One queue for all workers: the next task goes to whichever has room."""

    def __init__(self) -> None:
        self._tasks: deque[Task] = deque()
        # Needs no lock.
        self.put = self._tasks.append

    def __len__(self) -> int:
        return len(self._tasks)

    def take(self, slot: int, share: int) -> list[Task]:
        """Return some of the next tasks for a worker."""
        tasks = self._tasks
        return [tasks.popleft() for _ in range(min(share, len(tasks)))]

    def put_back(self, slot: int, tasks: Sequence[Task]) -> None:
        """Put tasks that a worker was given back to the front."""
        self._tasks.extendleft(reversed(tasks))

    def clear(self) -> None:
        """Drop all tasks."""
        self._tasks.clear()


class PerWorkerBacklog:
    """A queue for each worker: a task goes to the shortest when it is submitted.

    A worker that has nothing left takes from the longest queue.
    """

    def __init__(self, slots: int) -> None:
        self._queues: list[deque[Task]] = [deque() for _ in range(slots)]
        self._next = 0

    def __len__(self) -> int:
        return sum(map(len, self._queues))

    def put(self, task: Task) -> None:
        """Add a task to the shortest queue; needs no lock."""
        queues = self._queues
        # Not always the first of equals.
        self._next = first = (self._next + 1) % len(queues)
        queue = queues[first]
        if queue:
            queue = min(queues, key=len)
        queue.append(task)

    def take(self, slot: int, share: int) -> list[Task]:
        """Return some of a worker's next tasks, or of another's where it has none."""
        queue = self._queues[slot]
        if not queue:
            queue = max(self._queues, key=len)
        return [queue.popleft() for _ in range(min(share, len(queue)))]

    def put_back(self, slot: int, tasks: Iterable[Task]) -> None:
        """Put tasks that a worker was given to the front of its queue again."""
        self._queues[slot].extendleft(reversed(list(tasks)))

    def clear(self) -> None:
        """Drop all tasks."""
        for queue in self._queues:
            queue.clear()
