"""The list of measurements, in the order in which a part takes them; seconds are estimates for one H100."""

from bench.gpu import kernels, parity, speed, steps, survival, turns
from bench.gpu.records import Measurement

MEASUREMENTS = (
    Measurement("generators", 1, 5, "does attention without dropout draw random numbers?", kernels.generators),
    Measurement("parity", 1, 120, "fp32 against the CPU's curve: largest relative difference", parity.fp32),
    Measurement("parity-bf16", 1, 30, "bf16 against the fp32 curve: largest relative difference", parity.bf16),
    Measurement("recompute", 1, 90, "1B with recomputation", speed.recompute),
    Measurement("parity-float8", 1, 90, "float8 against the fp32 curve: largest relative difference", parity.float8),
    Measurement("parity-fp16", 1, 30, "fp16 against the fp32 curve: largest relative difference", parity.fp16),
    Measurement("resume", 1, 30, "a run in two pieces against one in one piece, to the bit", survival.resume),
    Measurement("sigterm", 1, 30, "SIGTERM, and the same command again", survival.sigterm),
    Measurement("nan", 1, 30, "a NaN in a gradient", survival.nan),
    Measurement("waits", 1, 30, "does the host wait for the device between rows of metrics?", steps.no_waiting),
    Measurement("rates", 2, 60, "products, attention, copies, launches, as in titan doctor", kernels.rates),
    Measurement("attention", 2, 40, "attention backends at 8,192 tokens, grouped heads", kernels.attention),
    Measurement("loss", 2, 20, "the loss alone at 8,192 x 128,256", kernels.loss),
    Measurement("passes", 2, 10, "the passes over logits at 8,192 x 128,256", kernels.passes),
    Measurement("fused-loss", 2, 20, "head and loss at 8,192 x 2,048 x 128,256", kernels.fused_loss),
    Measurement("head", 2, 60, "the head alone in bf16 and float8", kernels.head),
    Measurement("profile", 2, 60, "three steps of 1B: idle share and top kernels", steps.profiled),
    Measurement("garbage", 2, 45, "collection of garbage beside a run", steps.garbage),
    Measurement("saves", 2, 120, "saves in the background, and a load", speed.saves),
    Measurement("loader", 2, 40, "the loader's tokens/s beside those of training 1B", speed.loader),
    Measurement("1B", 3, 45, "Llama 3.2 1B, untied, at 8,192 tokens", speed.b1),
    Measurement("turns-1B", 3, 150, "1B in turns with torchtitan", turns.b1),
    Measurement("turns-3B", 3, 200, "3B in turns with torchtitan", turns.b3),
    Measurement("float8", 3, 110, "1B with layers in float8, the head in bf16", speed.float8),
    Measurement("packed", 4, 90, "1B with attention within documents, with a mask and without", speed.packed),
    Measurement("float8-3B", 4, 200, "3B in bf16 and with layers in float8", speed.float8_3b),
    Measurement("memory", 4, 240, "1B with less on the device: state, weights, activations, gradients", speed.memory),
)
