"""Work over processes: order, errors, and tasks that take their process down."""

import os

import pytest

from data.pool import Crashed, ordered_map


def square_or_die(task):
    if task == "die":
        os._exit(9)
    if task == "fail":
        raise ValueError("the manifest is wrong")
    return task * task


def test_results_come_in_order_and_a_task_that_kills_is_known():
    tasks = [1, 2, "die", 3, *range(10, 20)]
    assert list(ordered_map(square_or_die, iter(tasks), 2)) == [
        1, 4, Crashed("die"), 9, *(number**2 for number in range(10, 20)),
    ]  # fmt: skip


def test_errors_are_raised_and_nothing_runs_ahead_without_end():
    taken = []

    def tasks():
        for number in range(1000):
            taken.append(number)
            yield "fail" if number == 3 else number

    with pytest.raises(ValueError, match="manifest is wrong"):
        list(ordered_map(square_or_die, tasks(), 1))
    assert len(taken) < 20
    assert list(ordered_map(square_or_die, [2, 3], 0)) == [4, 9]
    with pytest.raises(ValueError, match="workers is -1"):
        list(ordered_map(square_or_die, [], -1))
