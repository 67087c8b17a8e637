"""The public names of mpkit and where each lives: the only list of them. `mpkit/__init__.py` reads it."""

from mpkit import devices as devices
from mpkit import errors as errors
from mpkit import experiments as experiments
from mpkit.analysis import learning_rate as learning_rate
from mpkit.analysis.cutting import find_cut as find_cut
from mpkit.analysis.placement import placement as placement
from mpkit.analysis.schedule_search import search_schedule as search_schedule
from mpkit.api.cluster import Cluster as Cluster
from mpkit.apps.compare import compare as compare
from mpkit.apps.explorer import explore as explore
from mpkit.checkup.doctor import doctor as doctor
from mpkit.classroom.check import check as check
from mpkit.classroom.check import progress as progress
from mpkit.data import digest as digest
from mpkit.data.batches import Batches as Batches
from mpkit.devices.catalogue import hardware as hardware
from mpkit.errors import CommMismatch as CommMismatch
from mpkit.errors import Deadlock as Deadlock
from mpkit.errors import MpkitError as MpkitError
from mpkit.errors import RankFailed as RankFailed
from mpkit.errors import UnwisePlan as UnwisePlan
from mpkit.experiments.memory_by_strategy import memory_by_strategy as memory_by_strategy
from mpkit.experiments.scaling import scaling as scaling
from mpkit.fake import trace_fake as trace_fake
from mpkit.launch.process.context import Context as Context
from mpkit.loss.mean import mean_loss as mean_loss
from mpkit.loss.whole_batch import whole_batch_loss as whole_batch_loss
from mpkit.parallel import tensor as tensor
from mpkit.parallel.update import optimizer as optimizer
from mpkit.plan.plan import Plan as Plan
from mpkit.reference.reading import source as source
from mpkit.schedule import Schedule as Schedule
from mpkit.support.tracebacks import show_internals as show_internals
from mpkit.timeline.simulation import simulate as simulate
from mpkit.timeline.stage_times import stage_times as stage_times
from mpkit.timeline.timeline import Timeline as Timeline
from mpkit.trace import Trace as Trace
from mpkit.watch.span import span as span
from mpkit.watch.step import step as step
from mpkit.wrap.data_parallel import ddp as ddp
from mpkit.wrap.fully_shard import fully_shard as fully_shard
from mpkit.wrap.pipeline import pipeline as pipeline
from mpkit.wrap.tensor_parallel import tensor_parallel as tensor_parallel
from mpkit.wrap.zero_optimizer import zero_optimizer as zero_optimizer

__version__: str
