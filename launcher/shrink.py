"""Out of memory on a single device: the same step again, under a smaller plan, in the same process."""

import ctypes
import gc
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from rung.launcher.messages import Leave, OutOfMemory, Replan
from rung.strategies import checkpointing
from rung.strategies.oom import is_out_of_memory
from rung.strategies.plan import Plan

if TYPE_CHECKING:
    from rung.launcher.train import Trainer

#: How long the launcher may take to decide, in seconds.
ANSWER_S = 60.0


def until_it_fits(trainer: "Trainer", act: Callable[[], None]) -> None:
    """Runs `act`; when a single device runs out of memory, asks for a smaller plan and runs it again.

    Anything else, and out of memory in the middle of an update (the state is torn then), comes out as it is.
    """
    while True:
        try:
            act()
        except Exception as error:
            if trainer.plan.strategy != "single" or not trainer.rescuer.sound or not is_out_of_memory(error):
                raise
            # The frames of the failed step hold its activations.
            traceback.clear_frames(error.__traceback__)
            failure = error
        else:
            return
        plan = _ask(trainer, failure)
        if plan is None:
            raise failure
        _adopt(trainer, plan)


def _ask(trainer: "Trainer", failure: Exception) -> Plan | None:
    peak = trainer.memory.peak()
    what = str(failure).splitlines()[0] if str(failure) else type(failure).__name__
    trainer.link.send(OutOfMemory(step=trainer.progress.step, peak_bytes=peak, what=what))
    until = time.monotonic() + ANSWER_S
    while time.monotonic() < until:
        match trainer.link.poll():
            case Replan(plan=plan):
                return plan
            case Leave():
                return None
            case None:
                time.sleep(0.002)
    return None


def _adopt(trainer: "Trainer", plan: Plan) -> None:
    """Frees what the failed step left, and goes on under `plan` from the same sample."""
    for parameter in trainer.strategy.model.parameters():
        parameter.grad = None
    gc.collect()
    give_back(trainer.strategy.device)
    if plan.activation_checkpointing and not trainer.plan.activation_checkpointing:
        checkpointing.enable(trainer.strategy.module)
    trainer.plan = trainer.strategy.plan = plan
    if trainer.loader is not None:
        trainer.open_loader()


def give_back(device: torch.device) -> None:
    """Returns cached memory to the device or the system."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()
    else:
        try:
            ctypes.CDLL(None).malloc_trim(0)
        except (AttributeError, OSError):
            return  # not glibc: its allocator has nothing to ask for
