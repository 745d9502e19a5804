"""Faults of models, precision, recomputation and text generation."""

from tests.faults.fault import Fault

MODELS = "tests/unit/test_models.py"
RECOMPUTED = "tests/unit/test_dryrun.py::test_every_second_block_is_recomputed_and_selective_mode_repeats_no_product"
FLOAT8 = "tests/unit/test_float8.py"

FAULTS = (
    Fault(
        "attention that sees the next token of its document",
        "titan/contracts/layers/attention.py",
        "return same.tril_()",
        "return same.tril_(1)",
        (f"{MODELS}::test_later_tokens_do_not_reach_earlier_logits",),
    ),
    Fault(
        "attention that sees other documents",
        "titan/contracts/layers/attention.py",
        "same = documents[:, None, :, None] == documents[:, None, None, :]",
        "same = documents[:, None, :, None] >= documents[:, None, None, :]",
        (f"{MODELS}::test_packed_documents_equal_documents_alone",),
    ),
    Fault(
        "query heads that look at another group's keys under a document mask",
        "titan/contracts/layers/attention.py",
        "t.repeat_interleave(group, dim=1)",
        "t.repeat(1, group, 1, 1)",
        (f"{MODELS}::test_grouped_heads_equal_repeated_heads",),
    ),
    Fault(
        "attention with another scale of its scores",
        "titan/contracts/layers/attention.py",
        "is_causal=mask is None, scale=scale, enable_gqa=grouped",
        "is_causal=mask is None, scale=1.01 * q.shape[-1] ** -0.5, enable_gqa=grouped",
        ("tests/dist/test_transformers.py::test_same_curve[llama-one rank]",),
    ),
    Fault(
        "slopes of the model's first heads on each rank that has a share of the heads",
        "titan/contracts/layers/attention.py",
        "self.slopes[self.first_head : self.first_head + heads]",
        "self.slopes[:heads]",
        ("tests/unit/test_attention.py::test_attention_is_its_definition[slopes-4-]",),
    ),
    Fault(
        "scores with a soft cap after their mask, which then hides nothing",
        "titan/contracts/layers/attention.py",
        "    return (scores.softmax(-1)",
        "    scores = scores.tanh() * soft_cap if soft_cap else scores\n    return (scores.softmax(-1)",
        ("tests/unit/test_attention.py::test_attention_is_its_definition[soft cap-4-]",),
    ),
    Fault(
        "cached keys without the slopes of their distances",
        "titan/contracts/layers/cache.py",
        "            if slopes:\n",
        "            if slopes and self._first:\n",
        ("tests/unit/test_attention.py::test_attention_with_a_cache_is_that_of_the_whole_rows[slopes-4]",),
    ),
    Fault(
        "biases taken for matrices, which decay",
        "titan/contracts/base/spec.py",
        '"vector" if ndim < 2 else',
        '"vector" if ndim < 2 and not name.endswith("bias") else',
        ("tests/unit/test_parameters.py::test_without_styles_places_tell_the_kind[output.bias-1-vector]",),
    ),
    Fault(
        "rotary positions off by a factor",
        "titan/contracts/layers/rotary.py",
        "positions[..., None].float()",
        "(positions[..., None] + 1).float() * 2",
        ("tests/unit/test_rope.py::test_rope_turns_pairs_like_complex_numbers",),
    ),
    Fault(
        "a share of a head's features rotated at the frequencies of the whole head",
        "titan/contracts/layers/rotary.py",
        "dtype=torch.float32, device=device) / n)",
        "dtype=torch.float32, device=device) / rotary.head_dim)",
        ("tests/unit/test_rope.py::test_the_first_features_of_a_head_turn_alone",),
    ),
    Fault(
        "rotary angles in bfloat16",
        "titan/contracts/layers/rotary.py",
        "cos, sin = rope[..., : x.shape[1], None, :]",
        "cos, sin = rope[..., : x.shape[1], None, :].to(x.dtype)",
        ("tests/unit/test_rope.py::test_rope_turns_bfloat16_in_float32",),
    ),
    Fault(
        "low rotary frequencies that are not stretched",
        "titan/contracts/layers/rotary.py",
        "(kept + (1 - kept) / rotary.scaling_factor)",
        "(kept + (1 - kept))",
        ("tests/unit/test_rope.py::test_rope_scaling_is_llama_3_1s",),
    ),
    Fault(
        "residual projections initialized as wide as the others",
        "titan/contracts/layers/decoder.py",
        "normal(c.init_std / math.sqrt(2 * c.n_layers))",
        "normal(c.init_std)",
        (f"{MODELS}::test_initial_values",),
    ),
    Fault(
        "a float32 master copy lost under bf16",
        "titan/training/phases.py",
        "part.module.to_empty(device=context.device)",
        "part.module.to(context.precision.param_dtype).to_empty(device=context.device)",
        ("tests/dist/test_bf16.py::test_weights_and_optimizer_state_stay_float32",),
    ),
    Fault(
        "bf16 gradients summed in bf16",
        "plugins/precision/bf16.py",
        "reduce_dtype=torch.float32",
        "reduce_dtype=torch.bfloat16",
        ("tests/dist/test_pipeline.py::test_bf16_gradients_are_summed_in_fp32_by_every_schedule[dp_shard]",),
    ),
    Fault(
        "float8 in the head",
        "plugins/precision/float8.py",
        "isinstance(module, nn.Linear) and name.startswith(layers) and",
        "isinstance(module, nn.Linear) and",
        (f"{FLOAT8}::test_the_linears_of_layers_are_converted_and_nothing_is_renamed",),
    ),
    Fault(
        "float8's filter ignored",
        "plugins/precision/float8.py",
        "return even and not any(glob_matches(glob, name) for glob in self.config.filter)",
        "return even",
        (f"{FLOAT8}::test_what_the_filter_names_and_what_is_uneven_stays",),
    ),
    Fault(
        "every block recomputed where every n-th was asked for",
        "plugins/memory/activation_checkpoint.py",
        "[2]) % stride == 0",
        "[2]) % 1 == 0",
        (RECOMPUTED,),
    ),
    Fault(
        "attention recomputed by selective recomputation",
        "plugins/memory/activation_checkpoint.py",
        "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,",
        "",
        (RECOMPUTED,),
    ),
    Fault(
        "a token that does not see itself in the key-value cache",
        "titan/contracts/layers/cache.py",
        "if window else there <= own",
        "if window else there < own",
        ("tests/unit/test_generation.py::test_logits_with_a_cache_are_those_of_the_whole_text",),
    ),
)
