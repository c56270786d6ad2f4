"""Progress lines of the trainers people use. Each format: a name, hints that must be in the line, a parser.

A parser returns a `Sighting` (what this one line says) or None. No parser decides anything about the run: that is
`progress.py`, which sees all sightings. Patterns are linear with bounded repetitions.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from eyas.why.logs import own, tables
from eyas.why.logs.bars import rich_bar, tqdm, tqdm_open
from eyas.why.logs.sighting import Sighting, clock, first, metrics, num, pairs, whole

Parser = Callable[[str], "Sighting | None"]
# ---- records ----
_HF = re.compile(r"['\"]([\w./@ ()%-]{1,80})['\"]: ?['\"]?([^,'\"{}\[\]]{1,64})")
_TITAN = re.compile(r"\bstep:\s{1,12}(\d{1,12})\s{1,8}\S{0,40}loss:\s{1,12}(\S{1,20})")
_MEGATRON = re.compile(r"iteration\s{1,12}(\d{1,12})/\s{0,12}(\d{1,12}) \|")
_DEEPSPEED = re.compile(r"\bstep=(\d{1,12}), skipped=\d{1,12}, lr=\[([\d.eE+-]{1,24})")
_DEEPSPEED_RATE = re.compile(
    r"epoch=(\d{1,9})/micro_step=\d{1,12}/global_step=(\d{1,12}),"
    r"|(?:^|\s)(\d{1,9})/(\d{1,12}), SamplesPerSec="
)
_NANO = re.compile(r"\biter (\d{1,12}): loss (\S{1,20}), time ([\d.]{1,14})ms")
_NANO_VAL = re.compile(r"^step (\d{1,12}): train loss (\S{1,20}), val loss \S{1,20}")
_NANO_DT = re.compile(r"\bstep[ :]\s{0,8}(\d{1,12})/(\d{1,12})\b.{0,200}?(?:dt: |step_avg:|\| )([\d.]{1,14}) ?ms")
_KERAS = re.compile(
    r"(?:^|\s)(\d{1,9})/(\d{1,9}) (?=.{0,120}(?:/step|/epoch|ETA))(?:[━╸─ ]{2,60}|\[[=>.]{5,60}\]) (?:- )?(?:ETA: )?"
    r"((?:\d{1,6}:)?(?:\d{1,6}:)?\d{1,6}s?)"
    r"(?: ([\d.]{1,10})(us|ms|s|min)/(?:step|epoch))?"
)
_KERAS_QUIET = re.compile(r"^(\d{1,9})/(\d{1,9}) - (\d{1,9})s - ([\d.]{1,10})(us|ms|s)/(?:step|epoch)")
_MM = re.compile(r"\bEpoch(?:\(train\))?\s{1,4}\[(\d{1,6})\]\s{0,2}\[\s{0,8}(\d{1,9})/(\d{1,9})\]")
_MM_ITER = re.compile(r"\bIter(?:\(train\))?\s{1,4}\[\s{0,8}(\d{1,12})/(\d{1,12})\]")
_METER = re.compile(r"\bEpoch:?\s{0,4}\[(\d{1,6})\]\s{0,4}\[\s{0,8}(\d{1,9})/\s{0,8}(\d{1,9})\]")
_TIMM = re.compile(r"\bTrain: (\d{1,6}) \[\s{0,8}(\d{1,9})/(\d{1,9})\s{1,4}\(")
_SAMPLES = re.compile(r"\bTrain Epoch: (\d{1,6}) \[\s{0,8}([\d,]{1,15})/([\d,]{1,15}) \(")
_DETECTRON = re.compile(r"\beta: (\S{1,24})\s{1,4}iter: (\d{1,12})\s")
_FAIRSEQ = re.compile(r"\bepoch (\d{1,6}):\s{1,4}(\d{1,9}) / (\d{1,9})\s(?=.{0,400}\bnum_updates=)")
_ESPNET = re.compile(r"\b(\d{1,6})epoch:train:(\d{1,9})-(\d{1,9})batch: ")
_NEMO = re.compile(r"\bTraining epoch (\d{1,6}), iteration (\d{1,12})/(\d{1,12}) \|")
_MAXTEXT = re.compile(r"\bcompleted step: (\d{1,12}), seconds: ([\d.]{1,14})")
_VERL = re.compile(r"\bstep:(\d{1,12}) - \S{1,80}:")


def hf(text: str) -> Sighting | None:
    """A dict printed by the HF Trainer; numbers as floats, or as strings since transformers 5."""
    start = text.find("{'")
    if start < 0:
        return None
    body = text[start : start + 4000]
    values: dict[str, Any] = {m.group(1): m.group(2) for m in _HF.finditer(body)}
    if not values.keys() & {"loss", "epoch", "learning_rate", "grad_norm", "train_runtime"} and not any(
        k.startswith("eval_") for k in values
    ):
        return None
    axolotl = any(k.startswith(("memory/max_", "tokens/train_per", "memory/device_")) for k in values)
    s = Sighting("axolotl" if axolotl else "hf-trainer", epoch=first(values, tables.EPOCH_KEYS))
    s.evaluation = "loss" not in values and "grad_norm" not in values
    if not s.evaluation:
        step, total = first(values, ("global_step", "current_steps")), first(values, ("total_steps", "max_steps"))
        s.step, s.total = (int(step) if step is not None else None), (int(total) if total else None)
        metrics(s, values)
        s.step_s = None  # train_time and the like are not per step here
    return s


def json_line(text: str) -> Sighting | None:
    start, end = text.find("{"), text.rfind("}")
    if start < 0 or end - start < 8:
        return None
    try:
        values = json.loads(text[start : end + 1])
    except (ValueError, RecursionError):
        return None
    if not isinstance(values, dict):
        return None
    for key in ("metrics", "train", "data", "message", "fields"):  # one level of nesting is common
        if isinstance(values.get(key), dict):
            values = {**values[key], **values}
    step, total = first(values, tables.STEP_KEYS), first(values, tables.TOTAL_KEYS)
    s = Sighting("json", epoch=first(values, tables.EPOCH_KEYS), epochs=first(values, tables.EPOCHS_KEYS))
    if (step is None and s.epoch is None) or (step is not None and abs(step) > 1e15):
        return None
    s.step, s.total = (int(step) if step is not None else None), (int(total) if total and total < 1e15 else None)
    keys = [str(k).lower() for k in values]
    s.evaluation = any(k.startswith(("eval", "val_", "val/", "test_")) for k in keys) and not (
        values.keys() & set(tables.LOSS_KEYS)
    )
    metrics(s, values)
    stamp = next((values[k] for k in tables.STAMP_KEYS if k in values), None)
    if isinstance(stamp, int | float) and stamp > 1e9:
        s.at = float(stamp) / (1000 if stamp > 1e11 else 1)
    elapsed = next((values[k] for k in tables.CLOCK_KEYS if k in values), None)
    s.elapsed = clock(elapsed) if isinstance(elapsed, str) and ":" in elapsed else first({"e": elapsed}, "e")
    if (ups := first(values, ("ups",))) is not None and ups > 0:
        s.format, s.step_s = "fairseq", 1 / ups
    return s


def _rule(
    name: str, pattern: re.Pattern[str], build: Callable[[re.Match[str], dict[str, float]], Sighting], keys: bool = True
) -> Parser:
    def parse(text: str) -> Sighting | None:
        m = pattern.search(text)
        if m is None:
            return None
        values = pairs(text[m.start() : m.start() + 2400]) if keys else {}
        s = build(m, values)
        s.format = name
        return metrics(s, values)

    return parse


def _unit_seconds(value: str | None, unit: str | None) -> float | None:
    number = num(value)
    return None if number is None else number * {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}.get(unit or "s", 1.0)


def _data_time(s: Sighting, m: re.Match[str], values: dict[str, float]) -> Sighting:
    """`time` and `data_time` in their spellings, the loss and the ETA."""
    s.step_s = first(values, ("time", "Time", "Batch (t)"))
    data = first(values, ("data_time", "data", "Data", "Data (t)"))
    s.data_wait = min(max(data / s.step_s, 0.0), 1.0) if data is not None and s.step_s else None
    s.loss = first(values, ("loss", "Loss", "total_loss", "Contrastive_loss"))
    if eta := re.search(r"\beta: ((?:\d{1,4} days?, )?[\d:]{4,12})", m.string):
        s.left = clock(eta.group(1))
    return s


def _epoch_step(m: re.Match[str], values: dict[str, float]) -> Sighting:
    s = Sighting("", whole(m.group(2)), whole(m.group(3)), epoch=num(m.group(1)), per_epoch=True)
    return _data_time(s, m, values)


def _samples(m: re.Match[str], values: dict[str, float]) -> Sighting:
    """Counts samples; the batch comes from rate x batch time where both are there."""
    s = _epoch_step(m, values)
    rate = re.search(r"([\d.]{1,12})/s", m.string)
    batch = round(float(rate.group(1)) * s.step_s) if rate and s.step_s and rate.group(1) != "." else 0
    if batch > 0 and s.step is not None and s.total:
        s.step, s.total = s.step // batch, -(-s.total // batch)
    else:
        s.unit, s.step_s = "sample", None
    return s


def _megatron(m: re.Match[str], _values: dict[str, float]) -> Sighting:
    s = Sighting("", whole(m.group(1)), whole(m.group(2)))
    ms = re.search(r"elapsed time per iteration \(ms\): ([\d.]{1,14})", m.string)
    s.step_s = float(ms.group(1)) / 1000 if ms and ms.group(1).strip(".") else None
    lm = re.search(r"(?:lm )?loss: ([\d.E+-]{1,24}|nan|inf)", m.string)
    s.loss = num(lm.group(1)) if lm else None
    rate = re.search(r"learning rate: ([\d.E+-]{1,24})", m.string)
    s.lr = num(rate.group(1)) if rate else None
    return s


def _espnet(m: re.Match[str], values: dict[str, float]) -> Sighting:
    s = Sighting("", whole(m.group(3)), epoch=num(m.group(1)), per_epoch=True, step_s=values.get("train_time"))
    if s.step_s and "iter_time" in values:
        s.data_wait = min(max(values["iter_time"] / s.step_s, 0.0), 1.0)
    return s


def _fairseq(m: re.Match[str], values: dict[str, float]) -> Sighting:
    s = Sighting(
        "", whole(m.group(2)), whole(m.group(3)), epoch=num(m.group(1)), per_epoch=True, elapsed=values.get("wall")
    )
    s.step_s = 1 / values["ups"] if values.get("ups", 0) > 0 else None
    return s


def _keras(m: re.Match[str], _values: dict[str, float]) -> Sighting:
    s = Sighting("", whole(m.group(1)), whole(m.group(2)), per_epoch=True, step_s=_unit_seconds(m.group(4), m.group(5)))
    if s.step != s.total:
        s.left = clock(m.group(3)) if m.group(3).endswith("s") or ":" in m.group(3) else None
    return s


def _speculators(text: str) -> Sighting | None:
    values = pairs(text)
    if not any(k.startswith(("train/loss", "profile/", "fetch_frac")) for k in values):
        return None
    flat = {**{k.split("/", 1)[1]: v for k, v in values.items() if k.startswith(("profile/", "train/"))}, **values}
    step = first(flat, ("global_step", "step"))
    s = Sighting("speculators", int(step) if step is not None else None, epoch=first(flat, ("epoch",)))
    return metrics(s, flat)


def _step(m: re.Match[str], _values: dict[str, float]) -> Sighting:
    """Group 1 is the step; a group 2, if digits, the total."""
    total = whole(m.group(2)) if m.re.groups > 1 else None
    return Sighting("", whole(m.group(1)), total)


def _loss(m: re.Match[str], _values: dict[str, float]) -> Sighting:
    """Step, loss and perhaps milliseconds."""
    ms = m.group(3) if m.re.groups > 2 else None
    return Sighting("", whole(m.group(1)), loss=num(m.group(2)), step_s=_unit_seconds(ms, "ms"))


def _timed(m: re.Match[str], _values: dict[str, float]) -> Sighting:
    """Step, total, milliseconds."""
    return Sighting("", whole(m.group(1)), whole(m.group(2)), step_s=_unit_seconds(m.group(3), "ms"))


def _mm_iter(m: re.Match[str], values: dict[str, float]) -> Sighting:
    return _data_time(Sighting("", whole(m.group(1)), whole(m.group(2))), m, values)


def _detectron(m: re.Match[str], values: dict[str, float]) -> Sighting:
    return Sighting("", whole(m.group(2)), left=clock(m.group(1)), step_s=values.get("time"))


def _nemo(m: re.Match[str], _values: dict[str, float]) -> Sighting:
    timing = re.search(r"train_step_timing in s: ([\d.]{1,14})", m.string)
    step_s = num(timing.group(1)) if timing else None
    return Sighting("", whole(m.group(2)), whole(m.group(3)), epoch=num(m.group(1)), step_s=step_s)


def _maxtext(m: re.Match[str], _values: dict[str, float]) -> Sighting:
    return Sighting("", whole(m.group(1)), step_s=num(m.group(2)))


def _keras_quiet(m: re.Match[str], _values: dict[str, float]) -> Sighting:
    seconds = _unit_seconds(m.group(4), m.group(5))
    return Sighting("", whole(m.group(1)), whole(m.group(2)), per_epoch=True, step_s=seconds)


def _deepspeed(m: re.Match[str], _values: dict[str, float]) -> Sighting:
    return Sighting("", whole(m.group(1)), lr=num(m.group(2)))


def _deepspeed_rate(m: re.Match[str], _values: dict[str, float]) -> Sighting:
    return Sighting("", whole(m.group(2) or m.group(4)))


# Order is rank: where two formats report steps, the earlier one is believed.
FORMATS: tuple[tuple[str, tuple[str, ...], Parser], ...] = (
    ("eyas", own.HINTS, own.progress),
    ("nemo", ("Training epoch ",), _rule("nemo", _NEMO, _nemo)),
    ("megatron", ("iteration ",), _rule("megatron", _MEGATRON, _megatron, keys=False)),
    ("torchtitan", ("step:",), _rule("torchtitan", _TITAN, _loss)),
    ("speculators", ("global_step=", "train/loss=", "profile/"), _speculators),
    ("espnet", ("epoch:train:",), _rule("espnet", _ESPNET, _espnet)),
    ("fairseq", ("num_updates=",), _rule("fairseq", _FAIRSEQ, _fairseq)),
    ("mm", ("Epoch [", "Epoch(train)"), _rule("mm", _MM, _epoch_step)),
    ("mm", ("Iter [", "Iter(train)"), _rule("mm", _MM_ITER, _mm_iter)),
    ("detectron2", ("iter: ",), _rule("detectron2", _DETECTRON, _detectron)),
    ("meter", ("Epoch: [", "Epoch ["), _rule("meter", _METER, _epoch_step)),
    ("timm", ("Train: ",), _rule("timm", _TIMM, _epoch_step)),
    ("open_clip", ("Train Epoch: ",), _rule("open_clip", _SAMPLES, _samples)),
    ("maxtext", ("completed step: ",), _rule("maxtext", _MAXTEXT, _maxtext)),
    ("nanogpt", ("ms",), _rule("nanogpt", _NANO, _loss)),
    ("nanogpt", ("ms",), _rule("nanogpt", _NANO_DT, _timed)),
    ("verl", ("step:",), _rule("verl", _VERL, _step)),
    ("hf-trainer", ("{'",), hf),
    ("keras", ("━", "=", "/step"), _rule("keras", _KERAS, _keras)),
    ("keras", ("/step", "/epoch"), _rule("keras", _KERAS_QUIET, _keras_quiet)),
    ("tqdm", ("%|",), tqdm),
    ("tqdm", (" [",), tqdm_open),
    ("tqdm.rich", ("━", "╸"), rich_bar),
    ("json", ("}",), json_line),
    ("deepspeed", ("skipped=",), _rule("deepspeed", _DEEPSPEED, _deepspeed)),
    ("deepspeed", ("SamplesPerSec=",), _rule("deepspeed", _DEEPSPEED_RATE, _deepspeed_rate)),
)
RANK: dict[str, int] = {name: i for i, (name, _, _) in reversed(list(enumerate(FORMATS)))}
RANK |= {"axolotl": RANK["hf-trainer"], "generic": 99}
RANK |= dict.fromkeys(("ultralytics", "lightning", "specforge"), RANK["tqdm"])

# ---- anything that counts ----
_GENERIC = re.compile(
    r"\b(global[ _-]?step|completed step|step|iteration|iter|it|update|minibatch|batch|round|epoch)s?\b"
    r"[\s:=#\[(\"]{0,4}(\d[\d,]{0,14})(?![\d.]*[A-Za-z%])(?:\s?(?:/|of|out of)\s{0,6}(\d[\d,]{0,14}))?",
    re.I,
)
_NOT_PROGRESS = re.compile(
    r"sav|resum|load|checkpoint|from |warm|every|total|max|num|best|eval|valid|skip|until|seed|size", re.I
)


def generic(text: str) -> Sighting | None:
    """`step 12/100`, `Iter 12: ...`, `epoch 3 of 10`. `desc` is the skeleton that must recur for it to count."""
    found: Sighting | None = None
    for m in _GENERIC.finditer(text[:400]):
        before = text[max(0, m.start() - 40) : m.start()]
        if _NOT_PROGRESS.search(before) or (m.group(3) and (whole(m.group(2)) or 0) > (whole(m.group(3)) or 0)):
            continue
        word = m.group(1).lower()
        if word == "epoch":
            if found is None:
                found = Sighting("generic", desc="epoch", unit="epoch")
            found.epoch, found.epochs = num(m.group(2)), num(m.group(3))
            continue
        if found is None or found.unit == "epoch":
            epoch, epochs = (found.epoch, found.epochs) if found else (None, None)
            found = Sighting("generic", whole(m.group(2)), whole(m.group(3)), epoch=epoch, epochs=epochs)
            found.desc = re.sub(r"[\d.,]{1,20}", "#", before)[-24:] + word
            found.per_epoch = word in ("batch", "minibatch") or (epoch is not None and bool(m.group(3)))
            found.unit = "round" if word == "round" else "step"
    if found is not None:
        metrics(found, {k.lower(): v for k, v in pairs(text[:800]).items()})
    return found
