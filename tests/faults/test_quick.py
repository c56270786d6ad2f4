"""The most telling scenarios of the lab, in about a minute: one or more of each family, and a few healthy runs."""

from __future__ import annotations

import pytest
from lab.healthy import HEALTHY
from lab.run import Row, play_all
from lab.scenes import SCENES

FAULTS = [s for s in SCENES if s.quick]
FINE = [s for s in HEALTHY if s.name in ("ok_style_tqdm", "ok_long_steps_plain_asleep", "ok_mute", "ok_workers_fork")]
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def rows() -> dict[str, Row]:
    return {row.name: row for row in play_all([*FAULTS, *FINE], together=10)}


@pytest.mark.parametrize("name", [s.name for s in FAULTS])
def test_fault(rows: dict[str, Row], name: str) -> None:
    row = rows[name]
    if row.skipped:
        pytest.skip(row.skipped)
    assert row.error is None, row.error
    assert row.top2, f"{row.verdict} ({row.grade}), then {row.runner_up}: {row.sentence}"


@pytest.mark.parametrize("name", [s.name for s in FINE])
def test_fine(rows: dict[str, Row], name: str) -> None:
    row = rows[name]
    assert row.error is None, row.error
    assert not row.alarm, f"{row.verdict} ({row.grade}): {row.sentence}"
