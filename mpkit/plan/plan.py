"""Plan: the description of a parallel strategy; and Config, its text in another framework's words."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from fractions import Fraction
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from mpkit.common.calls import answers
from mpkit.common.disk import write_whole
from mpkit.common.tracebacks import public
from mpkit.plan.kinds import NAMED_AS_FIELDS, NamedConstructors, keywords
from mpkit.plan.mesh import Mesh
from mpkit.plan.rules import call_of, check_plan, describe, own_schedule
from mpkit.plan.schedule import Schedule, build_schedule
from mpkit.plan.schedule.catalogue import GPIPE, NAIVE, bubble_in_theory, has_pairs
from mpkit.plan.schedule.schedules import naive
from mpkit.plan.tensor_plan import TensorPlan

if TYPE_CHECKING:
    from mpkit.plan.schedule.core import Source


@dataclass(frozen=True)
class Plan(metaclass=NamedConstructors):
    """Everything that a strategy can vary. A Plan that cannot work says why as soon as it is made.

    Attributes:
        pp: the number of pipeline-parallel ranks, p, each with one or more stages of the model.
        dp: the number of replicas, n, each with a part of the batch.
        tp: the number of ranks that share each layer, t.
        schedule: a name from `mpkit.plan.schedule.NAMES`, or whatever a `Schedule` is made from, such as its rows.
        microbatches: the number of parts that a batch is split into, m.
        virtual_stages: stages per rank, v: any number for "looped_bfs", "interleaved_1f1b", "overlapped_1f1b" and
            "interleaved_zb", 2 for "zbv" and "dualpipev" (1 becomes 2), 1 for the others.
        recompute: which activations are recomputed in the backward instead of kept: "none"; "full": all inside the
            model's repeated blocks (`mpkit.models.repeated_blocks`), or inside a stage if it has no such blocks, of
            which only the inputs are kept; "every=k": those inside every k-th block; "selective": those inside
            attentions, which take much memory and little compute.
        cut: the first layer of each stage but stage 0, by number or name; None balances the stages by FLOPs.
        data_parallel: how replicas work together: "ddp", or "dp", as nn.DataParallel does it.
        zero: what ZeRO shards among the replicas: 0 nothing, 1 optimizer states, 2 also gradients, 3 also parameters.
        dp_shard: hybrid sharding (HSDP): ZeRO shards within groups of so many replicas, such as a node's; None: of all.
        offload: what is kept on the host: "none", "optimizer" (its states and step), or also "params".
        precision: "full" keeps the model's dtype; "bf16" and "fp16" compute in 16 bits, with fp32 master weights.
        bucket_mb: MiB of gradients that DDP and ZeRO reduce at once.
        unused: whether a parameter without a gradient is an "error" or is allowed ("allow").
        batchnorm: statistics over the whole batch ("sync"), as in serial training, or each rank's own ("local").
        prefetch: how many layers ahead ZeRO-3 gathers parameters.
        cp: the number of ranks that share each sequence.
        cp_order: which part of the sequence each rank has: "contiguous", or "zigzag", which balances causal attention.
        cp_method: how attention sees the whole sequence: "ring" passes keys and values on, "ulysses" divides the heads.
        sequence_parallel: whether tensor-parallel ranks divide the sequence between their layers.
        tensor: which layers are divided, and how; None: as `mk.tensor.find_tensor_plan` finds.
        ep: the number of ranks, out of the dp x cp replicas, that divide the experts of each layer; tokens go to their
            experts and back by all-to-alls. In a schedule with pairs ("overlapped_1f1b", "dualpipev" or one's own,
            `F2&B0`) they travel while the pair's other action computes.
        etp: the ranks along tp that share each expert: tp, of which each has a part; None: they hold the same experts;
            1: ep counts the ranks along tp too, each of which has tokens of its own (`sequence_parallel`), and the mesh
            of the experts is folded over that of the attention.

    >>> plan = Plan(pp=4, schedule="gpipe", microbatches=8)
    >>> plan
    Plan(pp=4, schedule='gpipe', microbatches=8)
    >>> plan == Plan.gpipe(4, 8) == Plan.from_json(plan.to_json())
    True
    >>> plan.bubble_in_theory
    Fraction(3, 11)

    Raises:
        ValueError: the plan cannot work; the message says why and shows one that would.
    """

    pp: int = 1
    dp: int = 1
    tp: int = 1
    schedule: str | Schedule = GPIPE
    microbatches: int = 1
    virtual_stages: int = 1
    recompute: str = "none"
    cut: Sequence[int | str] | None = None
    data_parallel: str = "ddp"
    zero: int = 0
    offload: str = "none"
    precision: str = "full"
    bucket_mb: float = 25.0
    unused: str = "error"
    batchnorm: str = "sync"
    prefetch: int = 1
    cp: int = 1
    cp_order: str = "contiguous"
    sequence_parallel: bool = False
    tensor: TensorPlan | None = None
    dp_shard: int | None = None
    cp_method: str = "ring"
    ep: int = 1
    etp: int | None = None

    def __post_init__(self) -> None:
        check_plan(self)

    @classmethod
    @answers("Plan.serial(microbatches=4)", keywords)
    def serial(cls, microbatches: int = 1, **options: Any) -> Plan:
        """Plan a run of the whole model on one rank; gradients accumulate over the m micro-batches.

        >>> Plan.serial().ranks
        1
        """
        return cls(schedule=NAIVE, microbatches=microbatches, **options)

    @classmethod
    @answers("Plan.naive_mp(stages=4)", keywords)
    def naive_mp(cls, stages: int, **options: Any) -> Plan:
        """Plan naive model parallelism: p stages of the model on as many ranks, of which one works at a time.

        >>> Plan.naive_mp(4).bubble_in_theory
        Fraction(3, 4)
        """
        return cls(pp=stages, schedule=NAIVE, **options)

    @classmethod
    @answers("Plan.gpipe(stages=4, microbatches=8)", keywords)
    def gpipe(cls, stages: int, microbatches: int, **options: Any) -> Plan:
        """Plan GPipe (Huang et al. 2019): a pipeline of p stages over m micro-batches.

        >>> Plan.gpipe(4, 8, recompute="full")
        Plan(pp=4, schedule='gpipe', microbatches=8, recompute='full')
        """
        return cls(pp=stages, schedule=GPIPE, microbatches=microbatches, **options)

    @classmethod
    @answers('Plan.pipeline("1f1b", ranks=4, microbatches=8)', keywords)
    def pipeline(cls, schedule: str, ranks: int, microbatches: int, **options: Any) -> Plan:
        """Plan a pipeline of p ranks and m micro-batches by the name of its schedule.

        >>> Plan.pipeline("interleaved_1f1b", 4, 8, virtual_stages=2).bubble_in_theory
        Fraction(3, 19)
        """
        return cls(schedule=schedule, pp=ranks, microbatches=microbatches, **options)

    @classmethod
    @answers("Plan.ddp(replicas=4)", keywords)
    def ddp(cls, replicas: int, **options: Any) -> Plan:
        """Plan distributed data parallelism: each of n ranks has the whole model and a part of the batch.

        Source: Li et al., "PyTorch Distributed", VLDB 2020. `Plan.dp(n)` works like nn.DataParallel; `Plan.zero(stage,
        n)` shards what all replicas would hold.

        >>> Plan.ddp(4, bucket_mb=1)
        Plan(dp=4, bucket_mb=1)
        """
        return cls(dp=replicas, **options)

    @classmethod
    @answers('Plan.from_schedule(["F0 F1 B0 B1", "F0 B0 F1 B1"])', keywords)
    def from_schedule(
        cls, schedule: Source, pp: int | None = None, microbatches: int | None = None, **options: Any
    ) -> Plan:
        """Plan a pipeline that runs whatever `Schedule` is made from: rows, or a function of (pp, microbatches).

        >>> Plan.from_schedule(["F0 F1 B0 B1", "F0 B0 F1 B1"]).ranks
        2
        """
        own = own_schedule(schedule, pp, microbatches)
        return cls(schedule=own, pp=own.ranks, microbatches=own.microbatches, **options)

    @property
    def ranks(self) -> int:
        """The number of ranks that the plan needs: pp x dp x cp x tp."""
        return self.mesh.size

    @property
    def mesh(self) -> Mesh:
        """The mesh, which gives each rank its place."""
        groups = self.dp // self.dp_shard if self.dp_shard else 1
        return Mesh(self.pp, self.dp, self.cp, self.tp, groups, self.ep, etp=self.etp or 0)

    @property
    def shards(self) -> int:
        """The number of ranks among which ZeRO shards what they would all hold: dp_shard x cp.

        >>> Plan.zero(3, 8).shards, Plan.zero(3, 8, dp_shard=4).shards
        (8, 4)
        """
        return self.mesh.dp_shard * self.cp

    @property
    def update_axes(self) -> tuple[str, ...]:
        """The axes along which ranks update different parameters: a norm of all gradients is a sum over these.

        >>> Plan(pp=2, dp=2).update_axes, Plan.zero(3, 8).update_axes
        (('pp', 'tp'), ('pp', 'tp', 'dp_shard', 'cp'))
        """
        over = ("dp_shard", "cp") if self.zero or self.mesh.folds else ("ep",) if self.ep > 1 else ()
        return "pp", "tp", *over

    @property
    def stages(self) -> int:
        """The number of stages that the model is cut into."""
        own = self.schedule
        return own.stages if isinstance(own, Schedule) else self.pp * self.virtual_stages

    @property
    def bubble_in_theory(self) -> Fraction | None:
        """The idle fraction of a step's span, averaged over ranks, for equal stages and messages that take no time.

        See `mpkit.plan.schedule.catalogue`. With recomputation a micro-batch takes 4 instead of 3, while idle times
        stay the same. It is None for a schedule of one's own and where the papers give no formula;
        `mpkit.simulate(plan).bubble` always has a value.
        """
        if isinstance(self.schedule, Schedule):
            return None
        p, m, v, again = self.pp, self.microbatches, self.virtual_stages, self.recompute == "full"
        return bubble_in_theory(self.schedule, p, m, v, recompute=again)

    def build(self) -> Schedule:
        """Return the schedule, row by row: the named one for these degrees, or the plan's own.

        A model in one stage accumulates gradients: whatever the schedule, each micro-batch runs forward and backward
        before the next one, since holding all their activations would gain nothing. A schedule of pairs
        ("overlapped_1f1b") runs each backward with the next forward.

        >>> print(Plan.gpipe(2, 2).build())
        rank 0 | F0 F1  .  .  . B1 -- B0 --
        rank 1 |  . F0 F1 B1 -- B0 --  .  .
        """
        if isinstance(self.schedule, Schedule):
            return self.schedule
        if self.stages == 1 and not has_pairs(self.schedule):
            return naive(1, self.microbatches)
        return build_schedule(self.schedule, self.pp, self.microbatches, self.virtual_stages)

    def placement(self, model: Any = None, *, hardware: Any = None) -> Any:
        """Show where the plan puts a model: each rank's layers and node, and which ranks communicate over which link.

        Under ZeRO it also shows which ranks hold which states. A run balances its stages by FLOPs, which requires a
        batch; `run.placement()` shows what a run did.

        Args:
            model: the model whose layers are placed; None: show the mesh and its links only.
            hardware: a catalogued machine's name (`mk.hardware()` lists them), or a `Hardware`; None: no nodes.

        Returns:
            A `Placement`, which is text and a picture, and has layers_of(rank), node_of(rank) and talks.

        Raises:
            ValueError: the machine has fewer devices than there are ranks, there are more stages than layers, or mpkit
                does not know how to divide this model.

        >>> from mpkit.models import MLP
        >>> print(Plan.gpipe(2, 4, cut=["hidden2"]).placement(MLP(8, 8), hardware="8x-h100-nvlink"))
        2 ranks, on 1 node of 8 H100 SXM
        <BLANKLINE>
        node 0
          rank 0   pp0   hidden0 to 1
          rank 1   pp1   hidden2 to 3, head
        <BLANKLINE>
        who talks to whom
          pp  (0 1), NVLink 4 within a node, 396 GB/s
        """
        return resolve_name("mpkit.strategies.placement.placement:placement")(self, model, hardware=hardware)

    def describe(self) -> str:
        """Describe the plan in a sentence or two.

        >>> print(Plan.gpipe(4, 8).describe())
        gpipe on 4 ranks: the model in 4 stages, each batch in 8 micro-batches. Bubble in theory 3/11 = 0.273.
        """
        return describe(self)

    def __repr__(self) -> str:
        return call_of(self)

    def to_json(self) -> str:
        """Return the plan as JSON; `from_json` reads it."""
        values, own = {f.name: getattr(self, f.name) for f in fields(self)}, self.schedule
        if isinstance(own, Schedule):
            rows = own.spelled()
            values["schedule"] = {"rows": rows, "name": own.name, "stage_to_rank": own.stage_to_rank}
        if self.tensor is not None:
            values["tensor"] = self.tensor.to_dict()
        return json.dumps(values)

    @classmethod
    def from_json(cls, text: str | Mapping[str, Any]) -> Plan:
        """Read what `to_json` wrote, or the mapping that it stands for.

        Raises:
            ValueError: it is not a plan, or is one that cannot work.
        """
        try:
            values = dict(json.loads(text) if isinstance(text, str) else text)
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"This is no plan in JSON ({error}): {str(text)[:80]!r}. "
                f"Plan.to_json writes one, such as {cls.gpipe(4, 8).to_json()}"
            ) from None
        values.pop("dp_replicate", None)  # which older files say beside dp and dp_shard
        known = [f.name for f in fields(cls)]
        for name in values:
            if name not in known:
                near = get_close_matches(name, known, 1)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                raise ValueError(f"A plan has no {name!r}.{hint} It has {', '.join(known)}.")
        if isinstance(values.get("schedule"), Mapping):
            values["schedule"] = Schedule(**values["schedule"])
        if isinstance(values.get("tensor"), Mapping):
            try:
                values["tensor"] = TensorPlan.from_dict(values["tensor"])
            except (KeyError, TypeError) as error:
                said = f"a plan's tensor={values['tensor']!r:.80}"
                raise ValueError(f"{said} is none that Plan.to_json wrote: {error}") from None
        return cls(**values)

    def to(self, format: str, **context: Any) -> Config:
        """Return the plan as another framework's configuration, with a comment per key (docs/formats.md).

        Args:
            format: "torchrun", "deepspeed", "accelerate", "fsdp", "megatron", "torchtitan", "trainer", "slurm" or
                "tf_config".
            context: what a plan leaves open: micro_batch or global_batch (samples), nodes, gpus_per_node, sequence
                (tokens), model, script, master, port.

        >>> print(Plan.ddp(16).to("torchrun", script="pretrain.py", master="gpu1"))
        #!/usr/bin/env bash
        # torchrun's command line, written by mpkit from Plan(dp=16)
        LAUNCH=(
          --nnodes=2                                  # machines
          --nproc-per-node=8                          # ranks per machine, one per GPU
          --rdzv-backend=c10d                         # how machines find each other
          --rdzv-endpoint=gpu1:29500                  # address of the first machine
          --rdzv-id=model                             # the name of this run, the same on all machines
          --max-restarts=0                            # how often all ranks are started again after a failure
        )
        torchrun "${LAUNCH[@]}" pretrain.py

        Raises:
            ValueError: there is no such format or argument, numbers do not fit together, or the framework would reject
                the plan.

        What the format cannot say is in `.cannot_say` of the result, in the head of a file with comments, and in a
        warning.
        """
        text: Config = resolve_name("mpkit.plan.formats.write:write")(self, format, **context)
        return text

    @classmethod
    def read(
        cls,
        path: str | os.PathLike[str] | Mapping[str, Any],
        format: str | None = None,
        ranks: int | None = None,
    ) -> Plan:
        """Read the plan that another framework's configuration says.

        Args:
            path: the file, its text, or the mapping that it holds.
            format: as for `to`; left out, it is guessed from the keys.
            ranks: how many ranks there are, for a file that leaves them to its launcher.

        >>> Plan.read(Plan.zero(2, 8, precision="bf16").to("deepspeed"))
        Plan(dp=8, zero=2, precision='bf16')
        >>> Plan.read({"parallelism.data_parallel_shard_degree": -1, "parallelism.tensor_parallel_degree": 2}, ranks=8)
        Plan(dp=4, tp=2, zero=3, precision='bf16', sequence_parallel=True)

        Raises:
            ValueError: the format is not known or could be several, or what it says cannot work or is not of `ranks`.

        A warning lists the keys of which a Plan says nothing.
        """
        plan: Plan = resolve_name("mpkit.plan.formats.read:read")(path, format, ranks)
        return plan


# `plan.dp` is a number and `Plan.dp(4)` makes a plan: an instance attribute takes precedence over a classmethod, which
# is set here, since @dataclass would take it for the field's default inside the class body.
for _name, _make in NAMED_AS_FIELDS.items():
    setattr(Plan, _name, classmethod(_make))
for _name in ("pp", "cp", "ep"):
    delattr(Plan, _name)  # so that Plan.cp(2) is answered with Plan(cp=4)
setattr(Plan, "__init__", answers("Plan(pp=4, schedule='1f1b', microbatches=8)", keywords)(Plan.__init__))  # noqa: B010
public(Plan)


class Config(str):
    """What `Plan.to` returns: the text of the file, as a str.

    A notebook shows `config.annotated`, which has comments also where the format (JSON) has none.

    >>> from mpkit import Plan
    >>> config = Plan.zero(2, 4, precision="bf16").to("deepspeed", micro_batch=8)
    >>> config.startswith("{"), config.cannot_say
    (True, {})
    >>> config.comments["train_micro_batch_size_per_gpu"]
    'samples per GPU and micro-batch'

    Attributes:
        kind: the name of the format.
        comments: what each key means, by its name; nested keys are joined by dots.
        cannot_say: why the format cannot say this, by field of the Plan: each field that differs in the Plan that is
            read from this text.
    """

    kind: str
    comments: Mapping[str, str]
    cannot_say: Mapping[str, str]
    annotated: str

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the text to a file, whole or not at all (OSError), and return its path."""
        write_whole(Path(path), self.encode())
        return Path(path)

    def __repr__(self) -> str:
        return self.annotated
