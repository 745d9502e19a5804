"""The list of measurements, in the order in which a call takes them; seconds are estimates for one H100.

Call a shows on a first visit whether titan runs there and how fast, call b compares it with torchtitan and with the
CPU, call c is the rest.
"""

from bench.gpu import kernels, parity, steps, suite, survival
from bench.gpu.records import Measurement
from bench.gpu.speed import compiled, loader, saves, speeds
from bench.gpu.steps import profiled
from bench.gpu.turns import turns

CALLS = ("a", "b", "c")
FLOAT8 = ("8B's shape, float8 tensorwise", "8B's shape, float8 rowwise", "1B, float8 tensorwise", "1B, float8 rowwise")
PACKED = "1B, documents, varlen", "1B, documents, a mask"
COMPILED = "1B", "1B at 2,048 tokens", "8B's shape", "3B, selective recomputation", *FLOAT8, *PACKED, "experts"

MEASUREMENTS = (
    Measurement("generators", "a", 10, "does attention without dropout draw random numbers?", kernels.generators),
    Measurement("speed-1B", "a", 30, "Llama 3.2 1B, untied, at 8,192 tokens, bf16, compiled", speeds("1B")),
    Measurement("profile", "a", 20, "three steps of 1B: idle share and top kernels", profiled("1B")),
    Measurement("waits", "a", 25, "does the host wait for the device between rows of metrics?", steps.no_waiting),
    Measurement("resume", "b", 10, "a run in two pieces against one in one piece, to the bit", survival.resume),
    Measurement("sigterm", "b", 10, "SIGTERM, and the same command again", survival.sigterm),
    Measurement("nan", "b", 10, "a NaN in a gradient", survival.nan),
    Measurement("parity", "b", 50, "fp32 against the CPU's curve: largest relative difference", parity.fp32),
    Measurement("parity-bf16", "b", 20, "bf16 against the fp32 curve: largest relative difference", parity.bf16),
    Measurement("attention", "b", 10, "attention backends at 8,192 tokens, grouped heads", kernels.attention),
    Measurement("rates", "b", 20, "products, attention, copies, launches, as in titan doctor", kernels.rates),
    Measurement("experts", "b", 10, "experts in bf16, one without tokens", kernels.experts),
    Measurement("fused-loss", "b", 10, "head and loss at 8,192 x 2,048 x 128,256", kernels.fused_loss),
    Measurement("caches", "b", 60, "the first step of one layer of each job, not compiled before", compiled(*COMPILED)),
    Measurement("turns-1B", "b", 75, "1B in turns with torchtitan", turns("1B", 1)),
    Measurement("turns-8B", "b", 65, "8 layers of 8B in turns with torchtitan", turns("8B's shape", 1)),
    Measurement("float8", "b", 180, "layers in float8, the head in bf16", speeds(*FLOAT8)),
    Measurement("profile-8B", "b", 20, "three steps of 8 layers of 8B", profiled("8B's shape")),
    Measurement(
        "turns-3B",
        "b",
        85,
        "3B with selective recomputation in turns with torchtitan",
        turns("3B, selective recomputation", 1),
    ),
    Measurement("packed", "b", 30, "1B with attention within documents", speeds(*PACKED)),
    Measurement("speed-1B-more", "b", 35, "1B otherwise", speeds("1B, 4 micro batches", "1B at 2,048 tokens")),
    Measurement("speed-8B-more", "b", 25, "8 layers of 8B otherwise", speeds("8B's shape, 4 micro batches")),
    Measurement("speed-3B-more", "b", 25, "3B otherwise", speeds("3B, selective, 4 micro batches")),
    Measurement("speed-experts", "b", 40, "4 layers of Qwen 3 30B A3B", speeds("experts")),
    Measurement("tests", "c", 95, "pytest -m gpu", suite.gpu_tests),
    Measurement("profile-3B", "c", 20, "three steps of 3B", profiled("3B, selective recomputation")),
    Measurement("passes", "c", 10, "the passes over logits at 8,192 x 128,256", kernels.passes),
    Measurement("loss", "c", 10, "the loss alone at 8,192 x 128,256", kernels.loss),
    Measurement("head", "c", 30, "the head alone in bf16 and float8", kernels.head),
    Measurement("saves", "c", 110, "saves in the background, and a load", saves),
    Measurement("parity-float8", "c", 40, "float8 against the fp32 curve: largest relative difference", parity.float8),
    Measurement("parity-fp16", "c", 20, "fp16 against the fp32 curve: largest relative difference", parity.fp16),
    Measurement("loader", "c", 30, "the loader's tokens/s beside those of training 1B", loader),
    Measurement("garbage", "c", 25, "collection of garbage beside a run", steps.garbage),
    Measurement(
        "recompute",
        "c",
        50,
        "1B with recomputation, and not compiled",
        speeds("1B, selective recomputation", "1B, full recomputation", "1B, not compiled"),
    ),
    Measurement(
        "memory",
        "c",
        105,
        "1B with less on the device",
        speeds(
            "1B, optimizer on the host",
            "1B, activations on the host",
            "1B, 8-bit state",
            "1B, updates in backward",
            "1B, pure bf16",
        ),
    ),
    Measurement(
        "memory-8B",
        "c",
        80,
        "one rank of eight that train 8B, the others faked",
        speeds("8B, dp_shard 8, 7 ranks faked", "8B, dp_shard 4, tp 2, 7 ranks faked"),
    ),
    Measurement("profile-bf16", "c", 35, "three steps of 1B in pure bf16", profiled("1B, pure bf16")),
    Measurement(
        "profile-ranks", "c", 40, "three steps of one rank of eight", profiled("8B, dp_shard 8, 7 ranks faked")
    ),
    Measurement(
        "profile-more",
        "c",
        130,
        "three steps of each job that takes longer than planned",
        profiled("1B at 2,048 tokens", "8B's shape, float8 tensorwise", "1B, 8-bit state", "1B, optimizer on the host"),
    ),
)
