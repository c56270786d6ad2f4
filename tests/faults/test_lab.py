"""The whole lab: every scenario judged by the real command. About five minutes; test_quick.py is the short form."""

from __future__ import annotations

import lab.outside  # noqa: F401  adds its scenarios to both lists
import pytest
from lab.healthy import HEALTHY
from lab.run import Row, play_all, show
from lab.scenes import SCENES

pytestmark = pytest.mark.timeout(1500)


@pytest.fixture(scope="module")
def rows() -> dict[str, Row]:
    return {row.name: row for row in play_all([*SCENES, *HEALTHY], show)}


@pytest.mark.parametrize("name", [s.name for s in SCENES])
def test_fault(rows: dict[str, Row], name: str) -> None:
    """The verdict, or at least the runner-up, is right; how often it is the verdict is counted below."""
    row = rows[name]
    if row.skipped:
        pytest.skip(row.skipped)
    assert row.error is None, row.error
    assert row.top2, f"{row.verdict} ({row.grade}), then {row.runner_up}: {row.sentence}"


@pytest.mark.parametrize("name", [s.name for s in HEALTHY])
def test_healthy_is_never_called_stuck_or_failed(rows: dict[str, Row], name: str) -> None:
    row = rows[name]
    assert row.error is None, row.error
    assert not row.alarm, f"{row.verdict} ({row.grade}): {row.sentence}"


def test_accuracy(rows: dict[str, Row]) -> None:
    judged = [r for r in rows.values() if r.expect and not r.skipped and not r.error]
    assert len({r.expect for r in judged}) >= 30
    assert len(HEALTHY) >= 50
    assert sum(r.top1 for r in judged) >= 0.90 * len(judged), [(r.name, r.verdict) for r in judged if not r.top1]
    assert sum(r.top2 for r in judged) >= 0.98 * len(judged), [(r.name, r.verdict) for r in judged if not r.top2]
