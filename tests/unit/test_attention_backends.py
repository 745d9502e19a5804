"""The operations of [plugins.attention] compute what plain attention does, and it chooses and refuses by its rules."""

import copy
import sys
import weakref
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, flex_attention
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from tests.jobs import BLOOM, GEMMA, LLAMA, mesh
from tests.planned import CLUSTER, job_of
from tests.sweeps import swept_case
from titan.config import Job, load_job, without_effect
from titan.contracts.base.cost import Attention
from titan.data.samples.samples import to_device
from titan.errors import ConfigError, PluginError
from titan.layers.attention import AttentionCore
from titan.machine import standing_in_for
from titan.planner.machine.kernels import Device, masked
from titan.planner.step.arithmetic import flops_per_token
from titan.planner.step.layout import costs_of
from titan.planner.step.predict import Planner
from titan.plugins.attention import backend as attention
from titan.plugins.attention.backend import by_document, choice, flex
from titan.training.engine import evaluating

SLOPES = (0.5, 0.25, 0.125, 0.0625)
PACKABLE: list[dict[str, Any]] = [{}, {"scale": 0.7}, {"window": 3}, {"window": 6, "scale": 0.3}, {"window": 40}]
FLEXIBLE: list[dict[str, Any]] = [{}, {"scale": 0.7, "window": 3}, {"slopes": SLOPES}]
FLEXIBLE += [{"soft_cap": 0.5}, {"soft_cap": 1.5, "slopes": SLOPES, "window": 4}]
DOCUMENTS = torch.tensor([[0] * 5 + [1] + [2] * 7, [0] * 13, [3] * 12 + [4]])
ENDS = [0, 5, 6, 13, 26, 38, 39]
"""Where they end in rows laid end to end."""


def _inputs(kv_heads: int) -> list[Tensor]:
    """q, k and v of 3 rows of 13 positions, laid out as a projection leaves them."""
    draws = torch.Generator().manual_seed(6)
    heads = (4, kv_heads, kv_heads)
    return [torch.randn(3, 13, count, 8, generator=draws).transpose(1, 2).requires_grad_() for count in heads]


def _with_gradients(operation: Any, inputs: list[Tensor], documents: Tensor | None) -> list[Tensor]:
    out = operation(*inputs, torch.arange(inputs[0].shape[2]).expand(3, -1), documents)
    weights = torch.linspace(-1, 2, out.numel()).view(out.shape)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), inputs)]


def _assert_near(found: list[Tensor], expected: list[Tensor]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("packed", [False, True], ids=["", "documents"])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("options", PACKABLE, ids=str)
def test_document_by_document_is_attention_with_a_mask(options: dict[str, Any], kv_heads: int, packed: bool) -> None:
    core, documents = AttentionCore(**options), DOCUMENTS if packed else None
    inputs, operation = _inputs(kv_heads), partial(by_document.attend_by_document, core)
    expected, ways = _with_gradients(core, inputs, documents), [operation]
    if packed and kv_heads == 2:
        torch.compiler.reset()  # the cases compile the same function, more often than PyTorch puts up with
        ways.append(torch.compile(operation, backend="aot_eager", fullgraph=True, dynamic=False))
    for each in ways:
        _assert_near(_with_gradients(each, inputs, documents), expected)


@pytest.mark.parametrize("queries", [1, 2, 4])
@pytest.mark.parametrize("window", [1, 3, 6])
@pytest.mark.parametrize("packed", [False, True], ids=["", "documents"])
def test_a_long_document_is_cut_into_pieces_that_see_their_window(
    packed: bool, window: int, queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(by_document, "QUERIES", queries)
    core, documents, inputs = AttentionCore(window=window), DOCUMENTS if packed else None, _inputs(2)
    found = _with_gradients(partial(by_document.attend_by_document, core), inputs, documents)
    _assert_near(found, _with_gradients(core, inputs, documents))


def test_a_window_makes_nothing_of_the_square_of_a_document() -> None:
    length, window = 5000, 100
    pieces = list(by_document.runs_of(torch.zeros(1, length, dtype=torch.long)).pieces(length, window))
    sizes = [(at.stop - at.start, keys.stop - keys.start) for _, at, keys in pieces]
    assert sum(rows for rows, _ in sizes) == length and max(sizes) == (256, 355)
    masks = by_document.Window(window, torch.empty(0))
    stored = {mask.untyped_storage().nbytes() for _, at, keys in pieces if (mask := masks.of(at, keys)) is not None}
    assert stored == {4 * 256 * 355}


# As in test_cpu_attention.py.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_the_operation_is_what_pytorch_asks_of_one() -> None:
    torch.library.opcheck(torch.ops.titan.attention_by_document, (*_inputs(2), DOCUMENTS, 3, 0.5))


def test_documents_that_the_loader_has_copied_are_not_read_back() -> None:
    """Meta tensors cannot be; those that are made from a copy must be."""
    _, _, documents, _ = to_device((DOCUMENTS, DOCUMENTS, DOCUMENTS, None), torch.device("meta"))
    assert documents is not None and documents.is_meta and by_document.runs_of(documents).host == ENDS
    with pytest.raises(NotImplementedError, match="meta"):
        by_document.runs_of(documents[:2])
    _, _, here, _ = to_device((DOCUMENTS, DOCUMENTS, DOCUMENTS, None), torch.device("cpu"))
    assert here is DOCUMENTS and by_document.runs_of(here[1:]).host == [0, 13, 25, 26]


def test_documents_are_read_once_and_forgotten_with_them() -> None:
    documents = DOCUMENTS.clone()
    runs = by_document.runs_of(documents)
    assert runs is by_document.runs_of(documents)
    assert runs.host == ENDS == runs.ends.tolist()
    assert runs.longest == 13
    slices = [(0, slice(6, 13)), (1, slice(0, 13)), (2, slice(0, 12))]
    assert list(runs.pieces(13, 0))[2:5] == [(row, at, at) for row, at in slices]
    ends = weakref.ref(runs.ends)
    del documents, runs
    assert ends() is None


def _compile_by(compile_: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a compiler in the place of PyTorch's, for functions of flex that nothing has compiled before."""
    monkeypatch.setattr(torch, "compile", compile_)
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    for name in ("flex_attention", "create_block_mask"):
        function = getattr(flex_attention, name)
        monkeypatch.setattr(flex, name, lambda *args, f=function, **options: f(*args, **options))


@pytest.mark.parametrize("packed", [False, True], ids=["", "documents"])
@pytest.mark.parametrize("kv_heads", [swept_case(4), 2])
@pytest.mark.parametrize("options", FLEXIBLE, ids=str)
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # of PyTorch, while it compiles
def test_flex_applies_what_a_core_has(
    options: dict[str, Any], kv_heads: int, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uncompiled, as PyTorch defines it: the same functions of scores and masks are compiled on a GPU."""
    compile_ = torch.compile
    _compile_by(lambda function: function, monkeypatch)
    core, documents = AttentionCore(**options), DOCUMENTS if packed else None
    inputs, positions = [t.detach() for t in _inputs(kv_heads)], torch.arange(13).expand(3, -1)
    whole = core(*inputs, positions, documents)
    torch.testing.assert_close(flex.attend_flex(core, *inputs, positions, documents), whole)
    if packed and kv_heads == 2:  # within a compiled block
        torch.compiler.reset()
        compiled = compile_(partial(flex.attend_flex, core), backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(*inputs, positions, documents), whole)
    # As on the second of two ranks that share the heads.
    core.first_head = 2
    own = [t[:, t.shape[1] // 2 :] for t in inputs]
    torch.testing.assert_close(flex.attend_flex(core, *own, positions, documents), whole[:, 2:])


def test_flex_stays_compiled_where_a_validation_runs_blocks_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager flex_attention writes all scores."""
    stances = []

    def compiled(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            stances.append(torch._dynamo.eval_frame._stance.stance)
            return function(*args, **kwargs)

        return call

    _compile_by(compiled, monkeypatch)
    core = AttentionCore(soft_cap=5.0)
    inputs, positions = [t.detach() for t in _inputs(4)], torch.arange(13).expand(3, -1)
    with evaluating([]):
        flex.attend_flex(core, *inputs, positions, DOCUMENTS.clone())  # of which there is no mask yet
    assert stances == ["default", "default"], "of the mask, and of the kernel"


def _calls(operation: Any, inputs: list[Tensor]) -> tuple[list[Tensor], list[str]]:
    """The output with gradients, and the operations of attention that ran."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        found = _with_gradients(operation, inputs, None)
    return found, [event.name for event in seen.events() if "_scaled_dot_product" in event.name]


def test_a_restriction_holds_where_a_backward_recomputes_and_where_it_is_compiled() -> None:
    """PyTorch's choice on a CPU is its flash kernel, which MATH does not call."""
    core, inputs = AttentionCore(), _inputs(4)
    operation = partial(attention._restricted, SDPBackend.MATH, core)
    expected, free = _calls(core, inputs)
    assert any("flash" in name for name in free)
    compiled = torch.compile(operation, backend="aot_eager", fullgraph=True, dynamic=False)
    for each in (lambda *args: checkpoint(operation, *args, use_reentrant=False), compiled):
        found, calls = _calls(each, inputs)
        assert not any("flash" in name for name in calls)
        _assert_near(found, expected)


def test_a_copy_of_a_core_computes_with_its_own_attributes() -> None:
    """A pipeline copies modules."""
    core = AttentionCore(scale=0.5)
    core.use(attention._operation("documents", core), "attention", follows=("scale",))
    twin = copy.deepcopy(core)
    assert isinstance(twin.operation, partial)
    assert twin.operation.args[0] is twin


PLAIN = choice.Setting("cuda", True, torch.bfloat16, 64, (), False, (), False)
PACKED = ("documents",)
ON_CPU = PLAIN._replace(device="cpu")
CHOICES = {
    "plain": ({}, "sdpa"),
    "documents": ({"has": PACKED}, "varlen"),
    "documents and a window": ({"has": ("documents", "window")}, "varlen"),
    "documents in float32": ({"has": PACKED, "dtype": torch.float32}, "flex"),
    "heads of 12 features": ({"has": PACKED, "head_dim": 12}, "sdpa"),
    "heads of 20 features": ({"has": PACKED, "head_dim": 20}, "flex"),
    "slopes": ({"has": ("ALiBi slopes",)}, "flex"),
    "a soft cap": ({"has": ("window", "a soft cap")}, "flex"),
    "scores written": ({"has": PACKED, "written": True}, "sdpa"),
    "sliced": ({"has": PACKED, "sliced": ("cp",)}, "sdpa"),
    "not known, documents": ({"device": "", "has": PACKED}, "varlen"),
    "cpu, float16": ({"device": "cpu", "dtype": torch.float16}, "sdpa"),
    "cpu, float16, documents": ({"device": "cpu", "dtype": torch.float16, "has": PACKED}, "documents"),
    "cpu, float16, window": ({"device": "cpu", "dtype": torch.float16, "has": ("window",)}, "sdpa"),
    "cpu, float32": ({"device": "cpu", "dtype": torch.float32}, "cpu"),
    "cpu, float32, documents": ({"device": "cpu", "dtype": torch.float32, "has": PACKED}, "cpu"),
    "cpu, documents and slopes": ({"device": "cpu", "has": ("documents", "ALiBi slopes")}, "sdpa"),
    "cpu, bfloat16": ({"device": "cpu"}, "cpu"),
    "cpu, bfloat16, window": ({"device": "cpu", "has": ("window",)}, "cpu"),
    "cpu, bfloat16, heads of 12": ({"device": "cpu", "has": PACKED, "head_dim": 12}, "documents"),
}


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """In place of titan's kernel for CPUs: it can be had, and computes by definition."""

    def computed(q: Tensor, k: Tensor, v: Tensor, *, documents: Tensor | None, **core: Any) -> Tensor:
        return AttentionCore(**core)(q, k, v, torch.arange(q.shape[2])[None], documents)

    stands_in = SimpleNamespace(why_not=lambda *_: "", outdone=lambda _: "", cpu_attention=computed)
    monkeypatch.setitem(sys.modules, "titan.plugins.attention.cpu_kernel", stands_in)  # type: ignore[arg-type]
    return stands_in


@pytest.mark.parametrize(("changes", "chosen"), CHOICES.values(), ids=CHOICES)
def test_auto_takes_the_best_of_its_setting(changes: dict[str, Any], chosen: str, kernel: SimpleNamespace) -> None:
    assert choice.best(PLAIN._replace(**changes))[0] == chosen


def test_auto_does_without_a_kernel_that_this_cpu_cannot_run(kernel: SimpleNamespace) -> None:
    kernel.why_not = lambda *_: "this CPU lacks avx512_bf16"
    assert choice.best(ON_CPU._replace(has=PACKED))[0] == "documents"
    assert "is not used: this CPU lacks avx512_bf16" in choice.best(ON_CPU)[1]
    assert choice.best(ON_CPU._replace(has=PACKED, here=False))[0] == "cpu"
    kernel.why_not, kernel.outdone = (lambda *_: ""), lambda _: "this CPU has wider vectors"
    assert choice.best(ON_CPU)[1].endswith("is not used: this CPU has wider vectors")
    assert not list(choice.unfit("cpu", ON_CPU))  # it may be asked for
    kernel.why_not = lambda *_: pytest.fail("compiled a kernel that the job could not use")
    assert choice.best(ON_CPU._replace(has=("a soft cap",)))[0] == "sdpa"


def test_titans_own_kernel_is_given_what_the_core_has(kernel: SimpleNamespace) -> None:
    core, inputs = AttentionCore(window=3, scale=0.7), _inputs(2)
    found = _with_gradients(attention._operation("cpu", core), inputs, DOCUMENTS)
    _assert_near(found, _with_gradients(core, inputs, DOCUMENTS))


def backend(name: str, *words: str) -> list[str]:
    return ["--plugins.attention.backend", name, "--data.path", "x", *words]


ISOLATED = ("--data.packing", "document_mask")
BF16, FP16 = ((f"--plugins.{name}.enabled", "true") for name in ("bf16", "fp16"))
CPU, CUDA = (("--run.device", device) for device in ("cpu", "cuda"))
REFUSED = [
    (backend("flash"), r'backend = "flash" computes in bfloat16 or float16, and the run in float32'),
    (backend("flash", *BF16, *ISOLATED), r'backend = "flash" does not follow documents, which the job has'),
    (backend("cudnn", *BF16, "--model.sliding_window", "5"), r'backend = "cudnn" does not follow window'),
    (backend("cudnn", *BF16, "--run.deterministic", "true"), r"is not deterministic, and \[run\] deterministic"),
    (backend("varlen", *CPU), r'backend = "varlen" is for GPUs, and the run is on CPUs; set backend = "auto"'),
    (backend("flex", *CPU), r'backend = "flex" is for GPUs, and the run is on CPUs'),
    (backend("flex"), r"needs heads of 16 to 256 features, and the model has 8"),
    (backend("varlen", *BF16, "--model.dim", "48"), r"heads of 8 to 256 features in steps of 8, .* has 12"),
    (backend("documents", *CUDA), r'backend = "documents" is for CPUs, and the run is on GPUs'),
    (backend("cpu", *CPU, *FP16), r'"cpu" computes in bfloat16 or float32, and the run in float16; add .plugins.bf16'),
    (backend("documents", "--model.attention", "unfused"), r'writes no scores, and model.attention = "unfused"'),
    (backend("documents", *mesh(cp=2)), r'"documents" computes .* "ring" computes attention itself; set method = "uly'),
    (backend("auto", "--plugins.attention.flash_impl", "FA3"), r'flash_impl = "FA3" is for backend = "flash" and'),
    ((BLOOM, *backend("documents")), r'backend = "documents" does not follow ALiBi slopes'),
    ((GEMMA, *backend("efficient")), r'backend = "efficient" does not follow .*a soft cap'),
]


@pytest.mark.parametrize(("words", "said"), REFUSED)
def test_what_a_job_cannot_have_is_refused(words: Any, said: str) -> None:
    config, words = (words[0], words[1:]) if isinstance(words, tuple) else (LLAMA, words)
    with pytest.raises(ConfigError, match=said):
        load_job(config, words)


@pytest.mark.filterwarnings("ignore:.*:UserWarning")  # PyTorch says of each kernel why it does not go
def test_a_backend_is_tried_before_it_is_taken() -> None:
    """On this CPU in the place of a GPU."""
    sizes: Any = SimpleNamespace(device=torch.device("cpu"), spec=SimpleNamespace(n_heads=4, n_kv_heads=2))
    setting = PLAIN._replace(dtype=torch.float32, has=PACKED)
    assert attention._failure("documents", setting, sizes) == ""
    assert "No viable backend" in attention._failure("cudnn", setting._replace(has=()), sizes)
    with pytest.raises(ConfigError, match=r'flash_impl = "FA3" cannot be activated \(.*\); install it, or set "FA2"'):
        attention._activate("FA3")


def test_a_backend_goes_with_a_method_that_calls_it() -> None:
    load_job(LLAMA, backend("documents", *mesh(cp=2), "--plugins.context.method", "ulysses"))
    load_job(LLAMA, backend("documents", "--plugins.context.method", "ring"))  # no axis slices sequences
    load_job(LLAMA, backend("auto", *mesh(cp=2)))


def _applied(job: Job, core: AttentionCore | None = None) -> AttentionCore:
    """A core after the technique was applied, as on a rank on this machine's CPU."""
    core = core or AttentionCore()
    (technique,) = (each for each in job.techniques if each.name == "attention")
    context: Any = SimpleNamespace(job=job, spec=job.spec, device=torch.device("cpu"))
    technique.apply(SimpleNamespace(module=core, costly=set()), context)  # type: ignore[arg-type]
    return core


def test_what_this_machine_cannot_do_is_refused_when_the_model_is_built(kernel: SimpleNamespace) -> None:
    """`device = "auto"` becomes known then."""
    with pytest.raises(ConfigError, match=r'plugins.attention\]: backend = "varlen" is for GPUs, and the run is on CP'):
        _applied(load_job(LLAMA, backend("varlen", *BF16)))
    kernel.why_not = lambda *_: "this CPU lacks avx512_bf16"
    job = load_job(LLAMA, backend("cpu", *BF16, "--model.dim", "64"))
    with pytest.raises(ConfigError, match=r'backend = "cpu" cannot be used: this CPU lacks avx512_bf16; set backend'):
        _applied(job)
    with standing_in_for("cuda"):  # a dry run asks nobody
        assert _applied(job).operation is not None


class _Own(AttentionCore):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:  # type: ignore[override]
        return v


def test_attention_that_is_computed_in_another_way_already_is_left_alone_or_refused() -> None:
    taken = AttentionCore()
    taken.use(lambda *args: args[2], "another")
    documents = load_job(LLAMA, backend("documents", *ISOLATED))
    for core, said in ((_Own(), "the model computes attention of its own"), (taken, "another technique has replaced")):
        before = core.operation
        assert _applied(load_job(LLAMA, backend("auto", *ISOLATED)), core).operation is before
        with pytest.raises(ConfigError, match=f'backend = "documents" replaces attention, but {said}'):
            _applied(documents, core)
    later = _applied(documents)
    with pytest.raises(PluginError, match="techniques attention and another both replace attention, and another"):
        later.use(lambda *args: args[2], "another")


def test_the_log_says_what_was_taken_and_why(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "titan.attention")
    _applied(load_job(LLAMA, backend("auto", *ISOLATED)))
    _applied(load_job(LLAMA, backend("auto", *ISOLATED, *mesh(cp=2)), 2))
    assert caplog.messages == [
        "attention: documents, for documents without a mask; titan's own kernel is not used: it needs heads of 16 to "
        "256 features in steps of 16, and the model has 8",
        "attention: sdpa, as mesh.cp has an operation of its own",
    ]


def test_math_writes_scores_and_sdpa_changes_nothing() -> None:
    assert _applied(load_job(LLAMA, backend("math"))).writes_scores
    plain = _applied(load_job(LLAMA, backend("sdpa", *ISOLATED)))
    assert plain.operation is None and not plain.writes_scores
    nothing = '[plugins.attention] backend = "sdpa" has no effect: it is what runs without the technique'
    assert without_effect(load_job(LLAMA, backend("sdpa"))) == [nothing]


def _core_of(*words: str) -> Attention:
    job = job_of("--data.seq_len", "64", *words)
    return next(op for op in costs_of(job).layer if isinstance(op, Attention))


def test_a_plan_takes_an_unknown_device_for_a_gpu() -> None:
    window = ("--model.sliding_window", "8", "--model.dim", "256", "--plugins.attention.backend", "auto")
    assert not masked(_core_of(*window, *BF16), 64)
    assert masked(_core_of(*window, *CPU, "--model.n_heads", "32"), 64)  # heads of 8 features
    assert not masked(_core_of(*window, *CPU), 64)
    assert not masked(_core_of(*window, *CPU, *BF16), 64)


def test_a_kernel_that_skips_takes_the_time_of_the_keys_that_are_seen() -> None:
    """The mean of 1, 2, ..., 16, 16, ... over 64 positions is 14 and 1/8, and 14 where 15 of 16 are counted half."""
    costs, op = costs_of(job_of("--data.seq_len", "64")), _core_of()

    def seconds(op: Attention) -> float:
        return Device(CLUSTER).operation(op, costs, "float32").forward - CLUSTER.kernels.launch_us * 1e-6

    assert op.mean_keys(64) == 32
    assert replace(op, window=16).mean_keys(64) == 14
    whole, skipping = seconds(replace(op, window=16)), seconds(replace(op, window=16, skips=True))
    assert skipping / whole == pytest.approx(14 / 64)
    packed, apart = seconds(replace(op, documents=True)), seconds(replace(op, documents=True, skips=True))
    assert apart / packed == pytest.approx(1 / 2)


def test_a_compiled_kernel_runs_again_where_recomputation_saves_products() -> None:
    words = ("--model.preset", "mini", "--data.seq_len", "256", "--plugins.bf16.enabled", "true")
    found = {}
    for name in ("efficient", "flex"):
        for mode in ("none", "selective"):
            given = ("--plugins.attention.backend", name, "--plugins.activation_checkpoint.mode", mode)
            costs = costs_of(job_of(*words, *given))
            found[name, mode] = Planner(CLUSTER).predict(costs, job_of(*words).layout), flops_per_token(costs)[1]
    (kept, _), (plain, whole) = found["efficient", "selective"], found["flex", "none"]
    again, hardware = found["flex", "selective"]
    core = _core_of(*words, "--plugins.attention.backend", "flex")
    assert core.compiled and again.memory[0].activations < kept.memory[0].activations
    assert hardware - whole == job_of(*words).spec.n_layers * core.flops_per_token(256)
    assert found["efficient", "selective"][1] == found["efficient", "none"][1]
    assert again.time_s["recompute"] > kept.time_s["recompute"] and not plain.time_s["recompute"]
