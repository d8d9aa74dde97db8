"""Stopping politely: real signals sent to this process."""

import os
import signal
import threading

import pytest

from solrl.errors import Interrupted
from solrl.signals import SignalStop


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_at_the_next_call_and_not_before(number: signal.Signals) -> None:
    with SignalStop() as stop:
        stop()
        os.kill(os.getpid(), number)
        reached = True  # the signal itself interrupts nothing
        with pytest.raises(Interrupted, match=number.name) as caught:
            stop()
    assert reached and caught.value.exit_code == 3 and "--resume" in str(caught.value)


def test_a_second_interrupt_stops_at_once_but_a_second_terminate_does_not() -> None:
    with SignalStop():
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)  # the first interrupt: a launcher sends one after its own terminate
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_handlers_are_put_back_at_the_end_also_after_an_error() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with pytest.raises(RuntimeError), SignalStop():
        assert signal.getsignal(signal.SIGTERM) != before[0]
        raise RuntimeError
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_outside_the_main_thread_it_is_inert() -> None:
    seen = []

    def use() -> None:
        with SignalStop() as stop:
            stop()
            seen.append(signal.getsignal(signal.SIGTERM))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert seen == [before]


def test_only_the_rank_that_saves_leaves_and_the_others_follow_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(Interrupted, match="SIGTERM") as caught, SignalStop() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        stop()
        raise RuntimeError("connection closed by peer")
    assert isinstance(caught.value.__cause__, RuntimeError)  # it went on until its peer was gone
    with pytest.raises(RuntimeError, match="closed"), SignalStop():
        raise RuntimeError("connection closed by peer")  # without a signal it is a failure
