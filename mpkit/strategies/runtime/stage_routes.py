"""StageRoutes: which routes end at a stage and which begin there, for micro-batches of one signature."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from mpkit.plan.schedule import Action
from mpkit.strategies.job.feed import MicroBatch
from mpkit.strategies.job.job import TrainJob
from mpkit.strategies.partition.value import Route

__all__ = ["Routes", "StageRoutes"]


class Routes(NamedTuple):
    """The routes that end at a stage, and those that begin there."""

    arriving: list[Route]
    leaving: list[Route]


class StageRoutes:
    """The routes to and from stages, each looked up once.

    Args:
        job: knows where the model is cut.
    """

    def __init__(self, job: TrainJob) -> None:
        self._job = job
        self._known: dict[tuple[Hashable, int], Routes] = {}  # by signature and stage

    def routes_of(self, action: Action, microbatches: Sequence[MicroBatch]) -> Routes:
        """Return the routes to and from an action's stage, for micro-batches of its one's shapes."""
        place = microbatches[action.microbatch].key, action.stage
        routes = self._known.get(place)
        if routes is None:
            where = self._job.where
            routes = self._known[place] = Routes(where.incoming_routes(*place), where.outgoing_routes(*place))
        return routes
