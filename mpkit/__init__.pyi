"""The public names of mpkit and where each lives: the only list of them. `mpkit/__init__.py` reads it."""

from mpkit import data as data
from mpkit import devices as devices
from mpkit import errors as errors
from mpkit import models as models
from mpkit.course.check import check as check
from mpkit.course.check import progress as progress
from mpkit.course.predictions.predict import predict as predict
from mpkit.course.serial_comparison import beside_serial as beside_serial
from mpkit.devices.catalogue import hardware as hardware
from mpkit.errors import RankFailed as RankFailed
from mpkit.launch import watch as watch
from mpkit.launch.doctor.doctor import doctor as doctor
from mpkit.launch.session.cluster import Cluster as Cluster
from mpkit.plan.balance import attention_work as attention_work
from mpkit.plan.plan import Plan as Plan
from mpkit.plan.schedule import Schedule as Schedule
from mpkit.prediction import experiments as experiments
from mpkit.prediction.advice.advice import advise as advise
from mpkit.prediction.cost_model.estimate import estimate as estimate
from mpkit.prediction.cost_model.estimate import fits as fits
from mpkit.prediction.cost_model.preset import calibrate as calibrate
from mpkit.prediction.dry_run import trace_fake as trace_fake
from mpkit.prediction.experiments.by_strategy import memory_by_strategy as memory_by_strategy
from mpkit.prediction.experiments.by_strategy import scaling as scaling
from mpkit.prediction.experiments.profile import profile as profile
from mpkit.prediction.schedule_search import search_schedule as search_schedule
from mpkit.strategies import tensor as tensor
from mpkit.strategies.data.batches import Batches as Batches
from mpkit.strategies.loss.counted import mean_loss as mean_loss
from mpkit.strategies.loss.whole_batch import whole_batch_loss as whole_batch_loss
from mpkit.strategies.prepare.find_cut import find_cut as find_cut
from mpkit.strategies.rank_context import Context as Context
from mpkit.strategies.reference.reading import source as source
from mpkit.strategies.update import optimizer as optimizer
from mpkit.strategies.wrappers.data_parallel import ddp as ddp
from mpkit.strategies.wrappers.pipeline import pipeline as pipeline
from mpkit.strategies.wrappers.prove import prove as prove
from mpkit.strategies.wrappers.tensor_parallel import tensor_parallel as tensor_parallel
from mpkit.timeline.comparison import compare as compare
from mpkit.timeline.foreign.open_trace import open as open
from mpkit.timeline.simulation import simulate as simulate
from mpkit.timeline.timeline import Timeline as Timeline
from mpkit.trace import Trace as Trace
from mpkit.views.page.explore import explore as explore

__version__: str
