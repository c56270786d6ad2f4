"""The figures of the engine tests, shown at the end of the run whether it passed or not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

_noted: list[str] = []


@pytest.fixture(scope="session")
def note() -> Callable[[str], None]:
    """Call it with a line to be shown below the tests' results."""
    return _noted.append


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _noted:
        terminalreporter.section("measured")
        for line in _noted:
            terminalreporter.write_line(line)
