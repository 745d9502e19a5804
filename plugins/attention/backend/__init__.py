"""Which kernel computes attention: softmax(q k^T scale + mask) v, causal, within documents and windows.

Without this technique titan calls `scaled_dot_product_attention` (SDPA), whose kernel PyTorch picks. Packed documents,
a window or ALiBi's slopes are then a mask of S x S, which every kernel reads and none skips a block of. With a soft cap
titan writes the S x S scores. `backend` takes another operation, for all layers:

    sdpa        what runs without the technique
    math        separate operations that write the scores, as PyTorch's math backend does
    efficient   SDPA's memory-efficient kernel (arXiv 2112.05682), on GPUs, of any dtype
    flash       SDPA's FlashAttention (arXiv 2307.08691), on GPUs; `flash_impl` has version 3 and 4
    cudnn       SDPA's kernel of cuDNN, on GPUs
    varlen      FlashAttention's kernel of variable lengths, on GPUs: documents and windows without a mask
    flex        `flex_attention`: a kernel compiled for the documents, window, slopes and soft cap, on GPUs
    documents   PyTorch's CPU kernel, one document after the other, without a mask
    cpu         titan's kernels in bfloat16 and float32, on CPUs with AVX2 or AVX-512 BF16
    auto        the best that device, dtype and model allow; which one, the log says

`auto` takes on a GPU `varlen` for documents and windows in half precision, `flex` for those in float32, slopes and
soft caps. For plain attention it takes `cudnn` on Hopper and later if it works there, or SDPA: on H100 `cudnn` is up
to 75 % faster than FlashAttention 2 (PyTorch's blog on 2.5). On a CPU it takes `cpu` where it can, else `documents`
for documents, or SDPA. Where ranks slice sequences, or the model writes its scores by its own option, it changes
nothing.

The same numbers, summed in another order.

Cost, against SDPA with a mask: `varlen`, `flex`, `documents` and `cpu` make no mask of S x S numbers per micro batch
(per head with slopes), no copies of keys and values for each head of a group, and compute about half of the scores of
whole sequences, and less with shorter documents or a window. `flex` saves no scores under a soft cap either. `math`
saves the softmax of the scores, H S numbers per token and layer. `varlen` and `documents` read the documents' bounds on
the host once per micro batch: on a GPU the host waits at the start of a step for the step before. `flex` compiles a
kernel in the first step.

Limits: `flash`, `cudnn` and `varlen` are for half precision and heads of a multiple of 8 features, 256 at most; `flash`
and `cudnn` for plain causal attention; `varlen`, `documents` and `cpu` for no slopes and soft caps. `cpu` is for heads
of a multiple of 16 features, 256 at most; `auto` leaves float32 to SDPA on CPUs with AVX-512 other than Zen 4. `cudnn`
is not for `run.deterministic`. In a pipeline on GPUs, `varlen` waits in the forward of each micro batch. `flex` is
computed again by mode "selective", which keeps no results of compiled kernels. Ring and gathered context parallelism
replace attention too, and are refused beside a backend that does. The kernels for GPUs have been compared with plain
attention only where tests marked `gpu` were run. A key-value cache computes attention of its own.

A plan takes `[run] device = "auto"` for a GPU. It counts documents as long as the sequence.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from titan.contracts import Batch, BuildContext, Costs, Job, ModelPart, ModelSpec, Technique, copy_to, option, register
from titan.contracts.base.cost import Attention
from titan.errors import ConfigError, ConfigIssue
from titan.layers.attention import AttentionCore, AttentionOperation, attention_cost

from . import by_document
from .choice import BACKENDS, Name, Setting, best, kept_by, own_kernel, setting_of, unfit

_log = logging.getLogger("titan.attention")

_RESTRICTED = {
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
_HOPPER, _VOLTA = (9, 0), (7, 0)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Options of `[plugins.attention]`: the kernel."""

    backend: Literal["auto", "sdpa", "math", "efficient", "flash", "cudnn", "varlen", "flex", "documents", "cpu"] = (
        option("auto", "kernel of attention; auto: the best that device, dtype and model allow")
    )
    flash_impl: Literal["FA2", "FA3", "FA4"] = option(
        "FA2", "FlashAttention of flash and varlen: PyTorch's own (FA2), or an installed package's (FA3, FA4)"
    )


@register
class AttentionBackend(Technique):
    """Chooses the kernel of attention: SDPA's, FlashAttention of packed documents, flex_attention, or titan's own."""

    name = "attention"
    Config = Config
    config: Config
    phase = "convert"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._chosen = ""

    def check(self, job: Job, spec: ModelSpec) -> Iterable[str]:
        if not spec.attention:
            yield "the model names no attention in ModelSpec.attention; remove the table"
            return
        setting = setting_of(job, spec)
        yield from self._refused(setting)
        if setting.sliced and self.config.backend not in ("auto", "sdpa"):
            for why in job.stating("computes_attention"):
                yield f'backend = "{self.config.backend}" computes attention, but {why}, or backend = "auto"'

    def _refused(self, setting: Setting) -> Iterator[str]:
        backend = self.config.backend
        if backend != "auto":
            yield from unfit(backend, setting)
        if self.config.flash_impl != "FA2" and backend not in ("flash", "varlen"):
            yield (
                f'flash_impl = "{self.config.flash_impl}" is for backend = "flash" and "varlen", and backend is '
                f'"{backend}"; change one of them'
            )

    def no_effect(self, spec: ModelSpec) -> Iterable[str]:
        """SDPA is what runs anyway."""
        if self.config.backend == "sdpa":
            yield 'backend = "sdpa" has no effect: it is what runs without the technique'

    def spec(self, spec: ModelSpec) -> ModelSpec:
        """`math` writes the scores."""
        if self.config.backend != "math":
            return spec
        return replace(
            spec, layer_ops=tuple(_written(op) if isinstance(op, Attention) else op for op in spec.layer_ops)
        )

    def cost(self, costs: Costs, job: Job) -> Costs:
        """No mask, and no scores, where the kernel follows documents, window, slopes and soft cap itself."""
        setting = setting_of(job, job.spec)
        backend = self._decided(setting)[0]
        if BACKENDS[backend].masked:
            return costs
        compiled = backend == "flex"
        layer = tuple(_unmasked(op, compiled) if isinstance(op, Attention) else op for op in costs.layer)
        return replace(costs, layer=layer)

    def _decided(self, setting: Setting) -> tuple[Name, str]:
        """(backend, why)."""
        return best(setting) if self.config.backend == "auto" else (self.config.backend, "as the job says")

    def apply(self, part: ModelPart, context: BuildContext) -> None:
        """Give the attention of the whole model its operation.

        Raises:
            ConfigError: this device, or the packages here, do not have the backend.
                The model, or another technique, computes attention in another way already.
        """
        cores = [module for module in part.module.modules() if isinstance(module, AttentionCore)]
        setting = setting_of(context.job, context.spec, context.device)
        if refused := list(self._refused(setting)):
            raise _error(*refused)
        backend, why = self._decided(setting)
        if (taken := _taken(cores)) and self.config.backend == "auto":
            backend, why = "sdpa", f"as {taken}"
        elif taken and backend != "sdpa":
            raise _error(
                f'backend = "{backend}" replaces attention, but {taken}; set backend = "auto", or put '
                "[plugins.attention] before the table of a technique that calls the operation it replaces"
            )
        elif context.device.type == "cuda":
            backend, why = self._on_this_gpu(backend, why, setting, context)
        _log.info(f"attention: {backend}, {why}")
        self._chosen = backend
        if backend in ("varlen", "documents"):  # recomputation knows PyTorch's own
            part.costly.add(by_document.OPERATION)
        elif backend == "cpu":
            part.costly.add(torch.ops.titan.cpu_attention.default)
        for core in cores:
            self._give(core, backend)

    def _give(self, core: AttentionCore, backend: Name) -> None:
        if backend == "math":
            core.writes_scores = True
        elif backend != "sdpa":
            core.use(_operation(backend, core), self.name, follows=("window", "scale", "soft_cap", "slopes"))
            core.writes_scores = core.writes_scores and BACKENDS[backend].masked

    def _on_this_gpu(self, backend: Name, why: str, setting: Setting, context: BuildContext) -> tuple[Name, str]:
        """The backend once it has been tried."""
        if self.config.flash_impl != "FA2":
            _activate(self.config.flash_impl)
        if self.config.backend == "auto" and backend == "sdpa" and not kept_by(setting):
            newer = torch.cuda.get_device_capability(context.device) >= _HOPPER
            if newer and not any(unfit("cudnn", setting)) and not _failure("cudnn", setting, context):
                return "cudnn", "the fastest plain kernel of this GPU"
        failed = _failure(backend, setting, context)
        if failed and self.config.backend == "auto":
            return "sdpa", f"as {backend} does not work here: {failed}"
        if failed:
            raise _error(f'backend = "{backend}" does not work on this GPU ({failed}); set backend = "auto"')
        return backend, why

    def batch(self, batch: Batch) -> Batch:
        """Read where documents end before the step's work is queued, rather than in the midst of it."""
        documents = batch.documents
        if self._chosen in ("varlen", "documents") and documents is not None and documents.device.type != "meta":
            by_document.runs_of(documents)
        return batch


def _taken(cores: Sequence[AttentionCore]) -> str:
    """Who computes attention in another way already; empty: nobody."""
    if any(core.computes_its_own for core in cores):
        return "the model computes attention of its own"
    return "another technique has replaced it already" if any(core.operation is not None for core in cores) else ""


# --- on this machine --------------------------------------------------------------------------------------------------


def _activate(impl: str) -> None:
    """Another FlashAttention in place of PyTorch's, in this process."""
    from torch.nn import attention

    try:
        attention.activate_flash_attention_impl(impl)
    except (AttributeError, ImportError, RuntimeError, ValueError) as error:
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        raise _error(f'flash_impl = "{impl}" cannot be activated ({why}); install it, or set "FA2"') from None


def _failure(backend: Name, setting: Setting, context: BuildContext) -> str:
    """What goes wrong when a backend computes a little attention on this GPU, forward and backward; empty: nothing."""
    if backend in ("sdpa", "math"):
        return ""
    if backend == "flex":  # its kernel takes long to compile
        return "" if _has_triton(context.device) else "Triton is not installed, or not for this GPU"
    core, length = AttentionCore(), 128
    heads = max(1, context.spec.n_heads // max(1, context.spec.n_kv_heads)), 1
    q, k, v = (
        torch.ones(1, count, length, setting.head_dim, device=context.device, dtype=setting.dtype, requires_grad=True)
        for count in (heads[0], heads[1], heads[1])
    )
    places = torch.arange(length)[None]
    documents = copy_to(places // 64, context.device) if "documents" in setting.has or backend == "varlen" else None
    try:
        _operation(backend, core)(q, k, v, places.to(context.device), documents).sum().backward()
    except (RuntimeError, ValueError) as error:
        return str(error).splitlines()[0]
    return ""


def _has_triton(device: torch.device) -> bool:
    """Whether the language of compiled kernels is there, for a GPU that it has kernels for."""
    try:
        import_module("triton")
    except ImportError:
        return False
    return torch.cuda.get_device_capability(device) >= _VOLTA


def _error(*sentences: str) -> ConfigError:
    return ConfigError([ConfigIssue("[plugins.attention]", sentence) for sentence in sentences])


# --- operations and their costs -------------------------------------------------------------------------------------


def _operation(backend: Name, core: AttentionCore) -> AttentionOperation:
    """What a core computes by this backend, with the core as an argument that a pipeline can copy."""
    if backend == "flex":
        from .flex import attend_flex  # imports the compiler, which takes a second

        return partial(attend_flex, core)
    if backend in ("varlen", "documents"):
        return partial(by_document.attend_by_document, core)
    if backend == "cpu":
        return partial(_by_cpu_kernel, own_kernel().cpu_attention, core)
    return partial(_restricted, _RESTRICTED[backend], core)


def _by_cpu_kernel(
    kernel: Callable[..., Tensor],
    core: AttentionCore,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    documents: Tensor | None = None,
) -> Tensor:
    if q.device.type == "meta":
        return by_document.attend_by_document(core, q, k, v, positions, documents)
    window = core.window if 0 < core.window < q.shape[2] else 0
    return kernel(q, k, v, scale=core.scale, window=window, documents=documents)


def _restricted(
    kernel: SDPBackend,
    core: AttentionCore,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    documents: Tensor | None = None,
) -> Tensor:
    """The restriction is part of the operation, so that what is recomputed in backward has it too."""
    with sdpa_kernel(kernel):
        return core.attend(q, k, v, positions, documents)


def _written(op: Attention) -> Attention:
    fresh = attention_cost(op.heads, op.kv_heads, op.head_dim, scores_written=True, soft_cap=op.soft_cap)
    return replace(op, scores_written=True, saved=fresh.saved, scratch=fresh.scratch)


def _unmasked(op: Attention, compiled: bool) -> Attention:
    """Attention that makes neither a mask nor scores; what it saves is q, k, v, the output and its statistics."""
    saved = op.saved
    if op.soft_cap:
        saved = attention_cost(op.heads, op.kv_heads, op.head_dim).saved
    return replace(
        op,
        skips=True,
        documents=False,
        biased=False,
        soft_cap=False,
        scores_written=False,
        compiled=compiled,
        scratch=(),
        saved=saved,
    )
