"""The verdict rules, one list. A rule turns a `Look` into a `Case` or None; the judge adds up and compares."""

from __future__ import annotations

from eyas.why.verdicts import ended, quiet, slow, stuck
from eyas.why.verdicts.base import Rule

RULES: list[Rule] = [*ended.RULES, *quiet.RULES, *slow.RULES, *stuck.RULES]
