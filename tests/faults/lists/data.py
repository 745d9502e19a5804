"""Faults of the data: order, packing, mixture, the cursor, and agreement between ranks."""

from titan.testing.faults import Fault

SAMPLES = "tests/unit/test_data_samples.py"
ORDER = "tests/unit/test_data_order.py"

FAULTS = (
    Fault(
        "a data cursor that is not restored",
        "titan/training/build.py",
        'int(rest.get("data", {}).get("samples", 0))',
        "0",
        ("tests/dist/test_resume.py::test_on_the_same_layout_bit_for_bit[-]",),
    ),
    Fault(
        "a loader that skips a step on resume",
        "titan/data/samples/loader.py",
        '{"samples": self._next,',
        '{"samples": self._next + self._numbers.global_batch,',
        (f"{SAMPLES}::test_going_on_equals_never_having_stopped",),
    ),
    Fault(
        "a computation that does not wait for its batch",
        "titan/data/samples/loader.py",
        "computing.wait_stream(self._stream)",
        "assert computing",
        (f"{SAMPLES}::test_a_gpu_copies_batches_beside_what_it_computes",),
    ),
    Fault(
        "memory of a batch given away while it is computed with",
        "titan/data/samples/loader.py",
        "if column is not None:",
        "if column is None:",
        (f"{SAMPLES}::test_a_gpu_copies_batches_beside_what_it_computes",),
    ),
    Fault(
        "ranks that read the same samples",
        "titan/data/samples/loader.py",
        "start = first + self.index * own",
        "start = first",
        (f"{SAMPLES}::test_ranks_share_one_order",),
    ),
    Fault(
        "an order of samples that differs between ranks",
        "titan/data/samples/loader.py",
        "return range(start, start + own, self.micro_batch)",
        "return range(start, start + own, self.micro_batch)[:: -1 if self.index else 1]",
        (f"{SAMPLES}::test_ranks_share_one_order",),
    ),
    Fault(
        "a loader that advances the random state",
        "titan/data/samples/loader.py",
        "generator=torch.Generator(),",
        "generator=None,",
        (f"{SAMPLES}::test_the_loader_leaves_the_random_state_alone",),
    ),
    Fault(
        "the seed of the shuffle ignored",
        "titan/data/samples/samples.py",
        "key=mix(self._seed, source)",
        "key=mix(0, source)",
        (f"{SAMPLES}::test_the_seed_chooses_the_order",),
    ),
    Fault(
        "the same order in every epoch",
        "titan/data/samples/order.py",
        "permute(position, n, mix(key, epoch))",
        "permute(position, n, key)",
        (f"{SAMPLES}::test_shuffled_epochs_take_each_sample_once",),
    ),
    Fault(
        "samples drawn with replacement",
        "titan/data/samples/order.py",
        "i = high << low | rest",
        "i = (high << low | rest) % n",
        (f"{ORDER}::test_permute_is_a_bijection",),
    ),
    Fault(
        "weights of a mixture ignored",
        "titan/data/samples/samples.py",
        "Mixture([weight for _, weight in sources],",
        "Mixture([1.0 for _, weight in sources],",
        (f"{SAMPLES}::test_sources_are_mixed_by_weight",),
    ),
    Fault(
        "labels that are the tokens themselves",
        "titan/data/samples/samples.py",
        "tokens, labels = ids[:-1], ids[1:].copy()",
        "tokens, labels = ids[:-1], ids[:-1].copy()",
        (f"{SAMPLES}::test_concatenated_windows_meet_without_gap",),
    ),
    Fault(
        "ends of documents off by one",
        "titan/data/samples/samples.py",
        'np.arange(self._length), side="right")',
        'np.arange(self._length), side="left")',
        (f"{SAMPLES}::test_document_mask_numbers_documents_and_hides_what_follows_one",),
    ),
    Fault(
        "a label across the end of a document",
        "titan/data/samples/samples.py",
        "labels[ends - 1] = IGNORE",
        "pass",
        (f"{SAMPLES}::test_document_mask_numbers_documents_and_hides_what_follows_one",),
    ),
    Fault(
        "nodes with different samples that train all the same",
        "titan/data/tokens/prepare.py",
        "if [shard.digest for shard in own] != [shard.digest for shard in found]:",
        "if False:",
        ("tests/dist/test_shard_opens.py::test_nodes_that_find_other_samples_do_not_train",),
    ),
    Fault(
        "a shard that was replaced after its header was read",
        "titan/data/tokens/shards.py",
        "        if found != self:",
        "        if False:",
        ("tests/unit/test_data_shards.py::test_a_shard_that_is_no_longer_what_its_header_said_is_not_mapped",),
    ),
    Fault(
        "a token beyond the vocabulary accepted",
        "titan/data/samples/stream.py",
        "if ids.size and ids.max() >= self._vocab_size:",
        "if False:",
        ("tests/unit/test_data_shards.py::test_stream_names_an_id_beyond_the_vocabulary",),
    ),
    Fault(
        "the end of a padded document counted as a token",
        "titan/data/samples/samples.py",
        "length=known",
        "length=known + 1",
        ("tests/unit/test_data_samples.py::test_pad_gives_a_document_a_sample_and_cuts_long_ones",),
    ),
)
