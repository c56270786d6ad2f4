"""Hidden states out of a vLLM engine, written into a store by the engine's own worker.

vLLM imports this file, by name (`kv_connector_module_path`); eyas does not. With the speculative method
`extract_hidden_states` an engine keeps the states of every position in a group of its KV cache. When a request is done,
the worker copies its rows out of the cache and hands them to one thread, which writes them with `StoreWriter`: no file
of another format, no second pass, no process in between. Prompt and generated tokens come from the same forward passes.

Only requests that carry an `eyas` entry in their kv_transfer_params are stored (`vllm.request_params`); others are
served as usual. Only tensor-parallel rank 0 copies and writes, and each data-parallel engine is a writer of its own
(`vllm0`, `vllm1`, ...), so that no two processes share a file.

Cost: one copy of the states; on a GPU on a side stream into pinned memory, while the next forward pass runs. At most
WAITING samples wait for the disk (2 GB of pinned memory for Kimi-K2.5 at 2,048 tokens); then the engine waits.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    ExampleHiddenStatesConnectorMetadata,
    PendingSave,
)
from vllm.logger import init_logger
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from eyas.capture.common import check_finite
from eyas.record.outlet import name_thread
from eyas.store.layout import Manifest
from eyas.store.writer import StoreWriter

WAITING = 16  # samples between the engine and the disk
COMMIT_SECONDS = 1.0  # without a new sample for so long, what is written is recorded
WHOLE = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)
logger = init_logger(f"vllm.{__name__}")  # vLLM prints what is logged under its own name


@dataclass
class Sample(PendingSave):  # type: ignore[misc]  # vLLM is not there when types are checked
    """A finished request on its way from the scheduler to the worker. token_ids: all that are stored, [T]."""

    trained: list[list[int]] = field(default_factory=list)
    computed: int = 0  # rows that the engine has states of: T, or T - 1 where the last token was generated

    def loss_mask(self) -> np.ndarray:
        """[T] bool."""
        mask = np.zeros(len(self.token_ids), np.bool_)
        for first, stop in self.trained:
            mask[first:stop] = True
        return mask


class Arrived:
    """In place of a CUDA event where copies are synchronous."""

    def query(self) -> bool:
        """Whether the copy is done."""
        return True

    def synchronize(self) -> None:
        """Wait for the copy."""


class StoreConnector(ExampleHiddenStatesConnector):  # type: ignore[misc]
    """Both halves: in the scheduler it notes what a finished request holds, in the worker it copies and writes it.

    kv_connector_extra_config: {"store": folder with the manifest of the store}.
    Raises ValueError or EyasError at the engine's start when the engine is not set up for this store.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self.use_lock = False  # of the base: lock files beside its own output
        self.store = Path(self._kv_transfer_config.get_from_extra_config("store", ""))
        self.manifest = Manifest.load(self.store)
        asked = vllm_config.speculative_config.draft_model_config.hf_config.eagle_aux_hidden_state_layer_ids
        if tuple(asked) != self.manifest.layers:
            raise ValueError(
                f"the engine extracts layers {list(asked)}, {self.store} is of {list(self.manifest.layers)}"
            )
        dtype = str(vllm_config.model_config.dtype).removeprefix("torch.")
        if self.manifest.extractor.split()[-1] != dtype:
            raise ValueError(f"the engine computes in {dtype}, {self.store} is of {self.manifest.extractor}")
        if vllm_config.cache_config.enable_prefix_caching:
            raise ValueError("states of a cached prefix are another request's: start with --no-enable-prefix-caching")
        if vllm_config.parallel_config.pipeline_parallel_size > 1:
            raise ValueError("states are captured from one pipeline stage: use tensor and data parallelism")
        self.writer_name = f"vllm{vllm_config.parallel_config.data_parallel_rank}"
        self._queue: queue.Queue[tuple[Sample, torch.Tensor, Any] | None] = queue.Queue(WAITING)
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    # In the scheduler

    def build_connector_meta(self, scheduler_output: Any) -> ExampleHiddenStatesConnectorMetadata:  # noqa: ARG002
        """Hand what finished since the last step to the worker; no files are announced to the client."""
        meta = ExampleHiddenStatesConnectorMetadata(pending_saves=list(self._pending_saves.values()))
        self._pending_saves.clear()
        return meta

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """(whether its blocks must be kept until they are copied, what the client is told)."""
        wanted = (request.kv_transfer_params or {}).get("eyas")
        if wanted is None or request.status not in WHOLE:
            return False, None
        prompt = list(request.prompt_token_ids or [])
        if xxhash.xxh3_64_hexdigest(np.asarray(prompt, np.int32).tobytes()) != wanted["prompt"]:
            said = f"the engine was given other tokens than sample {wanted['id']} has ({len(prompt)} of them)"
            return False, {"eyas_error": said}
        ids = list(request.all_token_ids) if wanted["answer"] else prompt
        trained = [list(s) for s in wanted["trained"]]
        if wanted["answer"]:
            trained.append([len(prompt), len(ids)])
        if any(stop > start for (_, stop), (start, _) in pairwise(trained)):
            return False, {"eyas_error": f"the trained parts of sample {wanted['id']} overlap: {trained}"}
        computed = len(ids) - 1 if wanted["answer"] else len(ids)
        self._pending_saves[request.request_id] = Sample(
            request.request_id, wanted["id"], torch.tensor(ids), list(block_ids), trained, computed
        )
        return True, {"eyas_stored": wanted["id"]}

    # In the worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Find the group of the cache that holds states, and open the store."""
        super().register_kv_caches(kv_caches)
        if not self._is_tp_rank_zero:
            return
        assert self._kv_cache is not None
        shape = (self._kv_cache.shape[1], self._kv_cache.shape[3])
        if shape != (len(self.manifest.layers), self.manifest.hidden_size):
            raise ValueError(
                f"the engine keeps {shape[0]} states of {shape[1]} values, {self.store} is of another model"
            )
        writer = StoreWriter(self.store, self.manifest, writer=self.writer_name)
        self._thread = threading.Thread(target=self._write, args=(writer,), name="eyas-store", daemon=True)
        self._thread.start()

    def _submit_async_write(self, pending: Sample) -> None:
        """Copy a finished request's rows out of the cache and queue them. Called for every one by `get_finished`."""
        if not self._is_tp_rank_zero:
            return
        self._raise_what_went_wrong()
        states, arrived = self._copy(pending)
        self._req_copy_events[pending.req_id] = arrived
        while True:
            try:
                self._queue.put((pending, states, arrived), timeout=1)
                return
            except queue.Full:
                self._raise_what_went_wrong()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """As the base does it; what went wrong on the way to the disk stops the engine here."""
        self._raise_what_went_wrong()
        finished: tuple[set[str] | None, set[str] | None] = super().get_finished(finished_req_ids)
        return finished

    def _copy(self, sample: Sample) -> tuple[torch.Tensor, Any]:
        """The rows [layers, T, Ht] bfloat16 in host memory, and the event after which they are there."""
        cache = self._kv_cache  # [blocks, layers, block, Ht]
        assert cache is not None
        layers, width, count = cache.shape[1], cache.shape[3], sample.computed
        blocks = torch.tensor(sample.block_ids[: -(-count // cache.shape[2])])
        on_gpu = cache.is_cuda
        host = torch.empty(layers, len(sample.token_ids), width, dtype=torch.bfloat16, pin_memory=on_gpu)
        with contextlib.ExitStack() as side:
            if on_gpu:
                stream = self._get_copy_stream()
                stream.wait_stream(torch.cuda.current_stream())  # the pass that wrote the last rows
                side.enter_context(torch.cuda.stream(stream))
                blocks = blocks.pin_memory().to(cache.device, non_blocking=True)
            for k in range(layers):
                rows = cache[blocks, k].reshape(-1, width)[:count].to(torch.bfloat16)
                # The last generated token went through no forward pass, and nothing reads its state: a drafter's input
                # at p is (x[p+1], g[p]), a target at p predicts x[p+1]. Its row repeats the one before.
                missing = len(sample.token_ids) - count
                host[k].copy_(torch.cat([rows, rows[-1:].expand(missing, -1)]), non_blocking=on_gpu)
            if not on_gpu:
                return host, Arrived()
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record(stream)
            return host, arrived

    def _write(self, writer: StoreWriter) -> None:
        """The thread that owns the store."""
        name_thread("eyas-store")
        try:
            with writer:
                stored = set(writer.done_ids)
                while True:
                    try:
                        job = self._queue.get(timeout=COMMIT_SECONDS)
                    except queue.Empty:
                        writer.commit()
                        continue
                    if job is None:
                        return
                    sample, states, arrived = job
                    arrived.synchronize()
                    if sample.filename in stored:
                        continue  # asked for twice
                    stored.add(sample.filename)
                    check_finite(sample.filename, states, self.manifest.layers)
                    writer.add(sample.filename, sample.token_ids.numpy(), sample.loss_mask(), states)
        except Exception as error:  # whatever it is, the engine's thread has to hear of it
            logger.error("eyas: %s", error)
            self._error = error

    def _raise_what_went_wrong(self) -> None:
        if self._error is not None:
            raise self._error

    def shutdown(self) -> None:
        """Write what is waiting and close the store."""
        thread, self._thread = self._thread, None
        while thread is not None and thread.is_alive():
            with contextlib.suppress(queue.Full):
                self._queue.put(None, timeout=1)
                thread.join()


class OneTokenScheduler(Scheduler):  # type: ignore[misc]
    """The scheduler for CPUs: no draft tokens.

    `extract_hidden_states` is a drafter to vLLM, and drafts the token that was just sampled, which is then rejected:
    every decoding step computes two positions for one. On a GPU, where decoding waits for the weights, that is nearly
    free; on a CPU it is up to twice the work.
    """

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        """Forget them."""
