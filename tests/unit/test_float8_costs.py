"""What a plan counts for `[plugins.float8]`: the linears that it converts, and their casts."""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.planned import CLUSTER, job_of
from titan.config import load_job
from titan.contracts.base.cost import Costs, Elementwise, Matmul, parameter_count
from titan.planner.machine import cluster
from titan.planner.machine.kernels import Device
from titan.planner.step.layout import costs_of
from titan.planner.step.predict import Planner

pytestmark = pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")
FLOAT8 = ("--plugins.float8.enabled", "true")
HEAD = (*FLOAT8, "--plugins.float8.head", "true", "--model.vocab_size", "512")
SOME = (*FLOAT8, "--plugins.float8.filter", "layers.*.attn.wo,layers.0.ffn.*")


def planned(*words: str) -> Costs:
    return costs_of(job_of(*words))


def narrow(costs: Costs) -> dict[str, float]:
    """Products in float8, and the share of the layers that have them so."""
    return {op.module: op.of_layers for op in (*costs.layer, *costs.head) if isinstance(op, Matmul) and op.dtype}


def test_the_linears_that_are_converted_and_no_others() -> None:
    layers = len(job_of().spec.layer_names())
    everything = narrow(planned(*FLOAT8))
    assert len(everything) == 7 and set(everything.values()) == {1.0}
    but_one = 1 - 1 / layers
    expected = {"attn.wq": 1.0, "attn.wk": 1.0, "attn.wv": 1.0, "ffn.w1": but_one, "ffn.w2": but_one, "ffn.w3": but_one}
    assert narrow(planned(*SOME)) == pytest.approx(expected)
    assert narrow(planned(*HEAD)) == everything | {"output": 1.0}


def test_what_is_split_between_two_formats_stays_as_many_parameters() -> None:
    layers = (planned(*words).layer for words in (SOME, ()))
    some, none = (sum(parameter_count(op) * op.of_layers for op in layer) for layer in layers)
    assert some == pytest.approx(none)


def test_a_product_takes_the_rates_of_its_own_format() -> None:
    device, costs = Device(CLUSTER), replace(planned(), seq_len=4096)
    wide = Matmul(module="ffn.w1", inputs=4096, outputs=4096)
    fast = CLUSTER.products["bfloat16"]
    both = Device(replace(CLUSTER, products={**CLUSTER.products, "float8": fast}))
    assert device.operation(wide, costs, "bfloat16") == both.operation(wide, costs, "bfloat16")
    seconds = [sum(both.operation(replace(wide, dtype=dtype), costs, "bfloat16")) for dtype in ("", "float8")]
    assert seconds[0] == pytest.approx(2 * seconds[1], rel=0.05)


def test_casts_pass_over_operands_and_weights() -> None:
    costs, rows = planned(*FLOAT8), planned(*FLOAT8, "--plugins.float8.recipe", "rowwise")
    linears = [op for op in costs.layer if isinstance(op, Matmul)]
    operands = sum(op.inputs + op.outputs for op in linears)
    weights = sum(op.inputs * op.outputs for op in linears) / costs.tokens
    assert costs.layer[-1].forward == pytest.approx(1.5 * (operands + weights))  # type: ignore[union-attr]
    assert rows.layer[-1].backward == pytest.approx(4.5 * (operands + weights))  # type: ignore[union-attr]
    copies = [op.scratch for op in planned(*HEAD).head if isinstance(op, Elementwise)]
    assert 2.5 * 512 * costs.tokens in copies, "two copies of the gradient of the logits in float32, two in float8"


@pytest.mark.parametrize("name", ["h100", "h200"])
def test_gpus_gain_what_products_gain_less_casts(name: str) -> None:
    """Llama 3 8B in bf16, compiled. Rows are cast twice, so they gain less."""
    planner = Planner(cluster.load(name))

    def seconds(*words: str) -> float:
        job = load_job(Path("configs/llama3_8b.toml"), words, 64)
        return planner.predict(costs_of(job), job.layout).step_time_s

    recipes = [seconds("--plugins.float8.recipe", recipe) for recipe in ("tensorwise", "rowwise")]
    some = seconds("--plugins.float8.filter", "layers.*.ffn.*")
    without = seconds()
    assert 1.0 < without / recipes[1] < without / recipes[0] < 1.5
    assert recipes[0] < some < without
