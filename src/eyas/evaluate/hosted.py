"""vLLM started here: the program that runs its engines (`vllm_job.py`) in a Python that has it, and its answers.

One program serves any number of engines, one after the other. It gets a session of its own, so that ending it ends the
engine with it, whatever that has started.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from eyas.errors import EyasError

Say = Callable[[str], None]
JOB = Path(__file__).with_name("vllm_job.py")
TROUBLE = re.compile(r"\b\w*(Error|Exception)\b: .+")


class Host:
    """A Python that has vLLM imported and waits for jobs; a context that ends it."""

    def __init__(self, python: str | None = None) -> None:
        """python: None for this one. Raises EyasError where it cannot be started."""
        self.python = python or sys.executable
        self.work = Path(tempfile.mkdtemp(prefix="eyas-bench-"))
        self.log: list[str] = []
        try:
            self.process = subprocess.Popen(
                [self.python, str(JOB)],
                env=engine_environment(self.python),
                cwd=self.work,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        except OSError as error:
            shutil.rmtree(self.work)
            said = f"{self.python} cannot be started ({error.strerror})"
            raise EyasError(f"{said}: name a Python that has vLLM") from None

    def __enter__(self) -> Host:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()

    def run(self, job: dict[str, Any], say: Say) -> dict[str, Any]:
        """What `vllm_job` counted for this job, its log as `log`. Raises EyasError with vLLM's own words."""
        job_file, result_file = self.work / "job.json", self.work / "result.json"
        job_file.write_text(json.dumps(job))
        result_file.unlink(missing_ok=True)
        self.log = []
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # it ended: its log says why
            self.process.stdin.write(json.dumps([str(job_file), str(result_file)]) + "\n")
            self.process.stdin.flush()
        code = self._follow(say)
        if code or not result_file.exists():
            self._failed(code)
        result: dict[str, Any] = json.loads(result_file.read_text())
        result["log"] = "".join(self.log)
        return result

    def _follow(self, say: Say) -> int:
        """Pass on what it says to people until the job's end; its exit code."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("@end "):
                return int(line.split()[1])
            if line.startswith("@eyas "):
                say(line.removeprefix("@eyas ").rstrip())
            elif line != "@ready\n":
                self.log.append(line)
        return self.process.wait() or 1

    def _failed(self, code: int) -> None:
        if any("No module named 'vllm'" in line for line in self.log):
            raise EyasError(f"{self.python} has no vLLM: name a Python that has (--engine-python), or servers (--url)")
        kept = Path(tempfile.mkdtemp(prefix="eyas-vllm-")) / "vllm.log"
        kept.write_text("".join(self.log))
        said = next((m[0] for line in reversed(self.log) if (m := TROUBLE.search(line))), f"it ended with code {code}")
        raise EyasError(f"vLLM failed: {said[:300]} (its log: {kept})")

    def close(self) -> None:
        """End it, and whatever engine it runs."""
        with contextlib.suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()  # type: ignore[union-attr]
        shutil.rmtree(self.work, ignore_errors=True)


def engine_environment(python: str) -> dict[str, str]:
    """What a vLLM in another Python starts with: none of this environment's paths, and the OpenMP that it asks for.

    Without Intel's OpenMP preloaded vLLM warns that drafting on a CPU is slow; its packages for CPUs bring the library.
    Its threads wait 5 ms at the end of a product before they sleep, as vLLM sets it for workers of its own processes:
    by default they spin for 200 ms, which takes the cores from whoever else works on the machine, and waits for him.
    """
    env = dict(os.environ)
    if Path(python).absolute() != Path(sys.executable).absolute():
        env = {k: v for k, v in env.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")}
    openmp = Path(python).absolute().parents[1] / "lib" / "libiomp5.so"
    if openmp.exists() and not torch.cuda.is_available():
        env.setdefault("LD_PRELOAD", str(openmp))
        env.setdefault("KMP_BLOCKTIME", "5")
        env.setdefault("KMP_TPAUSE", "0")
    return env
