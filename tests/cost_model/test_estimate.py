"""`mk.estimate` and `mk.fits`: what must hold whatever the numbers, and what is refused."""

import json
import pickle
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import mpkit as mk
from mpkit.common.display import draw
from mpkit.common.units import memory_share
from mpkit.models import GPT, next_token_loss
from mpkit.plan.rules import call_of
from mpkit.prediction.cost_model.architecture import Architecture
from mpkit.prediction.cost_model.estimate import estimate_of
from mpkit.prediction.cost_model.known_models import TRAITS, NoArchitecture, architecture_of, known_models
from mpkit.prediction.cost_model.layout import Layout
from mpkit.prediction.cost_model.memory import MemoryModel, kept_bytes
from mpkit.prediction.cost_model.stack import Stack
from tests.recipes import adamw
from tests.serial import Clusters
from tests.words import unwrapped

H100 = mk.hardware("h100", nodes=128, nic="ndr")
LLAMA = "llama3-8b"


def _plan(pp: int, dp: int, tp: int, m: int, zero: int) -> mk.Plan:
    schedule = "1f1b" if pp > 1 else "gpipe"
    return mk.Plan(
        pp=pp, dp=dp, tp=tp, microbatches=m, zero=zero if dp > 1 else 0, schedule=schedule,
        sequence_parallel=tp == 8,
    )  # fmt: skip


plans = st.builds(
    _plan, st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 8, 16]), st.sampled_from([1, 2, 8]),
    st.sampled_from([8, 32]), st.integers(0, 2),
)  # fmt: skip


def _estimate(plan: mk.Plan, microbatch: int = 1, **more: Any) -> Any:
    batch = plan.dp * plan.microbatches * microbatch
    return mk.estimate(LLAMA, plan, H100, global_batch=batch, sequence=2048, **more)


@given(plans)
@settings(max_examples=60, deadline=None)
def test_causes_add_up_and_memory_grows_with_the_batch(plan: mk.Plan) -> None:
    found, larger = _estimate(plan), _estimate(plan, 2)
    assert sum(found.because.values()) == pytest.approx(found.step_time, rel=1e-6)
    assert larger.step_time > found.step_time and larger.peak_memory > found.peak_memory
    assert len(found.memory) == plan.ranks
    assert found.band[0] < found.step_time < found.band[1]


@given(plans)
@settings(max_examples=40, deadline=None)
def test_recomputation_saves_memory_and_costs_at_most_a_forward(plan: mk.Plan) -> None:
    plain, again = _estimate(plan), _estimate(replace(plan, recompute="full"))
    assert again.peak_memory <= plain.peak_memory
    assert plain.step_time < again.step_time < 1.45 * plain.step_time


def test_the_plans_precision_is_read() -> None:
    plans = [mk.Plan(dp=8, zero=3, precision=precision) for precision in ("full", "bf16", "fp16")]
    full, bf16, fp16 = (_estimate(plan) for plan in plans)
    assert full.step_time > 2 * bf16.step_time and full.peak_memory > bf16.peak_memory
    assert (bf16.step_time, bf16.peak_memory) == (fp16.step_time, fp16.peak_memory)
    assert "in 32 bits" in str(full) and "in 16 bits" in str(bf16)
    named = _estimate(mk.Plan(dp=8, zero=3), stack="llm-foundry")
    assert named.plan.precision == "bf16" and named.stack.element == 2
    with pytest.raises(
        ValueError, match=r"computes in 32 bits, and the plan in 'bf16'.*Plan\(dp=8, zero=3\)"
    ):
        _estimate(plans[1], stack="pytorch-fp32")


def test_what_does_not_fit_names_a_plan_that_does() -> None:
    found = mk.fits("llama3-8b", mk.Plan(dp=8, zero=1), "8x-a100-nvlink", global_batch=8, sequence=8192)
    assert not found and found.remedy is not None
    remedy = found.remedy.plan
    assert mk.fits("llama3-8b", remedy, "8x-a100-nvlink", global_batch=8, sequence=8192)
    assert repr(remedy) in unwrapped(found)
    assert found.largest_batch == 0


def test_an_estimate_of_what_does_not_fit_says_so_first_with_what_would() -> None:
    """P5: it needs many times the memory, and its step time stood there as if it ran."""
    plan = mk.Plan.zero(3, 8, precision="bf16")
    found = mk.estimate("llama3-8b", plan, "8x-a100-nvlink", global_batch=64, sequence=4096)
    told = str(found)
    assert "does not fit" in told.partition("\nWhat would fit")[0].splitlines()[0] and not found
    assert "if it had the memory" in next(line for line in told.splitlines() if line.startswith("step"))
    picture = draw(found, "svg")
    assert "does not fit" in picture and "What would fit" in picture and "nothing was fitted" in picture


def test_a_device_whose_memory_is_unknown_limits_nothing() -> None:
    found = mk.fits("gpt2", mk.Plan(), "cpu", sequence=128)
    assert (
        found
        and "not known" in unwrapped(found)
        and "of 0" not in unwrapped(found)
        and "<svg" in found.to_svg()
    )
    assert found.memory[0]["context"] == 0
    advised = mk.advise("gpt2", "cpu", global_batch=8, sequence=128, by="devices")
    assert advised.best is not None and advised.best.ranks == 1 and "not known" in str(advised)


def test_a_machine_is_read_as_it_is_at_each_estimate_and_estimates_can_be_pickled() -> None:
    plan, bus = mk.Plan.zero(3, 8, precision="bf16"), dict(H100.link.bus)
    machine = replace(H100, link=replace(H100.link, bus=bus), nodes=1, order=list(range(8)))  # type: ignore[arg-type]
    before = mk.estimate(LLAMA, plan, machine, global_batch=8, sequence=2048)
    assert str(pickle.loads(pickle.dumps(before))) == str(before) == str(pickle.loads(pickle.dumps(before)))
    bus.update(dict.fromkeys(bus, 1e9))
    assert mk.estimate(LLAMA, plan, machine, global_batch=8, sequence=2048).step_time > 2 * before.step_time


def test_a_preset_of_ones_own_moves_predictions_to_the_measurements() -> None:
    rows = []
    for sequence in (1024, 2048, 4096, 8192):
        guess = mk.estimate(
            LLAMA, mk.Plan(dp=8, zero=3), "8x-h200-nvlink", global_batch=16, sequence=sequence
        )
        rows.append((guess, 1.3 * guess.step_time))
    preset = mk.calibrate(rows)
    for guess, seconds in rows:
        found = estimate_of(replace(guess, preset=preset), guess.plan)
        assert found.step_time == pytest.approx(seconds, rel=0.05)
        assert "fitted to 4 measured steps" in unwrapped(found)


@pytest.mark.parametrize(("arguments", "words"), [
    ({"plan": mk.Plan(dp=16)}, "needs 16 devices, and 8x-h100-nvlink has 8.*mk.hardware"),
    ({"plan": mk.Plan(tp=3)}, "tp=3 does not divide 32 attention heads.*tp=2"),
    ({"plan": mk.Plan(dp=8), "global_batch": 12}, "global_batch=12 does not divide.*global_batch=16"),
    ({"plan": "zero3"}, "give a Plan"),
    ({"stack": "megatorn"}, "Did you mean 'megatron'"),
    ({"sequence": 0}, "sequence=0"),
    ({"trainable": 0}, "trainable=0"),
    ({"hardware": "8x-h1000"}, "makes one of any size"),
])  # fmt: skip
def test_what_cannot_be_is_refused(arguments: dict[str, Any], words: str) -> None:
    asked: dict[str, Any] = {
        "model": LLAMA, "plan": mk.Plan(dp=8, zero=3), "hardware": "8x-h100-nvlink", "global_batch": 8,
        "sequence": 2048,
    }  # fmt: skip
    with pytest.raises(ValueError, match=words):
        mk.estimate(**(asked | arguments))


def test_expert_parallelism_divides_the_experts_alone() -> None:
    """Each rank holds 1/ep of the experts' weights and, whatever zero is, an equal part of all states under ZeRO-1."""
    model, machine = known_models()["mixtral-8x7b"], mk.hardware("h100", nodes=8, nic="ndr")
    experts = sum(model.expert_parameters(layer) for layer in range(model.layers))

    def memory(**degrees: Any) -> dict[str, float]:
        plan = mk.Plan(microbatches=4, zero=1, precision="bf16", **degrees)
        stages = mk.estimate(model, plan, machine, global_batch=256, sequence=4096).memory
        return dict(stages[0])

    whole, eighth = memory(dp=64), memory(dp=64, ep=8)
    assert whole["params"] - eighth["params"] == pytest.approx(2 * experts * 7 / 8)
    assert whole["optimizer"] == pytest.approx(eighth["optimizer"])
    shared = memory(dp=32, tp=2, ep=8, sequence_parallel=True)  # experts are whole beside tp
    rest = model.parameters - experts
    assert shared["params"] == pytest.approx(2 * (rest / 2 + experts / 8), rel=1e-3)
    assert shared["activations"] == pytest.approx(eighth["activations"] * 64 / 32 / 2, rel=0.05)


OTHER = {
    "pp": mk.Plan(pp=2, schedule="1f1b", microbatches=4),
    "dp": mk.Plan(dp=2),
    "tp": mk.Plan(tp=2),
    "schedule": mk.Plan(pp=2, schedule="1f1b", microbatches=4),
    "microbatches": mk.Plan(microbatches=4),
    "virtual_stages": mk.Plan(pp=2, schedule="interleaved_1f1b", virtual_stages=2, microbatches=4),
    "recompute": mk.Plan(recompute="full"),
    "cut": mk.Plan(pp=2, schedule="1f1b", microbatches=4, cut=(3,)),
    "data_parallel": mk.Plan.dp(4),
    "zero": mk.Plan.zero(3, 4),
    "offload": mk.Plan.zero(2, 4, offload="optimizer"),
    "precision": mk.Plan(precision="bf16"),
    "bucket_mb": mk.Plan(dp=4, bucket_mb=1),
    "prefetch": mk.Plan.zero(3, 4, prefetch=0),
    "cp": mk.Plan(cp=4),
    "cp_order": mk.Plan(cp=4, cp_order="zigzag"),
    "sequence_parallel": mk.Plan(tp=2, sequence_parallel=True),
    "tensor": mk.Plan(tp=2, tensor=mk.tensor.TensorPlan((mk.tensor.Region("1", ("1.up",), "1.down"),))),
    "dp_shard": mk.Plan.zero(3, 4, dp_shard=2),
    "cp_method": mk.Plan(cp=4, cp_method="ulysses"),
    "ep": mk.Plan(dp=4, ep=2),
    "etp": mk.Plan(dp=4, tp=2, sequence_parallel=True, zero=1, ep=4, etp=1),
}
"""A plan that differs from the default in a field, and in what that field needs."""
NEITHER = {"unused", "batchnorm"}
"""What has no part in a transformer's step: all its parameters are used, and it has no BatchNorm."""


@pytest.mark.parametrize("name", [field.name for field in fields(mk.Plan) if field.name not in NEITHER])
def test_an_estimate_reads_each_field_of_a_plan_or_rejects_it(name: str) -> None:
    plan = OTHER[name]
    default = next(field.default for field in fields(mk.Plan) if field.name == name)
    usual = replace(plan, **{name: default})
    model = {"layers": 4, "hidden": 512, "heads": 8, "vocabulary": 1000, "experts": 4, "top_k": 2}
    asked: dict[str, Any] = {"global_batch": 32, "sequence": 1024}

    def answer(of: mk.Plan) -> tuple[float, float]:
        found = mk.estimate(model, of, "8x-a100-nvlink", **asked)
        return found.step_time, found.peak_memory

    try:
        found = answer(plan)
    except ValueError as rejected:
        assert f"would be that of {call_of(usual)}. Ask for that one" in str(rejected)
        answer(usual)
    else:
        assert found != answer(usual)


@pytest.mark.parametrize(("plan", "sequence", "words"), [
    (mk.Plan(cp=4, cp_order="zigzag"), 60, "two pieces per rank does not divide .*: sequence=56 does"),
    (mk.Plan(tp=2, sequence_parallel=True), 63, "tp=2 with sequence_parallel=True .*: sequence=62 does"),
    (mk.Plan(), 65, "learned positions for 64 tokens, .*: sequence=64"),
], ids=repr)  # fmt: skip
def test_an_estimate_rejects_what_a_dry_run_does(
    clusters: Clusters, plan: mk.Plan, sequence: int, words: str
) -> None:
    tokens = torch.empty(4, sequence, dtype=torch.long, device="meta")
    with pytest.raises(ValueError):
        mk.trace_fake(
            small_gpt, plan, batch=(tokens, tokens), loss=next_token_loss, optimizer=adamw, cluster=clusters(1),
        )  # fmt: skip
    with pytest.raises(ValueError, match=words):
        mk.estimate(small_gpt(), plan, "8x-a100-nvlink", global_batch=4, sequence=sequence)


def small_gpt() -> GPT:
    return GPT(layers=2, width=16, heads=4, vocab=50, length=64)


def test_an_estimate_its_picture_advice_and_fits_say_one_memory() -> None:
    """With what fragmentation takes, to the digit, and with the unit that it is told in."""
    asked = {"global_batch": 64, "sequence": 4096}
    plan = mk.Plan(pp=2, dp=4, schedule="1f1b", microbatches=8, zero=1, precision="bf16")
    for each in (plan, mk.advise("llama3-8b", "8x-a100-nvlink", **asked).best):
        assert each is not None
        guess = mk.estimate("llama3-8b", each, "8x-a100-nvlink", **asked)
        room = mk.fits("llama3-8b", each, "8x-a100-nvlink", **asked)
        words = memory_share(room.needed, room.available)
        for shown in (unwrapped(guess), draw(guess, "svg"), unwrapped(room), draw(room, "svg")):
            assert words in shown
    assert f", {words};" in unwrapped(mk.advise("llama3-8b", "8x-a100-nvlink", **asked))


class TestMegatronsActivations:
    """Korthikanti et al. 2022, table 2: bytes per layer over s b h, for the 22B model."""

    gpt, stack = Architecture(48, 6144, 64, bias=True), Stack("paper", fused=False, dropout=True)

    @pytest.mark.parametrize(
        ("t", "sequence_parallel", "recompute", "expected"),
        [
            (1, False, "none", 34 + 5 * 64 * 2048 / 6144),
            (8, False, "none", 10 + 24 / 8 + 5 * 64 * 2048 / (6144 * 8)),
            (8, True, "none", 34 / 8 + 5 * 64 * 2048 / (6144 * 8)),
            (8, False, "selective", 10 + 24 / 8),
            (8, True, "selective", 34 / 8),
            (1, False, "full", 2),
        ],
    )
    def test_a_layer(self, t: int, sequence_parallel: bool, recompute: str, expected: float) -> None:
        layout = Layout(tp=t, microbatch=4, recompute=recompute, sequence_parallel=sequence_parallel)
        (held,) = MemoryModel(self.gpt, 2048, self.stack).ranks(layout)
        found = kept_bytes(recompute, held.everything, held.border, held.scores)
        assert found / (48 * 2048 * 4 * 6144) == pytest.approx(expected, rel=0.01)


# ---- Architectures against the models of transformers: the same parameters, from their configs and by name.


@pytest.mark.parametrize("experts", [0, 4])
def test_the_kits_gpt(experts: int) -> None:
    model = GPT(layers=3, width=48, heads=4, vocab=100, length=16, experts=experts)
    theirs = sum(p.numel() for p in model.parameters())
    assert architecture_of(model).parameters == pytest.approx(theirs, rel=2e-3)  # the head's bias


@pytest.mark.parametrize(("model", "words"), [
    ("lama3-8b", "llama3-8b"),
    ("nowhere/config.json", "cannot be read"),
    ({"layers": 2, "hidden": 10, "heads": 4}, "heads divides it"),
    ({"layers": 2, "hidden": 12, "heads": 4, "vocab": 9}, "Did you mean 'vocabulary'"),
    ({"layers": 0, "hidden": 12, "heads": 4}, "layers=0"),
    (torch.nn.Linear(2, 2), "mk.profile"),
    (3, "no config"),
])  # fmt: skip
def test_what_is_no_architecture(model: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        architecture_of(model)


def test_flops_are_megatrons() -> None:
    """F = 96 B s l h^2 (1 + s/6h + V/16lh) counts four forwards, and attention as if it were not causal."""
    gpt = Architecture(24, 2304, 24, vocabulary=51200)
    s, h = 2048, 2304
    megatron = 96 * s * 24 * h**2 * (1 + s / (6 * h) + 51200 / (16 * 24 * h))
    without_head = 4 * (gpt.forward_flops(s, causal=False) - 2 * s * h * 51200)
    assert without_head + 3 * 2 * s * h * 51200 == pytest.approx(megatron, rel=1e-9)


WANTED = {
    "nemotron": {"num_key_value_heads": 8}, "glm4_moe": {"head_dim": 128},
    "deepseek_v2": {"num_experts_per_tok": 6}, "electra": {"embedding_size": 256},
}  # fmt: skip
"""What a config does not have by default and its published ones have; electra's large ones have one width."""
AUTO = (
    transformers.AutoModelForCausalLM, transformers.AutoModelForMaskedLM, transformers.AutoModelForSeq2SeqLM,
    transformers.AutoModelForImageClassification,
)  # fmt: skip


def built(config: Any) -> torch.nn.Module:
    with torch.device("meta"):
        model: torch.nn.Module = next(a for a in AUTO if type(config) in a._model_mapping).from_config(config)
    return model


@pytest.mark.parametrize("kind", sorted(TRAITS))
def test_each_kind_has_the_parameters_of_its_module(kind: str) -> None:
    """Whether all values of the config are written, or only those that are not the default, as in files on the Hub."""
    config = CONFIG_MAPPING[kind](**WANTED.get(kind, {}))
    model = built(config)
    theirs = sum(p.numel() for p in model.parameters())
    short = {**json.loads(config.to_json_string(use_diff=True)), "model_type": kind}
    if "tied" in TRAITS[kind]:
        short.pop("tie_word_embeddings", None)
    for described in (config, short, model):
        assert architecture_of(described).parameters == pytest.approx(theirs, rel=0.01)


@pytest.mark.parametrize(("config", "words"), [
    (transformers.AlbertConfig(), "has not counted the parameters of model_type='albert'"),
    (transformers.Mamba2Config(), "has not counted the parameters of model_type='mamba2'"),
    (transformers.Qwen3MoeConfig(mlp_only_layers=[0]), r"mlp_only_layers=\[0\]"),
    (transformers.ElectraConfig(), "embedding_size=128"),
], ids=lambda value: getattr(value, "model_type", ""))  # fmt: skip
def test_a_config_that_says_too_little_is_not_guessed_at(config: Any, words: str) -> None:
    with pytest.raises(NoArchitecture, match=words):
        architecture_of(config)
