"""Random schedules that are valid: every action after what it needs, and nothing else is known of them."""

import random

from hypothesis import strategies as st

from mpkit.plan.schedule import Action, Schedule


def random_holders(stages: int, ranks: int, rng: random.Random) -> list[int]:
    """The rank of each stage; every rank has one at least."""
    holders = [*range(ranks), *(rng.randrange(ranks) for _ in range(stages - ranks))]
    rng.shuffle(holders)
    return holders


def in_random_order(actions: set[Action], holders: list[int], rng: random.Random) -> Schedule:
    """Everything after what it needs, in a random order, dealt out to the ranks."""
    left = set(actions)
    all_in_one = Schedule([sorted(left)], stage_to_rank=[0] * len(holders))
    rows: list[list[Action]] = [[] for _ in range(max(holders) + 1)]
    done: set[Action] = set()
    while left:
        action = rng.choice(sorted(a for a in left if done.issuperset(all_in_one.needs(a))))
        left.remove(action)
        done.add(action)
        rows[holders[action.stage]].append(action)
    return Schedule(rows, "random", holders)


def random_schedule(rng: random.Random, ranks_at_least: int = 1) -> Schedule:
    """Each backward whole or split, the stages dealt out to the ranks at will."""
    stages = rng.randint(ranks_at_least, 5)
    holders = random_holders(stages, rng.randint(ranks_at_least, stages), rng)
    microbatches = rng.randint(2, 5)
    pairs = [(stage, i) for stage in range(stages) for i in range(microbatches)]
    actions = {Action(kind, *pair) for pair in pairs for kind in "F" + rng.choice(("B", "IW"))}
    return in_random_order(actions, holders, rng)


valid_schedules = st.integers(0, 2**32).map(lambda seed: random_schedule(random.Random(seed)))
