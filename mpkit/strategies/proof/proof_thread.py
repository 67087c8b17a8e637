"""ProofThread: the thread that verifies a run's steps as the ranks finish them."""

import json
import math
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from mpkit.common.disk import write_whole
from mpkit.common.exceptions import one_line
from mpkit.common.launch_folder import APART, LAUNCHED, part, write_difference
from mpkit.common.process_wide import LOCK, silent
from mpkit.errors import MpkitError, NotSerial
from mpkit.strategies.job.job import TrainJob
from mpkit.strategies.models.heard_draws import CannotReplay
from mpkit.strategies.models.step_facts import FIRST_TIMES, first_unverified
from mpkit.strategies.proof.prover import Prover
from mpkit.strategies.runtime.evidence import verdict_of
from mpkit.strategies.runtime.memory_picture import is_out_of_memory
from mpkit.trace.proof import PROOF, Proof

LOOK_EVERY = 0.05  # seconds between two looks for a step that all ranks have finished


class ProofThread:
    """Verifies the steps of a run, in a thread; `losses` returns the losses of the steps so far."""

    def __init__(self, job: TrainJob, folder: Path, losses: Callable[[], list[float]]) -> None:
        self._job, self._folder, self._losses = job, folder, losses
        self._know(Proof(why_not=job.how.unverified))
        # What ends the run: a step that is not that of serial training, or a defect of the comparison.
        self.error: MpkitError | None = None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        if job.how.verified:
            self._prover = Prover(job, folder)
            self._thread = threading.Thread(target=self._work, name="mpkit-proof", daemon=True)
            self._thread.start()

    @property
    def proof(self) -> Proof:
        """What is known so far."""
        return self._proof

    def _know(self, proof: Proof) -> None:
        self._proof = proof
        if self._folder.is_dir():
            with suppress(OSError):  # without space, other processes learn nothing of it
                write_whole(self._folder / PROOF, json.dumps(proof.to_dict()).encode())

    def finish(self) -> None:
        """Verify what the ranks finished, and return; called when the ranks have ended."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def note_first_times(self) -> None:
        """Say what happened for the first time in a step that was not compared, and which step to compare."""
        known = self._proof
        if self._thread is None or known.difference or len(known.steps) < len(self._due()):
            return  # what is said is why not even these steps were compared
        notes = [known.why_not] if known.why_not else []
        losses = enumerate(self._losses(), self._job.how.first_step + 1)
        step, loss = next((pair for pair in losses if not math.isfinite(pair[1])), (0, 0.0))
        if step and step not in known.steps:
            notes.append(f"the loss is {loss} from step {step} on: {self._compares(step)}")
        ranks = range(self._job.plan.ranks)
        first, facts = first_unverified(part(self._folder, rank, FIRST_TIMES) for rank in ranks)
        if facts:
            more = f" (and {len(facts) - 1} more such changes)" if len(facts) > 1 else ""
            where = f"for the first time in step {first + 1}{more}"
            notes.append(f"{facts[0]} {where}: {self._compares(first + 1)}")
        self._know(replace(known, why_not="; ".join(notes)))

    def _due(self) -> list[int]:
        """Return the steps to verify among those that were done."""
        done = self._job.how.first_step + len(self._losses())
        return [step for step in self._job.how.verified if step < done]

    def _compares(self, step: int) -> str:
        return f"train(..., verify=({step},)) compares that step"

    def _work(self) -> None:
        for step in self._job.how.verified:
            try:
                if not self._verify_step(step):
                    return
            except NotSerial as error:
                self._know(replace(self._prover.proof, difference=str(error)))
                self.error = error
                write_difference(self._folder, error)
                return
            except Exception as error:
                if is_out_of_memory(error):
                    gpu = self._job.how.gpu
                    where = "in this process" if gpu is None else f"on cuda:{gpu} beside the ranks"
                    why = f"there is not enough memory to repeat step {step + 1} {where}"
                elif isinstance(error, CannotReplay):
                    why = f"step {step + 1} cannot be repeated: {error}"
                else:  # a defect of mpkit's: the thread raises in the one that waits for the run
                    self.error = _defect(step, error)
                    return
                self._know(replace(self._prover.proof, why_not=why))
                for later in self._job.how.verified:
                    (self._folder / verdict_of(later)).touch()
                return
            self._know(self._prover.proof)
            (self._folder / verdict_of(step)).touch()

    def _verify_step(self, step: int) -> bool:
        """Wait until all ranks have finished a step, and verify it; return False if they never will."""
        place, launched = step - self._job.how.first_step, self._folder / LAUNCHED
        while True:
            ended = self._ended.is_set()
            ready = self._prover.ready(step)
            losses: list[float | None] = [*self._losses()] if ready else []
            if ready and launched.exists() and launched.read_text() == APART:
                # Ranks on other machines send theirs with the traces, at the end.
                losses = [None] * (place + 1)
            if len(losses) > place:
                with LOCK, silent():  # the ranks print what the model and the loss print
                    self._prover.verify(step, losses[place])
                return True
            if ended:
                return False
            self._ended.wait(LOOK_EVERY)


def _defect(step: int, error: Exception) -> MpkitError:
    defect = MpkitError(
        f"comparing step {step + 1} with plain PyTorch failed: {one_line(error)}. This is a defect of mpkit, and "
        "whether the run is right is not known. train(..., verify=False) trains without the comparison"
    )
    defect.__cause__ = error
    return defect
