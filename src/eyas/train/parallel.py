"""Several processes on one training run: who they are, what they add up, and how the drafter is spread over them.

`torchrun` starts the processes and torch does the work: DDP keeps everything on every rank and adds gradients; FSDP2
keeps of masters, gradients and moments one part in W on each rank. The drafter is one layer that every TTT step goes
through, so its gradients are complete only when the backward pass ends: neither can hide its traffic, and both move the
same bytes (docs/scaling.md). Without torchrun there is one rank and no process group at all.

Small agreements between ranks (how many positions are trained, does anybody want to stop) are sums of a few numbers
over gloo, on the CPU: they never wait for a GPU.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from eyas.device import pick_device
from eyas.errors import EyasError, OtherRankGone


@dataclass(frozen=True)
class Ranks:
    """This process among all: rank of world, local_rank on its host, the device it computes on.

    group: gloo, for what is agreed on the CPU; saving: another one, for checkpoints that are written in the background.
    """

    rank: int
    local_rank: int
    world: int
    device: torch.device
    group: Any = None
    saving: Any = None

    @classmethod
    def join(cls, device: str = "auto") -> Ranks:
        """The ranks that torchrun started, or the one there is. Raises EyasError where they cannot compute."""
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if (
            world == 1 or "LOCAL_RANK" not in os.environ
        ):  # which torchrun alone sets: other launchers mean hosts by RANK
            return cls(0, 0, 1, pick_device(device))
        rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
        if ":" in device:
            raise EyasError(f"--device {device} is one device for {world} ranks: say {device.split(':')[0]}")
        kind = pick_device(device).type
        if kind == "cuda" and local_rank >= torch.cuda.device_count():
            raise EyasError(
                f"local rank {local_rank} has no GPU, there are {torch.cuda.device_count()}: lower --nproc-per-node"
            )
        where = torch.device("cuda", local_rank) if kind == "cuda" else torch.device(kind)
        if kind == "cuda":
            torch.cuda.set_device(where)
        if not dist.is_initialized():
            dist.init_process_group("cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo")
        return cls(rank, local_rank, world, where, dist.group.WORLD, dist.new_group(backend="gloo"))

    @property
    def first(self) -> bool:
        """Whether this is rank 0, the one that speaks and writes."""
        return self.rank == 0

    def sum(self, values: list[float]) -> list[float]:
        """Each number added up over all ranks."""
        if self.world == 1:
            return values
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total, group=self.group)
        return [float(v) for v in total]

    def any(self, value: bool) -> bool:
        """Whether it is so on any rank."""
        return self.sum([float(value)])[0] > 0

    def add(self, tensor: Tensor) -> Tensor:
        """`tensor` added up over all ranks, in place, on its own device."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def wait(self) -> None:
        """Until all ranks are here."""
        self.sum([0.0])

    @contextmanager
    def one_by_one(self) -> Iterator[None]:
        """Rank 0 first, then the others at once: so that what is made once and kept is made once."""
        if not self.first:
            self.wait()
        yield
        if self.first:
            self.wait()

    def leave(self) -> None:
        """End the process group, when all is done."""
        if self.world > 1 and dist.is_initialized():
            dist.destroy_process_group()


def spread(model: nn.Module, how: str, ranks: Ranks) -> nn.Module:
    """The model over all ranks. how: "ddp" or "fsdp". Every rank must hold the same weights already.

    Its gradients are means over ranks. With FSDP2 the parameters of `model` become sharded ones, in place.
    """
    if ranks.world == 1:
        return model
    if how == "ddp":
        from torch.nn.parallel import DistributedDataParallel

        # The verifier's embedding is a buffer that never changes: it need not go round at every step.
        ignore: Any = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
        ignore(model, [name for name, _ in model.named_buffers()])
        return DistributedDataParallel(model, init_sync=False, gradient_as_bucket_view=True)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    fully_shard(model, mesh=init_device_mesh(ranks.device.type, (ranks.world,)))
    return model


@contextmanager
def held_back(model: nn.Module, hold: bool) -> Iterator[None]:
    """While `hold`, backward passes add to this rank's gradients and nothing is exchanged."""
    if not hold or not (hasattr(model, "no_sync") or hasattr(model, "set_requires_gradient_sync")):
        yield
    elif hasattr(model, "no_sync"):
        with model.no_sync():  # type: ignore[operator]
            yield
    else:
        sync: Callable[[bool], None] = model.set_requires_gradient_sync  # type: ignore[assignment]
        sync(False)
        try:
            yield
        finally:
            sync(True)


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor of which FSDP2 keeps a part here (every rank must ask); any other tensor as it is."""
    full = getattr(tensor.detach(), "full_tensor", None)
    return tensor.detach() if full is None else full()


@contextmanager
def other_ranks_gone() -> Iterator[None]:
    """What torch raises here when another rank has ended, as one line: that rank has said why."""
    try:
        yield
    except RuntimeError as e:
        if dist.is_initialized() and ("gloo" in str(e) or "NCCL" in str(e) or isinstance(e, dist.DistError)):
            cause = re.sub(r"^\[\S+:\d+\] ", "", str(e).splitlines()[0]).partition(". ")[0]  # no place in torch's code
            raise OtherRankGone(f"another rank is gone, see what it said ({cause})") from None
        raise
