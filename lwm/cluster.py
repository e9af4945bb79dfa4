"""Several processes that train together: how they find each other, agree, and part.

What the processes tell each other here goes through the coordinator's key-value store, not through the devices: it
works before the first collective, while one is under way, and when a peer's devices cannot be reached. jax is imported
inside, so that a configuration can be read, and its devices simulated, before.
"""

import atexit
import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lwm.config import ClusterConfig

# How launchers that jax does not know (ssh, tests) describe a cluster; `jax.distributed` reads the first one itself.
COORDINATOR, NUM_PROCESSES, PROCESS_ID = "JAX_COORDINATOR_ADDRESS", "LWM_NUM_PROCESSES", "LWM_PROCESS_ID"
# What says that a scheduler started several tasks, and how many.
_TASK_COUNTS = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")

_CPU_THREADS = 32
# Bytes of one entry in the coordinator's store, below the limit of a message to it; and how long one look there waits.
_PART = 1 << 20
_LOOK_MS, _HEARD_MS = 10_000, 3_600_000

_rounds = 0
_messages = 0
_leads = False


class Disagreement(ValueError):
    """Something that every process of the run knows to be wrong, so that all of them end together."""


def sees_cluster(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this process was started as one of several: by the variables of a launcher, Slurm, MPI or a TPU pod."""
    if environ.get(COORDINATOR) or environ.get("COORDINATOR_ADDRESS"):
        return True
    if len(environ.get("TPU_WORKER_HOSTNAMES", "").split(",")) > 1 or environ.get("MEGASCALE_COORDINATOR_ADDRESS"):
        return True
    # Slurm sets a task count in a batch script as well, but a process id only in what srun starts.
    started = "SLURM_PROCID" in environ or "OMPI_COMM_WORLD_RANK" in environ or "PMI_RANK" in environ
    return started and any(environ.get(name, "1") not in ("", "1") for name in _TASK_COUNTS)


def connect(config: "ClusterConfig", environ: Mapping[str, str] = os.environ) -> bool:
    """Join the cluster that this process belongs to, if any; must come before jax starts its devices.

    Raises:
        ValueError: the launcher's variables contradict each other, or the other processes did not come.
    """
    if config.join == "no" or (config.join == "auto" and not sees_cluster(environ)):
        return False
    import jax

    # It would take SIGTERM away from `lifecycle.StopSignal`; here the processes agree in the train step instead.
    jax.config.update("jax_enable_preemption_service", False)
    # Of CPU clusters only. Collectives between processes hold a thread while they wait, and devices reach independent
    # ones in any order: with as many threads as cores, the one that the others wait for may never get any.
    os.environ.setdefault("NPROC", str(_CPU_THREADS))
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    known: dict[str, Any] = {}
    if environ.get(NUM_PROCESSES) or environ.get(PROCESS_ID):
        known = {"num_processes": _number(environ, NUM_PROCESSES), "process_id": _number(environ, PROCESS_ID)}
        if not 0 <= known["process_id"] < known["num_processes"]:
            raise ValueError(
                f"{PROCESS_ID} is {known['process_id']} and {NUM_PROCESSES} is {known['num_processes']}; processes are "
                "numbered from 0, each number once"
            )
    try:
        jax.distributed.initialize(
            **known,
            initialization_timeout=config.init_seconds,
            heartbeat_timeout_seconds=config.heartbeat_seconds,
            shutdown_timeout_seconds=config.heartbeat_seconds,
        )
    except (RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(
            f"the processes of this run could not find each other within {config.init_seconds} s ({reason}); start one "
            f"on every host with the same {COORDINATOR}, or set cluster.join to no"
        ) from error
    return True


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    if not text.isdigit() or not environ.get(COORDINATOR):
        raise ValueError(f"{name} is {text!r}; set {COORDINATOR}, {NUM_PROCESSES} and {PROCESS_ID} together, or none")
    return int(text)


def exchange(topic: str, value: str, seconds: float = 300.0) -> list[str]:
    """What every process said about `topic`, in the order of processes. All must call it, in the same order.

    Raises:
        ValueError: a process said nothing within `seconds`; names it.
    """
    import jax

    num_processes = jax.process_count()
    if num_processes == 1:
        return [value]
    global _rounds
    _rounds += 1
    client = _client()
    client.key_value_set(f"lwm/{_rounds}/{topic}/{jax.process_index()}", value)
    said = []
    for process in range(num_processes):
        try:
            said.append(client.blocking_key_value_get(f"lwm/{_rounds}/{topic}/{process}", int(seconds * 1000)))
        except Exception as error:  # the store raises whatever its transport raises
            raise ValueError(f"process {process} of {num_processes} did not answer about {topic}: {error}") from error
    return said


def agree(topic: str, problem: str | None, seconds: float = 300.0) -> list[str]:
    """The problems that processes have (with their number in front where there are several); empty when none has."""
    said = exchange(topic, json.dumps(problem), seconds)
    problems = [json.loads(each) for each in said]
    if len(said) == 1:
        return [each for each in problems if each]
    return [f"process {number}: {each}" for number, each in enumerate(problems) if each]


def barrier(topic: str) -> None:
    """Wait until every process is here."""
    exchange(topic, "")


def preflight(facts: Mapping[str, str], problem: str | None = None) -> None:
    """Refuse to start unless all hosts are about to run the same thing; before the first collective.

    `facts`: what must be equal everywhere, by name. `problem`: what keeps this process from starting.

    Raises:
        Disagreement: names the hosts that cannot start, or that differ from process 0 and in what.
    """
    mine = {"host": socket.gethostname(), "facts": dict(facts), "problem": problem}
    all_of_them: Sequence[dict[str, Any]] = [json.loads(each) for each in exchange("preflight", json.dumps(mine))]
    if len(all_of_them) == 1:
        if problem:
            raise ValueError(problem)
        return
    names = [f"process {number} on {each['host']}" for number, each in enumerate(all_of_them)]
    if troubled := [
        f"{name}: {each['problem']}" for name, each in zip(names, all_of_them, strict=True) if each["problem"]
    ]:
        raise Disagreement("not all hosts can start: " + "; ".join(troubled))
    first = all_of_them[0]["facts"]
    differing = []
    for name, each in zip(names[1:], all_of_them[1:], strict=True):
        facts_there = each["facts"]
        if wrong := [key for key in first.keys() | facts_there.keys() if first.get(key) != facts_there.get(key)]:
            told = ", ".join(f"{key} {facts_there.get(key)} instead of {first.get(key)}" for key in sorted(wrong))
            differing.append(f"{name} has {told}")
    if differing:
        raise Disagreement(f"the hosts do not agree with {names[0]}: {'; '.join(differing)}; start all of them alike")


def lead() -> None:
    """Begin to lead the other processes: from now on, until `dismiss`, they `hear` what this one `tell`s them.

    Of the first process; at the end of the program they are dismissed in any case.
    """
    global _leads
    _leads = True
    atexit.register(dismiss)


def leading() -> bool:
    """Whether this process leads others."""
    return _leads


def tell(message: bytes) -> None:
    """Send `message` to all other processes; returns when they have heard it."""
    assert _leads
    name = _send(b"+" + message)
    _wait_until_heard()
    _client().key_value_delete(name)


def dismiss(problem: str = "") -> None:
    """End leading: the others' `hear` gives None or, with a `problem`, raises Disagreement. A second time: nothing."""
    global _leads
    if _leads:
        _leads = False
        atexit.unregister(dismiss)
        _send(b"-" + problem.encode())


def hear() -> bytes | None:
    """The next message of the process that leads, however long it takes; None when it is done.

    Raises:
        Disagreement: the leading process failed.
        ValueError: the coordinator is gone.
    """
    global _messages
    _messages += 1
    client = _client()

    def part(name: str) -> bytes:
        while True:
            try:
                return client.blocking_key_value_get_bytes(f"lwm/message/{_messages}/{name}", _LOOK_MS)
            except Exception as error:  # the store raises whatever its transport raises
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise ValueError(f"the first process is gone: {error}") from error

    count = int(part("count"))
    message = b"".join(part(str(number)) for number in range(count))
    if message[:1] == b"+":
        _wait_until_heard()
        return message[1:]
    if len(message) > 1:
        raise Disagreement(message[1:].decode())
    return None


def _send(message: bytes) -> str:
    global _messages
    _messages += 1
    name, client = f"lwm/message/{_messages}", _client()
    parts = [message[start : start + _PART] for start in range(0, len(message), _PART)]
    for number, part in enumerate(parts):
        client.key_value_set_bytes(f"{name}/{number}", part)
    client.key_value_set_bytes(f"{name}/count", str(len(parts)).encode())
    return name


def _wait_until_heard() -> None:
    # A process that died is noticed by its heartbeat, and ends all of them: there is no use in a shorter wait.
    _client().wait_at_barrier(f"lwm/heard/{_messages}", _HEARD_MS)


def _client() -> Any:
    from jax._src.distributed import global_state  # the store has no public name

    return global_state.client


def leave(code: int, together: bool) -> int:
    """`code`, for `sys.exit`; but where this process has peers that do not leave `together` with it, leave at once.

    The orderly way waits for the peers, and they would wait for this process: they notice by its missing heartbeat.
    """
    if together or not several():
        return code
    dismiss()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def several() -> bool:
    """Whether there are other processes; does not start jax."""
    if "jax" not in sys.modules:
        return False
    from jax._src.distributed import global_state

    return global_state.num_processes is not None and global_state.num_processes > 1
