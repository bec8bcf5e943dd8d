"""When a worker fails, the others still hold the state as of the last completed step: it is written before they go.

The worker's side. The training thread changes state only inside `changing()`. A side thread answers the launcher even
while the training thread hangs in a collective: it freezes the state, says which step it is of, and writes what it is
told to write. No collective is used. Which ranks write what is decided in `launcher/salvage.py`.
"""

import contextlib
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from rung.cluster.link import Link, lift_memory_cap
from rung.launcher.messages import Leave, Position, WhereAreYou, WriteState

#: How long a change of state (one optimizer update) may take before it is taken for hung, in seconds.
UPDATE_S = 10.0
#: How long a worker that failed waits for the launcher to get the state out of it, in seconds.
HOLD_S = 300.0


class Rescuer:
    """Guards the state of one worker. `step()` tells the last completed step, `write(whole,
    elsewhere)` writes the state."""

    def __init__(self, link: Link, step: Callable[[], int], write: Callable[[bool, str | None], None]) -> None:
        self._link, self._step, self._write = link, step, write
        self._changing = threading.Lock()
        self._frozen = False
        self._sound = True
        self._writing = threading.Lock()
        self._retired = False
        self._leave = threading.Event()
        link.intercept = self._on

    @property
    def sound(self) -> bool:
        """Whether the state is that of a completed step."""
        return self._sound

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Surrounds every change of the state that a checkpoint holds. If an exception comes out, the state is torn.

        Once the state is frozen nothing may change it: the thread waits here for the end of the process.
        """
        with self._changing:
            if self._frozen:
                self._leave.wait(HOLD_S)
                raise SystemExit(1)
            self._sound = False
            yield
            self._sound = True

    def retire(self) -> None:
        """The state is about to be taken apart: what is being written is finished, and nothing is promised any more."""
        with self._writing:
            self._retired = True

    def hold(self, error: BaseException) -> None:
        """Called with the exception that ends this worker: stays until the launcher has what can be had."""
        # The frames hold activations, and saving needs memory.
        traceback.clear_frames(error.__traceback__)
        lift_memory_cap()
        self._frozen = True
        self._link.send(Position(step=self._step(), sound=self._sound, failing=True))
        self._leave.wait(HOLD_S)

    def _on(self, value: Any) -> bool:
        """Runs on the link's thread, which must stay free to hear more."""
        match value:
            case WhereAreYou():
                threading.Thread(target=self._freeze, name="rung-freeze", daemon=True).start()
            case WriteState(whole=whole, elsewhere=elsewhere):
                threading.Thread(target=self._save, args=(whole, elsewhere), name="rung-rescue", daemon=True).start()
            case Leave():
                self._leave.set()
                return False  # a trainer that waits for an answer hears it too
            case _:
                return False
        return True

    def _freeze(self) -> None:
        got = self._changing.acquire(timeout=UPDATE_S)
        self._frozen = True
        if got:
            self._changing.release()
        sound = got and self._sound and not self._retired
        self._link.send(Position(step=self._step(), sound=sound, failing=False))

    def _save(self, whole: bool, elsewhere: str | None) -> None:
        lift_memory_cap()
        with self._writing:
            if not self._retired:
                self._write(whole, elsewhere)
