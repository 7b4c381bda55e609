"""Runs on a Ray cluster: a task of Ray each, on whichever machine has room. Ray places them and repeats those that die.

Workers send their messages through one queue of Ray. A machine that sees the suite's directory makes its runs there.
Another one makes them in a temporary directory: it gets what an earlier attempt has left, and sends files that changed
back after every task and at the end.

Ray does not say that it repeats a task; that an attempt was lost follows from the arrival of the next one, or from the
loss of its machine. Ray takes queued tasks in any order, and a repeated one last: so it is given no more of them than
the machines hold, in the order of the suite.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
import time
import uuid
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from tpl import program
from tpl._version import __version__
from tpl.bench.engines.base import (
    ATTEMPTS,
    FAILED,
    FINISHED,
    RETRIED,
    STARTED,
    CarryOut,
    Engine,
    Job,
    JobEvent,
    carry_out,
    output_kept,
    try_job,
    without_interrupts,
)
from tpl.cluster import (
    ChangedFiles,
    Machine,
    Payload,
    Share,
    chosen_threads,
    connect,
    load_ray,
    pack,
    share_out,
    unpack,
    use_threads,
)
from tpl.errors import TplError
from tpl.files import at_home
from tpl.store import ModelStore

ARRIVED, FILES = "arrived", "files"  # messages of a worker to its engine, beside the events of a run
QUEUED = 100  # messages in the queue at most: workers that send more wait
TICK = 0.2  # seconds to wait for a message before looking for ended tasks
COUNT = 1.0  # seconds between two counts of the machines, which may come and go
GRACE = 10.0  # seconds for a cancelled task to be gone
# The files of a run directory that refer to others in it: see `tpl.bench.run`.
LAST = ("model/model.json", "results.json")
EVENTS = "events.jsonl"  # others look into it to see how far a run is
PAUSE = 5.0  # seconds between two copies of it


class RayEngine(Engine):
    """Tasks on a Ray cluster, or on one of this machine alone."""

    name: ClassVar[str] = "ray"
    options: ClassVar[tuple[str, ...]] = ("address", "gpu_share")

    def __init__(
        self,
        device: str = "auto",
        workers: int | None = None,
        address: str | None = None,
        gpu_share: float | None = None,
    ) -> None:
        self.ray = load_ray()
        self.device, self.workers, self.gpu_share = device, workers, gpu_share
        if device != "cpu":
            share_out([Machine(1, 1)], device, 1, workers, gpu_share)  # a mistake is found before anything is started
        self.own = connect(address)
        self.carry_out: CarryOut = carry_out  # what a worker does with a job
        self.in_place = True  # a machine that sees the suite's directory works in it; False: none does
        try:
            self.share(1)
        except TplError:
            self._leave()
            raise

    def share(self, jobs: int) -> Share:
        """What one of so many jobs takes of a machine."""
        return share_out(Machine.all(self.ray), self.device, jobs, self.workers, self.gpu_share)

    def slots(self, jobs: int) -> int:
        """As many as there is room for now, or `workers` if these are fewer."""
        room = self.share(jobs).fits(Machine.all(self.ray))
        return max(1, min(jobs, room, self.workers or room))

    def run(self, jobs: Sequence[Job]) -> Generator[JobEvent]:
        """Carry out all jobs, each in a task of Ray."""
        with _probe_file(jobs, self.in_place) as probe:
            tasks = _Tasks(self.ray, jobs, self.share(len(jobs)), self.workers, self.carry_out, probe)
            try:
                while tasks.waiting or tasks.running:
                    yield from tasks.submit()
                    yield from tasks.receive()
            except self.ray.exceptions.RayActorError:
                raise TplError("The queue between the runs and the suite was lost; the same command goes on.") from None
            finally:
                with without_interrupts():  # an impatient second Ctrl-C leaves nobody behind
                    tasks.close()
                    self._leave()

    def _leave(self) -> None:
        if self.own:
            self.ray.shutdown()


@contextmanager
def _probe_file(jobs: Sequence[Job], wanted: bool) -> Iterator[Path | None]:
    """A file beside the run directories, of a name that is nowhere else: a machine that has it sees this directory."""
    if not wanted or not jobs:
        yield None
        return
    file = Path(jobs[0].directory).parent / f".here-{uuid.uuid4().hex}"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    try:
        yield file
    finally:
        with suppress(OSError):
            file.unlink()


@dataclass
class _Task:
    """A task of Ray that carries out one job."""

    job: Job
    result: Any  # its ObjectRef
    attempts: int = 0  # that have arrived
    attempt: str = ""  # the id of the one at work: messages of another are late
    machine: str = ""
    node: str = ""
    held: ExitStack = field(default_factory=ExitStack)  # the run directory, while another machine makes its files

    @property
    def place(self) -> Path:
        return Path(self.job.directory)


class _Tasks:
    """The tasks of a suite, and what their workers send."""

    def __init__(
        self, ray: Any, jobs: Sequence[Job], share: Share, workers: int | None, carry_out: CarryOut, probe: Path | None
    ) -> None:
        self.ray, self.share, self.workers, self.carry_out = ray, share, workers, carry_out
        self.queue = _queue_on(ray.get_runtime_context().get_node_id(), QUEUED)  # it is lost with this machine alone
        self.settings = WorkerSettings(
            self.queue, chosen_threads(share.threads), os.getcwd(), None if probe is None else str(probe)
        )
        self.waiting = deque(jobs)
        self.running: dict[str, _Task] = {}  # by the name of its job
        self.task = ray.remote(work).options(
            num_cpus=share.cpus,
            num_gpus=share.gpus,
            max_retries=ATTEMPTS - 1,
            retry_exceptions=[MayPassError],
            scheduling_strategy="SPREAD",
            name="tpl suite",
        )
        self._room, self._counted, self._warned = 0, -COUNT, False

    def submit(self) -> Iterator[JobEvent]:
        """Give Ray what there is room for."""
        if time.monotonic() - self._counted >= COUNT:
            machines = Machine.all(self.ray)
            self._room, self._counted = self.share.fits(machines), time.monotonic()
            alive = {machine.node for machine in machines}
            for task in self.running.values():
                if task.attempt and task.attempts < ATTEMPTS and task.node not in alive:
                    yield _retried(task, f"its machine {task.machine} was lost")
        while self.waiting and len(self.running) < (self.workers or max(self._room, 1)):
            with without_interrupts():  # no task without its entry: it would never be cancelled
                job = self.waiting.popleft()
                result = self.task.remote(job.to_json(), self.carry_out, self.settings)
                self.running[job.name] = _Task(job, result)
        if not self._room and not self._warned:
            self._warned = True
            text = f"no machine of the cluster has room for it now (it takes {self.share}); it waits for one"
            yield JobEvent(next(iter(self.running)), "warning", {"text": text})

    def receive(self) -> Iterator[JobEvent]:
        """The next messages, if there are any soon, and the ends of tasks."""
        from ray.util.queue import Empty

        results = {task.result: name for name, task in self.running.items()}
        ended, _ = self.ray.wait(list(results), num_returns=len(results), timeout=0)
        # Workers wait until a message is in the queue: all that ended tasks have sent is there by now.
        for _ in range(self.queue.size() if ended else 1):
            try:
                message = self.queue.get(timeout=TICK)
            except Empty:
                break
            yield from self._take(*message)
        for result in ended:
            if results[result] in self.running:
                yield self._end(self.running.pop(results[result]))

    def _take(self, name: str, attempt: str, kind: str, data: dict[str, Any]) -> Iterator[JobEvent]:
        task = self.running.get(name)
        if task is None or (kind != ARRIVED and attempt != task.attempt):
            return
        try:
            if kind == ARRIVED:
                yield from self._arrive(task, attempt, data)
            elif kind == FILES:
                unpack(Payload(**data), task.place, LAST)
            elif kind == FAILED:
                if task.attempts < ATTEMPTS:
                    yield _retried(task, data["error"])
            else:
                yield JobEvent(name, kind, data)
        except (TplError, OSError) as error:  # the directory is somebody else's, or cannot be written
            self._cancel([self.running.pop(name)])
            yield JobEvent(name, FAILED, {"error": str(error)})

    def _arrive(self, task: _Task, attempt: str, data: dict[str, Any]) -> Iterator[JobEvent]:
        """An attempt begins."""
        if task.attempts == ATTEMPTS:  # Ray repeats without end what it stopped itself, to save memory
            raise TplError(_died(task.machine))
        if task.attempt:
            yield _retried(task, _died(task.machine))
        task.attempt, task.attempts = attempt, task.attempts + 1
        task.machine, task.node = data["machine"], data["node"]
        reply = data["reply"]
        task.held.close()
        if reply is not None:  # that machine cannot hold the directory here: nobody else may write it, and all can see
            task.held.enter_context(ModelStore(task.place / "model").writing())
            with suppress(self.ray.exceptions.RayError):  # it is lost already
                reply.put(pack(task.place).files)
        process = {"pid": data["pid"], "node": task.machine, "away": reply is not None}
        yield JobEvent(task.job.name, STARTED, {"attempt": task.attempts} | process)

    def _end(self, task: _Task) -> JobEvent:
        """How a job ended whose task is over."""
        task.held.close()
        if task.place.is_dir():
            os.listdir(task.place)  # a network file system looks anew for what another machine has written
        try:
            self.ray.get(task.result)
        except self.ray.exceptions.RayError as error:
            return JobEvent(task.job.name, FAILED, {"error": _reason(error, task.machine)})
        return JobEvent(task.job.name, FINISHED)

    def _cancel(self, tasks: list[_Task]) -> None:
        """End tasks and their attempts, and wait until they are over."""
        results = [task.result for task in tasks]
        for result in results:
            self.ray.cancel(result, force=True)
        if results:
            self.ray.wait(results, num_returns=len(results), timeout=GRACE)
        for task in tasks:
            task.held.close()

    def close(self) -> None:
        """Cancel all tasks. They may be at anything: a run directory stands that."""
        self._cancel(list(self.running.values()))
        self.running.clear()
        self.queue.shutdown(force=True)


def _retried(task: _Task, error: str) -> JobEvent:
    task.attempt = ""
    return JobEvent(task.job.name, RETRIED, {"error": error})


def _died(machine: str) -> str:
    return f"its process on {machine or 'a machine'} died: it may have been killed, or run out of memory"


def _reason(error: Exception, machine: str) -> str:
    """Why a task failed, in a line; Ray's own texts are pages."""
    cause = getattr(error, "cause", None) or error
    if isinstance(cause, TplError | MayPassError):
        return str(cause)
    match type(error).__name__:
        case "WorkerCrashedError":
            return _died(machine)
        case "OutOfMemoryError":
            return f"Ray ended its process on {machine}: the machine ran out of memory. Give each run a larger share"
        case "NodeDiedError" | "ObjectLostError" | "OwnerDiedError" | "ObjectFetchTimedOutError":
            return f"its machine {machine} was lost"
    text = (str(cause).strip().splitlines() or [""])[-1].strip()
    if "No module named 'tpl" in str(error):
        return f"a machine of the cluster has no tpl: install the same version on all of them ({text})"
    return f"{type(cause).__name__} on {machine or 'a machine'}: {text}"


def _queue_on(node: str, size: int) -> Any:
    """A queue on a machine; it takes no room."""
    from ray.util.queue import Queue
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    place = NodeAffinitySchedulingStrategy(node, soft=False)
    return Queue(size, actor_options={"num_cpus": 0, "scheduling_strategy": place})


# In the worker's process, wherever its machine is


class MayPassError(Exception):
    """A failure of a run after which another attempt is worth it."""


@dataclass(frozen=True)
class WorkerSettings:
    """What every worker of a suite has to know."""

    queue: Any
    threads: int
    folder: str  # the suite's current one: a class-order file may be named relative to it
    probe: str | None  # a file in the suite's directory; a worker that finds it works there
    version: str = __version__


class _Link:
    """The way of a worker to its engine.

    All calls of Ray are made by a second thread: while the main one waits for Ray, its CPUs are given to other tasks.
    """

    def __init__(self, queue: Any, job: str) -> None:
        self.queue, self.job, self.attempt = queue, job, uuid.uuid4().hex
        self.thread = ThreadPoolExecutor(1)

    def call(self, function: Any, *arguments: Any) -> Any:
        return self.thread.submit(function, *arguments).result()

    def send(self, kind: str, data: dict[str, Any]) -> None:
        """Returns when the message is in the queue: then it is not lost with this process."""
        self.call(self.queue.put, (self.job, self.attempt, kind, data))


def work(text: str, carry_out: CarryOut, settings: WorkerSettings) -> None:
    """Make an attempt at a job. A TplError is final; after a MayPassError, Ray makes another one."""
    program.claim()
    job = Job.from_json(text)
    link = _Link(settings.queue, job.name)
    away = settings.probe is None or not Path(settings.probe).exists()
    machine, node = socket.gethostname(), load_ray().get_runtime_context().get_node_id()
    reply = link.call(_queue_on, node, 1) if away else None
    link.send(ARRIVED, {"pid": os.getpid(), "machine": machine, "node": node, "reply": reply})
    if os.path.isdir(settings.folder):
        os.chdir(settings.folder)
    if problem := _missing(job, settings):
        raise TplError(problem)
    try:
        with _directory(job, link, reply) as place:
            changed = None if reply is None else ChangedFiles(place)
            failure = _run(replace(job, directory=str(place)), carry_out, settings.threads, link, changed)
    except (OSError, SystemExit) as error:  # not from the run itself: a full disk, say
        failure = {"error": f"{type(error).__name__} on {machine}: {error}", "final": False}
    if failure is not None:
        if failure["final"]:
            raise TplError(failure["error"])
        link.send(FAILED, failure)
        raise MayPassError(failure["error"])


def _run(
    job: Job, carry_out: CarryOut, threads: int, link: _Link, changed: ChangedFiles | None
) -> dict[str, Any] | None:
    use_threads(threads)
    quiet_until = 0.0

    def send_files(only: Sequence[str] | None = None) -> None:
        if changed is not None:
            sys.stdout.flush()
            link.send(FILES, asdict(changed.take(only)))

    def emit(kind: str, data: dict[str, Any]) -> None:
        nonlocal quiet_until
        whole = kind == "stage"
        if whole or time.monotonic() >= quiet_until:
            quiet_until = time.monotonic() + PAUSE
            send_files(None if whole else [EVENTS])  # before the event that refers to them
        link.send(kind, data)

    with output_kept(Path(job.directory)):
        failure = try_job(carry_out, job, emit)
        send_files()
    return failure


def _missing(job: Job, settings: WorkerSettings) -> str | None:
    """What this machine lacks."""
    here = socket.gethostname()
    if settings.version != __version__:
        return f"{here} has tpl {__version__}, the suite {settings.version}: install the same on all machines."
    wanted = {name: job.spec[name] for name in ("data", "weights") if job.spec[name] is not None}
    file, _, _ = job.spec["order"].rpartition(":")
    if file.lower().endswith(".json"):
        wanted["order"] = file
    for name, path in wanted.items():
        if not at_home(path).exists() and not (name == "data" and job.spec["download"]):
            return (
                f"{name} = {path} is not on {here}: put it at the same place on every machine of the cluster, "
                "or on a file system that all of them see."
            )
    return None


@contextmanager
def _directory(job: Job, link: _Link, reply: Any) -> Iterator[Path]:
    """Where the run is made: the suite's own directory, or a temporary one with what the engine replies."""
    if reply is None:
        yield Path(job.directory)
        return
    root = Path(tempfile.gettempdir()) / f"tpl-ray-{os.getuid() if hasattr(os, 'getuid') else ''}"
    place = root / f"{socket.gethostname()}-{os.getpid()}" / job.name
    _remove_abandoned(root)
    shutil.rmtree(place.parent, ignore_errors=True)
    try:
        unpack(Payload(link.call(reply.get)), place)
        link.call(reply.shutdown, True)
        yield place
    finally:
        shutil.rmtree(place.parent, ignore_errors=True)


def _remove_abandoned(root: Path) -> None:
    """Remove what killed workers of this machine have left."""
    from tpl.bench.results import is_alive

    for left in root.glob(f"{socket.gethostname()}-*"):
        pid = left.name.rpartition("-")[2]
        if pid.isdecimal() and not is_alive(int(pid)):
            shutil.rmtree(left, ignore_errors=True)
