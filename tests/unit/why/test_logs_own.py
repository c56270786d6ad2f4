"""The lines that eyas prints itself: each stage's place, pace and time left; deaths that a shell reports."""

from __future__ import annotations

import pytest
from loglines import said, stamp

TRAIN = (
    "step {n:,}/1,702 · epoch 4/4 · loss 6.5451 · accuracy 0.667/0.511/0.430 · lr 3.66e-06 · grad norm 1.84"
    " · 778 tokens/s · data wait 3% · 3.6 MB/s · {left} left\n"
)


def capture(n: int, left: str, head: str = "") -> str:
    return f"{head}capture {n:,}/1,341 samples · {n * 149:,}/199,758 tokens · 345 tokens/s · {left} left\n"


def demo(upto: str) -> str:
    """A log of eyas demo up to a stage."""
    log = "eyas demo: an EAGLE-3 drafter for SmolLM2-135M-Instruct, from demo/conversations.jsonl into runs/demo\n"
    log += "".join(capture(n, f"{1341 - n} s", "[3/7 capture] ") for n in (100, 200, 442))
    if upto == "capture":
        return log
    log += capture(1341, "0 s", "[3/7 capture] ")
    log += "".join("[5/7 train] " + TRAIN.format(n=n, left="7 min") for n in (900, 914, 928))
    if upto == "train":
        return log
    log += "[5/7 train] " + TRAIN.format(n=1702, left="0 s")
    log += "[5/7 train] step 1,702/1,702 · validating for 20 s\n"
    if upto == "validating":
        return log
    log += "[5/7 train] validation after epoch 4: loss 1.3265 · accuracy 0.529/0.503/0.483 · accept length 1.730\n"
    log += "[5/7 train] done: 1,702 steps in 1,236 s · best checkpoint runs/demo/train/best\n"
    return log + "[6/7 eval] decoded 16/32 prompts · accept length 1.736 so far\n"


@pytest.mark.parametrize("head", ["", "[3/7 capture] "])
def test_capture_tells_samples_pace_and_time_left(head: str) -> None:
    facts = said("".join(capture(n, left, head) for n, left in ((420, "871 s"), (431, "850 s"), (442, "1,798 s"))))
    assert (facts.format, facts.step, facts.total, facts.unit) == ("eyas", 442, 1341, "sample")
    assert facts.pace is not None and facts.pace.seconds_per_step == 2.0
    assert (facts.eta_s, facts.line_interval_s, facts.tokens_per_s) == (1798, 22.0, 345)
    assert not facts.at_last_step and facts.phase is None


def test_training_without_stamps_has_pace_and_time_left_from_its_own_words() -> None:
    facts = said(demo("train"))
    assert (facts.step, facts.total, facts.unit, facts.loss, facts.data_wait) == (928, 1702, "step", 6.5451, 0.03)
    assert facts.pace is not None and facts.pace.seconds_per_step == pytest.approx(420 / 774)
    assert facts.eta_s == 420 and facts.line_interval_s == pytest.approx(14 * 420 / 774)


def test_training_with_stamps_takes_the_pace_from_them() -> None:
    facts = said("".join(stamp(10 * i - 300) + " " + TRAIN.format(n=20 * i, left="3 h 20 min") for i in range(1, 30)))
    assert facts.pace is not None and facts.pace.seconds_per_step == pytest.approx(0.5)
    assert facts.eta_s == 12000


def test_only_the_stage_that_runs_counts() -> None:
    facts = said(demo("eval"))
    assert (facts.step, facts.total, facts.unit, facts.at_last_step, facts.ended) == (16, 32, "prompt", False, False)
    assert facts.phase is not None and "decoded 16/32" in facts.phase.line  # not the validation of the stage before
    assert facts.phase.id == "evaluating"


def test_the_last_sample_or_prompt_is_not_the_end_where_more_follows() -> None:
    assert not said(capture(1341, "0 s", "[3/7 capture] ")).at_last_step
    assert not said("decoded 32/32 prompts · accept length 1.736 so far\n").at_last_step
    assert said(capture(1341, "0 s")).at_last_step


def test_the_recorder_tells_the_phase() -> None:
    facts = said(demo("validating"))
    assert facts.phase is not None and (facts.phase.id, facts.phase.closed) == ("evaluating", False)
    facts = said("before the first sample · reading verifier 12 s · 30.1 MB/s\n")
    assert facts.phase is not None and facts.phase.id == "loading-model" and facts.step is None
    facts = said("sample 442/1,341 · saving 20 s\nstall: saving for 61 s, usually 210 ms\n")
    assert facts.phase is not None and facts.phase.id == "checkpointing" and facts.step == 442


@pytest.mark.parametrize(
    "line",
    [
        "done: 1,702 steps in 1,236 s · best checkpoint runs/a/best",
        "done (--max-minutes): 31 steps in 60 s · best checkpoint runs/a/best",
        "decoding (32 prompts, 2,312 tokens, 3 drafts a round, float32): accept length 1.736 · kept 0.5/0.2/0.1",
        "summary: runs/demo/summary.json · drafter: runs/demo/drafter",
    ],
)
def test_eyas_own_ends(line: str) -> None:
    assert said(f"step 31/1,702 · loss 2.0 · 0 s left\n{line}\n").ended


def test_the_end_of_a_stage_is_not_the_end_of_the_demo() -> None:
    facts = said("[5/7 train] done: 1,702 steps in 1,236 s · best checkpoint runs/demo/train/best\n")
    assert not facts.ended


DEATHS = [
    ("make: *** [Makefile:43: demo] Terminated", "signal", 15),
    ("make[2]: *** [Makefile:43: demo] Killed", "killed", 9),
    ("make: *** [Makefile:43: demo] Error 143", "signal", 15),
    ("make: *** [Makefile:43: demo] Error 137", "killed", 9),
    ("make: *** [Makefile:43: demo] Interrupt", "interrupted", None),
    ("Terminated", "signal", 15),
    ("Terminated: 15", "signal", 15),
    ("Killed", "killed", 9),
    ("Hangup", "signal", 1),
    ("run.sh: line 3: 12345 Terminated              python train.py", "signal", 15),
    ("run.sh: line 3: 12345 Killed                  python train.py", "killed", 9),
    ("[1]+  Terminated              python train.py", "signal", 15),
    ("zsh: killed     python train.py", "killed", 9),
    ("Command terminated by signal 15", "signal", 15),
]


@pytest.mark.parametrize(("line", "kind", "number"), DEATHS)
def test_a_shells_word_of_a_death_outweighs_an_end_before_it(line: str, kind: str, number: int | None) -> None:
    for before in (demo("eval"), "step 99/100 · loss 2.0 · 1 s left\nTraining complete\n"):
        facts = said(f"{before}{line}\n")
        assert not facts.ended
        assert facts.error is not None and facts.error.kind == kind
        code = facts.error.exitcode
        assert (facts.error.signal if code is None else code - 128) == number
        assert facts.error.final


def test_work_that_goes_on_after_a_death_ends_well() -> None:
    facts = said(
        "step 10/100 · loss 2.0\nrun.sh: line 3: 12345 Killed   python a.py\nstep 100/100\nTraining complete\n"
    )
    assert facts.ended and facts.error is not None and not facts.error.final


def test_sentences_with_such_words_are_no_deaths() -> None:
    for line in ("Training complete, workers terminated", "killed 3 stale processes", "terminated early: no gain"):
        facts = said(f"step 100/100 · loss 2.0\nTraining complete\n{line}\n")
        assert facts.ended, line


def test_make_says_how_a_program_failed() -> None:
    facts = said("step 5/100 · loss 2.0 · 9 s left\nmake: *** [Makefile:43: demo] Error 2\n")
    assert facts.error is not None and (facts.error.kind, facts.error.exitcode) == ("exception", 2)
