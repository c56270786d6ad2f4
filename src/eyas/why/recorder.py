"""What the Flight Recorder dumps of several ranks say together: who has not come, or came with another call.

A dump tells, for each process group, how far its rank got. All ranks of a group make the same calls in the same order,
so the first call that is not completed everywhere is the one they hang in: who has not made it is behind, and who has
made another one, or one of another size, has parted from the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from eyas.why.facts import Facts

Json = Mapping[str, Any]
_TOGETHER = 300.0  # seconds between dumps of one event, at most
_EQUAL_SIZES = ("all_reduce", "allreduce", "broadcast", "reduce_scatter", "_allgather_base", "all_gather_into_tensor")
_GRAVE = ("mismatch", "sizes", "behind", "same", "alone")  # the most telling first


@dataclass(frozen=True)
class Call:
    seq: int
    op: str
    state: str
    done: bool
    sizes: str
    single: bool  # not one of several coalesced calls
    at: str | None

    @property
    def words(self) -> str:
        return f"{self.op} no. {self.seq}" + (f" (at {self.at})" if self.at else "")


@dataclass(frozen=True)
class Track:
    """One rank in one process group."""

    rank: int
    group: str
    members: tuple[int, ...]
    last: int  # the last call it made
    done: int  # the last call that completed here
    calls: Mapping[int, Call]

    def words(self, seq: int) -> str:
        return self.calls[seq].words if seq in self.calls else f"call no. {seq}"


@dataclass(frozen=True)
class Finding:
    kind: str  # of _GRAVE
    group: str
    seq: int
    odd: tuple[int, ...]
    words: str


@dataclass(frozen=True)
class Recorder:
    findings: tuple[Finding, ...]
    ranks: tuple[int, ...]
    refused: tuple[str, ...]  # dumps that were not read, and why
    age: float | None  # of the newest dump

    @property
    def first(self) -> Finding | None:
        return self.findings[0] if self.findings else None


def read_recorder(f: Facts) -> Recorder | None:
    """The dumps of this run; None when there are none, or steps were made after they were written."""
    dumps = [d for d in (f.snap.get("nccl") or {}).get("dumps") or [] if d.get("flight")]
    if not dumps:
        return None
    refused = tuple(
        f"{d.get('path')}: {d['flight'].get('error')}" for d in dumps if d["flight"].get("status") not in (None, "ok")
    )
    good = [d for d in dumps if d["flight"].get("status") == "ok"]
    newest = max((float(d.get("mtime") or 0) for d in good), default=0.0)
    age = f.now - newest if good else None
    if age is not None and f.idle is not None and age > f.idle + 30:
        return Recorder((), (), refused, age)
    tracks = [
        t for d in good if newest - float(d.get("mtime") or 0) <= _TOGETHER for t in _tracks(d.get("rank"), d["flight"])
    ]
    return Recorder(
        tuple(sorted(_findings(tracks), key=lambda x: (_GRAVE.index(x.kind), len(x.odd) or 99))),
        tuple(sorted({t.rank for t in tracks})),
        refused,
        age,
    )


def _tracks(rank: int | None, flight: Json) -> Iterable[Track]:
    if rank is None:
        return
    for group in flight.get("groups") or []:
        calls = {int(c["seq"]): _call(c) for c in group.get("calls") or []}
        if not calls:
            continue
        waiting = [seq for seq, c in calls.items() if not c.done]
        completed = group.get("completed")
        done = max((seq for seq, c in calls.items() if c.done), default=min(calls) - 1)
        if completed is not None and completed >= 0:
            done = max(done, int(completed))
        if waiting:
            done = min(done, min(waiting) - 1)
        last = max(max(calls), int(group.get("enqueued") or 0))
        name = str(group.get("desc") or group.get("name"))
        if group.get("desc") and group.get("name") not in (None, "0", group.get("desc")):
            name += f" ({group['name']})"
        members = tuple(int(r) for r in group.get("ranks") or [])
        yield Track(int(rank), name, members, last, done, calls)


def _call(raw: Json) -> Call:
    op = str(raw.get("op") or "?").rpartition(":")[2]
    sizes = f"{raw.get('dtype') or ''} {raw.get('in') or ''}".strip()
    more = int(raw.get("more") or 0)
    return Call(
        int(raw["seq"]), op, str(raw.get("state") or "?"), bool(raw.get("done")), sizes, not more, raw.get("at")
    )


def _findings(tracks: list[Track]) -> Iterable[Finding]:
    groups: dict[tuple[str, tuple[int, ...]], list[Track]] = {}
    for track in tracks:
        groups.setdefault((track.group, track.members), []).append(track)
    for (name, _), mine in groups.items():
        if any(t.last > t.done for t in mine):
            yield _compare(name, sorted(mine, key=lambda t: t.rank), tracks)


def _compare(name: str, mine: list[Track], everywhere: list[Track]) -> Finding:
    seq = min(t.done for t in mine) + 1
    there = [t for t in mine if t.last >= seq]
    late = [t for t in mine if t.last < seq]
    unseen = sorted(set(mine[0].members) - {t.rank for t in mine})
    where = f" of group {name}"
    if late:
        gone = "; ".join(_instead(t, everywhere) for t in late[:3])
        words = f"{ranks_words([t.rank for t in late])} did not make {there[0].words(seq)}{where}, in which "
        words += f"{ranks_words([t.rank for t in there])} {_wait(there)}: {gone}"
        return Finding("behind", name, seq, tuple(t.rank for t in late), words)
    known = [(t, t.calls[seq]) for t in there if seq in t.calls and t.calls[seq].single]
    ops = Counter(c.op for _, c in known)
    if len(ops) > 1:
        return _parted("mismatch", name, seq, [(t, c.op, c.words) for t, c in known])
    sizes = Counter(c.sizes for _, c in known)
    if len(sizes) > 1 and any(next(iter(ops)).lstrip("_").startswith(o.lstrip("_")) for o in _EQUAL_SIZES):
        return _parted("sizes", name, seq, [(t, c.sizes, f"{c.words} with {c.sizes}") for t, c in known])
    words = f"{ranks_words([t.rank for t in there])} {_wait(there)} in {there[0].words(seq)}{where}"
    if len(there) < 2 or unseen:
        more = f"; no dump of {ranks_words(unseen)} is here" if unseen else ""
        return Finding("alone", name, seq, (), words + more)
    return Finding("same", name, seq, (), f"{words}: all made it, and it does not complete")


def _parted(kind: str, name: str, seq: int, calls: list[tuple[Track, str, str]]) -> Finding:
    """Ranks in different calls at the same place; the fewer are the odd ones."""
    groups: dict[str, list[tuple[Track, str]]] = {}
    for track, key, words in calls:
        groups.setdefault(key, []).append((track, words))
    order = sorted(groups.values(), key=len, reverse=True)
    parts = [f"{ranks_words([t.rank for t, _ in part])} in {part[0][1]}" for part in order[:4]]
    odd = tuple(t.rank for t, _ in order[-1]) if len(order[-1]) < len(order[0]) else ()
    return Finding(kind, name, seq, odd, f"in group {name} the ranks are in different calls: {'; '.join(parts)}")


def _wait(tracks: list[Track]) -> str:
    return "waits" if len(tracks) == 1 else "wait"


def _instead(track: Track, everywhere: list[Track]) -> str:
    """What a rank that has not come does: it waits in another group, or its last call here completed."""
    other = next((t for t in everywhere if t.rank == track.rank and t.group != track.group and t.last > t.done), None)
    if other is not None:
        return f"rank {track.rank} waits in {other.words(other.done + 1)} of group {other.group}"
    return f"the last call of rank {track.rank} there was {track.words(track.last)}"


def ranks_words(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return ("rank " if len(ranks) == 1 else "ranks ") + shown
