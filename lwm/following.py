"""One process asks, all compute: generation on a mesh that several processes share.

The first process runs a command or an evaluation as if it were alone. Whenever it calls a method that is `led`, the
others, which are in `follow`, hear of the call through the coordinator and make the same one, so that all devices run
the same programs. Only the first one needs the files that a question is about.
"""

import functools
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
import numpy as np

from lwm import cluster

P = ParamSpec("P")
R = TypeVar("R")


class _Call(NamedTuple):
    prompts: list[np.ndarray]
    settings: dict[str, Any]

    def to_bytes(self) -> bytes:
        settings = {name: value for name, value in self.settings.items() if name != "on_tokens"}
        if settings.get("unconditional") is not None:
            settings["unconditional"] = settings["unconditional"].tolist()
        settings["stream"] = self.settings.get("on_tokens") is not None
        values = {"sizes": [len(each) for each in self.prompts], "settings": settings}
        header = json.dumps(values, default=np.generic.item)
        ids = [np.asarray(each, np.int32).tobytes() for each in self.prompts]
        return b"\n".join([header.encode(), b"".join(ids)])

    @classmethod
    def from_bytes(cls, message: bytes) -> "_Call":
        header, _, ids = message.partition(b"\n")
        values = json.loads(header)
        settings = values["settings"]
        if settings.get("unconditional") is not None:
            settings["unconditional"] = np.asarray(settings["unconditional"], np.int32)
        if settings.pop("stream"):
            # The loop of a stream is another program: all must run it, though only one has somebody to tell.
            settings["on_tokens"] = _tell_nobody
        ends = np.cumsum(values["sizes"], dtype=np.int64)[:-1]
        return cls(np.split(np.frombuffer(ids, np.int32), ends) if values["sizes"] else [], settings)


def _are_ids(array: np.ndarray) -> bool:
    limits = np.iinfo(np.int32)
    whole = array.ndim == 1 and np.issubdtype(array.dtype, np.integer)
    return whole and (not array.size or (limits.min <= int(array.min()) and int(array.max()) <= limits.max))


def _tell_nobody(index: int, ids: list[int]) -> None:
    pass


def led(method: Callable[P, R]) -> Callable[P, R]:
    """Of `method(self, prompts, **settings)`: where this process leads others, they are told to make the same call."""

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if cluster.leading():
            _, prompts = args
            assert isinstance(prompts, Sequence)
            arrays, settings = [np.asarray(each) for each in prompts], dict[str, Any](kwargs)
            if settings.get("unconditional") is not None:
                settings["unconditional"] = np.asarray(settings["unconditional"])
                arrays.append(settings["unconditional"])
            # What is not even ids is for the method to refuse, here alone.
            if all(map(_are_ids, arrays)):
                cluster.tell(_Call(arrays[: len(prompts)], settings).to_bytes())
        return method(*args, **kwargs)

    return call


def follow(method: Callable[..., Any]) -> None:
    """Make the calls of the `led` method that the first process makes, until it dismisses this one.

    Raises:
        Disagreement: the first process says that it failed, and why.
    """
    assert jax.process_index() > 0
    while (message := cluster.hear()) is not None:
        call = _Call.from_bytes(message)
        try:
            method(call.prompts, **call.settings)
        except ValueError:
            # A call that cannot be made is refused before anything is computed, in the first process as well.
            continue
