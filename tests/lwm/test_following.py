"""The leader's calls and what followers make of its messages; tests/eval/test_several_processes.py has real ones."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from lwm import cluster, following


class Recorder:
    """In place of a sampler: notes the calls that it gets, and refuses an empty prompt."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[list[int]], dict[str, Any]]] = []

    @following.led
    def generate(self, prompts: Sequence[np.ndarray], **settings: Any) -> None:
        if not all(len(each) for each in prompts):
            raise ValueError("a prompt is empty")
        self.calls.append(([np.asarray(each).tolist() for each in prompts], settings))


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What the leader tells."""
    messages: list[bytes] = []
    monkeypatch.setattr(cluster, "leading", lambda: True)
    monkeypatch.setattr(cluster, "tell", messages.append)
    return messages


def heard(monkeypatch: pytest.MonkeyPatch, messages: Sequence[bytes]) -> Recorder:
    """A follower that hears these messages."""
    left = [*messages, None]
    monkeypatch.setattr(cluster, "leading", lambda: False)
    monkeypatch.setattr(cluster, "hear", lambda: left.pop(0))
    monkeypatch.setattr("jax.process_index", lambda: 1)
    follower = Recorder()
    following.follow(follower.generate)
    return follower


def test_followers_make_the_same_calls(sent: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    leader = Recorder()
    leader.generate([np.arange(5), np.array([10, 2**31 - 1])], stop_id=np.int64(3), temperature=0.5, guidance=None)
    with pytest.raises(ValueError, match="empty"):
        leader.generate([np.zeros(0, np.int64)], max_new_tokens=4)
    leader.generate([], max_new_tokens=4)
    leader.generate([np.array([7])], unconditional=np.array([1, 2]), on_tokens=print, reuse=True)
    first, empty, last = heard(monkeypatch, sent).calls
    assert first == ([[0, 1, 2, 3, 4], [10, 2**31 - 1]], {"stop_id": 3, "temperature": 0.5, "guidance": None})
    assert empty == ([], {"max_new_tokens": 4})
    prompts, settings = last
    assert prompts == [[7]]
    assert settings.pop("unconditional").tolist() == [1, 2]
    settings.pop("on_tokens")(0, [1])
    assert settings == {"reuse": True}


@pytest.mark.parametrize("prompt", [np.zeros((1, 2), int), np.array([0.5]), np.array([2**40])])
def test_what_are_no_ids_is_not_told(sent: list[bytes], prompt: np.ndarray) -> None:
    Recorder().generate([prompt])
    assert not sent


def test_a_problem_of_the_leader_ends_the_followers(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a store in this process in place of the coordinator's."""

    class Store(dict[str, bytes]):
        key_value_set_bytes = dict.__setitem__

        def blocking_key_value_get_bytes(self, key: str, timeout: int) -> bytes:
            return self[key]

        def key_value_delete(self, key: str) -> None:
            for name in [each for each in self if each.startswith(f"{key}/")]:
                del self[name]

        def wait_at_barrier(self, name: str, timeout: int) -> None:
            pass

    store = Store()
    monkeypatch.setattr(cluster, "_client", lambda: store)
    monkeypatch.setattr(cluster, "_messages", 0)
    cluster.lead()
    assert cluster.leading()
    long = bytes(range(256)) * 10_000
    monkeypatch.setattr(store, "key_value_delete", lambda key: None)
    cluster.tell(long)
    cluster.dismiss("the disk is full")
    cluster.dismiss("said once")
    assert not cluster.leading()
    monkeypatch.setattr(cluster, "_messages", 0)
    assert cluster.hear() == long
    with pytest.raises(cluster.Disagreement, match="the disk is full"):
        cluster.hear()
