"""Threads and the current device (titan/machine.py)."""

from threading import Thread

import pytest
import torch

from titan.machine import on_this_device


def test_a_thread_works_on_the_device_of_the_thread_that_starts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", told.append)
    thread = Thread(target=on_this_device(told.append), args=("at work",))
    assert told == []
    thread.start()
    thread.join()
    assert told == [3, "at work"]


def test_a_process_without_a_gpu_initializes_none() -> None:
    told: list[int] = []
    assert on_this_device(told.append) == told.append
