"""`python -m eyas.why TARGET` and `python -m eyas.why ps [HOST]`: the commands without the rest of eyas."""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn

from eyas.why.command import USAGE, run_ps, run_why


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(USAGE, f"eyas: {message}\n")


def main(words: list[str] | None = None) -> int:
    words = sys.argv[1:] if words is None else words
    if words[:1] == ["ps"]:
        parser = Parser(prog="eyas ps", description="Training processes here or there, the most suspicious first.")
        parser.add_argument("host", nargs="?")
        parser.add_argument("--json", action="store_true")
        parser.add_argument("--timeout", type=float, default=15.0)
        given = parser.parse_args(words[1:])
        return run_ps(given.host, json_out=given.json, timeout=given.timeout)
    parser = Parser(prog="eyas why", description="What is this silent process doing?")
    parser.add_argument(
        "target",
        nargs="?",
        help="PID, name, host:PID, host:name, @gpu0, log file, run directory, slurm:JOB, or nothing",
    )
    parser.add_argument("--json", action="store_true", help="the answer as JSON (schema in docs/why.md)")
    parser.add_argument(
        "--stacks", action="store_true", help="add Python stacks by py-spy, without pausing the process"
    )
    parser.add_argument(
        "--deep", action="store_true", help="add native stacks and two seconds of strace; this does pause the process"
    )
    parser.add_argument("--look", action="store_true", help="look at the process also where a run's own beat tells all")
    parser.add_argument("--timeout", type=float, default=15.0, metavar="S", help="give up after S seconds (default 15)")
    parser.add_argument("--log", metavar="FILE", help="the log, if it is not the process's own output")
    parser.add_argument("--fail-on", metavar="STATE", help="exit non-zero for these states only, e.g. stuck,failed")
    parser.add_argument("--replay", metavar="FILE", help="judge a saved snapshot again")
    parser.add_argument("--save", metavar="FILE", help="keep the snapshot, redacted")
    given = parser.parse_args(words)
    return run_why(
        given.target,
        json_out=given.json,
        stacks=given.stacks,
        deep=given.deep,
        timeout=given.timeout,
        log=given.log,
        fail_on=given.fail_on,
        replay=given.replay,
        save=given.save,
        whole=given.look,
    )


if __name__ == "__main__":
    sys.exit(main())
