"""The GPU is timed by events that are asked later, and never waited for."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eyas.record.beat import Beat
from eyas.record.phases import GpuClock, LateValues
from eyas.record.record import Record


class Device:
    """Events of a device that lags three records behind the host; waiting for it is counted."""

    def __init__(self) -> None:
        self.recorded: list[Any] = []
        self.waits = self.made = 0

    def event(self, **_: Any) -> Any:
        device, self.made = self, self.made + 1

        class Event:
            at = -1

            def record(self) -> None:
                self.at = len(device.recorded)
                device.recorded.append(self)

            def query(self) -> bool:
                return self.at < len(device.recorded) - 3

            def elapsed_time(self, other: Any) -> float:
                assert self.query() and other.query(), "asked before it has passed: CUDA would raise"
                return 5.0 * (other.at - self.at)

            def synchronize(self) -> None:
                device.waits += 1

        return Event()


def test_steps_are_timed_without_waiting_and_events_are_used_again() -> None:
    device, beat = Device(), Beat("run")
    clock = GpuClock(SimpleNamespace(cuda=SimpleNamespace(Event=device.event)), beat)
    for _ in range(100):
        clock.begin()
        clock.end()
    assert device.waits == 0
    assert clock.busy == pytest.approx(0.005 * 98, abs=0.011), "all but the steps that are still under way"
    assert device.made < 12


def test_a_device_that_never_answers_costs_no_memory_without_end() -> None:
    device = Device()
    clock = GpuClock(SimpleNamespace(cuda=SimpleNamespace(Event=device.event)), Beat("run"))
    for event in range(2000):
        clock.begin()
        device.recorded.clear()  # nothing ever passes
        clock.end()
        assert len(clock._pairs) <= 513, event


class Loss:
    """A scalar on that device: whoever reads its value on the host waits for the device."""

    is_cuda = True

    def __init__(self, device: Device) -> None:
        self.device = device

    def detach(self) -> Loss:
        return self

    def item(self) -> float:
        self.device.waits += 1
        return 2.5

    __float__ = cpu = tolist = item


class Pinned:
    """A scalar in host memory."""

    value = float("nan")

    def copy_(self, other: Loss, non_blocking: bool = False) -> None:
        other.device.waits += not non_blocking
        self.value = 2.5

    def __float__(self) -> float:
        return self.value


def fake_torch(device: Device) -> Any:
    cuda = SimpleNamespace(Event=device.event, memory_reserved=lambda: 1 << 30, synchronize=lambda: Loss(device).item())
    return SimpleNamespace(cuda=cuda, float32=None, empty=lambda _shape, **_how: Pinned())


def test_a_recorded_loop_never_waits_for_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device, said = Device(), []
    monkeypatch.setitem(sys.modules, "torch", fake_torch(device))
    with Record(tmp_path / "run", say=said.append, make=True) as record:
        record.begin(200, device="cuda:0")
        for i in record.data(range(200)):
            with record.phase("forward"):
                loss = Loss(device)
            record.step(loss=loss, tokens=10)
            assert device.waits == 0, f"step {i}"
        assert record.beat_values()["loss"] == 2.5 and record.gpu is not None and record.gpu.busy > 0.5
        float(Loss(device))
        assert device.waits == 1, "it would have been counted"
    assert "loss 2.5000" in said[-1] and "GPU " in said[-1]


def test_on_a_real_gpu_nothing_is_synchronised() -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    record = Record(None, say=lambda _text: None)
    record.begin(0, device="cuda")
    a = torch.randn(2048, 2048, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")  # a synchronising call raises
    try:
        for _ in range(50):
            loss = (a @ a).mean()
            record.step(loss=loss)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    record.step(loss=loss)
    assert record.gpu is not None and record.gpu.busy > 0
    late = LateValues(torch)
    late.put(loss)
    torch.cuda.synchronize()
    assert late.put(loss) == pytest.approx(float(loss))
