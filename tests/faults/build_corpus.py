"""Write the snapshot corpus: `python tests/faults/build_corpus.py`. One JSON a case."""

from __future__ import annotations

import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import corpus_classes  # noqa: E402
import corpus_ended  # noqa: E402
import corpus_healthy  # noqa: E402
import corpus_loader  # noqa: E402
import corpus_quiet  # noqa: E402
import corpus_ranks  # noqa: E402
import corpus_slow  # noqa: E402
import corpus_system  # noqa: E402

MODULES = (
    corpus_quiet,
    corpus_slow,
    corpus_loader,
    corpus_ranks,
    corpus_system,
    corpus_ended,
    corpus_classes,
    corpus_healthy,
)


def main() -> None:
    out = HERE / "corpus"
    out.mkdir(exist_ok=True)
    for old in out.glob("*.json"):
        old.unlink()
    for module in MODULES:
        for case, title, expect, build in module.CASES:
            entry = {
                "case": case,
                "title": title,
                "expect": expect,
                "healthy": module is corpus_healthy,
                "snapshot": build().d,
            }
            (out / f"{case}.json").write_text(
                json.dumps(entry, separators=(",", ":"), ensure_ascii=False) + "\n", encoding="utf-8"
            )


if __name__ == "__main__":
    main()
